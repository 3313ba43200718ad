"""Record chosen steps in full: spans of the lanes, and on request the device bytes by kind over time.

A record is handed over when the next step ends, or at the end of the observation: an update on the host that began in
the recorded step may last until then.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from elixir_compile.compat import can_profile
from elixir_compile.compat.platforms import platform_of
from elixir_compile.ir.record import Origin, Record
from elixir_compile.runtime.ledger import Ledger
from elixir_compile.runtime.measure.step_bytes import drop_running_step_bytes
from elixir_compile.runtime.phases import Phases
from elixir_compile.runtime.recording import Recording, StepClock
from elixir_compile.tools.measure.cpu_memory import CpuMemory
from elixir_compile.tools.measure.device_memory import DeviceMemory
from elixir_compile.tools.measure.observation import ObservedStep
from elixir_compile.tools.measure.phases import StepTimes
from elixir_compile.tools.measure.step_memory import StepMemory, kinds_of
from elixir_compile.tools.study.observed import Counters, FullStep, StepSummary


@dataclass(kw_only=True, eq=False)
class _Recorded:
    """A step that is recorded in full."""

    recordings: list[tuple[Ledger, Recording]]
    counts_before: Counter[str]
    memory: StepMemory | None
    counts: Counter[str] = field(default_factory=Counter)
    summary: StepSummary | None = None
    times: StepTimes | None = None
    counters: Counters | None = None


class FullSteps:
    """The records of the steps that `wants` chooses by number."""

    def __init__(
        self,
        model: nn.Module,
        wants: Callable[[int], bool],
        take: Callable[[FullStep], None],
        *,
        memory_events: bool,
        optimizers: Callable[[], Iterable[torch.optim.Optimizer]],
    ) -> None:
        """`take` is called with each record; `optimizers` returns those that update the model, as far as known."""
        self._model = weakref.ref(model)
        self._wants = wants
        self._take = take
        self._memory_events = memory_events
        self._optimizers = optimizers
        self._running: _Recorded | None = None
        self._last_profiled = -2
        """The number of the last step of which memory was recorded."""
        self._ended: dict[int, _Recorded] = {}
        """By number, the steps that have ended and were not handed over yet."""

    def begins(self, number: int, executors: Iterable[Phases]) -> bool:
        """Begin to record step `number` if it is chosen; return whether it is."""
        if not self._wants(number):
            return False
        known = list(executors)
        memory = self._memory(number, known)
        counts: Counter[str] = Counter()
        for each in known:
            counts.update(each.ledger.counts)
        if memory is not None:
            memory.start()
        clock = StepClock(each.lanes for each in known)
        recordings = [(each.ledger, each.ledger.start_recording(clock)) for each in known]
        self._running = _Recorded(recordings=recordings, counts_before=counts, memory=memory)
        return True

    def _memory(self, number: int, executors: Iterable[Phases]) -> "StepMemory | None":
        """Return what records the memory of step `number`; None if it is not asked for, or cannot be had now."""
        model = self._model()
        devices = [each.lanes.device for each in executors]
        if not self._memory_events or model is None:
            return None
        for device in devices:
            platform = platform_of(device)
            if platform.has_own_memory:
                blocks = platform.record_blocks(device)
                return None if blocks is None else DeviceMemory(blocks, kinds_of(model, self._optimizers(), device))
        # torch.profiler tells the blocks of a CPU, and cannot be started while it runs. It was stopped within a forward
        # if it recorded the step before: a profiler that starts in the same forward gets the ends of ops that the
        # stopped one has freed, and torch 2.13 then writes to freed memory.
        if not drop_running_step_bytes() or number <= self._last_profiled + 1 or not can_profile():
            return None
        self._last_profiled = number
        return CpuMemory(kinds_of(model, self._optimizers(), torch.device("cpu")))

    def ends(self, number: int) -> None:
        """End the record of step `number`, if there is one."""
        self.hand_over()
        recorded, self._running = self._running, None
        if recorded is None:
            return
        if recorded.memory is not None:
            recorded.memory.stop()
        for ledger, recording in recorded.recordings:
            recording.end()
            recorded.counts.update(ledger.counts)
        recorded.counts.subtract(recorded.counts_before)
        self._ended[number] = recorded

    def known(self, step: ObservedStep, summary: StepSummary, counters: Callable[[], Counters | None]) -> None:
        """Keep the summary, the phases and the counters of a step that has ended, if it is recorded in full.

        `counters` is called only for such a step.
        """
        recorded = self._ended.get(summary.step)
        if recorded is not None:
            recorded.summary, recorded.times, recorded.counters = summary, step.times, counters()

    def drop(self) -> None:
        """Stop recording a step that has not ended, without a result."""
        recorded, self._running = self._running, None
        if recorded is not None:
            if recorded.memory is not None:
                recorded.memory.stop()
            for _, recording in recorded.recordings:
                recording.stop()

    def hand_over(self) -> None:
        """Hand over the records of all steps that are known."""
        for number, recorded in list(self._ended.items()):
            if recorded.summary is not None and recorded.times is not None:
                del self._ended[number]
                self._take(_full_step(recorded, recorded.summary, recorded.times))


def _full_step(recorded: _Recorded, summary: StepSummary, times: StepTimes) -> FullStep:
    spans = [span for _, recording in recorded.recordings for span in recording.spans()]
    spans.sort(key=lambda span: (span.start_s, span.end_s))
    memory = recorded.memory
    taken = [block for _, recording in recorded.recordings for block in recording.taken]
    live = None if memory is None else memory.live(times, spans, taken)
    record = Record(
        origin=Origin.MEASURED,
        step_s=summary.period_s,
        device_peak_bytes=live.peak_bytes if live is not None else summary.device_peak_bytes or 0,
        host_peak_bytes=summary.host_slab_bytes,
        spans=tuple(spans),
        counts={verb: times for verb, times in recorded.counts.items() if times > 0},
    )
    return FullStep(summary=summary, intervals=times.intervals, record=record, live=live, counters=recorded.counters)
