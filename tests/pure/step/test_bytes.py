"""The bytes of the works of a schedule: the timeline against a second count, staging, a formula of sizes, and slices
that pass the link."""

import dataclasses
import random
import time
from dataclasses import replace

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_compile.base.errors import IllegalSchedule, InvalidPlan, NoFeasiblePlan
from elixir_compile.base.units import MIB
from elixir_compile.ir import (
    Activations,
    Bucket,
    BucketId,
    GroupId,
    Kind,
    OpId,
    Placement,
    Plan,
    Saving,
    Shards,
    StepGraph,
    StorageId,
    Tier,
    Verb,
    WholeUpdate,
    graph_at,
    sizes,
)
from elixir_compile.ir.cost import disk_staging_bytes, gather_staging_bytes, rings_bytes
from elixir_compile.search import Problem, plan
from elixir_compile.search.evaluator import DraftPlan, Evaluator
from elixir_compile.search.reasons import write_out
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.search.space.profiles import moves_at_use
from elixir_compile.search.transfers import raise_prefetch
from elixir_compile.step import fused, keep_everything_timeline, peak_formula, plan_at, plan_timeline, resized, verify
from elixir_compile.step.as_run import as_run, laps_at
from elixir_compile.step.bucket_bytes import bucket_host_bytes, sum_host_bytes
from elixir_compile.step.divide import crossings, divided, slices_of
from elixir_compile.step.seconds import simulate
from elixir_compile.step.timeline import live_storages
from tests.pure.memory_walk import walk_memory
from tests.pure.mixes import activations_of, group, mixed_graphs
from tests.pure.plans import Trip, bucket_of, make_plan, mixed_plans, planned_graphs, plans_of, with_actions
from tests.pure.problems import CLUSTERS, problem_of, problems, tight_problem
from tests.pure.steps import GELU, parse_graph
from tests.pure.strategies import PATTERNS, Layer, chain, symbolic, symbolic_graphs

# ----------------------------------------------------------------------------------------------------------------------
# Live bytes at each op of two steps worked out by hand, and what they are if everything is kept.


GRAPH = chain([Layer(module=f"l{n}", params=((f"w{n}", 10),), frozen=False, act_numel=1) for n in range(2)])
BUCKETS = [bucket_of(GRAPH, f"b{n}", [s for s in GRAPH.storages if s.id == f"w{n}"]) for n in range(2)]


def test_everything_kept() -> None:
    """Two parameters of 40 bytes with 80 of state each; activations of 4 bytes. The ops and lives are those of
    `test_windows.test_a_two_layer_step`: t0 at 0-1, t1 at 2-3, out at 3, d1 at 5-7, d0 at 7; s0 is saved at 1-4."""
    timeline = keep_everything_timeline(GRAPH, {StorageId("w0"): 80, StorageId("w1"): 80})
    assert timeline.ops == tuple(op.id for op in GRAPH.ops)
    assert timeline.live_bytes_by_kind == {
        Kind.PARAM: (80,) * 9,
        Kind.GRAD: (0, 0, 0, 0, 40, 40, 80, 80, 80),
        Kind.MOMENT: (160,) * 9,
        Kind.SAVED: (0, 4, 4, 4, 4, 0, 0, 0, 0),
        Kind.TEMP: (4, 4, 4, 8, 0, 4, 4, 8, 0),
        Kind.INPUT: (8,) * 9,
    }
    assert timeline.live_bytes == (252, 256, 256, 260, 292, 292, 332, 336, 328)
    assert (timeline.peak.op, timeline.peak.nbytes, timeline.host_bytes) == ("bwd.mm_7", 336, 0)
    assert timeline.peak.by_kind == {Kind.PARAM: 80, Kind.GRAD: 80, Kind.MOMENT: 160, Kind.TEMP: 8, Kind.INPUT: 8}


def test_timeline_with_a_bucket_on_the_host() -> None:
    """b0 (w0) lives on the host: its copy is there for op 0 and op 7, its gradient from op 6 to op 7, after which its
    offload is waited for. Host: 40 of parameters, 40 of gradient, 80 of state."""
    timeline = plan_timeline(GRAPH, make_plan(GRAPH, BUCKETS, ["host", "device"]))
    assert timeline.live_bytes_by_kind[Kind.PARAM] == (40,) * 9
    assert timeline.live_bytes_by_kind[Kind.GATHERED] == (40, 0, 0, 0, 0, 0, 0, 40, 0)
    assert timeline.live_bytes_by_kind[Kind.GRAD] == (0, 0, 0, 0, 40, 40, 80, 80, 40)
    assert timeline.live_bytes_by_kind[Kind.MOMENT] == (80,) * 9
    assert timeline.host_bytes == 160


def test_a_resident_copy_stays_from_first_to_last_use() -> None:
    timeline = plan_timeline(GRAPH, make_plan(GRAPH, BUCKETS, ["device", "resident"]))
    assert timeline.live_bytes_by_kind[Kind.GATHERED] == (0, 0, 40, 40, 40, 40, 0, 0, 0)


def test_external_usage_counts_at_every_op() -> None:
    plan = make_plan(GRAPH, BUCKETS, ["host", "device"])
    alone, held = plan_timeline(GRAPH, plan), plan_timeline(GRAPH, dataclasses.replace(plan, base_bytes=1000))
    assert [after - before for before, after in zip(alone.live_bytes, held.live_bytes, strict=True)] == [1000] * 9
    assert held.peak.by_kind[Kind.BUFFER] == 1000
    assert held.host_bytes == alone.host_bytes


def test_host_bytes_by_placement() -> None:
    """State on the host alone: 80 of state and 2 x 40 of staging; a frozen bucket on the host: its 40 bytes."""
    assert plan_timeline(GRAPH, make_plan(GRAPH, BUCKETS, ["split", "device"])).host_bytes == 160
    frozen = chain([Layer(module="l", params=(("w", 10),), frozen=True, act_numel=1)])
    bucket = bucket_of(frozen, "b0", [s for s in frozen.storages if s.id == "w"])
    assert plan_timeline(frozen, make_plan(frozen, [bucket], ["host"])).host_bytes == 40


GELU_BUCKETS = [bucket_of(GELU, "b0", [storage for storage in GELU.storages if storage.kind is Kind.PARAM])]


def test_offloaded_activations_are_away_between_two_ops() -> None:
    """`h` has 16 bytes and is there for ops 0 to 5, `g` 16 for ops 1 to 3. Offloaded after op 1 and gone after op 2,
    `h` comes back before op 5, which reads it; gone at once and prefetched before op 4, it is away for two ops again.
    The host holds its slab."""
    away = (group(GELU, "acts", Saving.OFFLOAD, "h"),)
    late = Trip(leave=2, gone=3, back=5, need=5)
    timeline = plan_timeline(GELU, make_plan(GELU, GELU_BUCKETS, ["device"], away, {away[0].id: late}))
    assert timeline.live_bytes_by_kind[Kind.SAVED] == (16, 32, 32, 16, 0, 16, 0, 0)
    assert timeline.host_bytes == 16
    early = Trip(leave=2, gone=2, back=4, need=5)
    timeline = plan_timeline(GELU, make_plan(GELU, GELU_BUCKETS, ["device"], away, {away[0].id: early}))
    assert timeline.live_bytes_by_kind[Kind.SAVED] == (16, 32, 16, 16, 16, 16, 0, 0)


def test_recomputed_activations_are_live_from_their_repeated_op() -> None:
    """`h` and `g` go after ops 1 and 2. `re_mm` and `re_gelu` are ops 3 and 4: h is there again at 3 to 7, g at 4 and
    5. Beside them the output has 4 bytes at op 2, the tangent 4 at 5 and 6, `d` 16 at 6 and 7, `e` 16 at 7 and 8."""
    again = (group(GELU, "acts", Saving.RECOMPUTE, "h", "g"),)
    made = make_plan(GELU, GELU_BUCKETS, ["device"], again)
    timeline = plan_timeline(GELU, made)
    assert timeline.ops[3:5] == ("bwd.re_mm", "bwd.re_gelu")
    assert Kind.SAVED not in timeline.live_bytes_by_kind
    assert timeline.live_bytes_by_kind[Kind.TEMP] == (16, 32, 20, 16, 32, 36, 36, 48, 16, 0)
    for op, nbytes in zip(timeline.ops, timeline.live_bytes_by_kind[Kind.TEMP], strict=True):
        live = live_storages(GELU, made, op)
        assert sum(storage.nbytes for storage in live if storage.kind is Kind.TEMP) == nbytes
        assert [storage.nbytes for storage in live] == sorted((storage.nbytes for storage in live), reverse=True)
    assert timeline.host_bytes == 0


@given(mixed_graphs())
def test_with_everything_kept_the_fused_step_is_live(graph: StepGraph) -> None:
    assert keep_everything_timeline(graph, {}) == keep_everything_timeline(fused(graph), {})
    total = sum(storage.nbytes for storage in fused(graph).storages)
    assert max(keep_everything_timeline(graph, {}).live_bytes) <= total


@given(planned_graphs())
def test_a_plan_with_everything_on_the_device_keeps_everything(planned: tuple[StepGraph, Plan]) -> None:
    graph, plan = planned
    kept = plan_timeline(graph, make_plan(graph, plan.buckets, ["device"] * len(plan.buckets)))
    state = {bucket.params[0]: bucket.state_nbytes for bucket in plan.buckets}
    assert kept == keep_everything_timeline(graph, state)
    assert plan_timeline(graph, plan).peak.nbytes <= kept.peak.nbytes + sum(b.nbytes for b in plan.buckets)


def test_a_large_step_is_counted_quickly() -> None:
    """1,250 layers with a parameter each: 5,000 ops, four layers to a bucket. 50 ms is the promise, of which a slow
    machine gets tenfold; counting each bucket at each op would take seconds."""
    layers = [Layer(module=f"l{n}", params=((f"w{n}", 10),), frozen=False, act_numel=1) for n in range(1250)]
    graph = chain(layers)
    assert len(graph.ops) == 5001
    params = [storage for storage in graph.storages if storage.kind is Kind.PARAM]
    buckets = [bucket_of(graph, f"b{n}", params[n : n + 4]) for n in range(0, 1250, 4)]
    plan = make_plan(graph, buckets, ["host"] * len(buckets))
    start_s = time.process_time()
    plan_timeline(graph, plan)
    assert time.process_time() - start_s < 0.5


# ----------------------------------------------------------------------------------------------------------------------
# The bytes of `plan_timeline` equal those of a second, independent count, which carries the step out.


@given(planned_graphs() | mixed_plans())
def test_two_independent_counts_agree_at_every_op(planned: tuple[StepGraph, Plan]) -> None:
    graph, plan = planned
    timeline, walk = plan_timeline(graph, plan), walk_memory(graph, plan)
    assert walk.live_bytes == timeline.live_bytes
    assert walk.host_bytes == timeline.host_bytes
    assert walk.peak_bytes == timeline.peak.nbytes


@given(problems() | mixed_graphs().map(problem_of), st.integers(0, 2**32), st.booleans())
@settings(max_examples=60)
def test_both_counts_agree_for_any_levels_modes_and_moves(problem: Problem, seed: int, is_spread: bool) -> None:
    """On one rank and on two, transfers at their use and as far out as memory allows; every such plan is legal."""
    draw = random.Random(seed)
    evaluator = Evaluator(gather_facts(problem))
    modes = tuple(draw.randrange(len(layer.modes)) for layer in evaluator.facts.layers)
    evaluator = evaluator.at(modes)
    levels = tuple(draw.choice(own) for own in evaluator.facts.choices)
    moves = (
        raise_prefetch(evaluator, levels) if is_spread else moves_at_use(evaluator.facts, levels, draw.randint(0, 2))
    )
    made = write_out(evaluator, DraftPlan(levels=levels, moves=moves, step_s=0.0, modes=modes, decisions=()))
    walk = walk_memory(problem.graph, made)
    assert walk.live_bytes == plan_timeline(problem.graph, made).live_bytes
    assert walk.host_bytes == made.prediction.host_peak_bytes
    verify(problem.graph, replace(made, budget_bytes=walk.peak_bytes))


def test_a_copy_that_is_never_released_counts_to_the_end() -> None:
    problem = tight_problem()
    made = plan(problem)
    leaking = with_actions(made, (action for action in made.schedules[0].actions if action.verb is not Verb.RELEASE))
    assert walk_memory(problem.graph, leaking).peak_bytes > walk_memory(problem.graph, made).peak_bytes
    assert walk_memory(problem.graph, made).peak_bytes == made.prediction.device_peak_bytes


# ----------------------------------------------------------------------------------------------------------------------
# `ir.cost`: the buffers of the disk, and sums of gradients.


BUCKET = Bucket(
    id=BucketId("b0"),
    params=(StorageId("w"),),
    numel=1000,
    nbytes=4000,
    state_nbytes=8000,
    dtype="float32",
    trainable=True,
    shard_numels=Shards.of((1000,)),
)


@pytest.mark.parametrize(("width", "buffer_mib"), [(8, 16), (12, 16), (10, 20), (14, 28), (4, 16)])
def test_three_buffers_and_a_page(width: int, buffer_mib: int) -> None:
    """Adam in fp32; with a float16 parameter's master; with a bfloat16 parameter's low half; AMSGrad of it; SGD."""
    bucket = replace(BUCKET, state_nbytes=width * 1000)
    assert disk_staging_bytes([bucket, BUCKET]) == (3 * buffer_mib + 2) * MIB


@pytest.mark.parametrize(("itemsize", "width", "buffer_mib"), [(4, 8, 16), (4, 4, 16), (2, 12, 28), (2, 10, 24)])
def test_trained_parameters_pass_through_the_buffers_of_their_state(itemsize: int, width: int, buffer_mib: int) -> None:
    """Adam in fp32; SGD; with a float16 parameter's master; with a bfloat16 parameter's low half."""
    bucket = replace(BUCKET, nbytes=itemsize * 1000, state_nbytes=width * 1000)
    assert disk_staging_bytes([bucket], [bucket.id]) == (3 * buffer_mib + 2) * MIB
    assert rings_bytes([bucket], [bucket.id]) == (3 * buffer_mib + 2 + 4 * 16 + 2) * MIB


@pytest.mark.parametrize(("most_mib", "buffer_mib"), [(1, 16), (21, 24), (24, 24)])
def test_buffers_hold_the_state_of_the_largest_parameter_updated_whole(most_mib: int, buffer_mib: int) -> None:
    """The optimizer of parameters whose elements are updated alone is another, with buffers of its own."""
    whole = WholeUpdate(flops=0, moved_bytes=0, num_kernels=1, most_nbytes=1, most_state_nbytes=most_mib * MIB)
    bucket = replace(BUCKET, state_nbytes=100 * MIB, whole_update=whole)
    assert disk_staging_bytes([bucket]) == (3 * buffer_mib + 2) * MIB
    assert disk_staging_bytes([bucket, BUCKET]) == (3 * buffer_mib + 2 + 3 * 16 + 2) * MIB


@pytest.mark.parametrize(
    ("param", "optim", "wanted_bytes"),
    [(Tier.DEVICE, Tier.DEVICE, 0), (Tier.DEVICE, Tier.HOST, 4000), (Tier.HOST, Tier.HOST, 6000)],
)
def test_sums_of_gradients(param: Tier, optim: Tier, wanted_bytes: int) -> None:
    """1000 elements of 2 bytes: sums on their way to the update; sums where they are, and a second gradient."""
    bucket = replace(BUCKET, dtype="bfloat16", nbytes=2000, sum_nbytes=4000)
    home = Placement(bucket=bucket.id, param=param, optim=optim, resident=True)
    assert sum_host_bytes(bucket, param, optim) == wanted_bytes
    without = replace(bucket, sum_nbytes=0)
    assert bucket_host_bytes(bucket, home) - bucket_host_bytes(without, home) == wanted_bytes
    assert sum_host_bytes(without, param, optim) == 0


@pytest.mark.parametrize(
    ("param", "optim", "wanted_bytes"),
    [(Tier.DEVICE, Tier.DEVICE, 0), (Tier.DEVICE, Tier.HOST, 0), (Tier.HOST, Tier.HOST, 4000)],
)
def test_sums_in_the_dtype_of_gradients(param: Tier, optim: Tier, wanted_bytes: int) -> None:
    """The buffer of the gradients holds the sums; a second buffer holds those that arrive."""
    assert sum_host_bytes(replace(BUCKET, sum_nbytes=4000), param, optim) == wanted_bytes
    shared = replace(BUCKET, sum_nbytes=4000, shard_numels=Shards.of((600, 400)))
    assert sum_host_bytes(shared, param, optim) == wanted_bytes * 600 // 1000


def test_nothing_without_state() -> None:
    assert disk_staging_bytes([]) == 0
    frozen = replace(BUCKET, state_nbytes=0, trainable=False)
    assert disk_staging_bytes([frozen]) == 0
    assert gather_staging_bytes([]) == 0
    assert gather_staging_bytes([frozen, frozen]) == (4 * 16 + 2) * MIB


# ----------------------------------------------------------------------------------------------------------------------
# The peak as a formula: equal to the timeline at the planned sizes and at any other.


SYMBOLIC = symbolic(
    chain([Layer(module=f"l{n}", params=((f"w{n}", 10),), frozen=False, act_numel=1) for n in range(2)]),
    pattern="{numel}*s0*s1",
    values=(("s0", 1), ("s1", 1)),
)
SYMBOLIC_BUCKETS = [bucket_of(SYMBOLIC, f"b{n}", [s for s in SYMBOLIC.storages if s.id == f"w{n}"]) for n in range(2)]
KEPT = make_plan(SYMBOLIC, SYMBOLIC_BUCKETS, ["device", "device"])


def test_a_formula_worked_out_by_hand() -> None:
    """As in `test_everything_kept`: 80 of parameters, 160 of state, and per element of activation 8 of
    input and tangent, with 12 of s0, t1 and out at op 3, or 8 of d1 and d0 beside 80 of gradients at op 7."""
    assert peak_formula(SYMBOLIC, KEPT) == "Max(16*s0*s1 + 320, 20*s0*s1 + 240)"


def test_a_single_row_needs_no_max_and_constant_sizes_no_formula() -> None:
    """Inference: 40 of parameters, and the input with two values at once."""
    constant = chain([Layer(module="l", params=(("w", 10),), frozen=False, act_numel=1)], training=False)
    bucket = bucket_of(constant, "b0", [s for s in constant.storages if s.kind is Kind.PARAM])
    plan = make_plan(constant, [bucket], ["device"])
    assert peak_formula(constant, plan) == ""
    assert peak_formula(symbolic(constant), plan) == "12*s0 + 40"


def test_offloaded_activations_are_in_no_row_while_away() -> None:
    """Per s0: 8 of input always. At op 2, `h` and `g` of 16 and the output of 100, with 240 of parameters and state; at
    op 5, `h`, `d` and `e` of 16, with 40 of gradient more; at op 6, `e` and 80 of gradients. Offloaded after op 1, `h`
    is not there at op 2. Made again, it is there at op 5 as `bwd.re_h`."""
    storages = (replace(storage, nbytes=100) if storage.id == "out" else storage for storage in GELU.storages)
    graph = symbolic(replace(GELU, storages=tuple(storages)))
    bucket = bucket_of(graph, "b0", [storage for storage in graph.storages if storage.kind is Kind.PARAM])

    def formula(*activations: Activations) -> str:
        return peak_formula(graph, make_plan(graph, [bucket], ["device"], activations))

    kept = "Max(24*s0 + 320, 56*s0 + 280, 140*s0 + 240)"
    away = "Max(24*s0 + 320, 56*s0 + 280, 124*s0 + 240)"
    assert formula() == formula(group(graph, "acts", Saving.KEEP, "h")) == kept
    assert formula(group(graph, "acts", Saving.RECOMPUTE, "g", "h")) == away
    assert formula(group(graph, "acts", Saving.OFFLOAD, "h")) == away


@st.composite
def planned(draw: st.DrawFn) -> tuple[StepGraph, Plan]:
    if draw(st.booleans()):
        return draw(plans_of(draw(symbolic_graphs())))
    values = (("s0", draw(st.integers(1, 9))), ("s1", draw(st.integers(1, 9))))
    graph = symbolic(draw(mixed_graphs()), draw(st.sampled_from(PATTERNS)), values)
    return draw(plans_of(graph, draw(activations_of(graph))))


@given(planned(), st.integers(1, 40), st.integers(1, 40))
def test_the_formula_gives_the_peak_of_the_timeline(found: tuple[StepGraph, Plan], batch: int, length: int) -> None:
    graph, plan = found
    formula = peak_formula(graph, plan)
    assert sizes.evaluate(formula, dict(graph.symbols)) == plan_timeline(graph, plan).peak.nbytes
    elsewhere = {"s0": batch, "s1": length}
    assert sizes.evaluate(formula, elsewhere) == plan_timeline(graph_at(graph, elsewhere), plan).peak.nbytes


@given(planned(), st.integers(1, 40), st.integers(1, 40))
def test_a_plan_resized_for_another_graph_is_legal(found: tuple[StepGraph, Plan], batch: int, length: int) -> None:
    graph, plan = found
    plan = dataclasses.replace(plan, symbols=graph.symbols, formula=peak_formula(graph, plan))
    there = graph_at(graph, {"s0": batch, "s1": length})
    moved = plan_at(there, plan)
    timeline = plan_timeline(there, moved)
    assert (moved.prediction.device_peak_bytes, moved.prediction.device_peak_at) == (
        timeline.peak.nbytes,
        timeline.peak.op,
    )
    assert moved.prediction.host_peak_bytes == timeline.host_bytes
    verify(there, dataclasses.replace(moved, budget_bytes=timeline.peak.nbytes))


def test_resizing_to_a_graph_without_symbols_sets_its_bytes() -> None:
    large = graph_at(SYMBOLIC, {"s0": 3, "s1": 2})
    there = replace(
        large,
        symbols=(),
        storages=tuple(replace(storage, size="") for storage in large.storages),
        ops=tuple(replace(op, flops_size="") for op in large.ops),
    )
    moved = resized(there, KEPT)
    assert moved.prediction.device_peak_bytes == plan_timeline(there, KEPT).peak.nbytes
    assert moved.prediction.device_peak_bytes > KEPT.prediction.device_peak_bytes
    assert (moved.formula, moved.symbols) == ("", ())


def test_a_graph_without_an_op_of_the_plan_is_refused() -> None:
    first = replace(SYMBOLIC.ops[0], id=OpId("fwd.other"))
    with pytest.raises(IllegalSchedule, match=r"fwd.0 names the op .*, which no region of this graph can run"):
        resized(replace(SYMBOLIC, ops=(first, *SYMBOLIC.ops[1:])), KEPT)


def test_sympy_parses_the_formula() -> None:
    formula = sympy.sympify(peak_formula(SYMBOLIC, KEPT))
    assert formula.subs({"s0": 9, "s1": 7}) == 1500


def with_formula(budget_bytes: int) -> Plan:
    return dataclasses.replace(
        KEPT, formula=peak_formula(SYMBOLIC, KEPT), symbols=SYMBOLIC.symbols, budget_bytes=budget_bytes
    )


def test_the_largest_batch_of_a_plan() -> None:
    """16*9*7 + 320 = 1328 and 20*9*7 + 240 = 1500: the first row binds from 20 elements on."""
    plan = with_formula(budget_bytes=1500)
    planned_at_7 = dataclasses.replace(plan, symbols=(("s0", 1), ("s1", 7)))
    assert planned_at_7.largest_batch("s0") == 9
    assert planned_at_7.largest_batch("s0", budget_bytes=1499) == 8
    assert planned_at_7.largest_batch("s0", budget_bytes=300) == 0
    assert plan.largest_batch("s1") == 63


@pytest.mark.parametrize(
    ("plan", "symbol", "message"),
    [
        (KEPT, None, r"no size in plan chain depends on a symbol.*dynamic=True"),
        (with_formula(1500), None, r"depends on s0 \(planned for 1\), s1 \(planned for 1\). Name one"),
        (with_formula(1500), "s7", r"does not grow with s7; it depends on s0, s1"),
    ],
)
def test_a_question_without_an_answer(plan: Plan, symbol: str | None, message: str) -> None:
    with pytest.raises(InvalidPlan, match=message):
        plan.largest_batch(symbol)


def test_a_large_step_has_its_formula_quickly() -> None:
    """5,000 ops whose peaks differ: a second, where a slow machine gets tenfold of the 0.1 s."""
    layers = [Layer(module=f"l{n}", params=((f"w{n}", n + 1),), frozen=False, act_numel=n + 1) for n in range(1250)]
    graph = symbolic(chain(layers), pattern="{numel}*s0 + s0 + 8")
    params = [storage for storage in graph.storages if storage.kind is Kind.PARAM]
    buckets = [bucket_of(graph, f"b{n}", params[n : n + 4]) for n in range(0, 1250, 4)]
    plan = make_plan(graph, buckets, ["host"] * len(buckets))
    start_s = time.process_time()
    assert peak_formula(graph, plan)
    assert time.process_time() - start_s < 1.0


# ----------------------------------------------------------------------------------------------------------------------
# Offloaded activations that pass the link slice by slice while laps run: which do, their bytes, and their seconds.


STEP = parse_graph("""
graph step
batch 8
storages
  in  input  float32  80  batched each
  w0  param  float32  8
  w1  param  float32  8
  x  saved  float32  6400  batched each  slices consecutive
  t  saved  float32  6400  batched each  slices consecutive
  loss  temp  float32  4  batched sum
  dt  temp  float32  6400  batched each
  dx  temp  float32  6400  batched each
  w1.grad  grad  float32  8  of w1  batched sum
  w0.grad  grad  float32  8  of w0  batched sum
outputs
  loss
aliases
ops
  fwd.mm  aten.mm forward  reads in w0  writes x  flops 80  moved 6488  module h.0
  fwd.mm_1  aten.mm forward  reads x w1  writes t  flops 80  moved 12808  module h.1
  fwd.sum  aten.sum forward  reads t  writes loss  moved 6404  module h.1
  bwd.mul  aten.mul backward  reads t  writes dt  moved 12800  module h.1
  bwd.mm_2  aten.mm backward  reads dt x w1  writes dx w1.grad  flops 80  moved 19216  module h.1
  bwd.mm_3  aten.mm backward  reads dx in  writes w0.grad  flops 80  moved 6488  module h.0
  update  update update  reads w0 w1 w0.grad w1.grad
""")
"""`x`, the input of layer h.1, is made by layer h.0; `t` is made and read by h.1 alone."""
NUM = 8
AWAY = (
    Activations(id=GroupId("h.1.all"), storages=(StorageId("x"), StorageId("t")), nbytes=12800, saving=Saving.OFFLOAD),
)


def changed(step: StepGraph, name: str, **fields: object) -> StepGraph:
    return replace(step, storages=tuple(replace(s, **fields) if s.id == name else s for s in step.storages))


def also_read_by(step: StepGraph, op_id: str, name: str) -> StepGraph:
    ops = (replace(op, reads=(*op.reads, StorageId(name))) if op.id == op_id else op for op in step.ops)
    return replace(step, ops=tuple(ops))


def sliced(step: StepGraph, micro_batches: int = NUM) -> tuple[set[str], set[str]]:
    """Return the storages that leave and that arrive in slices if all saved activations are offloaded."""
    found = slices_of(step, laps_at(step, (), micro_batches), AWAY)
    return set(found.leaving), set(found.arriving)


def test_an_activation_of_one_lap_passes_in_slices_and_the_input_of_a_layer_arrives_in_slices():
    assert sliced(STEP) == ({"t"}, {"x", "t"})


@pytest.mark.parametrize(
    ("step", "leaving", "arriving"),
    [
        (changed(STEP, "t", consecutive=False), set(), {"x"}),
        (changed(STEP, "t", batched="same", consecutive=False), set(), {"x"}),
        (also_read_by(STEP, "bwd.mm_3", "t"), set(), {"x"}),
        (also_read_by(STEP, "bwd.mm_3", "x"), {"t"}, {"t"}),
        (replace(STEP, outputs=(StorageId("t"),)), set(), {"x"}),
    ],
    ids=["scattered", "equal for all", "read by two laps", "input read by two laps", "returned"],
)
def test_other_activations_pass_as_a_whole(step: StepGraph, leaving: set[str], arriving: set[str]):
    assert sliced(step) == (leaving, arriving)


def test_nothing_passes_in_slices_on_the_whole_batch_or_if_it_is_kept():
    assert sliced(STEP, 1) == (set(), set())
    kept = (replace(AWAY[0], saving=Saving.KEEP),)
    laps = laps_at(STEP, (), NUM)
    assert divided(STEP, laps, kept) == divided(STEP, laps)


def walked() -> list[int]:
    """Allocate and free the tensors of `STEP` micro-batch by micro-batch, x and t offloaded; return the most bytes
    during each op, without parameters."""
    most = dict.fromkeys(("mm", "mm_1", "sum", "mul", "mm_2", "mm_3"), 0)
    held, part = {"in": 80}, 6400 // NUM

    def at(op: str, **more: int) -> None:
        most[op] = max(most[op], sum(held.values()) + sum(more.values()))

    for _ in range(NUM):
        at("mm", x_part=part)
        held["x"] = 6400  # filled with the part
        at("mm", x_part=part)
    for _ in range(NUM):
        at("mm_1", t_part=part)
        at("sum", t_part=part, loss_part=4)
        held |= {"loss": 4, "t slice": part}  # the slice is filled when the slice before it has left
    held = {"in": 80, "t 0": part, "x 0": part}
    for number in range(NUM):
        if number + 1 < NUM:
            held |= {f"t {number + 1}": part, f"x {number + 1}": part}
        held["dt"] = part
        at("mul")
        held.pop(f"t {number}")
        at("mm_2", dx_part=part, grad_part=8)
        held.pop("dt")
        held.pop(f"x {number}")
        held |= {"dx": 6400, "w1.grad": 8}
    for _ in range(NUM):
        at("mm_3", grad_part=8)
        held["w0.grad"] = 8
    return list(most.values())


def problem(**more: object) -> Problem:
    offloads = frozenset({Saving.KEEP, Saving.OFFLOAD})
    return problem_of(STEP, CLUSTERS["cuda"], hybrid=False, micro_batches=NUM, savings=offloads, **more)


def offloaded() -> Plan:
    """Return the plan with the fewest device bytes, all of whose saved activations are offloaded."""
    with pytest.raises(NoFeasiblePlan) as caught:
        plan(problem(budget_bytes=100))
    made = plan(problem(budget_bytes=caught.value.needed_bytes))
    assert made.prediction.device_peak_bytes == caught.value.needed_bytes
    assert {group.saving for group in made.activations} == {Saving.OFFLOAD}
    return made


def test_the_live_bytes_of_each_op_are_those_of_a_walk_over_the_slices():
    made = offloaded()
    timeline = plan_timeline(STEP, made)
    assert list(timeline.live_bytes) == list(walk_memory(STEP, made).live_bytes)
    gathered = timeline.live_bytes_by_kind[Kind.GATHERED]
    counted = [live - params for live, params in zip(timeline.live_bytes, gathered, strict=True)]
    assert counted[:-1] == walked()


def test_the_modes_of_a_layer_count_the_bytes_of_its_slices():
    kept = Evaluator(gather_facts(problem()))
    levels = kept.facts.start_levels
    (layer,) = kept.profiles

    def live(modes: tuple[int, ...]) -> list[int]:
        evaluator = kept.at(modes)
        draft = DraftPlan(levels=levels, modes=modes, moves=evaluator.at_use(levels), step_s=0.0, decisions=())
        return list(plan_timeline(STEP, write_out(evaluator, draft)).live_bytes)

    assert len(layer) > 2
    for mode, profile in enumerate(layer):
        planned = [own - other for own, other in zip(live((mode,)), live((0,)), strict=True)]
        counted = (profile.nbytes - layer[0].nbytes)[0].tolist()
        # A slice that is prefetched for the lap counts from its first reader on: a mode never counts too many bytes.
        assert all(0 <= more - own <= 6400 // NUM for more, own in zip(planned, counted, strict=True))
        assert planned[4] == counted[4], "at the peak"


def test_bytes_on_the_link_are_the_same_and_all_slices_but_one_pass_beside_the_lap():
    made, cluster = offloaded(), CLUSTERS["cuda"]
    step = as_run(STEP, made.activations, laps_at(STEP, made.activations, NUM))
    found = crossings(step, made.activations).values()
    assert sum(group.leaving.beside_bytes for group in found if group.leaving) == 6400 * 7 // 8
    assert sum(group.arriving.beside_bytes for group in found if group.arriving) == 2 * 6400 * 7 // 8
    scattered = changed(changed(STEP, "x", consecutive=False), "t", consecutive=False)
    record, whole = simulate(STEP, made, cluster), simulate(scattered, made, cluster)
    assert record.counts == whole.counts
    for lane, link, num in (("h2d", cluster.h2d, 2), ("d2h", cluster.d2h, 1)):
        of_groups = [[s for s in r.spans if s.lane == lane and "h.1" in s.label] for r in (record, whole)]
        in_slices_s, at_once_s = (sum(span.end_s - span.start_s for span in spans) for spans in of_groups)
        # The same bytes, in eight copies of each storage instead of one.
        assert in_slices_s == pytest.approx(at_once_s + num * 7 * link.latency_s)
        runs = [span for span in record.spans if span.lane == "compute"]
        assert any(s.start_s < run.end_s and run.start_s < s.end_s for s in of_groups[0] for run in runs)
