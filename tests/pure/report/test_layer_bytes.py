"""`layer_bytes`: the bytes of all layers add up to those of the timeline, at every op, and belong where they are."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings

from elixir_compile.ir import Kind, Plan, StepGraph
from elixir_compile.search import Problem, plan
from elixir_compile.step import plan_timeline
from elixir_compile.tools.report.tables import SEVERAL, Survey, layer_bytes, split
from tests.pure.plans import mixed_plans
from tests.pure.problems import tight_problem
from tests.pure.search.test_planner import needed_bytes, problems

TIGHT = tight_problem()
MADE = plan(TIGHT, "greedy")


def assert_adds_up(graph: StepGraph, made: Plan) -> None:
    timeline, held = plan_timeline(graph, made), Survey(made, graph).held
    assert held is not None
    for at, op in enumerate(timeline.ops):
        sums: Counter[Kind] = Counter()
        for own in layer_bytes(held, op).values():
            assert all(own.values()), "zeros are left out"
            sums.update(own)
        expected = {kind: live[at] for kind, live in timeline.live_bytes_by_kind.items() if live[at]}
        assert dict(sums) == expected, op


@given(mixed_plans())
@settings(max_examples=25)
def test_layers_add_up_to_the_timeline_of_plans_with_activations_that_move(planned: tuple[StepGraph, Plan]) -> None:
    assert_adds_up(*planned)


@given(problems(training=True))
@settings(max_examples=25)
def test_layers_add_up_to_the_timeline_of_plans_of_one_or_two_ranks(problem: Problem) -> None:
    problem = replace(problem, budget_bytes=needed_bytes(problem))
    assert_adds_up(problem.graph, plan(problem, "greedy"))


@pytest.mark.parametrize("base_bytes", [0, 1000])
def test_streamed_updates_and_external_usage_count_beside_the_layers(base_bytes: int) -> None:
    placed = [replace(p, streamed=p.optim != "device") for p in MADE.placements]
    made = replace(MADE, placements=tuple(placed), base_bytes=base_bytes)
    assert_adds_up(TIGHT.graph, made)
    held = Survey(made, TIGHT.graph).held
    assert held is not None
    assert SEVERAL in layer_bytes(held, held.timeline.ops[-1])


def test_a_bucket_of_two_layers_is_shared_out_by_the_bytes_of_their_parameters() -> None:
    assert split(10, {"blocks.0": 30, "blocks.1": 60}) == {"blocks.0": 4, "blocks.1": 6}
    assert split(7, {}) == {"other ops": 7}
    assert split(7, {"head": 0}) == {"head": 7}
