"""Values that stay in parts between the laps of a step: which do, and the bytes at each op."""

from dataclasses import replace

import pytest

from elixir_compile.ir import Activations, Batched, GroupId, Saving, StepGraph, StorageId
from elixir_compile.search import plan
from elixir_compile.step.as_run import as_run, laps_at, stays_in_parts
from elixir_compile.step.divide import Lap
from elixir_compile.step.timeline import plan_timeline
from tests.pure.analysis.test_crossings import also_read_by, changed
from tests.pure.graph_text import parse_graph
from tests.pure.search.test_planner import CLUSTERS, problem_of

STEP = parse_graph("""
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


def group(*names: str, saving: Saving) -> tuple[Activations, ...]:
    return (Activations(id=GroupId("h.1.all"), storages=tuple(map(StorageId, names)), nbytes=9600, saving=saving),)


def in_parts(step: StepGraph, activations: tuple[Activations, ...] = (), laps: tuple[Lap, ...] | None = None) -> set:
    """Return the storages that stay in parts between laps."""
    return set(stays_in_parts(step, activations, laps_at(step, activations, NUM) if laps is None else laps)) - INSIDE


def test_values_that_only_divided_laps_touch_stay_in_parts():
    assert in_parts(STEP) == {"x", "t", "dx"}
    assert in_parts(STEP, group("x", "t", saving=Saving.KEEP)) == {"x", "t", "dx"}
    assert in_parts(STEP, laps=()) == set()


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (changed(STEP, "x", consecutive=False), {"t", "dx"}),
        (changed(STEP, "x", batched=Batched.SAME, consecutive=False), {"t", "dx"}),
        (replace(STEP, outputs=(StorageId("t"),)), {"x", "dx"}),
        (replace(STEP, batch_size="s0", symbols=(("s0", 8),)), set()),
        (also_read_by(STEP, "update", "dx"), {"x", "t"}),
    ],
    ids=["scattered", "equal for all", "returned", "dynamic rows", "read by an op on the whole batch"],
)
def test_other_values_are_whole(step: StepGraph, expected: set[str]):
    assert in_parts(step) == expected


def test_a_value_that_an_undivided_lap_reads_is_whole():
    first, second, *others = laps_at(STEP, (), NUM)
    assert in_parts(STEP, laps=(first, *others)) == {"dx"}
    assert in_parts(STEP, laps=(first, replace(second, micro_batches=2), *others)) == {"dx"}


def test_offloaded_activations_and_the_results_of_laps_into_which_slices_arrive_are_whole():
    assert in_parts(STEP, group("x", saving=Saving.OFFLOAD)) == {"t"}
    assert in_parts(STEP, group("x", "t", saving=Saving.OFFLOAD)) == set()


def walked() -> list[int]:
    """Allocate and free the tensors of `STEP` micro-batch by micro-batch; return the most bytes during each op, without
    parameters."""
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


def test_the_live_bytes_of_each_op_are_those_of_a_walk_over_the_micro_batches():
    made = plan(problem_of(STEP, CLUSTERS["cuda"], hybrid=False, micro_batches=NUM), "keep_all")
    timeline = plan_timeline(STEP, made)
    counted = [
        sum(live[at] for kind, live in timeline.live_bytes_by_kind.items() if kind not in ("param", "moment", "master"))
        for at in range(len(timeline.ops) - 1)
    ]
    wanted = walked()
    # A sum is live from the first op of its lap on, in the last micro-batch.
    assert all(0 <= own - other <= 16 for own, other in zip(counted, wanted, strict=True))
    assert max(counted) == max(wanted)


def test_nothing_fills_whole_tensors_and_the_part_of_a_value_counts_from_its_op_on():
    step = as_run(STEP, (), laps_at(STEP, (), NUM))
    ops, nbytes = {op.id: op for op in step.ops}, {storage.id: storage.nbytes for storage in step.storages}
    assert "x.part" not in nbytes
    assert nbytes["x.earlier"] == 6400 * 3 // 4
    assert ("x.earlier" in ops["fwd.a"].writes, "x.earlier" in ops["fwd.mm"].reads) == (True, False)
    assert "t.earlier" not in nbytes, "the first op of the lap makes it"
    assert ops["fwd.mm"].moved_bytes == 6488 + 3 * 8
