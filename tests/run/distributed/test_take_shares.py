"""The rows that are suggested after seven steps, applied in the same run: log line, `take`, shorter steps."""

from pathlib import Path

import pytest

from tests.run import taking_checks
from tests.run.processes import spawn
from tests.run.taking_checks import BATCH, STEPS

LIMIT_S = 240.0


def test_the_suggested_rows_are_taken_and_steps_are_shorter(tmp_path: Path) -> None:
    """Emulated: rank 1 sleeps three times as long as rank 0 for each row, so seconds do not depend on cores."""
    checks = [["takes", [8, 8], True], ["refuses_to_take"]]
    ranks = spawn(taking_checks.all_of, 2, checks, folder=tmp_path, limit_s=LIMIT_S, timeout_s=LIMIT_S)
    (first, refused), (second, _) = ranks
    at, rows = first["taken"]
    assert [at, rows] == second["taken"]
    assert 7 <= at <= 9
    assert sum(rows) == BATCH
    assert rows[0] >= 11
    assert f"shares would be {rows[0]}/{rows[1]}: " in first["line"][0]
    assert second["line"] == []  # one rank writes
    for rank, found in enumerate((first, second)):
        assert found["rows"] == [8] * at + [rows[rank]] * (STEPS - at)
        assert found["grads"] < 1e-12
        assert found["losses"] < 1e-12
        # The first two steps with each number of rows compile. Other processes make a step longer, never shorter.
        before, after = found["step_s"][2:at], found["step_s"][at + 2 :]
        assert min(before) >= 1.5 * min(after), (before, after)
    differ, batch, parts, few, when = refused
    assert differ.startswith("RanksDiffer")
    assert "rank 1 takes shares" in differ
    assert "option shares: got 10, expected rows of the batch of 8 in all" in batch
    assert "expected the parts of the state that the ranks own, [0.5, 0.5]: only rows change" in parts
    assert few.startswith("InvalidOption: option shares: got")
    assert "from batch 1 of epoch 0 on" in when
    assert "from batch 2 of epoch 0 on" in when


@pytest.mark.slow  # 30 s of CPU time
@pytest.mark.parametrize(("rows", "has_shares"), [([4, 8, 4], True), ([8, 8], False)])
def test_rows_change_beside_a_rank_whose_rows_stay_and_without_earlier_shares(
    tmp_path: Path, rows: list[int], has_shares: bool
) -> None:
    checks = [["takes", rows, has_shares]]
    for [found] in spawn(taking_checks.all_of, len(rows), checks, folder=tmp_path, limit_s=LIMIT_S, timeout_s=LIMIT_S):
        _, taken = found["taken"]
        assert sum(taken) == BATCH
        assert taken[1] < 8
        assert found["grads"] < 1e-12
