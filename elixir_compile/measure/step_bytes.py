"""Measure the device bytes of a running training step by place: each graph, and the code between graphs.

```text
  start     mark(A)      mark(after A)   mark(B) ...   mark(None)    stop
  |  None   |  A.fwd     |  eager code   |  B.fwd      |  user code  |           the peak of each place
```

On a CPU the blocks come from the events of the allocator, and the tensors that are there at the start are named by the
caller: memory of others does not count. On an accelerator the allocator keeps the peak, and memory of others is what is
allocated at the start beyond the named tensors.
"""

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch

from elixir_compile import compat
from elixir_compile.ops.shards import own_part
from elixir_compile.platforms import platform_of
from elixir_compile.runtime.slab import is_slab_memory

_running: "StepBytes | None" = None
"""What holds torch.profiler."""


class StepBytes(Protocol):
    """The bytes of a step from its creation to `stop`."""

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count `tensors`, inputs of a graph, from now on if they are not counted yet."""
        ...

    def mark(self, place: int | None) -> None:
        """Note that `place` runs from now on; None for code whose bytes do not matter."""
        ...

    def stop(self) -> Mapping[int, int]:
        """End the measurement, and return the peak in bytes of each place."""
        ...


def start_step_bytes(device: torch.device, own: Iterable[torch.Tensor], more_bytes: int) -> StepBytes | None:
    """Begin to measure on `device`; None if that is not possible now, as torch.profiler is on.

    `own` are the tensors that count from the start. `more_bytes` are added to all figures, for tensors that are not
    among `own`.
    """
    global _running
    tensors = [tensor for tensor in map(own_part, own) if tensor.device == device]
    if platform_of(device).has_own_memory:
        return _PeakBytes(device, tensors, more_bytes)
    if compat.is_profiling():
        return None
    _running = made = _EventBytes(tensors, more_bytes)
    return made


def drop_running_step_bytes() -> None:
    """End the measurement of a step that holds torch.profiler, without a result: somebody else needs it."""
    if _running is not None:
        _running.stop()


atexit.register(drop_running_step_bytes)  # torch 2.13 crashes if its profiler is on when the interpreter ends


def nbytes_at(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the storages of `tensors` by address, without slabs, which are host memory."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        for dense in compat.dense_parts(tensor):
            if dense.layout is torch.strided:
                storage = dense.untyped_storage()
                found[storage.data_ptr()] = storage
    return {address: each for address, each in found.items() if each.nbytes() and not is_slab_memory(address)}


class _EventBytes:
    """A `StepBytes` of the CPU."""

    def __init__(self, own: Sequence[torch.Tensor], more_bytes: int) -> None:
        self._more_bytes = more_bytes
        self._thread = threading.get_ident()
        self._places: list[int | None] = []
        """The place of each mark."""
        self._events: list[tuple[int, int | None, int]] = []
        """(time, address, bytes) of each adopted block, and of each block that was freed, with 0 bytes."""
        self._known: set[int] = set()
        self._watches: list[weakref.ref[torch.UntypedStorage]] = []
        self._peaks: Mapping[int, int] | None = None
        self._profile = compat.AllocatorProfile()
        self.adopt(own)

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        now_ns = time.time_ns()
        for address, storage in nbytes_at(map(own_part, tensors)).items():
            if address not in self._known:
                self._known.add(address)
                self._events.append((now_ns, address, storage.nbytes()))
                self._watches.append(weakref.ref(storage, self._on_death(address)))

    def _on_death(self, address: int) -> Callable[[object], None]:
        events, known = self._events, self._known

        def note(_: object) -> None:
            known.discard(address)
            events.append((time.time_ns(), address, 0))

        return note

    def mark(self, place: int | None) -> None:
        if self._peaks is None and threading.get_ident() == self._thread:
            self._profile.mark(len(self._places))
            self._places.append(place)

    def stop(self) -> Mapping[int, int]:
        global _running
        if self._peaks is None:
            self._peaks = {}
            if _running is self:
                _running = None
            if threading.get_ident() == self._thread:
                self._profile.stop()
                self._watches.clear()
                self._peaks = self._peaks_of(self._profile.events())
        return self._peaks

    def _peaks_of(self, allocations: Sequence[tuple[int, int | None, int]]) -> Mapping[int, int]:
        adopted = sorted(self._events, key=lambda event: event[0])
        merged = sorted([*adopted, *allocations], key=lambda event: event[0])
        nbytes_of: dict[int, int] = {}
        live = self._more_bytes
        place: int | None = None
        peaks: dict[int, int] = {}
        for _, address, nbytes in merged:
            if address is None:
                place = self._places[nbytes]
            elif nbytes > 0:
                live += nbytes - nbytes_of.get(address, 0)
                nbytes_of[address] = nbytes
            else:
                live -= nbytes_of.pop(address, 0)
            if place is not None:
                peaks[place] = max(peaks.get(place, 0), live)
        return peaks


class _PeakBytes:
    """A `StepBytes` of an accelerator."""

    def __init__(self, device: torch.device, own: Sequence[torch.Tensor], more_bytes: int) -> None:
        self._device = device
        self._platform = platform_of(device)
        self._user_peak_bytes = self._platform.user_peak_bytes(device)
        own_bytes = sum(storage.nbytes() for storage in nbytes_at(own).values()) + more_bytes
        self._foreign_bytes = max(0, self._platform.tensor_bytes(device) - own_bytes)
        self._place: int | None = None
        self._peaks: dict[int, int] = {}
        self._is_running = True
        self._platform.reset_peak(device)

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do nothing: inputs are among the bytes allocated at the start if they were there, and in the peak if not."""

    def mark(self, place: int | None) -> None:
        if not self._is_running:
            return
        peak_bytes = self._platform.peak_bytes(self._device)
        self._user_peak_bytes = max(self._user_peak_bytes, self._platform.user_peak_bytes(self._device))
        if self._place is not None:
            self._peaks[self._place] = max(self._peaks.get(self._place, 0), peak_bytes - self._foreign_bytes)
        self._place = place
        self._platform.reset_peak(self._device)

    def stop(self) -> Mapping[int, int]:
        if self._is_running:
            self.mark(None)
            self._is_running = False
            self._platform.raise_peak(self._device, self._user_peak_bytes)
        return self._peaks
