"""An observation beside ranks, forked workers, other tools and a trainer, and its findings counted a second way."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch._logging._internal
from torch.utils.data import DataLoader

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import model_of
from elixir_compile.ir import Lane, Span
from elixir_compile.tools.observed import StudyRow, read_trace
from elixir_compile.tools.report.findings import WHOLE, Observed, find, host_update_bytes, observed_row
from tests.run import ranks_checks
from tests.run.models import Stack, hf_batches, seeded, small_gpt2, vectors
from tests.run.processes import spawn

# ----------------------------------------------------------------------------------------------------------------------
# An observation beside other processes and tools: ranks, forked workers, a killed process, torch's own traces.


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
    found = spawn(ranks_checks.observes, 2, str(folder), folder=tmp_path, limit_s=120.0)
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


# ----------------------------------------------------------------------------------------------------------------------
# `ElixirCallback` with a real `transformers.Trainer`: the figures of a run add up, and reach its logs.


transformers = pytest.importorskip("transformers")


class Batches(torch.utils.data.Dataset):
    """Samples of the batches of a test."""

    def __init__(self, num_samples: int) -> None:
        batches = hf_batches(num_samples)
        self.samples = [{name: value[0] for name, value in batch.items()} for batch in batches]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class Logged(transformers.TrainerCallback):
    """A logger, as that of W&B: it keeps what it is given."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))


def trained(folder: Path, callback: Any, **arguments: Any) -> Any:
    model = small_gpt2(num_layers=1)
    model.compile(backend="elixir", options={"inner": "aot_eager", "report": False, "planner": "keep_all"})
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-3)
    args = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, max_steps=4, logging_steps=1, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, max_grad_norm=1.0, **arguments,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=model, args=args, train_dataset=Batches(16), optimizers=(optimizer, None), callbacks=[Logged()]
    )
    if callback is not None:
        callback.attach(trainer)
    trainer.train()
    return trainer


def test_the_callback_observes_from_the_begin_of_a_training_to_its_end_and_adds_figures_to_logs_with_a_loss(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from elixir_compile.tools.integrations.transformers import ElixirCallback

    model = seeded(Stack, 8, 1)
    compiled: Any = torch.compile(
        model, backend="elixir", options={"inner": "aot_eager", "report": False, "planner": "keep_all"}
    )
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-3)
    callback: Any = ElixirCallback()
    state, logged = SimpleNamespace(is_world_process_zero=True), []
    callback.on_train_begin(None, state, None, model=model)
    for batch in vectors(3, width=8):
        compiled(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        logs = {"loss": 2.0}
        callback.on_log(None, state, None, logs=logs)
        logged.append(logs)
    evaluated = {"eval_runtime": 1.0}
    callback.on_log(None, state, None, logs=evaluated)
    callback.on_train_end(None, state, None)
    assert logged[0] == {"loss": 2.0}, "at the first log no step has ended"
    assert [logs["elixir/of_step"] for logs in logged[1:]] == [0, 1]
    assert evaluated == {"eval_runtime": 1.0}
    assert [dict(each.notes) for each in callback.study.summaries] == [{"loss": 2.0}] * 3
    assert "forward" in capsys.readouterr().out


@pytest.mark.slow  # a training: 6 s
def test_the_figures_of_a_trainer_add_up_and_reach_its_loggers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from elixir_compile.tools.integrations.transformers import ElixirCallback

    callback = ElixirCallback(tmp_path / "trace", full=(2,))
    trainer = trained(tmp_path, callback, gradient_accumulation_steps=2)
    study = callback.study
    assert study is not None
    assert [each.step for each in study.summaries] == [0, 1, 2, 3]
    for each in study.summaries:
        assert sum(each.seconds_s.values()) == pytest.approx(each.period_s, abs=1e-9)
        assert each.seconds_s["forward"] > 0
        assert each.seconds_s["backward"] > 0
        assert each.seconds_s["update"] > 0
    assert read_trace(tmp_path / "trace").steps[0] == study.summaries
    # Two forwards and two backwards are one step.
    (full,) = study.full_steps
    assert [str(each.phase) for each in full.intervals if each.phase is not None] == [
        "forward", "backward", "forward", "backward", "update",
    ]  # fmt: skip
    assert sum(span.label == "run fwd.0" for span in full.record.spans) == 2

    (logger,) = [other for other in trainer.callback_handler.callbacks if isinstance(other, Logged)]
    steps = [logs["elixir/of_step"] for logs in logger.logs if "elixir/of_step" in logs]
    assert steps == [0, 1, 2], "at the first log no step has ended"
    assert "forward" in capsys.readouterr().out
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 4


@pytest.mark.slow  # two trainings: 6 s
def test_the_losses_of_a_trainer_are_those_without_observation(tmp_path: Path) -> None:
    from elixir_compile.tools.integrations.transformers import ElixirCallback

    losses = [
        [entry["loss"] for entry in trained(tmp_path, callback).state.log_history if "loss" in entry]
        for callback in (None, ElixirCallback())
    ]
    assert losses[0] == losses[1]


# ----------------------------------------------------------------------------------------------------------------------
# Findings of a run agree with its raw spans: each value is counted a second way, on a fine grid of moments.


NUM_STEPS = 7
NUM_MOMENTS = 200_000
NAP_S = 0.01


def observed_step(update: str) -> Observed:
    """Return a step of a run on a machine whose link is told to be a hundred times faster than it is."""
    model = seeded(Stack, 128, 4)
    options = {"inner": "aot_eager", "report": False, "replan": False, "planner": "zero3_offload", "update": update}
    compiled = torch.compile(model, backend="elixir", options=options)
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-3)
    batch = vectors(1, rows=64, width=128)[0]
    with elixir.observe(compiled, full=(NUM_STEPS - 2,), counters_hz=0) as study:
        for _ in range(NUM_STEPS):
            compiled(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(NAP_S)
    (full,) = study.full_steps
    active = model_of(model).graphs[-1].active
    row = StudyRow(name="row", what="", budget_bytes=None, full=full, timed=study.summaries[2:], plan=active.plan)
    seen = observed_row(row, active.problem.cluster)
    assert seen is not None
    return seen


def share_of(seen: Observed, wanted: Callable[[Span], bool]) -> float:
    """Return the share of the moments of the step at which a span that is `wanted` runs."""
    moments = (np.arange(NUM_MOMENTS) + 0.5) * seen.period_s / NUM_MOMENTS
    is_busy = np.zeros(NUM_MOMENTS, bool)
    for span in seen.full.record.spans:
        if wanted(span):
            is_busy |= (moments >= span.start_s) & (moments < span.end_s)
    return is_busy.mean()


def by_hand(code: str, seen: Observed) -> float:
    """Return the value of a finding from the raw spans, intervals and summaries of the step."""
    spans = seen.full.record.spans
    if code == "F1":
        return 1 - share_of(seen, lambda span: span.lane is Lane.H2D)
    if code == "F2":
        return share_of(seen, lambda span: span.lane is Lane.HOST and span.label.split()[0] == "update")
    if code == "F4":
        return share_of(seen, lambda span: span.lane is Lane.CALLER)
    if code == "F5":
        rates = []
        for lane, link in ((Lane.H2D, seen.cluster.h2d), (Lane.D2H, seen.cluster.d2h)):
            nbytes = sum(span.nbytes for span in spans if span.lane is lane)
            busy_s = seen.period_s * share_of(seen, lambda span, lane=lane: span.lane is lane)
            rates += [nbytes / busy_s / link.bytes_per_s] if nbytes else []
        return min(rates)
    if code == "F7":
        return sum(one.end_s - one.start_s for one in seen.full.intervals if one.phase is None) / seen.period_s
    assert code == "F8"
    assert seen.plan is not None
    made, record = seen.plan.prediction, seen.full.record
    peaks = [record.host_peak_bytes / made.host_peak_bytes] if made.host_peak_bytes else []
    step_s = float(np.median([each.period_s for each in seen.timed]))
    return max([step_s / made.step_s, *peaks], key=lambda ratio: abs(ratio - 1))


@pytest.mark.parametrize("update", ["after_backward", pytest.param("across_steps", marks=pytest.mark.slow)])
def test_each_finding_of_a_run_is_what_its_raw_spans_tell(update: str) -> None:
    seen = observed_step(update)
    found = {finding.code: finding for finding in find(seen)}
    assert {"F1", "F7", "F8"} <= found.keys()
    for code, finding in found.items():
        assert finding.value == pytest.approx(by_hand(code, seen), rel=0.01, abs=1e-3), code
    whole = seen.phases[WHOLE]
    spans = seen.full.record.spans
    for lane, busy_s in ((Lane.COMPUTE, whole.compute_s), (Lane.HOST, whole.host_s), (Lane.CALLER, whole.waited_s)):
        assert busy_s / seen.period_s == pytest.approx(
            share_of(seen, lambda span, lane=lane: span.lane is lane), abs=1e-3
        )
    for lane, traffic in ((Lane.H2D, whole.up), (Lane.D2H, whole.down)):
        assert traffic.nbytes == sum(span.nbytes for span in spans if span.lane is lane) > 0
    assert seen.plan is not None
    own = [
        bucket for bucket, home in zip(seen.plan.buckets, seen.plan.placements, strict=True) if home.optim != "device"
    ]
    assert host_update_bytes(seen.plan) > 3 * 4 * sum(bucket.numel for bucket in own)
