"""`search.in_step`: whatever a rank computes, its plan is legal for it, and its collectives come in one order."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.ir import Bucket, Plan, Saving, Tier, Verb, plan_from_json, plan_to_json
from elixir_compile.search import Problem
from elixir_compile.search.joint.ranks import Homes, homes_in_step, plan_in_step
from elixir_compile.search.space.buckets import form_buckets
from elixir_compile.step import plan_timeline
from tests.pure.memory_walk import walk_memory
from tests.pure.search.test_planner import CLUSTERS, problem_of
from tests.pure.search.test_shards import real_peak_bytes, shared_problems
from tests.pure.strategies import Layer, chain

TWO = CLUSTERS["2 x cuda"]


def all_homes(problem: Problem) -> list[tuple[tuple[Bucket, ...], Homes]]:
    buckets = form_buckets(problem)
    return [(buckets, homes) for homes in homes_in_step(problem, buckets)]


def question(*names: str, act_numel: int = 64) -> Problem:
    """A chain of layers with one parameter each."""
    layers = [Layer(module=name, params=((name, 400),), frozen=False, act_numel=act_numel) for name in names]
    return problem_of(chain(layers), TWO)


def collectives(made: Plan) -> list[str]:
    moves = (Verb.GATHER, Verb.WAIT, Verb.REDUCE, Verb.OFFLOAD)
    return [str(action) for action in made.schedules[0].actions if action.verb in moves]


@given(shared_problems(fewest=2), st.data())
@settings(max_examples=60)
def test_it_is_legal_and_says_what_it_needs(problem: Problem, data: st.DataObject) -> None:
    buckets, homes = data.draw(st.sampled_from(all_homes(problem)))
    made = plan_in_step(problem, buckets, homes, "two graphs")  # which verifies it
    assert plan_from_json(plan_to_json(made)) == made
    assert walk_memory(problem.graph, made).live_bytes == plan_timeline(problem.graph, made).live_bytes
    assert real_peak_bytes(problem.graph, made) <= made.prediction.device_peak_bytes
    needed_bytes = made.prediction.device_peak_bytes
    problem = replace(problem, savings=frozenset({Saving.KEEP}))
    assert plan_in_step(replace(problem, budget_bytes=needed_bytes), buckets, homes, "").placements == homes
    with pytest.raises(NoFeasiblePlan) as caught:
        plan_in_step(replace(problem, budget_bytes=needed_bytes - 1), buckets, homes, "")
    assert (caught.value.needed_bytes, caught.value.memory) == (needed_bytes, "device")


def test_graphs_that_use_parameters_in_another_order_move_buckets_in_the_same() -> None:
    """b0, b1 and b2 of the first graph; the second reads them the other way round, and its activations are larger."""
    ours, theirs = question("a", "b", "c"), question("c", "b", "a", act_numel=128)
    for buckets, homes in all_homes(ours):
        mine, other = (plan_in_step(problem, buckets, homes, "") for problem in (ours, theirs))
        assert mine.graph != other.graph
        assert collectives(mine) == collectives(other)
        gathers = [line.split()[1] for line in collectives(mine) if line.startswith("gather")]
        assert gathers == ["b0", "b1", "b2"] * (1 if homes[0].resident else 2)


def test_a_bucket_that_no_op_reads_travels_all_the_same() -> None:
    """The second graph has `b` as a parameter that nothing reads and nothing trains."""
    ours = question("a", "b")
    graph = question("a").graph
    unread = next(storage for storage in ours.graph.storages if storage.id == "b")
    theirs = problem_of(replace(graph, storages=(*graph.storages, unread)), TWO)
    buckets, homes = all_homes(ours)[0]
    made = plan_in_step(theirs, buckets, homes, "")
    assert [line.split()[1] for line in collectives(made) if line.startswith("gather")] == ["b0", "b1"]
    assert [line.split()[1] for line in collectives(made) if line.startswith("reduce")] == ["b0"]


def test_new_buckets_leave_the_device_first_and_those_in_force_last() -> None:
    problem = question("a", "b")
    first, second = form_buckets(problem)
    resident = homes_in_step(problem, (first, second))[0]
    in_force = replace(problem, buckets=(first,), placements=resident[:1])
    found = homes_in_step(in_force, (first, second))
    assert [[home.resident for home in homes] for homes in found] == [
        [True, True],
        [True, False],
        [False, False],
        [False, False],
    ]
    assert [{home.param for home in homes} for homes in found] == [{Tier.DEVICE}] * 3 + [{Tier.HOST}]
    assert {home.optim for home in found[-1]} == {Tier.HOST}


def with_elementwise_layers() -> Problem:
    """Layers whose activations are large, and can be made again from those of the layers before."""
    layers = [
        Layer(module=f"h{i}", params=((f"p{i}", 16),) if i % 2 else (), frozen=False, act_numel=4096) for i in range(8)
    ]
    return problem_of(chain(layers), TWO)


def test_activations_are_made_again_where_they_do_not_fit() -> None:
    problem = with_elementwise_layers()
    buckets, homes = all_homes(problem)[0]
    kept = plan_in_step(problem, buckets, homes, "")
    short = replace(problem, budget_bytes=kept.prediction.device_peak_bytes - 1)
    made = plan_in_step(short, buckets, homes, "")
    assert not kept.activations
    assert {group.saving for group in made.activations} >= {Saving.RECOMPUTE}
    assert made.prediction.device_peak_bytes < kept.prediction.device_peak_bytes
    assert walk_memory(problem.graph, made).live_bytes == plan_timeline(problem.graph, made).live_bytes
    assert (made.buckets, made.placements, made.schedules) == (kept.buckets, kept.placements, kept.schedules)
    assert made.decisions[1].choice == "are recomputed where they can be"


def test_an_error_names_the_least_and_says_why_nothing_was_searched() -> None:
    problem = replace(with_elementwise_layers(), budget_bytes=1)
    buckets, homes = all_homes(problem)[0]
    with pytest.raises(NoFeasiblePlan, match=r"two graphs\. Try device_memory=\d+, .* or equal graphs\.$") as caught:
        plan_in_step(problem, buckets, homes, "two graphs")
    made = plan_in_step(replace(problem, budget_bytes=caught.value.needed_bytes), buckets, homes, "")
    assert made.prediction.device_peak_bytes == caught.value.needed_bytes
    assert made.activations


def test_a_host_without_room_is_an_error_of_the_host() -> None:
    problem = replace(question("a", "b"), host_budget_bytes=100)
    buckets, away = all_homes(problem)[-1]
    with pytest.raises(NoFeasiblePlan) as caught:
        plan_in_step(problem, buckets, away, "")
    host_bytes = sum(2 * bucket.shard_nbytes() + bucket.shard_state_nbytes() for bucket in buckets)
    assert (caught.value.memory, caught.value.needed_bytes, caught.value.budget_bytes) == ("host", host_bytes, 100)


def test_the_plan_says_why() -> None:
    problem = question("a")
    made = plan_in_step(problem, *all_homes(problem)[0], "rank 1 runs another graph")
    (decision,) = made.decisions
    assert decision.because == "rank 1 runs another graph"
    assert decision.cost_s == made.prediction.exposed_s > 0
