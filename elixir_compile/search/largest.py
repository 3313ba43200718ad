"""The largest batch that any plan can train: not what fits one plan, but what fits once everything has moved that can.

A larger batch never needs fewer bytes, so doubling and bisection find it in 2 log2(batch) questions.
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
    """Return the fewest device bytes that a plan for `problem` needs: every bucket as far off as it can be, gathered
    at use, and of activations what the leanest rung of the ladder keeps. Nothing says that there is no lower one."""
    return leanest(Evaluator(gather_facts(problem))).floor_bytes


def is_feasible(problem: Problem) -> bool:
    """Return whether some plan fits both budgets of `problem`.

    Exact where the host can hold everything; else whether the greedy planner finds one.
    """
    evaluator = Evaluator(gather_facts(problem))
    if all(rung.floor_bytes > problem.budget_bytes for rung in uniform_modes(evaluator)):
        return False
    if any(rung.fits(rung.min_memory_levels, ahead=0) for rung in uniform_modes(evaluator)):
        return True
    try:
        plan(problem, planner="greedy")
    except NoFeasiblePlan:
        return False
    return True


def largest_feasible(problem_at: Callable[[int], Problem], limit: int = MAX_BATCH) -> int:
    """Return the largest value, at most `limit`, for which `problem_at(value)` has a plan; 0 when 1 has none.

    `problem_at` is asked for each value once; the bytes of its problems must not shrink as the value grows.
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
