"""`elixir-compile doctor` on an accelerator that is neither CPU nor CUDA."""

from pathlib import Path

import pytest

from elixir_compile.base.units import MIB
from elixir_compile.tools.doctor import Diagnosis, Verdict, diagnose, this_system, trials
from tests.device import fakegpu


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Diagnosis]]:
    """Return the findings by the code of their check."""
    monkeypatch.setenv("ELIXIR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(trials, "FIRST_PINNED_BYTES", 4 * MIB)
    monkeypatch.setattr(trials, "COPY_BYTES", MIB)
    monkeypatch.setattr(trials, "_PINNING_S", 0.0)
    monkeypatch.setattr(trials, "_COPYING_S", 0.01)
    by_code: dict[str, list[Diagnosis]] = {}
    for finding in diagnose(this_system()):
        by_code.setdefault(finding.code, []).append(finding)
    return by_code


def test_the_accelerator_is_seen_pinned_to_and_copied_to(found: dict[str, list[Diagnosis]]) -> None:
    (seen,), (pinned,), (copied,) = (found[code] for code in ("D02", "D06", "D11"))
    assert seen.found == f"torch sees {fakegpu.NUM_DEVICES} x {fakegpu.NAME}"
    assert (pinned.verdict, pinned.found) == (Verdict.OK, "4.0 MiB of host memory were pinned")
    assert (copied.verdict, copied.fix) == (Verdict.UNKNOWN, "elixir-compile measure")
    assert "GB/s to the device" in copied.found


def test_nvml_is_not_asked_about_a_device_without_a_pci_address(found: dict[str, list[Diagnosis]]) -> None:
    (state,) = found["D10"]
    assert state.verdict is Verdict.UNKNOWN
    assert state.found.endswith("torch does not tell its PCI address")
