"""`search.joint.variants`: as few bytes of parameters as fit get narrower moments, on one rank and on several."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.ir import Plan
from elixir_compile.search import Problem
from elixir_compile.search.joint.variants import plans_with_fewest_narrower
from elixir_compile.search.problem import NarrowerState
from tests.pure.search.test_planner import CLUSTERS, chain_of, needed_bytes, problem_of
from tests.pure.search.test_skeleton import greedy, planned

NUM_LAYERS = 8
ONE, TWO = CLUSTERS["cuda"], CLUSTERS["2 x cuda"]
STATE_NBYTES = 3200
"""Bytes of exact moments of a layer; narrower ones take half."""


@cache
def with_just_enough(num_ranks: int) -> Problem:
    """All state is on the host, which has just enough memory for exact moments."""
    roomy = problem_of(chain_of(NUM_LAYERS), TWO if num_ranks == 2 else ONE, bucket_max_bytes=1600)
    roomy = replace(roomy, budget_bytes=needed_bytes(roomy))
    narrower = NarrowerState(dtype="bfloat16", nbytes=dict.fromkeys(roomy.state_nbytes, STATE_NBYTES // 2))
    with pytest.raises(NoFeasiblePlan) as raised:
        greedy(replace(roomy, host_budget_bytes=0))
    assert raised.value.memory == "host"
    return replace(roomy, host_budget_bytes=raised.value.needed_bytes, narrower=narrower)


def short_of_host_memory(missing_bytes: int, num_ranks: int) -> Problem:
    """All state is on the host, where a rank lacks `missing_bytes` for exact moments."""
    enough = with_just_enough(num_ranks)
    return replace(enough, host_budget_bytes=enough.host_budget_bytes - missing_bytes)


def each_greedy(problems: Sequence[Problem]) -> list[Plan]:
    return [greedy(problem) for problem in problems]


def num_narrow(plan: Plan) -> int:
    """Return the number of parameters with narrower moments."""
    return sum(len(bucket.params) for bucket in plan.buckets if bucket.state_dtype == "bfloat16")


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("num_missing", [1, 3])
def test_no_more_parameters_have_narrower_moments_than_bytes_are_missing(num_ranks: int, num_missing: int) -> None:
    """A rank lacks what `num_missing` whole parameters save, and has a part of each parameter."""
    problem = short_of_host_memory(num_missing * STATE_NBYTES // 2, num_ranks)
    with pytest.raises(NoFeasiblePlan):
        greedy(problem)
    [plan] = plans_with_fewest_narrower([problem], each_greedy)
    assert num_missing * num_ranks <= num_narrow(plan) <= num_missing * num_ranks + 1
    reasons = {decision.subject for decision in plan.decisions if decision.choice == "moments bfloat16"}
    assert reasons == {bucket.id for bucket in plan.buckets if bucket.state_dtype is not None}


def test_the_first_choice_fits_on_two_ranks() -> None:
    searched: list[int] = []

    def search(problems: Sequence[Problem]) -> list[Plan]:
        searched.append(len(problems[0].state_dtypes))
        return each_greedy(problems)

    plans_with_fewest_narrower([short_of_host_memory(3 * STATE_NBYTES // 2, 2)], search)
    assert len(searched) == 2


def test_classes_of_ranks_have_the_same_narrower_moments() -> None:
    short = short_of_host_memory(3 * STATE_NBYTES // 2, 2)
    other = replace(short, rank=1, host_budget_bytes=1 << 30)
    plans = planned([short, other])
    assert [bucket.state_dtype for bucket in plans[0].buckets] == [bucket.state_dtype for bucket in plans[1].buckets]
    assert 6 <= num_narrow(plans[0]) < NUM_LAYERS
    assert all(num_narrow(plan) == 0 for plan in planned([replace(short, host_budget_bytes=1 << 30), other]))


def test_an_error_names_the_bytes_that_narrower_moments_leave() -> None:
    exact = short_of_host_memory(1, 1)
    least = replace(exact, host_budget_bytes=0)
    with pytest.raises(NoFeasiblePlan) as raised:
        plans_with_fewest_narrower([least], each_greedy)
    assert raised.value.needed_bytes <= exact.host_budget_bytes + 1 - NUM_LAYERS * STATE_NBYTES // 2
    with pytest.raises(NoFeasiblePlan) as raised:
        plans_with_fewest_narrower([replace(least, narrower=None)], each_greedy)
    assert raised.value.needed_bytes == exact.host_budget_bytes + 1
