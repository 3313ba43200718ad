"""Keep the activations of outstanding forwards: their copies on the host, and their bytes on the device."""

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
from elixir_compile.runtime.slices import (
    ArrivingStorage,
    ArrivingView,
    InParts,
    LeavingStorage,
    LeavingView,
    Slicing,
    View,
    kept_part,
    num_slices,
    tensors_in,
)

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
# regions that make or read it run in micro-batches (see `slices`).


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
