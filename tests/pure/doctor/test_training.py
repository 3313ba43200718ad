"""D13 to D15 on a made-up machine: each fault fires, and is silent just within its limit."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elixir_compile.tools.doctor.checks import ASSUMED_BYTES_PER_S, LEAST_FREE_BYTES, filesystem_of
from elixir_compile.tools.doctor.facts import Profile, System, Verdict
from tests.pure.doctor.made_up import DISK, FILES, TORCH, faults, good_machine, with_variables

NOTE, BAD, UNKNOWN = Verdict.NOTE, Verdict.BAD, Verdict.UNKNOWN


def with_profile(system: System, **changes: Any) -> System:
    assert isinstance(system.profile, Profile)
    return replace(system, profile=replace(system.profile, **changes))


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/srv/state", "ext4"),
        ("/dev/shm/state", "tmpfs"),
        ("/dev/shmx", "ext4"),
        ("/mnt/nfs", "nfs4"),
        ("/mnt/with space/state", "overlay"),
        ("/mnt/hidden", "tmpfs"),
    ],
)
def test_the_filesystem_is_that_of_the_innermost_mount(path: str, kind: str) -> None:
    assert filesystem_of(Path(path), FILES["proc/self/mountinfo"]) == kind


def test_a_system_without_mounts_has_no_filesystem(tmp_path: Path) -> None:
    assert filesystem_of(Path("/srv"), "") == ""
    assert faults("D13", good_machine(tmp_path, {"proc/self/mountinfo": None}))[0].verdict is UNKNOWN


@pytest.mark.parametrize(
    ("disk", "wanted"),
    [
        (replace(DISK, path=Path("/dev/shm/state")), [BAD]),
        (replace(DISK, path=Path("/mnt/nfs/state")), [NOTE]),
        (replace(DISK, path=Path("/mnt/with space")), [NOTE]),
        (replace(DISK, is_direct=False), [NOTE]),
        (replace(DISK, free_bytes=LEAST_FREE_BYTES), []),
        (replace(DISK, free_bytes=LEAST_FREE_BYTES - 1), [NOTE]),
        (replace(DISK, error="new folder failed at /srv/state", fix="mkdir -p /srv/state"), [BAD]),
        (None, []),
    ],
)
def test_the_disk(tmp_path: Path, disk: Any, wanted: list[Verdict]) -> None:
    found = faults("D13", good_machine(tmp_path, disk=disk))
    assert [finding.verdict for finding in found] == wanted
    assert all(finding.fix for finding in found)


@pytest.mark.parametrize("direction", ["write_bytes_per_s", "read_bytes_per_s"])
def test_a_disk_slower_than_plans_assume_should_be_measured(tmp_path: Path, direction: str) -> None:
    slow = replace(DISK, **{direction: ASSUMED_BYTES_PER_S - 1})
    unmeasured = with_profile(good_machine(tmp_path, disk=slow), has_disk=False)
    (found,) = faults("D13", unmeasured)
    assert (found.verdict, found.fix) == (NOTE, "elixir-compile measure --disk-path /srv/state")
    assert faults("D13", with_profile(unmeasured, has_disk=True)) == []
    enough = replace(DISK, **{direction: ASSUMED_BYTES_PER_S})
    assert faults("D13", replace(unmeasured, disk=enough)) == []


def test_a_cache_that_cannot_be_written_is_bad_and_trying_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    caches = {"ELIXIR_CACHE_DIR": tmp_path / "file" / "cache", "TORCHINDUCTOR_CACHE_DIR": tmp_path / "new" / "cache"}
    (found,) = faults("D14", good_machine(tmp_path, caches=caches))
    assert found.verdict is BAD
    assert found.fix.startswith("export ELIXIR_CACHE_DIR=/")
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs modes of files")
@pytest.mark.parametrize(("mode", "wanted"), [(0o755, []), (0o775, [NOTE])])
def test_a_folder_of_host_passes_that_others_may_write(tmp_path: Path, mode: int, wanted: list[Verdict]) -> None:
    system = good_machine(tmp_path)
    host = tmp_path / "cache" / "host"
    host.mkdir()
    host.chmod(mode)
    found = faults("D14", system)
    assert [finding.verdict for finding in found] == wanted
    assert all(finding.fix == f"chmod go-w {host}" for finding in found)


@pytest.mark.parametrize(
    ("changes", "wanted", "text"),
    [
        ({}, [], ""),
        ({"is_measured": False}, [NOTE], "was not measured"),
        ({"is_measured": False, "num_others": 2}, [NOTE], "none of the 2 measured profiles"),
        ({"num_others": 2}, [], ""),
    ],
)
def test_the_measured_profile(tmp_path: Path, changes: dict[str, Any], wanted: list[Verdict], text: str) -> None:
    found = faults("D14", with_profile(good_machine(tmp_path), **changes))
    assert [finding.verdict for finding in found] == wanted
    assert all(text in finding.found and finding.fix == "elixir-compile measure" for finding in found)


@pytest.mark.parametrize(
    ("changes", "num_accelerators", "wanted"),
    [
        ({"has_gloo": False}, 2, [BAD]),
        ({"has_nccl": False}, 2, [BAD]),
        ({"has_nccl": False, "accelerator": "xpu"}, 2, []),
        ({"has_gloo": False, "has_nccl": False}, 1, []),
        ({}, 4, []),  # of 8 cores, two for each rank
        ({}, 5, [NOTE]),
        ({"num_threads": 9}, 1, [BAD]),
        ({"num_threads": 8}, 1, []),
    ],
)
def test_ranks_have_cores_and_collectives(
    tmp_path: Path, changes: dict[str, Any], num_accelerators: int, wanted: list[Verdict]
) -> None:
    torch = replace(TORCH, num_accelerators=num_accelerators, **changes)
    assert [finding.verdict for finding in faults("D15", good_machine(tmp_path, torch=torch))] == wanted


@pytest.mark.parametrize(
    ("num_threads", "quota", "wanted"),
    [(4, "max", []), (5, "max", [BAD]), (2, "400000", []), (3, "400000", [BAD])],
)
def test_the_threads_of_all_ranks_share_the_cores(
    tmp_path: Path, num_threads: int, quota: str, wanted: list[Verdict]
) -> None:
    files: dict[str, str | None] = {"sys/fs/cgroup/pod/cpu.max": f"{quota} 100000"}
    system = good_machine(tmp_path, files, torch=replace(TORCH, num_threads=num_threads))
    found = faults("D15", with_variables(system, LOCAL_WORLD_SIZE="2"))
    assert [finding.verdict for finding in found] == wanted
    assert all(finding.fix == f"export OMP_NUM_THREADS={2 if quota != 'max' else 4}" for finding in found)
