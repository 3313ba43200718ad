"""Buckets of parameters, the homes of their training state, and groups of activations with their treatment."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

from elixir_compile.base.codec import LEFT_OUT
from elixir_compile.base.errors import InvalidPlan
from elixir_compile.base.units import format_bytes
from elixir_compile.ir.kinds import BucketId, GroupId, Kind, Saving, StorageId, Tier, commented, word, words

STATE_DTYPES = ("bfloat16", "int8")
"""The dtypes of moments that are narrower than fp32, from the most exact on."""
MIXED_DTYPE = "uint8"
"""The dtype of a bucket of frozen parameters whose dtypes differ: its elements are their bytes."""
NUM_WHOLE_ROOMS = 2
"""Rooms on the device for parameters that are updated whole, one after another, with their state."""
_REDUCED_BYTES = {"float32": 4}
"""The dtypes that may be a `reduce_dtype`, with their bytes per element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeUpdate:
    """What the update of a parameter takes, or those of all parameters of a bucket, if each reads its whole tensor."""

    flops: tuple[tuple[str, int], ...]
    """Floating-point operations of products and factorisations of matrices, by the dtype in which these are: Muon
    multiplies in bfloat16, whatever the dtype of the parameter."""
    moved_bytes: int
    """Bytes that the ops of the update read and write in the memory beside which it runs."""
    num_kernels: int
    most_nbytes: int
    """Bytes of the largest parameter."""
    most_state_nbytes: int
    """Bytes of the largest state of a parameter."""
    work_nbytes: int = field(default=0, metadata=LEFT_OUT)
    """The most bytes that the update of a parameter holds beside weight, gradient and state, at once: in the memory
    beside which it runs."""
    works_on_device: bool = field(default=False, metadata=LEFT_OUT)
    """Whether the work space is memory of the device wherever the update runs, because the device is a CPU."""
    state_nbytes: int = field(default=0, metadata=LEFT_OUT)
    """Bytes of the state of the parameters that a rank owns; 0 for a parameter and a bucket, which have their own."""

    @classmethod
    def of_all(cls, each: Sequence["WholeUpdate"]) -> "WholeUpdate":
        """Return what the updates of `each` take one after another."""
        flops: Counter[str] = Counter()
        for one in each:
            flops.update(dict(one.flops))
        return cls(
            flops=tuple(sorted(flops.items())),
            moved_bytes=sum(one.moved_bytes for one in each),
            num_kernels=sum(one.num_kernels for one in each),
            most_nbytes=max((one.most_nbytes for one in each), default=0),
            most_state_nbytes=max((one.most_state_nbytes for one in each), default=0),
            state_nbytes=sum(one.state_nbytes for one in each),
            work_nbytes=max((one.work_nbytes for one in each), default=0),
            works_on_device=any(one.works_on_device for one in each),
        )

    @property
    def total_flops(self) -> int:
        """Floating-point operations in all dtypes."""
        return sum(flops for _, flops in self.flops)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockUpdate:
    """What the update of a parameter takes, or those of a bucket, if its elements are updated block by block in fp32
    scratch tensors, on the host too: `optim.masters`."""

    work_nbytes: int = field(default=0, metadata=LEFT_OUT)
    """Bytes of these tensors, in the memory beside which the update runs; 0 without masters, for bf16 statistics."""
    works_on_device: bool = field(default=False, metadata=LEFT_OUT)
    """Whether they are memory of the device wherever the update runs, because the device is a CPU."""

    @classmethod
    def of_all(cls, each: Sequence["BlockUpdate"]) -> "BlockUpdate":
        """Return what the updates of `each` take one after another."""
        return cls(
            work_nbytes=max(one.work_nbytes for one in each),
            works_on_device=any(one.works_on_device for one in each),
        )


def _runs(numels: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield each of `numels` that differs from the one before it, and how many equal ones there are in a row."""
    return ((numel, len(list(run))) for numel, run in itertools.groupby(numels))


@dataclass(frozen=True, slots=True)
class Shards(Sequence[int]):
    """The elements that each rank of a group owns of something, by rank.

    Equal numbers in a row are held as one run, so 16,384 ranks with equal shards take no more memory, time and room in
    a file than two.
    """

    runs: tuple[tuple[int, int], ...] = ()
    """The elements of each rank of a run, and the number of its ranks. Neighbours differ in elements."""

    def __post_init__(self) -> None:
        if any(numel < 0 or count < 1 for numel, count in self.runs):
            raise InvalidPlan(f"shards {self} have a negative size, or a run of no rank.")
        if any(this == following for (this, _), (following, _) in itertools.pairwise(self.runs)):
            raise InvalidPlan(f"shards {self} have equal runs beside each other; expected one of all their ranks.")

    @classmethod
    def of(cls, numels: Iterable[int]) -> "Shards":
        """Return the shards of `numels`, a number of elements for each rank."""
        return cls(tuple(_runs(numels)))

    @classmethod
    def equal(cls, numel: int, num_ranks: int) -> "Shards":
        """Return shards of `numel` elements on each of `num_ranks` ranks."""
        return cls(((numel, num_ranks),))

    @classmethod
    def added(cls, each: Iterable["Shards"]) -> "Shards":
        """Return the sums of `each`, which are of the same ranks, rank by rank. Raises ValueError if they are not."""
        steps: Counter[int] = Counter()
        nums = set[int]()
        for shards in each:
            rank = before = 0
            for numel, count in shards.runs:
                steps[rank] += numel - before
                rank, before = rank + count, numel
            nums.add(rank)
        if len(nums) != 1:
            raise ValueError(f"cannot add shards of {', '.join(map(str, sorted(nums))) or 'no'} ranks")
        firsts = sorted(rank for rank, step in steps.items() if step or rank == 0)
        sums = itertools.accumulate(steps[rank] for rank in firsts)
        counts = (following - rank for rank, following in itertools.pairwise((*firsts, *nums)))
        return cls(tuple(zip(sums, counts, strict=True)))

    def __len__(self) -> int:
        return sum(count for _, count in self.runs)

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(itertools.repeat(numel, count) for numel, count in self.runs)

    @overload
    def __getitem__(self, rank: int) -> int: ...
    @overload
    def __getitem__(self, rank: slice) -> tuple[int, ...]: ...
    def __getitem__(self, rank: int | slice) -> int | tuple[int, ...]:
        if isinstance(rank, slice):
            return tuple(self)[rank]
        left = rank if rank >= 0 else rank + len(self)
        for numel, count in self.runs if left >= 0 else ():
            if left < count:
                return numel
            left -= count
        raise IndexError(f"rank {rank} of shards of {len(self)} ranks")

    def __str__(self) -> str:
        """Return the numbers as text, three or more equal ones as `128 x 1021`."""
        return " ".join(
            f"{numel} x {count}" if count > 2 else " ".join([str(numel)] * count) for numel, count in self.runs
        )

    @property
    def most(self) -> int:
        """The elements of a rank that owns the most; 0 if there is no rank."""
        return max((numel for numel, _ in self.runs), default=0)

    @property
    def total(self) -> int:
        """The elements of all ranks."""
        return sum(numel * count for numel, count in self.runs)

    def are_all(self, numel: int) -> bool:
        """Return whether each rank owns `numel` elements."""
        return all(own == numel for own, _ in self.runs)


def with_runs(data: Any) -> None:
    """Turn every `shard_numels` in `data`, the parsed JSON of a plan of format 7 or a question of format 2, from a list
    of numbers into that of `Shards`. What is not a list of numbers stays, so that the reader refuses it."""
    todo = [data]
    while todo:
        record = todo.pop()
        if isinstance(record, dict):
            numels = record.get("shard_numels")
            if isinstance(numels, list) and all(type(numel) is int for numel in numels):
                record["shard_numels"] = {"runs": [list(run) for run in _runs(numels)]}
            todo += record.values()
        elif isinstance(record, list):
            todo += record


@dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """What a plan depends on of one parameter, beside its storage in the graph."""

    is_trained: bool = field(default=False, metadata=LEFT_OUT)
    numel: int = field(default=0, metadata=LEFT_OUT)
    """Elements of a trained parameter; 0 if nobody asks for them."""
    has_master: bool = field(default=False, metadata=LEFT_OUT)
    """Whether an optimizer keeps its value in fp32 too."""
    group: int = field(default=0, metadata=LEFT_OUT)
    """Index of the optimizer's param group, counted over all optimizers; 0 if no optimizer owns it yet."""
    state_nbytes: int = field(default=0, metadata=LEFT_OUT)
    """Bytes of optimizer state, over all ranks."""
    state_dtype: str | None = field(default=None, metadata=LEFT_OUT)
    """The dtype of the optimizer's moments if they are narrower than fp32: one of `STATE_DTYPES`."""
    narrower_nbytes: tuple[tuple[str, int], ...] = field(default=(), metadata=LEFT_OUT)
    """The dtypes of narrower moments that a plan may choose, each with the bytes of state under it."""
    whole_update: WholeUpdate | None = field(default=None, metadata=LEFT_OUT)
    """What its update takes if it reads the whole tensor; None if each element is updated by itself."""
    block_update: BlockUpdate | None = field(default=None, metadata=LEFT_OUT)
    """What its update takes if its elements are updated block by block in fp32; None if not."""
    grad_nbytes: int = field(default=0, metadata=LEFT_OUT)
    """Bytes of the gradient after its reduce, over all ranks; 0 if nobody asks for them."""
    sum_nbytes: int = field(default=0, metadata=LEFT_OUT)
    """Bytes of the sum of the gradients of several backward passes, if it stays beside the gradient of a single pass;
    over all ranks."""
    reduce_dtype: str | None = field(default=None, metadata=LEFT_OUT)
    """The dtype in which several ranks reduce the gradient, if it is wider than the parameter's."""
    shard_numels: Shards = field(default=Shards(), metadata=LEFT_OUT)
    """Elements on each rank of a group, of which the first has the most unless `is_uneven`. If the parameter is not
    sharded, each rank has all elements; if this is empty, it is cut evenly."""
    is_uneven: bool = field(default=False, metadata=LEFT_OUT)
    """Whether the ranks own parts of any sizes, or one of them owns it whole."""
    in_file: bool = field(default=False, metadata=LEFT_OUT)
    """Whether the memory of a frozen parameter maps a file, as that of the checkpoint that it was loaded from. Then it
    can be read from there, and takes no memory of the host; `runtime.disk_params` compares its bits with the file."""

    def works_as(self, *, is_cpu: bool) -> "Param":
        """Return the parameter with the work space of its update on the device always if the device `is_cpu`."""
        if self.whole_update is not None:
            return replace(self, whole_update=replace(self.whole_update, works_on_device=is_cpu))
        if self.block_update is not None:
            return replace(self, block_update=replace(self.block_update, works_on_device=is_cpu))
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters that are gathered, released, reduced and updated together, in a contiguous buffer.

    It has more than 15 fields, because a plan file holds a bucket as one record.
    """

    id: BucketId
    params: tuple[StorageId, ...]
    """PARAM storages in the order of their first use."""
    numel: int
    nbytes: int
    """Bytes of the whole parameters, before sharding."""
    state_nbytes: int
    """Bytes of optimizer state of the whole parameters: 0 if they are frozen, twice `nbytes` for Adam."""
    dtype: str
    """The dtype of all parameters; `MIXED_DTYPE` if those of frozen parameters differ."""
    trainable: bool
    shard_numels: Shards
    """Number of elements that each rank owns, by rank. Unless `is_ragged`, the flat shard of every rank is padded to
    the largest of them."""
    sum_nbytes: int = 0
    """Bytes of the sums of gradients over several backward passes, over all ranks, which stay beside the gradients of a
    single pass: four per element if a single rank sums in fp32, else the bytes of reduced gradients if gradients
    accumulate, else 0."""
    group: int = 0
    """Index of the optimizer's param group, counted over all optimizers."""
    reduce_dtype: str | None = None
    """The dtype in which several ranks reduce gradients and keep them; None for the dtype of the parameters."""
    state_dtype: str | None = field(default=None, metadata=LEFT_OUT)
    """The dtype of the optimizer's moments if they are narrower than fp32: `bfloat16`, or `int8` with a scale for each
    block of values, which `state_nbytes` includes."""
    whole_update: WholeUpdate | None = field(default=None, metadata=LEFT_OUT)
    """What the updates of its parameters take if each reads a whole tensor; None if each element is updated alone."""
    block_update: BlockUpdate | None = field(default=None, metadata=LEFT_OUT)
    """What updates of elements block by block in fp32 take; None if elements are not updated so."""
    owned_updates: tuple[WholeUpdate, ...] = field(default=(), metadata=LEFT_OUT)
    """By rank, what the updates of the parameters take that it owns whole; empty if each rank updates all of them."""
    is_ragged: bool = field(default=False, metadata=LEFT_OUT)
    """If True, the flat buffer has the shards of all ranks one after another without padding."""
    rank: int = field(default=0, compare=False, repr=False, metadata=LEFT_OUT)
    """The rank whose shard counts as this rank's; 0 if shards are equal. Not compared: the bucket is that of all
    ranks."""

    def __post_init__(self) -> None:
        if min(self.numel, self.nbytes, self.state_nbytes, self.sum_nbytes, self.group) < 0:
            raise InvalidPlan(f"bucket {self.id} has a negative size or group.")
        if not 0 <= self.rank < len(self.shard_numels):
            raise InvalidPlan(f"bucket {self.id} is of rank {self.rank}, but has {len(self.shard_numels)} shards.")
        if len(set(self.params)) != len(self.params):
            raise InvalidPlan(f"bucket {self.id} lists a parameter twice.")
        if self.state_nbytes and not self.trainable:
            raise InvalidPlan(f"bucket {self.id} is frozen, yet has {self.state_nbytes} bytes of optimizer state.")
        if self.owned_updates and (len(self.owned_updates) != len(self.shard_numels) or self.whole_update is None):
            raise InvalidPlan(
                f"bucket {self.id} has updates of {len(self.owned_updates)} ranks for {len(self.shard_numels)} shards; "
                "expected one for each shard, of parameters that are updated whole."
            )
        if self.state_dtype is not None and (self.state_dtype not in STATE_DTYPES or not self.state_nbytes):
            raise InvalidPlan(
                f"bucket {self.id} has moments in {self.state_dtype} and {self.state_nbytes} bytes of optimizer state; "
                f"expected {', '.join(STATE_DTYPES)}, and state."
            )
        reduced_bytes = _REDUCED_BYTES.get(self.reduce_dtype or "", 0) * self.numel
        if self.reduce_dtype is not None and reduced_bytes <= self.nbytes:
            raise InvalidPlan(
                f"bucket {self.id} reduces gradients of {self.dtype} in {self.reduce_dtype}; expected "
                f"{' or '.join(_REDUCED_BYTES)}, for gradients of a narrower dtype."
            )

    def may_hold(self, dtype: str) -> bool:
        """Return whether a parameter of `dtype` may be in the bucket."""
        return dtype == self.dtype or (self.dtype == MIXED_DTYPE and not self.trainable)

    @property
    def is_sharded(self) -> bool:
        """True if each rank owns a shard of the bucket, so that every use gathers it; False if each rank owns all of
        it."""
        return not self.shard_numels.are_all(self.numel)

    def is_gathered_from(self, param: Tier) -> bool:
        """Return whether uses read a gathered copy if the parameters are at home in the memory `param`."""
        return param is not Tier.DEVICE or self.is_sharded

    @property
    def shards_text(self) -> str:
        """`shard_numels` as text, and `ragged` behind them if the bucket is."""
        return f"{self.shard_numels} ragged" if self.is_ragged else str(self.shard_numels)

    @property
    def flat_nbytes(self) -> int:
        """Bytes of the flat buffer of a gather: the shards of all ranks, padded unless `is_ragged`; `nbytes` if the
        bucket is not sharded."""
        if not self.is_sharded or self.is_ragged:
            return self.nbytes
        return self.nbytes * len(self.shard_numels) * self.shard_numels.most // max(self.numel, 1)

    @property
    def flat_shard_nbytes(self) -> int:
        """Bytes that this rank contributes to the flat buffer, including padding."""
        return self.shard_nbytes() if self.is_ragged else self.flat_nbytes // len(self.shard_numels)

    @property
    def home_nbytes(self) -> int:
        """Bytes of the parameters in their home on this rank, including padding."""
        return self.flat_shard_nbytes if self.is_sharded else self.nbytes

    @property
    def is_in_order(self) -> bool:
        """True if the flat buffer of a bucket with a single parameter begins with its elements in their order: only
        behind the last shard is there padding."""
        longest = self.shard_numels.most
        runs = itertools.pairwise(numel for numel, _ in self.shard_numels.runs)
        # Of equal shards in a row that are shorter than the longest, and not empty, the first has padding behind it.
        is_padded = any(0 < numel < longest and count > 1 for numel, count in self.shard_numels.runs)
        has_gap = is_padded or any(later and earlier < longest for earlier, later in runs)
        return self.is_ragged or not has_gap

    @property
    def is_unpacked(self) -> bool:
        """True if parameters are copied out of the flat buffer after a gather; a single parameter is used in place if
        its elements are there in their order."""
        return self.is_sharded and not (len(self.params) == 1 and self.is_in_order)

    @property
    def is_packed(self) -> bool:
        """True if gradients are copied into a flat buffer before a reduce; a single gradient with even shards is used
        in place."""
        is_one = len(self.params) == 1 and self.flat_nbytes == self.nbytes
        return self.reduce_dtype is not None or (self.is_sharded and not is_one)

    @property
    def grad_ratio(self) -> int:
        """Bytes of a reduced gradient per byte of its parameter: more than 1 if `reduce_dtype` is wider."""
        if self.reduce_dtype is None or not self.nbytes:
            return 1
        return _REDUCED_BYTES[self.reduce_dtype] * self.numel // self.nbytes

    @property
    def flat_grad_nbytes(self) -> int:
        """Bytes of the flat buffer of a reduce."""
        return self.grad_ratio * self.flat_nbytes

    @property
    def reduced_nbytes(self) -> int:
        """Bytes of the reduced gradients on each rank, including padding."""
        return self.grad_ratio * (self.flat_shard_nbytes if self.is_sharded else self.nbytes)

    @property
    def own_sum_nbytes(self) -> int:
        """Bytes of the sums of gradients on this rank, including padding."""
        numel = self.own_numel if self.is_ragged else self.shard_numels.most
        return self.sum_nbytes * numel // max(self.numel, 1)

    @property
    def own_numel(self) -> int:
        """Number of elements that this rank owns."""
        return self.shard_numels[self.rank]

    @property
    def own_update(self) -> WholeUpdate | None:
        """What the updates on this rank take if each reads a whole tensor; None if each element is updated alone."""
        return self.owned_updates[self.rank] if self.owned_updates else self.whole_update

    @property
    def work_nbytes(self) -> int:
        """Bytes of the work space of an update on this rank; 0 if each element is updated alone, without scratch."""
        works = self.own_update or self.block_update
        return 0 if works is None else works.work_nbytes

    @property
    def works_on_device(self) -> bool:
        """Whether this work space is memory of the device wherever the update runs."""
        works = self.own_update or self.block_update
        return works is not None and works.works_on_device

    def seen_by(self, rank: int) -> "Bucket":
        """Return the bucket in the plan of `rank`."""
        return self if rank == self.rank else replace(self, rank=rank)

    def shard_nbytes(self) -> int:
        """Return the bytes of the parameters that this rank owns."""
        return self.nbytes * self.own_numel // max(self.numel, 1) if self.is_sharded else self.nbytes

    def shard_grad_nbytes(self) -> int:
        """Return the bytes of the reduced gradients that this rank owns."""
        return self.grad_ratio * self.shard_nbytes()

    def update_grad_nbytes(self) -> int:
        """Return the bytes of gradients that the update on this rank reads: their sums if there are any, else reduced
        ones."""
        return self.own_sum_nbytes or self.shard_grad_nbytes()

    def shard_state_nbytes(self) -> int:
        """Return the bytes of optimizer state that this rank owns."""
        if not self.is_sharded or not self.state_nbytes:
            return self.state_nbytes
        if self.owned_updates:
            return self.owned_updates[self.rank].state_nbytes
        return self.state_nbytes * self.own_numel // max(self.numel, 1)


def sharded_buckets(buckets: Iterable[Bucket]) -> frozenset[BucketId]:
    """Return those of `buckets` that are sharded over ranks."""
    return frozenset(bucket.id for bucket in buckets if bucket.is_sharded)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The homes of a bucket's parameters and optimizer state.

    If `resident`, the gathered copy stays on the device from its first use in the forward to its last use in the
    backward. A bucket of a single rank with its parameters on the device is always resident.

    The search chooses it (`search.space.buckets.placement_of`). `runtime.placed` moves the parameters to their home,
    and `optim.state` the optimizer state. If parameters are on the disk, so is their state, of which frozen ones have
    none; each gather reads them, and their gradients are on the host.
    """

    bucket: BucketId
    param: Tier
    """The home of parameters, and of gradients unless it is the disk."""
    optim: Tier
    """The home of the optimizer state."""
    resident: bool
    streamed: bool = False
    """If True, optimizer state on the host is copied to the device for the update, and back."""

    def __post_init__(self) -> None:
        if self.streamed and self.optim is Tier.DEVICE:
            raise InvalidPlan(f"bucket {self.bucket} has its optimizer state on the device, so it cannot be streamed.")

    @property
    def update(self) -> Tier:
        """The memory beside which the bucket is updated: the device if its state stays or is streamed there, else the
        host."""
        return Tier.DEVICE if self.streamed or self.optim is Tier.DEVICE else Tier.HOST


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """A group of activations of the same layer and class, which are kept, recomputed or offloaded together."""

    id: GroupId
    """Layer and class, as `h.3.matmul`."""
    storages: tuple[StorageId, ...]
    """In the order in which the forward computes them."""
    nbytes: int
    saving: Saving

    def __post_init__(self) -> None:
        if not self.storages or len(set(self.storages)) != len(self.storages):
            raise InvalidPlan(f"the activations {self.id} must list storages, each once.")
        if self.nbytes < 0:
            raise InvalidPlan(f"the activations {self.id} have {self.nbytes} bytes; expected 0 or more.")

    def __str__(self) -> str:
        line = f"{word(self.id)}  {self.saving}  bytes {self.nbytes}  storages {words(*self.storages)}"
        return commented(line, format_bytes(self.nbytes))


def streamed(bucket: Bucket, param: Tier) -> tuple[tuple[Kind, int], ...]:
    """Return the bytes by kind that a streamed update of `bucket` adds on this rank; `param` is the parameters' home.

    Buckets are updated one after another, so only the bucket with the most bytes counts, at every op of the update. If
    parameters are updated whole, one passes while its neighbour arrives or leaves: two rooms of the largest.
    """
    whole = bucket.own_update
    state_bytes, param_bytes, grad_bytes = (
        bucket.shard_state_nbytes(),
        bucket.shard_nbytes(),
        bucket.update_grad_nbytes(),
    )
    if whole is not None:
        state_bytes, param_bytes = (NUM_WHOLE_ROOMS * most for most in (whole.most_state_nbytes, whole.most_nbytes))
        grad_bytes = param_bytes * bucket.update_grad_nbytes() // max(bucket.shard_nbytes(), 1)
    state = (Kind.MOMENT, state_bytes)
    if param is Tier.DEVICE:
        return (state,)
    return (state, (Kind.GATHERED, param_bytes), (Kind.GRAD, grad_bytes))


def streamed_bytes(bucket: Bucket, param: Tier) -> int:
    """Return the sum of `streamed` over kinds."""
    return sum(nbytes for _, nbytes in streamed(bucket, param))


def takes_device(bucket: Bucket, placement: Placement) -> bool:
    """Return whether the work space of an update of `bucket` is memory of the device."""
    return bucket.works_on_device or placement.update is Tier.DEVICE


def in_turns(placed: Iterable[tuple[Bucket, Placement]]) -> tuple[tuple[Kind, int], ...]:
    """Return the bytes by kind that the updates of `placed`, which are trained, add to the device of this rank at once.

    ```text
      updates on the device   b0 | b1 |                    the largest work space
      streamed ones                     b2 | b3 | b4       the rooms of the largest, and the largest work space
    ```
    """
    rooms: tuple[tuple[Kind, int], ...] = ()
    work_bytes = stream_work_bytes = 0
    for bucket, home in placed:
        if home.streamed:
            rooms = max(rooms, streamed(bucket, home.param), key=lambda own: sum(nbytes for _, nbytes in own))
        if home.streamed or bucket.works_on_device:
            stream_work_bytes = max(stream_work_bytes, bucket.work_nbytes)
        if takes_device(bucket, home):
            work_bytes = max(work_bytes, bucket.work_nbytes)
    rooms += ((Kind.WORKSPACE, stream_work_bytes),) if rooms else ()
    return rooms if sum(nbytes for _, nbytes in rooms) > work_bytes else ((Kind.WORKSPACE, work_bytes),)
