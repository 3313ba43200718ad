"""Observed runs and studies: summaries of steps and the rows of a study as text, the figures of a run that a page
shows, a plan as the row of a study, and recorded steps as a trace for Perfetto.
"""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elixir_compile.base.units import format_bytes, format_s
from elixir_compile.ir.cost import Measured
from elixir_compile.ir.graph import StepGraph
from elixir_compile.ir.hardware.cluster import Cluster
from elixir_compile.ir.kinds import Lane, Phase, Update, Verb
from elixir_compile.ir.plan import Plan
from elixir_compile.ir.schedule import Record, Span, verb_of, what_of
from elixir_compile.step.seconds import simulate
from elixir_compile.tools.observed import (
    FullStep,
    Interval,
    Live,
    StepSummary,
    Study,
    StudyRow,
    TraceMeta,
    name_of,
    seconds_by_phase,
)
from elixir_compile.tools.report.figures import kinds_of, lasting, memory_rows
from elixir_compile.tools.report.findings import STEP_PHASES, Finding, PhaseFigures, Traffic, find, observed_row
from elixir_compile.tools.report.tables import Survey, table_text

# ----------------------------------------------------------------------------------------------------------------------
# Summaries of observed steps to text.


_NUM_UNSETTLED = 3


def observed_text(summaries: Sequence[StepSummary]) -> str:
    """Return a table of the mean seconds of each phase, which add up to the period, and of the bytes moved."""
    if not summaries:
        return "observed no step: no training step of the model has ended yet"
    settled = settled_steps(summaries)
    count = len(settled)
    period_s = sum(each.period_s for each in settled) / count
    lines = [
        f"observed {len(summaries)} step{'s' * (len(summaries) > 1)}, means of steps {settled[0].step} to "
        f"{settled[-1].step}   rank {settled[-1].rank}",
        f"  {'period':<10}{format_s(period_s):>12}",
    ]
    for phase in STEP_PHASES:
        seconds_s = sum(each.seconds_s.get(phase, 0.0) for each in settled) / count
        share = f"{seconds_s / period_s:.1%}" if period_s else ""
        lines.append(f"  {phase:<10}{format_s(seconds_s):>12}{share:>8}")
    for lane in sorted({lane for each in settled for lane in each.moved_bytes}):
        nbytes = sum(each.lane_bytes(lane) for each in settled) / count
        rate = f"{format_bytes(round(nbytes / period_s))} per s" if period_s else ""
        lines.append(f"  {lane:<10}{format_bytes(round(nbytes)):>12}   {rate}")
    memory = {
        "device peak": [each.device_peak_bytes for each in settled],
        "host slabs": [each.host_slab_bytes or None for each in settled],
        "process": [each.rss_bytes for each in settled],
    }
    for name, values in memory.items():
        known = [value for value in values if value is not None]
        lines += [f"  {name:<10}{format_bytes(max(known)):>12}"] if known else []
    return "\n".join(lines)


def settled_steps(summaries: Sequence[StepSummary]) -> Sequence[StepSummary]:
    """Return `summaries` without the first three if as many others are there: the first steps compile and fill
    caches."""
    return summaries[_NUM_UNSETTLED:] if len(summaries) >= 2 * _NUM_UNSETTLED else summaries


# ----------------------------------------------------------------------------------------------------------------------
# An observed run as a page shows it: its steps by rank, one step in full, and one with its memory.
#
#   folder of observe()    steps of each rank      the last full step       the last with bytes by kind
#                          table, seconds, loss    phases, lanes, findings  memory over the step


_MOST_POINTS = 300
"""The most points of a line over the steps: more cannot be told apart."""
_LOSS = "loss"
Points = tuple[tuple[int, float], ...]
"""Pairs of a step and a value, in order of the steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRun:
    """The contents of the folder of an observed run that a page shows."""

    name: str
    """The name of the folder."""
    meta: TraceMeta
    steps: Mapping[int, tuple[StepSummary, ...]]
    """By rank, the summaries in order; the first rank has at least one."""
    row: StudyRow
    """The settled steps of the first rank, and its steps in full, as the row of a study."""
    cluster: Cluster | None = None
    """The machine that the plan was made for; None if the folder has no question."""

    @property
    def first_rank(self) -> int:
        """The rank of which steps are shown in full."""
        return min(self.steps)

    @property
    def losses(self) -> Points:
        """The loss that the first rank noted, by step: the note `loss`, or else the first whose name holds the word."""
        found = ((each.step, loss_of(each)) for each in self.steps[self.first_rank])
        return tuple((step, loss) for step, loss in found if loss is not None)


def observed_run(
    name: str,
    meta: TraceMeta,
    steps: Mapping[int, tuple[StepSummary, ...]],
    full: Sequence[FullStep],
    plan: Plan | None,
    cluster: Cluster | None,
) -> ObservedRun:
    """Return the run in a folder called `name`. `full` are steps in full of the first rank, in order.

    A step with its memory takes up to twice as long, so seconds come from the last step without, if there is one.
    """
    first = min(steps)
    timed = tuple(settled_steps(steps[first]))
    plain = [each for each in full if each.live is None]
    shown = (plain or [*full] or [None])[-1]
    memory = ([each for each in full if each.live is not None] or [None])[-1]
    peak_bytes = timed[-1].device_peak_bytes if timed else None
    if memory is not None and memory.live is not None:
        peak_bytes = memory.live.peak_bytes
    row = StudyRow(
        name=f"rank {first}",
        what=f"step {shown.summary.step}" if shown is not None else "no step in full",
        budget_bytes=None if plan is None else plan.budget_bytes,
        timed=timed,
        full=shown,
        memory=memory,
        peak_bytes=peak_bytes,
        plan=plan,
    )
    return ObservedRun(name=name, meta=meta, steps=steps, row=row, cluster=cluster)


def loss_of(summary: StepSummary) -> float | None:
    """Return the loss among the user's notes of a step: `loss`, or else the first whose name holds the word."""
    if _LOSS in summary.notes:
        return summary.notes[_LOSS]
    return next((value for name, value in summary.notes.items() if _LOSS in name), None)


def loss_difference(first: ObservedRun, second: ObservedRun) -> str:
    """Return a sentence that says whether the losses of two runs are equal in every bit."""
    others = dict(second.losses)
    pairs = [(step, loss, others[step]) for step, loss in first.losses if step in others]
    if not pairs:
        return f"{first.name} and {second.name} have no step of which both noted a loss."
    apart = next((pair for pair in pairs if pair[1] != pair[2]), None)
    if apart is None:
        return f"The losses of {first.name} and {second.name} are equal in every bit over {len(pairs)} steps."
    step, own, other = apart
    return f"The losses of {first.name} and {second.name} differ first at step {step}: {own!r} and {other!r}."


def thinned(points: Points) -> Points:
    """Return at most 300 points: beyond that, the median of neighbours stands for them, at the first of their steps."""
    size = max(1, math.ceil(len(points) / _MOST_POINTS))
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    return tuple((group[0][0], statistics.median(value for _, value in group)) for group in groups)


def run_data(run: ObservedRun) -> dict[str, Any]:
    """Return the figures of a run as columns by rank, exact, for the data of a page."""
    return {
        "name": run.name,
        "model": run.meta.model,
        "device": run.meta.device,
        "num_ranks": run.meta.num_ranks,
        "steps": {
            str(rank): {
                "step": [each.step for each in steps],
                "period_s": [each.period_s for each in steps],
                "loss": [loss_of(each) for each in steps],
            }
            for rank, steps in run.steps.items()
        },
    }


# ----------------------------------------------------------------------------------------------------------------------
# Write a study as text: the rows side by side, the phases of each, and the findings.


NONE = ""
"""The text of a figure that is not known."""


def study_text(study: Study) -> str:
    """Return the table of the rows, and for each row its phases and findings."""
    parts = [f"study of {study.model} on {study.cluster.name}", table_text(ROW_HEADS, row_cells(study))]
    for row in study.rows:
        seen = observed_row(row, study.cluster)
        if seen is None:
            continue
        badge = "planned" if row.is_simulated else "measured"
        parts.append(f"{row.name}, {badge}: {row.what}")
        parts.append(table_text(PHASE_HEADS, [phase_cells(each) for each in seen.phases.values()]))
        parts.append("\n".join(f"  {line}" for line in finding_lines(find(seen))))
    return "\n\n".join(part for part in parts if part)


ROW_HEADS = ("row", "step", "of the first", "device peak", "budget", "losses", "")


def row_cells(study: Study) -> list[list[str]]:
    """Return a line of cells for each row of `study`."""
    first_s = next((row.period_s for row in study.rows if row.period_s is not None), None)
    apart = study.equal_losses()
    lines: list[list[str]] = []
    for row in study.rows:
        differs_at, period_s = apart.get(row.name, -1), row.period_s
        cells = [
            row.name,
            NONE if period_s is None else format_s(period_s),
            NONE if period_s is None or not first_s else f"{period_s / first_s:.2f}",
            *(NONE if each is None else format_bytes(each) for each in (row.peak_bytes, row.budget_bytes)),
            "equal" if differs_at is None else f"differ at step {differs_at}" if differs_at >= 0 else NONE,
            row.reason or ("planned" if row.is_simulated else ""),
        ]
        lines.append(cells)
    return lines


PHASE_HEADS = (
    "phase", "seconds", "share", "device most", "least", "unused", "up", "rate", "idle", "down", "rate", "idle",
    "compute", "waits", "host updates",
)  # fmt: skip


def phase_cells(figures: PhaseFigures) -> list[str]:
    """Return the cells of a phase, in the order of `PHASE_HEADS`."""
    nbytes = (figures.most_bytes, figures.least_bytes, figures.unused_bytes)
    return [
        figures.phase,
        format_s(figures.seconds_s),
        f"{figures.share:.0%}",
        *(NONE if each is None else format_bytes(each) for each in nbytes),
        *_traffic_cells(figures.up),
        *_traffic_cells(figures.down),
        *(format_s(each) for each in (figures.compute_s, figures.waited_s, figures.host_s)),
    ]


def _traffic_cells(traffic: Traffic) -> Sequence[str]:
    if not traffic.nbytes or traffic.bytes_per_s is None:
        return ("0 B", NONE, NONE)
    rate = f"{traffic.bytes_per_s / 1e9:.2f} GB/s, {traffic.share_of_rate:.0%}"
    return (format_bytes(traffic.nbytes), rate, f"{traffic.idle_share:.0%}")


def finding_lines(found: Sequence[Finding]) -> Iterator[str]:
    """Yield a line for each finding: its code, its sentence and where it comes from."""
    for each in found:
        evidence = f" [{', '.join(each.evidence)}]" if each.evidence else ""
        yield f"{each.code} {each.text}{evidence}"


# ----------------------------------------------------------------------------------------------------------------------
# Turn a plan into the row of a study: the step that the simulator expects, with its phases and its memory.


def planned_row(row: StudyRow, plan: Plan, graph: StepGraph, cluster: Cluster, priced: Measured) -> StudyRow:
    """Return `row` with the figures of a simulated step under `plan`, which is legal for `graph`."""
    record = simulate(graph, plan, cluster, priced)
    intervals = tuple(planned_intervals(plan, record))
    period_s = intervals[-1].end_s if intervals else record.step_s
    summary = StepSummary(
        step=0,
        rank=0,
        plans=(),
        period_s=period_s,
        seconds_s=seconds_by_phase(intervals),
        device_peak_bytes=record.device_peak_bytes,
        host_slab_bytes=record.host_peak_bytes,
    )
    rows = lasting(memory_rows(Survey(plan, graph), record))
    live = Live(
        at_s=tuple(each.start_s for each in rows),
        by_kind={str(kind): tuple(each.live_bytes[kind] for each in rows) for kind in kinds_of(rows)},
    )
    full = FullStep(summary=summary, intervals=intervals, record=record, live=live)
    return replace(
        row,
        timed=(summary,),
        full=full,
        memory=full,
        peak_bytes=record.device_peak_bytes,
        budget_bytes=plan.budget_bytes,
        plan=plan,
        is_simulated=True,
    )


def planned_intervals(plan: Plan, record: Record) -> Iterator[Interval]:
    """Yield the phases of a simulated step, which cover it.

    The forward and the backward last from their first region to their last; what is before and after is the update.
    """
    phase_of: dict[str, Phase] = {region.id: region.phase for region in plan.regions}
    starts: dict[Phase, float] = {}
    end_s = 0.0
    for span in record.spans:
        if span.lane is Lane.COMPUTE and verb_of(span.label) == Verb.RUN:
            phase = phase_of[what_of(span.label)]
            starts[phase] = min(starts.get(phase, span.start_s), span.start_s)
            end_s = max(end_s, span.end_s)
    last_s = max(record.step_s, end_s)
    first_s = starts.get(Phase.FORWARD, 0.0)
    backward_s = starts.get(Phase.BACKWARD, end_s)
    before = Phase.UPDATE if plan.update is Update.ACROSS_STEPS else Phase.FORWARD
    found = (
        (before, 0.0, first_s),
        (Phase.FORWARD, first_s, backward_s),
        (Phase.BACKWARD, backward_s, end_s),
        (Phase.UPDATE, end_s, last_s),
    )
    for phase, start_s, stop_s in found:
        if stop_s > start_s:
            yield Interval(phase=phase, start_s=start_s, end_s=stop_s)


# ----------------------------------------------------------------------------------------------------------------------
# Recorded steps to the events of a Chrome trace, which https://ui.perfetto.dev opens.
#
#   process  rank 0 measured      phases  compute  gather  reduce  h2d  h2d 2  d2h  host  disk  caller     counters
#            rank 0 planned                compute  gather  reduce  h2d         d2h  host  disk
#
# Arrows lead from the moment at which Python asks for a copy, if that is known, to the copy, and from there to the work
# that waits for it: a wait of the thread, or else the region that the plan runs after the wait.
#
# Perfetto wants the events of one track to be nested or apart. So a span that overlaps another of its lane without
# being within it goes to a second track of the lane.


_PHASES_TRACK = 0
_COPYING = (Lane.H2D, Lane.D2H, Lane.GATHER)
_COPIES = (Verb.GATHER, Verb.PREFETCH, Verb.OFFLOAD)
_CLOCK_STEP_S = 1e-6
"""How much earlier than the end of a copy the region that waits may seem to begin: the clock of a device has steps."""
_TRACKS_PER_LANE = 100
"""The number of tracks of the first lane is 100, of the second 200: so tracks keep the order of the lanes."""
Event = dict[str, Any]


def trace_events(
    steps: Iterable[FullStep],
    begins_s: Mapping[tuple[int, int], float],
    planned: Record | None = None,
    waiting: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Any]:
    """Return the JSON object of a Chrome trace of `steps`.

    `begins_s` are the seconds at which each step begins in the trace, by rank and step; 0 for one that is missing.
    With `planned`, the simulated step of the plan, each rank has a second process that shows it from the same times on.
    `waiting` has, by the label of a copy, the labels of the regions that wait for it, one for each time.
    """
    events: list[Event] = []
    ids = itertools.count(1)
    for full in steps:
        summary = full.summary
        at_s = begins_s.get((summary.rank, summary.step), 0.0)
        pid = 2 * summary.rank
        whole = {"plan": ", ".join(summary.plans), **summary.notes}
        events.append(_x(f"step {summary.step}", pid, _PHASES_TRACK, at_s, (0.0, summary.period_s), whole))
        for interval in full.intervals:
            between_s = interval.start_s, interval.end_s
            events.append(_x(name_of(interval.phase), pid, _PHASES_TRACK, at_s, between_s, {}))
        events += _spans(full.record.spans, pid, at_s)
        events += _arrows(full.record.spans, pid, at_s, waiting or {}, ids)
        if (live := full.live) is not None:
            for place, time_s in enumerate(live.at_s):
                held = {kind: nbytes[place] for kind, nbytes in live.by_kind.items()}
                events.append(_c("memory", pid, _us(at_s, time_s), held))
        if (counters := full.counters) is not None:
            for name, values in counters.values.items():
                samples = zip(counters.at_s, values, strict=True)
                events += [
                    _c(name, pid, _us(at_s, time_s), {name: value}) for time_s, value in samples if value is not None
                ]
        if planned is not None:
            events += _spans(planned.spans, pid + 1, at_s)
            events += _arrows(planned.spans, pid + 1, at_s, waiting or {}, ids)
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    return {"traceEvents": [*_names(events), *events], "displayTimeUnit": "ms"}


def _spans(spans: Iterable[Span], pid: int, at_s: float) -> Iterator[Event]:
    for tid, span in _placed(spans):
        args: dict[str, Any] = {"graph": span.graph} if span.graph else {}
        if span.nbytes:
            args["bytes"] = span.nbytes
            took_s = span.end_s - span.start_s
            if took_s > 0 and math.isfinite(rate := span.nbytes / took_s):  # a span of 1e-311 s has no finite rate
                args["bytes_per_s"] = round(rate)
        if span.issued_s is not None:
            args["issued_us"] = _us(at_s, span.issued_s)
        yield _x(span.label, pid, tid, at_s, (span.start_s, span.end_s), args)


def _placed(spans: Iterable[Span]) -> Iterator[tuple[int, Span]]:
    """Yield each span with the number of its track in its process: of the tracks of its lane, the first on which it
    lies apart from all others, or within one."""
    by_lane: dict[Lane, list[Span]] = {}
    for span in spans:
        by_lane.setdefault(span.lane, []).append(span)
    for place, lane in enumerate(Lane):
        open_us: list[list[float]] = []
        for span in sorted(by_lane.get(lane, ()), key=lambda span: (span.start_s, -span.end_s)):
            start_us, end_us = _us(0.0, span.start_s), _us(0.0, span.end_s)
            for ends_us in open_us:
                while ends_us and ends_us[-1] <= start_us:
                    ends_us.pop()
            track = next((at for at, ends in enumerate(open_us) if not ends or end_us <= ends[-1]), len(open_us))
            if track == len(open_us):
                open_us.append([])
            open_us[track].append(end_us)
            yield (place + 1) * _TRACKS_PER_LANE + track, span


def _arrows(
    spans: Sequence[Span], pid: int, at_s: float, waiting: Mapping[str, Sequence[str]], ids: Iterator[int]
) -> Iterator[Event]:
    """Yield the arrows to copies, and from each to the work that waits for it, if such a work is known."""
    placed = sorted(_placed(spans), key=lambda found: found[1].start_s)
    by_label: dict[str, list[tuple[int, Span]]] = {}
    for found in placed:
        if found[1].lane in (Lane.COMPUTE, Lane.CALLER):
            by_label.setdefault(found[1].label, []).append(found)
    times: Counter[tuple[Lane, str]] = Counter()
    for tid, copy in placed:
        if copy.lane not in _COPYING or verb_of(copy.label) not in _COPIES:
            continue
        number, times[copy.lane, copy.label] = times[copy.lane, copy.label], times[copy.lane, copy.label] + 1
        regions = waiting.get(copy.label, ())
        region = regions[min(number, len(regions) - 1)] if regions else ""
        waits = by_label.get(f"{Verb.WAIT} {what_of(copy.label)}", ())
        blocked = next((each for each in waits if each[1].end_s >= copy.end_s and each[1].start_s <= copy.end_s), None)
        runs = by_label.get(region, ())
        last = blocked or next((each for each in runs if each[1].start_s >= copy.end_s - _CLOCK_STEP_S), None)
        if last is None:
            continue
        arrow = {"name": copy.label, "cat": "copy", "id": next(ids), "pid": pid}
        is_asked = copy.issued_s is not None and copy.issued_s < copy.start_s
        if is_asked:
            yield arrow | {"ph": "s", "tid": _PHASES_TRACK, "ts": _us(at_s, copy.issued_s or 0.0)}
        yield arrow | {"ph": "t" if is_asked else "s", "tid": tid, "ts": _us(at_s, copy.start_s)}
        yield arrow | {"ph": "f", "bp": "e", "tid": last[0], "ts": _us(at_s, max(last[1].start_s, copy.start_s))}


def _names(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events that name the processes and tracks of `events`."""
    used = sorted({(event["pid"], event.get("tid", _PHASES_TRACK)) for event in events})
    for pid in sorted({pid for pid, _ in used}):
        name = f"rank {pid // 2} {'planned' if pid % 2 else 'measured'}"
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    lanes = list(Lane)
    for pid, tid in used:
        number = tid % _TRACKS_PER_LANE
        name = "phases" if tid == _PHASES_TRACK else str(lanes[tid // _TRACKS_PER_LANE - 1])
        name += f" {number + 1}" if number else ""
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _x(name: str, pid: int, tid: int, at_s: float, between_s: tuple[float, float], args: Mapping[str, Any]) -> Event:
    start_us, end_us = (_us(at_s, time_s) for time_s in between_s)
    dur_us = round(end_us - start_us, 3)
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": start_us, "dur": dur_us, "args": dict(args)}


def _c(name: str, pid: int, time_us: float, values: Mapping[str, float]) -> Event:
    return {"ph": "C", "name": name, "pid": pid, "ts": time_us, "args": dict(values)}


def _us(at_s: float, time_s: float) -> float:
    """Return the microseconds of `time_s` in the step that begins at `at_s`, in whole nanoseconds.

    Both are rounded alone, so that what nests within its step nests in the trace.
    """
    return (round(at_s * 1e9) + round(time_s * 1e9)) / 1e3
