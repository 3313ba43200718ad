"""What every plan must be, whatever the graph and the budget, what it says of itself, and gradients that stay in
it."""

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.base.units import GIB
from elixir_compile.ir import BucketRef, Kind, Phase, Tier, Update, Verb, plan_from_json, plan_to_json
from elixir_compile.ir.cost import add_s
from elixir_compile.search import Problem, plan
from elixir_compile.search.evaluator import DraftPlan, Evaluator
from elixir_compile.search.formulation.milp import Milp
from elixir_compile.search.greedy import MAX_PLACEMENTS, num_placements
from elixir_compile.search.reasons import decisions, unused_memory
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.search.space.profiles import moves_at_use, residencies
from elixir_compile.search.transfers import raise_prefetch
from elixir_compile.step import keep_everything_timeline, plan_timeline, verify
from elixir_compile.step.seconds import simulate
from tests.pure.problems import (
    CLUSTERS,
    best_of_all,
    between,
    chain_of,
    needed_bytes,
    problem_of,
    problems,
    tight_problem,
)
from tests.pure.search.test_best import instances, machine, random_answer
from tests.pure.search.test_transfers import mixed_layers
from tests.pure.strategies import Layer, chain, examples, with_facts

# ----------------------------------------------------------------------------------------------------------------------
# `search`: what every plan must be, whatever the graph and the budget.


MOVES = {Verb.GATHER, Verb.WAIT, Verb.RELEASE, Verb.OFFLOAD, Verb.PREFETCH}
QUICK_S = 0.5
"""What is tested of a plan holds of the best one found by then too; a few problems would take the whole 10 s."""
SLOWER = 1.15
"""Greedy is allowed this many times the step of the best placement; the worst of 300 random problems was 1.08."""


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
    state = {name: param.state_nbytes for name, param in problem.params.items()}
    keep = keep_everything_timeline(problem.graph, state).peak.nbytes + problem.base_bytes
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
        "from tests.pure.problems import *\n"
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
        "import sys\nfrom tests.pure.problems import *\n"
        "problem = between(problem_of(chain_of(3)), 0.4)\n"
        "plan(problem, 'greedy'), best_of_all(problem)\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


# ----------------------------------------------------------------------------------------------------------------------
# Gradients that stay through the next forward, as the planning half counts and prices them.


def accumulating(problem: Problem) -> Problem:
    """Return `problem` with a sum of gradients for each trained parameter."""
    grads = [storage for storage in problem.graph.storages if storage.kind is Kind.GRAD and storage.of is not None]
    sums = {grad.of: grad.nbytes for grad in grads if grad.of}
    return replace(problem, accumulates=True, params=with_facts(problem.params, sum_nbytes=sums))


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
    without_sums = with_facts(problem.params, sum_nbytes=dict.fromkeys(problem.params, 0))
    with pytest.raises(NoFeasiblePlan) as without:
        plan(replace(problem, budget_bytes=0, accumulates=False, params=without_sums))
    assert without.value.staying_bytes == 0
    assert "earlier backward" not in str(without.value)


# ----------------------------------------------------------------------------------------------------------------------
# `search.because`: what a decision says follows from what it saves.


def test_a_decision_names_the_bytes_saved_at_the_peak_or_elsewhere() -> None:
    num_at_peak = num_elsewhere = 0
    for seed, problem in instances(20):
        evaluator = Evaluator(gather_facts(problem))
        levels, modes = random_answer(random.Random(seed), evaluator)
        draft = DraftPlan(
            levels=levels, modes=modes, moves=evaluator.at(modes).at_use(levels), step_s=1.0, decisions=()
        )
        for decision in decisions(Milp(evaluator, reference_s=1.0), draft):
            assert " 0 B" not in decision.because
            if decision.saves_bytes > 0:
                num_at_peak += 1
                assert decision.because.startswith("the peak would be ")
                assert " higher with " in decision.because
            else:
                num_elsewhere += 1
                assert decision.because.startswith("the peak would be no higher with ")
                assert decision.because.endswith(" less would be free")
    assert num_at_peak > 0
    assert num_elsewhere > 0


# ----------------------------------------------------------------------------------------------------------------------
# A plan says that memory is unused while transfers are exposed, if its search ended with a gap.


def test_memory_unused_while_transfers_are_exposed_is_reported_with_the_gap() -> None:
    made = plan(tight_problem(), "zero3_offload")
    free = max(bucket.flat_nbytes for bucket in made.buckets)
    exposed = replace(made.prediction, exposed_s=0.2 * made.prediction.step_s)
    budget_bytes, bound_s = exposed.device_peak_bytes + free, 0.9 * exposed.step_s
    short = replace(made, prediction=exposed, budget_bytes=budget_bytes, bound_s=bound_s)
    (told,) = unused_memory(short)
    assert told.subject == "memory"
    assert "are unused while" in told.choice
    assert "a gap of 10.0%" in told.because
    assert not unused_memory(replace(short, prediction=replace(exposed, exposed_s=0.0)))
    assert not unused_memory(replace(short, bound_s=0.995 * exposed.step_s))
    assert not unused_memory(replace(short, budget_bytes=budget_bytes - 1))
    assert not unused_memory(replace(short, bound_s=None))


# ----------------------------------------------------------------------------------------------------------------------
# When buckets are updated: as asked, else across steps where the host does any.


TIGHT = tight_problem()


def test_the_host_updates_across_steps_and_the_device_after_the_backward() -> None:
    tight = plan(TIGHT, "greedy")
    assert any(placement.update is Tier.HOST for placement in tight.placements)
    assert tight.update is Update.ACROSS_STEPS
    assert plan(replace(TIGHT, budget_bytes=2**40), "greedy").update is Update.AFTER_BACKWARD


@pytest.mark.parametrize("update", list(Update))
def test_the_requested_update_time_is_planned(update: Update) -> None:
    assert plan(replace(TIGHT, update=update), "greedy").update is update


def test_only_the_hybrid_optimizer_has_a_choice() -> None:
    problem = replace(TIGHT, hybrid=False, update=Update.IN_BACKWARD)
    assert plan(problem, "greedy").update is Update.AFTER_BACKWARD
