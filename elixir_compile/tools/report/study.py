"""A study as text, and a plan as one of its rows."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from elixir_compile.base.units import format_bytes, format_s
from elixir_compile.ir.cost import Measured
from elixir_compile.ir.graph import StepGraph
from elixir_compile.ir.hardware.cluster import Cluster
from elixir_compile.ir.kinds import Lane, Phase, Update, Verb
from elixir_compile.ir.plan import Plan
from elixir_compile.ir.record import Record
from elixir_compile.ir.schedule import verb_of, what_of
from elixir_compile.step.seconds import simulate
from elixir_compile.tools.observed import FullStep, Interval, Live, StepSummary, Study, StudyRow, seconds_by_phase
from elixir_compile.tools.report.figures import kinds_of, lasting, memory_rows
from elixir_compile.tools.report.findings import Finding, find, observed_row
from elixir_compile.tools.report.link_rates import PhaseFigures, Traffic
from elixir_compile.tools.report.tables import Survey
from elixir_compile.tools.report.text import table_text

# ----------------------------------------------------------------------------------------------------------------------
# Write a study as text: the rows side by side, the phases of each, and what was found.


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
    known = [row.period_s for row in study.rows if row.period_s is not None]
    apart = study.equal_losses()
    return [_cells(row, known[0] if known else None, apart.get(row.name, -1)) for row in study.rows]


def _cells(row: StudyRow, first_s: float | None, differs_at: int | None) -> list[str]:
    losses = "equal" if differs_at is None else f"differ at step {differs_at}" if differs_at >= 0 else NONE
    note = row.reason or ("planned" if row.is_simulated else "")
    return [
        row.name,
        NONE if row.period_s is None else format_s(row.period_s),
        NONE if row.period_s is None or not first_s else f"{row.period_s / first_s:.2f}",
        NONE if row.peak_bytes is None else format_bytes(row.peak_bytes),
        NONE if row.budget_bytes is None else format_bytes(row.budget_bytes),
        losses,
        note,
    ]


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
