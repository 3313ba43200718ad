"""What updates of the host and copies take of its memory: in the price, in the simulated step, in the bound."""

import random
from dataclasses import replace

import pytest

from elixir_compile.ir import Tier, Update, cost
from elixir_compile.ir.cost import host_memory_s, update_bytes
from elixir_compile.ir.hardware import Cluster, preset
from elixir_compile.ir.hardware.presets import ADAM_BYTES_PER_ELEMENT
from elixir_compile.search import Problem, plan
from elixir_compile.search.evaluator import Evaluator
from elixir_compile.search.formulation.flow_shop import longest_s
from elixir_compile.search.formulation.milp import Milp
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.search.space.profiles import moves_at_use
from tests.pure.cost.test_cost import bucket
from tests.pure.search.test_best import assert_as_good_as_brute_force, instances, machine, random_answer, tried_s
from tests.pure.search.test_crossing import mixed_layers
from tests.pure.search.test_planner import problem_of
from tests.pure.search.test_streaming import layers_of, on, split
from tests.pure.strategies import chain

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
            may_stream = [i for i in sorted(here.facts.streamable) if levels[i].has_state_on_host]
            streamed = frozenset(i for i in may_stream if draw.random() < 0.25)
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
