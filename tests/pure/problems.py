"""Problems whose answer moves buckets, whatever planner is asked."""

from dataclasses import replace

from elixir_compile.search import Problem, plan
from tests.pure.search.test_planner import chain_of, problem_of


def tight_problem(share: float = 0.45) -> Problem:
    """Return a chain of six layers under `share` of the bytes that it takes with everything on the device."""
    problem = problem_of(chain_of(6))
    kept = plan(problem, "keep_all")
    return replace(problem, budget_bytes=int(share * kept.prediction.device_peak_bytes))
