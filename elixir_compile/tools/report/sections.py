"""Write the sections of a page that need a plan, a machine or a curve alone, and no figures of a step."""

from collections.abc import Iterator, Sequence
from html import escape

from elixir_compile.base.units import format_bytes, format_s
from elixir_compile.ir.hardware import Cluster
from elixir_compile.ir.plan import Decision, Plan
from elixir_compile.ir.rank_class import RankClass, spans_text
from elixir_compile.ir.record import Record
from elixir_compile.tools.report import charts
from elixir_compile.tools.report.answer import plan_answer
from elixir_compile.tools.report.diff import Comparison, change_rows, plan_diff, run_diff
from elixir_compile.tools.report.figures import CurvePoint
from elixir_compile.tools.report.markup import Cell, bytes_cell, definitions, seconds_cell, table
from elixir_compile.tools.report.work_table import WorkRow, work_rows


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
