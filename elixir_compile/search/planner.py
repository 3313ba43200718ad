"""The one entry of the planning half: a problem in, a verified plan out.

    plan(problem) -> Plan

Nothing here decides: `best` does, or `greedy`, `exhaustive` or one of `rules` where the user asks for it.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from elixir_compile.analysis.timeline import plan_timeline
from elixir_compile.analysis.verify import verify
from elixir_compile.errors import NoFeasiblePlan
from elixir_compile.ir import Decision, Plan
from elixir_compile.options import Planner
from elixir_compile.search.best import place_best
from elixir_compile.search.candidate import Candidate, DraftPlan
from elixir_compile.search.clock import Clock
from elixir_compile.search.disk_placement import plan_with_disk
from elixir_compile.search.evaluator import Evaluator
from elixir_compile.search.heuristics.greedy import place_greedily
from elixir_compile.search.heuristics.host_memory import host_floor_bytes, with_least_host
from elixir_compile.search.heuristics.rules import MAX_PLACEMENTS, RULES, num_placements, place_exhaustively
from elixir_compile.search.heuristics.streaming import best_moves
from elixir_compile.search.heuristics.uniform_modes import leanest, uniform_modes
from elixir_compile.search.problem import Problem
from elixir_compile.search.space.buckets import with_larger_buckets
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.search.space.levels import Level, level_text
from elixir_compile.search.writing import write_out

_MANY_BUCKETS = 64
"""Greedy takes 1 s for as many on one core, and 60 s for 240."""


def plan(problem: Problem, planner: Planner = "milp", timeout_s: float = 10.0) -> Plan:
    """Return the plan that `planner` chooses for `problem`, verified.

    The same problem gives the same plan, unless `milp` runs into its `timeout_s` seconds. Raises `NoFeasiblePlan` with
    the smallest budget that would do, for this planner, and `InvalidOption` where there is too much to try.
    """

    def search(asked: Problem) -> Plan:
        clock = Clock()
        larger = with_larger_buckets(asked)
        if larger is not None:
            with contextlib.suppress(NoFeasiblePlan):
                return searched(larger, clock)
        return searched(asked, clock)

    def searched(asked: Problem, clock: Clock) -> Plan:
        evaluator = Evaluator(gather_facts(asked))
        return write_out(evaluator, _place(evaluator, planner, timeout_s, clock))

    def search_soon(asked: Problem) -> Plan:
        evaluator = Evaluator(gather_facts(asked))
        return write_out(evaluator, _place_soon(evaluator, planner))

    try:
        result = plan_with_disk(problem, search)
    except NoFeasiblePlan as error:
        if error.memory != "host":
            raise
        result = _without_solver(problem, error, lambda asked: plan_with_disk(asked, search_soon), timeout_s)
    verify(problem.graph, result)
    return result


def _without_solver(
    problem: Problem, error: NoFeasiblePlan, search: Callable[[Problem], Plan], timeout_s: float
) -> Plan:
    """Return what `search` finds for `problem`, for which another search found the host too small.

    Raises `NoFeasiblePlan` with the fewest host bytes for which it finds anything.
    """
    try:
        return search(problem)
    except NoFeasiblePlan:
        raise with_least_host(problem, error, search, timeout_s) from None


def _place_soon(evaluator: Evaluator, planner: Planner) -> DraftPlan:
    """Return what `planner` finds without its solver: `milp` has an answer wherever this has one."""
    if planner != "milp":
        return _place(evaluator, planner, 0.0, Clock())
    _require_minimum(evaluator)
    return _first(evaluator, _soon)


def _place(evaluator: Evaluator, planner: Planner, timeout_s: float, clock: Clock) -> DraftPlan:
    if planner in RULES:
        return _by_rule(evaluator, planner)
    _require_minimum(evaluator)
    if planner == "exhaustive":
        draft = place_exhaustively(evaluator)
        if draft is None:
            raise _no_plan(evaluator, _least_host(evaluator))
        return draft
    if planner == "greedy":
        return _first(evaluator, _greedy)
    others = (Candidate(rule(evaluator), evaluator.facts.modes) for rule in RULES.values())
    return place_best(evaluator, _first(evaluator, _soon), others, timeout_s, clock=clock)


def _first(evaluator: Evaluator, place: Callable[[Evaluator], DraftPlan]) -> DraftPlan:
    """What `place` finds on the first rung of the ladder where something fits."""
    problem, start = evaluator.facts.problem, evaluator.facts.start_levels
    starts: list[Evaluator] = []
    for rung in uniform_modes(evaluator):
        if rung.fits(start, ahead=0) or rung.fits(rung.min_memory_levels, ahead=0):
            return place(rung)
        starts.append(rung)
    # Not everything fits the host: some of it may.
    fit = [(host_floor_bytes(rung), rung) for rung in starts if rung.floor_bytes <= problem.budget_bytes]
    for host_floor, rung in fit:
        if host_floor <= problem.host_budget_bytes:
            with contextlib.suppress(NoFeasiblePlan):
                return place(rung)
    raise _no_plan(evaluator, _least_of(evaluator, sorted(fit, key=lambda pair: pair[0])))


def _least_of(evaluator: Evaluator, starts: Sequence[tuple[int, Evaluator]]) -> DraftPlan:
    """Return the placement found that fits the device and needs the fewest host bytes, on any of `starts`, one or more,
    in order of the floor of their host bytes, which is the first of each pair."""

    def host_bytes(draft: DraftPlan) -> int:
        return evaluator.at(draft.modes).host_bytes(draft.levels)

    (_, first), *others = starts
    least = _least_host(first)
    for host_floor, rung in others:
        if host_floor >= host_bytes(least):
            break
        least = min(least, _least_host(rung), key=host_bytes)
    return least


def _soon(evaluator: Evaluator) -> DraftPlan:
    """Something that fits: greedy is good, but simulates as many steps as the square of the buckets."""
    start = evaluator.facts.start_levels
    if evaluator.fits(start, ahead=0):
        return _drafted(evaluator, start, "milp")
    if len(evaluator.facts.buckets) > _MANY_BUCKETS and evaluator.fits(evaluator.min_memory_levels, ahead=0):
        return _drafted(evaluator, evaluator.min_memory_levels, "milp")
    return _greedy(evaluator, is_fast=len(evaluator.facts.buckets) > _MANY_BUCKETS)


def _by_rule(evaluator: Evaluator, planner: Planner) -> DraftPlan:
    levels = RULES[planner](evaluator)
    if not evaluator.fits(levels, ahead=0):
        raise _no_plan(evaluator, _at_use(evaluator, levels))
    return _drafted(evaluator, levels, planner)


def _greedy(evaluator: Evaluator, *, is_fast: bool = False) -> DraftPlan:
    # Looking one move ahead can miss what fits a small host, so host bytes are what counts in the second attempt. It
    # simulates no step, so it is the only one that is fast for many buckets.
    draft = None if is_fast else place_greedily(evaluator)
    draft = draft or place_greedily(evaluator, spares_host=True)
    if draft is None and num_placements(evaluator) <= MAX_PLACEMENTS:
        draft = place_exhaustively(evaluator)
    if draft is None:
        draft = _least_host(evaluator)
        # On a rung that needs more of the device than there is, what the host has room for is no answer either.
        if not evaluator.fits(draft.levels, ahead=0):
            raise _no_plan(evaluator, draft)
    return replace(draft, planner="greedy")


def _drafted(evaluator: Evaluator, levels: Sequence[Level], planner: Planner) -> DraftPlan:
    """`levels`, which fit, with gathers as early as memory allows."""
    moves, step_s = best_moves(evaluator, levels)
    moved = tuple(
        Decision(subject=bucket.id, choice=level_text(level), because=f"the rule {planner} puts it there")
        for bucket, level, start in zip(evaluator.facts.buckets, levels, evaluator.facts.start_levels, strict=True)
        if level != start
    )
    return DraftPlan(
        levels=tuple(levels),
        modes=evaluator.facts.modes,
        moves=moves,
        step_s=step_s,
        decisions=moved,
        planner=planner,
    )


def _at_use(evaluator: Evaluator, levels: Sequence[Level]) -> DraftPlan:
    """Every bucket gathered right where it is used: the fewest device bytes at these levels."""
    return DraftPlan(
        levels=tuple(levels), modes=evaluator.facts.modes, moves=evaluator.at_use(levels), step_s=0.0, decisions=()
    )


def _furthest(evaluator: Evaluator) -> DraftPlan:
    """As far off the device as helps, gathered at use: the fewest device bytes that any plan can have."""
    return _at_use(evaluator, evaluator.min_memory_levels)


def _least_host(evaluator: Evaluator) -> DraftPlan:
    """The placement found that fits the device and needs the fewest host bytes, were the host large enough."""
    is_small = len(evaluator.facts.buckets) <= _MANY_BUCKETS
    orders = (True, False) if is_small else (True,)
    found = [place_greedily(evaluator, limits_host=False, spares_host=spares_host) for spares_host in orders]
    drafts = [draft for draft in found if draft is not None]
    return min(drafts, key=lambda draft: evaluator.host_bytes(draft.levels), default=_furthest(evaluator))


def _require_minimum(evaluator: Evaluator) -> None:
    if all(rung.floor_bytes > evaluator.facts.problem.budget_bytes for rung in uniform_modes(evaluator)):
        least = leanest(evaluator)
        raise _no_plan(least, _furthest(least))


def _no_plan(evaluator: Evaluator, least: DraftPlan) -> NoFeasiblePlan:
    """The error for the draft that needs the least: short on the device, or else on the host."""
    problem = evaluator.facts.problem
    evaluator = evaluator.at(least.modes)
    peak = plan_timeline(problem.graph, write_out(evaluator, least)).peak
    op = next(op for op in evaluator.facts.graph.ops if op.id == peak.op)
    by_kind = {kind.value: nbytes for kind, nbytes in peak.by_kind.items()}
    device_bytes = max(peak.nbytes, evaluator.memory.peak_bytes(least.levels, ahead=0))
    if device_bytes > problem.budget_bytes:
        return NoFeasiblePlan(op.id, op.source or op.module, problem.budget_bytes, device_bytes, by_kind)
    budget_bytes = problem.host_budget_bytes + problem.host_base_bytes
    needed_bytes = evaluator.host_bytes(least.levels) + problem.host_base_bytes
    return NoFeasiblePlan("", "", budget_bytes, needed_bytes, {}, "host")
