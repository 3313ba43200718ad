"""Write an observed run as sections of a page, or as a page of its own if there is no plan to show with it."""

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from elixir_compile.tools.report import charts, figures
from elixir_compile.tools.report.findings import find, observed_row
from elixir_compile.tools.report.head import head
from elixir_compile.tools.report.link_rates import LANES_CAPTION, row_rates
from elixir_compile.tools.report.markup import (
    Cell,
    bytes_cell,
    definitions,
    figure,
    json_block,
    plain_table,
    seconds_cell,
    table,
)
from elixir_compile.tools.report.observed_run import ObservedRun, Points, loss_difference, run_data, thinned
from elixir_compile.tools.report.observed_text import settled_steps
from elixir_compile.tools.report.study_text import PHASE_HEADS, finding_lines, phase_cells
from elixir_compile.tools.study.observed import CALLER, StepSummary

_PHASES = ("forward", "backward", "update", CALLER)
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
