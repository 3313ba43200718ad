"""Parameters of several ranks on disk: bitwise what they are in memory, and what goes wrong is told to all ranks."""

from pathlib import Path
from typing import Any

import pytest

from tests.run import ranks_disk
from tests.run.processes import in_turn, spawn

MODES = ["across_steps", "after_backward", "in_backward"]
LIMITS: dict[str, Any] = {"limit_s": 240.0, "timeout_s": 240.0}


@pytest.fixture
def disk(tmp_path: Path) -> str:
    """A folder for the files of all ranks."""
    (tmp_path / "disk").mkdir()
    return str(tmp_path / "disk")


@pytest.mark.parametrize(
    ("world_size", "updates", "parts", "kind"),
    [
        pytest.param(2, MODES[:1], [], "ShardedDiskBucket", id="two"),
        pytest.param(2, MODES[1:], [], "ShardedDiskBucket", id="two in other modes", marks=pytest.mark.slow),
        pytest.param(3, MODES, [], "ShardedDiskBucket", id="three", marks=pytest.mark.slow),
        pytest.param(2, MODES, [0.7, 0.3], "UnevenDiskBucket", id="unequal", marks=pytest.mark.slow),
        pytest.param(3, MODES, [0.5, 0.0, 0.5], "UnevenDiskBucket", id="one has none", marks=pytest.mark.slow),
    ],
)
def test_parameters_on_disk_have_the_bits_of_those_in_memory(
    world_size: int, updates: list[str], parts: list[float], kind: str, disk: str, tmp_path: Path
) -> None:
    of_ranks = spawn(ranks_disk.has_the_bits_of_memory, world_size, disk, updates, parts, folder=tmp_path, **LIMITS)
    for of_update in zip(*of_ranks, strict=True):  # ranks that own unequal parts have homes of their own
        assert kind in {each for kinds in of_update for each in kinds}, of_ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    ["moves_the_planned_bytes", "follows_the_user", "reads_frozen_codes", "is_planned"],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_on_disk(check: str, world_size: int, disk: str, tmp_path: Path) -> None:
    for (found,) in spawn(in_turn, world_size, ranks_disk.__name__, [[check, disk]], folder=tmp_path, **LIMITS):
        assert found is None or "disk" in found


@pytest.mark.slow
def test_what_two_ranks_save_from_disk_is_loaded_by_three_and_by_one(disk: str, tmp_path: Path) -> None:
    for world_size, checks in ((2, ["saves", "loads"]), (3, ["loads"]), (1, ["loads"])):
        given = [[check, disk] for check in checks]
        for found in spawn(in_turn, world_size, ranks_disk.__name__, given, folder=tmp_path, **LIMITS):
            assert found[-1]


@pytest.mark.slow
@pytest.mark.parametrize("call", [("preadv", 0), ("preadv", 9), ("preadv", 30), ("pwritev", 0), ("pwritev", 7)])
def test_a_failure_on_one_rank_is_an_error_on_all(call: tuple[str, int], disk: str, tmp_path: Path) -> None:
    others, own = spawn(ranks_disk.fails_on_the_last, 2, disk, *call, folder=tmp_path, limit_s=240.0, timeout_s=20.0)
    assert own[0] == "DiskFailed"
    assert others[0] == "PeerFailed"
    assert "nothing" not in (own[2], others[2])  # no step is taken with what may be half new


@pytest.mark.slow
def test_a_full_disk_on_one_rank_is_an_error_on_all(disk: str, tmp_path: Path) -> None:
    others, own = spawn(ranks_disk.has_no_room_for_parameters, 2, disk, folder=tmp_path)
    assert own[0] == "DiskFull"
    assert ".param needs" in own[1]
    assert others[0] == "PeerFailed"
    assert "DiskFull" in others[1]
