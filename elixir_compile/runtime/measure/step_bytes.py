"""Measure the device bytes of a running training step by place: each graph, and the code between graphs.

```text
  start     mark(A)      mark(after A)   mark(B) ...   mark(None)    stop
  |  None   |  A.fwd     |  eager code   |  B.fwd      |  user code  |           the peak of each place
```

On a CPU the blocks come from the events of the allocator, and the tensors that are there at the start are named by the
caller: memory of others does not count. On an accelerator they come from the history of the allocator, and memory of
others is what is allocated at the start beyond the named tensors.
"""

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch

from elixir_compile import compat
from elixir_compile.compat.platforms import BlockRecord, platform_of
from elixir_compile.graph.ops.shards import own_part
from elixir_compile.runtime.slab import is_slab_memory

_Event = tuple[int, int | None, int]
_running: "_EventBytes | None" = None
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

    def drop(self) -> None:
        """End the measurement without a result: nothing reads its events."""
        ...


def start_step_bytes(device: torch.device, own: Iterable[torch.Tensor], more_bytes: int) -> StepBytes | None:
    """Begin to measure on `device`; None if that is not possible: torch.profiler cannot be started, or torch keeps no
    history.

    `own` are the tensors that count from the start. `more_bytes` are added to all figures, for tensors that are not
    among `own`.
    """
    global _running
    tensors = [tensor for tensor in map(own_part, own) if tensor.device == device]
    if platform_of(device).has_own_memory:
        blocks = platform_of(device).record_blocks(device)
        return None if blocks is None else _HistoryBytes(blocks, tensors, more_bytes)
    end_idle_profiler()
    if _running is not None or not compat.can_profile() or compat.backward_pass_id() >= 0:
        return None
    _running = made = _EventBytes(tensors, more_bytes)
    return made


def drop_running_step_bytes() -> bool:
    """End the measurement of a step that holds torch.profiler, without a result: somebody else needs it.

    Returns whether none holds it now: see `_EventBytes.release`.
    """
    global _running
    running = _running
    if running is not None:
        running.drop()
        running.release()
        if running.is_released or not running.thread.is_alive():
            _running = None
    return _running is None


def end_idle_profiler() -> None:
    """Stop torch.profiler if the measurement that holds it has ended where it could not be stopped."""
    if _running is not None and _running.is_over:
        drop_running_step_bytes()


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
        self.thread = threading.current_thread()
        """The thread that holds torch.profiler."""
        self._places: list[int | None] = []
        """The place of each mark."""
        self._events: list[_Event] = []
        """(time, address, bytes) of each adopted block, and of each block that was freed, with 0 bytes."""
        self._known: set[int] = set()
        self._watches: list[weakref.ref[torch.UntypedStorage]] = []
        self._peaks: Mapping[int, int] | None = None
        self.is_released = False
        """Whether torch.profiler has been stopped."""
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
        if self._peaks is None and threading.current_thread() is self.thread:
            self._profile.mark(len(self._places))
            self._places.append(place)

    @property
    def is_over(self) -> bool:
        """Whether the measurement has ended."""
        return self._peaks is not None

    def stop(self) -> Mapping[int, int]:
        if self._peaks is None:
            self.drop()
            if self.is_released:
                self._peaks = self._peaks_of(self._profile.events())
        return self._peaks or {}

    def drop(self) -> None:
        global _running
        if self._peaks is None:
            self._peaks = {}
            self._watches.clear()
            self.release()
            if self.is_released and _running is self:
                _running = None

    def release(self) -> None:
        """Stop torch.profiler, if it is not stopped and may be stopped here.

        A measurement may end anywhere: the garbage collector may end it with its model. Only the thread that started
        the profiler may stop it (torch 2.13 crashes), and not in a backward pass, whose end turns it on again: it
        restores the state of the thread.
        """
        if not self.is_released and threading.current_thread() is self.thread and compat.backward_pass_id() < 0:
            self.is_released = True
            self._profile.stop()

    def _peaks_of(self, allocations: Sequence[_Event]) -> Mapping[int, int]:
        merged = sorted([*self._events, *allocations], key=lambda event: event[0])
        return _peaks(merged, self._places, {}, self._more_bytes)


def _peaks(
    events: Iterable[_Event], places: Sequence[int | None], nbytes_of: dict[int, int], live: int
) -> Mapping[int, int]:
    """Return the peak in bytes of each of `places`.

    `events` are in order: (time, address, bytes) of each block that came, or of one that went if the bytes are not
    positive, and (time, None, number) of each mark. `nbytes_of` has the blocks at the start, of which `live` bytes
    count.
    """
    place: int | None = None
    peaks: dict[int, int] = {}
    for _, address, nbytes in events:
        if address is None:
            place = places[nbytes]
        elif nbytes > 0:
            live += nbytes - nbytes_of.get(address, 0)
            nbytes_of[address] = nbytes
        else:
            live -= nbytes_of.pop(address, 0)
        if place is not None:
            peaks[place] = max(peaks.get(place, 0), live)
    return peaks


class _HistoryBytes:
    """A `StepBytes` of an accelerator."""

    def __init__(self, blocks: BlockRecord, own: Sequence[torch.Tensor], more_bytes: int) -> None:
        self._blocks = blocks
        self._own_bytes = sum(storage.nbytes() for storage in nbytes_at(own).values()) + more_bytes
        self._marks: list[_Event] = []
        self._places: list[int | None] = []
        self._peaks: Mapping[int, int] | None = None

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do nothing: inputs are in the history if they were made after the start."""

    def mark(self, place: int | None) -> None:
        self._marks.append((time.time_ns(), None, len(self._places)))
        self._places.append(place)

    def stop(self) -> Mapping[int, int]:
        if self._peaks is None:
            events = self._blocks.stop() or ()
            live_bytes = min(self._own_bytes, sum(self._blocks.nbytes_at.values()))
            merged = sorted([*self._marks, *events], key=lambda event: event[0])
            self._peaks = _peaks(merged, self._places, dict(self._blocks.nbytes_at), live_bytes) if events else {}
        return self._peaks

    def drop(self) -> None:
        if self._peaks is None:
            self._peaks = {}
            self._blocks.stop()
