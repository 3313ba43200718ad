"""`balance`: rows by the seconds that ranks were seen to compute."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.search.shares.assign import balance_line, balanced_rows, fixed_share
from elixir_compile.step.batch_rows import graph_of_rows
from tests.pure.search.test_choose_shares import MIXED
from tests.pure.search.test_micro_batch_count import TRAINED


def longest_s(rows: tuple[int, ...], before: list[int], busy_s: list[float]) -> float:
    """The seconds of the slowest rank."""
    return max(seconds * new / own for new, own, seconds in zip(rows, before, busy_s, strict=True))


@given(st.lists(st.tuples(st.integers(2, 5), st.floats(0.01, 10.0)), min_size=1, max_size=3))
def test_no_other_rows_are_shorter(ranks: list[tuple[int, float]]) -> None:
    rows, busy_s = [own for own, _ in ranks], [seconds for _, seconds in ranks]
    found = balanced_rows(rows, busy_s)
    assert sum(found) == sum(rows)
    assert min(found) >= 2
    others = itertools.product(range(2, sum(rows) + 1), repeat=len(rows))
    least_s = min(longest_s(other, rows, busy_s) for other in others if sum(other) == sum(rows))
    assert longest_s(found, rows, busy_s) == pytest.approx(least_s)


def test_a_rank_that_is_three_times_slower_gets_a_third_of_the_rows() -> None:
    assert balanced_rows([8, 8], [0.08, 0.24]) == (12, 4)
    assert balance_line([8, 8], [0.08, 0.24]) == (
        "uneven    ranks compute 8/8 rows in 80 ms, 240 ms; shares would be 12/4: 50% shorter"
    )


def test_seconds_that_no_row_takes_stay_where_they_are() -> None:
    """Rank 1 has 90 ms of launches: more rows cost it as much as rank 0."""
    assert balanced_rows([8, 8], [0.08, 0.16], [0.0, 0.5625]) == (12, 4)
    assert balanced_rows([8, 8], [0.08, 0.16]) == (11, 5)
    line = balance_line([8, 8], [0.08, 0.16], [0.0, 0.5625])
    assert line is not None
    assert line.endswith("shares would be 12/4: 22% shorter")


def test_launches_and_weights_are_the_fixed_share_of_a_step() -> None:
    device = MIXED.seats[0].cluster.device
    slow_launch = replace(device, launch_s=1.0)
    no_launch = replace(device, launch_s=0.0)
    large = graph_of_rows(TRAINED, 1 << 20)
    assert fixed_share(TRAINED, slow_launch) > 0.99
    assert 0 <= fixed_share(large, no_launch) < 0.001 < fixed_share(TRAINED, device)
    assert fixed_share(replace(TRAINED, undivided="it draws random numbers"), device) == 0.0


def test_ranks_within_a_tenth_are_left_alone() -> None:
    assert balance_line([8, 8], [1.0, 1.15]) is None
    assert balance_line([2, 2], [1.0, 3.0]) is None  # a rank has at least two rows


def test_a_rank_without_rows_gets_none() -> None:
    assert balanced_rows([0, 6, 6], [0.5, 1.0, 2.0]) == (0, 8, 4)
