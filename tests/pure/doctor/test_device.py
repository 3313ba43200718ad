"""D10 to D12 on a made-up GPU: each fault fires, and is silent just within its limit; NVML is a fake `pynvml`."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elixir_compile.base.units import GIB
from elixir_compile.tools.doctor.checks import LEAST_MAPS, LEAST_RATE, MOST_OTHERS_BYTES
from elixir_compile.tools.doctor.facts import CopyRates, Gpu, GpuState, Verdict, gpu_at
from tests.pure.doctor.made_up import ACCELERATOR, ADDRESS, STATE, TORCH, faults, findings, good_machine

NOTE, BAD, UNKNOWN = Verdict.NOTE, Verdict.BAD, Verdict.UNKNOWN


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
