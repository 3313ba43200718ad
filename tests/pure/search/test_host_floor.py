"""The bound from below for host bytes: never above what a placement that fits the device takes, and near the least."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_compile.search.evaluator import Evaluator
from elixir_compile.search.planner import host_floor_bytes
from elixir_compile.search.space.facts import gather_facts
from tests.pure.search.test_least_host import short_problem


def least_host_bytes(evaluator: Evaluator) -> int | None:
    """Return the fewest host bytes of all placements at the evaluator's modes that fit the device."""
    budget_bytes = evaluator.facts.problem.budget_bytes
    fit = (
        evaluator.host_bytes(levels)
        for levels in itertools.product(*evaluator.facts.choices)
        if evaluator.memory.peak_bytes(levels, ahead=0) <= budget_bytes
    )
    return min(fit, default=None)


@given(st.integers(0, 10_000), st.sampled_from([1, 2]))
@settings(max_examples=60)
def test_no_placement_takes_fewer_host_bytes_than_the_floor(seed: int, num_ranks: int) -> None:
    evaluator = Evaluator(gather_facts(short_problem(seed, num_ranks, disk=False)))
    least = least_host_bytes(evaluator)
    assert least is None or host_floor_bytes(evaluator) <= least


def test_the_floor_is_a_large_share_of_the_fewest_host_bytes() -> None:
    evaluators = [Evaluator(gather_facts(short_problem(seed, 1, disk=False))) for seed in range(40)]
    pairs = [(host_floor_bytes(evaluator), least) for evaluator in evaluators if (least := least_host_bytes(evaluator))]
    assert len(pairs) > 20
    assert sum(floor for floor, _ in pairs) >= 0.6 * sum(least for _, least in pairs)
