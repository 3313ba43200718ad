"""What a process may use, by its affinity and its control groups, and sets of objects that they do not keep alive."""

import os
from pathlib import Path

import pytest

from elixir_compile.base import process as control_groups
from elixir_compile.base.process import Living, group_limit_bytes, num_usable_cores, quota_cores
from elixir_compile.base.units import GIB

# ----------------------------------------------------------------------------------------------------------------------
# The cores and the memory of a process are those that its affinity and all of its control groups allow.


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("0::/", "memory.max"),
        ("0::/user/job", "user/memory.max"),
        ("4:cpu,memory:/job", "memory/job/memory.limit_in_bytes"),
    ],
)
def test_a_control_group_limits_the_memory(tmp_path: Path, line: str, file: str) -> None:
    memberships, groups = tmp_path / "cgroup", tmp_path / "groups"
    memberships.write_text(f"{line}\n7:blkio:/\n")
    (groups / file).parent.mkdir(parents=True)
    (groups / file).write_text(f"{4 * GIB}\n")
    assert group_limit_bytes(memberships, groups) == 4 * GIB


def test_no_control_group_no_limit(tmp_path: Path) -> None:
    assert group_limit_bytes(tmp_path / "missing", tmp_path) is None
    (tmp_path / "cgroup").write_text("0::/\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert group_limit_bytes(tmp_path / "cgroup", tmp_path) is None


@pytest.mark.parametrize(
    ("line", "files", "wanted"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/", {}, None),
        # The pod's quota is the smaller one, then the container's.
        ("0::/pod/box", {"pod/cpu.max": "200000 100000", "pod/box/cpu.max": "max 100000"}, 2.0),
        ("0::/pod/box", {"pod/cpu.max": "800000 100000", "pod/box/cpu.max": "50000 100000"}, 0.5),
        ("0::/of/the/host", {"cpu.max": "300000 100000"}, 3.0),  # in a container that sees its own group as the root
        ("3:cpu,cpuacct:/", {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, None),
        ("3:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4.0),
        (
            "3:cpu,cpuacct:/pod/box",
            {
                "cpu,cpuacct/pod/cpu.cfs_quota_us": "250000",
                "cpu,cpuacct/pod/cpu.cfs_period_us": "50000",
                "cpu,cpuacct/pod/box/cpu.cfs_quota_us": "-1",
                "cpu,cpuacct/pod/box/cpu.cfs_period_us": "100000",
            },
            5.0,
        ),
        ("4:cpuset:/", {"cpu.max": "100000 100000", "cpuset/cpu.cfs_quota_us": "1"}, None),  # of no group of ours
    ],
)
def test_a_control_group_limits_the_cores(
    tmp_path: Path, line: str, files: dict[str, str], wanted: float | None
) -> None:
    memberships, groups = tmp_path / "cgroup", tmp_path / "groups"
    memberships.write_text(f"{line}\n7:blkio:/\n")
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(f"{text}\n")
    assert quota_cores(memberships, groups) == wanted


@pytest.mark.parametrize(
    ("quota", "mask", "wanted"), [(None, 8, 8), (2.9, 8, 2), (0.5, 8, 1), (16.0, 8, 8), (None, 1, 1)]
)
def test_the_smaller_of_mask_and_quota_counts(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, mask: int, wanted: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(mask)))
    monkeypatch.setattr(control_groups, "quota_cores", lambda memberships, groups: quota)
    assert num_usable_cores() == wanted


# ----------------------------------------------------------------------------------------------------------------------
# Sets of objects that they do not keep alive.


class Thing:
    """An object that equals all others."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


@pytest.fixture
def things() -> list[Thing]:
    return [Thing() for _ in range(3)]


@pytest.fixture
def living(things: list[Thing]) -> Living[Thing]:
    made: Living[Thing] = Living()
    for thing in things:
        made.add(thing)
    return made


def test_objects_come_once_each_in_their_order_by_identity(living: Living[Thing], things: list[Thing]) -> None:
    living.add(things[1])
    assert [id(thing) for thing in living] == [id(thing) for thing in things]
    assert len(living) == 3
    assert things[2] in living
    assert Thing() not in living


def test_an_object_that_is_gone_is_not_there(living: Living[Thing], things: list[Thing]) -> None:
    del things[0]
    assert len(living) == 2
    things.clear()
    assert not living


def test_an_object_may_come_and_another_go_while_somebody_iterates(living: Living[Thing], things: list[Thing]) -> None:
    """As a thread does between any two steps of the iteration; a `WeakSet` raises RuntimeError."""
    late = Thing()
    seen = []
    for thing in living:
        seen.append(id(thing))
        living.add(late)
        living.discard(things[0])
    assert seen == [id(thing) for thing in things]
    assert [id(thing) for thing in living] == [id(things[1]), id(things[2]), id(late)]
