"""When transfers start: early, late, just in time or slice by slice, and which updates of the host are streamed."""

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elixir_compile.base.errors import IllegalSchedule
from elixir_compile.base.units import GIB
from elixir_compile.ir import Kind, Saving, StorageId, Tier, Update, plan_from_json, plan_to_json
from elixir_compile.ir.cost import MOST_STREAMED_ROOM_BYTES
from elixir_compile.ir.hardware import Cluster, HostProfile, Link, preset, profile_for
from elixir_compile.search import Problem, plan
from elixir_compile.search.evaluator import Candidate, Evaluator
from elixir_compile.search.formulation.flow_shop import longest_s
from elixir_compile.search.formulation.milp import SCALE, Milp
from elixir_compile.search.reasons import write_out
from elixir_compile.search.space.buckets import Level, placement_of
from elixir_compile.search.space.facts import Facts, gather_facts
from elixir_compile.search.space.profiles import Moves, Residency, moves_at_use
from elixir_compile.search.transfers import best_draft, just_in_time, raise_prefetch
from elixir_compile.step import plan_timeline, verify
from elixir_compile.step.bucket_bytes import kept_copy_bytes, kept_grad_bytes, resting
from elixir_compile.step.seconds import hidden_update_share, simulate
from elixir_compile.tools.report.explain import explain
from tests.pure.problems import problem_of, state_of
from tests.pure.search.test_best import instances, machine, random_answer, random_streams
from tests.pure.search.test_ranks_of_a_search import drawn, ranks, shared_problems
from tests.pure.strategies import Layer, chain

# ----------------------------------------------------------------------------------------------------------------------
# Updates of the host beside the next forward, and the share of them that is streamed to the device.


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
        made = plan(problem, timeout_s=0.3)
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
    made = plan(replace(problem, budget_bytes=kept * 2 // 3), timeout_s=0.3)
    assert any(home.optim is Tier.HOST for home in made.placements)
    assert not any(home.streamed for home in made.placements)


def test_streamed_updates_in_force_stay_streamed_with_device_memory_for_one_bucket() -> None:
    problem = layers_of(NUM_LAYERS, NUMEL, 8)
    problem = replace(problem, cluster=on(preset("gh200"), host_per_s=0.2e9, link_bytes_per_s=50e9))
    problem = replace(problem, budget_bytes=NUM_LAYERS * NUMEL * 4 + NUMEL * 12 + 10**6)
    first = plan(problem, timeout_s=0.3)
    again = plan(replace(problem, buckets=first.buckets, placements=first.placements), timeout_s=0.3)
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
    made = plan(problem, timeout_s=0.3)
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


# ----------------------------------------------------------------------------------------------------------------------
# The bytes of an earlier gather, of a later wait and of the MILP's columns z are those of the whole count.


@given(shared_problems(), st.integers(0, 2**32))
@settings(max_examples=25)
def test_an_earlier_gather_adds_the_same_bytes_up_to_its_wait(problem: Problem, seed: int) -> None:
    evaluator, draft = drawn(problem, seed, is_spread=False)
    memory, facts, moves = evaluator.memory, evaluator.facts, draft.moves
    before = memory.live_bytes(draft.levels, moves)
    for place, residency in enumerate(moves.residencies):
        gather = facts.phase_start(residency.first)
        earlier = list(moves.residencies)
        earlier[place] = residency._replace(gather=gather)
        more_bytes = memory.live_bytes(draft.levels, moves._replace(residencies=tuple(earlier))) - before
        wanted = np.zeros_like(more_bytes)
        wanted[memory.segment_of(gather) : memory.segment_of(residency.gather)] = memory.early_bytes(
            residency, draft.levels
        )
        assert more_bytes.tolist() == wanted.tolist()


@given(shared_problems(), st.integers(0, 2**32))
@settings(max_examples=25)
def test_a_later_wait_adds_the_same_bytes_to_each_op(problem: Problem, seed: int) -> None:
    evaluator, draft = drawn(problem, seed, is_spread=False)
    memory, moves, last = evaluator.memory, draft.moves, evaluator.facts.num_run - 1
    before = memory.live_bytes(draft.levels, moves)
    for bucket, end in moves.grad_ends.items():
        later = moves._replace(grad_ends={**moves.grad_ends, bucket: last})
        more_bytes = memory.live_bytes(draft.levels, later) - before
        first, until = memory.segment_behind(end), memory.segment_behind(last)
        assert (more_bytes[first:until] == memory.late_bytes(bucket, draft.levels[bucket])).all()
        # The wait right after the op that completes the gradients frees bytes at that op if it comes later.
        assert (np.delete(more_bytes, np.s_[first:until]) <= 0).all()


def row_bytes(milp: Milp, candidate: Candidate) -> Iterator[float]:
    """Yield the device bytes of `candidate` by each row of `add_leaving`, with columns z as small as their rows allow.

    The device budget must be 1 byte.
    """
    num_before = len(milp.constraints)
    milp.add_leaving(candidate)
    x = np.concatenate([milp.vector(candidate), np.zeros(len(milp.phases) + milp.num_extra)])
    for constraint in milp.constraints[num_before:]:
        if constraint.is_memory:
            yield 1 + float(constraint.values @ x[constraint.columns] - constraint.limit) / SCALE
        else:
            x[constraint.columns[-1]] = max(0.0, float(constraint.values[:-1] @ x[constraint.columns[:-1]]))


def fullest_bytes(evaluator: Evaluator, milp: Milp, levels: tuple[Level, ...]) -> list[int]:
    """Return the bytes of the four fullest segments, the fullest first."""
    return sorted(milp.memory.live_bytes(levels, evaluator.at_use(levels)).tolist(), reverse=True)[:4]


def evaluator_and_milp(problem: Problem) -> tuple[Evaluator, Milp]:
    """Return the evaluator and the MILP of `problem` under a device budget of 1 byte."""
    evaluator = Evaluator(gather_facts(replace(problem, budget_bytes=1)))
    return evaluator, Milp(evaluator, reference_s=1.0)


def mixed_bias() -> Problem:
    """Return a layer whose weight is sharded over two ranks and packed, and whose bias is whole on each of them."""
    graph = chain([Layer(module="h", params=(("w", 12), ("b", 6)), frozen=False, act_numel=1)], dtype="bfloat16")
    wide = {StorageId("w"): "float32", StorageId("b"): "float32"}
    return problem_of(graph, ranks(2), shard_numels={StorageId("b"): (6, 6)}, reduce_dtype=wide)


def test_the_constraints_of_leaving_gradients_are_exact_beside_a_bucket_that_stays() -> None:
    """The flat buffer of the weight's reduce stays until the backward ends, because the bias does not leave."""
    evaluator, milp = evaluator_and_milp(mixed_bias())
    levels = (Level.ON_DEVICE,) * 2
    wanted = fullest_bytes(evaluator, milp, levels)
    assert list(row_bytes(milp, Candidate(levels, evaluator.facts.modes))) == pytest.approx(wanted)


@given(shared_problems(), st.integers(0, 2**32))
@settings(max_examples=25)
def test_the_constraints_of_leaving_gradients_exclude_no_candidate_that_fits(problem: Problem, seed: int) -> None:
    assume(any(storage.kind is Kind.PARAM for storage in problem.graph.storages))
    evaluator, milp = evaluator_and_milp(problem)
    levels = drawn(problem, seed, is_spread=False)[1].levels
    wanted = fullest_bytes(evaluator, milp, levels)
    found = list(row_bytes(milp, Candidate(levels, evaluator.facts.modes)))
    assert all(nbytes <= exact + 1e-3 for nbytes, exact in zip(found, wanted, strict=True))
    if not any(level.has_param_on_host for level in levels) or problem.cluster.num_ranks == 1:
        assert found == pytest.approx(wanted)


@pytest.mark.parametrize("level", Level)
def test_the_gradients_that_a_backward_leaves_are_those_of_the_timeline(level: Level) -> None:
    problem = mixed_bias()
    evaluator = Evaluator(gather_facts(problem))
    levels = (level,) * 2
    draft = drawn(problem, 0, is_spread=False)[1]
    moves = evaluator.at_use(levels)
    made = write_out(evaluator, replace(draft, levels=levels, moves=moves, modes=evaluator.facts.modes))
    live = plan_timeline(problem.graph, made).live_bytes_by_kind
    homes = [(bucket, placement_of(bucket, level)) for bucket in made.buckets]
    left_bytes = sum(kept_grad_bytes(bucket, home) for bucket, home in homes)
    sums_bytes = sum(nbytes for home in homes for kind, nbytes in resting(*home) if kind is Kind.GRAD)
    assert live.get(Kind.GRAD, (0,))[-1] == left_bytes + sums_bytes
    between = evaluator.facts.num_forward
    # Copies of resident buckets are gathered before and waited for, so nothing but the flat buffers is there.
    copies_bytes = sum(kept_copy_bytes(*home) for home in homes)
    assert copies_bytes == (live[Kind.GATHERED][between] if not level.is_released and copies_bytes else 0)


# ----------------------------------------------------------------------------------------------------------------------
# Copies as late as their link allows: within the budget, and no step longer for it.


def test_it_keeps_the_budget_and_best_drafts_are_no_longer_than_early_ones() -> None:
    num_played = num_late = 0
    for seed, problem in instances(40, num_layers=8):
        evaluator, draw = Evaluator(gather_facts(problem)), random.Random(seed)
        for _ in range(6):
            levels, modes = random_answer(draw, evaluator)
            here = evaluator.at(modes)
            if not here.fits(levels, ahead=0):
                continue
            moves, early = just_in_time(here, levels), raise_prefetch(here, levels)
            assert int(here.memory.live_bytes(levels, moves).max()) <= problem.budget_bytes, f"seed {seed}"
            step_s = best_draft(here, levels).step_s
            assert step_s <= here.step_s(levels, early) * (1 + 1e-9), f"seed {seed}"
            num_played += 1
            num_late += sum(a.gather for a in moves.residencies) > sum(b.gather for b in early.residencies)
    assert num_played > 40
    assert num_late > 10


def test_with_all_the_memory_being_later_costs_nothing_on_one_rank() -> None:
    """Unless a frozen bucket comes from the host: the host updates when the last copy to the device has ended too."""
    num_compared = 0
    for seed, problem in instances(24, num_layers=8):
        if problem.cluster.num_ranks > 1:
            continue
        roomy = replace(problem, budget_bytes=GIB, update=Update.AFTER_BACKWARD, savings=frozenset({Saving.KEEP}))
        evaluator = Evaluator(gather_facts(roomy))
        levels, _ = random_answer(random.Random(seed), evaluator)
        placed = zip(evaluator.facts.buckets, levels, strict=True)
        if any(level.has_param_on_host and not bucket.trainable for bucket, level in placed):
            continue
        num_compared += 1
        late_s = evaluator.step_s(levels, just_in_time(evaluator, levels))
        early_s = evaluator.step_s(levels, raise_prefetch(evaluator, levels))
        assert late_s == pytest.approx(early_s, rel=1e-9), f"seed {seed}"
    assert num_compared > 3


def test_what_the_links_to_the_host_carry_waits_for_no_all_gather() -> None:
    """On two ranks the copies of activations and the gathers of what lives on the device are on links of their own."""
    num_ahead = num_shorter = 0
    for seed in range(120):
        draw = random.Random(seed)
        layers = [
            Layer(module=f"h.{i}", params=((f"p{i}", draw.randint(100, 600)),), frozen=False, act_numel=256)
            for i in range(6)
        ]
        problem = problem_of(chain(layers), machine(draw, num_ranks=2))
        roomy = Evaluator(gather_facts(replace(problem, savings=frozenset({Saving.KEEP, Saving.OFFLOAD}))))
        levels, modes = random_answer(draw, roomy)
        evaluator = roomy.at(modes)
        facts, moves = evaluator.facts, just_in_time(evaluator, levels)
        for before, after in itertools.pairwise(moves.residencies):
            is_gather = before.bucket < len(facts.buckets) and not levels[before.bucket].has_param_on_host
            is_later = facts.phase_start(before.first) == facts.phase_start(after.first)
            num_ahead += is_gather and is_later and after.bucket >= len(facts.buckets) and after.gather < before.gather
        num_shorter += evaluator.step_s(levels, moves) < evaluator.step_s(levels, in_one_line(facts, moves)) * (
            1 - 1e-9
        )
    assert num_ahead > 10
    assert num_shorter > 5


def in_one_line(facts: Facts, moves: Moves) -> Moves:
    """Return `moves` with no transfer issued before one that is needed earlier, whatever links they are on."""
    issued: dict[int, int] = {}
    placed: list[Residency] = []
    for stay in moves.residencies:
        phase = facts.phase_start(stay.first)
        issued[phase] = max(stay.gather, issued.get(phase, 0))
        placed.append(stay._replace(gather=issued[phase]))
    return moves._replace(residencies=tuple(placed))


# ----------------------------------------------------------------------------------------------------------------------
# No row that goes through update and forward is longer than a step that is played.


NUM_PROBLEMS, NUM_ANSWERS = 75, 12


def mixed_layers(draw: random.Random) -> Sequence[Layer]:
    """Three to six layers, some of them frozen, some with the parameters of an earlier one."""
    layers: list[Layer] = []
    for i in range(draw.randint(3, 6)):
        earlier = layers[draw.randrange(i)] if i and draw.random() < 0.25 else None
        params = earlier.params if earlier else ((f"p{i}", draw.choice([50, 200, 500])),)
        frozen = earlier.frozen if earlier else draw.random() < 0.25
        layers.append(Layer(module=f"h.{i}", params=params, frozen=frozen, act_numel=draw.choice([16, 64, 400])))
    return layers


def mixed_problem(draw: random.Random) -> Problem:
    """On one or two ranks, on a machine whose links may or may not overlap compute, updated across steps."""
    graph = chain(list(mixed_layers(draw)))
    cluster = machine(draw, draw.choice([1, 1, 2]), draw.choice([0.8, 1.0]))
    return problem_of(graph, cluster, update=Update.ACROSS_STEPS, bucket_min_bytes=1, bucket_max_bytes=800)


def test_no_row_is_longer_than_a_step_with_frozen_shared_and_streamed_buckets() -> None:
    """With gathers at their use and as early as eight windows: those of frozen buckets do not wait for the host, and
    second ones come when they like. Streamed updates behind leaving gradients, and copies behind streamed
    updates, are the longest of their phase at some answers."""
    num_late, num_behind = 0, [0, 0]
    for seed in range(NUM_PROBLEMS):
        draw = random.Random(seed)
        evaluator = Evaluator(gather_facts(mixed_problem(draw)))
        milp = Milp(evaluator, reference_s=1.0)
        for _ in range(NUM_ANSWERS):
            levels, modes = answer = random_answer(draw, evaluator)
            here = evaluator.at(modes)
            streamed = random_streams(draw, here, levels, 0.25)
            x = milp.vector(answer, streamed)
            lower_s = milp.lower_s(x)
            for number, shops in enumerate((milp.phases[0], milp.across)):
                if shops and len(milp.streams) and longest_s(shops[-1], x) > max(longest_s(s, x) for s in shops[:-1]):
                    num_behind[number] += 1
            for ahead in (0, 1, 8):
                moves = moves_at_use(here.facts, levels, ahead)._replace(streamed=streamed)
                played = here.played(levels, moves)
                num_late += played.stalled_s > 0
                assert lower_s <= played.step_s * (1 + 1e-9), f"seed {seed}"
    assert num_late > NUM_PROBLEMS
    assert min(num_behind) > 5


def test_copies_of_activations_and_the_queue_of_collectives_bound_a_step_on_several_ranks() -> None:
    """Paths without collectives, with what leaves and comes back, and paths of collectives without compute: no longer
    than a step, and often the longest."""
    num_longest: Counter[str] = Counter()
    for seed in range(20):
        draw = random.Random(seed)
        layers = [
            Layer(module=f"h.{i}", params=((f"p{i}", draw.randint(100, 600)),), frozen=False, act_numel=1024)
            for i in range(6)
        ]
        savings = frozenset({Saving.KEEP, Saving.OFFLOAD})
        problem = problem_of(chain(layers), machine(draw, draw.choice([2, 3])), savings=savings)
        evaluator = Evaluator(gather_facts(problem))
        milp = Milp(evaluator, reference_s=1.0)
        for _ in range(10):
            levels, modes = answer = random_answer(draw, evaluator)
            here, x = evaluator.at(modes), milp.vector(answer)
            played_s = [here.step_s(levels, moves_at_use(here.facts, levels, ahead)) for ahead in (0, 1, 8)]
            assert milp.lower_s(x) <= min(played_s) * (1 + 1e-9), f"seed {seed}"
            run = [side for side in milp.phases if len(side) > 1 and side[0].name in ("forward", "backward")]
            for phase, copied, *queue in run:
                num_longest["copies"] += longest_s(copied, x) > longest_s(phase, x)
                others_s = max(longest_s(phase, x), longest_s(copied, x))
                num_longest["queue"] += any(longest_s(own, x) > others_s for own in queue)
    assert min(num_longest.values()) > 20, num_longest
