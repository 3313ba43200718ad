"""Measure a training step: bytes from the allocators, spans and counts from the executors.

On a CPU the bytes before the step are those of all storages, and the peak is counted from the events of the allocator.
No figure of the planner is used.
"""

import gc
import heapq
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Self

import torch
from torch.profiler import ProfilerActivity, profile

from elixir_compile import compat
from elixir_compile.base.errors import NestedMeasurement
from elixir_compile.compat import cpu_allocations
from elixir_compile.compat.platforms import PeakRecord, accelerator, platform_of
from elixir_compile.graph.ops.shards import own_part
from elixir_compile.ir.record import Origin, Record, Span
from elixir_compile.runtime.ledger import Ledger, all_ledgers
from elixir_compile.runtime.measure.step_bytes import drop_running_step_bytes
from elixir_compile.runtime.recording import StepClock
from elixir_compile.runtime.slab import is_slab_memory, peak_slab_bytes, reset_peak_slab_bytes
from elixir_compile.runtime.updates import finish_updates

_measuring = threading.Lock()
_PATIENCE_S = 60.0
"""Seconds to wait for writes to the disk that the step has started. The next step would wait for them too."""


def measure_step(fn: Callable[[], object], *, device: str | None = None) -> Record:
    """Run `fn`, a training step, once, and return its seconds, bytes, spans and counts.

    `device_peak_bytes` counts all tensors on the device, also those from before the step. On an accelerator it is the
    most bytes that tensors asked torch's allocator for; the peak statistics that you read yourself stay. If somebody
    else reads the history of the allocator, it may be a higher peak since you reset these statistics. On a CPU it is
    computed from the storages of all live tensors and the memory events of torch.profiler, without slabs, which are
    host memory. `host_peak_bytes` are the slabs. On a CPU `step_s` includes the profiler, so time steps without it.

    `device` is `cpu` or `cuda`; None means the accelerator if any tensor is there. An exception of `fn` passes
    through. Raises NestedMeasurement if another measurement is running, or if another thread trains on the CPU and its
    step is measured against its budget.

    Example:
        record = elixir.measure_step(lambda: compiled(batch).backward())
        print(record.device_peak_bytes, record.step_s)
    """
    if not _measuring.acquire(blocking=False):
        raise NestedMeasurement()
    try:
        if not drop_running_step_bytes():  # it holds the profiler
            raise NestedMeasurement("", True)
        measured = _device_of(device)
        finish_updates()  # of the previous step
        reset_peak_slab_bytes()
        with _observed_ledgers() as seen:
            step_s, device_peak_bytes = _measured(lambda: _step_with_updates(fn), measured)
        return Record(
            origin=Origin.MEASURED,
            step_s=step_s,
            device_peak_bytes=device_peak_bytes,
            host_peak_bytes=peak_slab_bytes(),
            spans=tuple(seen.spans),
            counts=dict(seen.counts),
        )
    finally:
        _measuring.release()


def _step_with_updates(fn: Callable[[], object]) -> None:
    """Run `fn`, then finish the updates that it left to the host, because they are part of the step."""
    fn()
    finish_updates()


def _device_of(name: str | None) -> torch.device:
    """Return the device called `name`; for None, the current accelerator if any tensor is there, else the CPU."""
    found = accelerator() if name is None else None
    if found is not None and platform_of(found).allocated_bytes(found):
        return found
    device = torch.device(name or "cpu")
    return device if device.index is not None else platform_of(device).current()


def _measured(fn: Callable[[], object], device: torch.device) -> tuple[float, int]:
    """Run `fn`, and return its seconds and its peak on `device` in bytes."""
    platform = platform_of(device)
    if not platform.has_own_memory:
        return _cpu_step(fn)
    platform.synchronize(device)
    with PeakRecord(platform, device) as record:
        began_s = time.perf_counter()
        fn()
        platform.synchronize(device)
        step_s = time.perf_counter() - began_s
    return step_s, platform.peak_bytes(device) if record.peak_bytes is None else record.peak_bytes


def _cpu_step(fn: Callable[[], object]) -> tuple[float, int]:
    with Resident() as resident:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
            began_s = time.perf_counter()
            fn()
            step_s = time.perf_counter() - began_s
        return step_s, peak_bytes(resident.nbytes_at, resident.freed, cpu_allocations(profiler))


class _Seen:
    """The spans and counts of all ledgers during a step."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.counts: Counter[str] = Counter()

    def add(self, ledger: Ledger, counts_before: Mapping[str, int]) -> None:
        self.counts.update(ledger.counts)
        self.counts.subtract(counts_before)


@contextmanager
def _observed_ledgers() -> Iterator[_Seen]:
    """Record on all ledgers. A ledger that is made during the step, by a first compilation, has counts but no spans."""
    seen = _Seen()
    counts_before = {ledger: ledger.counts for ledger in all_ledgers()}
    clock = StepClock(ledger.lanes for ledger in counts_before)
    recordings = [ledger.start_recording(clock) for ledger in counts_before]
    try:
        yield seen
    finally:
        clock.end()
        for recording in recordings:
            seen.spans.extend(recording.stop(_PATIENCE_S))
        for ledger in {*counts_before, *all_ledgers()}:
            seen.add(ledger, counts_before.get(ledger, {}))
        seen.counts = Counter({verb: times for verb, times in seen.counts.items() if times})
        seen.spans.sort(key=lambda span: (span.start_s, span.end_s))


def peak_bytes(
    resident: Mapping[int, int], freed: Iterable[tuple[int, int]], allocations: Iterable[tuple[int, int, int]]
) -> int:
    """Return the peak of live bytes in a step.

    `resident` has the bytes of the blocks at the start of the step, by address, and `freed` (time, address) for each
    freed resident block. `allocations` are (time, address, bytes) in order, on the same clock; bytes are
    negative if the block was freed.

    A block is known only by its address. torch reports the end of a resident block only if an earlier profiler saw its
    allocation, and then it may report a stale size.
    """
    before, during = dict(resident), dict[int, int]()
    live = most = sum(before.values())
    deaths = sorted((at, address, 0) for at, address in freed)
    for _, address, nbytes in heapq.merge(deaths, allocations, key=lambda event: event[0]):
        if nbytes > 0:
            # An earlier block at this address was freed, whether or not torch reported it.
            live += nbytes - during.pop(address, 0) - before.pop(address, 0)
            during[address] = nbytes
            most = max(most, live)
        elif nbytes < 0 and address in during:
            live -= during.pop(address)
        else:
            live -= before.pop(address, 0)
    return most


class Resident:
    """The storages of all CPU tensors alive at its creation, without slabs.

    Until `close` it records freed storages.
    """

    def __init__(self) -> None:
        self.nbytes_at: dict[int, int] = {}
        """Bytes of each block, by its address."""
        self.freed: list[tuple[int, int]] = []
        """(time on the clock of `time.time_ns`, address) of each block that was freed since."""
        self._watches: list[weakref.ref[torch.UntypedStorage]] = []
        gc.collect()
        for storage in _cpu_storages():
            address = compat.memory_address(storage)
            if (
                address is not None
                and storage.nbytes()
                and address not in self.nbytes_at
                and not is_slab_memory(address)
            ):
                self.nbytes_at[address] = storage.nbytes()
                self._watches.append(weakref.ref(storage, self._on_death(address)))

    @property
    def nbytes(self) -> int:
        """Bytes of all storages at the start."""
        return sum(self.nbytes_at.values())

    def close(self) -> None:
        """Stop recording freed storages."""
        self._watches.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _on_death(self, address: int) -> Callable[[object], None]:
        freed = self.freed
        return lambda _: freed.append((time.time_ns(), address))


def _cpu_storages() -> Iterator[torch.UntypedStorage]:
    for tensor in _tensors():
        # The memory of a DTensor is the memory of its local tensor.
        own = compat.unwrapped(own_part(tensor))
        try:
            storage = own.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse and opaque tensors have no storage
            continue
        if storage.device.type == "cpu":  # the storage of a fake tensor is on `meta`, whatever its device says
            yield storage


def _tensors() -> Iterator[torch.Tensor]:
    for thing in gc.get_objects():
        # Not `isinstance`: it reads `__class__`, and lazy modules import themselves at this read.
        if issubclass(type(thing), torch.Tensor):
            yield thing
            if thing.is_leaf and thing.grad is not None:  # a gradient may have no Python object among those of `gc` yet
                yield thing.grad
