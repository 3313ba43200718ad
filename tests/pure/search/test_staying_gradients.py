"""Gradients that stay through the next forward, as the planning half counts and prices them."""

import random
from dataclasses import replace

import pytest

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.ir import Kind, Tier, Update
from elixir_compile.ir.cost import add_s
from elixir_compile.search import Problem, plan
from elixir_compile.search.evaluator import Evaluator
from elixir_compile.search.formulation.milp import Milp
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.search.space.profiles import moves_at_use
from elixir_compile.step import plan_timeline
from elixir_compile.step.seconds import simulate
from tests.pure.search.test_best import instances, machine, random_answer
from tests.pure.search.test_crossing import mixed_layers
from tests.pure.search.test_planner import CLUSTERS, chain_of, problem_of
from tests.pure.strategies import chain


def accumulating(problem: Problem) -> Problem:
    """Return `problem` with a sum of gradients for each trained parameter."""
    grads = [storage for storage in problem.graph.storages if storage.kind is Kind.GRAD and storage.of is not None]
    return replace(problem, accumulates=True, sum_nbytes={grad.of: grad.nbytes for grad in grads if grad.of})


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_the_sum_is_there_at_every_op_and_the_gradient_of_the_step_until_the_backward_ends(cluster: str) -> None:
    problem = problem_of(chain_of(4), CLUSTERS[cluster])
    without, counted = plan(problem, "keep_all"), plan(accumulating(problem), "keep_all")
    before, after = (plan_timeline(problem.graph, made) for made in (without, counted))
    staying_bytes = counted.staying_gradient_bytes(Tier.DEVICE)
    assert staying_bytes == sum(bucket.nbytes for bucket in counted.buckets) // problem.cluster.num_ranks
    *run, update = (now - then for then, now in zip(before.live_bytes, after.live_bytes, strict=True))
    assert set(run) == {staying_bytes}
    assert update == 0
    assert after.live_bytes_by_kind[Kind.GRAD][-1] == staying_bytes


@pytest.mark.parametrize("home", [Tier.DEVICE, Tier.HOST])
def test_adding_gradients_up_takes_time_at_the_end_of_the_backward(home: Tier) -> None:
    problem = replace(problem_of(chain_of(4)), update=Update.AFTER_BACKWARD)
    planner = "keep_all" if home is Tier.DEVICE else "zero3_offload"
    without, counted = plan(problem, planner), plan(accumulating(problem), planner)
    assert {placement.param for placement in counted.placements} == {home}
    steps_s = [simulate(problem.graph, made, problem.cluster).step_s for made in (without, counted)]
    added_s = sum(add_s(bucket, home, problem.cluster) for bucket in counted.buckets)
    assert added_s > 0
    assert steps_s[1] - steps_s[0] == pytest.approx(added_s)


def test_the_bound_counts_no_more_seconds_than_the_simulation() -> None:
    """Random candidates on random machines, for every update mode; the bound grows by the added seconds."""
    num_longer = 0
    for number, (seed, found) in enumerate(instances(6)):
        problem = replace(found, update=(None, *Update)[number % 4] if found.hybrid else None)
        draw = random.Random(seed)
        evaluators = [Evaluator(gather_facts(each)) for each in (problem, accumulating(problem))]
        milps = [Milp(evaluator, 1.0) for evaluator in evaluators]
        for _ in range(4):
            candidate = random_answer(draw, evaluators[0])
            lower_s = [milp.lower_s(milp.vector(candidate)) for milp in milps]
            at = evaluators[1].at(candidate.modes)
            for ahead in (0, 2):
                step_s = at.step_s(candidate.levels, moves_at_use(at.facts, candidate.levels, ahead))
                assert lower_s[1] <= step_s * (1 + 1e-9), (seed, candidate)
            num_longer += lower_s[1] > lower_s[0]
    assert num_longer > 12


@pytest.mark.parametrize("update", list(Update))
def test_the_bound_holds_with_sums_whatever_runs_beside_compute(update: Update) -> None:
    """Also where only some links are beside compute: the host then adds and updates while the device adds."""
    num_seeds = 25
    for seed in (*range(1000, 1000 + num_seeds), 1040, 1075):
        draw = random.Random(seed)
        cluster = machine(draw, draw.choice([1, 1, 2, 3]), draw.choice([0.6, 1.0]))
        graph = chain(list(mixed_layers(draw)))
        problem = accumulating(problem_of(graph, cluster, update=update, bucket_min_bytes=1, bucket_max_bytes=800))
        evaluator = Evaluator(gather_facts(problem))
        milp = Milp(evaluator, 1.0)
        for _ in range(6):
            candidate = random_answer(draw, evaluator)
            at, lower_s = evaluator.at(candidate.modes), milp.lower_s(milp.vector(candidate))
            for ahead in (1, 8):
                step_s = at.step_s(candidate.levels, moves_at_use(at.facts, candidate.levels, ahead))
                assert lower_s <= step_s * (1 + 1e-9), (seed, candidate)


def test_the_error_names_the_bytes_that_stay() -> None:
    problem = replace(accumulating(problem_of(chain_of(4))), host_budget_bytes=0)
    budget_bytes = plan(problem, "keep_all").prediction.device_peak_bytes - 1
    with pytest.raises(NoFeasiblePlan, match="gradients of earlier backward passes take"):
        plan(replace(problem, budget_bytes=budget_bytes))
    with pytest.raises(NoFeasiblePlan) as without:
        plan(replace(problem, budget_bytes=0, accumulates=False, sum_nbytes={}))
    assert without.value.staying_bytes == 0
    assert "earlier backward" not in str(without.value)
