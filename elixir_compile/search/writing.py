"""Write a draft plan out as a plan: its regions, its schedule, its simulated prediction and its decisions."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from elixir_compile.base.units import format_bytes, format_s
from elixir_compile.ir import (
    Activations,
    Bucket,
    Decision,
    OpId,
    Placement,
    Plan,
    Prediction,
    Record,
    Region,
    Schedule,
    fingerprint,
    kernels_digest,
)
from elixir_compile.search.evaluator import DraftPlan, Evaluator
from elixir_compile.search.heuristics.streaming import update_decisions
from elixir_compile.search.policy import policy_decisions
from elixir_compile.search.problem import Problem, update_time
from elixir_compile.search.schedule import cut_regions, regions, schedule, step_actions
from elixir_compile.search.space.facts import Facts
from elixir_compile.search.space.levels import placement_of
from elixir_compile.search.space.residency import num_ahead
from elixir_compile.step.formula import peak_formula
from elixir_compile.step.lean_calls import num_full_calls
from elixir_compile.step.prediction import hidden_update_share, prediction_of
from elixir_compile.step.seconds import further_call, simulate
from elixir_compile.step.timeline import plan_timeline
from elixir_compile.step.traffic import tensor_traffic


def write_out(evaluator: Evaluator, draft: DraftPlan) -> Plan:
    """Return `draft` as a plan."""
    evaluator = evaluator.at(draft.modes)
    draft = replace(draft, decisions=policy_decisions(evaluator.facts, draft))
    facts, problem = evaluator.facts, evaluator.facts.problem
    # The search counts more bytes than several calls hold at once, so its bound is none for the plans of such a step.
    proved = draft.certificate if problem.calls.num == 1 else None
    unpredicted = written(facts, draft)
    if proved is not None:
        unpredicted = replace(
            unpredicted, bound_s=proved.bound_s, binding=proved.binding, gib_bound_s=proved.gib_bound_s
        )
    prediction, record = predicted(problem, unpredicted)
    return replace(
        unpredicted,
        prediction=prediction,
        decisions=(
            *_decisions(draft, unpredicted, prediction),
            *unused_memory(unpredicted, prediction),
            *update_decisions(evaluator, draft.levels, draft.moves, hidden_update_share(record)),
        ),
        formula=peak_formula(problem.graph, unpredicted),
    )


def written(facts: Facts, draft: DraftPlan) -> Plan:
    """Return `draft`, whose modes are those of `facts`, as a plan without a prediction."""
    cuts = cut_regions(facts, draft.levels, draft.moves)
    actions = step_actions(facts, draft.levels, draft.moves, cuts)
    buckets = enumerate(zip(facts.buckets, draft.levels, strict=True))
    streamed = draft.moves.streamed
    placements = tuple(placement_of(bucket, level, streamed=i in streamed) for i, (bucket, level) in buckets)
    made = regions(facts, cuts)
    return unpredicted_plan(
        facts.problem, facts.buckets, placements, facts.activations, made, schedule(actions), draft.planner
    )


def predicted(problem: Problem, plan: Plan) -> tuple[Prediction, Record]:
    """Return the prediction of a step of `plan`, which answers `problem`, and the record of one call of a step.

    The record has the gathers, reduces and updates of the step. Each further call takes the seconds of its regions
    and of its waits for activations.
    """
    graph, calls = problem.graph, plan.calls
    peak = plan_timeline(graph, plan).peak
    record = simulate(graph, plan, problem.cluster, problem.measured)
    prediction = prediction_of(record, peak.nbytes, peak.op)
    if calls.num == 1:
        return prediction, record
    num_full = calls.num if plan.lean is None else num_full_calls(calls, plan.lean.num_full)
    step_s, exposed_s = prediction.step_s, prediction.exposed_s
    further = [(num_full - 1, plan)] + ([] if plan.lean is None else [(calls.num - num_full, plan.of_lean_calls())])
    for num, own in further:
        call = further_call(graph, own, problem.cluster, problem.measured)
        step_s += num * call.step_s
        exposed_s += num * call.exposed_s
    return replace(prediction, step_s=step_s, exposed_s=exposed_s), record


_NOTHING = Prediction(
    step_s=0.0, exposed_s=0.0, hidden_share=1.0, device_peak_bytes=0, device_peak_at=OpId(""), host_peak_bytes=0
)


def unpredicted_plan(
    problem: Problem,
    buckets: Sequence[Bucket],
    placements: tuple[Placement, ...],
    activations: tuple[Activations, ...],
    regions: tuple[Region, ...],
    schedule: Schedule,
    planner: str,
) -> Plan:
    """Return the plan of `planner` for `problem`, with an empty prediction and without decisions."""
    made = Plan(
        name=problem.name,
        graph=fingerprint(problem.graph),
        cluster=problem.cluster.name,
        num_copies=problem.num_copies,
        rank=problem.rank,
        shares=problem.shares,
        budget_bytes=problem.budget_bytes,
        base_bytes=problem.base_bytes,
        buckets=tuple(buckets),
        placements=placements,
        activations=activations,
        calls=problem.calls,
        update=update_time(problem, placements),
        regions=regions,
        schedules=(schedule,),
        decisions=(),
        prediction=_NOTHING,
        planner=planner,
        symbols=problem.graph.symbols,
        kernels=kernels_digest(problem.graph),
    )
    return replace(made, tensor=tensor_traffic(problem.graph, made, problem.cluster))


_MAX_GAP, _MAX_EXPOSED = 0.01, 0.01
"""If a search ends with a larger gap, and a larger share of the step exposed, the unused memory is reported."""


def unused_memory(made: Plan, prediction: Prediction) -> tuple[Decision, ...]:
    """Return a decision that reports unused memory, if transfers are exposed and the search ended with a gap.

    Return none if the gap is small, if few seconds are exposed, or if the largest bucket is larger than the free bytes.
    """
    if made.bound_s is None or not made.buckets:
        return ()
    free_bytes = made.budget_bytes - prediction.device_peak_bytes
    gap = 1.0 - made.bound_s / prediction.step_s if prediction.step_s else 0.0
    is_exposed = prediction.exposed_s > _MAX_EXPOSED * prediction.step_s
    if gap <= _MAX_GAP or not is_exposed or free_bytes < max(bucket.flat_nbytes for bucket in made.buckets):
        return ()
    exposed = f"{format_s(prediction.exposed_s)} of transfers are exposed"
    return (
        Decision(
            subject="memory",
            choice=f"{format_bytes(free_bytes)} of {format_bytes(made.budget_bytes)} are unused while {exposed}",
            because=f"the search ended with a gap of {gap:.1%} before it found a use for them",
        ),
    )


def _decisions(draft: DraftPlan, made: Plan, prediction: Prediction) -> tuple[Decision, ...]:
    decisions = list(draft.decisions)
    if not decisions:
        fit = f"the peak of {format_bytes(prediction.device_peak_bytes)} fits {format_bytes(made.budget_bytes)}"
        decisions.append(Decision(subject="every bucket", choice="stays where it is", because=fit))
    distances = Counter(num_ahead(draft.moves.residencies))
    if draft.moves.residencies:
        choice = ", ".join(
            f"{distances[ahead]} of {len(draft.moves.residencies)} copies {ahead} windows early"
            for ahead in sorted(distances, reverse=True)
        )
        because = "as far as memory allows"
        decisions.append(Decision(subject="prefetch", choice=choice, because=because))
    return tuple(decisions)
