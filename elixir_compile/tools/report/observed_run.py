"""Show an observed run: summaries of its steps as text, and the steps of each rank, one step in full and one with its
memory as sections of a page.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from elixir_compile.base.units import format_bytes, format_s
from elixir_compile.ir.hardware.cluster import Cluster
from elixir_compile.ir.plan import Plan
from elixir_compile.tools.observed import CALLER, FullStep, StepSummary, StudyRow, TraceMeta
from elixir_compile.tools.report import figures
from elixir_compile.tools.report import figures as charts
from elixir_compile.tools.report.findings import find, observed_row
from elixir_compile.tools.report.link_rates import LANES_CAPTION, row_rates
from elixir_compile.tools.report.sections import (
    Cell,
    bytes_cell,
    definitions,
    figure,
    head,
    json_block,
    plain_table,
    seconds_cell,
    table,
)
from elixir_compile.tools.report.study import PHASE_HEADS, finding_lines, phase_cells

# ----------------------------------------------------------------------------------------------------------------------
# Summaries of observed steps to text.


_NUM_UNSETTLED = 3
_PHASES = ("forward", "backward", "update", CALLER)


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
    for phase in _PHASES:
        seconds_s = sum(each.seconds_s.get(phase, 0.0) for each in settled) / count
        lines.append(f"  {phase:<10}{format_s(seconds_s):>12}{_share(seconds_s, period_s):>8}")
    for lane in sorted({lane for each in settled for lane in each.moved_bytes}):
        nbytes = sum(each.lane_bytes(lane) for each in settled) / count
        rate = f"{format_bytes(round(nbytes / period_s))} per s" if period_s else ""
        lines.append(f"  {lane:<10}{format_bytes(round(nbytes)):>12}   {rate}")
    return "\n".join([*lines, *_memory_lines(settled)])


def settled_steps(summaries: Sequence[StepSummary]) -> Sequence[StepSummary]:
    """Return `summaries` without the first three if as many others are there: the first steps compile and fill
    caches."""
    return summaries[_NUM_UNSETTLED:] if len(summaries) >= 2 * _NUM_UNSETTLED else summaries


def _memory_lines(settled: Sequence[StepSummary]) -> list[str]:
    figures = {
        "device peak": [each.device_peak_bytes for each in settled],
        "host slabs": [each.host_slab_bytes or None for each in settled],
        "process": [each.rss_bytes for each in settled],
    }
    most = {
        name: max((value for value in values if value is not None), default=None) for name, values in figures.items()
    }
    return [f"  {name:<10}{format_bytes(value):>12}" for name, value in most.items() if value is not None]


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ""


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
    """What the folder of an observed run holds, as far as a page shows it."""

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
    row = StudyRow(
        name=f"rank {first}",
        what=f"step {shown.summary.step}" if shown is not None else "no step in full",
        budget_bytes=None if plan is None else plan.budget_bytes,
        timed=timed,
        full=shown,
        memory=memory,
        peak_bytes=_peak_bytes(memory, timed),
        plan=plan,
    )
    return ObservedRun(name=name, meta=meta, steps=steps, row=row, cluster=cluster)


def _peak_bytes(memory: FullStep | None, timed: Sequence[StepSummary]) -> int | None:
    if memory is not None and memory.live is not None:
        return memory.live.peak_bytes
    return timed[-1].device_peak_bytes if timed else None


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
# Write an observed run as sections of a page, or as a page of its own if there is no plan to show with it.


_MOST_RANKS = 8
"""The most ranks whose seconds are drawn as a line each: more colours cannot be told apart."""
RUN_FORMAT = 1


def run_page(run: ObservedRun, others: Sequence[ObservedRun] = ()) -> str:
    """Return the page of a run of which no plan is known; losses of `others` are compared with its own."""
    can_draw = charts.can_draw()
    title = escape(f"{run.meta.model} on {run.meta.device}, observed")
    script = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
    body = [
        f'<header><h1>{title}</h1><p><span class="badge">measured</span></p></header><main>',
        *run_sections(run, others, can_draw=can_draw, has_plan=False),
        "</main>",
        json_block("elixir-report", {"elixir": "report", "format": RUN_FORMAT, "run": run_data(run)}),
        f"<script>{script}</script>",
    ]
    return "\n".join([*head(title), *body, "</body></html>", ""])


def run_sections(
    run: ObservedRun, others: Sequence[ObservedRun] = (), *, can_draw: bool, has_plan: bool
) -> Iterator[str]:
    """Yield the sections of a run: its steps, its losses, and a step in full.

    If the page `has_plan`, it draws the lanes of that step beside the planned ones, so they are left out here.
    """
    yield '<section aria-labelledby="run"><h2 id="run">Observed steps</h2>'
    yield from table(*_steps_table(run))
    if can_draw:
        lines = {f"rank {rank}": _periods(steps) for rank, steps in [*run.steps.items()][:_MOST_RANKS]}
        yield figure("Seconds from one step to the next.", charts.svg(charts.lines_chart(lines, "seconds")))
    yield from definitions([("folder", run.name), ("ranks", str(run.meta.num_ranks)), *run.meta.versions.items()])
    yield "</section>"
    yield from _losses(run, others, can_draw=can_draw)
    yield from _full_step(run, can_draw=can_draw, has_plan=has_plan)


def _steps_table(run: ObservedRun) -> tuple[list[str], list[list["str | Cell"]]]:
    """Return heads and a row of means for each rank."""
    lanes = sorted({lane for steps in run.steps.values() for each in steps for lane in each.moved_bytes})
    heads = ["rank", "steps", "period", *_PHASES]
    heads += [head for lane in lanes for head in (lane, f"{lane} per s")] + ["device peak", "process"]
    return heads, [_rank_cells(rank, steps, lanes) for rank, steps in run.steps.items()]


def _rank_cells(rank: int, steps: Sequence[StepSummary], lanes: Sequence[str]) -> list["str | Cell"]:
    settled = settled_steps(steps)
    count, total_s = len(settled), sum(each.period_s for each in settled)
    cells: list[str | Cell] = [str(rank), f"{settled[0].step} to {settled[-1].step}", seconds_cell(total_s / count)]
    cells += [seconds_cell(sum(each.seconds_s.get(phase, 0.0) for each in settled) / count) for phase in _PHASES]
    for lane in lanes:
        nbytes = sum(each.lane_bytes(lane) for each in settled)
        cells += [bytes_cell(round(nbytes / count)), bytes_cell(round(nbytes / total_s) if total_s else 0)]
    peaks = ([each.device_peak_bytes for each in settled], [each.rss_bytes for each in settled])
    for values in peaks:
        known = [value for value in values if value is not None]
        cells.append(bytes_cell(max(known)) if known else "")
    return cells


def _periods(steps: Sequence[StepSummary]) -> Points:
    return thinned(tuple((each.step, each.period_s) for each in settled_steps(steps)))


def _losses(run: ObservedRun, others: Sequence[ObservedRun], *, can_draw: bool) -> Iterator[str]:
    lines = {each.name: each.losses for each in (run, *others) if each.losses}
    if not lines and not others:
        return
    yield '<section aria-labelledby="losses"><h2 id="losses">Losses</h2>'
    for other in others:
        yield f"<p>{escape(loss_difference(run, other))}</p>"
    if can_draw and lines:
        drawn = {name: thinned(points) for name, points in lines.items()}
        yield figure("Loss over the steps.", charts.svg(charts.lines_chart(drawn, "loss")))
    ends = [(name, points[0], points[-1]) for name, points in lines.items()]
    rows = [(name, f"{first[1]!r} at step {first[0]}", f"{last[1]!r} at step {last[0]}") for name, first, last in ends]
    yield from plain_table(("run", "first loss", "last loss"), rows)
    yield "</section>"


def _full_step(run: ObservedRun, *, can_draw: bool, has_plan: bool) -> Iterator[str]:
    row = run.row
    if row.full is None:
        return
    yield f'<section aria-labelledby="full"><h2 id="full">{escape(f"{row.name}, {row.what} in full")}</h2>'
    seen = None if run.cluster is None else observed_row(row, run.cluster, run.steps if len(run.steps) > 1 else None)
    if seen is not None:
        yield from plain_table(PHASE_HEADS, (phase_cells(each) for each in seen.phases.values()))
        lines = list(finding_lines(find(seen)))
        yield f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else "<p>No findings.</p>"
    else:
        yield '<p class="note">Rates of the links and findings need the plan with its question in the folder.</p>'
    if can_draw:
        memory = row.memory
        if memory is not None and memory.live is not None and memory.intervals:
            rows = figures.live_rows(memory.live, memory.intervals[-1].end_s)
            budget_bytes = row.budget_bytes or memory.live.peak_bytes
            picture = charts.svg(charts.small_memory_chart(rows, budget_bytes))
            yield figure(f"Measured bytes on the device over step {memory.summary.step}, by kind.", picture)
        found = () if has_plan else figures.bars(row.full.record)
        if found:
            rates = () if run.cluster is None else row_rates(row.full, run.cluster)
            yield figure(LANES_CAPTION.format("the step"), charts.svg(charts.lanes_chart(found, rates)))
    yield "</section>"
