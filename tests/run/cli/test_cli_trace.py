"""`elixir-compile trace`: a file for Perfetto of an observed run, with the planned step beside the measured ones."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import elixir_compile as elixir
from elixir_compile.tools.cli.main import app
from tests.run.models import Stack, seeded, vectors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of an observed run of four steps, the last two in full."""
    model = seeded(Stack, 8, 1)
    options = {"inner": "aot_eager", "report": False, "replan": False, "planner": "zero3_offload"}
    compiled = torch.compile(model, backend="elixir", options=options)
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-3)
    with elixir.observe(compiled, tmp_path / "trace", full=(1, 2), memory_events=True):
        for batch in vectors(3, width=8):
            compiled(batch).backward()
            optimizer.step()
    return tmp_path / "trace"


def test_the_trace_shows_measured_and_planned_steps_of_the_same_labels(folder: Path) -> None:
    done = CliRunner().invoke(app, ["trace", str(folder)])
    assert done.exit_code == 0, done.output
    assert "steps 1, 2 of Stack, beside the planned step" in done.output
    events = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]
    by_process = {
        pid: {event["name"] for event in events if event["ph"] == "X" and event["pid"] == pid} for pid in (0, 1)
    }
    assert {"step 1", "step 2", "forward", "backward", "update", "caller"} <= by_process[0]
    assert "run fwd.0" in by_process[0] & by_process[1]
    assert any(name.startswith("gather") for name in by_process[0] & by_process[1])
    starts_us = {event["name"]: event["ts"] for event in events if event["name"].startswith("step ")}
    assert starts_us["step 2"] > starts_us["step 1"] > 0
    assert any(event["ph"] == "C" and event["name"] == "memory" for event in events)
    arrows = {event["pid"] for event in events if event["ph"] == "f" and event["name"].startswith("gather")}
    assert arrows == {0, 1}, "gathers lead to the regions that wait for them, measured and planned"
    again = CliRunner().invoke(app, ["trace", str(folder), "-o", str(folder / "own.json")])
    assert again.exit_code == 0
    assert json.loads((folder / "own.json").read_text())["traceEvents"] == events


def test_a_folder_without_full_steps_or_without_a_run_says_so(folder: Path, tmp_path: Path) -> None:
    for path in folder.glob("record-*"):
        path.unlink()
    done = CliRunner().invoke(app, ["trace", str(folder)])
    assert done.exit_code == 1
    assert "full=(8, 9, 10)" in done.output
    absent = CliRunner().invoke(app, ["trace", str(tmp_path / "absent")])
    assert absent.exit_code == 1
    assert "meta.json" in absent.output
