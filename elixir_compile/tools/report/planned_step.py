"""Turn a plan into the row of a study: the step that the simulator expects, with its phases and its memory."""

from collections.abc import Iterator
from dataclasses import replace

from elixir_compile.ir.cost import Measured
from elixir_compile.ir.graph import StepGraph
from elixir_compile.ir.hardware.cluster import Cluster
from elixir_compile.ir.kinds import Lane, Phase, Update, Verb
from elixir_compile.ir.plan import Plan
from elixir_compile.ir.record import Record
from elixir_compile.ir.schedule import verb_of, what_of
from elixir_compile.step.seconds import simulate
from elixir_compile.tools.report.figures import kinds_of, lasting, memory_rows
from elixir_compile.tools.report.held import Survey
from elixir_compile.tools.study.observed import FullStep, Interval, Live, StepSummary, seconds_by_phase
from elixir_compile.tools.study.study import StudyRow


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
