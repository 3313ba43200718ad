"""Tell for each phase of a step its seconds, its memory, its traffic in both directions, and who waited.

A span that lasts through several phases counts in each by the seconds it spends there, and so do its bytes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elixir_compile.ir.hardware.cluster import Cluster, Link
from elixir_compile.ir.kinds import Lane
from elixir_compile.ir.record import Span
from elixir_compile.tools.study.observed import CALLER, FullStep, Interval, name_of
from elixir_compile.tools.study.study import StudyRow

WHOLE = "whole"
PHASES = ("forward", "backward", "update", CALLER, WHOLE)
Stretch = tuple[float, float]
"""A start and an end in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What passed one direction of the link between host and device in a phase."""

    nbytes: int
    busy_s: float
    """Seconds in which at least one copy was on its way."""
    seconds_s: float
    """Seconds of the phase."""
    rated_bytes_per_s: float
    """The rate of the machine's profile."""

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes per second while busy; None if nothing was copied."""
        return self.nbytes / self.busy_s if self.busy_s else None

    @property
    def share_of_rate(self) -> float | None:
        """The rate while busy over that of the profile."""
        return None if self.bytes_per_s is None else self.bytes_per_s / self.rated_bytes_per_s

    @property
    def idle_share(self) -> float:
        """The share of the phase in which nothing was copied."""
        return 1 - self.busy_s / self.seconds_s if self.seconds_s else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseFigures:
    """One column of the table."""

    phase: str
    seconds_s: float
    share: float
    """Of the period."""
    most_bytes: int | None
    """The most bytes on the device in the phase; None if memory was not recorded."""
    least_bytes: int | None
    unused_bytes: int | None
    """What the phase leaves of the budget at its own peak; None without a budget."""
    up: Traffic
    down: Traffic
    compute_s: float
    """Seconds in which the device computed."""
    waited_s: float
    """Seconds in which the thread of the step was blocked by a wait of ours."""
    host_s: float
    """Seconds in which the host updated parameters."""


def phase_figures(row: StudyRow, cluster: Cluster) -> tuple[PhaseFigures, ...]:
    """Return the figures of each phase of `row` that takes time, and of the whole step; empty if it was not run."""
    if row.full is None:
        return ()
    names = dict.fromkeys(name_of(interval.phase) for interval in row.full.intervals)
    return tuple(_figures(row, row.full, cluster, phase) for phase in PHASES if phase in names or phase == WHOLE)


def _figures(row: StudyRow, full: FullStep, cluster: Cluster, phase: str) -> PhaseFigures:
    own = stretches(full.intervals, phase)
    spans = full.record.spans
    seconds_s = sum(end_s - start_s for start_s, end_s in own)
    period_s = full.summary.period_s
    most, least = _extremes(row.memory, phase)
    traffic = {
        lane: Traffic(
            nbytes=moved_bytes(spans, lane, own),
            busy_s=busy_s(spans, lane, own),
            seconds_s=seconds_s,
            rated_bytes_per_s=_link(cluster, lane).bytes_per_s,
        )
        for lane in (Lane.H2D, Lane.D2H)
    }
    return PhaseFigures(
        phase=phase,
        seconds_s=seconds_s,
        share=seconds_s / period_s if period_s else 0.0,
        most_bytes=most,
        least_bytes=least,
        unused_bytes=None if row.budget_bytes is None or most is None else row.budget_bytes - most,
        up=traffic[Lane.H2D],
        down=traffic[Lane.D2H],
        compute_s=busy_s(spans, Lane.COMPUTE, own),
        waited_s=busy_s(spans, Lane.CALLER, own),
        host_s=busy_s(spans, Lane.HOST, own),
    )


def _link(cluster: Cluster, lane: Lane) -> Link:
    return cluster.h2d if lane is Lane.H2D else cluster.d2h


def stretches(intervals: Sequence[Interval], phase: str) -> tuple[Stretch, ...]:
    """Return when `phase` runs, or the whole step for `WHOLE`."""
    return tuple((each.start_s, each.end_s) for each in intervals if phase in (WHOLE, name_of(each.phase)))


def busy_s(spans: Iterable[Span], lane: Lane, within: Sequence[Stretch]) -> float:
    """Return the seconds of `within` in which at least one span of `lane` runs."""
    own = sorted((span.start_s, span.end_s) for span in spans if span.lane is lane)
    joined: list[Stretch] = []
    for start_s, end_s in own:
        if joined and start_s <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end_s))
        else:
            joined.append((start_s, end_s))
    return sum(_overlap_s(span, stretch) for span in joined for stretch in within)


def moved_bytes(spans: Iterable[Span], lane: Lane, within: Sequence[Stretch]) -> int:
    """Return the bytes that pass `lane` in `within`; a span counts by the share of its seconds there.

    A span without length counts where it begins.
    """
    total = 0.0
    for span in spans:
        if span.lane is lane and span.nbytes:
            length_s = span.end_s - span.start_s
            if length_s > 0:
                inside_s = sum(_overlap_s((span.start_s, span.end_s), stretch) for stretch in within)
                total += span.nbytes * inside_s / length_s
            elif any(start_s <= span.start_s < end_s for start_s, end_s in within):
                total += span.nbytes
    return round(total)


def _overlap_s(first: Stretch, second: Stretch) -> float:
    return max(0.0, min(first[1], second[1]) - max(first[0], second[0]))


def _extremes(memory: FullStep | None, phase: str) -> tuple[int | None, int | None]:
    """Return the most and the least bytes on the device in `phase`; None if they were not recorded."""
    if memory is None or memory.live is None:
        return None, None
    live, own = memory.live, stretches(memory.intervals, phase)
    ends_s = [*live.at_s[1:], memory.intervals[-1].end_s if memory.intervals else 0.0]
    seen = [
        total
        for start_s, end_s, total in zip(live.at_s, ends_s, live.totals_bytes, strict=True)
        if any((start_s < last_s and first_s < end_s) or first_s <= start_s < last_s for first_s, last_s in own)
    ]
    return (max(seen), min(seen)) if seen else (None, None)
