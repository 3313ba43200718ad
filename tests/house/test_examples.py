"""The examples run, at a size that is quick."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from socket import socket

import pytest

from tests.run.processes import programs

ROOT = Path(__file__).parents[2]
TINY = ["--layers", "2", "--width", "64", "--length", "32"]
SMALL = {
    "gpt2": ("train.py", [*TINY, "--layers", "1", "--steps", "2", "--share", "0.9"]),
    "plan_without_a_gpu": ("plan.py", [*TINY, "--batch", "2", "--budget", "40MiB", "--machines", "4 x a100-40g"]),
}
"""Each example's script and arguments; each prints two lines that say what was planned."""


UNDER_TORCHRUN = "two_ranks"
UNEQUAL = "unequal_ranks"
PIPELINE = "pipeline"


@pytest.mark.parametrize(
    "folder",
    sorted(
        path
        for path in (ROOT / "examples").iterdir()
        if path.is_dir() and path.name not in (UNDER_TORCHRUN, UNEQUAL, PIPELINE)
    ),
    ids=lambda path: path.name,
)
def test_an_example_runs(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert (folder / "README.md").exists()
    name, arguments = SMALL[folder.name]
    script = folder / name
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.count("planned") == 2


def assert_trained(output: str, num_steps: int) -> None:
    """Fail unless the example of two ranks printed one plan, both ranks, and a loss that falls with every step."""
    assert output.count("planned") == 1
    assert [line.split()[1] for line in output.splitlines() if line.startswith("  rank")] == ["0", "1"]
    losses = [float(line.split()[-1]) for line in output.splitlines() if line.startswith("step")]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == num_steps


TWO_RANKS = ["--inner", "aot_eager", "--device-memory", "40MiB"]


def test_the_example_of_two_ranks_runs(tmp_path: Path) -> None:
    """The processes have the environment that torchrun gives, and are forked, which saves 20 s of imports."""
    pytest.importorskip("transformers")
    folder = ROOT / "examples" / UNDER_TORCHRUN
    assert (folder / "README.md").exists()
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    ranks = [{**place, "RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
    small = [*TINY, "--steps", "3", *TWO_RANKS]
    text = (folder / "main.py").read_text(encoding="utf-8")
    first, second = programs(text, *small, folder=tmp_path, environments=ranks)
    assert_trained(first, 3)
    assert "step" not in second


@pytest.mark.slow
def test_torchrun_starts_the_example_of_two_ranks() -> None:
    """25 s of CPU time."""
    pytest.importorskip("transformers")
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*started, str(ROOT / "examples" / UNDER_TORCHRUN / "main.py"), *TINY, "--steps", "3", *TWO_RANKS]
    paths = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=paths, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert_trained(done.stdout, 3)


@pytest.mark.slow
def test_the_example_of_unequal_ranks_runs() -> None:
    """20 s of CPU time."""
    pytest.importorskip("transformers")
    folder = ROOT / "examples" / UNEQUAL
    assert (folder / "README.md").exists()
    fleet = ["--hardware", "1 x a6000-48g + 1 x p40-24g"]
    small = [*TINY, "--steps", "2", "--batch", "16", "--inner", "aot_eager", *fleet]
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*started, str(folder / "main.py"), *small]
    done = subprocess.run(command, env=paths, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    rows = [int(line.split()[2]) for line in done.stdout.splitlines() if line.startswith("rank")]
    assert sum(rows) == 16
    assert rows[0] > rows[1]
    assert done.stdout.count("step") == 2


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "looped-bfs"])
def test_the_example_of_a_pipeline_runs(schedule: str) -> None:
    """20 s of CPU time."""
    folder = ROOT / "examples" / PIPELINE
    assert (folder / "README.md").exists()
    small = ["--layers", "4", "--width", "64", "--length", "32", "--steps", "3", "--inner", "aot_eager"]
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*started, str(folder / "main.py"), *small, "--schedule", schedule]
    done = subprocess.run(command, env=paths, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("8 calls, 8 outstanding") == (4 if schedule == "looped-bfs" else 2)
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 3
