"""Updates of the host beside the next forward, and the share of them that is streamed to the device."""

import random
from dataclasses import replace

import pytest

from elixir_compile.base.errors import IllegalSchedule
from elixir_compile.base.units import GIB
from elixir_compile.ir import Tier, Update, plan_from_json, plan_to_json
from elixir_compile.ir.cost import MOST_STREAMED_ROOM_BYTES
from elixir_compile.ir.hardware import Cluster, HostProfile, Link, preset, profile_for
from elixir_compile.search import Problem, plan
from elixir_compile.search.evaluator import Evaluator
from elixir_compile.search.space.buckets import Level
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.search.space.profiles import Moves
from elixir_compile.step import verify
from elixir_compile.step.pipeline import hidden_update_share
from elixir_compile.step.seconds import simulate
from elixir_compile.tools.report.explain import explain
from tests.pure.search.test_best import machine
from tests.pure.search.test_planner import problem_of, state_of
from tests.pure.strategies import Layer, chain

NUM_LAYERS, NUMEL = 8, 100_000_000


def layers_of(num_layers: int, numel: int, act_numel: int, dtype: str = "bfloat16") -> Problem:
    """Layers of one bucket each, with 12 bytes of state per parameter: fp32 master and moments."""
    made = [
        Layer(module=f"h.{i}", params=((f"p{i}", numel),), frozen=False, act_numel=act_numel) for i in range(num_layers)
    ]
    graph = chain(made, dtype=dtype)
    state = {name: 6 * nbytes // 2 for name, nbytes in state_of(graph).items()}
    return problem_of(
        graph,
        budget_bytes=2**50,
        host_budget_bytes=2**50,
        state_nbytes=state,
        bucket_min_bytes=1,
        bucket_max_bytes=2 * numel,
    )


def on(cluster: Cluster, *, host_per_s: float, link_bytes_per_s: float, device_per_s: float = 1e12) -> Cluster:
    """The preset with these rates of update and links."""
    node = cluster.nodes[0]
    host: HostProfile = replace(node.host, update_elements_per_s=host_per_s)
    link: Link = replace(node.h2d, bytes_per_s=link_bytes_per_s, latency_s=0.0)
    device = replace(node.device, update_elements_per_s=device_per_s, launch_s=0.0)
    return Cluster(nodes=(replace(node, host=host, h2d=link, d2h=link, device=device),))


def split(problem: Problem) -> tuple[Evaluator, tuple[Level, ...], Moves]:
    """Parameters on the device, all state on the host: ZeRO-Offload."""
    evaluator = Evaluator(gather_facts(problem))
    levels = tuple(Level.STATE_OFF for _ in evaluator.facts.buckets)
    return evaluator, levels, evaluator.at_use(levels)


@pytest.mark.parametrize(("host_per_s", "link_bytes_per_s"), [(1e9, 50e9), (0.5e9, 25e9), (1e9, 12e9)])
def test_the_step_follows_the_closed_form_for_every_share(host_per_s: float, link_bytes_per_s: float) -> None:
    """With S = N (1 - x) parameters updated by the host and N x streamed, bucket by bucket, 12 bytes there and 12 back,
    both ways at once but for the first of p pieces on its way there and the last on its way back:

        T(x) / N = max{(1 - x)/R + (4 + 2)/B/n, 12 (1 + 1/p) x/B + x/U}      n buckets, compute nearly nothing

    or up to (4 + 2) (1 - x)/B more where a streamed piece waits on a link for buckets that the host updates. (1 - x)/R
    begins behind 4 bytes per parameter of the first bucket, its parameters and gradients, and ends before the last
    parameters' 2. The links take (2 + 10 x)/B to the device, and (4 + 8 x)/B back.
    """
    problem = layers_of(NUM_LAYERS, NUMEL, 8)
    problem = replace(problem, cluster=on(preset("a100-80g"), host_per_s=host_per_s, link_bytes_per_s=link_bytes_per_s))
    evaluator, levels, moves = split(problem)
    total, device_per_s, num_pieces = NUM_LAYERS * NUMEL, 1e12, 12 * NUMEL / MOST_STREAMED_ROOM_BYTES
    compute_s = evaluator.prices.run_s(0, evaluator.facts.num_run - 1)
    for count in range(NUM_LAYERS):
        x = count / NUM_LAYERS
        got_s = evaluator.step_s(levels, moves._replace(streamed=frozenset(range(count))))
        host_s = total * (1 - x) / host_per_s + 6 * NUMEL / link_bytes_per_s
        stream_s = total * x * (12 * (1 + 1 / num_pieces) / link_bytes_per_s + 1 / device_per_s)
        # What the forward and the backward compute can be under the host's part, or not.
        expected_s = max(host_s, stream_s)
        shared_s = total * 6 * (1 - x) / link_bytes_per_s if x else 0.0
        assert expected_s * 0.97 <= got_s <= expected_s * 1.03 + shared_s + compute_s
        assert got_s >= total * max(2 + 10 * x, 4 + 8 * x) / link_bytes_per_s


def test_a_slow_host_behind_a_fast_link_streams_and_a_fast_one_does_not() -> None:
    """Between them x is neither 0 nor 1: there the host's rest takes as long as the streams."""
    shares = []
    for host_per_s in (0.2e9, 1e9, 50e9):
        problem = layers_of(NUM_LAYERS, NUMEL, 8)
        problem = replace(problem, cluster=on(preset("gh200"), host_per_s=host_per_s, link_bytes_per_s=50e9))
        # Room for parameters, gradients and the state of one bucket: all other state lives on the host.
        problem = replace(problem, budget_bytes=NUM_LAYERS * NUMEL * 4 + NUMEL * 12 + 10**6)
        made = plan(problem, timeout_s=2.0)
        verify(problem.graph, made)
        assert plan_from_json(plan_to_json(made)) == made
        assert made.bound_s is not None
        assert made.bound_s <= made.prediction.step_s
        assert made.prediction.device_peak_bytes <= problem.budget_bytes
        on_host = [home for home in made.placements if home.optim is Tier.HOST]
        shares.append(sum(home.streamed for home in on_host) / len(on_host))
        told = next(decision for decision in made.decisions if decision.subject == "update")
        assert f"x = {shares[-1]:.2f}" in told.choice
        assert ("x = 0: " in str(told.rejected)) == (shares[-1] > 0)
        assert f"x = {shares[-1]:.2f}" in explain(made)
    assert shares[0] > shares[1] > shares[2] == 0.0
    assert shares[1] < 1.0


def test_nothing_is_streamed_if_device_and_host_are_one_memory() -> None:
    problem = replace(layers_of(NUM_LAYERS, 1000, 8), cluster=profile_for("cpu", GIB, GIB, "cpu"))
    kept = plan(problem, "keep_all").prediction.device_peak_bytes
    made = plan(replace(problem, budget_bytes=kept * 2 // 3), timeout_s=2.0)
    assert any(home.optim is Tier.HOST for home in made.placements)
    assert not any(home.streamed for home in made.placements)


def test_streamed_updates_in_force_stay_streamed_with_device_memory_for_one_bucket() -> None:
    problem = layers_of(NUM_LAYERS, NUMEL, 8)
    problem = replace(problem, cluster=on(preset("gh200"), host_per_s=0.2e9, link_bytes_per_s=50e9))
    problem = replace(problem, budget_bytes=NUM_LAYERS * NUMEL * 4 + NUMEL * 12 + 10**6)
    first = plan(problem, timeout_s=2.0)
    again = plan(replace(problem, buckets=first.buckets, placements=first.placements), timeout_s=2.0)
    assert any(home.streamed for home in first.placements)
    assert again.placements == first.placements
    assert again.prediction.step_s == pytest.approx(first.prediction.step_s)
    with pytest.raises(IllegalSchedule, match="above the budget"):
        verify(problem.graph, replace(first, budget_bytes=first.prediction.device_peak_bytes - 1))


def test_the_first_layers_keep_their_state_on_the_device() -> None:
    """Their gradients arrive last and they are needed first; the rest hides under the end of the backward and the
    forward."""
    problem = layers_of(NUM_LAYERS, 2_000_000, 200_000_000)
    cluster = on(preset("a100-40g"), host_per_s=2e9, link_bytes_per_s=20e9)
    problem = replace(problem, cluster=cluster, savings=frozenset())
    kept = plan(problem, "keep_all")
    bucket = kept.buckets[0]
    problem = replace(problem, budget_bytes=kept.prediction.device_peak_bytes - 3 * bucket.state_nbytes)
    made = plan(problem, timeout_s=2.0)
    on_host = [i for i, home in enumerate(made.placements) if home.optim is Tier.HOST]
    assert made.update is Update.ACROSS_STEPS
    assert len(on_host) >= 3
    assert min(on_host) > 0
    record = simulate(problem.graph, made, cluster)
    assert hidden_update_share(record) == pytest.approx(1.0)
    # After the backward the same placement exposes what the end of the backward does not cover.
    late = simulate(problem.graph, replace(made, update=Update.AFTER_BACKWARD), cluster)
    assert record.step_s < 0.95 * late.step_s
    assert 0.5 < hidden_update_share(late) < 0.9


def test_the_bound_holds_whenever_updates_run() -> None:
    """In the backward too, where it knows no more than what each lane has to do."""
    for seed in range(6):
        draw = random.Random(seed)
        layers = [Layer(module=f"h.{i}", params=((f"p{i}", 200),), frozen=False, act_numel=64) for i in range(5)]
        problem = problem_of(chain(layers), machine(draw, 1 + seed % 2, 0.8), update=list(Update)[seed % 3])
        evaluator = Evaluator(gather_facts(problem))
        peak_bytes = evaluator.memory.peak_bytes(evaluator.facts.start_levels, 0)
        problem = replace(problem, budget_bytes=int(peak_bytes * 0.7))
        made = plan(problem, timeout_s=0.4)
        verify(problem.graph, made)
        assert made.bound_s is not None
        evaluator = Evaluator(gather_facts(problem))
        for _ in range(20):
            levels = tuple(draw.choice(own) for own in evaluator.facts.choices)
            if evaluator.fits(levels, ahead=0):
                moves = evaluator.at_use(levels)
                streamed = frozenset(
                    i for i in evaluator.facts.streamable if levels[i].has_state_on_host and draw.random() < 0.5
                )
                streaming = moves._replace(streamed=streamed)
                assert made.bound_s <= evaluator.step_s(levels, moves)
                if int(evaluator.memory.live_bytes(levels, streaming).max()) <= problem.budget_bytes:
                    assert made.bound_s <= evaluator.step_s(levels, streaming)
