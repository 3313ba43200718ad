"""Three ranks that own unequal parts of parameters and state train as one process does, and hold what they own."""

from pathlib import Path
from typing import Any

import pytest

from tests.run import uneven_checks
from tests.run.processes import spawn

LIMIT_S = 240.0


def all_of(state: list[float], folder: Path, *checks: list[Any]) -> list[list[Any]]:
    """Return what each of `checks` returns on each rank."""
    how = {"folder": folder, "limit_s": LIMIT_S, "timeout_s": LIMIT_S}
    return spawn(uneven_checks.all_of, len(state), state, checks, **how)


def test_parts_of_seven_two_and_one_rows_answer_as_the_whole_tensor(tmp_path: Path) -> None:
    spawn(uneven_checks.answers_as_the_whole, 3, str(tmp_path / "dcp"), folder=tmp_path, limit_s=LIMIT_S)


def test_checkpoints_of_unequal_parts_load_on_one_rank_and_on_other_parts(tmp_path: Path) -> None:
    found = spawn(uneven_checks.reshards, 3, str(tmp_path), folder=tmp_path, limit_s=LIMIT_S)
    assert found == [[0, 151, 150]] * 3


@pytest.mark.slow  # 40 s of CPU time
def test_unequal_parts_train_as_one_process(tmp_path: Path) -> None:
    checks = ["has_states"], ["keeps_habits"], ["clips_what_has_landed"], ["weighs_uneven_batches"], ["recovers", 1.1]
    all_of([0.6, 0.3, 0.1], tmp_path, *checks)


@pytest.mark.slow  # 20 s of CPU time
def test_a_rank_without_a_part_trains_as_one_process(tmp_path: Path) -> None:
    by_host = {"tightness": 1.15}
    checks = ["trains", "odd", by_host], ["trains", "odd", {"optimizer": "adamw"}], ["averages_what_is_whole"]
    of_ranks = all_of([0.0, 0.5, 0.5], tmp_path, *checks)
    for found in of_ranks:
        for trained in found[:2]:
            assert max(trained[what] for what in ("loss", "norm", "weights")) < 1e-12
            assert trained["moved"] > 1e-4
    # Each rank has homes of its own: what has no part needs no host.
    assert [found[0]["optim"] for found in of_ranks] == [["device"], ["host"], ["host"]]


@pytest.mark.slow  # 10 s of CPU time
def test_padded_buffers_of_unequal_parts_train_as_one_process(tmp_path: Path) -> None:
    for (trained,) in all_of([0.3, 0.4, 0.3], tmp_path, ["trains", "odd", {"dtype": "float32", "optimizer": "adamw"}]):
        assert max(trained[what] for what in ("loss", "norm", "weights")) < 2e-6
