"""The seconds, memory and traffic of each phase of a step, and findings about a run: which link is idle, which resource
bounds updates, how much memory is left, which rank waits.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from elixir_compile.base.errors import EXPANDABLE_SEGMENTS, MEASURED_OF_THEM
from elixir_compile.base.units import MIB, format_bytes, format_s
from elixir_compile.ir.cost import host_memory_bytes_per_s, update_bytes
from elixir_compile.ir.hardware.cluster import Cluster
from elixir_compile.ir.kinds import Lane, Tier
from elixir_compile.ir.plan import Plan
from elixir_compile.ir.schedule import Origin, Span, what_of
from elixir_compile.tools.observed import CALLER, FullStep, Interval, StepSummary, StudyRow, name_of
from elixir_compile.tools.report.diff import TOLERANCE, run_diff

# ----------------------------------------------------------------------------------------------------------------------
# Tell for each phase of a step its seconds, its memory, its traffic in both directions, and who waited.
#
# A span that lasts through several phases counts in each by the seconds it spends there, and so do its bytes.


WHOLE = "whole"
STEP_PHASES = ("forward", "backward", "update", CALLER)
PHASES = (*STEP_PHASES, WHOLE)
Stretch = tuple[float, float]
"""A start and an end in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The copies in one direction of the link between host and device in a phase."""

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
    """The rest of the budget at the peak of the phase; None without a budget."""
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
    full, memory = row.full, row.memory
    if full is None:
        return ()
    spans, period_s = full.record.spans, full.summary.period_s
    live = None if memory is None else memory.live
    names = {name_of(interval.phase) for interval in full.intervals} | {WHOLE}
    found: list[PhaseFigures] = []
    for phase in PHASES:
        if phase not in names:
            continue
        own = stretches(full.intervals, phase)
        seconds_s = sum(end_s - start_s for start_s, end_s in own)
        seen: list[int] = []
        if memory is not None and live is not None:
            within = stretches(memory.intervals, phase)
            ends_s = [*live.at_s[1:], memory.intervals[-1].end_s if memory.intervals else 0.0]
            seen = [
                total
                for start_s, end_s, total in zip(live.at_s, ends_s, live.totals_bytes, strict=True)
                if any(
                    (start_s < last_s and first_s < end_s) or first_s <= start_s < last_s for first_s, last_s in within
                )
            ]
        most = max(seen, default=None)
        up, down = (
            Traffic(
                nbytes=moved_bytes(spans, lane, own),
                busy_s=busy_s(spans, lane, own),
                seconds_s=seconds_s,
                rated_bytes_per_s=link.bytes_per_s,
            )
            for lane, link in ((Lane.H2D, cluster.h2d), (Lane.D2H, cluster.d2h))
        )
        figures = PhaseFigures(
            phase=phase,
            seconds_s=seconds_s,
            share=seconds_s / period_s if period_s else 0.0,
            most_bytes=most,
            least_bytes=min(seen, default=None),
            unused_bytes=None if row.budget_bytes is None or most is None else row.budget_bytes - most,
            up=up,
            down=down,
            compute_s=busy_s(spans, Lane.COMPUTE, own),
            waited_s=busy_s(spans, Lane.CALLER, own),
            host_s=busy_s(spans, Lane.HOST, own),
        )
        found.append(figures)
    return tuple(found)


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


# ----------------------------------------------------------------------------------------------------------------------
# Findings about a run. Each is a function of the observation, which returns None below its limit, else a sentence with
# its figure, and the labels of the spans that it was computed from. The questions are those of the study of offloaded
# optimizers in arXiv 2406.10728, asked of any placement.


_MOST_EVIDENCE = 8
"""The most labels that a finding names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One sentence about a run, with the figure that it rests on."""

    code: str
    text: str
    value: float
    unit: str
    limit: float
    evidence: tuple[str, ...] = ()
    """Labels of spans, or names of figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A run, as findings look at it."""

    full: FullStep
    cluster: Cluster
    period_s: float
    """Seconds of the step that was recorded in full."""
    step_s: float
    """Seconds from one step to the next: the median of the timed steps."""
    phases: Mapping[str, PhaseFigures]
    plan: Plan | None = None
    budget_bytes: int | None = None
    peak_bytes: int | None = None
    """The most bytes on the device, as its allocator tells."""
    timed: tuple[StepSummary, ...] = ()
    ranks: Mapping[int, tuple[StepSummary, ...]] = field(default_factory=dict)
    """The timed steps of every rank, if there are several."""

    def spans(self, lane: Lane) -> tuple[Span, ...]:
        """Return the spans of `lane` in order of their start."""
        own = (span for span in self.full.record.spans if span.lane is lane)
        return tuple(sorted(own, key=lambda span: (span.start_s, span.end_s)))

    def busy_s(self, lane: Lane) -> float:
        """Return the seconds of the step in which `lane` works."""
        return busy_s(self.full.record.spans, lane, stretches(self.full.intervals, WHOLE))


def observed_row(
    row: StudyRow, cluster: Cluster, ranks: Mapping[int, tuple[StepSummary, ...]] | None = None
) -> Observed | None:
    """Return `row` as findings look at it; None if it was not run. `ranks` are the steps of all ranks, if there are
    several."""
    if row.full is None:
        return None
    return Observed(
        full=row.full,
        cluster=cluster,
        period_s=row.full.summary.period_s,
        step_s=row.full.summary.period_s if row.period_s is None else row.period_s,
        peak_bytes=row.peak_bytes,
        phases={figures.phase: figures for figures in phase_figures(row, cluster)},
        plan=row.plan,
        budget_bytes=row.budget_bytes,
        timed=row.timed,
        ranks=ranks or {},
    )


def find(seen: Observed) -> tuple[Finding, ...]:
    """Return the findings of a run, F1 to F11."""
    found = (finding(seen) for finding in FINDINGS)
    return tuple(each for each in found if each is not None)


IDLE_SHARE, UPDATE_SHARE, MEMORY_SHARE, UNUSED_SHARE = 0.5, 0.2, 0.75, 0.25
WAIT_SHARE, RATE_SHARE, PYTHON_SHARE, CALLER_SHARE = 0.03, 0.7, 0.05, 0.1
RESERVED_SHARE, RANK_SHARE, FULL_LINK_SHARE = 0.1, 0.05, 0.9
SMALL_BYTES = 4 * MIB
"""A copy of fewer bytes does not reach the rate of its link."""


def idle_link(seen: Observed) -> Finding | None:
    """F1: the link to the device, which a plan uses, is idle for most of the step."""
    spans = seen.spans(Lane.H2D)
    idle = 1 - seen.busy_s(Lane.H2D) / seen.period_s if spans and seen.period_s else 0.0
    if idle <= IDLE_SHARE:
        return None
    nbytes = sum(span.nbytes for span in spans)
    text = f"the link to the device is idle {idle:.0%} of the step; {format_bytes(nbytes)} pass it"
    return _finding("F1", text, idle, "share of the step", IDLE_SHARE, spans)


def bound_update(seen: Observed) -> Finding | None:
    """F2: updates on the host take a large part of the step, and either its memory or its cores bound them."""
    spans = [span for span in seen.spans(Lane.HOST) if span.label.startswith("update ")]
    seconds_s = busy_s(spans, Lane.HOST, stretches(seen.full.intervals, WHOLE))
    share = seconds_s / seen.period_s if seen.period_s else 0.0
    if share <= UPDATE_SHARE or seen.plan is None:
        return None
    buckets = {bucket.id for bucket in seen.plan.buckets}  # another graph of the step has updates of its own
    own = [span for span in spans if what_of(span.label) in buckets]
    own_s = busy_s(own, Lane.HOST, stretches(seen.full.intervals, WHOLE))
    if not own_s:
        return None
    rate_share = host_update_bytes(seen.plan) / own_s / host_memory_bytes_per_s(seen.cluster)
    bound = "memory, so more threads do not help" if rate_share > MEMORY_SHARE else "the cores"
    rate = f"{rate_share:.0%} of what host memory carries: they are bound by {bound}"
    text = f"updates of the host take {share:.0%} of the step and run at {rate}"
    return _finding("F2", text, share, "share of the step", UPDATE_SHARE, spans)


def host_update_bytes(plan: Plan) -> int:
    """Return the bytes of host memory that the updates of a step read and write, of buckets with state on the host."""
    pairs = zip(plan.buckets, plan.placements, strict=True)
    return sum(update_bytes(bucket) for bucket, placement in pairs if placement.optim is not Tier.DEVICE)


def unused_memory(seen: Observed) -> Finding | None:
    """F3: the update leaves a large part of the budget empty."""
    update = seen.phases.get("update")
    if seen.budget_bytes is None or update is None or update.unused_bytes is None:
        return None
    share = update.unused_bytes / seen.budget_bytes
    if share <= UNUSED_SHARE:
        return None
    sizes = f"{format_bytes(update.unused_bytes)} of {format_bytes(seen.budget_bytes)}"
    return _finding("F3", f"in the update {sizes} of the device are unused", share, "share of the budget", UNUSED_SHARE)


def late_copies(seen: Observed) -> Finding | None:
    """F4: the thread of the step waits for copies or updates."""
    spans = seen.spans(Lane.CALLER)
    waited_s = seen.busy_s(Lane.CALLER)
    share = waited_s / seen.period_s if seen.period_s else 0.0
    if share <= WAIT_SHARE:
        return None
    targets = list(dict.fromkeys(span.label.rpartition(" ")[2] for span in spans))
    named = targets[0] if len(targets) == 1 else f"{targets[0]} to {targets[-1]}"
    link_share = seen.busy_s(Lane.H2D) / seen.period_s
    why = "the link is full" if link_share > FULL_LINK_SHARE else "copies or updates begin too late for it"
    text = f"the step waits {format_s(waited_s)} ({named}): {why}"
    return _finding("F4", text, share, "share of the step", WAIT_SHARE, spans)


def slow_copies(seen: Observed) -> Finding | None:
    """F5: copies run below the rate that was measured of the link."""
    worst: Finding | None = None
    for lane, link in ((Lane.H2D, seen.cluster.h2d), (Lane.D2H, seen.cluster.d2h)):
        spans = [span for span in seen.spans(lane) if span.nbytes]
        lane_s = seen.busy_s(lane)
        nbytes = moved_bytes(spans, lane, stretches(seen.full.intervals, WHOLE))
        share = nbytes / lane_s / link.bytes_per_s if lane_s else math.inf
        if share >= RATE_SHARE or (worst is not None and share >= worst.value):
            continue
        small = sum(span.nbytes < SMALL_BYTES for span in spans)
        text = (
            f"copies {'to' if lane is Lane.H2D else 'from'} the device run at {share:.0%} of the link's "
            f"{link.bytes_per_s / 1e9:.3g} GB/s; {small} of {len(spans)} are below {format_bytes(SMALL_BYTES)}"
        )
        worst = _finding("F5", text, share, "share of the rate", RATE_SHARE, spans)
    return worst


def waiting_device(seen: Observed) -> Finding | None:
    """F6: the device has nothing to do because Python has not issued its next region yet."""
    spans = [span for span in seen.spans(Lane.COMPUTE) if span.issued_s is not None]
    late: list[Span] = []
    idle_s, end_s = 0.0, math.inf
    for span in spans:
        assert span.issued_s is not None
        if span.issued_s > end_s:
            idle_s += min(span.start_s, span.issued_s) - end_s
            late.append(span)
        end_s = span.end_s if end_s is math.inf else max(end_s, span.end_s)
    share = idle_s / seen.period_s if seen.period_s else 0.0
    if share <= PYTHON_SHARE:
        return None
    text = f"the device waits for Python in {share:.0%} of the step"
    return _finding("F6", text, share, "share of the step", PYTHON_SHARE, late)


def long_caller(seen: Observed) -> Finding | None:
    """F7: the user's own code takes a large part of the step."""
    caller = seen.phases.get(CALLER)
    if caller is None or caller.share <= CALLER_SHARE:
        return None
    text = f"your own code takes {caller.share:.0%} of the step: data, logging, clipping, eager ops outside the graph"
    return _finding("F7", text, caller.share, "share of the step", CALLER_SHARE)


def wrong_plan(seen: Observed) -> Finding | None:
    """F8: a measured figure differs from that of the plan."""
    if seen.plan is None or seen.full.record.origin is Origin.SIMULATED:
        return None
    record = replace(seen.full.record, step_s=seen.step_s)
    if seen.peak_bytes is not None:
        record = replace(record, device_peak_bytes=seen.peak_bytes)
    known = [
        pair for pair in run_diff(seen.plan, record).comparisons if pair.measured or pair.what != "device_peak_bytes"
    ]
    off = {pair.what: pair.ratio for pair in known if pair.is_off and pair.ratio is not None}
    if not off:
        return None
    worst = max(off.values(), key=lambda ratio: abs(ratio - 1))
    names = ", ".join(f"{what} {ratio:.2f}" for what, ratio in off.items())
    text = f"measured over planned: {names}"
    return Finding(code="F8", text=text, value=worst, unit="ratio", limit=1 + TOLERANCE, evidence=tuple(off))


def scattered_memory(seen: Observed) -> Finding | None:
    """F9: the allocator of the device had to free its cache, or holds much that no tensor uses."""
    retries = sum(each.alloc_retries or 0 for each in seen.timed)
    last = seen.timed[-1] if seen.timed else seen.full.summary
    unused_bytes = 0
    if last.device_reserved_bytes is not None and last.device_peak_bytes is not None:
        unused_bytes = max(last.device_reserved_bytes - last.device_peak_bytes, 0)
    share = unused_bytes / seen.budget_bytes if seen.budget_bytes else 0.0
    if not retries and share <= RESERVED_SHARE:
        return None
    text = (
        f"the allocator freed its cache {retries} times, and {format_bytes(unused_bytes)} are reserved and unused: "
        f"try {EXPANDABLE_SEGMENTS}, {MEASURED_OF_THEM}"
    )
    return Finding(
        code="F9",
        text=text,
        value=float(retries) or share,
        unit="times" if retries else "share of the budget",
        limit=0.0 if retries else RESERVED_SHARE,
        evidence=("alloc_retries", "device_reserved_bytes"),
    )


_CAPS = {0x04: "power", 0x08: "a hardware limit", 0x20: "heat", 0x40: "heat", 0x80: "the power supply"}
"""The causes that lower the clocks, by the bits of NVML's clocks event reasons."""


def capped_clocks(seen: Observed) -> Finding | None:
    """F10: power or heat has lowered the clocks of the device, or the link has fewer lanes than device and slot."""
    samples = _samples(seen, "device_clock_reasons")
    capped = [sample for sample in samples if any(sample & bit for bit in _CAPS)]
    widths, most = _samples(seen, "link_width"), max(_samples(seen, "link_most_width"), default=0)
    parts: list[str] = []
    if capped:
        why = " and ".join(dict.fromkeys(name for bit, name in _CAPS.items() if any(sample & bit for sample in capped)))
        parts.append(f"{why} lowered the clocks in {len(capped)} of {len(samples)} samples")
    is_narrow = bool(widths) and max(widths) < most
    if is_narrow:
        parts.append(f"the link runs at x{max(widths)} of x{most}")
    if not parts:
        return None
    named = (("device_clock_reasons", bool(capped)), ("link_width", is_narrow))
    return Finding(
        code="F10",
        text="; ".join(parts),
        value=len(capped) / len(samples) if capped else max(widths) / most,
        unit="share of the samples" if capped else "share of the lanes",
        limit=0.0 if capped else 1.0,
        evidence=tuple(name for name, is_found in named if is_found),
    )


def _samples(seen: Observed, name: str) -> list[int]:
    """Return the known samples of a counter in the step, as whole numbers."""
    counters = seen.full.counters
    return [] if counters is None else [int(value) for value in counters.values.get(name, ()) if value is not None]


def slow_rank(seen: Observed) -> Finding | None:
    """F11: one rank is slower than the others."""
    # Only seconds in which a rank did not wait: waits make the periods of all ranks equal.
    own_s = {
        rank: statistics.median(each.period_s - (each.waited_s or 0.0) for each in steps)
        for rank, steps in seen.ranks.items()
        if steps
    }
    if len(own_s) < 2:
        return None
    middle_s = statistics.median(own_s.values())
    rank = max(own_s, key=own_s.__getitem__)
    excess = own_s[rank] / middle_s - 1 if middle_s else 0.0
    if excess <= RANK_SHARE:
        return None
    text = f"rank {rank} works {excess:.0%} longer than the median rank, most in its {_slow_phase(seen, rank)}"
    return Finding(
        code="F11",
        text=text,
        value=excess,
        unit="share of the median",
        limit=RANK_SHARE,
        evidence=("period_s", "waited_s"),
    )


def _slow_phase(seen: Observed, rank: int) -> str:
    """Return the phase in which `rank` exceeds the median of all ranks by the most seconds."""

    def seconds_s(steps: Sequence[StepSummary], phase: str) -> float:
        return statistics.median(each.seconds_s.get(phase, 0.0) for each in steps)

    phases = dict.fromkeys(phase for steps in seen.ranks.values() for each in steps for phase in each.seconds_s)

    def excess_s(phase: str) -> float:
        everyone = statistics.median(seconds_s(steps, phase) for steps in seen.ranks.values())
        return seconds_s(seen.ranks[rank], phase) - everyone

    return max(phases, key=excess_s)


def _finding(code: str, text: str, value: float, unit: str, limit: float, spans: Sequence[Span] = ()) -> Finding:
    labels = tuple(dict.fromkeys(span.label for span in spans))[:_MOST_EVIDENCE]
    return Finding(code=code, text=text, value=value, unit=unit, limit=limit, evidence=labels)


FINDINGS: tuple[Callable[[Observed], Finding | None], ...] = (
    idle_link,
    bound_update,
    unused_memory,
    late_copies,
    slow_copies,
    waiting_device,
    long_caller,
    wrong_plan,
    scattered_memory,
    capped_clocks,
    slow_rank,
)
