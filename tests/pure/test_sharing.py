"""`sharing`: graphs that wait for each other keep one budget together."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.ir import Bucket, BucketId, Placement, Plan, StepGraph, StorageId, Tier
from elixir_compile.search import Problem, extent_of, extents, plan
from elixir_compile.search.joint.joint_budget import GraphRequest, plan_in_least, plan_jointly
from elixir_compile.step.timeline import host_bytes
from tests.pure.problems import disk_staging
from tests.pure.search.test_planner import chain_of, problem_of

BESIDE = {"alone": [()], "chain": [(), (0,), (0, 1)], "twice": [(0,)], "thrice": [(0, 0)], "in turn": [(), ()]}


def greedy(problem: Problem) -> Plan:
    return plan(problem, "greedy")


def turns_of(name: str, budget_bytes: int) -> list[GraphRequest]:
    graphs = [chain_of(2 + number % 2) for number in range(len(BESIDE[name]))]
    problems = [problem_of(graph, budget_bytes=budget_bytes, base_bytes=100) for graph in graphs]
    return [
        GraphRequest(problem=problem, beside=beside) for problem, beside in zip(problems, BESIDE[name], strict=True)
    ]


def least_bytes(name: str) -> int:
    with pytest.raises(NoFeasiblePlan) as caught:
        plan_jointly(turns_of(name, 1), greedy)
    return caught.value.needed_bytes


@given(st.sampled_from(sorted(BESIDE)), st.sampled_from([1.05, 1.2, 1.5, 2.0, 10.0]))
@settings(max_examples=25)
def test_plans_keep_the_budget_together(name: str, times: float) -> None:
    """What each needs while it runs, all that the others hold included, counted here once more."""
    requests = turns_of(name, int(times * least_bytes(name)))
    planned = plan_jointly(requests, greedy)
    held = [extent_of(problem.graph, made) for problem, made in planned]
    for number, (request, (_, made)) in enumerate(zip(requests, planned, strict=True)):
        resident_bytes = sum(own.resident_bytes for own in held) - held[number].resident_bytes
        left_bytes = sum(held[other].left_bytes for other in request.beside)
        needed_bytes = request.problem.base_bytes + resident_bytes + left_bytes + held[number].peak_bytes
        assert needed_bytes <= made.prediction.device_peak_bytes <= request.problem.budget_bytes


@pytest.mark.parametrize("name", sorted(BESIDE))
def test_the_least_budget_has_plans_and_a_smaller_one_has_none(name: str) -> None:
    least, planned = plan_in_least(turns_of(name, 1), 1, greedy)
    assert max(made.prediction.device_peak_bytes for _, made in planned) <= least
    assert {made.budget_bytes for _, made in planned} == {least}
    with pytest.raises(NoFeasiblePlan):
        plan_jointly(turns_of(name, least - least // 32), greedy)
    assert plan_in_least(turns_of(name, 1), 2 * least, greedy)[0] == 2 * least


def test_with_room_for_everything_nothing_moves() -> None:
    requests = turns_of("chain", 1 << 30)
    for request, (_, made) in zip(requests, plan_jointly(requests, greedy), strict=True):
        alone = greedy(request.problem)
        assert (made.placements, made.activations) == (alone.placements, alone.activations)


def test_extents_hold_every_plan() -> None:
    problem = problem_of(chain_of(3))
    low, high = extents(problem)
    assert low.left_bytes < high.left_bytes
    assert low.resident_bytes == 0 < high.resident_bytes
    assert extent_of(problem.graph, greedy(problem)) == high
    tight = greedy(replace(problem, budget_bytes=low.peak_bytes))
    assert extent_of(problem.graph, tight).peak_bytes == low.peak_bytes


@pytest.mark.parametrize("field", ["between_bytes", "after_bytes"])
def test_bytes_that_others_need_stay_free(field: str) -> None:
    """Nothing fits above the budget, and below it something has to go that would stay otherwise."""
    problem = problem_of(chain_of(3), budget_bytes=100_000)
    free = extent_of(problem.graph, greedy(problem))
    pressed = greedy(replace(problem, **{field: 100_000 - free.resident_bytes}))
    held = extent_of(problem.graph, pressed)
    assert held.resident_bytes + held.left_bytes < free.resident_bytes + free.left_bytes
    with pytest.raises(NoFeasiblePlan) as caught:
        greedy(replace(problem, **{field: 200_000}))
    assert caught.value.needed_bytes > 100_000


def renamed(graph: StepGraph) -> StepGraph:
    """`graph` with parameters of other names, as another graph of the step has them."""

    def other(name: StorageId) -> StorageId:
        return StorageId(f"other.{name}")

    return replace(
        graph,
        storages=tuple(replace(s, id=other(s.id), of=None if s.of is None else other(s.of)) for s in graph.storages),
        ops=tuple(
            replace(op, reads=tuple(map(other, op.reads)), writes=tuple(map(other, op.writes))) for op in graph.ops
        ),
        outputs=tuple(map(other, graph.outputs)),
        aliases=tuple((value, other(name)) for value, name in graph.aliases),
    )


def two_in_force(host_budget_bytes: int, *, disk: bool = False) -> list[GraphRequest]:
    """Two graphs with parameters of their own, in force on the device, of which little fits there."""
    alone = [problem_of(chain_of(3), hybrid=True), problem_of(renamed(chain_of(3)), hybrid=True)]
    buckets: list[Bucket] = []
    for number, problem in enumerate(alone):
        made = greedy(problem).buckets
        buckets += [replace(bucket, id=BucketId(f"b{number}{i}")) for i, bucket in enumerate(made)]
    homes = tuple(
        Placement(bucket=bucket.id, param=Tier.DEVICE, optim=Tier.DEVICE, resident=True) for bucket in buckets
    )
    problems = [
        replace(problem, buckets=tuple(buckets), placements=homes, host_budget_bytes=host_budget_bytes, disk=disk)
        for problem in alone
    ]
    needed = [GraphRequest(problem=replace(problem, budget_bytes=1), beside=()) for problem in problems]
    with pytest.raises(NoFeasiblePlan) as caught:
        plan_jointly(needed, greedy)
    budget_bytes = int(1.1 * caught.value.needed_bytes)
    return [GraphRequest(problem=replace(problem, budget_bytes=budget_bytes), beside=()) for problem in problems]


def test_plans_keep_the_budget_of_the_host_together() -> None:
    def held_bytes(requests: list[GraphRequest]) -> list[int]:
        return [host_bytes(made) for _, made in plan_jointly(requests, greedy)]

    free = held_bytes(two_in_force(1 << 30))
    assert min(free) > 0
    assert sum(held_bytes(two_in_force(sum(free)))) <= sum(free)
    with pytest.raises(NoFeasiblePlan) as caught:
        plan_jointly(two_in_force(max(free)), greedy)
    assert (caught.value.memory, caught.value.budget_bytes) == ("host", max(free))
    assert caught.value.needed_bytes > max(free)
    less = 2 * sum(free) // 3
    with disk_staging(0):
        assert sum(held_bytes(two_in_force(less, disk=True))) <= less


def two_readers(budgets: tuple[int, int], models: tuple[int, int]) -> list[GraphRequest]:
    """Two graphs with buckets of equal names in force on the device: those of one model, or of two."""
    problem = problem_of(chain_of(3), hybrid=True)
    buckets = greedy(problem).buckets
    homes = tuple(
        Placement(bucket=bucket.id, param=Tier.DEVICE, optim=Tier.DEVICE, resident=True) for bucket in buckets
    )
    there = replace(problem, buckets=buckets, placements=homes)
    return [
        GraphRequest(problem=replace(there, budget_bytes=budget), beside=(), model=model)
        for budget, model in zip(budgets, models, strict=True)
    ]


def test_what_graphs_of_one_model_read_together_is_there_once() -> None:
    kept = extents(two_readers((1 << 30, 1 << 30), (0, 0))[0].problem)[1]
    budget_bytes = kept.peak_bytes + kept.grad_bytes

    def resident_bytes(models: tuple[int, int]) -> list[int]:
        requests = two_readers((budget_bytes, budget_bytes), models)
        return [extent_of(problem.graph, made).resident_bytes for problem, made in plan_jointly(requests, greedy)]

    assert resident_bytes((0, 0)) == [kept.resident_bytes] * 2
    assert sum(resident_bytes((0, 1))) <= budget_bytes < 2 * kept.resident_bytes + kept.grad_bytes


def test_each_graph_keeps_the_budget_of_its_own_model() -> None:
    kept = extents(two_readers((1 << 30, 1 << 30), (0, 1))[0].problem)[1]
    budgets = 2 * kept.peak_bytes, int(1.2 * kept.peak_bytes)
    for budget_bytes, (_, made) in zip(budgets, plan_jointly(two_readers(budgets, (0, 1)), greedy), strict=True):
        assert made.prediction.device_peak_bytes <= budget_bytes
    with pytest.raises(NoFeasiblePlan) as caught:
        plan_jointly(two_readers((budgets[0], 1), (0, 1)), greedy)
    assert caught.value.budget_bytes == 1
