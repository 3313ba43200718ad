"""Write a plan, an observed run or a study as one page of HTML that needs no network: memory and lanes over the step,
layers, phases, findings and losses.

All that a page says is in its HTML before any script runs. Scripts add zoom, tooltips, a cursor for the keyboard,
sorting and a filter; a policy in the head forbids the page to fetch anything. Names of modules, ops and files are
somebody else's text: each is escaped, also in the blocks of data.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from elixir_compile.ir.plan import SAID, Decision, Plan, spans_text
from elixir_compile.ir.schedule import Origin, Record
from elixir_compile.step.divide import laps_of
from elixir_compile.step.prices import OpSeconds
from elixir_compile.step.seconds import simulate
from elixir_compile.tools.observed import Study, StudyRow
from elixir_compile.tools.report import figures as charts
from elixir_compile.tools.report.diff import change_rows, plan_diff, run_diff
from elixir_compile.tools.report.explain import plan_answer
from elixir_compile.tools.report.figures import (
    Bar,
    CurvePoint,
    LinkRates,
    MemoryRow,
    kinds_of,
    link_rates,
    rate_columns,
)
from elixir_compile.tools.report.findings import PHASES, STEP_PHASES, Observed, find, observed_row
from elixir_compile.tools.report.runs import (
    PHASE_HEADS,
    ROW_HEADS,
    ObservedRun,
    finding_lines,
    loss_difference,
    phase_cells,
    row_cells,
    run_data,
    settled_steps,
    thinned,
)
from elixir_compile.tools.report.tables import LayerRow, Survey, layer_rows, work_rows

# ----------------------------------------------------------------------------------------------------------------------
# The parts of every page: its head and its end, sections, tables that a script can sort, lists, and blocks of JSON.


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_FRAME = '<div class="scroll" tabindex="0" role="region" aria-label="Table">'


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table: its text, and the number by which it sorts."""

    text: str
    value: float | None = None
    is_html: bool = False
    """Whether the text is HTML already, with all names in it escaped."""


def _bytes_cell(nbytes: int) -> Cell:
    return Cell(format_bytes(nbytes), nbytes)


def _seconds_cell(seconds: float) -> Cell:
    return Cell(format_s(seconds), seconds)


def _document(title: str, body: Iterable[str]) -> str:
    """Return a page; `title` is HTML, `body` its lines up to the script."""
    style = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
    script = Path(__file__).with_suffix(".js").read_text(encoding="utf-8")
    lines = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title>",
        f"<style>\n{style}{charts.dark_style()}</style></head><body>",
        *body,
        f"<script>{script}</script>",
        "</body></html>",
        "",
    ]
    return "\n".join(lines)


def _section(name: str, title: str, *parts: Iterable[str]) -> Iterator[str]:
    """Yield a section that is called `name`; its `title` and `parts` are HTML."""
    yield f'<section aria-labelledby="{name}"><h2 id="{name}">{title}</h2>'
    for part in parts:
        yield from part
    yield "</section>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str | Cell]], name: str = "") -> Iterator[str]:
    """Yield a table that can be sorted, in a frame that scrolls."""
    made = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    columns = [[row[at].value for row in made] for at in range(len(heads))]
    numbers = [' class="number"' if values and None not in values else "" for values in columns]
    own = f' id="{name}"' if name else ""
    yield f'{_FRAME}<table class="sortable"{own}><thead><tr>'
    yield "".join(f'<th scope="col"{kind}>{escape(head)}</th>' for head, kind in zip(heads, numbers, strict=True))
    yield "</tr></thead><tbody>"
    for row in made:
        values = ("" if cell.value is None else f' data-value="{cell.value!r}"' for cell in row)
        texts = (cell.text if cell.is_html else escape(cell.text) for cell in row)
        cells = (f"<td{value}>{text}</td>" for value, text in zip(values, texts, strict=True))
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</tbody></table></div>"


def _plain_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield a table of text that cannot be sorted, for tables of many rows."""
    yield f"{_FRAME}<table><thead><tr>{''.join(f'<th>{escape(head)}' for head in heads)}</thead><tbody>"
    yield from (f"<tr>{''.join(f'<td>{escape(cell)}' for cell in row)}" for row in rows)
    yield "</tbody></table></div>"


def _definitions(lines: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield a list of names with a text for each."""
    yield "<dl>"
    yield from (f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in lines)
    yield "</dl>"


def _figure(caption: str, spec: Mapping[str, Any]) -> str:
    """Return the picture of a chart, with a caption that also describes it to a screen reader."""
    text = escape(caption)
    drawn = f'<div class="chart" role="img" aria-label="{text}">{charts.svg(spec)}</div>'
    return f"<figure><figcaption>{text}</figcaption>{drawn}</figure>"


def _json_block(name: str, data: Mapping[str, Any]) -> str:
    """Return a block of JSON that no HTML parser can leave early."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


# ----------------------------------------------------------------------------------------------------------------------
# The page of a plan: memory and lanes over the step, layers, the certificate.


PAGE_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSheet:
    """The contents of the page of a plan."""

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
    """The buckets and storages with the most bytes at the peak: name, kind, bytes."""
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
        planned = (replace(bar, of=charts.SECOND) for bar in others if bar.of == charts.PLANNED)
        return (*self.bars, *planned)

    @property
    def rates(self) -> tuple[LinkRates, ...]:
        """The rates of the link over all steps that the page shows; empty if none copies."""
        run = self.run
        counters = None if run is None or run.row.full is None else run.row.full.counters
        own = link_rates(self.planned, charts.PLANNED, self.cluster)
        second = () if self.second is None else link_rates(self.second.planned, charts.SECOND, self.second.cluster)
        measured = self.measured
        seen = () if measured is None else link_rates(measured, charts.MEASURED, self.cluster, counters)
        return (*own, *second, *seen)

    @property
    def peak(self) -> MemoryRow:
        """The stretch of the step with the peak."""
        at = [row for row in self.memory if row.op == self.plan.prediction.device_peak_at]
        return max(at or self.memory, key=lambda row: row.nbytes)


def plan_sheet(
    plan: Plan, graph: StepGraph, cluster: Cluster, priced: Measured, measured: Record | None = None
) -> PlanSheet:
    """Return the contents of the page of `plan`, which is legal for `graph`.

    `priced` are measured seconds of ops, by which the plan was made. `measured` is the record of a step under the plan.
    """
    survey = Survey(plan, graph)
    held = survey.held
    assert held is not None
    planned = simulate(graph, plan, cluster, priced)
    measured = None if measured is None else measured.of_graph(plan.name, [bucket.id for bucket in plan.buckets])
    records = {charts.PLANNED: planned} | ({} if measured is None else {charts.MEASURED: measured})
    op_seconds = OpSeconds(graph, cluster, priced).of(plan.activations, laps_of(plan))
    return PlanSheet(
        plan=plan,
        cluster=cluster,
        planned=planned,
        measured=measured,
        memory=charts.memory_rows(survey, planned),
        bars=tuple(bar for of, record in records.items() for bar in charts.bars(record, of)),
        layers=layer_rows(survey, op_seconds),
        largest=held.largest(plan.prediction.device_peak_at),
    )


def page(sheet: PlanSheet) -> str:
    """Return the page of `sheet`; equal sheets have equal pages. Without Altair it has tables and no charts."""
    plan, second = sheet.plan, None if sheet.second is None else sheet.second.plan
    title = escape(f"{plan.name} on {plan.cluster}")
    badges = ["planned", *([] if sheet.measured is None else ["measured"]), *([] if second is None else ["two plans"])]
    body = [
        f"<header><h1>{title}</h1>",
        "<p>" + "".join(f'<span class="badge">{badge}</span>' for badge in badges) + "</p>",
        f'<p class="verdict">{escape(_verdict(plan))}</p>',
    ]
    if second is not None:
        line = f"{second.name} on {second.cluster}: {_verdict(second)}"
        body.append(f'<p class="verdict">Second plan, {escape(line)}</p>')
    body += [
        "</header>",
        "<main>",
        *_step_section(sheet),
        *([] if sheet.run is None else _run_sections(sheet.run, sheet.other_runs, has_plan=True)),
        *(_ranks_section(plan) if plan.classes else ()),
        *_layers_section(sheet),
        *_certificate(plan),
        *(_curve_section(sheet.curve) if sheet.curve else ()),
        *([] if sheet.measured is None else _measured_section(plan, sheet.planned, sheet.measured)),
    ]
    if second is not None:
        found = plan_diff(plan, second)
        changes = ["<p>Equal.</p>"] if found.is_equal else _table(("figure", "first", "second"), change_rows(found))
        body += _section("second", "Two plans", changes)
    body += [
        *_machine(sheet.cluster),
        "</main>",
        f"<footer>Written by elixir-compile {__version__}. Graph {escape(plan.graph)}, planner "
        f"{escape(plan.planner)}. Seconds of the plan come from the profile of the machine above.</footer>",
        _json_block("elixir-report", page_data(sheet)),
    ]
    if charts.can_draw():
        spec = _step_spec(sheet, is_static=False)
        del spec["datasets"]  # page.js makes them of the data of the page
        body.append(_json_block("elixir-step", spec))
        body.append(f'<script type="text/plain" id="packed-library">{charts.packed_library()}</script>')
    return _document(title, body)


def page_data(sheet: PlanSheet) -> dict[str, Any]:
    """Return the data of a page as columns: exact bytes by region that takes time, and seconds by lane."""
    made, rows = sheet.plan.prediction, charts.lasting(sheet.memory)
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
        "memory": charts.columns(rows),
        "bars": charts.bar_columns(sheet.drawn_bars),
        **({"rates": rate_columns(rates)} if (rates := sheet.rates) else {}),
        **({"curve": [asdict(point) for point in sheet.curve]} if sheet.curve else {}),
        **({} if sheet.second is None else {"second": page_data(sheet.second)}),
        **({} if sheet.run is None else {"run": run_data(sheet.run)}),
    }


def _step_spec(sheet: PlanSheet, *, is_static: bool) -> dict[str, Any]:
    rows, second = drawn_memory(sheet)
    return charts.step_chart(rows, sheet.drawn_bars, sheet.plan.budget_bytes, second, sheet.rates, is_static=is_static)


def drawn_memory(sheet: PlanSheet) -> tuple[Sequence[MemoryRow], Sequence[MemoryRow]]:
    """Return the stretches of the step that take time, of the plan and of the second plan, to be drawn."""
    return charts.lasting(sheet.memory), charts.lasting(() if sheet.second is None else sheet.second.memory)


def _verdict(plan: Plan) -> str:
    """Return whether the plan fits, its seconds and how well its transfers are hidden, as a line."""
    made = plan.prediction
    fits = "fits" if made.device_peak_bytes <= plan.budget_bytes else "does not fit"
    parts = [
        f"{fits}: peak {format_bytes(made.device_peak_bytes)} of {format_bytes(plan.budget_bytes)}",
        f"step {format_s(made.step_s)}, {format_s(made.exposed_s)} of it exposed transfers",
        *(
            []
            if plan.gap is None or plan.bound_s is None
            else [f"bound {format_s(plan.bound_s)} (gap {plan.gap:.1%}){plan.on_share}"]
        ),
        f"{made.hidden_share:.0%} of transfers hidden",
        f"host {format_bytes(made.host_peak_bytes)}",
    ]
    return "; ".join(parts)


_DIRECTIONS = {Lane.H2D: "to the device", Lane.D2H: "to the host"}


def _step_section(sheet: PlanSheet) -> Iterator[str]:
    made, total_bytes = sheet.plan.prediction, sheet.plan.prediction.device_peak_bytes
    peak = sheet.peak
    where = ", ".join(filter(None, [peak.module, peak.source]))
    caption = f"The peak of {format_bytes(total_bytes)} is in {peak.region}, at {made.device_peak_at}"
    caption += f" ({where})" if where else ""
    caption += f"; {format_bytes(sheet.plan.budget_bytes - total_bytes)} of the budget stay free."
    caption += "" if sheet.second is None else " The line is the memory of the second plan."
    num_drawn, num_spans = len(sheet.drawn_bars), sum(bar.num_spans for bar in sheet.drawn_bars)
    bars = f"{num_spans} actions" + ("" if num_drawn == num_spans else f" in {num_drawn} bars")
    carried = "; ".join(
        f"{format_bytes(round(each.nbytes))} {_DIRECTIONS[each.lane]} in the planned step, "
        f"{each.nbytes / each.step_s / each.rated_bytes_per_s:.0%} of what the link could carry"
        for each in sheet.rates
        if each.of == charts.PLANNED
    )
    rates = f" Below them is the rate of the link, with dashed lines at its profile: {carried}. " if carried else ""
    yield '<section aria-labelledby="step"><h2 id="step">Memory and lanes over the step</h2>'
    if charts.can_draw():
        spec = _step_spec(sheet, is_static=True)
        yield f"<figure><figcaption>{escape(caption)} The dashed line is the budget. Below are the lanes: {bars}."
        yield escape(rates)
        yield "Scroll to zoom, drag to move. On the keyboard, arrow keys walk over the regions, P goes to the peak."
        yield '</figcaption><div class="chart" id="step-chart" tabindex="0" role="img"'
        yield f'aria-label="Memory over the step by kind, and lanes. {escape(caption)}">{charts.svg(spec)}</div>'
        yield '<output id="cursor" aria-live="polite"></output></figure>'
    else:
        yield f"<p>{escape(caption)}</p>"
        yield f'<p class="note">For charts, <code>{escape(charts.EXTRA)}</code> and write the page again.</p>'
    kinds = sorted(peak.live_bytes.items(), key=lambda item: -item[1])
    shares = [(str(kind), _bytes_cell(nbytes), f"{nbytes / total_bytes:.1%}") for kind, nbytes in kinds if nbytes]
    yield "<h3>At the peak</h3>"
    yield from _table(("kind", "bytes", "share"), shares)
    yield "<details><summary>The ten that hold the most at the peak</summary>"
    yield from _table(
        ("bucket or storage", "kind", "bytes"), [(n, str(k), _bytes_cell(b)) for n, k, b in sheet.largest]
    )
    yield "</details><details><summary>Every region as a table</summary>"
    names = kinds_of(sheet.memory)
    heads = ("region", "op with the most bytes", "module", "line", "from", "all", *map(str, names))
    regions = (
        [row.region, row.op, row.module, row.source, format_s(row.start_s), format_bytes(row.nbytes)]
        + [format_bytes(row.live_bytes[kind]) for kind in names]
        for row in sheet.memory
    )
    yield from _plain_table(heads, regions)
    yield "</details></section>"


def _layers_section(sheet: PlanSheet) -> Iterator[str]:
    heads = ("layer", "parameters", "optimizer state", "activations", "gathers", "compute", "costs", "saves", "why")
    kept = "all kept" if not sheet.plan.activations else "none saved"

    def by_home(nbytes: Mapping[Tier, int]) -> Cell:
        text = ", ".join(f"{format_bytes(nbytes[home])} {home}" for home in Tier if nbytes.get(home))
        return Cell(text or "none", sum(nbytes.values()))

    def cells(row: LayerRow) -> tuple[str | Cell, ...]:
        saved = ", ".join(f"{format_bytes(n)} {SAID[s]}" for s in Saving if (n := row.saved_bytes[s])) or kept
        gathers = Cell(str(row.num_gathers), row.num_gathers)
        seconds = _seconds_cell(row.compute_s), _seconds_cell(row.cost_s)
        reasons, number = "".join(map(_decision_details, row.decisions)), len(row.decisions)
        if number > 1:
            reasons = f"<details><summary>{number} decisions</summary>{reasons}</details>"
        why = Cell(reasons, is_html=True)
        homes = by_home(row.param_bytes), by_home(row.state_bytes)
        return (row.layer, *homes, saved, gathers, *seconds, _bytes_cell(row.saves_bytes), why)

    search = '<label data-filters="layer-table" hidden>Filter <input type="search"></label>'
    yield from _section("layers", "Layers", [search], _table(heads, map(cells, sheet.layers), name="layer-table"))


def _decision_details(decision: Decision) -> str:
    """Return a decision with its reason and its rejected options, to be opened."""
    rejected = "".join(f"<li>{escape(other)}</li>" for other in decision.rejected)
    why = f"{escape(decision.subject)}: {escape(decision.choice)}"
    more = f"<p>{escape(decision.because)}</p>" + (f"<p>Rejected:</p><ul>{rejected}</ul>" if rejected else "")
    return f"<details><summary>{why}</summary>{more}</details>"


def _certificate(plan: Plan) -> Iterator[str]:
    """Yield the proved bound of the plan, its limits, and its decisions about more than one layer."""
    found = plan_answer(plan)
    bound = "not proved" if found.bound_s is None else f"{format_s(found.bound_s)} for every plan"
    gap = "" if found.gap is None else f": no plan is more than {found.gap:.2%} faster"
    lines = [
        ("planner", found.planner),
        ("bound", bound + gap + found.on_share),
        ("binding", ", ".join(found.binding) or "nothing"),
        ("one more GiB", found.gib_saves or "unknown"),
        ("update", str(found.update)),
        ("actions", ", ".join(f"{verb} {count}" for verb, count in sorted(found.counts.items()))),
        *([("peak of the sizes", found.formula)] if found.formula else []),
    ]
    yield from _section("certificate", "Certificate", _definitions(lines), map(_decision_details, found.decisions))


def _ranks_section(plan: Plan) -> Iterator[str]:
    """Yield a row for each class of ranks with a plan of its own: its rows, its shard of the state, and the figures of
    its plan if all ranks are simulated together."""
    heads = ("ranks", "device", "rows", "micro-batches", "state", "peak", "budget", "host", "busy")
    said = f"<p>All ranks simulated together. The page shows the step of rank {plan.rank}.</p>"
    lines = [
        (
            spans_text(line.ranks),
            line.device,
            "unknown" if line.num_rows is None else Cell(str(line.num_rows), line.num_rows),
            Cell(str(line.micro_batches), line.micro_batches),
            "unknown" if line.state is None else Cell(f"{line.state:.1%}", line.state),
            *map(_bytes_cell, (line.device_peak_bytes, line.budget_bytes, line.host_peak_bytes)),
            Cell(f"{line.busy_share:.0%}", line.busy_share),
        )
        for line in plan.classes
    ]
    yield from _section("ranks", "Ranks", [said], _table(heads, lines))


def _measured_section(plan: Plan, planned: Record, record: Record) -> Iterator[str]:
    """Yield the figures of a plan, with its work on each lane in the record `planned`, beside those of a measured
    step."""
    figures = [
        [
            pair.what,
            f"{pair.planned:g}",
            f"{pair.measured:g}",
            "" if pair.ratio is None else f"{pair.ratio:.2f}",
            "off" if pair.is_off else "",
        ]
        for pair in run_diff(plan, record).comparisons
    ]
    works = [
        [
            str(row.lane),
            row.verb,
            str(row.planned.times),
            str(row.measured.times),
            _bytes_cell(row.planned.nbytes),
            _bytes_cell(row.measured.nbytes),
            _seconds_cell(row.planned_s),
            _seconds_cell(row.measured_s),
            "off" if row.is_off else "",
        ]
        for row in work_rows(planned, record)
    ]
    heads = ("lane", "action", "times planned", "times", "bytes planned", "bytes", "planned", "measured", "")
    tables = _table(("figure", "planned", "measured", "ratio", ""), figures), _table(heads, works)
    yield from _section("measured", "Planned and measured", *tables)


def _curve_section(points: Sequence[CurvePoint]) -> Iterator[str]:
    """Yield the steps under other budgets, as a chart and a table."""
    first, last = points[0], points[-1]
    caption = escape(
        f"A step takes {format_s(first.step_s)} in {format_bytes(first.budget_bytes)}, the least that has a plan, and "
        f"{format_s(last.step_s)} in {format_bytes(last.budget_bytes)}, with everything on the device."
    )
    drawn = [f"<p>{caption}</p>"]
    if charts.can_draw():
        picture = charts.svg(charts.curve_chart(points))
        drawn = [
            f"<figure><figcaption>{caption} Grey: what is proved of every plan.</figcaption>",
            f'<div class="chart" role="img" aria-label="{caption}">{picture}</div>',
            "</figure>",
        ]
    rows: list[list[str | Cell]] = []
    for point in points:
        notes = ["the budget of this plan"] if point.is_own else []
        if point.planned_s > point.step_s:
            notes.append(f"its own plan takes {format_s(point.planned_s)}; a plan for less memory is faster")
        bound = Cell("not proved") if point.bound_s is None else _seconds_cell(point.bound_s)
        rows.append([_bytes_cell(point.budget_bytes), _seconds_cell(point.step_s), bound, "; ".join(notes)])
    table = _table(("device budget", "step", "bound", "note"), rows)
    yield from _section("curve", "Step time over the device budget", drawn, table)


def _machine(cluster: Cluster) -> Iterator[str]:
    """Yield the rates from which the seconds come, with their sources."""
    device, host = cluster.device, cluster.host
    links = [("to the device", cluster.h2d), ("to the host", cluster.d2h), ("between devices", cluster.collective)]
    sizes = f"{format_bytes(device.memory_bytes)}, {format_bytes(device.reserve_bytes)} reserved"
    rates = (f"{rate / 1e12:.4g} TFLOP/s {dtype}" for dtype, rate in sorted(device.flops_per_s.items()))
    lines = [
        ("device", f"{device.name}, {sizes}"),
        ("rates", ", ".join(rates)),
        ("host", f"{format_bytes(host.memory_bytes)}, {host.cores} cores"),
        ("update", f"{host.update_elements_per_s:.3g} elements/s by the host"),
        *((name, f"{link.bytes_per_s / 1e9:.4g} GB/s; {link.source}") for name, link in links if link is not None),
        ("sources", f"{device.source}; {host.source}"),
    ]
    yield from _section("machine", "Machine", _definitions(lines))


# ----------------------------------------------------------------------------------------------------------------------
# An observed run as sections of the page of its plan, or as a page of its own if there is no plan to show with it.


_MOST_RANKS = 8
"""The most ranks whose seconds are drawn as a line each: more colours cannot be told apart."""
RUN_FORMAT = 1


def run_page(run: ObservedRun, others: Sequence[ObservedRun] = ()) -> str:
    """Return the page of a run of which no plan is known; losses of `others` are compared with its own."""
    title = escape(f"{run.meta.model} on {run.meta.device}, observed")
    body = [
        f'<header><h1>{title}</h1><p><span class="badge">measured</span></p></header><main>',
        *_run_sections(run, others, has_plan=False),
        "</main>",
        _json_block("elixir-report", {"elixir": "report", "format": RUN_FORMAT, "run": run_data(run)}),
    ]
    return _document(title, body)


def _run_sections(run: ObservedRun, others: Sequence[ObservedRun], *, has_plan: bool) -> Iterator[str]:
    """Yield the sections of a run: its steps, its losses, and a step in full.

    If the page `has_plan`, it draws the lanes of that step beside the planned ones, so they are left out here.
    """
    yield from _steps_section(run)
    lines = {each.name: each.losses for each in (run, *others) if each.losses}
    if lines or others:
        parts = [f"<p>{escape(loss_difference(run, other))}</p>" for other in others]
        if charts.can_draw() and lines:
            drawn = {name: thinned(points) for name, points in lines.items()}
            parts.append(_figure("Loss over the steps.", charts.lines_chart(drawn, "loss")))
        ends = (
            (name, *(f"{loss!r} at step {step}" for step, loss in (points[0], points[-1])))
            for name, points in lines.items()
        )
        yield from _section("losses", "Losses", parts, _plain_table(("run", "first loss", "last loss"), ends))
    row = run.row
    if row.full is not None:
        cluster, memory = run.cluster, row.memory
        ranks = run.steps if len(run.steps) > 1 else None
        seen = None if cluster is None else observed_row(row, cluster, ranks)
        over = "" if memory is None else f"Measured bytes on the device over step {memory.summary.step}, by kind."
        title = escape(f"{row.name}, {row.what} in full")
        shown = _full_step(row, seen, row.budget_bytes, over, None if has_plan else "the step")
        yield from _section("full", title, shown)


def _steps_section(run: ObservedRun) -> Iterator[str]:
    """Yield a row of means for each rank, and the seconds of its steps."""
    lanes = sorted({lane for steps in run.steps.values() for each in steps for lane in each.moved_bytes})
    heads = ["rank", "steps", "period", *STEP_PHASES]
    heads += [head for lane in lanes for head in (lane, f"{lane} per s")] + ["device peak", "process"]
    rows: list[list[str | Cell]] = []
    for rank, steps in run.steps.items():
        settled = settled_steps(steps)
        count, total_s = len(settled), sum(each.period_s for each in settled)
        cells = [str(rank), f"{settled[0].step} to {settled[-1].step}", _seconds_cell(total_s / count)]
        cells += [
            _seconds_cell(sum(each.seconds_s.get(phase, 0.0) for each in settled) / count) for phase in STEP_PHASES
        ]
        for lane in lanes:
            nbytes = sum(each.lane_bytes(lane) for each in settled)
            cells += [_bytes_cell(round(nbytes / count)), _bytes_cell(round(nbytes / total_s) if total_s else 0)]
        for values in ([each.device_peak_bytes for each in settled], [each.rss_bytes for each in settled]):
            known = [value for value in values if value is not None]
            cells.append(_bytes_cell(max(known)) if known else "")
        rows.append(cells)
    drawn: list[str] = []
    if charts.can_draw():
        lines = {
            f"rank {rank}": thinned(tuple((each.step, each.period_s) for each in settled_steps(steps)))
            for rank, steps in [*run.steps.items()][:_MOST_RANKS]
        }
        drawn.append(_figure("Seconds from one step to the next.", charts.lines_chart(lines, "seconds")))
    facts = _definitions([("folder", run.name), ("ranks", str(run.meta.num_ranks)), *run.meta.versions.items()])
    yield from _section("run", "Observed steps", _table(heads, rows), drawn, facts)


def _full_step(
    row: StudyRow, seen: Observed | None, most_bytes: int | None, over: str, lanes_of: str | None
) -> Iterator[str]:
    """Yield the phases, the findings and the charts of the step of `row` that was recorded in full.

    `seen` is None if the machine is not known. The chart of memory has the caption `over`, and reaches up to
    `most_bytes`, by default its own peak. `lanes_of` names the step of the lanes; None leaves them out.
    """
    if seen is None:
        yield '<p class="note">Rates of the links and findings need the plan with its question in the folder.</p>'
    else:
        yield from _plain_table(PHASE_HEADS, (phase_cells(each) for each in seen.phases.values()))
        lines = [f"<li>{escape(line)}</li>" for line in finding_lines(find(seen))]
        yield f"<ul>{''.join(lines)}</ul>" if lines else "<p>No findings.</p>"
    full, memory = row.full, row.memory
    if full is None or not charts.can_draw():
        return
    if memory is not None and memory.live is not None and memory.intervals:
        drawn = charts.live_rows(memory.live, memory.intervals[-1].end_s)
        yield _figure(over, charts.small_memory_chart(drawn, most_bytes or memory.live.peak_bytes))
    found = charts.bars(full.record) if lanes_of else ()
    if found:
        of = charts.PLANNED if full.record.origin is Origin.SIMULATED else charts.MEASURED
        rates = () if seen is None else link_rates(full.record, of, seen.cluster, full.counters)
        below = "Below, if bytes were copied: the rate of the link, with dashed lines at its profile."
        yield _figure(f"Lanes over {lanes_of}. {below}", charts.lanes_chart(found, rates))


# ----------------------------------------------------------------------------------------------------------------------
# The page of a study: rows, phases, memory over the step, findings, losses.


def study_page(study: Study) -> str:
    """Return the page of `study`; equal studies have equal pages. Without Altair it has tables and no charts."""
    can_draw = charts.can_draw()
    badge = "planned" if any(row.is_simulated for row in study.rows) else "measured"
    title = escape(f"study of {study.model} on {study.cluster.name}")
    body = [f'<header><h1>{title}</h1><p><span class="badge">{badge}</span></p></header><main>']
    seconds_s = {row.name: row.full.summary.seconds_s for row in study.rows if row.full is not None}
    phases: list[str] = []
    if can_draw and seconds_s:
        ordered = [{phase: own[phase] for phase in PHASES if phase in own} for own in seconds_s.values()]
        phases.append(_figure("Seconds of a step by phase.", charts.phases_chart(list(seconds_s), ordered)))
    body += _section("rows", "Rows", _plain_table(ROW_HEADS, row_cells(study)), phases)
    live = [row.memory.live for row in study.rows if row.memory is not None]
    most_bytes = max((each.peak_bytes for each in live if each is not None), default=1)
    for row in study.rows:
        seen = observed_row(row, study.cluster)
        if seen is not None:
            over = f"Bytes on the device over a step of {row.name}. The dashed line is the most of all rows."
            body.append(f"<section><h2>{escape(row.name)}</h2><p>{escape(row.what)}</p>")
            body += _full_step(row, seen, most_bytes, over, f"a step of {row.name}")
            body.append("</section>")
    losses = {row.name: tuple(enumerate(row.losses)) for row in study.rows if row.losses}
    if can_draw and losses:
        drawn = _figure("Loss over the steps of each row.", charts.lines_chart(losses, "loss"))
        body += _section("losses", "Losses", [drawn])
    body += _machine(study.cluster)
    body.append('<section aria-labelledby="again"><h2 id="again">Again</h2>')
    body += [*_definitions([("command", study.command), *study.versions.items()]), "</section></main>"]
    return _document(title, body)
