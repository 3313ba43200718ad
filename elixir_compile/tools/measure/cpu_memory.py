"""Record the blocks of the CPU's allocator in a step, and tell their kinds.

torch.profiler sees the threads that inherit it: the caller's and autograd's. What the worker of host updates allocates
is not in the figures, nor are slabs, which are host memory.
"""

import heapq
from collections.abc import Iterable, Sequence

from torch.profiler import ProfilerActivity, profile

from elixir_compile.compat import cpu_allocations
from elixir_compile.ir.record import Span
from elixir_compile.runtime.measure.step import Resident
from elixir_compile.runtime.recording import Taken, anchor
from elixir_compile.tools.measure.lifetimes import live_by_kind
from elixir_compile.tools.measure.phases import StepTimes
from elixir_compile.tools.measure.step_memory import AllocatorClock
from elixir_compile.tools.study.observed import OTHER, Live


class CpuMemory:
    """The blocks of the CPU's allocator from `start` to `stop`: a `StepMemory`."""

    def __init__(self, kinds: dict[int, str]) -> None:
        """`kinds` are the kinds of blocks that are there before the step, by address."""
        self._kinds = kinds
        # torch 2.11 warns unless events are kept over cycles; here there is one.
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        self._resident = Resident()
        self._began = anchor()

    def start(self) -> None:
        """Begin to record."""
        self._profiler.start()
        self._began = anchor()

    def stop(self) -> None:
        """End the recording."""
        self._profiler.stop()
        self._resident.close()

    def live(
        self,
        times: StepTimes,
        spans: Sequence[Span],
        taken: Iterable[Taken],
    ) -> Live:
        """See `StepMemory`."""
        resident = {
            address: (nbytes, self._kinds.get(address, OTHER)) for address, nbytes in self._resident.nbytes_at.items()
        }
        freed = sorted((at_ns, address, 0) for at_ns, address in self._resident.freed)
        merged = heapq.merge(freed, cpu_allocations(self._profiler), key=lambda event: event[0])

        clock = AllocatorClock(self._began, times.began_s)
        return live_by_kind(
            resident,
            [(clock.at_s(at_ns), address, nbytes) for at_ns, address, nbytes in merged],
            times.intervals,
            spans,
            [(clock.at_s(block.at_ns), block.address, block.label) for block in taken],
        )
