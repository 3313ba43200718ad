"""Stages of a model as layers, the peaks of their ranks, and the seconds, bubbles and traffic of pipelines."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_compile.base.errors import InvalidPlan, NoFeasiblePlan
from elixir_compile.ir import BackwardOrder, Calls, Kind, Phase, Plan, Saving, StepGraph
from elixir_compile.ir.hardware import Link
from elixir_compile.ir.pipeline import PipelineOrder, TorchSchedule, pipeline_order
from elixir_compile.search import plan
from elixir_compile.step import liveness
from elixir_compile.step.bucket_bytes import resting
from elixir_compile.step.stages import (
    Done,
    LayeredStep,
    Run,
    StageBytes,
    StageMemory,
    StageSeconds,
    layered,
    most_beside,
    play_pipeline,
    stage_memory,
    stage_peaks,
)
from elixir_compile.step.timeline import plan_timeline
from tests.pure.memory_walk import order_of
from tests.pure.step.test_calls import problem_of_calls, small_pair
from tests.pure.steps import parse_graph

# ----------------------------------------------------------------------------------------------------------------------
# `step.stages`: layers, what crosses a cut, and the bytes of one stage.


TIED = parse_graph("""
graph tied
storages
  ids  input  int64  8
  wte  param  float32  400
  w0  param  float32  40
  w1  param  float32  40
  mask  temp  bool  4
  e  saved  float32  16
  a0  saved  float32  64
  d0  temp  float32  2
  h0  saved  float32  16
  a1  saved  float32  32
  h1  saved  float32  16
  logits  saved  float32  100
  loss  temp  float32  4
  g  temp  float32  16
  g1  temp  float32  32
  g0  temp  float32  16
  wte.grad  grad  float32  400  of wte
  w1.grad  grad  float32  40  of w1
  w0.grad  grad  float32  40  of w0
outputs
  loss
aliases
ops
  fwd.embed  aten.embedding forward  reads ids wte  writes e  module wte
  fwd.mask  aten.mask forward  reads ids  writes mask
  fwd.mm_0  aten.mm forward  reads e w0  writes a0  flops 100  module h.0
  fwd.drop_0  aten.drop forward  reads a0  writes d0  module h.0
  fwd.add_0  aten.add forward  reads a0 d0 e mask  writes h0  module h.0
  fwd.mm_1  aten.mm forward  reads h0 w1  writes a1  flops 100  module h.1
  fwd.add_1  aten.add forward  reads a1 h0 mask  writes h1  module h.1
  fwd.head  aten.mm forward  reads h1 wte  writes logits  flops 100  module head
  fwd.loss  aten.loss forward  reads logits  writes loss
  bwd.loss  aten.loss backward  reads logits h1 wte  writes g wte.grad  module head
  bwd.mm_1  aten.mm backward  reads g a1 h0 w1  writes g1 w1.grad  module h.1
  bwd.mm_0  aten.mm backward  reads g1 a0 e w0  writes g0 w0.grad  module h.0
  bwd.embed  aten.embedding backward  reads g0 ids  writes wte.grad  module wte
  update  update update  reads wte w0 w1 wte.grad w1.grad w0.grad
""")


@pytest.fixture(scope="module")
def step() -> LayeredStep:
    return layered(TIED)


def test_layers_are_what_precedes_the_first_number_the_numbers_and_what_follows_the_last(step: LayeredStep) -> None:
    assert [layer.modules for layer in step.layers] == [("wte",), ("h.0",), ("h.1",), ("head",)]


def test_an_op_without_a_layer_of_its_own_belongs_to_the_layer_of_the_op_before(step: LayeredStep) -> None:
    assert (step.numbers["fwd.mask"], step.numbers["fwd.loss"], step.numbers["bwd.embed"]) == (0, 3, 0)
    assert "update" not in step.numbers


def test_only_what_depends_on_parameters_crosses_a_cut(step: LayeredStep) -> None:
    """Between the layers of numbers, `h0` crosses, and the mask does not."""
    assert step.crossings == ((), ("e",), ("h0",), ("h1",))


def test_a_module_without_parameters_joins_the_layer_before_it() -> None:
    text = """
graph list
storages
  x  input  float32  8
  w0  param  float32  40
  w1  param  float32  40
  a  temp  float32  8
  b  temp  float32  8
  c  temp  float32  8
outputs
  c
aliases
ops
  fwd.mm_0  aten.mm forward  reads x w0  writes a  flops 100  module 0
  fwd.gelu  aten.gelu forward  reads a  writes b  module 1
  fwd.mm_1  aten.mm forward  reads b w1  writes c  flops 100  module 2
"""
    assert [layer.modules for layer in layered(parse_graph(text)).layers] == [("0", "1"), ("2",)]


def test_without_numbers_each_module_with_parameters_may_begin_a_stage() -> None:
    text = """
graph plain
storages
  x  input  float32  8
  w0  param  float32  40
  w1  param  float32  40
  a  temp  float32  8
  b  temp  float32  8
outputs
  b
aliases
ops
  fwd.mm_0  aten.mm forward  reads x w0  writes a  flops 100  module up
  fwd.mm_1  aten.mm forward  reads a w1  writes b  flops 100  module down
"""
    assert [layer.modules for layer in layered(parse_graph(text)).layers] == [("up",), ("down",)]


def test_the_step_of_a_stage_has_the_work_of_others_as_inputs(step: LayeredStep) -> None:
    own = step.stage_graph(1, 3)
    assert [op.id for op in own.ops] == [
        "fwd.mm_0",
        "fwd.drop_0",
        "fwd.add_0",
        "fwd.mm_1",
        "fwd.add_1",
        "bwd.mm_1",
        "bwd.mm_0",
    ]
    kinds = {storage.id: storage.kind for storage in own.storages}
    assert {name for name, kind in kinds.items() if kind is Kind.INPUT} == {"e", "mask", "g"}
    assert own.outputs == ("h1",)


def test_the_bytes_of_a_stage_are_those_worked_out_by_hand(step: LayeredStep) -> None:
    """Layers h.0 and h.1. A forward leaves a0, h0, a1 and its output h1: 64 + 16 + 32 + 16 = 128. It holds the most at
    its end, as d0 is gone, and a backward at its first op with g1 of 32, and at the second with g1 and g0 without a1
    and h0."""
    assert stage_memory(step.stage_graph(1, 3)) == StageMemory(saved_bytes=128, forward_bytes=128, backward_bytes=160)


def test_a_whole_model_as_one_stage_sends_nothing_and_keeps_what_its_backward_reads(step: LayeredStep) -> None:
    """e, a0, h0, a1, h1 and the logits, with the loss that torch keeps: 16 + 64 + 16 + 32 + 16 + 100 + 4."""
    assert stage_memory(step.stage_graph(0, 4)).saved_bytes == 248


# ----------------------------------------------------------------------------------------------------------------------
# Bytes of all stages that a rank runs: those of a stage as in its plan, and of others what outlasts their calls.


LETTERS = {"F": Phase.FORWARD, "B": Phase.BACKWARD}


def runs_of(order: str) -> list[Run]:
    """Return runs from their texts, stage, letter and micro-batch: `0F0 1F0 1B0 0B0`."""
    return [Run(int(run[0]), LETTERS[run[1]], int(run[2])) for run in order.split()]


def kept(calls: Calls) -> tuple[StepGraph, Plan]:
    problem = problem_of_calls(calls, share=2.0)
    return problem.graph, plan(problem, "keep_all")


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 9), st.integers(1, 9), st.sampled_from([2.0, 0.8, 0.6]), st.sampled_from(list(Saving)))
def test_one_stage_has_the_peak_of_its_plan(num: int, outstanding: int, share: float, saving: Saving) -> None:
    calls = Calls(num=num, outstanding=min(num, outstanding))
    problem = replace(problem_of_calls(calls, share=share), savings=frozenset({Saving.KEEP, saving}))
    try:
        made = plan(problem, "greedy")
    except NoFeasiblePlan:
        return
    order = order_of(num, calls.outstanding)
    runs = [Run(0, LETTERS[letter], order[:at].count(letter)) for at, letter in enumerate(order)]
    (peak,) = stage_peaks([[StageBytes(problem.graph, made)]], runs)
    assert peak.beside_bytes == 0
    assert peak.own_bytes == plan_timeline(problem.graph, made).peak.nbytes


@pytest.mark.parametrize("order", [BackwardOrder.FIRST_FIRST, BackwardOrder.LAST_FIRST])
@pytest.mark.parametrize("num_full", [1, 3, 5])
def test_one_stage_with_lean_calls_has_the_peak_of_its_plan(order: BackwardOrder, num_full: int) -> None:
    problem, made = small_pair(order, num_full)
    micro_batches = list(range(made.calls.num))
    runs = [Run(0, Phase.FORWARD, number) for number in micro_batches]
    reverse = order is BackwardOrder.LAST_FIRST
    runs += [Run(0, Phase.BACKWARD, number) for number in sorted(micro_batches, reverse=reverse)]
    (peak,) = stage_peaks([[StageBytes(problem.graph, made)]], runs)
    assert peak.own_bytes == plan_timeline(problem.graph, made).peak.nbytes


def held_by_hand(graph: StepGraph, made: Plan, num_waiting: int, *, has_grads: bool) -> int:
    """Return what a stage with everything on the device holds while `num_waiting` of its forwards wait."""
    num_forward = sum(op.phase is Phase.FORWARD for op in graph.ops)
    lives, outputs = liveness(graph).lives, graph.outputs
    moved = [storage for storage in graph.storages if storage.kind in (Kind.SAVED, Kind.TEMP)]
    waiting = [s for s in moved if s.id in outputs or lives[s.id].first < num_forward <= lives[s.id].last]
    inputs = made.calls.num * sum(storage.nbytes for storage in graph.storages if storage.kind is Kind.INPUT)
    homes = zip(made.buckets, made.placements, strict=True)
    total = inputs + made.base_bytes + sum(nbytes for home in homes for _, nbytes in resting(*home))
    grads = sum(storage.nbytes for storage in graph.storages if storage.kind is Kind.GRAD) if has_grads else 0
    return total + grads + num_waiting * sum(storage.nbytes for storage in waiting)


def test_a_stage_between_its_runs_holds_what_waits_and_the_sums_of_gradients() -> None:
    graph, made = kept(Calls(num=4, outstanding=4))
    stage = StageBytes(graph, made)
    for started, ended in [(0, 0), (1, 0), (4, 0), (4, 1), (4, 3), (4, 4)]:
        by_hand = held_by_hand(graph, made, started - ended, has_grads=ended > 0)
        assert stage.idle_bytes(Done(started, ended)) == by_hand


def test_stages_one_after_another_hold_less_than_their_peaks_together() -> None:
    graph, made = kept(Calls(num=2, outstanding=2))
    stage = StageBytes(graph, made)
    runs = runs_of("0F0 0F1 1F0 1F1 1B1 1B0 0B1 0B0")  # breadth-first
    first, second = stage_peaks([[stage], [stage]], runs)
    alone = plan_timeline(graph, made).peak.nbytes
    # The first stage has its peak after all backward passes of the second, whose gradients wait for the update.
    assert first.own_bytes == alone
    assert first.beside_bytes == held_by_hand(graph, made, 0, has_grads=True)
    # Both forwards of the first stage wait whenever the second runs; at its update, there are only gradients.
    beside_bytes = [held_by_hand(graph, made, 2, has_grads=False), held_by_hand(graph, made, 0, has_grads=True)]
    assert most_beside([stage], 0, 1, runs) == max(beside_bytes)
    assert second.beside_bytes in beside_bytes
    assert max(first.nbytes, second.nbytes) < 2 * alone


@pytest.mark.parametrize(("held", "most", "times"), [("more_outputs", 2, [0, 1, 2]), ("input_grads", 3, [0, 1, 3])])
def test_what_the_caller_holds_counts_between_runs(held: str, most: int, times: list[int]) -> None:
    plain, calls = Calls(num=3, outstanding=3), Calls(num=3, outstanding=3, **{held: most})
    graph, made = kept(plain)
    without, there = (StageBytes(graph, replace(made, calls=each)) for each in (plain, calls))
    more = [there.idle_bytes(Done(*state)) - without.idle_bytes(Done(*state)) for state in ((3, 0), (3, 1), (3, 3))]
    assert more[1] > 0
    assert more == [number * more[1] for number in times]
    assert there.idle_bytes(Done(3, 3), is_over=True) == without.idle_bytes(Done(3, 3), is_over=True)


# ----------------------------------------------------------------------------------------------------------------------
# `step.stages`: seconds, bubbles, traffic and peaks of steps that are worked out by hand, and laws of all.


LINK = Link(bytes_per_s=100.0, latency_s=0.5, overlaps_compute=True, source="test")
EQUAL = StageSeconds(forward_s=1.0, backward_s=2.0, sent_bytes=50)
ORDERS = st.builds(
    lambda schedule, num_ranks, loops, rounds: pipeline_order(
        schedule, num_ranks * (loops if schedule.is_looped else 1), num_ranks, num_ranks * rounds
    ),
    st.sampled_from(TorchSchedule),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 3),
)


@pytest.mark.parametrize(("schedule", "loops"), [("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("looped-bfs", 2)])
def test_equal_stages_have_the_bubble_of_the_formula(schedule: str, loops: int) -> None:
    """Idle over busy is (P - 1) / (n x loops), so idle over all is (P - 1) / (n x loops + P - 1)."""
    order = pipeline_order(TorchSchedule(schedule), 4 * loops, 4, 8)
    played = play_pipeline(order, [EQUAL] * order.num_stages, lambda one, other: None)
    assert [played.bubble(rank) for rank in range(4)] == pytest.approx([3 / (8 * loops + 3)] * 4)


def test_messages_take_their_latency_and_bytes_and_pass_one_at_a_time() -> None:
    """Two micro-batches, each message 0.5 s + 50 bytes / 100 per s = 1 s: forward 1-2 and 2-3, backward 6-7 and 8-9."""
    order = pipeline_order(TorchSchedule.GPIPE, 2, 2, 2)
    played = play_pipeline(order, [EQUAL, replace(EQUAL, sent_bytes=0)], lambda one, other: LINK)
    spans = {str(run.action): (run.start_s, run.end_s) for rank in played.ranks for run in rank.runs}
    assert spans == {
        "run 0F0": (0, 1), "run 0F1": (1, 2), "run 1F0": (2, 3), "run 1F1": (3, 4),
        "run 1B0": (4, 6), "run 1B1": (6, 8), "run 0B0": (7, 9), "run 0B1": (9, 11),
    }  # fmt: skip
    assert played.step_s == 11
    assert [(rank.busy_s, rank.sent_bytes, rank.received_bytes) for rank in played.ranks] == [(6, 100, 100)] * 2


def test_a_sender_of_1f1b_waits_until_its_message_has_arrived() -> None:
    """Rank 1 runs 1F0 2-3 and 1B0 3-5, and sends 5-6 before 1F1 begins; 1F1 has its input at 3. Where sends are not
    waited for, it begins at 5."""
    order = pipeline_order(TorchSchedule.ONE_F_ONE_B, 2, 2, 3)
    played = play_pipeline(order, [EQUAL, replace(EQUAL, sent_bytes=0)], lambda one, other: LINK)
    starts = {str(run.action): run.start_s for run in played.ranks[1].runs}
    assert (starts["run 1F0"], starts["run 1B0"], starts["run 1F1"]) == (2, 3, 6)
    overlapped = play_pipeline(
        pipeline_order(TorchSchedule.INTERLEAVED, 2, 2, 2),
        [EQUAL, replace(EQUAL, sent_bytes=0)],
        lambda one, other: LINK,
    )
    assert {str(run.action): run.start_s for run in overlapped.ranks[1].runs}["run 1F1"] == 5


def test_a_link_that_needs_the_cores_takes_the_time_of_the_sender() -> None:
    order = pipeline_order(TorchSchedule.GPIPE, 2, 2, 2)
    busy = replace(LINK, overlaps_compute=False)
    played = play_pipeline(order, [EQUAL, replace(EQUAL, sent_bytes=0)], lambda one, other: busy)
    assert [run.start_s for run in played.ranks[0].runs[:2]] == [0, 2]


def test_parameters_that_come_for_the_first_forward_and_backward_delay_these_alone() -> None:
    order = pipeline_order(TorchSchedule.GPIPE, 1, 1, 2)
    slow = StageSeconds(forward_s=1.0, backward_s=2.0, gather_s=3.0, update_s=0.5)
    played = play_pipeline(order, [slow], lambda one, other: None)
    assert played.step_s == 3 + 1 + 3 + 2 + 0.5
    assert played.ranks[0].busy_s == 6.5


@given(ORDERS, st.data())
def test_a_step_is_no_shorter_than_a_rank_is_busy_and_slower_links_never_help(
    order: PipelineOrder, data: st.DataObject
) -> None:
    seconds = st.integers(1, 9).map(float)
    stages = [
        StageSeconds(forward_s=data.draw(seconds), backward_s=data.draw(seconds), sent_bytes=50)
        for _ in range(order.num_stages)
    ]
    free = play_pipeline(order, stages, lambda one, other: None)
    slow = play_pipeline(order, stages, lambda one, other: LINK)
    num = order.num_micro_batches
    one_pass_s = sum(stage.forward_s + stage.backward_s for stage in stages)
    busy_s = [
        num * sum(stage.forward_s + stage.backward_s for stage in stages[rank :: order.num_ranks])
        for rank in range(order.num_ranks)
    ]
    assert [rank.busy_s for rank in free.ranks] == pytest.approx(busy_s)
    assert free.step_s >= max(*busy_s, one_pass_s) - 1e-9
    assert slow.step_s >= free.step_s - 1e-9
    assert sum(rank.sent_bytes for rank in slow.ranks) == sum(rank.received_bytes for rank in slow.ranks)
    assert all(0 <= slow.bubble(rank) < 1 for rank in range(order.num_ranks))


@given(ORDERS)
def test_no_run_begins_before_its_input_is_made(order: PipelineOrder) -> None:
    played = play_pipeline(order, [EQUAL] * order.num_stages, lambda one, other: LINK)
    runs = {
        (run.action.stage, run.action.phase, run.action.micro_batch): run for rank in played.ranks for run in rank.runs
    }
    for (stage, phase, number), run in runs.items():
        before = (stage - 1, phase, number) if phase is Phase.FORWARD else (stage + 1, phase, number)
        if phase is Phase.BACKWARD and stage == order.num_stages - 1:
            before = (stage, Phase.FORWARD, number)
        if before in runs:
            assert run.start_s >= runs[before].end_s


def test_other_numbers_of_stages_and_orders_without_an_end_are_refused() -> None:
    order = pipeline_order(TorchSchedule.GPIPE, 2, 2, 2)
    with pytest.raises(InvalidPlan, match="1 stages are played in an order of 2"):
        play_pipeline(order, [EQUAL], lambda one, other: None)
    silent = replace(order, actions=(order.actions[0][:1], order.actions[1]))
    with pytest.raises(InvalidPlan, match="waits for a message that is never sent"):
        play_pipeline(silent, [EQUAL] * 2, lambda one, other: None)
