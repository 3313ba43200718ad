"""Keep the activations of outstanding forwards: their copies on the host, their bytes on the device, values in parts, a
tensor for each micro-batch, and values that pass between device and host slice by slice.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from elixir_compile import compat
from elixir_compile.base.errors import ActivationsGone
from elixir_compile.graph.rewrite.regions import Layout
from elixir_compile.ir import GroupId, GroupRef, Kept, Lane, Verb, label
from elixir_compile.runtime.bucket import Slab, SlabPool, aligned_bytes
from elixir_compile.runtime.lanes import Event, Lanes, Transfer
from elixir_compile.runtime.recording import Ledger

# ----------------------------------------------------------------------------------------------------------------------
# Values of the whole batch that stay in parts: a tensor for each micro-batch, as the body of a region has made it.
#
# Nothing is copied if the compiled body returns a tensor in the layout of the capture that has its memory for itself or
# shares it with views of the same value. All other tensors are copied into memory of that layout.


class InParts:
    """A value of the whole batch as its parts along dimension `dim`."""

    __slots__ = ("dim", "tensors")

    def __init__(self, tensors: list[torch.Tensor], dim: int) -> None:
        self.tensors = tensors
        """The part of each micro-batch, in order."""
        self.dim = dim

    def viewed(self, layout: Layout) -> "InParts":
        """Return the view of this value whose parts have `layout`."""
        return InParts([layout.view.over(part.untyped_storage()) for part in self.tensors], layout.dim)

    def joined(self, memories: dict[int, torch.Tensor] | None = None) -> torch.Tensor:
        """Return a copy as one tensor in the layout of the capture, whose memory is that of all parts in order.

        `memories` are the copies so far, by the address of the memory of their first part. Views of one memory share
        its copy.
        """
        first, memories = self.tensors[0], {} if memories is None else memories
        address = first.untyped_storage().data_ptr()
        if address not in memories:
            memories[address] = torch.cat([compat.bytes_of(part.untyped_storage()) for part in self.tensors])
        memory, view = memories[address], compat.MemoryView.of(first)
        shape, stride = list(view.shape), list(view.stride)
        stride[self.dim] = memory.nbytes // view.dtype.itemsize // len(self.tensors) // max(shape[self.dim], 1)
        shape[self.dim] *= len(self.tensors)
        return replace(view, shape=tuple(shape), stride=tuple(stride)).over(memory.untyped_storage())


def kept_part(part: torch.Tensor, layout: Layout, of_memory: torch.Tensor | None) -> torch.Tensor:
    """Return `part`, a result of the body, in `layout`.

    `of_memory` is another result of the same micro-batch that is a view of the same memory, None if there is none yet.
    The dtype is that of `part`: torch 2.11 captures attention in fp64 on a CPU as if it made logarithms of sums in
    fp32. They are in fp64, and its backward refuses fp32.
    """
    view = replace(layout.view, dtype=part.dtype)
    has_layout = part.untyped_storage().nbytes() == layout.nbytes and view.is_like(part)
    if has_layout and (
        of_memory is None or part.untyped_storage().data_ptr() == of_memory.untyped_storage().data_ptr()
    ):
        return part
    if of_memory is None:
        numel = layout.nbytes // layout.view.dtype.itemsize
        own = view.over(torch.empty(numel, dtype=part.dtype, device=part.device).untyped_storage())
    else:
        own = layout.view.over(of_memory.untyped_storage())
    copy_into(own, part, view.shape, view.stride)
    return own


def copy_into(target: torch.Tensor, part: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> None:
    """Copy `part` to `target`, of which an expanded dimension has the memory of one entry by `shape` and `strides`."""
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        if stride == 0 and size > 1:
            target, part = target.narrow(dim, 0, 1), part.narrow(dim, 0, 1)
    target.copy_(part)


def viewed(value: InParts | torch.Tensor, layout: Layout, num: int) -> InParts | torch.Tensor:
    """Return the view of `value` whose parts have `layout`. `value` has `num` parts, or is a tensor in the layout of
    the capture, because hooks packed it between forward and backward."""
    if isinstance(value, InParts):
        return value.viewed(layout)
    shape = tuple(size * num if dim == layout.dim else size for dim, size in enumerate(layout.view.shape))
    return replace(layout.view, shape=shape).over(value.untyped_storage())


def tensors_in(values: Sequence["InParts | torch.Tensor"]) -> list[torch.Tensor]:
    """Return the tensors of all parts of `values`."""
    return [part for value in values for part in (value.tensors if isinstance(value, InParts) else (value,))]


# ----------------------------------------------------------------------------------------------------------------------
# Activations that pass between device and host slice by slice, while a region runs in micro-batches.
#
#   forward    micro-batch j fills the slice on the device;  slice -> piece j of the host's copy, beside j + 1
#   backward   piece j + 1 -> the next slice, beside micro-batch j, which reads the slice before it
#
# The slice of a storage that leaves is filled again when its copy is done. So the device has one slice of a storage
# that leaves, beside the result of the micro-batch, and two slices of a storage that arrives.


Slicing = Sequence[tuple[int, int] | None]
"""For each value of a group the dimension and the number of the slices in which it arrives; None if it arrives as a
whole. Empty if all values do."""


@dataclass(frozen=True, slots=True)
class View:
    """The layout of an activation: its storage in the group, and its view of this storage."""

    storage: int
    """The index of the storage in the group."""
    layout: compat.MemoryView

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this view of `flat`, the bytes of its storage."""
        return self.layout.over(flat.untyped_storage())

    def slice(self, dim: int, num: int) -> "View":
        """Return the view of a slice alone in memory, one of `num` along `dim`."""
        shape = self.layout.shape
        part = (*shape[:dim], shape[dim] // num, *shape[dim + 1 :])
        return replace(self, layout=replace(self.layout, shape=part))


class LeavingStorage:
    """A storage of the running forward that leaves the device in slices."""

    def __init__(self, nbytes: int, num: int, slab: Slab, lanes: Lanes, ledger: Ledger, label: str) -> None:
        """Its `nbytes` go to the begin of `slab` in `num` slices."""
        self.slab = slab
        self.on_host = slab.tensor(torch.uint8, (nbytes,), 0)
        self.slice: torch.Tensor | None = None
        """The bytes of the slice on the device."""
        self.num = num
        self._lanes = lanes
        self._ledger = ledger
        self._label = label
        self._event: Event | None = None

    @property
    def nbytes(self) -> int:
        return self.on_host.numel()

    def begin(self) -> None:
        """Let compute issued from now on fill the slice: it waits until the slice before has left."""
        if self.slice is None:
            self.slice = self._lanes.empty(self.nbytes // self.num)
            self._ledger.takes(self._label, (self.slice,))
        self._lanes.compute_waits(self._event)
        self._lanes.touches((), (self.slice,))

    def part(self, view: View, dim: int) -> torch.Tensor:
        """Return the slice along `dim` of `view`, a view of the whole storage."""
        assert self.slice is not None
        return view.slice(dim, self.num).of(self.slice)

    def send(self, number: int) -> None:
        """Start copying the slice, which micro-batch `number` has filled, to its place on the host."""
        assert self.slice is not None
        size, d2h = self.slice.numel(), self._lanes.d2h
        with d2h.behind_compute(), self._ledger.span(Lane.D2H, self._label, size, times=0, piece=1 + number):
            d2h.copy(self.on_host[number * size : (number + 1) * size], self.slice)
        self._event = d2h.mark()

    def handed_over(self) -> torch.Tensor:
        """Return the slice that may still be leaving; the caller keeps it until then."""
        assert self.slice is not None
        last, self.slice = self.slice, None
        return last


@dataclass(frozen=True, slots=True)
class LeavingView:
    """A value of the forward that is on the host when its region ends: a view of a storage that left in slices."""

    source: LeavingStorage
    view: View


class ArrivingStorage:
    """A storage that arrives on the device in slices, for one run of the region that reads it."""

    def __init__(
        self,
        on_host: torch.Tensor,
        num: int,
        lanes: Lanes,
        ledger: Ledger,
        label: str,
    ) -> None:
        """`on_host` has the bytes of the storage, for whose copy to the host `lanes.h2d` waits already. The copy of the
        first slice starts."""
        self._on_host = on_host
        self._num = num
        self._lanes = lanes
        self._ledger = ledger
        self._label = label
        self._slice: torch.Tensor | None = None
        self._next, self._event = self._start(0)

    def _start(self, number: int) -> tuple[torch.Tensor, Event | None]:
        size, h2d = self._on_host.numel() // self._num, self._lanes.h2d
        # Compute uses and frees it, and waits for the copy before both.
        flat = self._lanes.empty(size)
        self._ledger.takes(self._label, (flat,))
        with h2d.behind_compute(), self._ledger.span(Lane.H2D, self._label, size, times=0, piece=1 + number):
            h2d.copy(flat, self._on_host[number * size : (number + 1) * size])
        return flat, h2d.mark()

    def begin(self, number: int) -> None:
        """Begin micro-batch `number`: start copying the next slice, and let compute wait for this one."""
        self._slice, arrived = self._next, self._event
        if number + 1 < self._num:
            self._next, self._event = self._start(number + 1)
        self._lanes.compute_waits(arrived)

    def slice(self, view: View, dim: int) -> torch.Tensor:
        """Return the slice along `dim` of `view`, a view of the whole storage."""
        assert self._slice is not None
        return view.slice(dim, self._num).of(self._slice)

    def release(self) -> None:
        """Leave the memory of the slice to the tensors that `slice` returned."""
        self._slice = None


@dataclass(frozen=True, slots=True)
class ArrivingView:
    """A value that the backward reads in slices: a view of a storage that arrives in slices."""

    source: ArrivingStorage
    view: View


def num_slices(storage: int, nbytes: int, views: Sequence[View], slices: Slicing) -> int:
    """Return the number of slices in which `storage` of a group arrives, 1 for the whole at once.

    `nbytes` are its bytes, and `views` the values of the group. It arrives as a whole if its slices are not consecutive
    in memory, as they are in the layout of the capture.
    """
    found = {
        num if cut is not None and view.layout.shape[dim] % num == 0 and view.layout.is_consecutive(dim, nbytes) else 1
        for view, cut in zip(views, slices, strict=bool(slices))
        for dim, num in (cut or (0, 1),)
        if view.storage == storage
    }
    return found.pop() if len(found) == 1 else 1


# ----------------------------------------------------------------------------------------------------------------------
# The activations of one forward whose backward has not run yet, on the host and on the device.


@dataclass(slots=True)
class OffloadedGroup:
    """A group of a forward's activations on the host."""

    slabs: tuple[Slab, ...]
    on_host: tuple[torch.Tensor, ...]
    """The bytes of each storage."""
    views: tuple[View, ...]
    transfer: Transfer
    not_moved: frozenset[int]
    """Indices into `on_host` of storages that the forward made on the host: nothing copies them."""


@dataclass(slots=True)
class OutstandingForward:
    """The activations of an outstanding forward, on the host and on the device."""

    groups: dict[str, OffloadedGroup] = field(default_factory=dict)
    leaving: list[LeavingStorage] = field(default_factory=list)
    """Storages that leave in slices, and are in no group yet."""
    parts: list[InParts | torch.Tensor] = field(default_factory=list)
    """Activations that stay on the device in parts."""
    owner: object = None
    """The compilation that ran the forward; None before `note`."""
    call: int = 0
    """The number of forwards that all ranks had run together, this forward included."""
    device_bytes: int = 0
    given_bytes: int = 0
    """Bytes of the inputs that the backward reads."""
    storages: list["weakref.ref[torch.UntypedStorage]"] = field(default_factory=list)
    """Storages on the device that only the backward of this forward reads."""
    emptied: list[tuple["weakref.ref[torch.UntypedStorage]", torch.Tensor]] = field(default_factory=list)
    """Storages of `storages` that `offload_outstanding` emptied, each with its bytes on the host."""
    slab: Slab | None = None
    """The memory of the bytes in `emptied`; None if no storage is emptied."""

    def empty(self, pool: SlabPool, ledger: Ledger) -> bool:
        """Move the storages to a slab of `pool` and free their device memory; return whether there were any.

        `ledger` times the copies.
        """
        storages = [storage for reference in self.storages if (storage := reference()) is not None]
        storages = [storage for storage in storages if storage.nbytes() and storage.resizable()]
        if not storages:
            return False
        self.slab = pool.take(sum(aligned_bytes(storage.nbytes()) for storage in storages))
        start = 0
        with ledger.span(Lane.D2H, label(Verb.OFFLOAD, Kept.OUTSTANDING), sum(s.nbytes() for s in storages), times=0):
            for storage in storages:
                host = self.slab.tensor(torch.uint8, (storage.nbytes(),), start)
                start = aligned_bytes(start + storage.nbytes())
                # Not asynchronous: this happens in a few steps at most, and the caller needs the memory at once.
                host.copy_(compat.bytes_of(storage))
                self.emptied.append((weakref.ref(storage), host))
                storage.resize_(0)
        return True

    def refill(self, pool: SlabPool, ledger: Ledger) -> None:
        """Copy the bytes of the emptied storages back to the device; `ledger` times the copies."""
        back = [(storage, host) for reference, host in self.emptied if (storage := reference()) is not None]
        name, nbytes = label(Verb.PREFETCH, Kept.OUTSTANDING), sum(host.numel() for _, host in back)
        with ledger.span(Lane.H2D, name, nbytes, times=0):
            for storage, host in back:
                storage.resize_(host.numel())
                there = compat.bytes_of(storage)
                ledger.takes(name, (there,))
                there.copy_(host)
        self._free_emptied(pool)

    def in_flight(self) -> list[Event]:
        """Return the events of offloads for which no program has waited."""
        transfers = (offloaded.transfer for offloaded in self.groups.values())
        return [transfer.event for transfer in transfers if transfer.sources and transfer.event is not None]

    def free(self, pool: SlabPool) -> None:
        """Give all memory on the host back to `pool`."""
        self.parts.clear()
        self._free_emptied(pool)
        for offloaded in self.groups.values():
            offloaded.transfer.sources = ()
            offloaded.on_host = ()
            for slab in offloaded.slabs:
                pool.give_back(slab)
        for storage in self.leaving:
            pool.give_back(storage.slab)
        self.leaving.clear()

    def _free_emptied(self, pool: SlabPool) -> None:
        self.emptied.clear()
        slab, self.slab = self.slab, None
        if slab is not None:
            pool.give_back(slab)


# ----------------------------------------------------------------------------------------------------------------------
# Activations of outstanding forwards: their copies on the host, and their bytes on the device.
#
#   forward    offload h.3.matmul -> slab;  the wait frees the device copy
#              ticket  [17, versions...]    number 17 names this forward for as long as autograd keeps the ticket
#   backward   prefetch (17, h.3.matmul) -> device;  wait
#   after      autograd drops the ticket -> the slabs of forward 17 are free for the next forward
#   in parts   executor.keep_parts: the parts live until autograd drops an empty tensor that stands for them
#   crowded    a later forward needs the device memory of forward 17: its kept activations -> slab
#              (`offload_outstanding`); before its backward they are copied back (`restore`)
#
# Each storage is copied once, even if the backward reads several views of it. A prefetch makes each view again with its
# size, strides, offset and bits (see `compat.tensors`). A storage is copied as a whole, or slice by slice if the
# regions that make or read it run in micro-batches.


class SavedActivations:
    """The outstanding forwards of an executor, and its running forward.

    It has more than 20 methods: keeping, offloading, fetching, counting and freeing activations all read or write the
    same table, from the number of a forward to its activations.
    """

    def __init__(self, lanes: Lanes, ledger: Ledger) -> None:
        self._lanes = lanes
        self._ledger = ledger
        self._pool = SlabPool(pin=lanes.pins)
        self._forwards: dict[int, OutstandingForward] = {}
        self._current = OutstandingForward()
        self._gone: list[OutstandingForward] = []
        """Forwards that autograd dropped while copies of theirs were in flight."""
        self.next_number = 0
        """The number of the next forward."""
        self.num_calls = 0
        """How many forwards all ranks have run together; the same number on each rank, 0 if there is one rank."""

    def begin(self) -> None:
        """Free the activations of a forward that raised an exception, and of those that were dropped with copies in
        flight; runs before each forward."""
        failed, self._current = self._current, OutstandingForward()
        failed.free(self._pool)
        while self._gone:
            forward = self._gone.pop()
            for event in forward.in_flight():
                self._lanes.compute_waits(event)  # compute uses the memory next, on the device and in the slabs
            forward.free(self._pool)

    def begin_leaving(self, group: str, nbytes: int, num: int) -> LeavingStorage:
        """Return a storage of `group` in the running forward that will leave in `num` slices of `nbytes` together."""
        storage = LeavingStorage(
            nbytes,
            num,
            self._pool.take(nbytes),
            self._lanes,
            self._ledger,
            label(Verb.OFFLOAD, GroupRef(GroupId(group))),
        )
        self._current.leaving.append(storage)
        return storage

    def offload(self, group: str, values: Sequence[torch.Tensor | LeavingView]) -> Transfer:
        """Start copying the storages of `values`, the activations of `group`, from the running forward to the host.

        The device copies stay alive until the wait. Slices of values that leave in slices are on their way already.
        Storages that are on the host already are kept as they are: attention with dropout keeps the seed of its random
        numbers there, although its meta kernel names the device, and its backward reads the seed on the host.
        """
        wholes = [value for value in values if isinstance(value, torch.Tensor)]
        storages = {compat.storage_key(value): value.untyped_storage() for value in wholes}
        leaving = list(dict.fromkeys(value.source for value in values if isinstance(value, LeavingView)))
        places: dict[object, int] = {key: place for place, key in enumerate((*storages, *leaving))}
        not_moved = frozenset(n for n, s in enumerate(storages.values()) if s.device.type != self._lanes.device.type)
        moved = [storage for place, storage in enumerate(storages.values()) if place not in not_moved]
        slabs = [self._pool.take(sum(aligned_bytes(storage.nbytes()) for storage in moved))] if moved else []
        on_host, start = [], 0
        for place, storage in enumerate(storages.values()):
            if place in not_moved:
                on_host.append(compat.bytes_of(storage))
            else:
                on_host.append(slabs[0].tensor(torch.uint8, (storage.nbytes(),), start))
                start = aligned_bytes(start + storage.nbytes())
        copies = [host for place, host in enumerate(on_host) if place not in not_moved]
        name, d2h = label(Verb.OFFLOAD, GroupRef(GroupId(group))), self._lanes.d2h
        with d2h.behind_compute(), self._ledger.span(Lane.D2H, name, sum(host.numel() for host in copies)):
            for host, storage in zip(copies, moved, strict=True):
                d2h.copy(host, compat.bytes_of(storage))
        views = tuple(
            replace(value.view, storage=places[value.source])
            if isinstance(value, LeavingView)
            else View(places[compat.storage_key(value)], compat.MemoryView.of(value))
            for value in values
        )
        transfer = Transfer(name, d2h.mark(), sources=(*wholes, *(s.handed_over() for s in leaving)))
        on_host += [storage.on_host for storage in leaving]
        slabs += [storage.slab for storage in leaving]
        self._current.leaving = [storage for storage in self._current.leaving if storage not in leaving]
        self._current.groups[group] = OffloadedGroup(tuple(slabs), tuple(on_host), views, transfer, not_moved)
        return transfer

    def leaving(self, ticket: torch.Tensor, group: str) -> Transfer:
        """Return the offload of `group` in the forward of `ticket`. Raises ActivationsGone if they were freed."""
        return self._offloaded(ticket, group).transfer

    def prefetch(self, ticket: torch.Tensor, group: str, slices: Slicing = ()) -> Transfer:
        """Start copying `group` of the forward of `ticket` to the device.

        The values of the transfer have the order of the offloaded values. `slices` has, for each value that arrives in
        slices, their dimension and number, else None: of these values the copy of the first slice starts. Raises
        ActivationsGone if the group was freed.
        """
        offloaded = self._offloaded(ticket, group)
        nums = [
            0 if place in offloaded.not_moved else num_slices(place, host.numel(), offloaded.views, slices)
            for place, host in enumerate(offloaded.on_host)
        ]
        name, after, h2d = label(Verb.PREFETCH, GroupRef(GroupId(group))), offloaded.transfer.event, self._lanes.h2d
        # Compute uses and frees them. The program waits for the copy before both.
        whole = {place: host.numel() for place, host in enumerate(offloaded.on_host) if nums[place] == 1}
        flats = {place: self._lanes.empty(nbytes) for place, nbytes in whole.items()}
        self._ledger.takes(name, flats.values())
        whole_bytes = sum(flat.numel() for flat in flats.values())
        with h2d.behind_compute(after), self._ledger.span(Lane.H2D, name, whole_bytes):
            for place, flat in flats.items():
                h2d.copy(flat, offloaded.on_host[place])
        arriving = {
            place: ArrivingStorage(host, nums[place], self._lanes, self._ledger, name)
            for place, host in enumerate(offloaded.on_host)
            if nums[place] > 1
        }
        flats |= {place: offloaded.on_host[place] for place in offloaded.not_moved}
        values = tuple(
            ArrivingView(arriving[view.storage], view) if view.storage in arriving else view.of(flats[view.storage])
            for view in offloaded.views
        )
        # Nothing need keep the slabs until the copy is done: `_drop` waits for it before they are unmapped, and later
        # offloads to them are behind compute, which waits for the copy.
        return Transfer(name, h2d.mark(), values)

    def keep_parts(self, values: Sequence[InParts | torch.Tensor]) -> Sequence[torch.Tensor]:
        """Keep `values`, activations of the running forward, and return the tensors that autograd saves for them.

        Each of these tensors is one and the same empty tensor. `values` are freed when its memory is. Autograd frees it
        as early as other saved tensors, but the ticket lives longer in a program with prefetches. If hooks pack saved
        tensors, each value is saved as one tensor instead.
        """
        if compat.packs_saved_tensors():
            memories: dict[int, torch.Tensor] = {}
            return [value.joined(memories) if isinstance(value, InParts) else value for value in values]
        holder, parts = torch.empty(0, device="cpu"), self._current.parts
        parts += values
        weakref.finalize(holder.untyped_storage(), parts.clear).atexit = False
        return [holder] * len(values)

    def kept_parts(
        self, ticket: torch.Tensor, saved: Sequence[torch.Tensor], layouts: Sequence[Layout]
    ) -> Sequence[InParts | torch.Tensor]:
        """Return the values that the forward of `ticket` kept, for which autograd `saved` tensors.

        Values that hooks packed come back as whole tensors in `layouts`, those of the capture, for which the backward
        was compiled. A hook may return another layout: such a value is copied. Raises ActivationsGone if the values
        were freed.
        """
        forward = self._forwards.get(number_of(ticket))
        if forward is not None and forward.parts:
            return tuple(forward.parts)
        if any(tuple(tensor.shape) != layout.view.shape for tensor, layout in zip(saved, layouts, strict=True)):
            raise ActivationsGone("in parts")
        memories: dict[int, torch.Tensor] = {}
        found: list[torch.Tensor] = []
        for tensor, layout in zip(saved, layouts, strict=True):
            found.append(kept_part(tensor, layout, memories.get(layout.memory)))
            memories.setdefault(layout.memory, found[-1])
        return found

    def ticket(self, versions: Sequence[int]) -> torch.Tensor:
        """End the running forward, and return its ticket: its number on this rank and `versions`. The inverted bits of
        the number say that the forward is a lean one.

        The activations of the forward are freed when the memory of the ticket is.
        """
        number, self.next_number = self.next_number, self.next_number + 1
        self._current.call = self.num_calls
        self._forwards[number], self._current = self._current, OutstandingForward()
        ticket = torch.tensor([number, *versions], dtype=torch.int64, device="cpu")
        weakref.finalize(ticket.untyped_storage(), self._forget, number).atexit = False
        return ticket

    def note(
        self,
        ticket: torch.Tensor,
        owner: object,
        device_bytes: int,
        given_bytes: int,
        activations: Sequence[torch.Tensor],
    ) -> None:
        """Record the device memory that the forward of `ticket` holds until its backward.

        `owner` is the compilation that ran the forward, `device_bytes` are its activations on the device, and
        `given_bytes` the inputs that its backward reads. `activations` are those without another reader.
        """
        forward = self._forwards[number_of(ticket)]
        forward.owner, forward.device_bytes, forward.given_bytes = owner, device_bytes, given_bytes
        on_device = (*activations, *tensors_in(forward.parts))
        storages = {compat.storage_key(value): value.untyped_storage() for value in on_device}
        moved = [storage for storage in storages.values() if storage.device.type == self._lanes.device.type]
        forward.storages = [weakref.ref(storage) for storage in moved if storage.nbytes()]

    def call_of(self, ticket: torch.Tensor) -> int:
        """Return the number of forwards that all ranks had run together, up to the forward of `ticket`."""
        return self._forwards[number_of(ticket)].call

    def outstanding_owners(self, leaving_out: torch.Tensor | None = None) -> list[object]:
        """Return the compilation of each outstanding forward in order, without the forward of `leaving_out`."""
        number = None if leaving_out is None else number_of(leaving_out)
        found = [forward.owner for other, forward in list(self._forwards.items()) if other != number]
        return [owner for owner in found if owner is not None]

    def device_bytes(self) -> int:
        """Return the bytes of outstanding forwards' activations on the device."""
        return sum(forward.device_bytes for forward in list(self._forwards.values()) if forward.slab is None)

    def held_bytes(self) -> int:
        """Return `device_bytes()` plus the bytes of the inputs of outstanding backward passes."""
        return self.device_bytes() + sum(forward.given_bytes for forward in list(self._forwards.values()))

    @torch.no_grad()
    def offload_outstanding(self) -> bool:
        """Copy the kept activations of all outstanding forwards to the host and free their device memory.

        Return whether any memory was freed. `restore` copies them back before their backward.
        """
        found = [forward for forward in list(self._forwards.values()) if forward.slab is None and forward.storages]
        with compat.real_tensors():  # the call may come while a later graph is being traced
            return sum(forward.empty(self._pool, self._ledger) for forward in found) > 0

    @torch.no_grad()
    def restore(self, ticket: torch.Tensor) -> None:
        """Copy activations that `offload_outstanding` took from the forward of `ticket` back to the device.

        Runs before the backward. Activations of the other outstanding forwards are offloaded to free memory for them.
        """
        forward = self._forwards.get(number_of(ticket))
        if forward is None or forward.slab is None:
            return
        self.offload_outstanding()
        forward.refill(self._pool, self._ledger)

    def end(self) -> None:
        """Unmap slabs without recent use; called after each backward."""
        if self._pool.end_step():
            self._drop(only_idle=True)

    @property
    def num_outstanding(self) -> int:
        """The number of outstanding forwards, counting a forward whose backward is running."""
        return len(self._forwards)

    @property
    def numbers(self) -> frozenset[int]:
        """The numbers of the outstanding forwards."""
        return frozenset(self._forwards.copy())

    def drop_free_slabs(self) -> None:
        """Unmap every slab without a forward."""
        self._drop(only_idle=False)

    def _drop(self, *, only_idle: bool) -> None:
        self._lanes.h2d.synchronize()
        self._lanes.d2h.synchronize()
        self._pool.drop(only_idle=only_idle)

    def _offloaded(self, ticket: torch.Tensor, group: str) -> OffloadedGroup:
        forward = self._forwards.get(number_of(ticket))
        if forward is None:
            raise ActivationsGone(group)
        return forward.groups[group]

    def _forget(self, number: int) -> None:
        forward = self._forwards.pop(number)
        if forward.in_flight():
            self._gone.append(forward)
        else:
            forward.free(self._pool)


def number_of(ticket: torch.Tensor) -> int:
    """Return the number of the forward that saved `ticket`."""
    return max(number := int(ticket[0]), ~number)


def mark_lean(ticket: torch.Tensor) -> None:
    """Note in `ticket`, which autograd does not hold yet, that its forward was a lean one."""
    ticket[0] = ~number_of(ticket)


def is_lean(ticket: torch.Tensor) -> bool:
    """Return whether the forward that saved `ticket` was a lean one; so does a copy, as saved-tensor hooks make it."""
    return int(ticket[0]) < 0
