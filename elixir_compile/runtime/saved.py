"""What forwards leave for their backward: activations on the host, and how much stays on the device.

```text
  forward    offload h.3.matmul -> slab;  wait: the device copy is gone
             ticket  [17, versions...]    number 17 names this forward, for as long as autograd keeps the ticket
  backward   prefetch (17, h.3.matmul) -> device;  wait
  after      autograd drops the ticket -> the slabs of forward 17 are free for the next
  crowded    what a plan kept on the device beside a later forward that needs the room -> slab (`make_room`);
             its backward brings it back first
```

A storage is copied as a whole, once, whatever views of it the backward reads; each view is made again with its own
size, stride and offset.
"""

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from elixir_compile import compat
from elixir_compile.errors import ActivationsGone
from elixir_compile.ir import Lane
from elixir_compile.runtime.ledger import Ledger
from elixir_compile.runtime.slab import Slab, aligned_bytes
from elixir_compile.runtime.streams import CopyStream, Transfer

_IDLE_STEPS = 4
"""Backwards after which a slab that nobody took is unmapped: an accumulation takes its slabs one after another."""


class SlabPool:
    """Slabs that are taken and come back, so that pages are mapped and pinned once.

    Slabs may come back from any thread, also inside a garbage collection.
    """

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._now = 0
        self._free: list[tuple[Slab, int]] = []
        self._returned: deque[Slab] = deque()  # appended to without a lock

    def take(self, nbytes: int) -> Slab:
        """Return the smallest free slab of `nbytes` or more, or a new one."""
        self._collect()
        fitting = [entry for entry in self._free if entry[0].nbytes >= nbytes]
        if not fitting:
            return Slab(nbytes, pin=self._pin)
        entry = min(fitting, key=lambda entry: entry[0].nbytes)
        self._free.remove(entry)
        return entry[0]

    def give_back(self, slab: Slab) -> None:
        """Let others take `slab`."""
        self._returned.append(slab)

    def end_step(self) -> bool:
        """Count a step; return whether a slab has been free for too long."""
        self._now += 1
        self._collect()
        return any(self._is_idle(since) for _, since in self._free)

    def drop(self, *, only_idle: bool) -> None:
        """Unmap what is free; no copy may still use it."""
        self._collect()
        self._free = [entry for entry in self._free if only_idle and not self._is_idle(entry[1])]

    def _is_idle(self, since: int) -> bool:
        return self._now - since > _IDLE_STEPS

    def _collect(self) -> None:
        while self._returned:
            self._free.append((self._returned.popleft(), self._now))


@dataclass(frozen=True, slots=True)
class _Look:
    """One value: where in which storage of its group."""

    storage: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def at(self, flat: torch.Tensor) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=flat.device)
        return empty.set_(flat.untyped_storage(), self.offset, self.size, self.stride)


@dataclass(slots=True)
class _Away:
    """One group of one forward on the host."""

    slab: Slab
    on_host: tuple[torch.Tensor, ...]
    """The storages, as bytes."""
    looks: tuple[_Look, ...]
    transfer: Transfer


@dataclass(slots=True)
class _Forward:
    """What one forward left."""

    groups: dict[str, _Away] = field(default_factory=dict)
    owner: object = None
    """Whose forward it was."""
    call: int = 0
    """How many forwards all ranks had run together, it included."""
    device_bytes: int = 0
    given_bytes: int = 0
    """Of inputs, which stay for as long as its backward needs them."""
    kept: list["weakref.ref[torch.UntypedStorage]"] = field(default_factory=list)
    """Storages on the device that only its backward reads."""
    emptied: list[tuple["weakref.ref[torch.UntypedStorage]", torch.Tensor]] = field(default_factory=list)
    """Those whose bytes are on the host, to make room, with the bytes."""
    slab: Slab | None = None
    """The memory of these bytes."""


class SavedActivations:
    """The forwards of one executor whose backward is still to come."""

    def __init__(self, device: torch.device, h2d: CopyStream, d2h: CopyStream, ledger: Ledger) -> None:
        self._device = device
        self._h2d = h2d
        self._d2h = d2h
        self._ledger = ledger
        self._pool = SlabPool(pin=device.type == "cuda")
        self._forwards: dict[int, _Forward] = {}
        self._current = _Forward()
        self.next_number = 0
        """The number of the next forward."""

    def begin(self) -> None:
        """Before a forward: let go of what one that failed left."""
        failed, self._current = self._current, _Forward()
        self._let_go(failed)

    def offload(self, group: str, values: Sequence[torch.Tensor]) -> Transfer:
        """Start copying the storages of `values` to the host; the device copies live until the wait."""
        storages = {compat.storage_key(value): value.untyped_storage() for value in values}
        places = {key: place for place, key in enumerate(storages)}
        slab = self._pool.take(sum(aligned_bytes(storage.nbytes()) for storage in storages.values()))
        on_host, start = [], 0
        for storage in storages.values():
            on_host.append(slab.tensor(torch.uint8, (storage.nbytes(),), start))
            start = aligned_bytes(start + storage.nbytes())
        label = f"offload {group}"
        with self._d2h.behind_compute(), self._ledger.span(Lane.D2H, label):
            for host, storage in zip(on_host, storages.values(), strict=True):
                host.copy_(_as_bytes(storage), non_blocking=True)
        looks = tuple(
            _Look(places[compat.storage_key(v)], v.dtype, v.size(), v.stride(), v.storage_offset()) for v in values
        )
        transfer = Transfer(label, self._d2h.mark(), kept=tuple(values))
        self._current.groups[group] = _Away(slab, tuple(on_host), looks, transfer)
        return transfer

    def leaving(self, ticket: torch.Tensor, group: str) -> Transfer:
        """Return the offload of `group` in the forward of `ticket`; ActivationsGone when nobody knows it any more."""
        return self._away(ticket, group).transfer

    def prefetch(self, ticket: torch.Tensor, group: str) -> Transfer:
        """Start copying `group` of the forward of `ticket` to the device; its values are those that were offloaded.

        Raises ActivationsGone when they are not on the host any more.
        """
        away = self._away(ticket, group)
        # On the compute stream, where they are used and freed; the copy only borrows them.
        flats = [torch.empty(host.numel(), dtype=torch.uint8, device=self._device) for host in away.on_host]
        label = f"prefetch {group}"
        with self._h2d.behind_compute(away.transfer.event), self._ledger.span(Lane.H2D, label):
            for flat, host in zip(flats, away.on_host, strict=True):
                flat.copy_(host, non_blocking=True)
        values = tuple(look.at(flats[look.storage]) for look in away.looks)
        return Transfer(label, self._h2d.mark(), values, away.on_host)

    def ticket(self, versions: Sequence[int], call: int) -> torch.Tensor:
        """End a forward, the one of `call`: return its number and `versions`; what it offloaded stays while the
        tensor's memory does."""
        number, self.next_number = self.next_number, self.next_number + 1
        self._current.call = call
        self._forwards[number], self._current = self._current, _Forward()
        ticket = torch.tensor([number, *versions], dtype=torch.int64)
        weakref.finalize(ticket.untyped_storage(), self._forget, number).atexit = False
        return ticket

    def note(
        self, ticket: torch.Tensor, owner: object, device_bytes: int, given_bytes: int, kept: Sequence[torch.Tensor]
    ) -> None:
        """Remember that the forward of `ticket`, of `owner`, left `device_bytes` on the device, of which `kept` are for
        its backward alone, and that this reads `given_bytes` of inputs."""
        forward = self._forwards[number_of(ticket)]
        forward.owner, forward.device_bytes, forward.given_bytes = owner, device_bytes, given_bytes
        storages = {compat.storage_key(value): value.untyped_storage() for value in kept}
        forward.kept = [weakref.ref(storage) for storage in storages.values() if storage.nbytes()]

    def call_of(self, ticket: torch.Tensor) -> int:
        """Return the call of the forward that `ticket` is of."""
        return self._forwards[number_of(ticket)].call

    def waiting(self, leaving_out: torch.Tensor | None = None) -> list[object]:
        """Return whose forwards wait for their backward, in order, that of the ticket `leaving_out` left out."""
        number = None if leaving_out is None else number_of(leaving_out)
        found = [forward.owner for other, forward in list(self._forwards.items()) if other != number]
        return [owner for owner in found if owner is not None]

    def device_bytes(self) -> int:
        """Return the bytes that forwards left on the device and no backward freed yet."""
        return sum(forward.device_bytes for forward in list(self._forwards.values()) if forward.slab is None)

    def held_bytes(self) -> int:
        """Return `device_bytes()` and those of the inputs that wait with them."""
        return self.device_bytes() + sum(forward.given_bytes for forward in list(self._forwards.values()))

    @torch.no_grad()
    def make_room(self) -> bool:
        """Take what forwards left on the device to the host until their backward; return whether there was anything."""
        found = [forward for forward in list(self._forwards.values()) if forward.slab is None and forward.kept]
        with compat.real_tensors():  # where a later graph is being traced
            return sum(map(self._empty, found)) > 0

    @torch.no_grad()
    def bring_back(self, ticket: torch.Tensor) -> None:
        """Before a backward: have on the device again what its forward left there; other forwards' makes room."""
        forward = self._forwards.get(number_of(ticket))
        if forward is None or forward.slab is None:
            return
        self.make_room()
        for reference, host in forward.emptied:
            storage = reference()
            if storage is not None:
                storage.resize_(host.numel())
                _as_bytes(storage).copy_(host)
        self._give_back_room(forward)

    def _empty(self, forward: _Forward) -> bool:
        storages = [storage for reference in forward.kept if (storage := reference()) is not None]
        storages = [storage for storage in storages if storage.nbytes() and storage.resizable()]
        if not storages:
            return False
        forward.slab = self._pool.take(sum(aligned_bytes(storage.nbytes()) for storage in storages))
        start = 0
        for storage in storages:
            host = forward.slab.tensor(torch.uint8, (storage.nbytes(),), start)
            start = aligned_bytes(start + storage.nbytes())
            # Not asynchronous: it happens in a few steps at most, and the memory is wanted at once.
            host.copy_(_as_bytes(storage))
            forward.emptied.append((weakref.ref(storage), host))
            storage.resize_(0)
        return True

    def _give_back_room(self, forward: _Forward) -> None:
        forward.emptied.clear()
        slab, forward.slab = forward.slab, None
        if slab is not None:
            self._pool.give_back(slab)

    def end(self) -> None:
        """After a backward: unmap slabs that no step takes any more."""
        if self._pool.end_step():
            self._drop(only_idle=True)

    @property
    def num_waiting(self) -> int:
        """Forwards whose backward is still to come, the one that runs included."""
        return len(self._forwards)

    def drop_free_slabs(self) -> None:
        """Unmap every slab that no forward holds."""
        self._drop(only_idle=False)

    def _drop(self, *, only_idle: bool) -> None:
        self._h2d.synchronize()
        self._d2h.synchronize()
        self._pool.drop(only_idle=only_idle)

    def _away(self, ticket: torch.Tensor, group: str) -> _Away:
        forward = self._forwards.get(number_of(ticket))
        if forward is None:
            raise ActivationsGone(group)
        return forward.groups[group]

    def _forget(self, number: int) -> None:
        self._let_go(self._forwards.pop(number))

    def _let_go(self, forward: _Forward) -> None:
        self._give_back_room(forward)
        for away in forward.groups.values():
            away.transfer.kept = ()
            away.on_host = ()
            self._pool.give_back(away.slab)


def number_of(ticket: torch.Tensor) -> int:
    """Return the number of the forward that `ticket` is of."""
    return int(ticket[0])


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
