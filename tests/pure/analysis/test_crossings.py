"""Offloaded activations that pass the link slice by slice while laps run: which do, their bytes, and their seconds."""

from dataclasses import replace

import pytest

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.ir import Activations, GroupId, Kind, Plan, Saving, StepGraph, StorageId
from elixir_compile.search import plan
from elixir_compile.search.evaluator import DraftPlan, Evaluator
from elixir_compile.search.problem import Problem
from elixir_compile.search.reasons import write_out
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.step.as_run import as_run, laps_at
from elixir_compile.step.divide import crossings, divided, slices_of
from elixir_compile.step.seconds import simulate
from elixir_compile.step.timeline import plan_timeline
from tests.pure.graph_text import parse_graph
from tests.pure.memory_walk import walk_memory
from tests.pure.search.test_planner import CLUSTERS, problem_of

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
