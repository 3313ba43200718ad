"""The activations of one forward whose backward has not run yet, on the host and on the device."""

import weakref
from dataclasses import dataclass, field

import torch

from elixir_compile import compat
from elixir_compile.ir import Kept, Lane, Verb, label
from elixir_compile.runtime.lanes import Event, Transfer
from elixir_compile.runtime.ledger import Ledger
from elixir_compile.runtime.parts import InParts
from elixir_compile.runtime.slab import Slab, SlabPool, aligned_bytes
from elixir_compile.runtime.slices import LeavingStorage, View


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
