"""The readers of the works of a schedule agree: what is in order does not overlap in time."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_compile.ir import Plan, StepGraph, Update
from elixir_compile.ir.hardware import Cluster
from elixir_compile.step import as_run
from elixir_compile.step.divide import laps_of
from elixir_compile.step.lane_order import Order, region_touches, works_of
from elixir_compile.step.seconds import actions_of, player_of
from elixir_compile.step.works import Do
from tests.pure.analysis.test_lane_order import PLANS, in_mode
from tests.pure.plans import mixed_plans, planned_graphs
from tests.pure.search.test_planner import CLUSTERS


def check_times(graph: StepGraph, plan: Plan, cluster: Cluster) -> int:
    """Compare order and times of a step of `plan`; return the number of ordered pairs.

    Not of what the thread of the updates issues, whose times are known later, nor of what passes in pieces.
    """
    player, order = player_of(graph, plan, cluster), Order()
    player.works_of(actions_of(plan))  # all lanes are idle, and the moments are those of the works below
    ends_s: dict[int, float] = {}
    num_pairs = 0
    for work in works_of(plan, region_touches(as_run(graph, plan.activations, laps_of(plan)), plan)):
        order._run(work, 0)
        player.run([work])
        timed = player.price.of_deed.get(work.do)
        if work.do is not Do.RUN and timed is None:
            continue
        number, end_s = len(order.found) - 1, player.over_s[work.actor]
        begin_s = end_s - (player.run_s[work.name] if timed is None else timed[work.name][0])
        before = [other for other in ends_s if order.found[number].before >> other & 1]
        assert all(ends_s[other] <= begin_s + 1e-9 * max(end_s, 1e-9) for other in before), work
        num_pairs += len(before)
        ends_s[number] = end_s
    return num_pairs


@pytest.mark.parametrize("update", Update)
@pytest.mark.parametrize("name", PLANS)
def test_what_is_before_a_work_is_over_when_it_begins(name: str, update: Update) -> None:
    graph, plan = in_mode(name, update)
    assert check_times(graph, plan, CLUSTERS["2 x cuda" if "shards" in name else "cuda"]) > 20


@given(st.one_of(planned_graphs(training=True), mixed_plans()), st.sampled_from(Update))
@settings(max_examples=30)
def test_in_random_plans_too(planned: tuple[StepGraph, Plan], update: Update) -> None:
    graph, plan = planned
    check_times(graph, dataclasses.replace(plan, update=update), CLUSTERS["cuda"])
