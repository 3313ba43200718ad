"""D01 to D05 on a made-up machine: each fault fires, and is silent just within its limit."""

import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elixir_compile.tools.doctor.checks import CHECKS, diagnose
from elixir_compile.tools.doctor.facts import Verdict
from tests.pure.doctor.made_up import ADDRESS, TORCH, faults, findings, good_machine, with_variables

OK, NOTE, BAD, UNKNOWN = Verdict.OK, Verdict.NOTE, Verdict.BAD, Verdict.UNKNOWN
CPU_BUILD = replace(TORCH, version="2.13.0+cpu", cuda=None, accelerator=None, num_accelerators=0)
VENDOR = f"sys/bus/pci/devices/{ADDRESS}/vendor"
NO_GPU: dict[str, str | None] = {"proc/driver/nvidia/version": None, "dev/nvidiactl": None, VENDOR: None}
SHOW_ERROR = 'python -c "import torch; torch.cuda.init()"'


@pytest.fixture(autouse=True)
def triton_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


def test_every_check_runs_and_is_silent_on_a_good_machine(tmp_path: Path) -> None:
    found = diagnose(good_machine(tmp_path))
    assert [finding for finding in found if finding.verdict is not OK or finding.fix] == []
    assert sorted({finding.code for finding in found}) == [check.code for check in CHECKS]
    assert [check.code for check in CHECKS] == [f"D{number:02}" for number in range(1, 16)]


def test_a_check_that_fails_is_unknown_and_the_others_still_run(tmp_path: Path) -> None:
    found = diagnose(good_machine(tmp_path, {"sys/devices/system/node/node1/cpulist": "no list"}))
    (failed,) = (finding for finding in found if finding.verdict is not OK)
    assert (failed.code, failed.verdict) == ("D08", UNKNOWN)
    assert "ValueError" in failed.found
    assert found[-1].code == "D15"


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


@pytest.mark.parametrize(("python", "wanted"), [((3, 10), BAD), ((3, 11), OK), ((3, 14), OK)])
def test_the_version_of_python(tmp_path: Path, python: tuple[int, int], wanted: Verdict) -> None:
    assert findings("D01", good_machine(tmp_path, python=python))[0].verdict is wanted


def test_a_torch_that_cannot_be_imported_is_bad_and_says_why(tmp_path: Path) -> None:
    error = "libcudart.so.13: cannot open shared object file"
    system = good_machine(tmp_path, torch=None, torch_error=error, accelerator=None, profile=None, disk=None)
    (found,) = faults("D01", system)
    assert found.verdict is BAD
    assert error in found.found
    others = [finding for finding in diagnose(system) if finding.code != "D01"]
    assert {finding.verdict for finding in others} == {OK, UNKNOWN}, "checks that need no torch still run"
    assert {"D04", "D05", "D07", "D08", "D09", "D12", "D14"} == {finding.code for finding in others}


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


def test_the_driver_does_not_matter_to_a_build_for_cpus(tmp_path: Path) -> None:
    assert findings("D03", good_machine(tmp_path, torch=CPU_BUILD)) == []


@pytest.mark.parametrize("backend", ["", "another_package:backend"])
def test_a_backend_that_is_missing_or_of_another_package_is_bad(tmp_path: Path, backend: str) -> None:
    (found,) = faults("D04", good_machine(tmp_path, backend=backend))
    assert found.verdict is BAD
    assert backend in found.found


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


def test_triton_is_needed_on_a_gpu_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (found,) = faults("D05", good_machine(tmp_path))
    assert (found.verdict, found.fix) == (BAD, "pip install triton")
    assert faults("D05", good_machine(tmp_path, torch=CPU_BUILD)) == []


def test_the_docs_have_a_row_for_each_check() -> None:
    page = Path(__file__).parents[3] / "docs" / "doctor.md"
    rows = re.findall(r"^\| (D\d\d) ([^|]+) \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(check.code, check.title) for check in CHECKS]
