"""Rows of micro-batches, shares of ranks, and the orders of torch's pipeline schedules."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.base.errors import InvalidOption, InvalidPlan, PlanFileError, UnknownSchedule
from elixir_compile.ir import Phase, sizes
from elixir_compile.ir.pipeline import (
    PipelineOrder,
    TorchSchedule,
    outstanding_forwards,
    parse_schedule,
    pipeline_order,
)
from elixir_compile.ir.schedule import LEAST_ROWS, most_rows, rows_of_micro_batches
from elixir_compile.ir.share import (
    Share,
    batch_of,
    check_shares,
    equal_shares,
    have_equal_shards,
    largest_remainder,
    shares_from_json,
    shares_to_json,
)

# ----------------------------------------------------------------------------------------------------------------------
# The rows of micro-batches of a dynamic number of rows, and sizes with them as text.


def test_micro_batches_share_all_rows_evenly_and_none_has_a_single_row() -> None:
    for rows in range(LEAST_ROWS, 60):
        for most in range(1, 20):
            found = rows_of_micro_batches(rows, most)
            assert sum(found) == rows
            assert len(found) <= most
            assert LEAST_ROWS <= found[-1] <= found[0] <= found[-1] + 1


def test_no_smaller_batch_has_a_larger_micro_batch_than_a_plan_counts() -> None:
    for most in range(1, 20):
        largest = 0
        for rows in range(1, 60):
            largest = max(largest, *rows_of_micro_batches(rows, most))
            assert most_rows(rows, most) == largest
            assert sizes.evaluate(f"MicroBatchRows(s0, {most})", {"s0": rows}) == largest


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24*s0*s1 + 8*s0", "24*MicroBatchRows(s0, 4)*s1 + 8*MicroBatchRows(s0, 4)"),
        ("24*s0**2", "24*s0**2"),
        ("24*s0 + 8", "24*s0 + 8"),
        ("8*Max(1, s0)", "8*Max(1, s0)"),
    ],
)
def test_a_size_of_a_micro_batch_has_its_rows_in_place_of_those_of_the_batch(text: str, expected: str) -> None:
    assert sizes.of_micro_batch(text, "s0", 4) == expected
    sizes.check_text(expected)
    assert sizes.evaluate(expected, {"s0": 16, "s1": 3}) <= sizes.evaluate(text, {"s0": 16, "s1": 3})


def test_sizes_are_divided_and_multiplied_by_constants() -> None:
    assert sizes.divided("64*s0*s1 + 16*s1", 4) == "16*s0*s1 + 4*s1"
    assert sizes.evaluate(sizes.divided("6*s0 + 3", 4), {"s0": 3}) == 6
    assert sizes.times("6*s0 + 3", 2) == "12*s0 + 6"


# ----------------------------------------------------------------------------------------------------------------------
# `ir.share`: rows and parts of the state of each rank.


SHARES = tuple(
    Share(rank=rank, num_rows=rows, micro_batches=1, state=state)
    for rank, (rows, state) in enumerate([(5, 0.5), (2, 0.25), (1, 0.25)])
)


def test_shares_add_up_to_the_batch() -> None:
    assert batch_of(SHARES) == 8
    assert not have_equal_shards(SHARES)
    assert shares_from_json(shares_to_json(SHARES)) == SHARES


def test_equal_shares() -> None:
    shares = equal_shares(3, 8)
    assert [share.num_rows for share in shares] == [3, 3, 2]
    assert have_equal_shards(shares)
    check_shares(shares, 3)


def test_shares_that_do_not_fit_the_ranks_are_refused() -> None:
    check_shares(SHARES, 3)
    for wrong, expected in (
        (SHARES[:2], "one per rank of the mesh, 3"),
        (SHARES[::-1], "in the order of ranks"),
        ((), "one per rank"),
        (tuple(dataclasses.replace(share, num_rows=0) for share in SHARES), "with rows"),
        ((*SHARES[:2], dataclasses.replace(SHARES[2], state=0.25 + 2e-9)), "with state that sums to 1"),
    ):
        with pytest.raises(InvalidOption, match=f"option shares: .*{expected}"):
            check_shares(wrong, 3)
    check_shares((*SHARES[:2], dataclasses.replace(SHARES[2], state=0.25 + 5e-10)), 3)


@pytest.mark.parametrize(
    "wrong", [{"rank": -1}, {"num_rows": -1}, {"micro_batches": 0}, {"state": 1.5}, {"state": float("nan")}]
)
def test_a_share_of_impossible_numbers_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidPlan, match="share of rank"):
        dataclasses.replace(SHARES[0], **wrong)
    with pytest.raises(PlanFileError, match=r"shares\[0\]"):
        shares_from_json(shares_to_json(SHARES).replace('"state": 0.5', '"state": 2', 1))


def test_the_largest_remainders_get_one_more() -> None:
    """Of 5 by 5 : 2 : 1 the parts are 3.125, 1.25 and 0.625: the last has the largest remainder."""
    assert largest_remainder(5, [5, 2, 1]) == (3, 1, 1)
    assert largest_remainder(1, [1, 1, 1]) == (1, 0, 0)
    assert largest_remainder(0, [0, 0]) == (0, 0)
    with pytest.raises(ValueError, match="all 0"):
        largest_remainder(1, [0, 0])


@given(st.integers(0, 1000), st.lists(st.integers(0, 100), min_size=1, max_size=9).filter(any))
def test_parts_sum_up_and_are_within_one_of_their_weight(total: int, weights: list[int]) -> None:
    parts = largest_remainder(total, weights)
    assert sum(parts) == total
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - total * weight / sum(weights)) < 1
        assert part == 0 or weight > 0


# ----------------------------------------------------------------------------------------------------------------------
# `ir.pipeline`: names, numbers that do not go together, and forwards that wait for their backward.


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
