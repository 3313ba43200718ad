"""D06 to D09 on made-up files of the system: each fault fires, and is silent just within its limit."""

from dataclasses import replace
from pathlib import Path

import pytest

from elixir_compile.base.units import GIB, KIB, MIB
from elixir_compile.tools.doctor.checks import LEAST_SHM_BYTES, MOST_SWAPPED_BYTES
from elixir_compile.tools.doctor.facts import Pinning, Verdict
from tests.pure.doctor.made_up import (
    ACCELERATOR,
    ADDRESS,
    MEMORY_BYTES,
    NUM_CORES,
    TORCH,
    faults,
    findings,
    good_machine,
    with_variables,
)

NOTE, BAD, UNKNOWN = Verdict.NOTE, Verdict.BAD, Verdict.UNKNOWN
POD, BOX = "sys/fs/cgroup/pod", "sys/fs/cgroup/pod/box"
REFUSED = replace(ACCELERATOR, pinning=Pinning(pinned_bytes=0, refused_bytes=256 * MIB, lock_limit_bytes=8 * MIB))


def test_memory_that_cannot_be_pinned_is_bad(tmp_path: Path) -> None:
    (found,) = faults("D06", good_machine(tmp_path, accelerator=REFUSED))
    assert (found.verdict, found.fix) == (BAD, "ulimit -l unlimited")
    assert "RLIMIT_MEMLOCK is 8.0 MiB" in found.found
    (found,) = faults("D06", good_machine(tmp_path, {".dockerenv": ""}, accelerator=REFUSED))
    assert found.fix == "docker run --ulimit memlock=-1"


def test_pinning_does_not_matter_without_an_accelerator(tmp_path: Path) -> None:
    assert findings("D06", good_machine(tmp_path, accelerator=None)) == []
    unlocked = replace(ACCELERATOR, pinning=None)
    assert findings("D06", good_machine(tmp_path, accelerator=unlocked)) == [], "no copy is faster from pinned memory"


def test_under_wsl_pinned_memory_is_limited(tmp_path: Path) -> None:
    system = good_machine(tmp_path, {"proc/sys/kernel/osrelease": "5.15.153.1-Microsoft-standard-WSL2"})
    assert [finding.verdict for finding in faults("D06", system)] == [NOTE]


@pytest.mark.parametrize(
    ("files", "is_slowed"),
    [
        ({f"{BOX}/memory.max": f"{16 * GIB}", f"{BOX}/memory.high": f"{16 * GIB}"}, False),
        ({f"{BOX}/memory.max": f"{16 * GIB}", f"{BOX}/memory.high": f"{16 * GIB - 1}"}, True),
        ({f"{POD}/memory.high": f"{MEMORY_BYTES - 1}"}, True),
        ({f"{POD}/memory.high": f"{MEMORY_BYTES}"}, False),
        ({f"{BOX}/memory.high": "max"}, False),
    ],
)
def test_a_group_that_is_slowed_down_below_its_limit_is_bad(
    tmp_path: Path, files: dict[str, str | None], is_slowed: bool
) -> None:
    found = faults("D07", good_machine(tmp_path, files))
    assert [finding.verdict for finding in found] == [BAD] * is_slowed
    assert all(finding.fix.startswith("echo max | sudo tee /") for finding in found)
    assert all(finding.fix.endswith("memory.high") for finding in found)


@pytest.mark.parametrize("name", ["memory.max", "memory.limit_in_bytes"])
def test_the_limit_of_a_group_is_shown_as_the_host_memory(tmp_path: Path, name: str) -> None:
    is_new = name == "memory.max"
    files = {f"{BOX}/{name}": f"{16 * GIB}"} if is_new else {f"sys/fs/cgroup/memory/box/{name}": f"{16 * GIB}"}
    line = "0::/pod/box\n" if is_new else "4:memory:/box\n"
    found = findings("D07", good_machine(tmp_path, {**files, "proc/self/cgroup": line}))
    assert found[0].found == "host memory 16.0 GiB, a limit of the control group: the machine has 64.0 GiB"


@pytest.mark.parametrize(("more_bytes", "wanted"), [(0, []), (KIB, [NOTE])])
def test_memory_on_swap(tmp_path: Path, more_bytes: int, wanted: list[Verdict]) -> None:
    swapped_kib = (MOST_SWAPPED_BYTES + more_bytes) // KIB
    meminfo = f"MemTotal: {GIB} kB\nSwapTotal: {8 * MIB} kB\nSwapFree: {8 * MIB - swapped_kib} kB\n"
    of_machine = good_machine(tmp_path, {"proc/meminfo": meminfo})
    assert [finding.verdict for finding in faults("D07", of_machine)] == wanted
    files: dict[str, str | None] = {f"{BOX}/memory.swap.current": f"{MOST_SWAPPED_BYTES + more_bytes}"}
    of_group = good_machine(tmp_path, {"proc/meminfo": f"MemTotal: {GIB} kB\n", **files})
    assert [finding.verdict for finding in faults("D07", of_group)] == wanted


@pytest.mark.parametrize(
    ("files", "num_threads", "wanted"),
    [
        ({f"{BOX}/cpu.max": f"{NUM_CORES * 100000} 100000"}, NUM_CORES, []),
        ({f"{BOX}/cpu.max": f"{NUM_CORES * 100000 - 1} 100000"}, NUM_CORES, [BAD]),
        ({f"{BOX}/cpu.max": "400000 100000"}, 4, [NOTE]),
        ({f"{BOX}/cpu.max": "400000 100000"}, 5, [BAD]),
        ({f"{BOX}/cpu.max": "max 100000", f"{POD}/cpu.max": "400000 100000"}, 5, [BAD]),
        ({f"{BOX}/cpu.max": "800000 100000", f"{POD}/cpu.max": "400000 100000"}, 4, [NOTE]),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/box\n",
                "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "400000",
                "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000",
            },
            5,
            [BAD],
        ),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/box\n",
                "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000",
            },
            NUM_CORES,
            [],
        ),
    ],
)
def test_a_cpu_quota_below_the_threads_of_torch_is_bad(
    tmp_path: Path, files: dict[str, str | None], num_threads: int, wanted: list[Verdict]
) -> None:
    system = good_machine(tmp_path, files, torch=replace(TORCH, num_threads=num_threads))
    found = faults("D07", system)
    assert [finding.verdict for finding in found] == wanted
    assert all(finding.fix in ("", "export OMP_NUM_THREADS=4", "export OMP_NUM_THREADS=7") for finding in found)


def test_without_torch_the_threads_are_those_of_the_environment(tmp_path: Path) -> None:
    files: dict[str, str | None] = {f"{BOX}/cpu.max": "400000 100000", ".dockerenv": ""}
    system = good_machine(tmp_path, files, torch=None)
    assert faults("D07", system)[0].verdict is BAD
    (found,) = faults("D07", with_variables(system, OMP_NUM_THREADS="4"))
    assert (found.verdict, found.fix) == (NOTE, f"docker run --cpus={NUM_CORES}")


@pytest.mark.parametrize(
    ("shm_bytes", "variables", "wanted"),
    [
        (LEAST_SHM_BYTES, {}, []),
        (LEAST_SHM_BYTES - 1, {}, [NOTE]),
        (LEAST_SHM_BYTES - 1, {"WORLD_SIZE": "2"}, [BAD]),
        (LEAST_SHM_BYTES, {"WORLD_SIZE": "2"}, []),
        (None, {}, [NOTE]),
    ],
)
def test_the_size_of_shared_memory(
    tmp_path: Path, shm_bytes: int | None, variables: dict[str, str], wanted: list[Verdict]
) -> None:
    system = with_variables(good_machine(tmp_path, shm_bytes=shm_bytes), **variables)
    assert [finding.verdict for finding in faults("D07", system)] == wanted


def test_a_system_without_proc_is_unknown(tmp_path: Path) -> None:
    assert faults("D07", good_machine(tmp_path, {"proc/meminfo": None}))[0].verdict is UNKNOWN


@pytest.mark.parametrize(
    ("files", "cores", "wanted"),
    [
        ({}, {0, 7}, []),
        ({}, {0, 1, 2, 3}, [BAD]),
        ({f"sys/bus/pci/devices/{ADDRESS}/numa_node": "-1"}, {0}, [UNKNOWN]),
        ({f"sys/bus/pci/devices/{ADDRESS}/numa_node": None}, {0}, [UNKNOWN]),
        ({"proc/self/numa_maps": "5555 bind:0 file=/usr/bin/python\n"}, {7}, [BAD]),
        ({"proc/self/numa_maps": "5555 bind:0-1 file=/usr/bin/python\n"}, {7}, []),
        ({"proc/self/numa_maps": "5555 bind=static:1 file=/usr/bin/python\n"}, {7}, []),
        ({"proc/self/numa_maps": None}, {7}, []),
        ({"sys/devices/system/node/node1/cpulist": None}, {0}, []),  # the only node has every core
        ({"sys/devices/system/node/node1/cpulist": ""}, {0}, []),  # a node of memory alone
    ],
)
def test_cores_and_memory_beside_the_device(
    tmp_path: Path, files: dict[str, str | None], cores: set[int], wanted: list[Verdict]
) -> None:
    system = good_machine(tmp_path, files, cores=frozenset(cores))
    found = faults("D08", system)
    assert [finding.verdict for finding in found] == wanted
    fix = "numactl --cpunodebind=1 --membind=1 python train.py"
    assert all(finding.fix == (fix if finding.verdict is BAD else "") for finding in found)


def test_memory_nodes_do_not_matter_without_an_accelerator(tmp_path: Path) -> None:
    (found,) = findings("D08", good_machine(tmp_path, cores=frozenset({0}), accelerator=None))
    assert (found.verdict, found.found) == (Verdict.OK, "2 memory nodes, policy default")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("always madvise [never]", [BAD]),
        ("always [madvise] never", []),
        ("[always] madvise never", []),
        (None, [UNKNOWN]),
    ],
)
def test_huge_pages(tmp_path: Path, text: str | None, wanted: list[Verdict]) -> None:
    system = good_machine(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": text})
    assert [finding.verdict for finding in faults("D09", system)] == wanted
