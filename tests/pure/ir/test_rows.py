"""The rows of micro-batches of a dynamic number of rows, and sizes with them as text."""

import pytest

from elixir_compile.ir import sizes
from elixir_compile.ir.schedule import LEAST_ROWS, most_rows, rows_of_micro_batches


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
