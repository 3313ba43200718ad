"""Make a verified plan for a problem with the planner chosen by the user.

    plan(problem) -> Plan

The choices themselves are made by `best` for the planner `milp`, by `heuristics.greedy` and by `heuristics.rules`.

`largest_feasible` finds the largest batch that any plan can train within the budgets. A larger batch never needs fewer
bytes, so doubling and bisection find it in 2 log2(batch) trials.
"""

import contextlib
from collections.abc import Callable, Sequence

from elixir_compile.base.collector import collector_off
from elixir_compile.base.errors import InvalidOption, NoFeasiblePlan
from elixir_compile.base.options import Planner
from elixir_compile.base.units import format_bytes
from elixir_compile.ir import Kind, Op, Plan, Tier
from elixir_compile.search.best import counted_draft, place_best, with_gib_bound_of
from elixir_compile.search.clock import Clock, deadline_in
from elixir_compile.search.evaluator import Candidate, DraftPlan, Evaluator
from elixir_compile.search.heuristics.greedy import place_greedily
from elixir_compile.search.heuristics.rules import RULES, drafted, place_exhaustively
from elixir_compile.search.host_memory import host_floor_bytes, plan_with_disk, with_min_host_bytes
from elixir_compile.search.lean_calls import with_lean_calls
from elixir_compile.search.limits import leanest, uniform_modes
from elixir_compile.search.problem import Problem
from elixir_compile.search.space.buckets import with_larger_buckets
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.search.space.levels import Level
from elixir_compile.search.writing import write_out
from elixir_compile.step.timeline import device_lives, plan_timeline
from elixir_compile.step.verify import verify

_MANY_BUCKETS, _MANY_CHOICES = 64, 600
"""Above these numbers of buckets, or of levels and modes, the greedy planner is too slow for the first draft plan. On
one core it takes 1 s for 64 buckets, and 60 s for 240; GPT-2 20B on 4 RTX 4090s, with 48 buckets and 1,400 levels and
modes, had no draft plan for 4 s."""


@collector_off()
def plan(problem: Problem, planner: Planner = "milp", timeout_s: float = 10.0) -> Plan:
    """Return the verified plan of `planner` for `problem`.

    The same problem gives the same plan, unless `milp` reaches its limit of `timeout_s` seconds. Raises
    `NoFeasiblePlan` with the smallest budget for which this planner finds a plan.
    """

    def search(variant: Problem) -> Plan:
        clock = Clock()
        larger = with_larger_buckets(variant)
        if larger is None:
            return place(variant, clock)
        with contextlib.suppress(NoFeasiblePlan):
            return place(larger, clock)
        # With more memory the larger buckets may fit, and have fewer launches.
        return with_gib_bound_of(place(variant, clock), [Evaluator(gather_facts(larger))], deadline_in(1.0))

    def place(variant: Problem, clock: Clock) -> Plan:
        evaluator = Evaluator(gather_facts(variant))
        draft = _place(evaluator, planner, timeout_s, clock)
        made = write_out(evaluator, draft)
        return with_lean_calls(evaluator, draft, made, deadline_in(timeout_s)) if planner == "milp" else made

    def search_without_solver(variant: Problem) -> Plan:
        evaluator = Evaluator(gather_facts(variant))
        return write_out(evaluator, _place_without_solver(evaluator, planner))

    try:
        result = plan_with_disk(problem, search)
    except NoFeasiblePlan as error:
        if error.memory != "host":
            raise
        result = _without_solver(
            problem, error, lambda variant: plan_with_disk(variant, search_without_solver), timeout_s
        )
    verify(problem.graph, result)
    return result


def _without_solver(
    problem: Problem, error: NoFeasiblePlan, search: Callable[[Problem], Plan], timeout_s: float
) -> Plan:
    """Return the plan of `search` for `problem`, after a search with the solver raised `error`.

    Raises `NoFeasiblePlan` with the fewest host bytes for which `search` finds a plan.
    """
    try:
        return search(problem)
    except NoFeasiblePlan:
        raise with_min_host_bytes(problem, error, search, timeout_s).renewed() from None


def _place_without_solver(evaluator: Evaluator, planner: Planner) -> DraftPlan:
    """Return the draft plan of `planner`, or the first draft plan from which `milp` starts its search."""
    if planner != "milp":
        return _place(evaluator, planner, 0.0, Clock())
    _require_minimum(evaluator)
    return _first_draft(evaluator, _quick_draft)


def _place(evaluator: Evaluator, planner: Planner, timeout_s: float, clock: Clock) -> DraftPlan:
    if planner in RULES:
        return _by_rule(evaluator, planner)
    _require_minimum(evaluator)
    if planner == "greedy":
        return _first_draft(evaluator, _greedy)
    rules = RULES.values() if evaluator.facts.problem.fractions is None else ()
    others = (Candidate(rule(evaluator), evaluator.facts.modes) for rule in rules)
    return place_best(evaluator, _first_draft(evaluator, _quick_draft), others, timeout_s, clock=clock)


def _first_draft(evaluator: Evaluator, place: Callable[[Evaluator], DraftPlan]) -> DraftPlan:
    """Return the draft plan of `place` at the first of the uniform modes at which some levels fit.

    Raises `NoFeasiblePlan` if `place` finds none at any of the uniform modes.
    """
    problem, start = evaluator.facts.problem, evaluator.facts.start_levels
    # The levels of minimum memory take the host bytes of the furthest levels, and more time to find.
    has_room = evaluator.host_bytes(evaluator.facts.furthest_levels) <= problem.host_budget_bytes
    if not has_room and place is _quick_draft and _is_large(evaluator) and not evaluator.fits(start, ahead=0):
        counted = counted_draft(evaluator)
        if counted is not None:
            return counted
    tried: list[Evaluator] = []
    for uniform in uniform_modes(evaluator):
        if uniform.fits(start, ahead=0) or (has_room and uniform.fits(uniform.min_memory_levels, ahead=0)):
            return place(uniform)
        tried.append(uniform)
    # The host has no room for all buckets, but may have room for as many as the device needs moved.
    fit = [(host_floor_bytes(uniform), uniform) for uniform in tried if uniform.floor_bytes <= problem.budget_bytes]
    for host_floor, uniform in fit:
        if host_floor <= problem.host_budget_bytes:
            with contextlib.suppress(NoFeasiblePlan):
                return place(uniform)
    raise _no_plan(evaluator, _fewest_host_bytes_of(evaluator, sorted(fit, key=lambda pair: pair[0])))


def _fewest_host_bytes_of(evaluator: Evaluator, starts: Sequence[tuple[int, Evaluator]]) -> DraftPlan:
    """Return the draft plan with the fewest host bytes found within the device budget, at any modes in `starts`.

    `starts` are pairs of a lower limit on host bytes and an evaluator, at least one pair, sorted by the limit.
    """

    def host_bytes(draft: DraftPlan) -> int:
        return evaluator.at(draft.modes).host_bytes(draft.levels)

    (_, first), *others = starts
    best = _fewest_host_bytes(first)
    for host_floor, uniform in others:
        if host_floor >= host_bytes(best):
            break
        best = min(best, _fewest_host_bytes(uniform), key=host_bytes)
    return best


def _quick_draft(evaluator: Evaluator) -> DraftPlan:
    """Return a draft plan that fits, without a search if all fits in place or if there are many buckets or modes.

    The greedy planner finds a better draft plan, but simulates about as many steps as the square of the buckets.
    """
    facts = evaluator.facts
    if evaluator.fits(facts.start_levels, ahead=0):
        return drafted(evaluator, facts.start_levels, "milp")
    is_large = _is_large(evaluator)
    if is_large and evaluator.fits(evaluator.min_memory_levels, ahead=0):
        return drafted(evaluator, evaluator.min_memory_levels, "milp")
    return _greedy(evaluator, is_fast=is_large)


def _is_large(evaluator: Evaluator) -> bool:
    """Return whether the greedy planner is too slow for a first draft plan."""
    facts = evaluator.facts
    num_choices = sum(map(len, facts.choices)) + sum(len(layer.modes) for layer in facts.layers)
    return len(facts.buckets) > _MANY_BUCKETS or num_choices > _MANY_CHOICES


def _by_rule(evaluator: Evaluator, planner: Planner) -> DraftPlan:
    if evaluator.facts.problem.fractions is not None:
        raise InvalidOption("planner", planner, '"milp" or "greedy", which keep fractions')
    levels = RULES[planner](evaluator)
    if not evaluator.fits(levels, ahead=0):
        raise _no_plan(evaluator, _at_use(evaluator, levels))
    return drafted(evaluator, levels, planner)


def _greedy(evaluator: Evaluator, *, is_fast: bool = False) -> DraftPlan:
    # Greedy moves can miss a plan that fits a small host. The second attempt saves host bytes instead of seconds, and
    # simulates no step, so it is also fast for many buckets.
    draft = None if is_fast else place_greedily(evaluator)
    draft = draft or place_greedily(evaluator, spares_host=True) or place_exhaustively(evaluator)
    if draft is None:
        draft = _fewest_host_bytes(evaluator)
        # With modes that need more than the device budget, a draft plan within the host budget does not fit either.
        if not evaluator.fits(draft.levels, ahead=0):
            raise _no_plan(evaluator, draft)
    return draft


def _at_use(evaluator: Evaluator, levels: Sequence[Level]) -> DraftPlan:
    """Return the draft plan of `levels` with every gather at its use, which needs the fewest device bytes."""
    return DraftPlan(
        levels=tuple(levels), modes=evaluator.facts.modes, moves=evaluator.at_use(levels), step_s=0.0, decisions=()
    )


def _fewest_host_bytes(evaluator: Evaluator) -> DraftPlan:
    """Return the draft plan with the fewest host bytes found within the device budget, whatever the host budget.

    If none is found, return the draft plan with the smallest peak.
    """
    is_small = len(evaluator.facts.buckets) <= _MANY_BUCKETS
    orders = (True, False) if is_small else (True,)
    found = [place_greedily(evaluator, limits_host=False, spares_host=spares_host) for spares_host in orders]
    drafts = [draft for draft in found if draft is not None]
    smallest = _at_use(evaluator, evaluator.min_memory_levels)
    return min(drafts, key=lambda draft: evaluator.host_bytes(draft.levels), default=smallest)


def _require_minimum(evaluator: Evaluator) -> None:
    """Raise NoFeasiblePlan if the device budget is below the smallest peak of each of the uniform modes."""
    if all(uniform.floor_bytes > evaluator.facts.problem.budget_bytes for uniform in uniform_modes(evaluator)):
        smallest = leanest(evaluator)
        raise _no_plan(smallest, _at_use(smallest, smallest.min_memory_levels))


_BEYOND_DDP = (
    "inside DistributedDataParallel parameters and gradients stay on the device, and its buckets are as large again: "
    "elixir_compile.prepare(model, mesh=...) instead of it shares them among the ranks"
)


def _no_plan(evaluator: Evaluator, smallest: DraftPlan) -> NoFeasiblePlan:
    """Return the error that names the bytes of `smallest`: its device bytes if they are over the budget, else its host
    bytes. `smallest` is the draft plan with the fewest bytes."""
    problem = evaluator.facts.problem
    evaluator = evaluator.at(smallest.modes)
    made = write_out(evaluator, smallest)
    peak = plan_timeline(problem.graph, made).peak
    op = next(op for op in evaluator.facts.graph.ops if op.id == peak.op)
    by_kind = {kind.value: nbytes for kind, nbytes in peak.by_kind.items()}
    device_bytes = max(peak.nbytes, evaluator.memory.peak_bytes(smallest.levels, ahead=0))
    homes = (Tier.DEVICE, Tier.HOST) if problem.accumulates else ()
    staying_bytes = {home: made.staying_gradient_bytes(home) for home in homes}
    beyond = _BEYOND_DDP if problem.params_stay else ""
    if device_bytes > problem.budget_bytes:
        staying, where = staying_bytes.get(Tier.DEVICE, 0), op.source or op.module
        returned = _returned(evaluator, made, op)
        return NoFeasiblePlan(
            op.id,
            where,
            problem.budget_bytes,
            device_bytes,
            by_kind,
            returned=returned,
            staying_bytes=staying,
            micro_batches=problem.micro_batches,
            is_static=problem.fractions is not None,
            beyond=beyond,
        )
    budget_bytes = problem.host_budget_bytes + problem.host_base_bytes
    needed_bytes = evaluator.host_bytes(smallest.levels) + problem.host_base_bytes
    # Staying gradients on the device count too: other bytes are on the host in their place.
    return NoFeasiblePlan(
        "",
        "",
        budget_bytes,
        needed_bytes,
        {},
        "host",
        staying_bytes=sum(staying_bytes.values()),
        micro_batches=problem.micro_batches,
        is_static=problem.fractions is not None,
        beyond=beyond,
    )


def _returned(evaluator: Evaluator, made: Plan, op: Op) -> str:
    """Return the name and bytes of an output of the model that is among the three largest storages at `op` under the
    plan `made`, with at least a sixteenth of the peak; empty if none is."""
    graph = evaluator.facts.graph
    at = next(i for i, own in enumerate(graph.ops) if own.id == op.id)
    lives = device_lives(evaluator.facts.problem.graph, made)
    live = [
        storage
        for storage in graph.storages
        if storage.kind is not Kind.PARAM and any(life.first <= at <= life.last for life in lives.get(storage.id, ()))
    ]
    largest = sorted(live, key=lambda storage: -storage.nbytes)[:3]
    least_bytes = made.prediction.device_peak_bytes // 16
    returned = (storage for storage in largest if storage.id in graph.outputs and storage.nbytes >= least_bytes)
    found = next(returned, None)
    return "" if found is None else f"{found.id} of {format_bytes(found.nbytes)}"


MAX_BATCH = 1 << 30
"""The largest batch that is tried."""


def floor_bytes(problem: Problem) -> int:
    """Return the smallest peak in device bytes over the uniform modes, with buckets at the levels of minimum memory.

    It is not proved that no plan for `problem` has a smaller peak.
    """
    return leanest(Evaluator(gather_facts(problem))).floor_bytes


def is_feasible(problem: Problem) -> bool:
    """Return whether some plan fits both budgets of `problem`.

    The uniform modes decide it if the host can hold all buckets, else the greedy planner, by finding a plan or not.
    """
    evaluator = Evaluator(gather_facts(problem))
    if all(uniform.floor_bytes > problem.budget_bytes for uniform in uniform_modes(evaluator)):
        return False
    if any(uniform.fits(uniform.min_memory_levels, ahead=0) for uniform in uniform_modes(evaluator)):
        return True
    try:
        plan(problem, planner="greedy")
    except NoFeasiblePlan:
        return False
    return True


def largest_feasible(problem_at: Callable[[int], Problem], limit: int = MAX_BATCH) -> int:
    """Return the largest value, at most `limit`, for which `problem_at(value)` has a plan; 0 if 1 has no plan.

    `problem_at` is called once for each value. The bytes of its problems must not decrease with the value.
    """
    low, high = 0, 1
    while high <= limit and is_feasible(problem_at(high)):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if is_feasible(problem_at(middle)):
            low = middle
        else:
            high = middle
    return low
