"""Summarize each observed step, and record chosen steps in full: the spans of the lanes, and on request the device
bytes by kind over time.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import psutil
import torch
from torch import nn

from elixir_compile.compat import can_profile
from elixir_compile.compat.platforms import platform_of
from elixir_compile.ir.kinds import Lane
from elixir_compile.ir.record import Origin, Record
from elixir_compile.runtime.bucket import pinned_slab_bytes
from elixir_compile.runtime.measure import drop_running_step_bytes
from elixir_compile.runtime.recording import Ledger, Phases, Recording, StepClock
from elixir_compile.tools.measure.memory import CpuMemory, DeviceMemory, StepMemory, StepTimes, kinds_of
from elixir_compile.tools.measure.observation import CounterThread, ObservedStep
from elixir_compile.tools.observed import Counters, FullStep, StepSummary, seconds_by_phase

# ----------------------------------------------------------------------------------------------------------------------
# Record chosen steps in full: spans of the lanes, and on request the device bytes by kind over time.
#
# A record is handed over when the next step ends, or at the end of the observation: an update on the host that began in
# the recorded step may last until then.


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


# ----------------------------------------------------------------------------------------------------------------------
# Summarize each observed step: its phases and bytes, and the figures of the process and of torch's allocator.


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFigures:
    """Figures of the process at the end of a step; None where they are not known."""

    rss_bytes: int
    pinned_bytes: int
    device_peak_bytes: int | None
    device_reserved_bytes: int | None
    alloc_retries: int | None
    """Retries since the process began."""


class ProcessMeter:
    """Reads the figures of this process on one device."""

    def __init__(self) -> None:
        self._process = psutil.Process()

    def read(self, device: torch.device) -> ProcessFigures:
        """Return the figures now. Peaks are read and never reset: other code of the process reads them too."""
        platform = platform_of(device)
        has_memory = platform.has_own_memory
        return ProcessFigures(
            rss_bytes=self._process.memory_info().rss,
            pinned_bytes=pinned_slab_bytes(),
            device_peak_bytes=platform.peak_bytes(device) if has_memory else None,
            device_reserved_bytes=platform.reserved_bytes(device) if has_memory else None,
            alloc_retries=platform.alloc_retries(device) if has_memory else None,
        )


class Summaries:
    """A sink that turns the steps of an observation into summaries, and the chosen ones into full records."""

    def __init__(
        self,
        rank: int,
        plans: Callable[[], tuple[str, ...]],
        take: Callable[[StepSummary], None],
        full_steps: FullSteps,
        counters: CounterThread | None,
    ) -> None:
        """`plans` returns the keys of the plans in force, and `take` is called with each summary."""
        self._rank = rank
        self._plans = plans
        self._take = take
        self._full_steps = full_steps
        self._counters = counters
        self._meter = ProcessMeter()
        self.device: torch.device | None = None
        """The device of the model; None before the first step."""
        self._at_end: dict[int, tuple[ProcessFigures | None, tuple[str, ...]]] = {}
        """By the number of an ended step, the figures and the plans at its end, until the step is known."""
        self._retries: int | None = None
        """Retries of the allocator at the end of the last step; None before it."""

    def uuid(self) -> str | None:
        """Return the number of the GPU of the model; None before the first step, and if there is no GPU."""
        return None if self.device is None else platform_of(self.device).uuid(self.device)

    def step_begins(self, number: int, executors: Collection[Phases]) -> bool:
        """See `StepSink`."""
        self.device = next((phases.lanes.device for phases in executors), None)
        return self._full_steps.begins(number, executors)

    def step_ends(self, step: ObservedStep) -> None:
        """See `StepSink`."""
        self._full_steps.ends(step.number)
        figures = None if self.device is None else self._meter.read(self.device)
        self._at_end[step.number] = (figures, self._plans())

    def step_known(self, step: ObservedStep) -> None:
        """See `StepSink`."""
        summary = self._summary(step, *self._at_end.pop(step.number))
        assert step.ended is not None, "a step that is known has ended"
        counters, span_s = self._counters, (step.changes.began.host_s, step.ended.host_s)
        self._full_steps.known(step, summary, lambda: None if counters is None else counters.between(*span_s))
        self._take(summary)

    def ended(self) -> None:
        """See `StepSink`."""
        self._full_steps.drop()
        self._full_steps.hand_over()

    def _summary(self, step: ObservedStep, figures: ProcessFigures | None, plans: tuple[str, ...]) -> StepSummary:
        intervals, counters = step.intervals, self._counters
        retries = None if figures is None else figures.alloc_retries
        before, self._retries = self._retries, self._retries if retries is None else retries
        assert step.ended is not None, "a step that is known has ended"
        span_s = (step.changes.began.host_s, step.ended.host_s)
        return StepSummary(
            step=step.number,
            rank=self._rank,
            plans=plans,
            period_s=intervals[-1].end_s if intervals else 0.0,
            seconds_s=seconds_by_phase(intervals),
            moved_bytes=step.moved_bytes,
            host_update_s=step.thread_s.get(Lane.HOST),
            host_update_elements=step.updated_elements or None,
            waited_s=step.thread_s.get(Lane.CALLER),
            device_peak_bytes=None if figures is None else figures.device_peak_bytes,
            device_reserved_bytes=None if figures is None else figures.device_reserved_bytes,
            alloc_retries=None if retries is None or before is None else retries - before,
            host_slab_bytes=step.slab_bytes,
            host_pinned_bytes=0 if figures is None else figures.pinned_bytes,
            rss_bytes=None if figures is None else figures.rss_bytes,
            energy_j=None if counters is None else counters.difference("device_energy_j", *span_s),
            device_busy_share=None if counters is None else counters.mean("device_busy_share", *span_s),
            notes=step.notes,
        )
