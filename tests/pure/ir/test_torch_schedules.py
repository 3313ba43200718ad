"""`ir.pipeline`: names, numbers that do not go together, and forwards that wait for their backward."""

import pytest

from elixir_compile.base.errors import InvalidOption, UnknownSchedule
from elixir_compile.ir import Phase
from elixir_compile.ir.pipeline import (
    PipelineOrder,
    TorchSchedule,
    outstanding_forwards,
    parse_schedule,
    pipeline_order,
)

GRID = [
    pipeline_order(schedule, num_ranks * loops, num_ranks, num)
    for schedule in TorchSchedule
    for num_ranks in (1, 2, 4)
    for loops in ((1, 2, 3) if schedule.is_looped else (1,))
    for num in (4, 8)
]


@pytest.mark.parametrize("name", ["looped-bfs", "LoopedBFS", "ScheduleLoopedBFS", "looped_bfs"])
def test_a_schedule_has_the_names_of_torch_too(name: str) -> None:
    assert parse_schedule(name) is TorchSchedule.LOOPED_BFS


def test_an_unknown_schedule_is_refused_with_the_nearest_and_a_split_backward_with_the_reason() -> None:
    with pytest.raises(UnknownSchedule, match=r"Did you mean 'looped-bfs'\? The schedules are: gpipe, 1f1b"):
        parse_schedule("looped")
    with pytest.raises(UnknownSchedule, match=r"gradients of inputs and of weights apart.*Use one of gpipe"):
        parse_schedule("ScheduleZBVZeroBubble")


@pytest.mark.parametrize("order", GRID, ids=lambda order: f"{order.schedule}-{order.num_stages}-{order.num_ranks}")
def test_each_stage_runs_each_micro_batch_once_in_each_phase_on_its_rank(order: PipelineOrder) -> None:
    for rank in range(order.num_ranks):
        runs = [(run.stage, run.micro_batch, run.phase) for run in order.runs(rank)]
        stages, numbers = range(rank, order.num_stages, order.num_ranks), range(order.num_micro_batches)
        assert sorted(runs) == sorted(
            (stage, number, phase)
            for stage in stages
            for number in numbers
            for phase in (Phase.BACKWARD, Phase.FORWARD)
        )
        for stage, number, phase in runs:
            if phase is Phase.BACKWARD:
                assert runs.index((stage, number, Phase.FORWARD)) < runs.index((stage, number, phase))


def test_outstanding_forwards_are_all_micro_batches_or_those_that_later_stages_need() -> None:
    """1F1B: a stage is ahead by the stages behind it. Interleaved, 2 stages on each of 2 ranks: rank 1 runs 1F0 1F1
    then forward and backward in turn, 3F0 3B0 3F1 3B1 1F2 1B0; so 1 forward of stage 3 waits, and 3 of stage 1."""
    assert [outstanding_forwards(pipeline_order(TorchSchedule.GPIPE, 4, 4, 8), stage) for stage in range(4)] == [8] * 4
    once = pipeline_order(TorchSchedule.ONE_F_ONE_B, 4, 4, 8)
    assert [outstanding_forwards(once, stage) for stage in range(4)] == [4, 3, 2, 1]
    looped = pipeline_order(TorchSchedule.LOOPED_BFS, 4, 2, 8)
    assert [outstanding_forwards(looped, stage) for stage in range(4)] == [8] * 4
    interleaved = pipeline_order(TorchSchedule.INTERLEAVED, 4, 2, 8)
    assert [outstanding_forwards(interleaved, stage) for stage in range(4)] == [4, 3, 2, 1]


@pytest.mark.parametrize(
    ("schedule", "numbers", "expected"),
    [
        (TorchSchedule.LOOPED_BFS, (6, 4, 8), "a multiple of the 4 ranks, such as 8"),
        (TorchSchedule.LOOPED_BFS, (3, 4, 8), "a multiple of the 4 ranks, such as 4"),
        (TorchSchedule.GPIPE, (4, 2, 8), "a stage per rank under gpipe; interleaved-1f1b and looped-bfs take several"),
        (TorchSchedule.ONE_F_ONE_B, (4, 4, 3), "4 or more under 1f1b"),
        (TorchSchedule.INTERLEAVED, (8, 4, 9), "a multiple of the 4 ranks under interleaved-1f1b, such as 8 or 12"),
        (TorchSchedule.GPIPE, (4, 4, 0), "1 or more"),
    ],
)
def test_numbers_that_torch_refuses_are_refused_with_numbers_that_it_takes(
    schedule: TorchSchedule, numbers: tuple[int, int, int], expected: str
) -> None:
    with pytest.raises(InvalidOption, match=expected):
        pipeline_order(schedule, *numbers)
