"""Several ranks: what they gather and reduce, collectives in one order, and ranks with other budgets."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elixir_compile.base.errors import InvalidPlan, NoFeasiblePlan
from elixir_compile.ir import (
    Bucket,
    Calls,
    Kind,
    Lane,
    Param,
    Plan,
    RegionId,
    Saving,
    Shards,
    StepGraph,
    StorageId,
    Tier,
    Update,
    Verb,
    plan_from_json,
    plan_to_json,
)
from elixir_compile.ir.cost import average_s, collective_s
from elixir_compile.ir.hardware import Cluster
from elixir_compile.ir.kinds import Batched
from elixir_compile.ir.share import Share, largest_remainder
from elixir_compile.search import Problem, plan
from elixir_compile.search.best import place_best
from elixir_compile.search.evaluator import DraftPlan, Evaluator, extent_of, leanest, uniform_modes
from elixir_compile.search.formulation.milp import Milp
from elixir_compile.search.greedy import place_exhaustively, place_greedily
from elixir_compile.search.joint.ranks import Homes, homes_in_step, plan_classes, plan_in_step, with_buckets_formed
from elixir_compile.search.joint.variants import is_pressed
from elixir_compile.search.reasons import write_out
from elixir_compile.search.schedule import Use, common_sequence, following, released_by, skeleton_of
from elixir_compile.search.space.buckets import Level, form_buckets
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.search.space.profiles import moves_at_use
from elixir_compile.search.transfers import raise_prefetch
from elixir_compile.step import liveness, plan_timeline, verify
from elixir_compile.step.divide import micro_batches_of
from elixir_compile.step.prices import prices
from elixir_compile.step.seconds import further_call, simulate
from elixir_compile.step.structure import collectives_of
from elixir_compile.tools.report.explain import explain
from tests.pure.memory_walk import walk_memory
from tests.pure.mixes import collectives
from tests.pure.problems import CLUSTERS, chain_of, needed_bytes, problem_of
from tests.pure.search.test_best import machine, random_answer
from tests.pure.strategies import ITEM_BYTES, Layer, chain, step_graphs

# ----------------------------------------------------------------------------------------------------------------------
# Several ranks: what is gathered, copied out, packed and reduced is counted three times over, never below what is
# there, and searched as well as on one rank.


def ranks(count: int) -> Cluster:
    return Cluster(nodes=(replace(CLUSTERS["2 x cuda"].nodes[0], num_devices=count),))


def cut(numel: int, num_ranks: int, largest: int) -> tuple[int, ...]:
    """`numel` elements, `largest` to each rank as long as there are any."""
    return tuple(max(0, min(largest, numel - rank * largest)) for rank in range(num_ranks))


STATES: dict[int, list[tuple[float, ...]]] = {
    1: [()],
    2: [(), (), (0.7, 0.3), (0.0, 1.0), (0.45, 0.55)],
    3: [(), (), (0.6, 0.3, 0.1), (0.1, 0.2, 0.7), (0.3, 0.3, 0.4)],
    4: [(), (), (0.0, 0.5, 0.5, 0.0), (0.1, 0.2, 0.3, 0.4)],
}
"""By number of ranks, the parts that they own, empty for equal ones."""


def shards_of(
    graph: StepGraph, num_ranks: int, draw: random.Random, state: tuple[float, ...] = ()
) -> dict[StorageId, tuple[int, ...]]:
    """Uneven shards of most parameters, some whole on each rank; what is left out is cut evenly."""
    found: dict[StorageId, tuple[int, ...]] = {}
    for storage in graph.storages:
        if storage.kind is Kind.PARAM and draw.random() < 0.8:
            numel = storage.nbytes // ITEM_BYTES[storage.dtype]
            uneven = cut(numel, num_ranks, draw.randint(-(-numel // num_ranks), numel))
            uneven = tuple(largest_remainder(numel, state)) if state else uneven
            found[storage.id] = (numel,) * num_ranks if draw.random() < 0.25 else uneven
    return found


def reduced_in_fp32(graph: StepGraph, num_ranks: int, draw: random.Random) -> dict[StorageId, str]:
    """Most trained parameters of 16 bits of several ranks."""
    trained = {storage.of for storage in graph.storages if storage.of is not None and storage.dtype == "bfloat16"}
    return {name: "float32" for name in sorted(trained) if num_ranks > 1 and draw.random() < 0.8}


@st.composite
def shared_problems(draw: st.DrawFn, fewest: int = 1) -> Problem:
    """Up to four ranks with uneven shards, some whole on each; buckets of one parameter and of several; gradients as
    they are, and reduced in fp32."""
    graph, num_ranks = draw(step_graphs(training=True)), draw(st.integers(fewest, 4))
    chance = random.Random(draw(st.integers(0, 2**32)))
    state = tuple(draw(st.sampled_from(STATES[num_ranks])))
    num_copies = 1 if state else draw(st.integers(1, 2))
    shards = shards_of(graph, num_ranks, chance, state)
    wide = reduced_in_fp32(graph, num_ranks, chance) if draw(st.booleans()) else {}
    hybrid, max_bytes = draw(st.booleans()), draw(st.sampled_from([256, 2048, 1 << 16]))
    more = {"shard_numels": shards, "reduce_dtype": wide, "bucket_max_bytes": max_bytes, "num_copies": num_copies}
    more["shares"] = tuple(Share(rank=rank, num_rows=1, state=part) for rank, part in enumerate(state))
    return problem_of(graph, ranks(num_ranks * num_copies), hybrid, **more)


def drawn(problem: Problem, seed: int, *, is_spread: bool) -> tuple[Evaluator, DraftPlan]:
    """Any levels, any modes, any moves."""
    draw = random.Random(seed)
    evaluator = Evaluator(gather_facts(problem))
    levels, modes = random_answer(draw, evaluator)
    evaluator = evaluator.at(modes)
    moves = (
        raise_prefetch(evaluator, levels) if is_spread else moves_at_use(evaluator.facts, levels, draw.randint(0, 2))
    )
    return evaluator, DraftPlan(levels=levels, moves=moves, step_s=0.0, modes=modes, decisions=())


@given(shared_problems(), st.integers(0, 2**32), st.booleans())
@settings(max_examples=60)
def test_three_counts_agree_with_uneven_shards(problem: Problem, seed: int, is_spread: bool) -> None:
    evaluator, draft = drawn(problem, seed, is_spread=is_spread)
    made = write_out(evaluator, draft)
    timeline, walk = plan_timeline(problem.graph, made), walk_memory(problem.graph, made)
    assert walk.live_bytes == timeline.live_bytes
    assert walk.host_bytes == timeline.host_bytes == evaluator.host_bytes(draft.levels)
    assert int(evaluator.memory.live_bytes(draft.levels, draft.moves).max()) == timeline.peak.nbytes
    made = replace(made, budget_bytes=timeline.peak.nbytes)
    verify(problem.graph, made)
    assert plan_from_json(plan_to_json(made)) == made


def real_peak_bytes(graph: StepGraph, made: Plan) -> int:
    """The most that is there at once, moments between ops included, by doing to a pile of bytes what a rank does."""
    lives, index = liveness(graph).lives, {op.id: at for at, op in enumerate(graph.ops)}
    spans = {region.id: range(index[region.first], index[region.last] + 1) for region in made.regions}
    buckets: dict[str, Bucket] = {bucket.id: bucket for bucket in made.buckets}
    grads: dict[str, list[StorageId]] = {
        name: [storage.id for storage in graph.storages if storage.of in bucket.params]
        for name, bucket in buckets.items()
    }
    in_buckets = {name for bucket in made.buckets for name in bucket.params} | {
        n for own in grads.values() for n in own
    }
    sizes = {storage.id: storage.nbytes for storage in graph.storages}
    pile: dict[tuple[str, str], int] = {}
    for bucket, home in zip(made.buckets, made.placements, strict=True):
        pile["home", bucket.id] = bucket.shard_nbytes() if home.param is Tier.DEVICE else 0
        pile["state", bucket.id] = bucket.shard_state_nbytes() if home.optim is Tier.DEVICE else 0
    most, after = 0, -1

    def look(others: float) -> None:
        nonlocal most
        rest = sum(sizes[n] for n, life in lives.items() if n not in in_buckets and life.first <= others <= life.last)
        most = max(most, rest + sum(pile.values()))

    for action in made.schedules[0].actions:
        name, between = str(action.target), after + 0.5
        if action.verb is Verb.RUN:
            for after in spans[RegionId(name)]:
                for owner, own in grads.items():
                    born = {("grad", n): sizes[n] for n in own if n in lives and lives[n].first == after}
                    pile |= born if owner in buckets else {}
                look(after)
            continue
        bucket = buckets[name.removesuffix(".grad")]
        flat, shard = bucket.flat_nbytes, bucket.flat_shard_nbytes
        ratio = 1 if bucket.reduce_dtype is None else 4 * bucket.numel // bucket.nbytes
        on_host = made.placement(bucket.id).param is not Tier.DEVICE
        whole = [("grad", n) for n in grads[bucket.id]]
        if action.verb is Verb.GATHER:
            pile["sent", name], pile["copy", name] = shard if on_host and bucket.is_sharded else 0, flat
        elif action.verb is Verb.WAIT and name in buckets:
            pile["sent", name], pile["out", name] = 0, flat if bucket.is_sharded and len(bucket.params) > 1 else 0
        elif action.verb is Verb.RELEASE:
            pile["copy", name] = 0
        elif action.verb is Verb.REDUCE and bucket.is_sharded:
            if len(bucket.params) > 1 or flat != bucket.nbytes or bucket.reduce_dtype is not None:
                pile["flat", name] = ratio * flat
                look(between)
                pile = {key: size for key, size in pile.items() if key not in whole}
            pile["reduced", name] = ratio * shard
        elif action.verb is Verb.REDUCE and bucket.reduce_dtype is not None:
            pile["reduced", name] = ratio * bucket.nbytes
            look(between)
            pile = {key: size for key, size in pile.items() if key not in whole}
        elif action.verb is Verb.REDUCE:
            pile["flat", name] = sum(pile.get(key, 0) for key in whole) if made.num_ranks * made.num_copies > 1 else 0
            look(between)
            pile["flat", name] = 0
        elif action.verb is Verb.WAIT:
            pile["flat", bucket.id] = 0
            pile["reduced", bucket.id] = 0 if on_host else pile["reduced", bucket.id]
            pile = {key: size for key, size in pile.items() if key not in whole}
        look(between)
        pile["out", name] = 0
    return most


@given(shared_problems(fewest=2), st.integers(0, 2**32), st.booleans())
@settings(max_examples=60)
def test_the_count_is_never_below_the_actual_bytes(problem: Problem, seed: int, is_spread: bool) -> None:
    evaluator, draft = drawn(replace(problem, savings=frozenset({Saving.KEEP})), seed, is_spread=is_spread)
    made = write_out(evaluator, draft)
    assert real_peak_bytes(problem.graph, made) <= made.prediction.device_peak_bytes


def pair_of_layers() -> tuple[Problem, Evaluator]:
    """Two layers of weights of 10 and 6 elements, 40 and 24 bytes, on 3 ranks: one bucket each. Each rank has 4 + 2
    elements of it: flat shards of 24 bytes, flat buffers of 72 for 64 of parameters."""
    weights = [(("a0", 10), ("c0", 6)), (("a1", 10), ("c1", 6))]
    graph = chain([Layer(module=f"h.{i}", params=own, frozen=False, act_numel=1) for i, own in enumerate(weights)])
    shards = {StorageId("a0"): (4, 4, 2), StorageId("a1"): (4, 4, 2)}
    problem = problem_of(graph, ranks(3), shard_numels=shards, bucket_min_bytes=8, bucket_max_bytes=64)
    return problem, Evaluator(gather_facts(problem))


def at_use(problem: Problem, evaluator: Evaluator, level: Level) -> Mapping[Kind, tuple[int, ...]]:
    """Live bytes by kind with both buckets at `level`."""
    levels = (level,) * 2
    moves = moves_at_use(evaluator.facts, levels)
    made = write_out(
        evaluator, DraftPlan(levels=levels, moves=moves, step_s=0.0, modes=evaluator.facts.modes, decisions=())
    )
    return plan_timeline(problem.graph, made).live_bytes_by_kind


def test_the_bytes_of_a_bucket_of_two_parameters_at_each_op() -> None:
    """Ops 0 and 9 read layer 0, ops 2 and 6 layer 1: 72 bytes are gathered and 72 copied out right before each.

    Ops 4 and 5 write the gradients of layer 1, 40 and 24 bytes; behind op 5 they are packed into 72, which counts at
    op 5: 64 + 72. They are under way, 72 and a shard of 24, while ops 6 to 8 produce those of layer 0 (at 7 and 8). The
    wait for the first frees its 72 before the second are packed, so op 8 has 72 + 24 + 64, no less than the moment
    behind it with 24 + 64 + 72. Then the first shard is there with 72 + 24, and at the update two shards.
    """
    problem, evaluator = pair_of_layers()
    assert [tuple(bucket.shard_numels) for bucket in evaluator.facts.buckets] == [(6, 6, 4)] * 2
    assert [(b.nbytes, b.flat_nbytes, b.flat_shard_nbytes) for b in evaluator.facts.buckets] == [(64, 72, 24)] * 2
    live = at_use(problem, evaluator, Level.ON_DEVICE_RELEASED)
    assert live[Kind.GATHERED] == (144, 0, 144, 0, 0, 0, 144, 0, 0, 144, 0)
    assert live[Kind.GRAD] == (0, 0, 0, 0, 40, 64 + 72, 96, 96 + 40, 96 + 64, 24 + 96, 48)
    assert live[Kind.PARAM] == (48,) * 11
    # Resident, layer 1's copy is there from op 2 to op 6, layer 0's from op 0 to op 9.
    live = at_use(problem, evaluator, Level.ON_DEVICE)
    assert live[Kind.GATHERED] == (144, 72, 72 + 144, 144, 144, 144, 144, 72, 72, 72, 0)
    # Shards from the host go where copies are made; reduced gradients leave with the flat buffer.
    live = at_use(problem, evaluator, Level.ALL_OFF_RELEASED)
    assert live[Kind.GATHERED] == (144, 0, 144, 0, 0, 0, 144, 0, 0, 144, 0)
    assert live[Kind.GRAD] == (0, 0, 0, 0, 40, 64 + 72, 96, 96 + 40, 96 + 64, 96, 0)


def test_gradients_of_16_bits_that_are_reduced_in_fp32() -> None:
    """Twelve elements of bf16 and six that are whole on each of 2 ranks: 24 bytes in shards of 12, and 12.

    Op 2 writes the gradient of 24 bytes, which is packed into 48 of fp32 behind it: both count at op 2. They are under
    way, 48 and a shard of 24, while op 3 writes that of 12, beside which 24 of fp32 come behind it. The buffer goes
    behind op 4, and at the update a shard of 24 and the 24 of what is whole are left.
    """
    graph = chain([Layer(module="h", params=(("w", 12), ("b", 6)), frozen=False, act_numel=1)], dtype="bfloat16")
    wide = {StorageId("w"): "float32", StorageId("b"): "float32"}
    problem = problem_of(graph, ranks(2), shard_numels={StorageId("b"): (6, 6)}, reduce_dtype=wide)
    evaluator = Evaluator(gather_facts(problem))
    weight, bias = evaluator.facts.buckets
    assert [weight.is_sharded, bias.is_sharded] == [True, False]
    assert [(b.nbytes, b.flat_grad_nbytes, b.reduced_nbytes) for b in (weight, bias)] == [(24, 48, 24), (12, 24, 24)]
    found = prices(graph, (weight, bias), problem.cluster)
    assert found.reduce_s[weight.id] == collective_s(48, problem.cluster) > found.gather_s[weight.id]
    live = at_use(problem, evaluator, Level.ON_DEVICE)
    assert [op.writes for op in graph.ops[2:5]] == [("w.grad",), ("b.grad",), ("d0",)]
    assert live[Kind.GRAD] == (0, 0, 24 + 48, 48 + 24 + 12 + 24, 48 + 24 + 24, 24 + 24)


def test_a_single_parameter_is_used_in_the_gathered_buffer() -> None:
    """20 elements on 2 ranks: 80 bytes, in shards of 40. Behind op 2 its gradient is reduced where it is, and waited
    for behind op 3, the last: whole and shard count from the moment behind op 2 on, 80 + 40. A shard from the host
    counts at the op that its gather is for."""
    graph = chain([Layer(module="h", params=(("w", 20),), frozen=False, act_numel=1)])
    problem = problem_of(graph, ranks(2))
    evaluator = Evaluator(gather_facts(problem))
    levels = (Level.ALL_OFF_RELEASED,)
    draft = DraftPlan(
        levels=levels, moves=evaluator.at_use(levels), step_s=0.0, modes=evaluator.facts.modes, decisions=()
    )
    live = plan_timeline(graph, write_out(evaluator, draft)).live_bytes_by_kind
    assert [op.reads for op in graph.ops[2:4]] == [("x", "tangent"), ("tangent", "w")]
    assert live[Kind.GATHERED] == (80 + 40, 0, 0, 80 + 40, 0)
    assert live[Kind.GRAD] == (0, 0, 80 + 40, 80 + 40, 0)


def test_the_given_shards_of_parameters_add_up_in_buckets() -> None:
    problem, evaluator = pair_of_layers()
    assert form_buckets(problem) == evaluator.facts.buckets
    bucket = evaluator.facts.buckets[0]
    assert [bucket.seen_by(rank).shard_nbytes() for rank in range(3)] == [24, 24, 16]
    assert [bucket.seen_by(rank).shard_state_nbytes() for rank in range(3)] == [48, 48, 32]
    given = {name for name, param in problem.params.items() if param.shard_numels}
    assert given == {"a0", "a1"}  # 6 elements are cut evenly
    found = prices(problem.graph, evaluator.facts.buckets, problem.cluster)
    assert found.gather_s[bucket.id] == found.reduce_s[bucket.id] == collective_s(72, problem.cluster)
    assert not found.average_s
    for numels in ((4, 4), (2, 4, 4)):
        with pytest.raises(InvalidPlan, match=r"a0 is in \d shards for 3 ranks"):
            replace(problem, params={StorageId("a0"): Param(shard_numels=Shards.of(numels))})


def test_two_copies_of_each_part_cost_an_all_reduce_of_it() -> None:
    """The layers of `pair_of_layers` on 2 groups of 3 ranks: 24 bytes of each bucket are averaged over the groups."""
    single, _ = pair_of_layers()
    problem = replace(single, cluster=ranks(6), num_copies=2)
    made, alone = plan(problem), plan(single)
    assert (made.num_ranks, made.num_copies, made.buckets) == (3, 2, alone.buckets)
    assert made.prediction.device_peak_bytes == alone.prediction.device_peak_bytes
    assert plan_from_json(plan_to_json(made)) == made
    price = Evaluator(gather_facts(problem)).prices
    each_s = average_s(24, problem.cluster, 2)
    assert dict(price.average_s) == {bucket.id: each_s for bucket in made.buckets}
    spans = simulate(problem.graph, made, problem.cluster).spans
    assert sum(span.end_s - span.start_s for span in spans if span.label.startswith("average")) == pytest.approx(
        2 * each_s
    )
    assert made.bound_s is not None
    assert made.bound_s <= made.prediction.step_s
    found = {work: (traffic.times, traffic.nbytes) for work, traffic in collectives(problem.graph, made).items()}
    own = {
        (Lane.REDUCE, f"{verb} {bucket.id}"): nbytes
        for bucket in made.buckets
        for verb, nbytes in (("reduce", 72), ("average", 24))
    }
    assert found == {work: (1, nbytes) for work, nbytes in own.items()} | {
        (Lane.GATHER, f"gather {bucket.id}"): (1, 72) for bucket in made.buckets
    }
    with pytest.raises(InvalidPlan, match="6 ranks cannot have 4 copies"):
        replace(problem, num_copies=4)


def test_resident_copies_are_live_between_forward_and_backward() -> None:
    problem, _ = pair_of_layers()
    made = plan(problem)
    assert all(home.resident for home in made.placements)
    saved_bytes = sum(storage.nbytes for storage in problem.graph.storages if storage.kind is Kind.SAVED)
    inputs_bytes = sum(storage.nbytes for storage in problem.graph.storages if storage.kind is Kind.INPUT)
    assert extent_of(problem.graph, made).left_bytes in (2 * 72 + saved_bytes, 2 * 72 + saved_bytes + inputs_bytes)


@given(shared_problems(fewest=2))
@settings(max_examples=15)
def test_the_error_names_a_budget_with_a_plan(problem: Problem) -> None:
    needed = needed_bytes(problem)
    assert plan(replace(problem, budget_bytes=needed), "greedy").prediction.device_peak_bytes == needed
    with pytest.raises(NoFeasiblePlan):
        plan(replace(problem, budget_bytes=needed - 1), "greedy")


def uneven_instance(seed: int) -> Problem:
    """Three layers, each a bucket of one or two parameters, under a budget between the least and keep-everything."""
    draw = random.Random(seed)
    num_ranks = 2 + seed % 2
    layers = [
        Layer(
            module=f"h.{i}",
            params=tuple((f"p{i}.{j}", draw.randint(50, 300)) for j in range(draw.randint(1, 2))),
            frozen=draw.random() < 0.15,
            act_numel=draw.choice([16, 64]),
        )
        for i in range(3)
    ]
    graph = chain(layers)
    shards = shards_of(graph, num_ranks, draw)
    problem = problem_of(graph, machine(draw, num_ranks), shard_numels=shards, savings=frozenset({Saving.KEEP}))
    # Streamed updates have no rows of memory, and take long to prove: `test_transfers` is about them.
    problem = replace(problem, update=Update.AFTER_BACKWARD)
    evaluator = Evaluator(gather_facts(problem))
    least, most = leanest(evaluator).floor_bytes, evaluator.memory.peak_bytes(evaluator.facts.start_levels, 0)
    return replace(problem, budget_bytes=least + int(max(0, most - least) * draw.choice([0.0, 0.3, 0.6, 0.8])))


def test_the_search_is_as_good_as_trying_everything() -> None:
    """Its rows count to the byte, so that no plan that fits is cut off; its plan is the best of all."""
    num_unpacked = 0
    for seed in range(6):
        problem = uneven_instance(seed)
        evaluator = Evaluator(gather_facts(problem))
        num_unpacked += sum(bucket.is_unpacked for bucket in evaluator.facts.buckets)
        milp, draw = Milp(evaluator, reference_s=1.0), random.Random(seed)
        for _ in range(10):
            answer = random_answer(draw, evaluator)
            exact_bytes = evaluator.at(answer.modes).memory.peak_bytes(answer.levels, 0)
            assert milp.peak_bytes(milp.vector(answer)) == exact_bytes
        first = next(draft for rung in uniform_modes(evaluator) if (draft := place_greedily(rung)) is not None)
        best, tried = place_best(evaluator, first, [], timeout_s=20.0, tolerance=0.0), place_exhaustively(evaluator)
        assert tried is not None
        assert best.step_s == pytest.approx(tried.step_s, rel=1e-9), f"seed {seed}"
    assert num_unpacked > 3


# ----------------------------------------------------------------------------------------------------------------------
# `search.in_step`: whatever a rank computes, its plan is legal for it, and its collectives come in one order.


TWO = CLUSTERS["2 x cuda"]


def all_homes(problem: Problem) -> list[tuple[tuple[Bucket, ...], Homes]]:
    buckets = form_buckets(problem)
    return [(buckets, homes) for homes in homes_in_step(problem, buckets)]


def question(*names: str, act_numel: int = 64) -> Problem:
    """A chain of layers with one parameter each."""
    layers = [Layer(module=name, params=((name, 400),), frozen=False, act_numel=act_numel) for name in names]
    return problem_of(chain(layers), TWO)


def listed_collectives(made: Plan) -> list[str]:
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
        assert listed_collectives(mine) == listed_collectives(other)
        gathers = [line.split()[1] for line in listed_collectives(mine) if line.startswith("gather")]
        assert gathers == ["b0", "b1", "b2"] * (1 if homes[0].resident else 2)


def test_a_bucket_that_no_op_reads_travels_all_the_same() -> None:
    """The second graph has `b` as a parameter that nothing reads and nothing trains."""
    ours = question("a", "b")
    graph = question("a").graph
    unread = next(storage for storage in ours.graph.storages if storage.id == "b")
    theirs = problem_of(replace(graph, storages=(*graph.storages, unread)), TWO)
    buckets, homes = all_homes(ours)[0]
    made = plan_in_step(theirs, buckets, homes, "")
    assert [line.split()[1] for line in listed_collectives(made) if line.startswith("gather")] == ["b0", "b1"]
    assert [line.split()[1] for line in listed_collectives(made) if line.startswith("reduce")] == ["b0"]


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


def test_the_prediction_counts_every_call_of_a_step() -> None:
    problem = question("a", "b", "c")
    buckets, homes = all_homes(problem)[0]
    several = plan_in_step(replace(problem, calls=Calls(num=3)), buckets, homes, "")
    more = further_call(problem.graph, several, problem.cluster, problem.measured)
    once = plan_in_step(problem, buckets, homes, "").prediction
    assert several.prediction.step_s == pytest.approx(once.step_s + 2 * more.step_s, rel=1e-12)
    assert more.step_s > 0


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


# ----------------------------------------------------------------------------------------------------------------------
# `search.schedule` and `search.joint.ranks`: ranks with other budgets have homes of their own, and their collectives
# come in one order.


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
    least = leanest(Evaluator(gather_facts(problem))).floor_bytes
    most = plan(problem, "keep_all").prediction.device_peak_bytes
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
    try:
        made = planned(problems)
    except NoFeasiblePlan as error:
        made = error
    if isinstance(made, NoFeasiblePlan):
        # A rank that releases what the other must release too may need a few more bytes than alone, as the error says.
        assert made.needed_bytes <= 1.01 * made.budget_bytes
        return
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
