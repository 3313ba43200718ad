"""Write a study as one page of HTML that needs no network: rows, phases, memory over the step, findings, losses."""

from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

from elixir_compile.tools.report import charts, figures
from elixir_compile.tools.report.findings import find, observed_row
from elixir_compile.tools.report.head import head
from elixir_compile.tools.report.link_rates import LANES_CAPTION, row_rates
from elixir_compile.tools.report.markup import definitions, figure, plain_table
from elixir_compile.tools.report.phase_table import PHASES
from elixir_compile.tools.report.sections import machine
from elixir_compile.tools.report.study_text import PHASE_HEADS, ROW_HEADS, finding_lines, phase_cells, row_cells
from elixir_compile.tools.study.study import Study, StudyRow


def study_page(study: Study) -> str:
    """Return the page of `study`; equal studies have equal pages. Without Altair it has tables and no charts."""
    can_draw = charts.can_draw()
    badge = "planned" if any(row.is_simulated for row in study.rows) else "measured"
    title = escape(f"study of {study.model} on {study.cluster.name}")
    body = [
        f'<header><h1>{title}</h1><p><span class="badge">{badge}</span></p></header><main>',
        '<section aria-labelledby="rows"><h2 id="rows">Rows</h2>',
        *plain_table(ROW_HEADS, row_cells(study)),
        *(_phases(study) if can_draw else ()),
        "</section>",
        *(part for row in study.rows for part in _row(study, row, can_draw=can_draw)),
        *(_losses(study) if can_draw else ()),
        *machine(study.cluster),
        '<section aria-labelledby="again"><h2 id="again">Again</h2>',
        *definitions([("command", study.command), *study.versions.items()]),
        "</section></main>",
    ]
    script = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
    return "\n".join([*head(title), *body, f"<script>{script}</script>", "</body></html>", ""])


def _phases(study: Study) -> Iterator[str]:
    run = [row for row in study.rows if row.full is not None]
    seconds_s = [_in_order(row.full.summary.seconds_s) for row in run if row.full is not None]
    if run:
        yield figure(
            "Seconds of a step by phase.", charts.svg(charts.phases_chart([row.name for row in run], seconds_s))
        )


def _in_order(seconds_s: Mapping[str, float]) -> dict[str, float]:
    return {phase: seconds_s[phase] for phase in PHASES if phase in seconds_s}


def _row(study: Study, row: StudyRow, *, can_draw: bool) -> Iterator[str]:
    seen = observed_row(row, study.cluster)
    if seen is None:
        return
    yield f"<section><h2>{escape(row.name)}</h2><p>{escape(row.what)}</p>"
    yield from plain_table(PHASE_HEADS, (phase_cells(each) for each in seen.phases.values()))
    lines = list(finding_lines(find(seen)))
    yield f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else "<p>No findings.</p>"
    if can_draw:
        if row.memory is not None and row.memory.live is not None and row.memory.intervals:
            drawn = figures.live_rows(row.memory.live, row.memory.intervals[-1].end_s)
            picture = charts.svg(charts.small_memory_chart(drawn, _most_bytes(study)))
            yield figure(
                f"Bytes on the device over a step of {row.name}. The dashed line is the most of all rows.", picture
            )
        found = figures.bars(seen.full.record)
        if found:
            picture = charts.svg(charts.lanes_chart(found, row_rates(seen.full, study.cluster)))
            yield figure(LANES_CAPTION.format(f"a step of {row.name}"), picture)
    yield "</section>"


def _most_bytes(study: Study) -> int:
    live = [row.memory.live.peak_bytes for row in study.rows if row.memory is not None and row.memory.live is not None]
    return max(live, default=1)


def _losses(study: Study) -> Iterator[str]:
    losses = {row.name: tuple(enumerate(row.losses)) for row in study.rows if row.losses}
    if losses:
        yield '<section aria-labelledby="losses"><h2 id="losses">Losses</h2>'
        yield figure("Loss over the steps of each row.", charts.svg(charts.lines_chart(losses, "loss")))
        yield "</section>"
