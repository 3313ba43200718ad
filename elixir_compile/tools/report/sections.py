"""Write the parts of an HTML page that need no figures of a step: its head, tables and lists, and the sections about a
plan, a machine or a curve.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from elixir_compile.base.units import format_bytes, format_s
from elixir_compile.ir.hardware import Cluster
from elixir_compile.ir.plan import Decision, Plan, RankClass, spans_text
from elixir_compile.ir.record import Record
from elixir_compile.tools.report import figures as charts
from elixir_compile.tools.report.diff import Comparison, change_rows, plan_diff, run_diff
from elixir_compile.tools.report.explain import plan_answer
from elixir_compile.tools.report.figures import CurvePoint
from elixir_compile.tools.report.tables import WorkRow, work_rows

# ----------------------------------------------------------------------------------------------------------------------
# Write parts of a page as HTML: tables that a script can sort, lists, and blocks of JSON. All text is escaped.


_FRAME = '<div class="scroll" tabindex="0" role="region" aria-label="Table">'


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table: its text, and the number by which it sorts."""

    text: str
    value: float | None = None
    is_html: bool = False
    """Whether the text is HTML already, with all names in it escaped."""


def bytes_cell(nbytes: int) -> Cell:
    """Return a cell of bytes with a unit, which sorts by their number."""
    return Cell(format_bytes(nbytes), nbytes)


def seconds_cell(seconds: float) -> Cell:
    """Return a cell of seconds with a unit, which sorts by their number."""
    return Cell(format_s(seconds), seconds)


def table(heads: Sequence[str], rows: Iterable[Sequence["str | Cell"]], name: str = "") -> Iterator[str]:
    """Yield a table that can be sorted, in a frame that scrolls."""
    made = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    columns = [[row[at].value for row in made] for at in range(len(heads))]
    numbers = [' class="number"' if values and None not in values else "" for values in columns]
    own = f' id="{name}"' if name else ""
    yield f'{_FRAME}<table class="sortable"{own}><thead><tr>'
    yield "".join(f'<th scope="col"{kind}>{escape(head)}</th>' for head, kind in zip(heads, numbers, strict=True))
    yield "</tr></thead><tbody>"
    yield from (f"<tr>{''.join(map(_cell, row))}</tr>" for row in made)
    yield "</tbody></table></div>"


def _cell(cell: Cell) -> str:
    value = "" if cell.value is None else f' data-value="{cell.value!r}"'
    return f"<td{value}>{cell.text if cell.is_html else escape(cell.text)}</td>"


def plain_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield a table of text that cannot be sorted, for tables of many rows."""
    yield f"{_FRAME}<table><thead><tr>{''.join(f'<th>{escape(head)}' for head in heads)}</thead><tbody>"
    yield from (f"<tr>{''.join(f'<td>{escape(cell)}' for cell in row)}" for row in rows)
    yield "</tbody></table></div>"


def definitions(lines: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield a list of names with a text for each."""
    yield "<dl>"
    yield from (f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in lines)
    yield "</dl>"


def figure(caption: str, picture: str) -> str:
    """Return a picture, SVG that this package has drawn, with a caption that also describes it to a screen reader."""
    text = escape(caption)
    drawn = f'<div class="chart" role="img" aria-label="{text}">{picture}</div>'
    return f"<figure><figcaption>{text}</figcaption>{drawn}</figure>"


def json_block(name: str, data: Mapping[str, Any]) -> str:
    """Return a block of JSON that no HTML parser can leave early."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


# ----------------------------------------------------------------------------------------------------------------------
# Write the sections of a page that need a plan, a machine or a curve alone, and no figures of a step.


def decision_details(decision: Decision) -> str:
    """Return a decision with its reason and its rejected options, to be opened."""
    rejected = "".join(f"<li>{escape(other)}</li>" for other in decision.rejected)
    why = f"{escape(decision.subject)}: {escape(decision.choice)}"
    more = f"<p>{escape(decision.because)}</p>" + (f"<p>Rejected:</p><ul>{rejected}</ul>" if rejected else "")
    return f"<details><summary>{why}</summary>{more}</details>"


def certificate(plan: Plan) -> Iterator[str]:
    """Yield the proved bound of the plan, its limits, and its decisions about more than one layer."""
    found = plan_answer(plan)
    bound = "not proved" if found.bound_s is None else f"{format_s(found.bound_s)} for every plan"
    gap = "" if found.gap is None else f": no plan is more than {found.gap:.2%} faster"
    lines = [
        ("planner", found.planner),
        ("bound", bound + gap),
        ("binding", ", ".join(found.binding) or "nothing"),
        ("one more GiB", found.gib_saves or "unknown"),
        ("update", str(found.update)),
        ("actions", ", ".join(f"{verb} {count}" for verb, count in sorted(found.counts.items()))),
        *([("peak of the sizes", found.formula)] if found.formula else []),
    ]
    yield '<section aria-labelledby="certificate"><h2 id="certificate">Certificate</h2>'
    yield from definitions(lines)
    yield from (decision_details(decision) for decision in found.decisions)
    yield "</section>"


def ranks_section(plan: Plan) -> Iterator[str]:
    """Yield a row for each class of ranks with a plan of its own: its rows, its part of the state, and the figures of
    its plan if all ranks are simulated together."""
    heads = ("ranks", "device", "rows", "micro-batches", "state", "peak", "budget", "host", "busy")
    yield '<section aria-labelledby="ranks"><h2 id="ranks">Ranks</h2>'
    yield f"<p>All ranks simulated together. The page shows the step of rank {plan.rank}.</p>"
    yield from table(heads, [_rank_cells(line) for line in plan.classes])
    yield "</section>"


def _rank_cells(line: RankClass) -> list["str | Cell"]:
    return [
        spans_text(line.ranks),
        line.device,
        "unknown" if line.num_rows is None else Cell(str(line.num_rows), line.num_rows),
        Cell(str(line.micro_batches), line.micro_batches),
        "unknown" if line.state is None else Cell(f"{line.state:.1%}", line.state),
        bytes_cell(line.device_peak_bytes),
        bytes_cell(line.budget_bytes),
        bytes_cell(line.host_peak_bytes),
        Cell(f"{line.busy_share:.0%}", line.busy_share),
    ]


def measured_section(plan: Plan, planned: Record, record: Record) -> Iterator[str]:
    """Yield the figures of a plan, with its work on each lane in the record `planned`, beside those of a measured
    step."""
    rows = [_figure_cells(pair) for pair in run_diff(plan, record).comparisons]
    yield '<section aria-labelledby="measured"><h2 id="measured">Planned and measured</h2>'
    yield from table(("figure", "planned", "measured", "ratio", ""), rows)
    heads = ("lane", "action", "times planned", "times", "bytes planned", "bytes", "planned", "measured", "")
    yield from table(heads, [_work_cells(row) for row in work_rows(planned, record)])
    yield "</section>"


def _work_cells(row: WorkRow) -> list["str | Cell"]:
    return [
        str(row.lane),
        row.verb,
        str(row.planned.times),
        str(row.measured.times),
        bytes_cell(row.planned.nbytes),
        bytes_cell(row.measured.nbytes),
        seconds_cell(row.planned_s),
        seconds_cell(row.measured_s),
        "off" if row.is_off else "",
    ]


def curve_section(points: Sequence[CurvePoint], *, can_draw: bool) -> Iterator[str]:
    """Yield the steps under other budgets, as a chart and a table."""
    first, last = points[0], points[-1]
    caption = (
        f"A step takes {format_s(first.step_s)} in {format_bytes(first.budget_bytes)}, the least that has a plan, and "
        f"{format_s(last.step_s)} in {format_bytes(last.budget_bytes)}, with everything on the device."
    )
    yield '<section aria-labelledby="curve"><h2 id="curve">Step time over the device budget</h2>'
    if can_draw:
        yield f"<figure><figcaption>{escape(caption)} Grey: what is proved of every plan.</figcaption>"
        drawn = charts.svg(charts.curve_chart(points))
        yield f'<div class="chart" role="img" aria-label="{escape(caption)}">{drawn}</div>'
        yield "</figure>"
    else:
        yield f"<p>{escape(caption)}</p>"
    yield from table(("device budget", "step", "bound", "note"), [_curve_cells(point) for point in points])
    yield "</section>"


def _curve_cells(point: CurvePoint) -> list["str | Cell"]:
    notes = ["the budget of this plan"] if point.is_own else []
    if point.planned_s > point.step_s:
        notes.append(f"its own plan takes {format_s(point.planned_s)}; a plan for less memory is faster")
    bound = Cell("not proved") if point.bound_s is None else seconds_cell(point.bound_s)
    return [bytes_cell(point.budget_bytes), seconds_cell(point.step_s), bound, "; ".join(notes)]


def second_section(first: Plan, second: Plan) -> Iterator[str]:
    """Yield the differences of two plans."""
    yield '<section aria-labelledby="second"><h2 id="second">Two plans</h2>'
    found = plan_diff(first, second)
    yield from table(("figure", "first", "second"), change_rows(found)) if not found.is_equal else ("<p>Equal.</p>",)
    yield "</section>"


def _figure_cells(pair: Comparison) -> list[str]:
    ratio = "" if pair.ratio is None else f"{pair.ratio:.2f}"
    return [pair.what, f"{pair.planned:g}", f"{pair.measured:g}", ratio, "off" if pair.is_off else ""]


def machine(cluster: Cluster) -> Iterator[str]:
    """Yield the rates from which the seconds come, with their sources."""
    device, host = cluster.device, cluster.host
    links = [("to the device", cluster.h2d), ("to the host", cluster.d2h), ("between devices", cluster.collective)]
    lines = [
        (
            "device",
            f"{device.name}, {format_bytes(device.memory_bytes)}, {format_bytes(device.reserve_bytes)} reserved",
        ),
        (
            "rates",
            ", ".join(f"{rate / 1e12:.4g} TFLOP/s {dtype}" for dtype, rate in sorted(device.flops_per_s.items())),
        ),
        ("host", f"{format_bytes(host.memory_bytes)}, {host.cores} cores"),
        ("update", f"{host.update_elements_per_s:.3g} elements/s by the host"),
        *((name, f"{link.bytes_per_s / 1e9:.4g} GB/s; {link.source}") for name, link in links if link is not None),
        ("sources", f"{device.source}; {host.source}"),
    ]
    yield '<section aria-labelledby="machine"><h2 id="machine">Machine</h2>'
    yield from definitions(lines)
    yield "</section>"


# ----------------------------------------------------------------------------------------------------------------------
# Write the begin of a page: the policy that forbids it to fetch anything, and its style.


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def head(title: str) -> list[str]:
    """Return the begin of a page up to its body; `title` is HTML."""
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title>",
        f"<style>\n{style}{charts.dark_style()}</style></head><body>",
    ]
