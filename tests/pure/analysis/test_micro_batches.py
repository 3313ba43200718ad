"""A step whose laps run in micro-batches: its laps, the bytes at each op, and what its ops move and launch."""

from dataclasses import replace

import pytest

from elixir_compile.base.errors import IllegalSchedule, NoFeasiblePlan
from elixir_compile.base.units import MIB
from elixir_compile.ir import Activations, Batched, GroupId, Kernel, Kind, OpId, Saving, StepGraph, StorageId
from elixir_compile.ir.cost import op_s
from elixir_compile.search import plan
from elixir_compile.step.as_run import as_run, laps_at
from elixir_compile.step.divide import divided, laps, laps_of
from elixir_compile.step.liveness import liveness
from elixir_compile.step.structure import check_regions
from elixir_compile.step.timeline import plan_timeline
from tests.pure.graph_text import parse_graph
from tests.pure.search.test_planner import CLUSTERS, problem_of

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
    device = CLUSTERS["cuda"].device
    once = next(op for op in STEP.ops if op.id == "fwd.mm")
    assert op_s(ops["fwd.mm"], device) > op_s(once, device) + 3 * device.launch_s * 0.99


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
