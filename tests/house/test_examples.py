"""The examples run, at a size that is quick."""

import runpy
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


@pytest.mark.parametrize(
    "folder", sorted(path for path in (ROOT / "examples").iterdir() if path.is_dir()), ids=lambda path: path.name
)
def test_an_example_runs(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert (folder / "README.md").exists()
    name, arguments = SMALL[folder.name]
    script = folder / name
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.count("planned") == 2
