"""`ir.share`: rows and parts of the state of each rank."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.base.errors import InvalidOption, InvalidPlan, PlanFileError
from elixir_compile.ir.share import (
    Share,
    batch_of,
    check_shares,
    equal_shares,
    first_rows,
    have_equal_parts,
    largest_remainder,
    shares_from_json,
    shares_to_json,
)

SHARES = tuple(
    Share(rank=rank, num_rows=rows, micro_batches=1, state=state)
    for rank, (rows, state) in enumerate([(5, 0.5), (2, 0.25), (1, 0.25)])
)


def test_rows_of_ranks_follow_each_other() -> None:
    assert batch_of(SHARES) == 8
    assert first_rows(SHARES) == (0, 5, 7)
    assert not have_equal_parts(SHARES)
    assert shares_from_json(shares_to_json(SHARES)) == SHARES


def test_equal_shares() -> None:
    shares = equal_shares(3, 8)
    assert [share.num_rows for share in shares] == [3, 3, 2]
    assert have_equal_parts(shares)
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
