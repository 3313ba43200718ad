"""`elixir-compile doctor`, `--version` and `demo` on this machine."""

import importlib.metadata
import itertools
import json
import os
import resource
import subprocess
import sys
import threading
import tomllib
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends import registry
from typer.testing import CliRunner

import elixir_compile as elixir
from elixir_compile.base.errors import ElixirWarning, InvalidOption
from elixir_compile.base.units import GIB, MIB
from elixir_compile.base.version import __version__
from elixir_compile.checkpoint import saving
from elixir_compile.compat.platforms import Platform
from elixir_compile.ir.plan import Plan, Prediction
from elixir_compile.ir.schedule import Origin, Record
from elixir_compile.session.machine import machine_path, store_machine
from elixir_compile.tools.cli.demo import LOSS_RTOL, Run, batches, find_faults, read_text
from elixir_compile.tools.cli.main import app, diagnosis_lines
from elixir_compile.tools.doctor import CHECKS, Diagnosis, Verdict, diagnose, this_system, trials
from elixir_compile.tools.doctor.facts import Gpu
from elixir_compile.tools.measure import machine as links
from elixir_compile.tools.measure.machine import Copies
from tests.run.session.test_machine import remembered

# ----------------------------------------------------------------------------------------------------------------------
# `elixir-compile doctor` on this machine, without torch, and on an accelerator whose memory is the host's.


CPU = torch.device("cpu")
MOST_S = 5.0
"""Seconds that the command may take on a quiet machine, counted in seconds of the CPU here."""


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ELIXIR_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def cpu_s() -> float:
    """Return the seconds of the CPU that ended children of this process took."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.usefixtures("empty_cache")
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


@pytest.mark.usefixtures("empty_cache")
def test_without_torch_the_message_comes_at_once() -> None:
    code = """
import sys, time
sys.modules["torch"] = None  # an import of torch raises ImportError
began_s = time.process_time()
from elixir_compile.tools.cli.main import run_doctor
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


@pytest.mark.usefixtures("empty_cache")
def test_a_bad_finding_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elixir_compile.tools.doctor.this_system", lambda disk_path: None)
    found = Diagnosis(code="D09", title="huge pages", verdict=Verdict.NOTE, found="[never]", fix="echo")
    monkeypatch.setattr("elixir_compile.tools.doctor.diagnose", lambda system: (found,))
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 0
    fault = Diagnosis(code="D09", title="huge pages", verdict=Verdict.BAD, found="[never]", fix="echo")
    monkeypatch.setattr("elixir_compile.tools.doctor.diagnose", lambda system: (found, fault))
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert done.stdout.splitlines()[-1] == "0 ok, 1 note, 1 bad, 0 unknown"


@pytest.mark.usefixtures("empty_cache")
def test_a_fix_stands_alone_on_the_line_below_its_finding() -> None:
    found = Diagnosis(code="D09", title="huge pages", verdict=Verdict.BAD, found="[never]", fix="echo madvise")
    first, second, _ = diagnosis_lines([found])
    assert first.endswith("D09  huge pages  [never]")
    assert second.strip() == "echo madvise"


@pytest.mark.usefixtures("empty_cache")
def test_this_machine_is_diagnosed_by_every_check_that_applies() -> None:
    system = this_system()
    assert system.torch is not None
    assert system.torch.version == torch.__version__
    assert system.torch.num_threads == torch.get_num_threads()
    assert system.disk is None
    assert [finding for finding in diagnose(system) if finding.found.startswith("the check failed")] == []


@pytest.mark.usefixtures("empty_cache")
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


@pytest.mark.usefixtures("empty_cache")
def test_an_unreadable_profile_counts_as_not_measured() -> None:
    machine_path(CPU).parent.mkdir(parents=True)
    machine_path(CPU).write_text("{")
    assert not trials.find_profile().is_measured


@pytest.mark.usefixtures("empty_cache")
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


@pytest.mark.usefixtures("empty_cache")
def test_an_almost_full_disk_gets_a_file_of_one_mebibyte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    allocate = trials.DiskStore.allocate
    monkeypatch.setattr(trials.DiskStore, "allocate", lambda *args: sizes.append(args[2]) or allocate(*args))
    monkeypatch.setattr(trials.shutil, "disk_usage", lambda path: SimpleNamespace(free=100 * MIB))
    assert trials.try_disk(tmp_path).error == ""
    assert sizes == [MIB]


@pytest.mark.usefixtures("empty_cache")
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


@pytest.mark.usefixtures("empty_cache")
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


@pytest.mark.usefixtures("empty_cache")
def test_pinning_ends_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeSlab.asked = []
    monkeypatch.setattr(trials, "Slab", FakeSlab)
    monkeypatch.setattr(trials, "_PINNING_S", -1.0)
    found = trials.try_pinning(8 * GIB)
    assert found is not None
    assert (found.pinned_bytes, found.refused_bytes) == (256 * MIB, None)


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_pinning_is_not_tried_where_no_copy_is_faster_for_it() -> None:
    assert trials.try_pinning(GIB) is None


class OnTheBus(Platform):
    """A CPU that says that it is a device on the PCI bus."""

    def pci_address(self, device: torch.device) -> str:
        return "0000:c1:00.0"

    def name(self, device: torch.device) -> str:
        return "a device in host memory"


@pytest.mark.usefixtures("empty_cache")
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


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_machine_without_an_accelerator_has_none() -> None:
    assert trials.try_accelerator() is None
    assert {"D06", "D10", "D11"}.isdisjoint({finding.code for finding in diagnose(this_system())})
    assert {"D06", "D10", "D11"} <= {check.code for check in CHECKS}


@pytest.mark.usefixtures("empty_cache")
def test_the_module_of_checks_loads_no_torch() -> None:
    code = "import sys, elixir_compile.tools.doctor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, env=os.environ).returncode == 0


# ----------------------------------------------------------------------------------------------------------------------
# What an installation has, where the package runs from its folder and was never installed: the version, the name of
# the backend, the command line.


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_name(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata.Distribution, "from_name", from_name)


@pytest.mark.usefixtures("not_installed")
def test_the_version_is_known_without_an_installation() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"elixir-compile {__version__}\n"
    assert saving._versions()["elixir_compile"] == __version__


def test_the_version_of_the_package_is_that_of_the_source() -> None:
    pyproject = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))
    assert pyproject["project"]["version"] == __version__


@pytest.mark.parametrize("looks_first", [False, True])
def test_the_backend_has_its_name_without_an_installation(looks_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not Dynamo has looked for the backends of packages before."""
    for names in (registry._BACKENDS, registry._COMPILER_FNS):
        monkeypatch.delitem(names, "elixir", raising=False)  # type: ignore[arg-type]
    monkeypatch.setattr(registry, "_discover_entrypoint_backends", lambda: None)
    if looks_first:
        with pytest.raises(torch._dynamo.exc.InvalidBackend):
            registry.lookup_backend("elixir")
    model = elixir.prepare(nn.Linear(4, 4), "cpu")
    compiled = torch.compile(model, backend="elixir", options={"inner": "aot_eager"})
    compiled(torch.ones(2, 4)).sum().backward()
    assert [each.plan is not None for each in elixir.compilations(model)] == [True]


def test_the_command_line_runs_without_a_script() -> None:
    command = [sys.executable, "-m", "elixir_compile", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"elixir-compile {__version__}\n"), done.stderr


# ----------------------------------------------------------------------------------------------------------------------
# The demo says when it fails, and its text is what it says.


PREDICTION = Prediction(
    step_s=0.1, exposed_s=0.0, hidden_share=1.0, device_peak_bytes=100, device_peak_at="op", host_peak_bytes=0
)
PLAN = Plan(
    name="tiny",
    graph="0" * 12,
    cluster="1 x cpu",
    budget_bytes=100,
    buckets=(),
    placements=(),
    regions=(),
    schedules=(),
    decisions=(),
    prediction=PREDICTION,
)
RECORD = Record(origin=Origin.MEASURED, step_s=0.1, device_peak_bytes=100, host_peak_bytes=0)
FREE = Run(losses=(4.0, 2.0), plan=PLAN, record=RECORD)


def test_equal_losses_within_the_budget_pass() -> None:
    assert find_faults(FREE, FREE, budget_bytes=100) == []


@pytest.mark.parametrize("loss", [2.0 * (1 + 2 * LOSS_RTOL), 2.0 * (1 - 2 * LOSS_RTOL), float("nan"), float("inf")])
def test_different_losses_fail(loss: float) -> None:
    (fault,) = find_faults(FREE, replace(FREE, losses=(4.0, loss)), budget_bytes=100)
    assert "losses differ" in fault


def test_one_byte_above_the_budget_fails() -> None:
    (fault,) = find_faults(FREE, replace(FREE, record=replace(RECORD, device_peak_bytes=101)), budget_bytes=100)
    assert "1 bytes too many" in fault


def test_batches_are_bytes_and_the_bytes_that_follow() -> None:
    text = bytes(range(200))
    source = batches(text, size=3, context=8, seed=0, device="cpu")
    for one, following in itertools.islice(source, 5):
        assert one.shape == following.shape == (3, 8)
        assert torch.equal(one + 1, following)
    again = batches(text, size=3, context=8, seed=0, device="cpu")
    assert torch.equal(next(again)[0], next(batches(text, size=3, context=8, seed=0, device="cpu"))[0])


def test_the_default_text_is_the_standard_library(tmp_path: Path) -> None:
    assert len(read_text(None)) > 1_000_000
    file = tmp_path / "a.txt"
    file.write_bytes(b"abc")
    assert read_text(file) == b"abc"


def test_no_text_and_too_little_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="not empty"):
        read_text(tmp_path)
    with pytest.raises(InvalidOption, match="more than 9 bytes"):
        next(batches(b"abc", size=1, context=8, seed=0, device="cpu"))


def test_the_version_is_printed_without_loading_torch() -> None:
    code = "import sys; from elixir_compile.tools.cli.main import app; sys.modules['torch'] = None; app(['--version'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "elixir-compile 0.1.0"


@pytest.mark.slow
def test_the_demo_keeps_its_promise() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from elixir_compile.tools.cli.main import main; main()", "demo"], check=False
    )
    assert done.returncode == 0
