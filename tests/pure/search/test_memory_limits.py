"""The least memory that a plan needs, bounds below it, the largest batch, and the rate of the host's memory."""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.base.options import Planner
from elixir_compile.ir import Kind, Param, Plan, Saving, StepGraph, Tier, Update, cost, graph_at
from elixir_compile.ir.cost import host_memory_s, update_bytes
from elixir_compile.ir.hardware import Cluster, preset, profile_for
from elixir_compile.ir.hardware.presets import ADAM_BYTES_PER_ELEMENT
from elixir_compile.search import Problem, plan
from elixir_compile.search.evaluator import Evaluator, leanest
from elixir_compile.search.formulation.flow_shop import longest_s
from elixir_compile.search.formulation.milp import Milp
from elixir_compile.search.planner import host_floor_bytes, is_feasible, largest_feasible
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.search.space.profiles import moves_at_use
from elixir_compile.step import verify
from tests.pure.ir.test_graph import bucket
from tests.pure.problems import disk_staging, needed_bytes, problem_of
from tests.pure.search.test_best import (
    assert_as_good_as_brute_force,
    instances,
    machine,
    random_answer,
    random_streams,
    tried_s,
)
from tests.pure.search.test_transfers import layers_of, mixed_layers, on, split
from tests.pure.strategies import Layer, chain, examples, symbolic

# ----------------------------------------------------------------------------------------------------------------------
# What `NoFeasiblePlan` names is enough and not a byte too many: on the device and the host, with a disk or without.


TIMEOUT_S = 60.0
"""No search may end early: on a busy machine the error would name more than the least."""


def short_problem(seed: int, num_ranks: int, *, disk: bool) -> Problem:
    """Return two to four random layers under a tight device budget, with nothing to spare on the host."""
    draw = random.Random(seed)
    layers = [
        Layer(
            module=f"h.{i}",
            params=((f"p{i}", draw.randint(100, 600)),),
            frozen=draw.random() < 0.15,
            act_numel=draw.choice([16, 64]),
        )
        for i in range(draw.randint(2, 4))
    ]
    savings = draw.choice([frozenset({Saving.KEEP}), frozenset({Saving.KEEP, Saving.RECOMPUTE})])
    problem = problem_of(chain(layers), machine(draw, num_ranks), hybrid=draw.random() < 0.8, savings=savings)
    low, high = needed_bytes(problem), plan(problem, "keep_all").prediction.device_peak_bytes
    budget_bytes = low + int((high - low) * draw.choice([0.0, 0.1, 0.3, 0.6]))
    host_base_bytes = draw.choice([0, 77])
    return replace(problem, budget_bytes=budget_bytes, host_budget_bytes=0, host_base_bytes=host_base_bytes, disk=disk)


def refusal(problem: Problem, planner: Planner) -> NoFeasiblePlan:
    with pytest.raises(NoFeasiblePlan) as caught:
        plan(problem, planner, TIMEOUT_S)
    return caught.value


def check_host(problem: Problem, planner: Planner) -> None:
    """Fail unless the error names the least host budget, and names it again one byte below."""
    try:
        plan(problem, planner, TIMEOUT_S)
    except NoFeasiblePlan as caught:
        error = caught
    else:
        assume(False)  # all of it fits on the device
    assert (error.memory, error.budget_bytes) == ("host", problem.host_base_bytes + problem.host_budget_bytes)
    needed = error.needed_bytes - problem.host_base_bytes
    made = plan(replace(problem, host_budget_bytes=needed), planner, TIMEOUT_S)
    verify(problem.graph, made)
    assert made.prediction.host_peak_bytes <= needed
    again = refusal(replace(problem, host_budget_bytes=needed - 1), planner)
    assert (again.memory, again.needed_bytes) == ("host", error.needed_bytes)


@given(
    st.integers(0, 10_000),
    st.sampled_from([1, 1, 2]),
    st.sampled_from([None, 0, 300, 2000]),
    st.sampled_from(["greedy", "greedy", "zero3_offload"]),
)
@settings(max_examples=12)
def test_the_named_host_bytes_are_enough_and_the_fewest(
    seed: int, num_ranks: int, staging_bytes: int | None, planner: Planner
) -> None:
    """`staging_bytes` are the buffers of the disk, if there is one."""
    problem = short_problem(seed, num_ranks, disk=staging_bytes is not None)
    if planner != "greedy":  # on two ranks the rule may need more of the device than the greedy planner
        problem = replace(problem, budget_bytes=max(problem.budget_bytes, needed_bytes(problem, planner)))
    with disk_staging(staging_bytes or 0):
        check_host(problem, planner)


@pytest.mark.parametrize("disk", [False, True])
def test_the_default_planner_finds_a_plan_with_the_named_host_bytes(disk: bool) -> None:
    for seed in range(2):
        problem = short_problem(seed, 1, disk=disk)
        with disk_staging(300):
            needed = refusal(problem, "milp").needed_bytes - problem.host_base_bytes
            made = plan(replace(problem, host_budget_bytes=needed), "milp", 0.3)
            assert made.prediction.host_peak_bytes <= needed
            refusal(replace(problem, host_budget_bytes=needed - 1), "milp")


def test_buffers_of_the_disk_that_are_larger_than_all_state_leave_state_in_memory() -> None:
    problem = short_problem(0, 1, disk=True)
    with disk_staging(1 << 30):
        with_disk = refusal(problem, "greedy")
    assert with_disk.needed_bytes == refusal(replace(problem, disk=False), "greedy").needed_bytes


def test_a_disk_is_suggested_only_if_it_gives_a_plan() -> None:
    problem = replace(short_problem(0, 1, disk=False), hybrid=True)
    with disk_staging(300):
        enough = refusal(replace(problem, disk=True), "greedy").needed_bytes - problem.host_base_bytes
        for host_bytes, may_help in ((enough, True), (enough - 1, False)):
            error = refusal(replace(problem, host_budget_bytes=host_bytes), "greedy")
            assert ("disk_path=<folder>" in str(error)) is may_help
            assert (error.disk_bytes > 0) is may_help


@given(st.integers(0, 10_000), st.sampled_from([1, 2]), st.booleans())
@settings(max_examples=12)
def test_the_named_device_bytes_are_enough_and_the_fewest(seed: int, num_ranks: int, disk: bool) -> None:
    problem = replace(short_problem(seed, num_ranks, disk=disk), host_budget_bytes=1 << 40, budget_bytes=1)
    error = refusal(problem, "milp")
    assume(error.memory == "device")
    made = plan(replace(problem, budget_bytes=error.needed_bytes), "milp", 0.1)
    assert made.prediction.device_peak_bytes <= error.needed_bytes
    less = refusal(replace(problem, budget_bytes=error.needed_bytes - 1), "milp")
    assert (less.memory, less.needed_bytes) == ("device", error.needed_bytes)


# ----------------------------------------------------------------------------------------------------------------------
# The bound from below for host bytes: never above what a placement that fits the device takes, and near the least.


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


# ----------------------------------------------------------------------------------------------------------------------
# What updates of the host and copies take of its memory: in the price, in the simulated step, in the bound.


A100 = preset("a100-80g")


def scarce(cluster: Cluster, share: float) -> Cluster:
    """A machine whose update and copies together have `share` of what each takes alone, as `measure` would have it."""
    node = cluster.nodes[0]
    host = replace(node.host, busy_update_elements_per_s=share * node.host.update_elements_per_s)
    h2d, d2h = (replace(link, busy_bytes_per_s=share * link.bytes_per_s) for link in (node.h2d, node.d2h))
    return Cluster(nodes=(replace(node, host=host, h2d=h2d, d2h=d2h),))


def test_the_rate_of_host_memory_is_measured_with_an_update_beside_copies_both_ways() -> None:
    """Alone the update moves 28 GB/s and each link 10; together 21 and 2 x 5, so memory carries 31 GB/s."""
    cluster = on(A100, host_per_s=1e9, link_bytes_per_s=10e9)
    node = cluster.nodes[0]
    host = replace(node.host, memory_bytes_per_s=20e9, busy_update_elements_per_s=0.75e9)
    links = {name: replace(node.h2d, busy_bytes_per_s=5e9) for name in ("h2d", "d2h")}
    measured = Cluster(nodes=(replace(node, host=host, **links),))
    assert host_memory_s(31_000_000_000, measured) == pytest.approx(1.0)
    not_measured = Cluster(nodes=(replace(node, host=replace(host, busy_update_elements_per_s=None)),))
    assert host_memory_s(28_000_000_000, not_measured) == pytest.approx(1.0)
    roomy = Cluster(nodes=(replace(node, host=replace(node.host, memory_bytes_per_s=100e9)),))
    assert host_memory_s(100_000_000_000, roomy) == pytest.approx(1.0)


def test_an_update_moves_each_byte_once_each_way() -> None:
    """Adam in fp32: gradient, parameter and two moments in, all but the gradient out."""
    assert update_bytes(bucket(400)) == ADAM_BYTES_PER_ELEMENT * 100
    assert update_bytes(bucket(400, trainable=False)) == 0


def test_a_step_is_no_shorter_than_its_bytes_take() -> None:
    """ZeRO-Offload with nothing to compute: 28 bytes of updates per parameter and 2 + 2 + 2 of copies, at 28 R bytes/s.

    The parameter and its gradient go to the host, and the parameter comes back.
    """
    problem = layers_of(8, 100_000_000, 8)
    free = replace(problem, cluster=on(A100, host_per_s=1e9, link_bytes_per_s=20e9))
    tight = replace(problem, cluster=scarce(free.cluster, 0.1))
    evaluator, levels, moves = split(tight)
    bytes_per_element = ADAM_BYTES_PER_ELEMENT + 6
    needed_s = 8 * 100_000_000 * bytes_per_element / (ADAM_BYTES_PER_ELEMENT * 1e9)
    played = evaluator.played(levels, moves)
    assert played.step_s == pytest.approx(needed_s, rel=1e-3)
    assert evaluator.at_use(levels) == moves
    alone = split(free)
    assert alone[0].played(alone[1], alone[2]).step_s < played.step_s


def mixed_problem(draw: random.Random, update: Update) -> Problem:
    """Layers, frozen and shared ones too, on one rank or two."""
    cluster = scarce(machine(draw, draw.choice([1, 1, 2]), draw.choice([0.8, 1.0])), draw.choice([0.1, 0.5]))
    graph = chain(list(mixed_layers(draw)))
    return problem_of(graph, cluster, update=update, bucket_min_bytes=1, bucket_max_bytes=800)


@pytest.fixture
def slow_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that carries a tenth of what it does: no machine is like that, but then it binds among tiny rates too."""
    rate = cost.host_memory_bytes_per_s
    monkeypatch.setattr(cost, "host_memory_bytes_per_s", lambda cluster: rate(cluster) / 10)


@pytest.mark.usefixtures("slow_memory")
@pytest.mark.parametrize("update", list(Update))
def test_the_bound_is_at_most_every_simulated_step(update: Update) -> None:
    num_binding = 0
    for seed in range(40):
        draw = random.Random(seed)
        evaluator = Evaluator(gather_facts(mixed_problem(draw, update)))
        milp = Milp(evaluator, reference_s=1.0)
        for _ in range(8):
            levels, modes = answer = random_answer(draw, evaluator)
            here = evaluator.at(modes)
            streamed = random_streams(draw, here, levels, 0.25)
            x = milp.vector(answer, streamed)
            lower_s = milp.lower_s(x)
            num_binding += any(longest_s(phase, x) >= lower_s for phase in milp.whole_step)
            for ahead in (0, 2):
                moves = moves_at_use(here.facts, levels, ahead)._replace(streamed=streamed)
                assert lower_s <= here.played(levels, moves).step_s * (1 + 1e-9), f"seed {seed}"
    assert num_binding > 10


@pytest.mark.usefixtures("slow_memory")
def test_the_solver_equals_brute_force_where_memory_is_slow() -> None:
    num_binding = 0
    for seed, problem in instances(4):
        tight = replace(problem, cluster=scarce(problem.cluster, 0.1))
        best_s = assert_as_good_as_brute_force(tight, f"seed {seed}")
        num_binding += best_s > tried_s(problem) * (1 + 1e-9)  # whose memory is that of a real machine
    assert num_binding


def test_the_certificate_says_that_host_memory_is_busy() -> None:
    problem = layers_of(4, 100_000_000, 8)
    cluster = scarce(on(A100, host_per_s=1e9, link_bytes_per_s=20e9, device_per_s=5e8), 0.05)
    made = plan(replace(problem, cluster=cluster, budget_bytes=1_300_000_000))
    assert any(home.optim is Tier.HOST for home in made.placements)
    assert made.bound_s is not None
    assert made.bound_s <= made.prediction.step_s
    assert "step: host memory is busy" in made.binding


# ----------------------------------------------------------------------------------------------------------------------
# The largest batch of any plan: just within the floor, one more is not.


CLUSTER = profile_for("cpu", memory_bytes=1 << 30, host_memory_bytes=1 << 30, name="1 x cpu")
GRAPH = symbolic(
    chain([Layer(module=f"l{n}", params=((f"w{n}", 1000),), frozen=False, act_numel=50) for n in range(4)])
)


def chain_problem(graph: StepGraph, budget_bytes: int, host_budget_bytes: int = 1 << 30) -> Problem:
    return Problem(
        name="chain",
        graph=graph,
        cluster=CLUSTER,
        budget_bytes=budget_bytes,
        host_budget_bytes=host_budget_bytes,
        params={s.of: Param(is_trained=True, state_nbytes=2 * s.nbytes) for s in graph.storages if s.of is not None},
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
        return chain_problem(graph_at(GRAPH, {"s0": batch}), budget_bytes, host_budget_bytes)

    batch = largest_feasible(problem_at)
    assert planned(problem_at(batch + 1)) is None
    assert batch == 0 or planned(problem_at(batch)) is not None


def test_each_value_is_asked_for_once_and_the_limit_holds() -> None:
    asked: list[int] = []

    def problem_at(batch: int) -> Problem:
        asked.append(batch)
        return chain_problem(graph_at(GRAPH, {"s0": batch}), 100_000)

    batch = largest_feasible(problem_at)
    assert batch > 16
    assert len(set(asked)) == len(asked) <= 2 * batch.bit_length()
    assert largest_feasible(problem_at, limit=5) == 5


@pytest.mark.parametrize("batch", [1, 7, 300])
def test_the_floor_is_the_smallest_budget_with_a_plan(batch: int) -> None:
    graph = graph_at(GRAPH, {"s0": batch})
    needed_bytes = leanest(Evaluator(gather_facts(chain_problem(graph, 1)))).floor_bytes
    assert is_feasible(chain_problem(graph, needed_bytes))
    assert not is_feasible(chain_problem(graph, needed_bytes - 1))
    found = plan(chain_problem(graph, needed_bytes), planner="greedy")
    assert found.prediction.device_peak_bytes == needed_bytes


def test_no_batch_fits_if_the_parameters_do_not() -> None:
    largest_param = max(s.nbytes for s in GRAPH.storages if s.kind is Kind.PARAM)
    assert largest_feasible(lambda batch: chain_problem(graph_at(GRAPH, {"s0": batch}), largest_param)) == 0


def test_sizes_that_are_constant_stop_at_the_limit() -> None:
    constant = chain_problem(GRAPH, 1 << 30)
    assert largest_feasible(lambda batch: constant, limit=1000) == 1000
