"""A step as it runs: fused, recomputed, in micro-batches, and with values in parts."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.base.errors import IllegalSchedule, InvalidPlan, NoFeasiblePlan
from elixir_compile.base.units import MIB
from elixir_compile.ir import (
    Activations,
    Batched,
    Calls,
    GroupId,
    Kernel,
    Kind,
    Op,
    OpId,
    Phase,
    Saving,
    StepGraph,
    Storage,
    StorageId,
)
from elixir_compile.ir.cost import op_s
from elixir_compile.search import plan
from elixir_compile.step import as_run, fused, repeats
from elixir_compile.step.as_run import absorbed_storages, laps_at, stays_in_parts, with_repeats
from elixir_compile.step.bucket_bytes import CallKind, Ops, storages_of_calls
from elixir_compile.step.divide import Lap, divided, laps, laps_of, tangents_of_step
from elixir_compile.step.liveness import liveness
from elixir_compile.step.structure import check_regions
from elixir_compile.step.timeline import plan_timeline
from tests.pure.mixes import activations_of, group, layers_of, mixed_graphs
from tests.pure.problems import CLUSTERS, problem_of
from tests.pure.step.test_bytes import also_read_by, changed
from tests.pure.steps import GELU, LAYERS, parse_graph

# ----------------------------------------------------------------------------------------------------------------------
# What is never written, and the step without it.


SUM = parse_graph("""
graph sum
storages
  x  input  float32  8
  h  temp  float32  16
  g  temp  float32  8
  s  temp  float32  4
outputs
  s
aliases
ops
  fwd.mm  aten.mm forward  reads x  writes h  flops 80  moved 24
  fwd.gelu  aten.gelu forward  reads h  writes g  moved 24  kernel pointwise
  fwd.sum  aten.sum forward  reads g  writes s  moved 12  kernel reduction
""")


def with_fields(graph: StepGraph, name: str, **changes: object) -> StepGraph:
    """Return `graph` with other fields of one op."""
    return replace(graph, ops=tuple(replace(op, **changes) if op.id == name else op for op in graph.ops))  # pyright: ignore


OUTSIDE = parse_graph("""
graph outside
storages
  x  input  float32  8
  w  param  float32  40
  out  temp  float32  16
  tangent  temp  float32  16
  bwd.mul  temp  float32  16
  w.grad  grad  float32  40  of w
outputs
  out
aliases
ops
  fwd.mm  aten.mm forward  reads x w  writes out  flops 80
  bwd.mul  aten.mul backward  reads tangent  writes tangent bwd.mul  kernel pointwise
  bwd.sum  aten.sum backward  reads x bwd.mul  writes w.grad  kernel reduction
  update  update update  reads w w.grad
""")


def test_the_tangents_of_a_fused_op_stay_tangents() -> None:
    """A caller that holds the gradients of three outputs holds the bytes of two more beside the one of this call."""
    step = as_run(OUTSIDE)
    assert step.ops[1].writes == ("tangent",)  # `bwd.mul` is computed inside `bwd.sum`
    assert tangents_of_step(step) == tangents_of_step(OUTSIDE) == {"tangent"}
    calls = Calls(num=4, outstanding=4, output_grads=3)
    lives = {name: (life,) for name, life in liveness(step).lives.items()}
    held = storages_of_calls(step, Ops.of(step), lives, CallKind(is_first=False), calls)
    assert [row.nbytes for storage, row in held if storage.id == "tangent"] == [2 * 16, 16, 16]


def test_a_pointwise_result_between_two_kernels_is_never_written() -> None:
    """`g` is computed inside `sum`, which reads the 16 bytes of h and writes the 4 of s; h comes out of an opaque
    kernel, and s goes to the caller."""
    found = fused(SUM)
    assert absorbed_storages(SUM) == {"g"}
    assert [(op.id, op.reads, op.writes, op.moved_bytes) for op in found.ops] == [
        ("fwd.mm", ("x",), ("h",), 24),
        ("fwd.gelu", (), (), 0),
        ("fwd.sum", ("h",), ("s",), 20),
    ]
    assert [storage.id for storage in found.storages] == ["x", "h", "s"]


def test_storages_that_must_be_in_memory() -> None:
    """An opaque reader, the caller, a maker that is no pointwise op, a second writer."""
    assert absorbed_storages(with_fields(SUM, "fwd.sum", kernel=Kernel.OPAQUE)) == set()
    assert absorbed_storages(replace(SUM, outputs=(StorageId("g"), StorageId("s")))) == set()
    assert absorbed_storages(with_fields(SUM, "fwd.gelu", kernel=Kernel.REDUCTION)) == set()
    assert absorbed_storages(with_fields(SUM, "fwd.sum", writes=("g", "s"))) == set()


def test_only_storages_of_a_single_phase_are_fused() -> None:
    """`h` and `g` are saved. `e` is a pointwise op's and of the backward, but a matrix product reads it."""
    assert absorbed_storages(GELU) == set()
    assert fused(GELU) is GELU


def test_the_tangent_stays_when_the_op_it_comes_with_is_fused() -> None:
    """Tangents arrive with the backward's first op. Once that is emptied, they must not look like its result."""
    late = replace(SUM, ops=(SUM.ops[0], replace(SUM.ops[1], writes=(StorageId("x"), StorageId("g"))), SUM.ops[2]))
    storages = tuple(replace(s, kind=Kind.TEMP) if s.id == "x" else s for s in late.storages)
    late = replace(late, storages=storages, ops=(replace(late.ops[0], reads=()), *late.ops[1:]))
    once = fused(late)
    assert once.ops[1].writes == ("x",)
    assert fused(once) == once


def sources(graph: StepGraph, op: Op, absorbed: frozenset[StorageId]) -> set[StorageId]:
    """What `op` reads from memory: its inputs, and where one is never written, what its maker reads."""
    makers = {name: maker for maker in graph.ops for name in maker.writes}
    return {
        source
        for name in op.reads
        for source in (sources(graph, makers[name], absorbed) if name in absorbed else {name})
    }


@given(mixed_graphs())
def test_fused_ops_read_the_sources_of_their_inputs(graph: StepGraph) -> None:
    found, absorbed = fused(graph), absorbed_storages(graph)
    assert {storage.id for storage in graph.storages} - {storage.id for storage in found.storages} == absorbed
    for before, after in zip(graph.ops, found.ops, strict=True):
        is_emptied = not absorbed.isdisjoint(before.writes)
        assert set(after.reads) == (set() if is_emptied else sources(graph, before, absorbed))
        assert set(after.writes) == set(before.writes) - absorbed
    assert fused(found) == found


# ----------------------------------------------------------------------------------------------------------------------
# The step with repeated ops: worked out by hand, and the same values by symbolic evaluation.


NAMES = [op.id for op in GELU.ops]


def again(graph: StepGraph, *storages: str) -> tuple[Activations, ...]:
    return (group(graph, "again", Saving.RECOMPUTE, *storages),)


def test_an_activation_is_recomputed_right_before_its_reader() -> None:
    """`bwd.mm_1` reads g first. `bwd.re_gelu` makes it from h, which is kept; g itself goes after the forward."""
    assert [(repeat.op, repeat.before) for repeat in repeats(GELU, again(GELU, "g"))] == [("fwd.gelu", "bwd.mm_1")]
    step = as_run(GELU, again(GELU, "g"))
    assert [op.id for op in step.ops] == [*NAMES[:3], "bwd.re_gelu", *NAMES[3:]]
    assert (step.ops[3].reads, step.ops[3].writes) == (("h",), ("bwd.re_g",))
    assert step.ops[4].reads == ("bwd.re_g", "tangent")
    kinds = {storage.id: storage.kind for storage in step.storages}
    assert (kinds["g"], kinds["bwd.re_g"], kinds["h"]) == (Kind.TEMP, Kind.TEMP, Kind.SAVED)


def test_inputs_of_a_repeated_op_are_recomputed_once_before_it() -> None:
    """Both are dropped: `bwd.mm_1` needs g and so h, which `bwd.gelu_1` then finds."""
    found = repeats(GELU, again(GELU, "g", "h"))
    assert [(repeat.op, repeat.before) for repeat in found] == [("fwd.mm", "bwd.mm_1"), ("fwd.gelu", "bwd.mm_1")]
    step = as_run(GELU, again(GELU, "g", "h"))
    assert [op.id for op in step.ops] == [*NAMES[:3], "bwd.re_mm", "bwd.re_gelu", *NAMES[3:]]
    assert [op.reads for op in step.ops if op.id in ("bwd.re_mm", "bwd.re_gelu", "bwd.gelu_1")] == [
        ("x", "w0"),
        ("bwd.re_h",),
        ("bwd.re_h", "d"),
    ]


def test_extra_saved_activations_are_read_directly() -> None:
    """`n0` is not saved. Once a plan keeps it, r0 is made from it, and `n0` is no longer a passing value."""
    kept = group(LAYERS, "h.1.input", Saving.KEEP, "n0")
    step = as_run(LAYERS, (kept, *again(LAYERS, "r0")))
    assert next(storage.kind for storage in step.storages if storage.id == "n0") is Kind.SAVED
    assert [op.id for op in step.ops if op.id.startswith("bwd.re_")] == ["bwd.re_add_0"]
    without = [repeat.op for repeat in repeats(LAYERS, again(LAYERS, "r0"))]
    assert without == ["fwd.norm_0", "fwd.add_0"]


def test_nothing_dropped_changes_nothing() -> None:
    kept = (group(GELU, "all", Saving.KEEP, "h", "g"),)
    assert as_run(GELU, kept) == as_run(GELU) == as_run(as_run(GELU))


def test_ops_that_must_run_once_are_not_repeated() -> None:
    with pytest.raises(InvalidPlan, match=r"m1 is to be recomputed, but fwd\.drop_1 must not run twice"):
        as_run(LAYERS, again(LAYERS, "m1"))


TWO = parse_graph("""
graph two
storages
  x  input  float32  8
  stats  buffer  float32  4
  k  saved  float32  4
  s  saved  float32  4
  e  saved  float32  4
  d  temp  float32  4
  f  temp  float32  4
outputs
aliases
ops
  fwd.split  aten.split forward  reads x  writes k s
  fwd.exp  aten.exp forward  reads k  writes e
  bwd.mm  aten.mm backward  reads e  writes d
  bwd.mm_1  aten.mm backward  reads k s d  writes f
""")


def test_tangents_arrive_with_the_first_op_of_the_backward() -> None:
    """`bwd.mm` writes what a capture calls by its name, and before that the tangent, which autograd hands in first."""
    own = {StorageId("d"): StorageId("bwd.mm")}
    storages = tuple(replace(s, id=own.get(s.id, s.id)) for s in TWO.storages)
    tangent = Storage(id=StorageId("tangent"), nbytes=4, kind=Kind.TEMP, dtype="float32")
    first = replace(TWO.ops[2], reads=("e", tangent.id), writes=(tangent.id, "bwd.mm"))  # pyright: ignore
    last = replace(TWO.ops[3], reads=("k", "s", "bwd.mm"))  # pyright: ignore
    graph = replace(TWO, ops=(*TWO.ops[:2], first, last), storages=(*storages, tangent))
    step = as_run(graph, again(graph, "e"))
    assert [(op.id, op.writes) for op in step.ops[2:4]] == [
        ("bwd.re_exp", ("tangent", "bwd.re_e")),
        ("bwd.mm", ("bwd.mm",)),
    ]


def test_a_kept_result_is_read_although_its_op_is_repeated_later() -> None:
    """`e` is made again from the kept `k`. Later `split` runs again for `s` and makes `k` too, too late for `e`."""
    step = as_run(TWO, again(TWO, "s", "e"))
    assert [(op.id, op.reads) for op in step.ops[2:]] == [
        ("bwd.re_exp", ("k",)),
        ("bwd.mm", ("bwd.re_e",)),
        ("bwd.re_split", ("x",)),
        ("bwd.mm_1", ("k", "bwd.re_s", "d")),
    ]


def test_an_overwritten_storage_cannot_be_read_by_a_repeat() -> None:
    """`exp` reads the buffer before `fwd.copy` updates it: a second run would read what the next step should."""
    copy = replace(TWO.ops[0], id="fwd.copy", reads=("stats", "k"), writes=("stats",), once=True)  # pyright: ignore
    exp = replace(TWO.ops[1], reads=("k", "stats"))  # pyright: ignore
    graph = replace(TWO, ops=(TWO.ops[0], exp, copy, *TWO.ops[2:]))
    with pytest.raises(InvalidPlan, match=r"stats is to be recomputed, but fwd\.copy must not run twice"):
        as_run(graph, again(graph, "e"))
    after = replace(graph, ops=(TWO.ops[0], copy, exp, *TWO.ops[2:]))
    assert "bwd.re_exp" in [op.id for op in as_run(after, again(after, "e")).ops]


def test_a_storage_of_two_writers_is_not_recomputed_by_the_first() -> None:
    """`split` runs again for `k`. It writes `s` too, but `fwd.add` has changed that since."""
    add = replace(TWO.ops[1], id="fwd.add", reads=("s",), writes=("s",), once=True)  # pyright: ignore
    graph = replace(TWO, ops=(*TWO.ops[:2], add, *TWO.ops[2:]))
    assert "bwd.re_split" in [op.id for op in as_run(graph, again(graph, "k")).ops]
    with pytest.raises(InvalidPlan, match=r"s is to be recomputed, but no single op computes it"):
        as_run(graph, again(graph, "k", "s"))


def values(graph: StepGraph) -> dict[str, int]:
    """What every storage holds in the end: each op is a pure hash of its target and of what it reads; an op that must
    run once never gives the same twice."""
    held: dict[str, int] = {storage.id: hash(storage.id) for storage in graph.storages}
    for op in graph.ops:
        if op.phase is Phase.UPDATE:
            continue
        made = hash((op.id if op.once else op.target, *(held[name] for name in op.reads)))
        held |= {name: hash((made, place)) for place, name in enumerate(op.writes)}
    return held


@st.composite
def saving_steps(draw: st.DrawFn) -> tuple[StepGraph, Sequence[Activations]]:
    graph = draw(mixed_graphs())
    return graph, draw(activations_of(graph) if draw(st.booleans()) else layers_of(graph))


@given(saving_steps())
def test_a_step_with_repeats_computes_the_same_results(found: tuple[StepGraph, tuple[Activations, ...]]) -> None:
    """Outputs, gradients and all else that the backward writes, except what it overwrites of the forward."""
    graph, activations = found
    before, after = values(graph), values(with_repeats(graph, activations))
    kinds = {storage.id: storage.kind for storage in graph.storages}
    made = {name for op in graph.ops if op.phase is Phase.BACKWARD for name in op.writes}
    dropped = {name for group in activations if group.saving is Saving.RECOMPUTE for name in group.storages}
    checked = (made | set(graph.outputs)) - dropped
    assert {name for name, kind in kinds.items() if kind is Kind.GRAD} <= checked
    assert {name: before[name] for name in checked} == {name: after[name] for name in checked}


@given(saving_steps())
def test_the_backward_reads_no_dropped_activation(found: tuple[StepGraph, tuple[Activations, ...]]) -> None:
    graph, activations = found
    step = as_run(graph, activations)
    dropped = {name for group in activations if group.saving is Saving.RECOMPUTE for name in group.storages}
    stored = {name for group in activations if group.saving is not Saving.RECOMPUTE for name in group.storages}
    saved = {s.id for s in graph.storages if s.kind is Kind.SAVED}
    made = {name for op in step.ops if op.phase is Phase.FORWARD for name in op.writes} - {"buffer"}
    for op in step.ops:
        if op.phase is Phase.BACKWARD:
            assert dropped.isdisjoint((*op.reads, *op.writes))
            # What the forward makes reaches the backward only where it is saved or stored.
            assert made.intersection(op.reads) <= saved | stored


@given(saving_steps())
def test_fused_ops_used_again_from_another_step_equal_new_ones(
    found: tuple[StepGraph, tuple[Activations, ...]],
) -> None:
    """`as_run` takes them from the step without recomputation, `fused` alone makes each op anew."""
    graph, activations = found
    assert as_run(graph, activations) == fused(with_repeats(graph, activations))


@given(saving_steps())
def test_the_ops_of_the_graph_stay_in_their_order(found: tuple[StepGraph, tuple[Activations, ...]]) -> None:
    graph, activations = found
    step = as_run(graph, activations)
    names = {op.id for op in graph.ops}
    assert [op.id for op in step.ops if op.id in names] == [op.id for op in graph.ops]
    again = [op.id for op in step.ops if op.id not in names]
    assert again == [f"bwd.re_{repeat.op.removeprefix('fwd.')}" for repeat in repeats(graph, activations)]


# ----------------------------------------------------------------------------------------------------------------------
# A step whose laps run in micro-batches: its laps, the bytes at each op, and what its ops move and launch.


WIDE = parse_graph(f"""
graph wide
batch 64
storages
  x  input  float32  {64 * MIB}  batched each
  h0  temp  float32  {64 * MIB}  batched each
  t  temp  float32  {256 * MIB}  batched each
  h1  temp  float32  {64 * MIB}  batched each
outputs
  h1
aliases
ops
  fwd.a  aten.a forward  reads x  writes h0  moved {128 * MIB}  module embed
  fwd.b  aten.b forward  reads h0  writes t  moved {320 * MIB}  module h.0
  fwd.c  aten.c forward  reads h0 t  writes h1  moved {384 * MIB}  module h.0
""")
"""Between the laps x, h0 and h1 are whole. `t` exists inside of the second lap alone."""

STEP = parse_graph("""
graph step
batch 8
storages
  x  input  float32  800  batched each
  w0  param  bfloat16  40
  w1  param  float32  40
  mask  temp  float32  64
  a  saved  float32  1600  batched each
  t  temp  float32  3200  batched each
  out  temp  float32  4  batched sum
  loss  temp  float32  4
  dt  temp  float32  3200  batched each
  w1.grad  grad  float32  40  of w1  batched sum
  w0.grad  grad  bfloat16  40  of w0  batched sum
outputs
  loss
aliases
ops
  fwd.arange  aten.arange forward  writes mask  moved 64  module mask
  fwd.mm  aten.mm forward  reads x w0  writes a  flops 80  moved 2440  module h.0
  fwd.add  aten.add forward  reads a mask  writes t  moved 4864  module h.0
  fwd.mean  aten.mean forward  reads t  writes out  moved 3204  module head
  fwd.div  aten.div forward  reads out  writes loss  moved 8  module head
  bwd.mm_1  aten.mm backward  reads a w1  writes dt w1.grad  flops 80  moved 4880  module head
  bwd.mm_2  aten.mm backward  reads x dt  writes w0.grad  flops 80  moved 4040  module h.0
  update  update update  reads w0 w1 w0.grad w1.grad
""")


def texts(step: StepGraph, micro_batches: int) -> list[str]:
    """Return each lap as `first..last xN`."""
    return [f"{lap.first}..{lap.last} x{lap.micro_batches}" for lap in laps(step, micro_batches)]


def live_mib(micro_batches: int) -> list[float]:
    """Allocate and free the tensors of `WIDE` micro-batch by micro-batch; return the most MiB during each op."""
    n = micro_batches
    first_lap = 64 + 64 + (64 / n if n > 1 else 0)  # x, h0 whole, and one part of h0
    second_b, second_c = 0.0, 0.0
    for number in range(n):
        h1 = 64 if number > 0 else 0  # the whole tensor is allocated for the first part
        second_b = max(second_b, 64 + 64 + h1 + 256 / n)
        second_c = max(second_c, 64 + 64 + h1 + 256 / n + 64 / n)  # `h1` here is the tensor of earlier parts
    return [first_lap, second_b, second_c]


def test_a_lap_begins_at_each_layer_and_phase_and_behind_the_last_layer():
    assert texts(STEP, 4) == [
        "fwd.arange..fwd.arange x1",
        "fwd.mm..fwd.add x4",
        "fwd.mean..fwd.div x4",
        "bwd.mm_1..bwd.mm_1 x4",
        "bwd.mm_2..bwd.mm_2 x4",
    ]


def test_an_op_that_mixes_the_batch_is_a_lap_of_its_own_and_is_not_divided():
    mixing = replace(
        STEP, ops=tuple(replace(op, mixes="a norm over the batch") if op.id == "fwd.mean" else op for op in STEP.ops)
    )
    assert texts(mixing, 2)[1:4] == ["fwd.mm..fwd.add x2", "fwd.mean..fwd.mean x1", "fwd.div..fwd.div x1"]


@pytest.mark.parametrize("n", [1, 2, 4, 8, 64])
def test_the_live_bytes_of_each_op_are_those_of_a_walk_over_the_micro_batches(n: int):
    made = plan(problem_of(WIDE, CLUSTERS["cuda"], budget_bytes=512 * MIB, micro_batches=n), "keep_all")
    seen = [nbytes / MIB for nbytes in plan_timeline(WIDE, made).live_bytes]
    walked = live_mib(n)
    assert all(planned >= walk for planned, walk in zip(seen, walked, strict=True))
    assert max(seen) == max(walked) == (448 if n == 1 else 192 + 320 / n)
    assert {region.micro_batches for region in made.regions} == {n}


def test_a_step_that_fits_in_no_number_of_micro_batches_names_what_the_largest_number_needs():
    with pytest.raises(NoFeasiblePlan) as caught:
        plan(problem_of(WIDE, CLUSTERS["cuda"], budget_bytes=190 * MIB, micro_batches=64))
    assert caught.value.needed_bytes == 197 * MIB


def test_a_lap_adds_the_parts_of_what_leaves_it_and_sums_16_bits_in_fp32():
    step = as_run(STEP, (), laps_at(STEP, (), 4))
    nbytes = {storage.id: storage.nbytes for storage in step.storages}
    assert (nbytes["t"], nbytes["dt"], nbytes["a"], nbytes["a.part"]) == (3200, 3200, 1600, 400)
    assert (nbytes["w0.grad"], nbytes["w0.grad.total"], nbytes["w0.grad.part"]) == (40, 80, 40)
    assert "w1.grad.total" not in nbytes
    lives = {name: (life.first, life.last) for name, life in liveness(step).lives.items()}
    assert lives["w1.grad.part"] == (5, 5)
    assert lives["out.part"] == (3, 4)
    assert lives["out"][0] == 3
    assert lives["w0.grad"][0] == 6


def test_an_op_launches_once_per_micro_batch_and_moves_weights_each_time():
    step = as_run(STEP, (), laps_at(STEP, (), 4))
    ops = {op.id: op for op in step.ops}
    assert (ops["fwd.mm"].times, ops["fwd.mm"].moved_bytes) == (4, 2440 + 3 * 40)
    assert ops["fwd.div"].times == 1
    # The last op of a lap also fills whole tensors, here a and t, and adds up parts.
    assert ops["fwd.add"].moved_bytes == 4864 + 3 * 64 + 2 * 1600 + 2 * 3200
    cluster = CLUSTERS["cuda"]
    once = next(op for op in STEP.ops if op.id == "fwd.mm")
    assert op_s(ops["fwd.mm"], cluster) > op_s(once, cluster) + 3 * cluster.device.launch_s * 0.99


def test_a_lap_reads_its_parameters_at_both_ends():
    step = as_run(STEP, (), laps_at(STEP, (), 4))
    ops = {op.id: op for op in step.ops}
    assert "w0" in ops["fwd.mm"].reads
    assert "w0" in ops["fwd.add"].reads


def test_a_divided_step_has_the_ops_of_the_whole_step_and_one_micro_batch_changes_nothing():
    step = as_run(STEP, (), laps_at(STEP, (), 8))
    assert [op.id for op in step.ops] == [op.id for op in STEP.ops]
    assert divided(STEP, laps(STEP, 1)) == STEP
    kinds = {storage.id: storage.kind for storage in step.storages}
    assert kinds["w0.grad.part"] is Kind.TEMP
    assert all(storage.batched is not Batched.EACH or storage.nbytes for storage in step.storages)


DRAWN = parse_graph("""
graph drawn
batch 8
storages
  x  input  float32  800  batched each
  w  param  float32  40
  r  saved  float32  800  batched each
  y  saved  float32  800  batched each
  out  temp  float32  800  batched each
  w.grad  grad  float32  40  of w  batched sum
outputs
  out
aliases
ops
  fwd.rand  prims.inductor_random.default forward  writes r  moved 800  module h.0  kernel pointwise
  fwd.mul  aten.mul forward  reads x r  writes y  moved 2400  module h.0
  fwd.mm  aten.mm forward  reads y w  writes out  moved 1640  flops 80  module h.0
  bwd.mm_1  aten.mm backward  reads y r w  writes w.grad  moved 1680  flops 80  module h.0
  update  update update  reads w w.grad
""")
"""Random numbers `r` of a dropout, which the backward may draw again."""


def test_random_numbers_drawn_again_in_another_number_of_micro_batches_are_illegal():
    made = plan(problem_of(DRAWN, CLUSTERS["cuda"], micro_batches=4), "keep_all")
    again = Activations(id=GroupId("h.0.random"), storages=(StorageId("r"),), nbytes=800, saving=Saving.RECOMPUTE)
    first, second = made.regions
    for micro_batches, is_legal in ((4, True), (1, False)):
        last = replace(second, first=OpId("bwd.re_rand"), micro_batches=micro_batches)
        changed = replace(made, activations=(again,), regions=(first, last))
        step = as_run(DRAWN, changed.activations, laps_of(changed))
        if is_legal:
            check_regions(step, changed)
        else:
            with pytest.raises(IllegalSchedule, match=r"draws the random numbers of fwd\.rand again, which ran in 4"):
                check_regions(step, changed)


def test_two_numbers_of_micro_batches_in_one_plan_are_illegal():
    made = plan(problem_of(STEP, CLUSTERS["cuda"], micro_batches=4), "keep_all")
    *regions, last = made.regions
    odd = replace(made, regions=(*regions, replace(last, micro_batches=2)))
    with pytest.raises(IllegalSchedule, match=r"runs in 2 micro-batches, but fwd\.1 in 4; expected one number"):
        check_regions(as_run(STEP, (), laps_of(odd)), odd)


def test_random_numbers_are_written_in_a_divided_step_and_drawn_by_each_reader_otherwise():
    loose = replace(
        DRAWN,
        storages=tuple(replace(s, kind=Kind.TEMP) if s.id == "r" else s for s in DRAWN.storages),
        ops=tuple(
            replace(op, reads=tuple(name for name in op.reads if name != "r")) if op.id == "bwd.mm_1" else op
            for op in (replace(op, kernel=Kernel.POINTWISE) if op.id == "fwd.mul" else op for op in DRAWN.ops)
        ),
    )
    assert all(storage.id != "r" for storage in as_run(loose).storages)
    assert any(storage.id == "r" for storage in as_run(loose, (), laps_at(loose, (), 4)).storages)


# ----------------------------------------------------------------------------------------------------------------------
# Values that stay in parts between the laps of a step: which do, and the bytes at each op.


PARTED = parse_graph("""
graph step
batch 8
storages
  in  input  float32  80  batched each
  w0  param  float32  8
  w1  param  float32  8
  a  temp  float32  800  batched each  slices consecutive
  x  saved  float32  6400  batched each  slices consecutive
  t  saved  float32  3200  batched each  slices consecutive
  loss  temp  float32  4  batched sum
  dt  temp  float32  3200  batched each  slices consecutive
  dx  temp  float32  6400  batched each  slices consecutive
  w1.grad  grad  float32  8  of w1  batched sum
  w0.grad  grad  float32  8  of w0  batched sum
outputs
  loss
aliases
ops
  fwd.a  aten.a forward  reads in  writes a  moved 80  module h.0
  fwd.mm  aten.mm forward  reads a w0  writes x  flops 80  moved 6488  module h.0
  fwd.mm_1  aten.mm forward  reads x w1  writes t  flops 80  moved 12808  module h.1
  fwd.sum  aten.sum forward  reads t  writes loss  moved 6404  module h.1
  bwd.mul  aten.mul backward  reads t  writes dt  moved 12800  module h.1
  bwd.mm_2  aten.mm backward  reads dt x w1  writes dx w1.grad  flops 80  moved 19216  module h.1
  bwd.mm_3  aten.mm backward  reads dx in  writes w0.grad  flops 80  moved 6488  module h.0
  update  update update  reads w0 w1 w0.grad w1.grad
""")
"""`x` and `dx` pass from one layer to the other, `t` is saved; `a` and `dt` exist inside of one lap alone."""
NUM = 4
INSIDE = {"a", "dt"}


def group_of(*names: str, saving: Saving) -> tuple[Activations, ...]:
    return (Activations(id=GroupId("h.1.all"), storages=tuple(map(StorageId, names)), nbytes=9600, saving=saving),)


def in_parts(step: StepGraph, activations: tuple[Activations, ...] = (), laps: tuple[Lap, ...] | None = None) -> set:
    """Return the storages that stay in parts between laps."""
    return set(stays_in_parts(step, activations, laps_at(step, activations, NUM) if laps is None else laps)) - INSIDE


def test_values_that_only_divided_laps_touch_stay_in_parts():
    assert in_parts(PARTED) == {"x", "t", "dx"}
    assert in_parts(PARTED, group_of("x", "t", saving=Saving.KEEP)) == {"x", "t", "dx"}
    assert in_parts(PARTED, laps=()) == set()


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (changed(PARTED, "x", consecutive=False), {"t", "dx"}),
        (changed(PARTED, "x", batched=Batched.SAME, consecutive=False), {"t", "dx"}),
        (replace(PARTED, outputs=(StorageId("t"),)), {"x", "dx"}),
        (replace(PARTED, batch_size="s0", symbols=(("s0", 8),)), set()),
        (also_read_by(PARTED, "update", "dx"), {"x", "t"}),
    ],
    ids=["scattered", "equal for all", "returned", "dynamic rows", "read by an op on the whole batch"],
)
def test_other_values_are_whole(step: StepGraph, expected: set[str]):
    assert in_parts(step) == expected


def test_a_value_that_an_undivided_lap_reads_is_whole():
    first, second, *others = laps_at(PARTED, (), NUM)
    assert in_parts(PARTED, laps=(first, *others)) == {"dx"}
    assert in_parts(PARTED, laps=(first, replace(second, micro_batches=2), *others)) == {"dx"}


def test_offloaded_activations_and_the_results_of_laps_into_which_slices_arrive_are_whole():
    assert in_parts(PARTED, group_of("x", saving=Saving.OFFLOAD)) == {"t"}
    assert in_parts(PARTED, group_of("x", "t", saving=Saving.OFFLOAD)) == set()


def walked() -> list[int]:
    """Allocate and free the tensors of `PARTED` micro-batch by micro-batch; return the most bytes during each op,
    without parameters."""
    most = dict.fromkeys(("a", "mm", "mm_1", "sum", "mul", "mm_2", "mm_3"), 0)
    held = {"in": 80}

    def at(op: str, **more: int) -> None:
        most[op] = max(most[op], sum(held.values()) + sum(more.values()))

    for number in range(NUM):
        held["a"] = 800 // NUM
        at("a")
        held[f"x {number}"] = 6400 // NUM
        at("mm")
        held.pop("a")
    for number in range(NUM):
        held[f"t {number}"] = 3200 // NUM
        at("mm_1")
        at("sum", loss_part=4)
        held["loss"] = 4
    held.pop("loss")
    for number in range(NUM):
        held["dt"] = 3200 // NUM
        at("mul")
        held[f"dx {number}"] = 6400 // NUM
        at("mm_2", grad_part=8)
        held.pop("dt")
        held["w1.grad"] = 8
    held = {"in": 80, "dx": 6400, "w1.grad": 8}
    for _ in range(NUM):
        at("mm_3", grad_part=8)
        held["w0.grad"] = 8
    return list(most.values())


def test_the_live_bytes_of_values_in_parts_are_those_of_a_walk_over_the_micro_batches():
    made = plan(problem_of(PARTED, CLUSTERS["cuda"], hybrid=False, micro_batches=NUM), "keep_all")
    timeline = plan_timeline(PARTED, made)
    counted = [
        sum(live[at] for kind, live in timeline.live_bytes_by_kind.items() if kind not in ("param", "moment", "master"))
        for at in range(len(timeline.ops) - 1)
    ]
    wanted = walked()
    # A sum is live from the first op of its lap on, in the last micro-batch.
    assert all(0 <= own - other <= 16 for own, other in zip(counted, wanted, strict=True))
    assert max(counted) == max(wanted)


def test_nothing_fills_whole_tensors_and_the_part_of_a_value_counts_from_its_op_on():
    step = as_run(PARTED, (), laps_at(PARTED, (), NUM))
    ops, nbytes = {op.id: op for op in step.ops}, {storage.id: storage.nbytes for storage in step.storages}
    assert "x.part" not in nbytes
    assert nbytes["x.earlier"] == 6400 * 3 // 4
    assert ("x.earlier" in ops["fwd.a"].writes, "x.earlier" in ops["fwd.mm"].reads) == (True, False)
    assert "t.earlier" not in nbytes, "the first op of the lap makes it"
    assert ops["fwd.mm"].moved_bytes == 6488 + 3 * 8
