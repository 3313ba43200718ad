"""An observation beside other processes and tools: ranks, forked workers, a killed process, torch's own traces."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._logging._internal
from torch.utils.data import DataLoader

import elixir_compile as elixir
from elixir_compile.tools.observed import read_trace
from tests.run import ranks_observe
from tests.run.models import Stack, seeded, vectors
from tests.run.processes import spawn

OPTIONS = {"inner": "aot_eager", "report": False, "replan": False, "planner": "zero3_offload", "plan_cache": False}
KILLED = """
import os, signal
import torch
import elixir_compile as elixir
from tests.run.models import Stack, seeded, vectors

model = seeded(Stack, 8, 1)
compiled = torch.compile(model, backend="elixir", options={"inner": "aot_eager", "planner": "zero3_offload"})
optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-3)
elixir.observe(compiled, FOLDER, full=(1,))
for number, batch in enumerate(vectors(9, width=8)):
    loss = compiled(batch)
    if number == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow  # two ranks: 10 s
def test_ranks_write_files_of_their_own_and_train_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = tmp_path / "trace"
    found = spawn(ranks_observe.observes, 2, str(folder), folder=tmp_path, limit_s=120.0)
    trace = read_trace(folder)
    assert trace.meta.num_ranks == 2
    assert list(trace.records) == [(0, 1), (1, 1)]
    for rank, seen in enumerate(found):
        expected, losses = seen["losses"]
        assert losses == expected
        assert seen["apart_s"] < 1e-9
        assert seen["ranks"] == [rank] * len(losses)
        assert [each.step for each in trace.steps[rank]] == list(range(len(losses)))
        assert seen["spans"] == seen["bytes"]
        assert min(seen["bytes"].values()) > 0


def test_a_forked_worker_writes_nothing_and_ends_nothing(tmp_path: Path) -> None:
    model = seeded(Stack, 8, 1)
    compiled = torch.compile(model, backend="elixir", options=OPTIONS)
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-3)
    data = DataLoader(vectors(4, width=8), batch_size=None, num_workers=1, multiprocessing_context="fork")
    with elixir.observe(compiled, tmp_path, full=(1,)) as study:
        for _ in range(2):  # the workers of the second round are forked after steps were written
            for batch in data:
                compiled(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert [each.step for each in study.summaries] == list(range(8))
    assert read_trace(tmp_path).steps == {0: study.summaries}
    assert (tmp_path / "steps-r0.jsonl").read_text().count("\n") == 8


@pytest.mark.slow  # a process that compiles: 5 s
def test_a_killed_process_leaves_the_steps_before(tmp_path: Path) -> None:
    script = KILLED.replace("FOLDER", repr(str(tmp_path / "trace")))
    done = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[3], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    trace = read_trace(tmp_path / "trace")
    # A step ends with the forward of the next: the process was killed after the sixth.
    assert [each.step for each in trace.steps[0]] == [0, 1, 2, 3, 4]
    assert list(trace.records) == [(0, 1)]


def test_labels_and_the_plan_are_in_the_traces_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts: dict[str, str] = {}

    def kept(kind: str, about: Any, *, payload_fn: Any, **_: object) -> None:
        if kind == "artifact":
            artifacts[about()["name"]] = payload_fn()

    monkeypatch.setattr(torch._logging._internal, "trace_structured", kept)
    model = seeded(Stack, 8, 1)
    compiled = torch.compile(model, backend="elixir", options=OPTIONS)
    batch = vectors(1, width=8)[0]
    compiled(batch).backward()
    plan = elixir.compilations(model)[0].plan
    assert artifacts["elixir_plan"] == str(plan)  # tlparse shows it
    # Without `acc_events` torch 2.11 warns of events that are dropped between cycles.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        compiled(batch).backward()
    names = {event.name for event in profiler.events() or ()}
    assert {f"run {region.id}" for region in plan.regions} <= names
    assert {f"gather {bucket.id}" for bucket in plan.buckets} <= names
