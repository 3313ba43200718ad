"""`elixir-compile doctor` on this machine, without torch, and on an accelerator whose memory is the host's."""

import json
import os
import resource
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from elixir_compile.base.errors import ElixirWarning
from elixir_compile.base.units import GIB, MIB
from elixir_compile.compat.platforms import Platform
from elixir_compile.session.machine import machine_path, store_machine
from elixir_compile.tools.cli.doctor import diagnosis_lines
from elixir_compile.tools.cli.main import app
from elixir_compile.tools.doctor import CHECKS, Diagnosis, Verdict, diagnose, this_system, trials
from elixir_compile.tools.doctor.facts import Gpu
from elixir_compile.tools.measure import machine as links
from elixir_compile.tools.measure.machine import Copies
from tests.run.runtime.test_machine import remembered

CPU = torch.device("cpu")
MOST_S = 5.0
"""Seconds that the command may take on a quiet machine, counted in seconds of the CPU here."""


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ELIXIR_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def cpu_s() -> float:
    """Return the seconds of the CPU that ended children of this process took."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_the_command_prints_json_alone_within_five_seconds(tmp_path: Path) -> None:
    before_s = cpu_s()
    command = [sys.executable, "-c", "from elixir_compile.tools.cli.main import main; main()", "doctor"]
    done = subprocess.run(
        [*command, "--json", "--disk-path", str(tmp_path)], capture_output=True, text=True, check=False
    )
    took_s = cpu_s() - before_s
    said = json.loads(done.stdout)
    assert done.stderr == ""
    assert done.returncode == int(said["is_bad"])
    assert said["is_bad"] == any(check["verdict"] == "bad" for check in said["checks"])
    assert all(check["fix"] for check in said["checks"] if check["verdict"] == "bad")
    assert {"D01", "D05", "D07", "D13", "D14", "D15"} <= {check["code"] for check in said["checks"]}
    assert took_s < 2 * MOST_S, "about 2.5 s on a quiet machine; a loaded machine takes longer for the same work"
    assert list(tmp_path.glob("elixir-disk*")) == [], "the trial of the disk leaves nothing"


def test_without_torch_the_message_comes_at_once() -> None:
    code = """
import sys, time
sys.modules["torch"] = None  # an import of torch raises ImportError
began_s = time.process_time()
from elixir_compile.tools.cli.doctor import run_doctor
code = run_doctor(disk_path=None, as_json=False)
print(time.process_time() - began_s, file=sys.stderr)
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    assert any(line.startswith("bad      D01") and "torch cannot be imported" in line for line in lines)
    assert 'pip install "torch>=2.11,<2.14"' in done.stdout
    assert "D07" in done.stdout, "checks that need no torch still run"
    assert float(done.stderr) < 0.5, "0.09 s of the CPU on a quiet machine"


def test_a_bad_finding_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elixir_compile.tools.cli.doctor.this_system", lambda disk_path: None)
    found = Diagnosis(code="D09", title="huge pages", verdict=Verdict.NOTE, found="[never]", fix="echo")
    monkeypatch.setattr("elixir_compile.tools.cli.doctor.diagnose", lambda system: (found,))
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 0
    fault = Diagnosis(code="D09", title="huge pages", verdict=Verdict.BAD, found="[never]", fix="echo")
    monkeypatch.setattr("elixir_compile.tools.cli.doctor.diagnose", lambda system: (found, fault))
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert done.stdout.splitlines()[-1] == "0 ok, 1 note, 1 bad, 0 unknown"


def test_a_fix_stands_alone_on_the_line_below_its_finding() -> None:
    found = Diagnosis(code="D09", title="huge pages", verdict=Verdict.BAD, found="[never]", fix="echo madvise")
    first, second, _ = diagnosis_lines([found])
    assert first.endswith("D09  huge pages  [never]")
    assert second.strip() == "echo madvise"


def test_this_machine_is_diagnosed_by_every_check_that_applies() -> None:
    system = this_system()
    assert system.torch is not None
    assert system.torch.version == torch.__version__
    assert system.torch.num_threads == torch.get_num_threads()
    assert system.disk is None
    assert [finding for finding in diagnose(system) if finding.found.startswith("the check failed")] == []


def test_the_measured_profile_is_that_of_this_torch_and_these_threads(empty_cache: Path) -> None:
    missing = trials.find_profile()
    assert (missing.is_measured, missing.num_others, missing.h2d_bytes_per_s) == (False, 0, None)
    path = store_machine(remembered(), CPU)
    found = trials.find_profile()
    assert (found.path, found.is_measured, found.num_others) == (path, True, 0)
    assert found.h2d_bytes_per_s == remembered().h2d.bytes_per_s
    path.rename(path.with_stem("other"))
    other = trials.find_profile()
    assert (other.is_measured, other.num_others) == (False, 1)


def test_an_unreadable_profile_counts_as_not_measured() -> None:
    machine_path(CPU).parent.mkdir(parents=True)
    machine_path(CPU).write_text("{")
    assert not trials.find_profile().is_measured


def test_a_disk_is_written_read_and_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_DISK_S", 0.05)
    before = set(tmp_path.iterdir())
    found = trials.try_disk(tmp_path)
    assert found.error == ""
    assert found.path == tmp_path.resolve()
    assert found.free_bytes > 0
    assert 1e6 < found.write_bytes_per_s < 1e12
    assert 1e6 < found.read_bytes_per_s < 1e12
    assert set(tmp_path.iterdir()) == before


def test_an_almost_full_disk_gets_a_file_of_one_mebibyte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    allocate = trials.DiskStore.allocate
    monkeypatch.setattr(trials.DiskStore, "allocate", lambda *args: sizes.append(args[2]) or allocate(*args))
    monkeypatch.setattr(trials.shutil, "disk_usage", lambda path: SimpleNamespace(free=100 * MIB))
    assert trials.try_disk(tmp_path).error == ""
    assert sizes == [MIB]


def test_a_folder_that_does_not_exist_has_a_fix(tmp_path: Path) -> None:
    found = trials.try_disk(tmp_path / "missing")
    assert "No such file or directory" in found.error
    assert found.fix == f"mkdir -p {tmp_path / 'missing'}"


class FakeSlab:
    """A slab that the driver pins below 1 GiB."""

    asked: list[int]

    def __init__(self, nbytes: int, *, pin: bool) -> None:
        self.asked.append(nbytes)
        self.is_pinned = pin and nbytes < GIB
        if not self.is_pinned:
            warnings.warn("the driver refused", ElixirWarning, stacklevel=2)


@pytest.mark.parametrize(
    ("budget_bytes", "pinned_bytes", "refused_bytes"),
    [(8 * GIB, 512 * MIB, GIB), (600 * MIB, 512 * MIB, None), (1, 256 * MIB, None)],
)
def test_pinning_doubles_until_the_budget_or_the_first_refusal(
    budget_bytes: int, pinned_bytes: int, refused_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeSlab.asked = []
    monkeypatch.setattr(trials, "Slab", FakeSlab)
    found = trials.try_pinning(budget_bytes)
    assert found is not None
    assert (found.pinned_bytes, found.refused_bytes) == (pinned_bytes, refused_bytes)
    sizes = [256 * MIB, 512 * MIB, GIB]
    assert FakeSlab.asked == [size for size in sizes if size <= (refused_bytes or pinned_bytes)]


def test_pinning_ends_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeSlab.asked = []
    monkeypatch.setattr(trials, "Slab", FakeSlab)
    monkeypatch.setattr(trials, "_PINNING_S", -1.0)
    found = trials.try_pinning(8 * GIB)
    assert found is not None
    assert (found.pinned_bytes, found.refused_bytes) == (256 * MIB, None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_pinning_is_not_tried_where_no_copy_is_faster_for_it() -> None:
    assert trials.try_pinning(GIB) is None


class OnTheBus(Platform):
    """A CPU that says that it is a device on the PCI bus."""

    def pci_address(self, device: torch.device) -> str:
        return "0000:c1:00.0"

    def name(self, device: torch.device) -> str:
        return "a device in host memory"


def test_an_accelerator_is_asked_while_a_copy_to_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    is_copying = threading.Event()

    def copies(device: torch.device, nbytes: int) -> Copies:
        made = links.copies_of(device, MIB)

        def h2d() -> torch.Tensor:
            is_copying.set()
            events.append("copy")
            return made.h2d()

        return Copies(h2d=h2d, d2h=made.d2h)

    class AskedGpu(Gpu):
        def __init__(self) -> None:
            pass

        def used_bytes(self) -> int:
            events.append("memory")
            return 5

        def state(self, others_bytes: int | None) -> Any:
            assert is_copying.is_set()
            return others_bytes

        def close(self) -> None:
            events.append("closed")

    monkeypatch.setattr(trials, "current_accelerator", lambda: CPU)
    monkeypatch.setattr(trials, "platform_of", lambda device: OnTheBus("cpu"))
    monkeypatch.setattr(trials, "gpu_at", lambda address: AskedGpu())
    monkeypatch.setattr(trials, "copies_of", copies)
    monkeypatch.setattr(trials, "Slab", FakeSlab)
    FakeSlab.asked = []
    found = trials.try_accelerator()
    assert found is not None
    assert (found.name, found.state) == ("a device in host memory", 5)
    assert events[:2] == ["memory", "copy"], "the memory of others is read before this process takes any"
    assert "closed" in events
    assert found.copies.h2d_bytes_per_s > 0
    assert found.copies.pageable_bytes_per_s > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_machine_without_an_accelerator_has_none() -> None:
    assert trials.try_accelerator() is None
    assert {"D06", "D10", "D11"}.isdisjoint({finding.code for finding in diagnose(this_system())})
    assert {"D06", "D10", "D11"} <= {check.code for check in CHECKS}


def test_the_module_of_checks_loads_no_torch() -> None:
    code = "import sys, elixir_compile.tools.doctor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, env=os.environ).returncode == 0
