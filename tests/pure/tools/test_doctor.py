"""The checks of `elixir-compile doctor` on made-up machines: software, host, devices and training."""

import importlib.util
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elixir_compile.base.units import GIB, KIB, MIB
from elixir_compile.tools.doctor.checks import (
    ASSUMED_BYTES_PER_S,
    CHECKS,
    LEAST_FREE_BYTES,
    LEAST_MAPS,
    LEAST_RATE,
    LEAST_SHM_BYTES,
    MOST_OTHERS_BYTES,
    MOST_SWAPPED_BYTES,
    diagnose,
    filesystem_of,
)
from elixir_compile.tools.doctor.facts import CopyRates, Gpu, GpuState, Pinning, Profile, System, Verdict, gpu_at
from tests.pure.tools.made_up import (
    ACCELERATOR,
    ADDRESS,
    DISK,
    FILES,
    MEMORY_BYTES,
    NUM_CORES,
    STATE,
    TORCH,
    faults,
    findings,
    good_machine,
    with_variables,
)

# ----------------------------------------------------------------------------------------------------------------------
# D01 to D05 on a made-up machine: each fault fires, and is silent just within its limit.


OK, NOTE, BAD, UNKNOWN = Verdict.OK, Verdict.NOTE, Verdict.BAD, Verdict.UNKNOWN
CPU_BUILD = replace(TORCH, version="2.13.0+cpu", cuda=None, accelerator=None, num_accelerators=0)
VENDOR = f"sys/bus/pci/devices/{ADDRESS}/vendor"
NO_GPU: dict[str, str | None] = {"proc/driver/nvidia/version": None, "dev/nvidiactl": None, VENDOR: None}
SHOW_ERROR = 'python -c "import torch; torch.cuda.init()"'


@pytest.fixture
def triton_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


@pytest.mark.usefixtures("triton_is_installed")
def test_every_check_runs_and_is_silent_on_a_good_machine(tmp_path: Path) -> None:
    found = diagnose(good_machine(tmp_path))
    assert [finding for finding in found if finding.verdict is not OK or finding.fix] == []
    assert sorted({finding.code for finding in found}) == [check.code for check in CHECKS]
    assert [check.code for check in CHECKS] == [f"D{number:02}" for number in range(1, 16)]


@pytest.mark.usefixtures("triton_is_installed")
def test_a_check_that_fails_is_unknown_and_the_others_still_run(tmp_path: Path) -> None:
    found = diagnose(good_machine(tmp_path, {"sys/devices/system/node/node1/cpulist": "no list"}))
    (failed,) = (finding for finding in found if finding.verdict is not OK)
    assert (failed.code, failed.verdict) == ("D08", UNKNOWN)
    assert "ValueError" in failed.found
    assert found[-1].code == "D15"


@pytest.mark.usefixtures("triton_is_installed")
@pytest.mark.parametrize(
    ("version", "wanted"),
    [
        ("2.10.1", BAD),
        ("2.11.0", OK),
        ("2.13.2+cu130", OK),
        ("2.14.0a0+git1234", NOTE),
        ("3.0.0", NOTE),
        ("1.13.1", BAD),
        ("nightly", UNKNOWN),
    ],
)
def test_the_version_of_torch(tmp_path: Path, version: str, wanted: Verdict) -> None:
    _, found = findings("D01", good_machine(tmp_path, torch=replace(TORCH, version=version)))
    assert found.verdict is wanted
    assert found.fix in ("", 'pip install "torch>=2.11,<2.14"')
    assert bool(found.fix) == (wanted in (BAD, NOTE))


@pytest.mark.usefixtures("triton_is_installed")
@pytest.mark.parametrize(("python", "wanted"), [((3, 10), BAD), ((3, 11), OK), ((3, 14), OK)])
def test_the_version_of_python(tmp_path: Path, python: tuple[int, int], wanted: Verdict) -> None:
    assert findings("D01", good_machine(tmp_path, python=python))[0].verdict is wanted


@pytest.mark.usefixtures("triton_is_installed")
def test_a_torch_that_cannot_be_imported_is_bad_and_says_why(tmp_path: Path) -> None:
    error = "libcudart.so.13: cannot open shared object file"
    system = good_machine(tmp_path, torch=None, torch_error=error, accelerator=None, profile=None, disk=None)
    (found,) = faults("D01", system)
    assert found.verdict is BAD
    assert error in found.found
    others = [finding for finding in diagnose(system) if finding.code != "D01"]
    assert {finding.verdict for finding in others} == {OK, UNKNOWN}, "checks that need no torch still run"
    assert {"D04", "D05", "D07", "D08", "D09", "D12", "D14"} == {finding.code for finding in others}


@pytest.mark.usefixtures("triton_is_installed")
@pytest.mark.parametrize(
    ("torch", "files", "variables", "wanted", "fix"),
    [
        (TORCH, {}, {}, OK, ""),
        (CPU_BUILD, {}, {}, BAD, "pip install --force-reinstall --index-url https://pypi.org/simple torch==2.13.0"),
        (CPU_BUILD, NO_GPU, {}, OK, ""),
        (CPU_BUILD, {**NO_GPU, VENDOR: "0x10de"}, {}, NOTE, "apt install nvidia-driver-580"),
        (CPU_BUILD, {**NO_GPU, VENDOR: "0x1a03"}, {}, OK, ""),  # the display of a server
        (CPU_BUILD, {"dev/nvidiactl": None}, {}, NOTE, "nvidia-modprobe -u -c 0"),
        (CPU_BUILD, {"dev/nvidiactl": None, ".dockerenv": ""}, {}, NOTE, "docker run --gpus all"),
        (replace(TORCH, accelerator=None), {}, {}, BAD, SHOW_ERROR),
        (replace(TORCH, accelerator=None), {}, {"CUDA_VISIBLE_DEVICES": ""}, NOTE, "unset CUDA_VISIBLE_DEVICES"),
        (replace(TORCH, accelerator=None), {}, {"CUDA_VISIBLE_DEVICES": "0"}, BAD, SHOW_ERROR),
    ],
)  # fmt: skip
def test_the_build_of_torch_beside_the_gpu(
    tmp_path: Path, torch: Any, files: dict[str, str | None], variables: dict[str, str], wanted: Verdict, fix: str
) -> None:
    system = with_variables(good_machine(tmp_path, files, torch=torch), **variables)
    (found,) = findings("D02", system)
    assert (found.verdict, found.fix) == (wanted, fix)


@pytest.mark.usefixtures("triton_is_installed")
@pytest.mark.parametrize(
    ("cuda", "driver", "wanted"),
    [
        ("13.0", "579.99.01", BAD),
        ("13.0", "580.65.06", OK),
        ("13.2", "590.10", OK),
        ("12.8", "524.10.04", BAD),
        ("12.8", "525.60.13", OK),
        ("14.0", "600.10.01", UNKNOWN),
        ("13.0", None, UNKNOWN),
    ],
)
def test_the_driver_is_new_enough_for_cuda(tmp_path: Path, cuda: str, driver: str | None, wanted: Verdict) -> None:
    text = None if driver is None else f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Tue Sep 23 2025\n"
    system = good_machine(tmp_path, {"proc/driver/nvidia/version": text}, torch=replace(TORCH, cuda=cuda))
    (found,) = findings("D03", system)
    assert found.verdict is wanted
    assert driver is None or driver in found.found


@pytest.mark.usefixtures("triton_is_installed")
def test_the_driver_does_not_matter_to_a_build_for_cpus(tmp_path: Path) -> None:
    assert findings("D03", good_machine(tmp_path, torch=CPU_BUILD)) == []


@pytest.mark.usefixtures("triton_is_installed")
@pytest.mark.parametrize("backend", ["", "another_package:backend"])
def test_a_backend_that_is_missing_or_of_another_package_is_bad(tmp_path: Path, backend: str) -> None:
    (found,) = faults("D04", good_machine(tmp_path, backend=backend))
    assert found.verdict is BAD
    assert backend in found.found


@pytest.mark.usefixtures("triton_is_installed")
@pytest.mark.parametrize(
    ("files", "variables", "wanted"),
    [
        ({"bin/g++": None}, {}, [BAD]),
        ({"bin/g++": None, "bin/clang++": ""}, {"CXX": "clang++ -O1"}, []),
        ({}, {"CXX": "icpx"}, [BAD]),
        ({"bin/cc": None}, {}, [NOTE]),
        ({"bin/cc": None, "bin/clang": ""}, {}, []),
        ({}, {"CC": "icx"}, [NOTE]),
        ({"include/Python.h": None}, {}, [BAD]),
    ],
)
def test_the_compilers(
    tmp_path: Path, files: dict[str, str | None], variables: dict[str, str], wanted: list[Verdict]
) -> None:
    system = with_variables(good_machine(tmp_path, files), **variables)
    assert [finding.verdict for finding in faults("D05", system)] == wanted


@pytest.mark.usefixtures("triton_is_installed")
def test_triton_is_needed_on_a_gpu_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (found,) = faults("D05", good_machine(tmp_path))
    assert (found.verdict, found.fix) == (BAD, "pip install triton")
    assert faults("D05", good_machine(tmp_path, torch=CPU_BUILD)) == []


@pytest.mark.usefixtures("triton_is_installed")
def test_the_docs_have_a_row_for_each_check() -> None:
    page = Path(__file__).parents[3] / "docs" / "doctor.md"
    rows = re.findall(r"^\| (D\d\d) ([^|]+) \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(check.code, check.title) for check in CHECKS]


# ----------------------------------------------------------------------------------------------------------------------
# D06 to D09 on made-up files of the system: each fault fires, and is silent just within its limit.


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


# ----------------------------------------------------------------------------------------------------------------------
# D10 to D12 on a made-up GPU: each fault fires, and is silent just within its limit; NVML is a fake `pynvml`.


@pytest.mark.parametrize(
    ("state", "wanted"),
    [
        (replace(STATE, link=(4, 16)), [NOTE]),
        (replace(STATE, link=(5, 8)), [NOTE]),
        (replace(STATE, link=(4, 8), most_link=(4, 8)), []),
        (replace(STATE, most_link=None), []),
        (replace(STATE, link=None), [UNKNOWN]),
        (replace(STATE, slowed_by=("heat",)), [BAD]),
        (replace(STATE, capped_by=("the power limit",)), [NOTE]),
        (replace(STATE, is_mig=True), [NOTE]),
        (replace(STATE, others_bytes=MOST_OTHERS_BYTES), []),
        (replace(STATE, others_bytes=MOST_OTHERS_BYTES + 1), [NOTE]),
        (replace(STATE, others_bytes=None), []),
        ("NVML does not answer: Driver Not Loaded", [UNKNOWN]),
    ],
)
def test_the_state_of_the_gpu(tmp_path: Path, state: GpuState | str, wanted: list[Verdict]) -> None:
    system = good_machine(tmp_path, accelerator=replace(ACCELERATOR, state=state))
    assert [finding.verdict for finding in faults("D10", system)] == wanted


@pytest.mark.parametrize("direction", ["h2d_bytes_per_s", "d2h_bytes_per_s"])
def test_copies_slower_than_the_measured_profile_are_bad(tmp_path: Path, direction: str) -> None:
    def with_share(share: float) -> list[Verdict]:
        rates = {"h2d_bytes_per_s": 50e9, "d2h_bytes_per_s": 50e9, direction: share * 50e9}
        copies = CopyRates(**rates, pageable_bytes_per_s=9e9)
        system = good_machine(tmp_path, accelerator=replace(ACCELERATOR, copies=copies))
        return [finding.verdict for finding in faults("D11", system)]

    assert with_share(LEAST_RATE) == []
    assert with_share(LEAST_RATE - 0.01) == [BAD]
    assert with_share(2.0) == []


def test_copies_without_a_measured_profile_are_not_judged(tmp_path: Path) -> None:
    (found,) = findings("D11", good_machine(tmp_path, profile=None))
    assert (found.verdict, found.fix) == (UNKNOWN, "elixir-compile measure")
    assert found.found.startswith("50 GB/s to the device, 50 GB/s back, 9 GB/s from pageable memory")


@pytest.mark.parametrize("code", ["D10", "D11"])
def test_a_machine_without_an_accelerator_has_no_link(tmp_path: Path, code: str) -> None:
    assert findings(code, good_machine(tmp_path, accelerator=None)) == []


@pytest.mark.parametrize(
    ("environ", "accelerator", "wanted"),
    [
        ({}, "cuda", [NOTE]),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512,expandable_segments:True"}, "cuda", []),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, "cuda", [NOTE]),
        ({}, "xpu", []),
        ({}, None, []),
    ],
)
def test_the_allocator_of_a_gpu(
    tmp_path: Path, environ: dict[str, str], accelerator: str | None, wanted: list[Verdict]
) -> None:
    system = good_machine(tmp_path, environ=environ, torch=replace(TORCH, accelerator=accelerator))
    assert [finding.verdict for finding in faults("D12", system)] == wanted


@pytest.mark.parametrize(("text", "wanted"), [(f"{LEAST_MAPS}", []), (f"{LEAST_MAPS - 1}", [BAD]), (None, [UNKNOWN])])
def test_the_mappings_of_a_process(tmp_path: Path, text: str | None, wanted: list[Verdict]) -> None:
    system = good_machine(tmp_path, {"proc/sys/vm/max_map_count": text})
    assert [finding.verdict for finding in faults("D12", system)] == wanted


class FakeError(Exception):
    pass


def refuse(*_: object) -> None:
    raise FakeError("Not Supported")


def fake_nvml(**functions: Callable[..., Any]) -> Any:
    """Return a module like `pynvml` with an H100 at full speed; `functions` replace its functions."""
    calls: list[str] = []
    answers: dict[str, Callable[..., Any]] = {
        "nvmlInit": lambda: calls.append("init"),
        "nvmlShutdown": lambda: calls.append("shutdown"),
        "nvmlDeviceGetHandleByPciBusId": lambda address: f"gpu at {address}",
        "nvmlDeviceGetMemoryInfo": lambda gpu, version: SimpleNamespace(used=3 * GIB if version == 2 else 4 * GIB),
        "nvmlDeviceGetCurrPcieLinkGeneration": lambda gpu: 5,
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda gpu: 5,
        "nvmlDeviceGetCurrPcieLinkWidth": lambda gpu: 16,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda gpu: 16,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: 1,  # idle
        "nvmlDeviceGetMigMode": lambda gpu: [0, 0],
    }
    reasons = {
        "nvmlClocksEventReasonApplicationsClocksSetting": 2,
        "nvmlClocksEventReasonSwPowerCap": 4,
        "nvmlClocksEventReasonSwThermalSlowdown": 32,
        "nvmlClocksEventReasonHwThermalSlowdown": 64,
        "nvmlClocksEventReasonHwPowerBrakeSlowdown": 128,
    }
    return SimpleNamespace(**{**answers, **functions}, **reasons, NVMLError=FakeError, nvmlMemory_v2=2, calls=calls)


def test_nvml_tells_the_link_and_the_bytes_of_others() -> None:
    nvml = fake_nvml(nvmlDeviceGetCurrPcieLinkWidth=lambda gpu: 8)
    gpu = Gpu(nvml, ADDRESS)
    assert gpu.used_bytes() == 3 * GIB, "without the bytes that the driver reserves"
    assert gpu.state(3 * GIB) == replace(STATE, link=(5, 8), others_bytes=3 * GIB)
    gpu.close()
    assert nvml.calls == ["init", "shutdown"]


@pytest.mark.parametrize(
    ("bits", "slowed_by", "capped_by"),
    [
        (0, (), ()),
        (1, (), ()),
        (32 + 64, ("heat",), ()),
        (64 + 128, ("heat", "the power supply"), ()),
        (2 + 4, (), ("application clocks", "the power limit")),
    ],
)
def test_nvml_tells_why_clocks_are_lower(bits: int, slowed_by: tuple[str, ...], capped_by: tuple[str, ...]) -> None:
    state = Gpu(fake_nvml(nvmlDeviceGetCurrentClocksEventReasons=lambda gpu: bits), ADDRESS).state(0)
    assert (state.slowed_by, state.capped_by) == (slowed_by, capped_by)


def test_nvml_tells_of_mig() -> None:
    assert Gpu(fake_nvml(nvmlDeviceGetMigMode=lambda gpu: [1, 1]), ADDRESS).state(0).is_mig


def test_a_figure_that_the_gpu_does_not_support_is_left_out() -> None:
    names = [name for name in vars(fake_nvml()) if name.startswith("nvmlDeviceGet") and "Handle" not in name]
    gpu = Gpu(fake_nvml(**dict.fromkeys(names, lambda *_, **__: refuse())), ADDRESS)
    assert gpu.used_bytes() is None
    assert gpu.state(None) == replace(STATE, link=None, most_link=None, others_bytes=None)


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetHandleByPciBusId"])
def test_without_an_answer_of_nvml_there_is_a_reason(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(**{function: refuse}))
    assert gpu_at(ADDRESS) == "NVML does not answer: Not Supported"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert str(gpu_at(ADDRESS)).startswith("NVML cannot be asked: ")


def test_the_fake_has_the_names_of_the_real_module() -> None:
    real = pytest.importorskip("pynvml")
    fake = vars(fake_nvml())
    assert [name for name in fake if name != "calls" and not hasattr(real, name)] == []
    constants = {name: value for name, value in fake.items() if name.startswith("nvmlClocks")}
    assert {name: getattr(real, name) for name in constants} == constants


# ----------------------------------------------------------------------------------------------------------------------
# D13 to D15 on a made-up machine: each fault fires, and is silent just within its limit.


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
