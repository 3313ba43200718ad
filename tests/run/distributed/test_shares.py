"""Three real ranks with unequal rows train what one process trains on the whole batch."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.run import shares_checks
from tests.run.processes import spawn

LIMIT_S = 240.0


def on_three(folder: Path, *checks: list[Any]) -> list[list[Any]]:
    """Return what each of `checks` returns on each rank."""
    return spawn(shares_checks.all_of, 3, checks, folder=folder, limit_s=LIMIT_S, timeout_s=LIMIT_S)


def test_rows_of_five_two_and_one_are_eight_rows(tmp_path: Path) -> None:
    trains = ["trains", [5, 2, 1], "float64", 1e-12]
    exact = ["is_exact_in_whole_numbers", [5, 2, 1]]
    weights, other = ["needs_its_weights", [5, 2, 1]], ["refuses_other_shares"]
    of_ranks = on_three(tmp_path, trains, exact, weights, other, ["warns_of_other_rows"])
    for rank, (_, _, off, refused, warned) in enumerate(of_ranks):
        assert off > 1e-2
        given, others, few, much, axes = refused
        assert given.startswith("RanksDiffer")
        assert "rank 0 prepares its model with no shares" in given
        assert "rank 1 does not do what the others do" in others
        assert few.startswith("InvalidOption: option shares: got [0, 1], expected one per rank of the mesh, 3")
        assert "state that sums to 1" in much
        assert axes.startswith("UnsupportedModel: the mesh")
        assert "shares are for one axis" in axes
        rows = [re.match(r"a batch of (\d+) rows on rank 0, whose share is 2 of 6\.", text)[1] for text in warned]
        assert rows == (["3", "5", "9"] if rank == 0 else [])


def test_questions_that_no_shares_answer_are_named(tmp_path: Path) -> None:
    for [(axes, few, mixed, row, other, prime, half, room)] in on_three(tmp_path, ["refuses_other_questions"]):
        assert axes.startswith("UnsupportedModel")
        assert "shares are for one axis" in axes
        assert "expected a fleet of 3 devices" in few
        assert "expected a fleet of 3 devices" in mixed
        assert "option batch: got 1, expected a whole number of rows, 2 or more" in row
        assert other.startswith("RanksDiffer")
        assert re.search("rank 1 asks for shares of 10 rows on ", other)
        assert "option batch: got 4099, expected a multiple of a number of rows that ranks can share out" in prime
        assert "option batch: got 7.5, expected a whole number of rows, 2 or more" in half
        assert re.match(r"NoFeasibleShares: no shares of 1048576 rows fit the ranks, beside a state of", room)


@pytest.mark.slow
def test_a_rank_without_rows_tokens_and_single_precision(tmp_path: Path) -> None:
    """12 s of CPU time."""
    on_three(
        tmp_path,
        ["trains", [6, 2, 0], "float64", 1e-12],
        ["trains", [5, 2, 1], "float32", 1e-6],
        ["weighs_tokens", [5, 2, 1]],
        ["is_exact_in_whole_numbers", [4, 2, 2]],
    )
