"""The one entry of the planning half: a problem in, a verified plan out.

    plan(problem) -> Plan

Nothing here decides; `greedy` and `exhaustive` do, `keep_all` moves nothing.
"""

from collections import Counter
from dataclasses import replace

from elixir_compile.analysis.timeline import plan_timeline
from elixir_compile.analysis.verify import verify
from elixir_compile.errors import NoFeasiblePlan
from elixir_compile.ir import Decision, OpId, Plan, Prediction, Verb, fingerprint
from elixir_compile.options import Planner
from elixir_compile.search.draft import Draft
from elixir_compile.search.exhaustive import MAX_PLACEMENTS, num_placements, place_exhaustively
from elixir_compile.search.facts import gather_facts
from elixir_compile.search.greedy import place_greedily
from elixir_compile.search.judge import Judge
from elixir_compile.search.levels import placement_of
from elixir_compile.search.prefetch import raise_prefetch
from elixir_compile.search.problem import Problem
from elixir_compile.search.schedule import cut_regions, program, regions, schedule
from elixir_compile.search.stays import stays
from elixir_compile.simulate import exposed_s, hidden_share, simulate
from elixir_compile.units import format_bytes


def plan(problem: Problem, planner: Planner = "greedy") -> Plan:
    """Return the plan that `planner` chooses for `problem`, verified; the same plan for the same problem, always.

    Raises `NoFeasiblePlan` with the smallest budget that would do, and `InvalidOption` where there is too much to try.
    """
    judge = Judge(gather_facts(problem))
    draft = _PLANNERS[planner](judge)
    result = _write_out(judge, draft)
    verify(problem.graph, result)
    return result


def _keep_all(judge: Judge) -> Draft:
    levels = judge.facts.start_levels
    if not judge.fits(levels, ahead=0):
        raise _no_plan(judge, Draft(levels=levels, ahead={}, step_s=0.0, decisions=()))
    return _unmoved(judge)


def _greedy(judge: Judge) -> Draft:
    _require_minimum(judge)
    # Looking one move ahead can miss what fits a small host, so host bytes are what counts in the second attempt.
    draft = place_greedily(judge) or place_greedily(judge, spares_host=True)
    if draft is None and num_placements(judge) <= MAX_PLACEMENTS:
        draft = place_exhaustively(judge)
    if draft is None:
        draft = _least_host(judge)
        if judge.host_bytes(draft.levels) > judge.facts.problem.host_budget_bytes:
            raise _no_plan(judge, draft)
    return draft


def _exhaustive(judge: Judge) -> Draft:
    _require_minimum(judge)
    draft = place_exhaustively(judge)
    if draft is None:
        raise _no_plan(judge, _least_host(judge))
    return draft


_PLANNERS = {"greedy": _greedy, "exhaustive": _exhaustive, "keep_all": _keep_all}


def _unmoved(judge: Judge) -> Draft:
    levels = judge.facts.start_levels
    ahead = raise_prefetch(judge, levels)
    return Draft(levels=levels, ahead=ahead, step_s=judge.step_s(levels, ahead), decisions=())


def _furthest(judge: Judge) -> Draft:
    """Everything on the host, gathered at use: the fewest device bytes that any plan can have."""
    return Draft(levels=judge.facts.furthest_levels, ahead={}, step_s=0.0, decisions=())


def _least_host(judge: Judge) -> Draft:
    """The placement found that fits the device and needs the fewest host bytes, were the host large enough."""
    found = [place_greedily(judge, limits_host=False, spares_host=spares_host) for spares_host in (True, False)]
    drafts = [draft for draft in found if draft is not None]
    return min(drafts, key=lambda draft: judge.host_bytes(draft.levels), default=_furthest(judge))


def _require_minimum(judge: Judge) -> None:
    furthest = _furthest(judge)
    if judge.memory.peak_bytes(furthest.levels, ahead=0) > judge.facts.problem.budget_bytes:
        raise _no_plan(judge, furthest)


def _no_plan(judge: Judge, least: Draft) -> NoFeasiblePlan:
    """The error for the draft that needs the least: short on the device, or else on the host."""
    problem = judge.facts.problem
    peak = plan_timeline(problem.graph, _write_out(judge, least)).peak
    op = next(op for op in problem.graph.ops if op.id == peak.op)
    by_kind = {kind.value: nbytes for kind, nbytes in peak.by_kind.items()}
    if peak.nbytes > problem.budget_bytes:
        return NoFeasiblePlan(op.id, op.source or op.module, problem.budget_bytes, peak.nbytes, by_kind)
    needed_bytes = judge.host_bytes(least.levels)
    return NoFeasiblePlan("", "", problem.host_budget_bytes, needed_bytes, {}, "host")


def _write_out(judge: Judge, draft: Draft) -> Plan:
    """Return the draft as a plan, with its decisions and what it predicts."""
    facts, problem = judge.facts, judge.facts.problem
    placed = stays(facts, draft.levels, 0, draft.ahead)
    cuts = cut_regions(facts, draft.levels, placed)
    actions = program(facts, draft.levels, placed, cuts)
    buckets = zip(facts.buckets, draft.levels, strict=True)
    unpredicted = Plan(
        name=problem.name,
        graph=fingerprint(problem.graph),
        cluster=problem.cluster.name,
        budget_bytes=problem.budget_bytes,
        base_bytes=problem.base_bytes,
        buckets=facts.buckets,
        placements=tuple(placement_of(bucket, level) for bucket, level in buckets),
        regions=regions(facts, cuts),
        schedules=(schedule(actions),),
        decisions=(),
        prediction=_NOTHING,
    )
    peak = plan_timeline(problem.graph, unpredicted).peak
    record = simulate(problem.graph, unpredicted, problem.cluster)
    prediction = Prediction(
        step_s=record.step_s,
        exposed_s=exposed_s(record),
        hidden_share=hidden_share(record),
        device_peak_bytes=peak.nbytes,
        device_peak_at=peak.op,
        host_peak_bytes=record.host_peak_bytes,
    )
    return replace(unpredicted, prediction=prediction, decisions=_decisions(draft, unpredicted, prediction))


_NOTHING = Prediction(
    step_s=0.0, exposed_s=0.0, hidden_share=1.0, device_peak_bytes=0, device_peak_at=OpId(""), host_peak_bytes=0
)


def _decisions(draft: Draft, made: Plan, prediction: Prediction) -> tuple[Decision, ...]:
    decisions = list(draft.decisions)
    if not decisions:
        fit = f"the peak of {format_bytes(prediction.device_peak_bytes)} fits {format_bytes(made.budget_bytes)}"
        decisions.append(Decision(subject="every bucket", choice="stays where it is", because=fit))
    distances = Counter(draft.ahead.values())
    if any(action.verb is Verb.GATHER for action in made.schedules[0].actions):
        choice = ", ".join(
            f"{distances[ahead]} gathers {ahead} windows ahead" for ahead in sorted(distances, reverse=True)
        )
        because = "as far as memory allows, at most two windows"
        decisions.append(Decision(subject="prefetch", choice=choice, because=because))
    return tuple(decisions)
