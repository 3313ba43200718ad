"""`step.pipeline`: seconds, bubbles, traffic and peaks of steps that are worked out by hand, and laws of all."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.base.errors import InvalidPlan
from elixir_compile.ir import Phase
from elixir_compile.ir.hardware import Link
from elixir_compile.ir.pipeline import PipelineOrder, TorchSchedule, pipeline_order
from elixir_compile.step.pipeline import StageSeconds, play_pipeline

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
