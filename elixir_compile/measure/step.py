"""One training step -> `Record`: bytes from the allocators, spans and counts from the executors.

Never the planner's own numbers.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile

from elixir_compile.compat import cpu_allocations
from elixir_compile.errors import NestedMeasurement
from elixir_compile.ir.record import Origin, Record, Span
from elixir_compile.measure.memory import Resident, peak_bytes
from elixir_compile.runtime.ledger import Ledger, all_ledgers
from elixir_compile.runtime.slab import peak_slab_bytes, reset_peak_slab_bytes
from elixir_compile.runtime.updates import finish_updates

_measuring = threading.Lock()


def measure_step(fn: Callable[[], object], *, device: str | None = None) -> Record:
    """Run `fn`, one training step, once, and return what it took.

    `device_peak_bytes` is all that was on the device at once: what was there before the step and what the step
    allocated. On CUDA it is `torch.cuda.max_memory_allocated`; on a CPU the storages of all live tensors plus
    torch.profiler's memory events, where slabs, the host tier, do not count. `host_peak_bytes` are the slabs. On a CPU
    `step_s` includes the profiler, so time steps without it.

    `device` is `cpu` or `cuda`; left out, CUDA when it holds a tensor. An exception of `fn` passes through. Raises
    NestedMeasurement when a measurement is running.
    """
    if not _measuring.acquire(blocking=False):
        raise NestedMeasurement()
    try:
        kind = device or ("cuda" if torch.cuda.is_available() and torch.cuda.memory_allocated() else "cpu")
        finish_updates()  # of the step before
        reset_peak_slab_bytes()
        with _observed_ledgers() as seen:
            measure = _cuda_step if torch.device(kind).type == "cuda" else _cpu_step
            step_s, device_peak_bytes = measure(lambda: _whole_step(fn))
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


def _whole_step(fn: Callable[[], object]) -> None:
    """A step that returned may have left updates to the host: they are its own."""
    fn()
    finish_updates()


def _cuda_step(fn: Callable[[], object]) -> tuple[float, int]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    began_s = time.perf_counter()
    fn()
    torch.cuda.synchronize()
    return time.perf_counter() - began_s, torch.cuda.max_memory_allocated()


def _cpu_step(fn: Callable[[], object]) -> tuple[float, int]:
    with Resident() as resident:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            began_s = time.perf_counter()
            fn()
            step_s = time.perf_counter() - began_s
        return step_s, peak_bytes(resident.nbytes_at, resident.freed, cpu_allocations(profiler))


class _Seen:
    """What the ledgers saw between two moments."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.counts: Counter[str] = Counter()

    def add(self, ledger: Ledger, counts_before: Mapping[str, int]) -> None:
        self.counts.update(ledger.counts)
        self.counts.subtract(counts_before)


@contextmanager
def _observed_ledgers() -> Iterator[_Seen]:
    """Record on every ledger; those made during the step (its first compilation) have counts, and no spans."""
    seen = _Seen()
    counts_before = {ledger: ledger.counts for ledger in all_ledgers()}
    recordings = [ledger.start_recording() for ledger in counts_before]
    try:
        yield seen
    finally:
        for recording in recordings:
            seen.spans.extend(recording.stop())
        for ledger in {*counts_before, *all_ledgers()}:
            seen.add(ledger, counts_before.get(ledger, {}))
        seen.counts = Counter({verb: times for verb, times in seen.counts.items() if times})
        seen.spans.sort(key=lambda span: (span.start_s, span.end_s))
