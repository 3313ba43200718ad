"""`search`: what every plan must be, whatever the graph and the budget."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.base.options import Planner
from elixir_compile.base.units import GIB
from elixir_compile.ir import (
    BucketRef,
    Kind,
    Phase,
    StepGraph,
    StorageId,
    Tier,
    Update,
    Verb,
    plan_from_json,
    plan_to_json,
)
from elixir_compile.ir.hardware import Cluster, profile_for
from elixir_compile.search import Problem, plan
from elixir_compile.search.evaluator import Evaluator
from elixir_compile.search.greedy import MAX_PLACEMENTS, num_placements
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.search.space.profiles import moves_at_use, residencies
from elixir_compile.search.transfers import raise_prefetch
from elixir_compile.step import keep_everything_timeline, plan_timeline, verify
from tests.pure.exhaustive import best_of_all
from tests.pure.strategies import Layer, chain, examples, step_graphs

CLUSTERS = {name: profile_for(name, GIB, GIB, name) for name in ("cpu", "cuda")}
PEER = replace(CLUSTERS["cuda"].h2d, bytes_per_s=1e11)
CLUSTERS["2 x cuda"] = Cluster(nodes=(replace(CLUSTERS["cuda"].nodes[0], num_devices=2, peer=PEER),))
MOVES = {Verb.GATHER, Verb.WAIT, Verb.RELEASE, Verb.OFFLOAD, Verb.PREFETCH}
QUICK_S = 0.5
"""What is tested of a plan holds of the best one found by then too; a few problems would take the whole 10 s."""
SLOWER = 1.15
"""Greedy is allowed this many times the step of the best placement; the worst of 300 random problems was 1.08."""


def state_of(graph: StepGraph) -> dict[StorageId, int]:
    """Adam's two moments for every parameter with a gradient."""
    return {s.of: 2 * s.nbytes for s in graph.storages if s.kind is Kind.GRAD and s.of is not None}


def problem_of(graph: StepGraph, cluster: Cluster = CLUSTERS["cuda"], hybrid: bool = True, **more: object) -> Problem:
    """Sizes of the strategy's graphs: buckets from 256 bytes to 2 KiB."""
    made = Problem(
        name="t",
        graph=graph,
        cluster=cluster,
        budget_bytes=GIB,
        host_budget_bytes=GIB,
        state_nbytes=state_of(graph),
        hybrid=hybrid,
        bucket_min_bytes=256,
        bucket_max_bytes=2048,
    )
    return replace(made, **more)


@st.composite
def problems(draw: st.DrawFn, training: bool | None = None, clusters: Sequence[str] = tuple(CLUSTERS)) -> Problem:
    graph, cluster = draw(step_graphs(training=training)), CLUSTERS[draw(st.sampled_from(clusters))]
    sums = draw(st.sampled_from([0, 1, 2]))
    return problem_of(
        graph,
        cluster,
        hybrid=draw(st.booleans()),
        sum_nbytes={name: nbytes * sums // 2 for name, nbytes in state_of(graph).items() if sums},
        base_bytes=draw(st.sampled_from([0, 300])),
    )


def needed_bytes(problem: Problem, planner: Planner = "greedy") -> int:
    """The smallest budget that would do, as the error names it."""
    with pytest.raises(NoFeasiblePlan) as caught:
        plan(replace(problem, budget_bytes=0), planner)
    return caught.value.needed_bytes


def between(problem: Problem, share: float) -> Problem:
    """The problem with a budget that is `share` of the way from the smallest that would do to keep-everything."""
    low, high = needed_bytes(problem), plan(problem).prediction.device_peak_bytes
    return replace(problem, budget_bytes=low + int((high - low) * share))


def chain_of(num_layers: int) -> StepGraph:
    layer = [Layer(module=f"h.{i}", params=((f"p{i}", 400),), frozen=False, act_numel=64) for i in range(num_layers)]
    return chain(layer)


SHARES = st.sampled_from([0.0, 0.3, 0.7, 0.95])


@given(problems(), SHARES)
@examples(30)
def test_a_plan_verifies_fits_and_predicts_its_peaks(problem: Problem, share: float) -> None:
    problem = between(problem, share)
    made = plan(problem, timeout_s=QUICK_S)
    verify(problem.graph, made)
    timeline = plan_timeline(problem.graph, made)
    assert timeline.peak.nbytes == made.prediction.device_peak_bytes <= problem.budget_bytes
    assert timeline.host_bytes == made.prediction.host_peak_bytes
    assert made.budget_bytes == problem.budget_bytes
    assert plan_from_json(plan_to_json(made)) == made


@given(problems(clusters=["cpu", "cuda"]))
@examples(20)
def test_nothing_moves_if_everything_fits(problem: Problem) -> None:
    made = plan(problem)
    assert {action.verb for action in made.schedules[0].actions}.isdisjoint(MOVES)
    assert {(home.param, home.optim) for home in made.placements} <= {(Tier.DEVICE, Tier.DEVICE)}
    phases = [region.phase for region in made.regions]
    assert phases == (
        [Phase.FORWARD, Phase.BACKWARD] if Phase.BACKWARD in {o.phase for o in problem.graph.ops} else [Phase.FORWARD]
    )
    keep = keep_everything_timeline(problem.graph, problem.state_nbytes).peak.nbytes + problem.base_bytes
    keep += sum(bucket.sum_nbytes for bucket in made.buckets)
    assert made.prediction.device_peak_bytes == keep
    assert made.prediction.host_peak_bytes == 0
    assert (made.prediction.exposed_s, made.prediction.hidden_share) == (0, 1)
    assert plan(replace(problem, budget_bytes=keep)).schedules == made.schedules


@given(problems())
@examples(30)
def test_the_error_names_the_smallest_budget_with_a_plan(problem: Problem) -> None:
    needed = needed_bytes(problem)
    made = plan(replace(problem, budget_bytes=needed), timeout_s=QUICK_S)
    assert made.prediction.device_peak_bytes == needed
    with pytest.raises(NoFeasiblePlan) as caught:
        plan(replace(problem, budget_bytes=needed - 1))
    error = caught.value
    assert (error.needed_bytes, error.budget_bytes, error.memory) == (needed, needed - 1, "device")
    assert sum(error.by_kind.values()) == needed
    assert error.op in {op.id for op in problem.graph.ops}


@given(problems(), st.lists(st.integers(0, 5), min_size=40, max_size=40), st.integers(0, 2))
@examples(30)
def test_two_independent_counts_of_memory_agree(problem: Problem, picks: Sequence[int], ahead: int) -> None:
    """The search counts segments; `plan_timeline` counts ops from the actions. Any levels, any modes, any distance."""
    assert_counts_agree(problem, picks, ahead)


def assert_counts_agree(problem: Problem, picks: Sequence[int], ahead: int) -> None:
    """Fail unless the search counts the bytes and seconds of the plan of the levels and modes `picks`, with gathers
    `ahead` windows early, as the plan's own prediction does."""
    from elixir_compile.search.evaluator import DraftPlan
    from elixir_compile.search.reasons import write_out

    base = Evaluator(gather_facts(problem))
    modes = tuple(pick % len(layer.modes) for layer, pick in zip(base.facts.layers, reversed(picks), strict=False))
    evaluator = base.at(modes)
    levels = tuple(own[pick % len(own)] for own, pick in zip(evaluator.facts.choices, picks, strict=False))
    moves = moves_at_use(evaluator.facts, levels, ahead)
    made = write_out(evaluator, DraftPlan(levels=levels, modes=modes, moves=moves, step_s=0.0, decisions=()))
    made = replace(made, budget_bytes=made.prediction.device_peak_bytes)
    verify(problem.graph, made)
    assert evaluator.memory.peak_bytes(levels, ahead) == made.prediction.device_peak_bytes
    assert evaluator.host_bytes(levels) == made.prediction.host_peak_bytes
    assert evaluator.step_s(levels, moves) == pytest.approx(made.prediction.step_s)


@given(problems(), SHARES)
@examples(20)
def test_prefetch_stays_within_the_budget(problem: Problem, share: float) -> None:
    problem = between(problem, share)
    evaluator = Evaluator(gather_facts(problem))
    levels = evaluator.facts.furthest_levels
    assume(evaluator.fits(levels, 0))
    moves = raise_prefetch(evaluator, levels)
    assert int(evaluator.memory.live_bytes(levels, moves).max()) <= problem.budget_bytes
    roomy = Evaluator(gather_facts(replace(problem, budget_bytes=GIB)))
    assert list(raise_prefetch(roomy, levels).residencies) == residencies(roomy.facts, levels, 8)


@given(problems(), SHARES)
@examples(12)
def test_greedy_is_near_the_best_placement(problem: Problem, share: float) -> None:
    problem = between(problem, share)
    evaluator = Evaluator(gather_facts(problem))
    # What fits stays, though something else could be faster. A quarter of what may be tried: half of all time went
    # into the few problems beyond.
    assume(
        num_placements(evaluator) <= MAX_PLACEMENTS // 4 and not evaluator.fits(evaluator.facts.start_levels, ahead=0)
    )
    best, made = best_of_all(problem), plan(problem)
    assert best is not None
    assert best.prediction.device_peak_bytes <= problem.budget_bytes
    assert best.prediction.step_s <= made.prediction.step_s * (1 + 1e-9)
    assert made.prediction.step_s <= best.prediction.step_s * SLOWER


def test_greedy_fills_the_budget_instead_of_moving_everything() -> None:
    graph = chain_of(12)
    keep = plan(problem_of(graph)).prediction.device_peak_bytes
    made = plan(problem_of(graph, budget_bytes=keep - 100), "greedy")
    moved = [home for home in made.placements if (home.param, home.optim) != (Tier.DEVICE, Tier.DEVICE)]
    assert len(moved) == 1
    assert made.decisions[0].subject == moved[0].bucket
    assert "device short by 100 B" in made.decisions[0].because


def test_more_memory_is_never_slower_if_nothing_overlaps() -> None:
    """Each byte moved then costs time: the step is compute plus every transfer."""
    problem = problem_of(chain_of(8), CLUSTERS["cpu"], hybrid=False)
    times_s = [plan(between(problem, share)).prediction.step_s for share in (0, 0.25, 0.5, 0.75, 1)]
    assert times_s == sorted(times_s, reverse=True)
    assert times_s[0] > times_s[-1]


def test_state_leaves_its_parameters_only_if_the_hybrid_optimizer_owns_them() -> None:
    for hybrid in (True, False):
        homes = set()
        for share in (0.3, 0.5, 0.7, 0.9):
            problem = between(problem_of(chain_of(8), CLUSTERS["cpu"], hybrid=hybrid), share)
            homes |= {(home.param, home.optim) for home in plan(problem).placements}
        assert ((Tier.DEVICE, Tier.HOST) in homes) == hybrid


def test_keep_all_moves_nothing_or_names_the_bytes_it_needs() -> None:
    problem = problem_of(chain_of(4))
    keep = plan(problem, "keep_all").prediction.device_peak_bytes
    assert plan(replace(problem, budget_bytes=keep), "keep_all").prediction.device_peak_bytes == keep
    with pytest.raises(NoFeasiblePlan) as caught:
        plan(replace(problem, budget_bytes=keep - 1), "keep_all")
    assert caught.value.needed_bytes == keep


def test_host_memory_is_a_hard_constraint_and_the_error_names_enough_bytes() -> None:
    problem = between(problem_of(chain_of(8)), 0.2)
    with pytest.raises(NoFeasiblePlan) as caught:
        plan(replace(problem, host_budget_bytes=0))
    assert caught.value.memory == "host"
    needed = caught.value.needed_bytes
    made = plan(replace(problem, host_budget_bytes=needed))
    assert 0 < made.prediction.host_peak_bytes <= needed


def crowded() -> Problem:
    """The activations that have to be offloaded need more than the host budget at any levels."""
    layers = [Layer(module=f"h.{i}", params=(("p", 1),), frozen=False, act_numel=1) for i in range(6)]
    return problem_of(chain(layers, dtype="bfloat16"), hybrid=False)


def outgrown() -> Problem:
    """The candidate with the smallest depth that fits the host needs more than the device budget."""
    layers = [
        Layer(module=f"h.{i}", params=(("p", 1),), frozen=False, act_numel=size) for i, size in enumerate((1, 1, 50))
    ]
    return problem_of(chain(layers, dtype="bfloat16"), CLUSTERS["cpu"], hybrid=False)


@given(problems(), SHARES, st.sampled_from([0.6, 0.8, 0.95]))
@example(outgrown(), 0.0, 0.8)
@example(crowded(), 0.7, 0.6)
@examples(20)
def test_greedy_finds_a_plan_on_a_small_host_whenever_there_is_one(problem: Problem, share: float, host: float) -> None:
    problem = between(problem, share)
    assume(len(gather_facts(problem).buckets) <= 3)
    roomy = plan(problem, timeout_s=QUICK_S).prediction.host_peak_bytes
    problem = replace(problem, host_budget_bytes=int(roomy * host))
    if best_of_all(problem) is None:
        with pytest.raises(NoFeasiblePlan, match="of host memory"):
            plan(problem, timeout_s=QUICK_S)
    else:
        assert plan(problem, timeout_s=QUICK_S).prediction.host_peak_bytes <= problem.host_budget_bytes


def test_placements_in_force_are_only_moved_further_off() -> None:
    """After the backward: across steps the host's updates cost nothing here, and all of them are moved at once."""
    problem = problem_of(chain_of(8), update=Update.AFTER_BACKWARD)
    first = plan(between(problem, 0.5))
    order = {(Tier.DEVICE, Tier.DEVICE): 0, (Tier.DEVICE, Tier.HOST): 1, (Tier.HOST, Tier.HOST): 2}
    for budget_bytes in (GIB, between(problem, 0.1).budget_bytes):
        again = replace(problem, budget_bytes=budget_bytes, buckets=first.buckets, placements=first.placements)
        second = plan(again)
        assert second.buckets == first.buckets
        pairs = list(zip(first.placements, second.placements, strict=True))
        assert all(order[a.param, a.optim] <= order[b.param, b.optim] and a.resident >= b.resident for a, b in pairs)
        assert (second.placements == first.placements) == (budget_bytes == GIB)


def test_a_tied_embedding_is_gathered_for_each_window() -> None:
    tied = [("embed", 400)]
    layers = [[("p1", 400)], [("p2", 400)], [("p3", 400)]]
    graph = chain(
        [
            Layer(module=f"h.{i}", params=tuple(p), frozen=False, act_numel=8)
            for i, p in enumerate([tied, *layers, tied])
        ]
    )
    problem = problem_of(graph)
    made = plan(replace(problem, budget_bytes=needed_bytes(problem)))
    embed = next(bucket.id for bucket in made.buckets if "embed" in bucket.params)
    gathers = [action.target for action in made.schedules[0].actions if action.verb is Verb.GATHER]
    assert gathers.count(BucketRef(embed)) == 4


def test_the_same_problem_gives_the_same_plan_in_every_process() -> None:
    script = (
        "from tests.pure.search.test_planner import *\n"
        "problem = between(problem_of(chain_of(10)), 0.4)\n"
        "print(plan(problem), flush=True)"
    )
    texts = set()
    for seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        texts.add(done.stdout.strip())
    assert texts == {str(plan(between(problem_of(chain_of(10)), 0.4)))}


def test_planning_leaves_torch_alone() -> None:
    script = (
        "import sys\nfrom tests.pure.search.test_planner import *\n"
        "problem = between(problem_of(chain_of(3)), 0.4)\n"
        "plan(problem, 'greedy'), best_of_all(problem)\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
