"""Summarize each observed step: its phases and bytes, and the figures of the process and of torch's allocator."""

from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from elixir_compile.ir.observed import Interval, StepSummary, seconds_by_phase
from elixir_compile.measure.observation import ObservedStep
from elixir_compile.platforms import platform_of
from elixir_compile.runtime.phases import Phases


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFigures:
    """Figures of the process at the end of a step; None where they are not known."""

    rss_bytes: int
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
            device_peak_bytes=platform.peak_bytes(device) if has_memory else None,
            device_reserved_bytes=platform.reserved_bytes(device) if has_memory else None,
            alloc_retries=platform.alloc_retries(device) if has_memory else None,
        )


class Summaries:
    """A sink that turns the steps of an observation into summaries."""

    def __init__(
        self, rank: int, plans: Callable[[], tuple[str, ...]], take: Callable[[StepSummary, tuple[Interval, ...]], None]
    ) -> None:
        """`plans` returns the keys of the plans in force, and `take` is called with each summary."""
        self._rank = rank
        self._plans = plans
        self._take = take
        self._meter = ProcessMeter()
        self._device: torch.device | None = None
        self._at_end: dict[int, tuple[ProcessFigures | None, tuple[str, ...]]] = {}
        """By the number of an ended step, the figures and the plans at its end, until the step is known."""
        self._retries = 0

    def step_begins(self, number: int, phases: Phases) -> None:
        """See `StepSink`."""
        self._device = phases.lanes.device

    def step_ends(self, step: ObservedStep) -> None:
        """See `StepSink`."""
        figures = None if self._device is None else self._meter.read(self._device)
        self._at_end[step.number] = (figures, self._plans())

    def step_known(self, step: ObservedStep) -> None:
        """See `StepSink`."""
        figures, plans = self._at_end.pop(step.number)
        intervals = step.intervals
        retries = None if figures is None else figures.alloc_retries
        summary = StepSummary(
            step=step.number,
            rank=self._rank,
            plans=plans,
            period_s=intervals[-1].end_s if intervals else 0.0,
            seconds_s=seconds_by_phase(intervals),
            moved_bytes={lane: dict(by_phase) for lane, by_phase in step.moved_bytes.items()},
            device_peak_bytes=None if figures is None else figures.device_peak_bytes,
            device_reserved_bytes=None if figures is None else figures.device_reserved_bytes,
            alloc_retries=None if retries is None else retries - self._retries,
            host_slab_bytes=step.slab_bytes,
            rss_bytes=None if figures is None else figures.rss_bytes,
            notes=step.notes,
        )
        self._retries = self._retries if retries is None else retries
        self._take(summary, intervals)
