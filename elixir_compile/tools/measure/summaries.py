"""Summarize each observed step: its phases and bytes, and the figures of the process and of torch's allocator."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

import psutil
import torch

from elixir_compile.compat.platforms import platform_of
from elixir_compile.ir.kinds import Lane
from elixir_compile.runtime.phases import Phases
from elixir_compile.runtime.slab import pinned_slab_bytes
from elixir_compile.tools.measure.counters import CounterThread
from elixir_compile.tools.measure.full_steps import FullSteps
from elixir_compile.tools.measure.observation import ObservedStep
from elixir_compile.tools.study.observed import StepSummary, seconds_by_phase


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
