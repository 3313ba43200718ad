"""The best of all placements of a small problem, each of them tried: what planners are compared with."""

from elixir_compile.ir import Plan
from elixir_compile.search import Problem
from elixir_compile.search.evaluator import Evaluator
from elixir_compile.search.greedy import MAX_PLACEMENTS, num_placements, place_exhaustively
from elixir_compile.search.reasons import write_out
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.step import verify


def best_of_all(problem: Problem) -> Plan | None:
    """Return the verified plan with the shortest step of all levels of each bucket with all modes of each layer; None
    if none of them fits. Fails for a problem with more than `MAX_PLACEMENTS` of them."""
    evaluator = Evaluator(gather_facts(problem))
    assert num_placements(evaluator) <= MAX_PLACEMENTS
    draft = place_exhaustively(evaluator)
    if draft is None:
        return None
    made = write_out(evaluator, draft)
    verify(problem.graph, made)
    return made
