"""The examples run, at a size that is quick."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TINY = ["--layers", "2", "--width", "64", "--length", "32"]
SMALL = {
    "gpt2": ("train.py", [*TINY, "--steps", "3", "--share", "0.9"]),
    "plan_without_a_gpu": ("plan.py", [*TINY, "--batch", "2", "--budget", "40MiB", "--machines", "4 x a100-40g"]),
}
"""Each example's script and arguments; each prints two lines that say what was planned."""


UNDER_TORCHRUN = "two_ranks"
UNEQUAL = "unequal_ranks"


@pytest.mark.parametrize(
    "folder",
    sorted(
        path for path in (ROOT / "examples").iterdir() if path.is_dir() and path.name not in (UNDER_TORCHRUN, UNEQUAL)
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


def test_the_example_of_two_ranks_runs() -> None:
    pytest.importorskip("transformers")
    folder = ROOT / "examples" / UNDER_TORCHRUN
    assert (folder / "README.md").exists()
    small = [*TINY, "--steps", "3", "--inner", "aot_eager", "--device-memory", "40MiB"]
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*started, str(folder / "main.py"), *small]
    paths = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=paths, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("planned") == 1
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("  rank")] == ["0", "1"]
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert losses == sorted(losses, reverse=True)
    assert len(losses) == 3


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
