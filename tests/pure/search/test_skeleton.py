"""`search.schedule` and `search.joint.ranks`: ranks with other budgets have homes of their own, and their collectives
come in one order."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elixir_compile.base.errors import InvalidPlan, NoFeasiblePlan
from elixir_compile.ir import Kind, Plan, Saving, StepGraph, Tier, Verb, plan_from_json, plan_to_json
from elixir_compile.ir.kinds import Batched
from elixir_compile.search import Problem, plan
from elixir_compile.search.evaluator import DraftPlan, Evaluator
from elixir_compile.search.joint.ranks import plan_classes, with_buckets_formed
from elixir_compile.search.joint.variants import is_pressed
from elixir_compile.search.planner import floor_bytes
from elixir_compile.search.reasons import write_out
from elixir_compile.search.schedule import Use, common_sequence, following, released_by, skeleton_of
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.search.transfers import raise_prefetch
from elixir_compile.step import plan_timeline, verify
from elixir_compile.step.divide import micro_batches_of
from elixir_compile.step.structure import collectives_of
from elixir_compile.tools.report.explain import explain
from tests.pure.memory_walk import walk_memory
from tests.pure.search.test_best import random_answer
from tests.pure.search.test_planner import CLUSTERS, chain_of, problem_of
from tests.pure.search.test_shards import shared_problems

TWO = CLUSTERS["2 x cuda"]


def divisible(graph: StepGraph) -> StepGraph:
    """The graph of a batch of 8 rows, of which each micro-batch makes its part."""
    kinds = {Kind.TEMP: Batched.EACH, Kind.SAVED: Batched.EACH, Kind.INPUT: Batched.EACH, Kind.GRAD: Batched.SUM}
    storages = tuple(replace(storage, batched=kinds.get(storage.kind, storage.batched)) for storage in graph.storages)
    return replace(graph, batch=8, storages=storages)


def greedy(problem: Problem) -> Plan:
    return plan(problem, "greedy")


def planned(problems: Sequence[Problem], search: Callable[[Problem], Plan] = greedy) -> tuple[Plan, ...]:
    """The plans of classes that are all searched here."""
    numbers = range(len(problems))
    return plan_classes(problems, [(number,) for number in numbers], search, lambda work: list(map(work, numbers)))


def with_share(problem: Problem, share: float) -> Problem:
    """The budget at `share` of the way from the least to what keeps everything on the device."""
    least, most = floor_bytes(problem), plan(problem, "keep_all").prediction.device_peak_bytes
    return replace(problem, budget_bytes=int(least + share * max(0, most - least)))


def with_its_peak(graph: StepGraph, made: Plan) -> Plan:
    """The plan `made`, whose actions were changed by hand, with the peak of its actions as budget and prediction."""
    peak = plan_timeline(graph, made).peak
    prediction = replace(made.prediction, device_peak_bytes=peak.nbytes, device_peak_at=peak.op)
    return replace(made, budget_bytes=peak.nbytes, prediction=prediction, formula="")


@given(shared_problems(fewest=2), st.floats(0.0, 1.0), st.floats(0.0, 1.2))
@settings(max_examples=15)
def test_two_budgets_give_one_order_of_collectives_and_homes_of_their_own(
    problem: Problem, tight: float, loose: float
) -> None:
    problem = with_buckets_formed(problem)
    problems = [with_share(problem, tight), replace(with_share(problem, loose), rank=1)]
    try:
        alone = [greedy(each) for each in problems]
    except NoFeasiblePlan:
        assume(False)
        return
    made = planned(problems)
    assert skeleton_of(made[0]) == skeleton_of(made[1])
    assert made[0].prediction.step_s == made[1].prediction.step_s
    assert [line.ranks for line in made[1].classes] == [(0,), (1,)]
    assert is_pressed(made[0]) == is_pressed(made[1])
    assert plan_from_json(plan_to_json(made[1])) == made[1]
    for each, found, before in zip(problems, made, alone, strict=True):
        verify(each.graph, found)
        assert found.rank == each.rank
        assert plan_timeline(each.graph, found).peak.nbytes <= each.budget_bytes
        assert walk_memory(each.graph, found).live_bytes == plan_timeline(each.graph, found).live_bytes
        assert released_by(found) >= released_by(before)


@given(shared_problems(fewest=2), st.integers(0, 2**32))
@settings(max_examples=30)
def test_any_two_plans_with_the_same_buckets_released_follow_one_sequence(problem: Problem, seed: int) -> None:
    """Levels, modes and moves at random: recomputation gathers again, and in another order."""
    draw = random.Random(seed)
    problem = with_buckets_formed(problem)
    evaluator = Evaluator(gather_facts(problem))
    all_levels = [tuple(random_answer(draw, evaluator)[0])] * 2
    released = frozenset(
        bucket.id
        for bucket, level in zip(evaluator.facts.buckets, all_levels[0], strict=True)
        if bucket.is_sharded and level.is_released
    )
    evaluator = Evaluator(gather_facts(replace(problem, released=released)))
    plans: list[Plan] = []
    for _ in range(2):
        levels, modes = random_answer(draw, evaluator)
        own = evaluator.at(modes)
        draft = DraftPlan(
            levels=levels, moves=raise_prefetch(own, levels), step_s=0.0, modes=modes, decisions=(), planner="greedy"
        )
        plans.append(write_out(own, draft))
    sequence = common_sequence(plans)
    followed = [next(following(each, sequence, released), None) for each in plans]
    assert all(each is not None for each in followed)
    orders = [collectives_of(each) for each in followed if each is not None]
    assert orders[0] == orders[1]
    for each in followed:
        assert each is not None
        assert walk_memory(problem.graph, each).live_bytes == plan_timeline(problem.graph, each).live_bytes


def test_the_rank_with_room_keeps_its_state_and_its_activations() -> None:
    problem = problem_of(chain_of(6), TWO)
    kept_bytes = plan(problem, "keep_all").prediction.device_peak_bytes
    poor = replace(problem, budget_bytes=int(0.6 * kept_bytes))
    rich, poor_plan = planned([replace(problem, budget_bytes=kept_bytes * 2), replace(poor, rank=1)])
    assert {placement.optim for placement in rich.placements} == {Tier.DEVICE}
    assert not any(group.saving is Saving.OFFLOAD for group in rich.activations)
    assert Tier.HOST in {placement.optim for placement in poor_plan.placements}
    assert released_by(rich) == released_by(poor_plan) == released_by(greedy(poor))
    assert [line.is_pressed for line in rich.classes] == [False, True]
    assert rich.bound_s == poor_plan.bound_s
    lines = [line.strip() for line in explain(poor_plan).splitlines() if "busy" in line]
    assert lines[0].startswith("ranks")
    rows = problem.graph.batch
    assert lines[1].startswith(f"1, this plan on cuda: {rows} row")
    assert ", 50.0% of the state, peak " in lines[1]
    told = [(line.num_rows, line.micro_batches, line.state) for line in rich.classes]
    assert told == [(rows, micro_batches_of(made), 0.5) for made in (rich, poor_plan)]
    assert plan_from_json(plan_to_json(rich)).classes == rich.classes
    assert "busy" not in explain(greedy(problem))


def test_micro_batches_are_each_ranks_own() -> None:
    """1, 4 and 2 micro-batches: two gathers and a reduce of each bucket in a step, on every rank."""
    problem = with_buckets_formed(replace(problem_of(divisible(chain_of(6)), TWO), rank=0))
    released = frozenset(bucket.id for bucket in problem.buckets if bucket.is_sharded)
    asked = [replace(problem, micro_batches=number, released=released) for number in (1, 4, 2)]
    made = planned(asked)
    for found, number in zip(made, (1, 4, 2), strict=True):
        assert micro_batches_of(found) == number
        counts = Counter(map(str, collectives_of(found)))
        assert counts == {
            f"{verb} {name}": times for name in released for verb, times in (("gather", 2), ("reduce", 1))
        }
    assert skeleton_of(made[0]) == skeleton_of(made[1]) == skeleton_of(made[2])


def test_a_copy_of_others_may_come_before_the_own_copy_is_awaited() -> None:
    """A rank gathers its second bucket ahead of the first; then others gather the second bucket once more."""
    problem = with_buckets_formed(problem_of(chain_of(6), TWO))
    made = greedy(with_share(problem, 0.0))
    actions = list(made.schedules[0].actions)
    first, second = [at for at, action in enumerate(actions) if action.verb is Verb.GATHER][:2]
    actions.insert(first, actions.pop(second))
    made = replace(made, schedules=(replace(made.schedules[0], actions=tuple(actions)),))
    verify(problem.graph, with_its_peak(problem.graph, made))
    sequence = list(common_sequence([made]))
    ahead = sequence[0]
    assert isinstance(ahead, Use)
    sequence.insert(1, ahead._replace(number=1))
    followed = next(following(made, sequence, released_by(made)), None)
    assert followed is not None
    verify(problem.graph, with_its_peak(problem.graph, followed))
    expected = [str(name) for name in collectives_of(made)]
    assert list(map(str, collectives_of(followed))) == [expected[0], expected[0], *expected[1:]]


def test_a_plan_that_has_no_room_to_follow_is_refused() -> None:
    problem = with_buckets_formed(problem_of(chain_of(6), TWO))
    poor = with_share(problem, 0.0)
    made = greedy(poor)
    with pytest.raises(InvalidPlan, match="to issue its collectives in the order of the other ranks"):
        planned(
            [poor, replace(problem, rank=1)],
            lambda each: replace(made if each == poor else greedy(each), budget_bytes=1),
        )
