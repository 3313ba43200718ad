"""Parameters that travel together, where their training state lives, and what happens to saved activations."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from elixir_compile.errors import InvalidPlan
from elixir_compile.ir.kinds import BucketId, GroupId, Saving, StorageId, Tier
from elixir_compile.ir.words import commented, word, words
from elixir_compile.units import format_bytes

_REDUCED_BYTES = {"float32": 4}
"""Bytes of an element, by the dtypes that gradients of other dtypes may be reduced in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameters that are gathered, released, reduced and updated as one."""

    id: BucketId
    params: tuple[StorageId, ...]
    """PARAM storages in first-use order."""
    numel: int
    nbytes: int
    """Bytes of the parameters, whole."""
    state_nbytes: int
    """Bytes of optimizer state that the parameters need: 0 when frozen, twice `nbytes` for Adam."""
    dtype: str
    trainable: bool
    shard_numels: tuple[int, ...]
    """Elements each rank owns; one entry per rank. Every rank's flat shard is padded to the largest of them."""
    sum_nbytes: int = 0
    """Bytes of the fp32 sums of gradients of several backward passes, beside the gradients of one: four per element
    where those are wanted, and one rank has all. 0 where gradients add up in their own dtype."""
    group: int = 0
    """The param group of the optimizer that updates the parameters, counted over all optimizers."""
    reduce_dtype: str | None = None
    """What several ranks reduce gradients in, which stay in it; None for the dtype of the parameters."""

    def __post_init__(self) -> None:
        if min(self.numel, self.nbytes, self.state_nbytes, self.sum_nbytes, *self.shard_numels, self.group) < 0:
            raise InvalidPlan(f"bucket {self.id} has a negative size or group.")
        if len(set(self.params)) != len(self.params):
            raise InvalidPlan(f"bucket {self.id} lists a parameter twice.")
        if self.state_nbytes and not self.trainable:
            raise InvalidPlan(f"bucket {self.id} is frozen, yet has {self.state_nbytes} bytes of optimizer state.")
        if self.reduce_dtype is not None and not self._may_reduce():
            raise InvalidPlan(
                f"bucket {self.id} reduces gradients of {self.dtype} in {self.reduce_dtype}; expected "
                f"{' or '.join(_REDUCED_BYTES)} of narrower ones."
            )

    def _may_reduce(self) -> bool:
        return _REDUCED_BYTES.get(self.reduce_dtype or "", 0) * self.numel > self.nbytes

    @property
    def is_sharded(self) -> bool:
        """Whether several ranks own a part each, so that it is gathered wherever it lives; not where each owns all."""
        return any(numel != self.numel for numel in self.shard_numels)

    @property
    def shards_text(self) -> str:
        """`shard_numels` as text, a run of three or more as `128 x 1021`."""
        runs = ((numel, len(list(run))) for numel, run in itertools.groupby(self.shard_numels))
        return " ".join(f"{numel} x {count}" if count > 2 else " ".join([str(numel)] * count) for numel, count in runs)

    @property
    def flat_nbytes(self) -> int:
        """Bytes of the flat buffer that is gathered into, or reduced from: every rank's flat shard; `nbytes` on one
        rank."""
        if not self.is_sharded:
            return self.nbytes
        return self.nbytes * len(self.shard_numels) * max(self.shard_numels) // max(self.numel, 1)

    @property
    def flat_shard_nbytes(self) -> int:
        """Bytes of what one rank puts into the flat buffer, padding included."""
        return self.flat_nbytes // len(self.shard_numels)

    @property
    def is_unpacked(self) -> bool:
        """Whether parameters are copied out of the flat buffer behind a gather: one alone is used where it is."""
        return self.is_sharded and len(self.params) > 1

    @property
    def is_packed(self) -> bool:
        """Whether gradients are copied into a flat buffer before a reduce: one whose rows divide evenly is one."""
        is_one = len(self.params) == 1 and self.flat_nbytes == self.nbytes
        return self.reduce_dtype is not None or (self.is_sharded and not is_one)

    @property
    def grad_ratio(self) -> int:
        """How many times the bytes of its parameter a gradient has from its reduce on."""
        if self.reduce_dtype is None or not self.nbytes:
            return 1
        return _REDUCED_BYTES[self.reduce_dtype] * self.numel // self.nbytes

    @property
    def flat_grad_nbytes(self) -> int:
        """Bytes of the flat buffer that gradients are reduced from."""
        return self.grad_ratio * self.flat_nbytes

    @property
    def reduced_nbytes(self) -> int:
        """Bytes of what a reduce leaves on a rank, padding included."""
        return self.grad_ratio * (self.flat_shard_nbytes if self.is_sharded else self.nbytes)

    def shard_nbytes(self, rank: int = 0) -> int:
        """Return the bytes of the parameters that `rank` owns."""
        return self.nbytes * self.shard_numels[rank] // max(self.numel, 1) if self.is_sharded else self.nbytes

    def shard_grad_nbytes(self, rank: int = 0) -> int:
        """Return the bytes of the gradients that `rank` owns, once they are reduced."""
        return self.grad_ratio * self.shard_nbytes(rank)

    def update_grad_nbytes(self, rank: int = 0) -> int:
        """Return the bytes of the gradient that the update of what `rank` owns reads: of the sums, where there are."""
        return self.sum_nbytes or self.shard_grad_nbytes(rank)

    def shard_state_nbytes(self, rank: int = 0) -> int:
        """Return the bytes of optimizer state that `rank` owns."""
        if not self.is_sharded:
            return self.state_nbytes
        return self.state_nbytes * self.shard_numels[rank] // max(self.numel, 1)


def averaged_bytes(buckets: Iterable[Bucket], num_copies: int) -> int:
    """Return the bytes that a backward takes for a moment to average gradients that each rank has whole: the means are
    new, bucket by bucket, and the largest one counts. Those that are packed count on their own."""
    whole = (bucket for bucket in buckets if bucket.trainable and not (bucket.is_sharded or bucket.is_packed))
    return max((bucket.nbytes for bucket in whole if len(bucket.shard_numels) * num_copies > 1), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the training state of one bucket lives, where it is updated, and whether its gathered copy survives the
    forward.

    `resident` says that the gathered copy stays on the device from its first use in the forward to its last use in the
    backward. A bucket of one rank whose parameters live on the device is always resident.
    """

    bucket: BucketId
    param: Tier
    optim: Tier
    resident: bool
    streamed: bool = False
    """Whether state that lives elsewhere travels to the device for the update, and back."""

    def __post_init__(self) -> None:
        if self.streamed and self.optim is Tier.DEVICE:
            raise InvalidPlan(f"bucket {self.bucket} has its optimizer state on the device: nothing is streamed.")

    @property
    def update(self) -> Tier:
        """Where the bucket is updated: on the device if its state lives or travels there, else on the host."""
        return Tier.DEVICE if self.streamed or self.optim is Tier.DEVICE else Tier.HOST


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Saved activations of one layer and one class, which are treated alike."""

    id: GroupId
    """Layer and class: `h.3.matmul`."""
    storages: tuple[StorageId, ...]
    """In the order in which the forward makes them."""
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
