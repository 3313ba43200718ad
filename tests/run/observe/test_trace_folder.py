"""The folder of an observed run: what is written, by option and environment too, and what is read back."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import elixir_compile as elixir
from elixir_compile.ir import Lane, tallies
from elixir_compile.session.saved import load_answered
from elixir_compile.tools.observe import _chooser
from elixir_compile.tools.observed import read_full_step, read_trace
from tests.run.models import Stack, seeded, vectors

SMALL = {"inner": "aot_eager", "report": False, "replan": False, "planner": "zero3_offload"}


def trained(num_steps: int, **options: object) -> torch.nn.Module:
    model = seeded(Stack, 8, 1)
    compiled = torch.compile(model, backend="elixir", options={**SMALL, **options})
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-3)
    for batch in vectors(num_steps, width=8):
        compiled(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def fail_for_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("out of memory. Tried to allocate 64.00 KiB")


def test_a_folder_has_the_summaries_the_plan_and_the_full_steps_and_errors_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "steps-r0.jsonl").write_text("of an earlier run\n")
    (tmp_path / "steps-r1.jsonl").write_text("")
    model = seeded(Stack, 8, 1)
    compiled = torch.compile(model, backend="elixir", options=SMALL)
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-3)
    with elixir.observe(compiled, tmp_path, full=(1, 2), full_every=4) as study:
        for batch in vectors(6, width=8):
            compiled(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    trace = read_trace(tmp_path)
    assert trace.steps == {0: study.summaries, 1: ()}
    assert len(study.summaries) == 6
    assert (trace.meta.model, trace.meta.device, trace.meta.num_ranks) == ("Stack", "cpu", 1)
    assert trace.meta.versions["torch"] == torch.__version__
    assert list(trace.records) == [(0, 1), (0, 2), (0, 4)]
    (key,) = trace.steps[0][-1].plans
    plan, question = load_answered(tmp_path / f"plan-{key}.json")
    assert plan == elixir.compilations(model)[0].plan
    assert question is not None

    full = read_full_step(trace.records[0, 2])
    assert full == study.full_steps[1]
    assert full.summary == study.summaries[2]
    assert sum(each.end_s - each.start_s for each in full.intervals) == pytest.approx(full.summary.period_s)
    assert full.intervals[0].start_s == 0
    assert all(one.end_s == other.start_s for one, other in zip(full.intervals, full.intervals[1:], strict=False))
    spans = tallies(full.record.spans)
    assert (Lane.COMPUTE, "run fwd.0") in spans
    assert full.record.counts["gather"] > 0
    gathered_bytes = sum(each.nbytes for (lane, _), each in spans.items() if lane is Lane.H2D)
    assert gathered_bytes == full.summary.lane_bytes("h2d"), "the spans of a step have the bytes of its summary"
    num_elements = sum(param.numel() for param in model.parameters())
    # The update of the last step may still run when the observation stops.
    updated = sum(each.host_update_elements or 0 for each in study.summaries)
    assert 5 * num_elements <= updated <= 6 * num_elements, "the host updates every element once per step"
    figures = study.scalars()
    rate_per_s = figures["elixir/host_update_elements"] / figures["elixir/host_update_s"]
    assert figures["elixir/host_update_elements_per_s"] == pytest.approx(rate_per_s)
    # Phases are those of the spans: no region of the forward runs in an interval of the backward.
    for span in full.record.spans:
        if span.lane is Lane.COMPUTE and span.label.startswith("run"):
            phase = next(each.phase for each in full.intervals if each.start_s <= span.end_s <= each.end_s)
            assert span.label.startswith(f"run {'fwd' if phase == 'forward' else 'bwd'}")

    with elixir.observe(compiled, tmp_path / "again"), monkeypatch.context() as patch:
        for batch in vectors(2, width=8):
            compiled(batch).backward()
            optimizer.step()
        patch.setattr("elixir_compile.runtime.executor.Executor.check", fail_for_memory)
        with pytest.raises(torch.OutOfMemoryError) as raised:
            compiled(batch).backward()
        (note,) = raised.value.__notes__
        assert f"the steps before are in {tmp_path / 'again'} (plan-" in note
        assert "steps-r0.jsonl)" in note


def test_a_torn_last_line_is_ignored_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    model = trained(3, trace=str(tmp_path))  # it is observed as long as it lives
    lines = (tmp_path / "steps-r0.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1]
    (tmp_path / "steps-r0.jsonl").write_text("\n".join(lines) + '\n{"elixir": "st')
    assert [each.step for each in read_trace(tmp_path).steps[0]] == [0, 1]
    (tmp_path / "steps-r0.jsonl").write_text("\n".join([*lines, lines[0].replace("period_s", "duration")]) + "\n")
    with pytest.raises(elixir.TraceFileError, match=r"steps-r0\.jsonl, duration: expected no such field"):
        read_trace(tmp_path)
    record = tmp_path / "record-r0-1.json.gz"
    record.write_bytes(gzip.compress(b"{}")[:-4])
    with pytest.raises(elixir.TraceFileError, match="a whole gzip file"):
        read_full_step(record)
    with pytest.raises(elixir.TraceFileError, match="a file that can be read"):
        read_trace(tmp_path / "absent")
    assert isinstance(model, Stack)


@pytest.mark.slow  # a process of its own: 8 s
def test_the_environment_observes_a_script_and_keeps_its_last_step(tmp_path: Path) -> None:
    """The process ends without `stop()`: the last step is written when it ends."""
    script = "from tests.run.observe.test_trace_folder import trained; trained(3)"
    environment = {"ELIXIR_TRACE": str(tmp_path), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])
    environment["ELIXIR_CACHE_DIR"] = str(tmp_path / "cache")
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
    assert [each.step for each in read_trace(tmp_path).steps[0]] == [0, 1, 2]


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"full": "all"}, "full"),
        ({"full": (1.5,)}, "full"),
        ({"full": (-1,)}, "full"),
        ({"full_every": -1}, "full_every"),
        ({"counters_hz": 1000.0}, "counters_hz"),
        ({"counters_hz": float("nan")}, "counters_hz"),
    ],
)
def test_a_wrong_number_is_named_and_the_model_may_be_observed_after(wrong: dict[str, object], name: str) -> None:
    model = Stack(8, 1)
    with pytest.raises(elixir.InvalidOption, match=f"option {name}"):
        elixir.observe(model, **wrong)
    elixir.observe(model, counters_hz=0).stop()


def test_steps_are_chosen_by_number_and_by_period() -> None:
    assert [step for step in range(20) if _chooser("auto", 0)(step)] == [8, 9, 10]
    assert [step for step in range(20) if _chooser((), 6)(step)] == [6, 12, 18]
    assert [step for step in range(20) if _chooser((0, 7), 7)(step)] == [0, 7, 14]
