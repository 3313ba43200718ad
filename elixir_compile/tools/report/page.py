"""Write a plan or a study as one page of HTML that needs no network: memory and lanes over the step, layers, phases and
findings.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from elixir_compile.base.units import format_bytes, format_s
from elixir_compile.base.version import __version__
from elixir_compile.ir.cost import Measured
from elixir_compile.ir.graph import StepGraph
from elixir_compile.ir.hardware import Cluster
from elixir_compile.ir.kinds import Kind, Lane, Saving, Tier
from elixir_compile.ir.plan import Decision, Plan
from elixir_compile.ir.record import Record
from elixir_compile.session.line import SAID
from elixir_compile.step.divide import laps_of
from elixir_compile.step.prices import OpSeconds
from elixir_compile.step.seconds import simulate
from elixir_compile.tools.observed import Study, StudyRow
from elixir_compile.tools.report import figures
from elixir_compile.tools.report import figures as charts
from elixir_compile.tools.report.figures import Bar, CurvePoint, MemoryRow, kinds_of
from elixir_compile.tools.report.findings import find, observed_row
from elixir_compile.tools.report.link_rates import LANES_CAPTION, PHASES, LinkRates, link_rates, rate_columns, row_rates
from elixir_compile.tools.report.observed_run import ObservedRun, run_data, run_sections
from elixir_compile.tools.report.sections import (
    Cell,
    bytes_cell,
    certificate,
    curve_section,
    decision_details,
    definitions,
    figure,
    head,
    json_block,
    machine,
    measured_section,
    plain_table,
    ranks_section,
    second_section,
    seconds_cell,
    table,
)
from elixir_compile.tools.report.study import PHASE_HEADS, ROW_HEADS, finding_lines, phase_cells, row_cells
from elixir_compile.tools.report.tables import LayerRow, Survey, layer_rows

# ----------------------------------------------------------------------------------------------------------------------
# Write a plan as one page of HTML that needs no network: memory and lanes over the step, layers, the certificate.
#
# All that the page says is in its HTML before any script runs. Scripts add zoom, tooltips, a cursor for the keyboard,
# sorting and a filter; a policy in the head forbids the page to fetch anything. Names of modules, ops and files are
# somebody else's text: each is escaped, also in the blocks of data.


PAGE_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSheet:
    """What a page shows of a plan."""

    plan: Plan
    cluster: Cluster
    planned: Record
    """The simulated step."""
    measured: Record | None
    memory: tuple[MemoryRow, ...]
    """A row for each region, also for one that takes no time."""
    bars: tuple[Bar, ...]
    layers: tuple[LayerRow, ...]
    largest: tuple[tuple[str, Kind, int], ...]
    """What holds the most bytes at the peak: name, kind, bytes."""
    second: "PlanSheet | None" = None
    """A second plan, shown on the same axes."""
    curve: tuple[CurvePoint, ...] = ()
    """The step under other budgets, in rising order; empty if it was not asked for."""
    run: ObservedRun | None = None
    """The observed run of which `measured` is a step."""
    other_runs: tuple[ObservedRun, ...] = ()
    """Other observed runs, whose losses are compared with those of `run`."""

    @property
    def drawn_bars(self) -> tuple[Bar, ...]:
        """The bars of all steps that the page shows."""
        others = () if self.second is None else self.second.bars
        planned = (replace(bar, of=figures.SECOND) for bar in others if bar.of == figures.PLANNED)
        return (*self.bars, *planned)

    @property
    def rates(self) -> tuple[LinkRates, ...]:
        """The rates of the link over all steps that the page shows; empty if none copies."""
        run = self.run
        counters = None if run is None or run.row.full is None else run.row.full.counters
        own = link_rates(self.planned, figures.PLANNED, self.cluster)
        second = () if self.second is None else link_rates(self.second.planned, figures.SECOND, self.second.cluster)
        measured = self.measured
        seen = () if measured is None else link_rates(measured, figures.MEASURED, self.cluster, counters)
        return (*own, *second, *seen)

    @property
    def peak(self) -> MemoryRow:
        """The stretch of the step with the peak."""
        at = [row for row in self.memory if row.op == self.plan.prediction.device_peak_at]
        return max(at or self.memory, key=lambda row: row.nbytes)


def plan_sheet(
    plan: Plan, graph: StepGraph, cluster: Cluster, priced: Measured, measured: Record | None = None
) -> PlanSheet:
    """Return what a page shows of `plan`, which is legal for `graph`.

    `priced` are measured seconds of ops, by which the plan was made. `measured` is the record of a step under the plan.
    """
    survey = Survey(plan, graph)
    held = survey.held
    assert held is not None
    planned = simulate(graph, plan, cluster, priced)
    measured = None if measured is None else measured.of_graph(plan.name, [bucket.id for bucket in plan.buckets])
    records = {figures.PLANNED: planned} | ({} if measured is None else {figures.MEASURED: measured})
    op_seconds = OpSeconds(graph, cluster, priced).of(plan.activations, laps_of(plan))
    return PlanSheet(
        plan=plan,
        cluster=cluster,
        planned=planned,
        measured=measured,
        memory=figures.memory_rows(survey, planned),
        bars=tuple(bar for of, record in records.items() for bar in figures.bars(record, of)),
        layers=layer_rows(survey, op_seconds),
        largest=held.largest(plan.prediction.device_peak_at),
    )


def page(sheet: PlanSheet) -> str:
    """Return the page of `sheet`; equal sheets have equal pages. Without Altair it has tables and no charts."""
    title = escape(f"{sheet.plan.name} on {sheet.plan.cluster}")
    own = Path(__file__)
    can_draw = charts.can_draw()
    body = [
        *_header(sheet, title),
        "<main>",
        *_step_section(sheet, can_draw=can_draw),
        *([] if sheet.run is None else run_sections(sheet.run, sheet.other_runs, can_draw=can_draw, has_plan=True)),
        *(ranks_section(sheet.plan) if sheet.plan.classes else ()),
        *_layers_section(sheet),
        *certificate(sheet.plan),
        *(curve_section(sheet.curve, can_draw=can_draw) if sheet.curve else ()),
        *([] if sheet.measured is None else measured_section(sheet.plan, sheet.planned, sheet.measured)),
        *([] if sheet.second is None else second_section(sheet.plan, sheet.second.plan)),
        *machine(sheet.cluster),
        "</main>",
        f"<footer>Written by elixir-compile {__version__}. Graph {escape(sheet.plan.graph)}, planner "
        f"{escape(sheet.plan.planner)}. Seconds of the plan come from the profile of the machine above.</footer>",
        json_block("elixir-report", page_data(sheet)),
        *([_drawn(sheet)] if can_draw else []),
        f"<script>{own.with_suffix('.js').read_text(encoding='utf-8')}</script>",
    ]
    return "\n".join([*head(title), *body, "</body></html>", ""])


def page_data(sheet: PlanSheet) -> dict[str, Any]:
    """Return the data of a page as columns: exact bytes by region that takes time, and seconds by lane."""
    made, rows = sheet.plan.prediction, figures.lasting(sheet.memory)
    return {
        "elixir": "report",
        "format": PAGE_FORMAT,
        "name": sheet.plan.name,
        "cluster": sheet.plan.cluster,
        "graph": sheet.plan.graph,
        "budget_bytes": sheet.plan.budget_bytes,
        "device_peak_bytes": made.device_peak_bytes,
        "device_peak_at": made.device_peak_at,
        "host_peak_bytes": made.host_peak_bytes,
        "step_s": made.step_s,
        "bound_s": sheet.plan.bound_s,
        "kinds": [str(kind) for kind in kinds_of(rows)],
        "memory": figures.columns(rows),
        "bars": figures.bar_columns(sheet.drawn_bars),
        **({"rates": rate_columns(rates)} if (rates := sheet.rates) else {}),
        **({"curve": [asdict(point) for point in sheet.curve]} if sheet.curve else {}),
        **({} if sheet.second is None else {"second": page_data(sheet.second)}),
        **({} if sheet.run is None else {"run": run_data(sheet.run)}),
    }


def _drawn(sheet: PlanSheet) -> str:
    spec = _step_spec(sheet, is_static=False)
    del spec["datasets"]  # page.js makes them of the data of the page
    library = f'<script type="text/plain" id="packed-library">{charts.packed_library()}</script>'
    return f"{json_block('elixir-step', spec)}\n{library}"


def _step_spec(sheet: PlanSheet, *, is_static: bool) -> dict[str, Any]:
    rows, second = drawn_memory(sheet)
    return charts.step_chart(rows, sheet.drawn_bars, sheet.plan.budget_bytes, second, sheet.rates, is_static=is_static)


def drawn_memory(sheet: PlanSheet) -> tuple[Sequence[MemoryRow], Sequence[MemoryRow]]:
    """Return the stretches of the step that take time, of the plan and of the second plan, to be drawn."""
    return figures.lasting(sheet.memory), figures.lasting(() if sheet.second is None else sheet.second.memory)


def _header(sheet: PlanSheet, title: str) -> Iterator[str]:
    badges = ["planned", *([] if sheet.measured is None else ["measured"])]
    badges += [] if sheet.second is None else ["two plans"]
    yield f"<header><h1>{title}</h1>"
    yield "<p>" + "".join(f'<span class="badge">{badge}</span>' for badge in badges) + "</p>"
    yield f'<p class="verdict">{escape(_verdict(sheet.plan))}</p>'
    if sheet.second is not None:
        other = sheet.second.plan
        yield f'<p class="verdict">Second plan, {escape(f"{other.name} on {other.cluster}: {_verdict(other)}")}</p>'
    yield "</header>"


def _verdict(plan: Plan) -> str:
    """Return whether the plan fits, its seconds and how well its transfers are hidden, as a line."""
    made = plan.prediction
    fits = "fits" if made.device_peak_bytes <= plan.budget_bytes else "does not fit"
    parts = [
        f"{fits}: peak {format_bytes(made.device_peak_bytes)} of {format_bytes(plan.budget_bytes)}",
        f"step {format_s(made.step_s)}, {format_s(made.exposed_s)} of it exposed transfers",
        *([] if plan.gap is None or plan.bound_s is None else [f"bound {format_s(plan.bound_s)} (gap {plan.gap:.1%})"]),
        f"{made.hidden_share:.0%} of transfers hidden",
        f"host {format_bytes(made.host_peak_bytes)}",
    ]
    return "; ".join(parts)


def _step_section(sheet: PlanSheet, *, can_draw: bool) -> Iterator[str]:
    made, total_bytes = sheet.plan.prediction, sheet.plan.prediction.device_peak_bytes
    peak = sheet.peak
    where = ", ".join(filter(None, [peak.module, peak.source]))
    caption = f"The peak of {format_bytes(total_bytes)} is in {peak.region}, at {made.device_peak_at}"
    caption += f" ({where})" if where else ""
    caption += f"; {format_bytes(sheet.plan.budget_bytes - total_bytes)} of the budget stay free."
    caption += "" if sheet.second is None else " The line is the memory of the second plan."
    num_drawn, num_spans = len(sheet.drawn_bars), sum(bar.num_spans for bar in sheet.drawn_bars)
    bars = f"{num_spans} actions" + ("" if num_drawn == num_spans else f" in {num_drawn} bars")
    yield '<section aria-labelledby="step"><h2 id="step">Memory and lanes over the step</h2>'
    if can_draw:
        spec = _step_spec(sheet, is_static=True)
        yield f"<figure><figcaption>{escape(caption)} The dashed line is the budget. Below are the lanes: {bars}."
        yield _rates_caption(sheet)
        yield "Scroll to zoom, drag to move. On the keyboard, arrow keys walk over the regions, P goes to the peak."
        yield '</figcaption><div class="chart" id="step-chart" tabindex="0" role="img"'
        yield f'aria-label="Memory over the step by kind, and lanes. {escape(caption)}">{charts.svg(spec)}</div>'
        yield '<output id="cursor" aria-live="polite"></output></figure>'
    else:
        yield f"<p>{escape(caption)}</p>"
        yield f'<p class="note">For charts, <code>{escape(charts.EXTRA)}</code> and write the page again.</p>'
    kinds = sorted(peak.live_bytes.items(), key=lambda item: -item[1])
    rows = [(str(kind), bytes_cell(nbytes), f"{nbytes / total_bytes:.1%}") for kind, nbytes in kinds if nbytes]
    yield "<h3>At the peak</h3>"
    yield from table(("kind", "bytes", "share"), rows)
    yield "<details><summary>The ten that hold the most at the peak</summary>"
    yield from table(("bucket or storage", "kind", "bytes"), [(n, str(k), bytes_cell(b)) for n, k, b in sheet.largest])
    yield "</details><details><summary>Every region as a table</summary>"
    names = kinds_of(sheet.memory)
    heads = ("region", "op with the most bytes", "module", "line", "from", "all", *map(str, names))
    yield from plain_table(heads, (_region_cells(row, names) for row in sheet.memory))
    yield "</details></section>"


def _rates_caption(sheet: PlanSheet) -> str:
    """Return a sentence about the rates of the link below the lanes; empty if they are not drawn."""
    planned = [each for each in sheet.rates if each.of == figures.PLANNED]
    if not planned:
        return ""
    told = [
        f"{format_bytes(round(each.nbytes))} {_DIRECTIONS[each.lane]} in the planned step, "
        f"{each.nbytes / each.step_s / each.rated_bytes_per_s:.0%} of what the link could carry"
        for each in planned
    ]
    return escape(f" Below them is the rate of the link, with dashed lines at its profile: {'; '.join(told)}. ")


_DIRECTIONS = {Lane.H2D: "to the device", Lane.D2H: "to the host"}


def _region_cells(row: MemoryRow, names: Sequence[str]) -> list[str]:
    held = [format_bytes(nbytes) for nbytes in (row.nbytes, *(row.live_bytes[kind] for kind in names))]
    return [row.region, row.op, row.module, row.source, format_s(row.start_s), *held]


def _layers_section(sheet: PlanSheet) -> Iterator[str]:
    heads = ("layer", "parameters", "optimizer state", "activations", "gathers", "compute", "costs", "saves", "why")
    yield '<section aria-labelledby="layers"><h2 id="layers">Layers</h2>'
    yield '<label data-filters="layer-table" hidden>Filter <input type="search"></label>'
    yield from table(heads, [_layer_cells(row, sheet) for row in sheet.layers], name="layer-table")
    yield "</section>"


def _layer_cells(row: LayerRow, sheet: PlanSheet) -> tuple["str | Cell", ...]:
    kept = "all kept" if not sheet.plan.activations else "none saved"
    saved = ", ".join(f"{format_bytes(n)} {SAID[s]}" for s in Saving if (n := row.saved_bytes[s])) or kept
    return (
        row.layer,
        _by_home(row.param_bytes),
        _by_home(row.state_bytes),
        saved,
        Cell(str(row.num_gathers), row.num_gathers),
        seconds_cell(row.compute_s),
        seconds_cell(row.cost_s),
        bytes_cell(row.saves_bytes),
        Cell(_reasons(row.decisions), is_html=True),
    )


def _by_home(nbytes: Mapping[Tier, int]) -> "Cell":
    text = ", ".join(f"{format_bytes(nbytes[home])} {home}" for home in Tier if nbytes.get(home))
    return Cell(text or "none", sum(nbytes.values()))


def _reasons(decisions: Sequence[Decision]) -> str:
    found = "".join(map(decision_details, decisions))
    return found if len(decisions) < 2 else f"<details><summary>{len(decisions)} decisions</summary>{found}</details>"


# ----------------------------------------------------------------------------------------------------------------------
# Write a study as one page of HTML that needs no network: rows, phases, memory over the step, findings, losses.


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
