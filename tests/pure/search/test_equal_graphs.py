"""Searches for equal graphs in one process, as after a second capture of the same model."""

import pytest

from elixir_compile.ir import Op
from elixir_compile.search import plan
from tests.pure.search.test_planner import between, chain_of, problem_of


def test_a_second_search_compares_the_ops_of_an_equal_graph_a_few_times_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = problem_of(chain_of(10))
    expected = plan(between(first, 0.4))
    num_compared, equal = 0, Op.__eq__

    def counted(self: Op, other: object) -> bool:
        nonlocal num_compared
        num_compared += 1
        return equal(self, other)

    second = chain_of(10)
    assert second == first.graph
    assert second is not first.graph
    monkeypatch.setattr(Op, "__eq__", counted)
    assert plan(between(problem_of(second), 0.4)) == expected
    assert num_compared <= 8 * len(second.ops)
