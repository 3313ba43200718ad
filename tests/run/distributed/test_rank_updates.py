"""Several ranks update when their plan says and keep state where it says: the bits of updates after the backward."""

from pathlib import Path

import pytest

from tests.run import ranks_updates
from tests.run.processes import spawn

pytest.importorskip("transformers")

LIMIT_S = 120.0


def test_the_moment_of_the_update_changes_no_bit(tmp_path: Path) -> None:
    for found in spawn(ranks_updates.updates_when_asked, 2, "odd", folder=tmp_path, limit_s=LIMIT_S):
        assert found["apart"] < ranks_updates.CLOSE
        assert found["queued"] > 0
        for how in ("in_backward, False", "auto, True"):
            assert "host" in found[how]["optim"]
            assert found[how]["says"]
            assert found[how]["update"] == ("in_backward" if how.startswith("in") else "across_steps")


def test_reads_wait_and_gathers_come_in_one_order(tmp_path: Path) -> None:
    checks = [["reads_wait"], ["gathers_in_one_order"], ["refuses_changed_gradients"]]
    spawn(ranks_updates.all_of, 2, checks, folder=tmp_path, limit_s=LIMIT_S)


@pytest.mark.parametrize("when", ["before", "in it"])
def test_an_update_that_fails_on_one_rank_is_an_error_on_all(when: str, tmp_path: Path) -> None:
    others, own = spawn(ranks_updates.fails_on_one, 2, when, folder=tmp_path, timeout_s=20.0)
    assert own == ["ArithmeticError", "the kernel fell over"]
    assert others[0] == "PeerFailed"
    assert "rank 1" in others[1]
    if when == "before":
        assert "ArithmeticError: the kernel fell over" in others[1]


@pytest.mark.slow
def test_state_on_disk_with_an_empty_shard(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    for found in spawn(ranks_updates.keeps_state_on_disk, 3, str(disk), folder=tmp_path, limit_s=LIMIT_S):
        assert "disk" in found["homes"]
        assert found["folders"] == ["rank0", "rank1", "rank2"]
        assert 0 < found["held"] <= found["planned"] + 2 * 4096 * found["files"]
        assert found["left"] == []


def test_masters_in_memory_and_on_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    for in_memory, on_disk in spawn(ranks_updates.keeps_masters, 2, str(disk), folder=tmp_path, limit_s=LIMIT_S):
        assert "host" in in_memory
        assert "disk" in on_disk


def test_a_full_disk_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    others, own = spawn(ranks_updates.has_no_room, 2, str(disk), folder=tmp_path)
    assert own[0] == "DiskFull"
    assert others[0] == "PeerFailed"
    assert "DiskFull" in others[1]
