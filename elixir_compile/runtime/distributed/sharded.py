"""The buckets of an executor that are sharded over ranks, in equal or unequal shards: the gather of their parameters
and the reduce of their gradients.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import accumulate

import torch

from elixir_compile.graph.ops.registry import Slot
from elixir_compile.graph.ops.shards import rehome, rows_of
from elixir_compile.ir import Bucket, BucketRef, InnerVerb, Lane, Placement, Tier, Verb, label
from elixir_compile.runtime.bucket import RunningBucket, Slab, has_moved
from elixir_compile.runtime.disk_params import DiskBucket
from elixir_compile.runtime.distributed.ranks import Ranks, scale_by_weight
from elixir_compile.runtime.lanes import Lanes, Transfer
from elixir_compile.runtime.recording import Ledger

# ----------------------------------------------------------------------------------------------------------------------
# A sharded bucket, and its two collectives: the gather of its parameters and the reduce of its gradients.
#
# own    | a a . | b b b | c . .          this rank's shards, one after another, each padded to the size of rank 0's
# gather   own of every rank -> rows      an all-gather
#          rows -> a, b, c                copied out of the rows, which are then freed; a bucket with a single parameter
#                                         needs no copy
# reduce   gradients -> rows -> own       a reduce-scatter, in fp32 if this is the bucket's reduce dtype; a single
#                                         gradient in the layout of the rows is not copied. If other ranks have copies
#                                         of the same shard, an all-reduce with them follows


class ShardedBucket(RunningBucket):
    """A bucket whose parameters are sharded over `ranks`."""

    def __init__(self, spec: Bucket, placement: Placement, slots: Sequence[Slot], *, pin: bool, ranks: Ranks) -> None:
        self.ranks = ranks  # before `super().__init__`, whose `_layout` reads it
        super().__init__(spec, placement, slots, pin=pin)
        self._own: torch.Tensor | None = None

    @property
    def own_numel(self) -> int:
        """The elements of `own`."""
        return self._total_bytes // self.slots[0].param.element_size()

    @property
    def own(self) -> torch.Tensor:
        """This rank's shards with their padding, in their home."""
        assert self._own is not None, "move_home comes first"
        return self._own

    def move_home(self, device: torch.device) -> None:
        """Move this rank's shards to the home in the placement, one after another in one tensor.

        No update of them is queued.
        """
        for slot in self.slots:
            slot.check_form()
        dtype = self.slots[0].param.dtype
        if self.is_away:
            own = Slab(self.own_numel * dtype.itemsize, pin=self.pin).tensor(dtype, (self.own_numel,), 0)
        else:
            own = torch.zeros(self.own_numel, dtype=dtype, device=device)
        for slot, home in zip(self.slots, self.cut(own), strict=True):
            home.copy_(slot.own)
            rehome(slot.param, home.data)  # `data` has its own version, so a write to a parameter changes no other's
        self._own = own
        self.gathered = None
        self.move_gradients(device)

    def has_drifted(self) -> bool:
        """Whether user code replaced this rank's shard of a parameter since `move_home`."""
        return self._own is None or any(
            slot.own.numel() and has_moved(slot.own, home.data_ptr())
            for slot, home in zip(self.slots, self.cut(self._own), strict=True)
        )

    def cut(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return this rank's shard of each parameter as a view of `flat`, which has the layout of `own`."""
        itemsize = self.slots[0].param.element_size()
        return tuple(
            flat[offset // itemsize :][: slot.own.numel()].view(slot.own.shape)
            for slot, offset in zip(self.slots, self._offsets_bytes, strict=True)
        )

    @property
    def is_gathered(self) -> bool:
        """Whether programs read a gathered copy of the parameters: of all ranks' shards."""
        return True

    def rows(self, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor of shape (number of shards, elements of `own`) in `dtype`, on the device."""
        return torch.empty(self.ranks.num_shards, self.own_numel, dtype=dtype, device=self.slots[0].device)

    def by_rank(self, rows: torch.Tensor) -> Sequence[torch.Tensor] | torch.Tensor:
        """Return the elements of each rank in `rows`, in the order of ranks: a matrix if all have equally many."""
        return rows

    def from_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the full parameters from `rows`, the `own` of every rank."""
        if len(self.slots) == 1:
            return (_shaped(rows.view(-1), self.slots[0]),)
        values = []
        for slot, columns in zip(self.slots, self._columns(), strict=True):
            part = rows[:, columns]
            values.append(_shaped(torch.empty_like(part).copy_(part).view(-1), slot))
        return tuple(values)

    def to_rows(self, positions: Sequence[int], grads: list[torch.Tensor]) -> torch.Tensor:
        """Return the sums of gradients as `rows` of `grad_dtype` for a reduce-scatter; zeros if a parameter has none.

        Gradient i of `grads` belongs to the parameter at `positions[i]`. May empty `grads`.
        """
        is_weighed_later = self.ranks.applies_weight(self.grad_dtype)
        if self.ranks.weight == 0.0 and not is_weighed_later:
            grads.clear()  # frees their memory before the rows are allocated
            return self.rows(self.grad_dtype).zero_()
        if is_weighed_later and len(grads) == 1 and grads[0].dtype == self.grad_dtype and self.is_rows(grads[0]):
            return self.shaped(grads[0].contiguous())
        rows = self.rows(self.grad_dtype)
        self.fill(rows, positions, grads)
        if not is_weighed_later:
            scale_by_weight(rows, self.ranks.weight)
        return rows

    def is_rows(self, grad: torch.Tensor) -> bool:
        """Return whether `grad`, the only gradient of the bucket, has the elements of `rows` in their order."""
        return len(self.slots) == 1 and grad.numel() == self.ranks.num_shards * self.own_numel

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """Return `flat` in the shape of `rows`."""
        return flat.view(self.ranks.num_shards, -1)

    def fill(self, rows: torch.Tensor, positions: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        """Write the sums of gradients to `rows`; padding, and parameters without any, become zero."""
        columns = self._columns()
        filled: set[int] = set()
        for position, grad in zip(positions, grads, strict=True):
            target, adds = rows[:, columns[position]], position in filled
            num_ranks, length = target.shape
            flat = grad.reshape(-1)
            num_full, rest = divmod(flat.numel(), length) if length else (0, 0)
            pieces = [(target[:num_full], flat[: num_full * length].view(num_full, length))]
            if rest:
                pieces.append((target[num_full, :rest], flat[num_full * length :]))
            for place, piece in pieces:
                place.add_(piece) if adds else place.copy_(piece)
            if not adds and num_full < num_ranks:  # the padding
                if rest:
                    target[num_full, rest:].zero_()
                target[num_full + bool(rest) :].zero_()
            filled.add(position)
        for position in set(range(len(self.slots))) - filled:
            rows[:, columns[position]].zero_()

    def _columns(self) -> list[slice]:
        itemsize = self.slots[0].param.element_size()
        ends = [*self._offsets_bytes[1:], self._total_bytes]
        return [slice(start // itemsize, end // itemsize) for start, end in zip(self._offsets_bytes, ends, strict=True)]

    def _layout(self) -> tuple[tuple[int, ...], int]:
        offsets, end = [], 0
        for slot in self.slots:
            offsets.append(end)
            end += self.ranks.shard_numels_of(slot.param)[0] * slot.param.element_size()
        return tuple(offsets), end

    def _cut_slab(self, slab: Slab, dtype: torch.dtype | None = None, ratio: int = 1) -> tuple[torch.Tensor, ...]:
        own = dtype or self.slots[0].param.dtype
        return self.cut(slab.tensor(own, (ratio * self._total_bytes // own.itemsize,), 0))


def _shaped(flat: torch.Tensor, slot: Slot) -> torch.Tensor:
    return flat[: slot.numel].view(slot.shape)


class ShardGather(Transfer):
    """The all-gather of a sharded bucket; its `values` are the full parameters after `ensure_issued`."""

    __slots__ = ("_bucket", "_lanes", "_ledger", "_read", "_rows", "_versions", "_work")

    def __init__(self, bucket: ShardedBucket, lanes: Lanes, ledger: Ledger, read: Transfer | None = None) -> None:
        """`read` brings this rank's shard to the device if its home is the disk; it is sent later then."""
        name = label(Verb.GATHER, BucketRef(bucket.spec.id))
        own = bucket.own if read is None else read.values[0]
        self._rows = bucket.rows(own.dtype)
        ledger.takes(name, (self._rows,))
        self._lanes, h2d = lanes, lanes.h2d
        lanes.touches((), (self._rows,))  # compute allocates it
        if bucket.is_away and read is None:
            there = torch.empty_like(own, device=lanes.device)
            ledger.takes(name, (there,))
            lanes.touches((), (there,))
            with h2d.behind_compute(), ledger.span(Lane.H2D, name, own.nbytes, times=0):
                h2d.copy(there, own)
            own, bucket.home_read = there, h2d.mark()
        super().__init__(name, None, sources=(own,))
        self._bucket, self._versions = bucket, bucket.versions()
        self._ledger, self._read, self._work = ledger, read, None
        if read is None:
            bucket.ranks.start_late()
            self._send()
        else:
            bucket.ranks.put_off(self, self._send)

    def _send(self) -> None:
        """Start the collective; wait for the disk before it."""
        bucket, rows, (own,) = self._bucket, self._rows, self.sources
        assert rows is not None
        if self._read is not None:
            with bucket.queued.waiting():
                self._read.ensure_issued()
            self._read = None
        # A collective begins behind the stream on which it is issued. That of a shard on the device is behind compute
        # alone: h2d would have to wait for compute, and the host for h2d at the end of the backward.
        with self._lanes.h2d.beside_compute() if bucket.is_away else nullcontext():
            work = self._ledger.started(
                Lane.GATHER,
                self.label,
                rows.nbytes,
                lambda: bucket.ranks.all_gather(bucket.by_rank(rows), own, f"parameters of {bucket.spec.id}"),
            )
            self._work = self._lanes.collective(work, (own,), (rows,))

    def ensure_issued(self) -> None:
        """Make compute issued from now on wait for the collective, and put the full parameters in `values`."""
        self._bucket.ranks.start_late(self)
        if self._work is not None and self._rows is not None:
            self._work.wait()
            self._work, self.sources = None, ()  # before the parameters are copied out, as `gather_buffers` counts
            self._lanes.touches((self._rows,))
            self.values = self._bucket.from_rows(self._rows)
            self._rows = None
            self._bucket.hold(self.values, self._versions)


class ShardReduce(Transfer):
    """The reduce-scatter of the gradients of a sharded bucket.

    It empties `grads`. After the collective, it calls `take` with each slot and this rank's shard of the mean gradient.
    """

    __slots__ = ("_bucket", "_own", "_positions", "_take", "_work")

    def __init__(
        self,
        bucket: ShardedBucket,
        positions: Sequence[int],
        grads: list[torch.Tensor],
        take: Callable[[Slot, torch.Tensor], None],
        lanes: Lanes,
        ledger: Ledger,
    ) -> None:
        self._bucket, self._positions, self._take = bucket, tuple(dict.fromkeys(positions)), take
        lanes.touches(grads)
        rows = bucket.to_rows(positions, grads)
        grads.clear()
        self._own = torch.empty(bucket.own_numel, dtype=rows.dtype, device=rows.device)
        ranks, of, own = bucket.ranks, BucketRef(bucket.spec.id), self._own
        reduced = work = ledger.started(
            Lane.REDUCE,
            label(Verb.REDUCE, of),
            rows.nbytes,
            lambda: ranks.reduce_scatter(own, bucket.by_rank(rows), f"gradients of {of}"),
        )
        if ranks.num_copies > 1:
            work = ledger.started(
                Lane.REDUCE,
                label(InnerVerb.AVERAGE, of),
                own.nbytes,
                lambda: ranks.average_copies(own, reduced, lanes.collectives),
            )
        self._work = lanes.collective(work, (rows,), (self._own,))
        super().__init__(label(Verb.REDUCE, of), None, sources=(rows,))

    @property
    def bucket(self) -> ShardedBucket:
        """The bucket whose gradients are reduced."""
        return self._bucket

    @property
    def own_nbytes(self) -> int:
        """The bytes of the gradients that `take` will get, without padding; 0 after the wait."""
        shards = () if self._own is None else self._bucket.cut(self._own)
        return sum(shards[position].nbytes for position in self._positions if shards)

    def memory(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors of the collective, read and written; empty after the wait."""
        return self.sources if self._own is None else (*self.sources, self._own)

    def ensure_issued(self) -> None:
        """Make compute issued from now on wait for the collective, and pass each shard of the means to `take`."""
        if self._work is None or self._own is None:
            return
        self._work.wait()
        self._work, self.sources = None, ()
        shards = self._bucket.cut(self._own)
        for position in self._positions:
            self._take(self._bucket.slots[position], shards[position])
        self._own = None


# ----------------------------------------------------------------------------------------------------------------------
# A sharded bucket of which the ranks own shards of different sizes.
#
# own        | a0 b0 c0 |                                  this rank's rows of each parameter, one after another
# ragged     | a0 b0 c0 | a1 b1 c1 | a2 b2 c2 |            flat buffer: the `own` of all ranks, each as long as it is
# padded     | a0 b0 c0 | a1 b1 c1 . | a2 b2 c2 . . |      each as long as the longest
#
# The plan says which of the two a bucket has. If a ragged bucket has a single parameter, the flat buffer is the
# parameter itself, so neither the parameter nor its gradient is copied.


class UnevenBucket(ShardedBucket):
    """A bucket whose parameters are Portions over `ranks`."""

    @property
    def own_numel(self) -> int:
        """The elements of `own`, with its padding."""
        return self._row_numels[self._own_index]

    def rows(self, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized flat buffer in `dtype`, on the device."""
        return torch.empty(sum(self._row_numels), dtype=dtype, device=self.slots[0].device)

    def by_rank(self, rows: torch.Tensor) -> Sequence[torch.Tensor] | torch.Tensor:
        """Return what each rank has of the flat buffer `rows`, in the order of ranks: a matrix if it is padded."""
        return rows.split(self._row_numels) if self.spec.is_ragged else rows.view(self.ranks.num_shards, -1)

    def from_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the full parameters from `rows`, the `own` of every rank."""
        if not self.spec.is_unpacked:
            param = self.slots[0].param
            return (rows[: param.numel()].view(param.shape),)
        values = []
        for position, slot in enumerate(self.slots):
            value = torch.empty(slot.param.shape, dtype=rows.dtype, device=rows.device)
            for target, piece in self._pieces(position, value.view(-1), rows):
                target.copy_(piece)
            values.append(value)
        return tuple(values)

    def is_rows(self, grad: torch.Tensor) -> bool:
        """Return whether `grad`, the only gradient of the bucket, is the flat buffer."""
        return not self.spec.is_packed

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """Return `flat` as one dimension."""
        return flat.view(-1)

    def fill(self, rows: torch.Tensor, positions: Sequence[int], grads: Sequence[torch.Tensor]) -> None:
        """Write the sums of gradients to the flat buffer `rows`; the rest becomes zero."""
        if not self.spec.is_ragged or len(set(positions)) < len(self.slots):
            rows.zero_()
        filled: set[int] = set()
        for position, grad in zip(positions, grads, strict=True):
            for source, target in self._pieces(position, grad.reshape(-1), rows):
                target.add_(source) if position in filled else target.copy_(source)
            filled.add(position)

    def _pieces(
        self, position: int, whole: torch.Tensor, rows: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield for each rank its elements of `whole`, the flat parameter at `position`, and their place in `rows`."""
        numels = [own[position] for own in self._shards]
        starts = accumulate(self._row_numels, initial=0)
        for start, own, elements in zip(starts, self._shards, whole.split(numels), strict=False):
            offset = start + sum(own[:position])
            yield elements, rows[offset : offset + elements.numel()]

    def _layout(self) -> tuple[tuple[int, ...], int]:
        by_slot = [self.ranks.shard_numels_of(slot.param) for slot in self.slots]
        self._shards = list(zip(*by_slot, strict=True))
        """By rank, the elements of each parameter that the rank owns."""
        totals = [sum(own) for own in self._shards]
        self._row_numels = totals if self.spec.is_ragged else [max(totals)] * len(totals)
        """By rank, the elements in the flat buffer, with padding."""
        self._own_index = self.ranks.mesh.get_local_rank(self.ranks.mesh.ndim - 1)
        itemsize = self.slots[0].param.element_size()
        *offsets, end = accumulate((itemsize * numel for numel in self._shards[self._own_index]), initial=0)
        return tuple(offsets), end


# ----------------------------------------------------------------------------------------------------------------------
# The bucket of an executor for a bucket of a plan: complete on each rank, in equal shards, or in unequal ones; and each
# in memory or on disk.


class ShardedDiskBucket(DiskBucket, ShardedBucket):
    """A bucket in equal shards, each in a file of its rank."""


class UnevenDiskBucket(ShardedDiskBucket, UnevenBucket):
    """A bucket in shards of any sizes, each in a file of its rank."""


def new_bucket(
    spec: Bucket, placement: Placement, slots: Sequence[Slot], *, pin: bool, ranks: Ranks | None
) -> RunningBucket:
    """Return a bucket for `spec`, before its first `move_home`; `ranks` is None if a single rank trains the model."""
    is_on_disk = placement.param is Tier.DISK
    if not spec.is_sharded:
        return (DiskBucket if is_on_disk else RunningBucket)(spec, placement, slots, pin=pin)
    assert ranks is not None, "one rank alone has no sharded buckets"
    if any(rows_of(slot.param) is not None for slot in slots):
        kind = UnevenDiskBucket if is_on_disk else UnevenBucket
    else:
        kind = ShardedDiskBucket if is_on_disk else ShardedBucket
    return kind(spec, placement, slots, pin=pin, ranks=ranks)
