"""Find the largest batch that any plan can train within the budgets of a problem.

A larger batch never needs fewer bytes, so doubling and bisection find the largest batch in 2 log2(batch) trials.
"""

from collections.abc import Callable

from elixir_compile.errors import NoFeasiblePlan
from elixir_compile.search.evaluator import Evaluator
from elixir_compile.search.heuristics.uniform_modes import leanest, uniform_modes
from elixir_compile.search.planner import plan
from elixir_compile.search.problem import Problem
from elixir_compile.search.space.facts import gather_facts

MAX_BATCH = 1 << 30


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
