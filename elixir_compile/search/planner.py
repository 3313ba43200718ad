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
from elixir_compile.search.buckets import with_larger_buckets
from elixir_compile.search.clock import Clock
from elixir_compile.search.disk import plan_with_disk
from elixir_compile.search.draft import Answer, Draft
from elixir_compile.search.exhaustive import MAX_PLACEMENTS, num_placements, place_exhaustively
from elixir_compile.search.facts import gather_facts
from elixir_compile.search.greedy import place_greedily
from elixir_compile.search.host_floor import host_floor_bytes
from elixir_compile.search.judge import Judge
from elixir_compile.search.ladder import floor_bytes, ladder, leanest
from elixir_compile.search.least_host import with_least_host
from elixir_compile.search.levels import Level, level_text
from elixir_compile.search.problem import Problem
from elixir_compile.search.rules import RULES
from elixir_compile.search.streaming import best_moves
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
        judge = Judge(gather_facts(asked))
        return write_out(judge, _place(judge, planner, timeout_s, clock))

    def search_soon(asked: Problem) -> Plan:
        judge = Judge(gather_facts(asked))
        return write_out(judge, _place_soon(judge, planner))

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


def _place_soon(judge: Judge, planner: Planner) -> Draft:
    """Return what `planner` finds without its solver: `milp` has an answer wherever this has one."""
    if planner != "milp":
        return _place(judge, planner, 0.0, Clock())
    _require_minimum(judge)
    return _first(judge, _soon)


def _place(judge: Judge, planner: Planner, timeout_s: float, clock: Clock) -> Draft:
    if planner in RULES:
        return _by_rule(judge, planner)
    _require_minimum(judge)
    if planner == "exhaustive":
        draft = place_exhaustively(judge)
        if draft is None:
            raise _no_plan(judge, _least_host(judge))
        return draft
    if planner == "greedy":
        return _first(judge, _greedy)
    others = (Answer(rule(judge), judge.facts.modes) for rule in RULES.values())
    return place_best(judge, _first(judge, _soon), others, timeout_s, clock=clock)


def _first(judge: Judge, place: Callable[[Judge], Draft]) -> Draft:
    """What `place` finds on the first rung of the ladder where something fits."""
    problem, start = judge.facts.problem, judge.facts.start_levels
    rungs: list[Judge] = []
    for rung in ladder(judge):
        if rung.fits(start, ahead=0) or rung.fits(rung.least_levels, ahead=0):
            return place(rung)
        rungs.append(rung)
    # Not everything fits the host: some of it may.
    fit = [(host_floor_bytes(rung), rung) for rung in rungs if floor_bytes(rung) <= problem.budget_bytes]
    for host_floor, rung in fit:
        if host_floor <= problem.host_budget_bytes:
            with contextlib.suppress(NoFeasiblePlan):
                return place(rung)
    raise _no_plan(judge, _least_of(judge, sorted(fit, key=lambda pair: pair[0])))


def _least_of(judge: Judge, rungs: Sequence[tuple[int, Judge]]) -> Draft:
    """Return the placement found that fits the device and needs the fewest host bytes, on any of `rungs`, one or more,
    in order of the floor of their host bytes, which is the first of each pair."""

    def host_bytes(draft: Draft) -> int:
        return judge.at(draft.modes).host_bytes(draft.levels)

    (_, first), *others = rungs
    least = _least_host(first)
    for host_floor, rung in others:
        if host_floor >= host_bytes(least):
            break
        least = min(least, _least_host(rung), key=host_bytes)
    return least


def _soon(judge: Judge) -> Draft:
    """Something that fits: greedy is good, but simulates as many steps as the square of the buckets."""
    start = judge.facts.start_levels
    if judge.fits(start, ahead=0):
        return _drafted(judge, start, "milp")
    if len(judge.facts.buckets) > _MANY_BUCKETS and judge.fits(judge.least_levels, ahead=0):
        return _drafted(judge, judge.least_levels, "milp")
    return _greedy(judge, is_fast=len(judge.facts.buckets) > _MANY_BUCKETS)


def _by_rule(judge: Judge, planner: Planner) -> Draft:
    levels = RULES[planner](judge)
    if not judge.fits(levels, ahead=0):
        raise _no_plan(judge, _at_use(judge, levels))
    return _drafted(judge, levels, planner)


def _greedy(judge: Judge, *, is_fast: bool = False) -> Draft:
    # Looking one move ahead can miss what fits a small host, so host bytes are what counts in the second attempt. It
    # simulates no step, so it is the only one that is fast for many buckets.
    draft = None if is_fast else place_greedily(judge)
    draft = draft or place_greedily(judge, spares_host=True)
    if draft is None and num_placements(judge) <= MAX_PLACEMENTS:
        draft = place_exhaustively(judge)
    if draft is None:
        draft = _least_host(judge)
        # On a rung that needs more of the device than there is, what the host has room for is no answer either.
        if not judge.fits(draft.levels, ahead=0):
            raise _no_plan(judge, draft)
    return replace(draft, planner="greedy")


def _drafted(judge: Judge, levels: Sequence[Level], planner: Planner) -> Draft:
    """`levels`, which fit, with gathers as early as memory allows."""
    moves, step_s = best_moves(judge, levels)
    moved = tuple(
        Decision(subject=bucket.id, choice=level_text(level), because=f"the rule {planner} puts it there")
        for bucket, level, start in zip(judge.facts.buckets, levels, judge.facts.start_levels, strict=True)
        if level != start
    )
    return Draft(
        levels=tuple(levels),
        modes=judge.facts.modes,
        moves=moves,
        step_s=step_s,
        decisions=moved,
        planner=planner,
    )


def _at_use(judge: Judge, levels: Sequence[Level]) -> Draft:
    """Every bucket gathered right where it is used: the fewest device bytes at these levels."""
    return Draft(levels=tuple(levels), modes=judge.facts.modes, moves=judge.at_use(levels), step_s=0.0, decisions=())


def _furthest(judge: Judge) -> Draft:
    """As far off the device as helps, gathered at use: the fewest device bytes that any plan can have."""
    return _at_use(judge, judge.least_levels)


def _least_host(judge: Judge) -> Draft:
    """The placement found that fits the device and needs the fewest host bytes, were the host large enough."""
    is_small = len(judge.facts.buckets) <= _MANY_BUCKETS
    orders = (True, False) if is_small else (True,)
    found = [place_greedily(judge, limits_host=False, spares_host=spares_host) for spares_host in orders]
    drafts = [draft for draft in found if draft is not None]
    return min(drafts, key=lambda draft: judge.host_bytes(draft.levels), default=_furthest(judge))


def _require_minimum(judge: Judge) -> None:
    if all(floor_bytes(rung) > judge.facts.problem.budget_bytes for rung in ladder(judge)):
        least = leanest(judge)
        raise _no_plan(least, _furthest(least))


def _no_plan(judge: Judge, least: Draft) -> NoFeasiblePlan:
    """The error for the draft that needs the least: short on the device, or else on the host."""
    problem = judge.facts.problem
    judge = judge.at(least.modes)
    peak = plan_timeline(problem.graph, write_out(judge, least)).peak
    op = next(op for op in judge.facts.graph.ops if op.id == peak.op)
    by_kind = {kind.value: nbytes for kind, nbytes in peak.by_kind.items()}
    device_bytes = max(peak.nbytes, judge.memory.peak_bytes(least.levels, ahead=0))
    if device_bytes > problem.budget_bytes:
        return NoFeasiblePlan(op.id, op.source or op.module, problem.budget_bytes, device_bytes, by_kind)
    budget_bytes = problem.host_budget_bytes + problem.host_base_bytes
    needed_bytes = judge.host_bytes(least.levels) + problem.host_base_bytes
    return NoFeasiblePlan("", "", budget_bytes, needed_bytes, {}, "host")
