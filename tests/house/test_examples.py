"""The examples run, at a size that is quick."""

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = {"gpt2": ["--layers", "2", "--width", "64", "--length", "32", "--steps", "3", "--share", "0.9"]}


@pytest.mark.parametrize(
    "folder", sorted(path for path in (ROOT / "examples").iterdir() if path.is_dir()), ids=lambda path: path.name
)
def test_an_example_runs(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert (folder / "README.md").exists()
    script = folder / "train.py"
    monkeypatch.setattr(sys, "argv", [str(script), *SMALL[folder.name]])
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.count("planned") == 2
