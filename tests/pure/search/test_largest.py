"""The largest batch of any plan: just within the floor, one more is not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.ir import Kind, Plan, StepGraph, graph_at
from elixir_compile.ir.hardware import profile_for
from elixir_compile.search import Problem, plan
from elixir_compile.search.planner import floor_bytes, is_feasible, largest_feasible
from tests.pure.strategies import Layer, chain, examples, symbolic

CLUSTER = profile_for("cpu", memory_bytes=1 << 30, host_memory_bytes=1 << 30, name="1 x cpu")
GRAPH = symbolic(
    chain([Layer(module=f"l{n}", params=((f"w{n}", 1000),), frozen=False, act_numel=50) for n in range(4)])
)


def problem_of(graph: StepGraph, budget_bytes: int, host_budget_bytes: int = 1 << 30) -> Problem:
    return Problem(
        name="chain",
        graph=graph,
        cluster=CLUSTER,
        budget_bytes=budget_bytes,
        host_budget_bytes=host_budget_bytes,
        state_nbytes={s.of: 2 * s.nbytes for s in graph.storages if s.of is not None},
        hybrid=True,
        bucket_min_bytes=4000,
        bucket_max_bytes=4000,
    )


def planned(problem: Problem) -> Plan | None:
    try:
        return plan(problem, planner="greedy")
    except NoFeasiblePlan:
        return None


@given(st.integers(0, 400_000), st.sampled_from([1 << 30, 60_000, 30_000]))
@examples(10)
def test_the_largest_batch_has_a_plan_and_the_next_has_none(budget_bytes: int, host_budget_bytes: int) -> None:
    def problem_at(batch: int) -> Problem:
        return problem_of(graph_at(GRAPH, {"s0": batch}), budget_bytes, host_budget_bytes)

    batch = largest_feasible(problem_at)
    assert planned(problem_at(batch + 1)) is None
    assert batch == 0 or planned(problem_at(batch)) is not None


def test_each_value_is_asked_for_once_and_the_limit_holds() -> None:
    asked: list[int] = []

    def problem_at(batch: int) -> Problem:
        asked.append(batch)
        return problem_of(graph_at(GRAPH, {"s0": batch}), 100_000)

    batch = largest_feasible(problem_at)
    assert batch > 16
    assert len(set(asked)) == len(asked) <= 2 * batch.bit_length()
    assert largest_feasible(problem_at, limit=5) == 5


@pytest.mark.parametrize("batch", [1, 7, 300])
def test_the_floor_is_the_smallest_budget_with_a_plan(batch: int) -> None:
    graph = graph_at(GRAPH, {"s0": batch})
    needed_bytes = floor_bytes(problem_of(graph, 1))
    assert is_feasible(problem_of(graph, needed_bytes))
    assert not is_feasible(problem_of(graph, needed_bytes - 1))
    found = plan(problem_of(graph, needed_bytes), planner="greedy")
    assert found.prediction.device_peak_bytes == needed_bytes


def test_no_batch_fits_if_the_parameters_do_not() -> None:
    largest_param = max(s.nbytes for s in GRAPH.storages if s.kind is Kind.PARAM)
    assert largest_feasible(lambda batch: problem_of(graph_at(GRAPH, {"s0": batch}), largest_param)) == 0


def test_sizes_that_are_constant_stop_at_the_limit() -> None:
    constant = problem_of(GRAPH, 1 << 30)
    assert largest_feasible(lambda batch: constant, limit=1000) == 1000
