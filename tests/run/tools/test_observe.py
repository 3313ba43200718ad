"""`elixir.observe`: steps and phases that add up, two graphs in one step, and the folder of a run."""

import gc
import gzip
import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import model_of
from elixir_compile.ir import Lane, tallies
from elixir_compile.runtime import recording as phases
from elixir_compile.session.plan_files import load_answered
from elixir_compile.session.step_profiler import STEPS_SKIPPED, STEPS_TIMED
from elixir_compile.step.seconds import simulate
from elixir_compile.tools.measure import observation
from elixir_compile.tools.observe import Study, _chooser
from elixir_compile.tools.observed import read_full_step, read_trace
from elixir_compile.tools.report.diff import run_diff
from tests.run.models import Stack, seeded, vectors

# ----------------------------------------------------------------------------------------------------------------------
# `elixir.observe`: steps end where the next forward begins, phases add up to the period, nothing is left behind.


NAP_S = 0.02
SMALL = {"inner": "aot_eager", "report": False, "replan": False, "planner": "keep_all"}


class Trained:
    """A small compiled model, its optimizer, and a batch."""

    def __init__(self, **options: object) -> None:
        self.model = seeded(Stack, 8, 1)
        self.compiled = torch.compile(self.model, backend="elixir", options={**SMALL, **options})
        self.optimizer: torch.optim.Optimizer = elixir.HybridAdamW(self.model.parameters(), lr=1e-3)
        self.batch = vectors(1, width=8)[0]

    def backward(self) -> torch.Tensor:
        loss = self.compiled(self.batch)
        loss.backward()
        return loss

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> torch.Tensor:
        loss = self.backward()
        self.update()
        return loss


def assert_adds_up(study: Study, num_steps: int) -> None:
    """Fail unless there are `num_steps` summaries in order, and the seconds of each step's phases are its period."""
    assert [each.step for each in study.summaries] == list(range(num_steps))
    for each in study.summaries:
        assert sum(each.seconds_s.values()) == pytest.approx(each.period_s, abs=1e-9)


def hooks() -> tuple[int, int, int]:
    return len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks), len(phases._observers)


def test_each_step_has_its_phases_and_they_add_up_to_the_period() -> None:
    trained = Trained()
    trained.step()
    with elixir.observe(trained.compiled) as study:
        began_s = time.perf_counter()
        for _ in range(4):
            trained.step()
            time.sleep(NAP_S)
        took_s = time.perf_counter() - began_s
    assert_adds_up(study, 4)
    for each in study.summaries:
        assert {"forward", "backward", "update"} <= each.seconds_s.keys()
        assert len(each.plans) == 1
        assert each.rss_bytes is not None
        assert each.rss_bytes > 1 << 20
    assert all(each.seconds_s["caller"] >= NAP_S for each in study.summaries[:-1])
    assert study.summaries[-1].seconds_s["caller"] < NAP_S, "the time after the last update belongs to no step"
    total_s = sum(each.period_s for each in study.summaries)
    assert took_s - 2 * NAP_S < total_s < took_s


def test_accumulated_gradients_are_one_step() -> None:
    trained = Trained()
    with elixir.observe(trained.model) as study:
        for _ in range(3):
            trained.backward()
            trained.backward()
            trained.update()
    assert_adds_up(study, 3)


def test_a_closure_is_one_step_and_its_forward_is_no_update() -> None:
    trained = Trained()
    plain = torch.optim.SGD(trained.model.parameters(), lr=1e-3)

    def closure() -> torch.Tensor:
        plain.zero_grad()
        time.sleep(NAP_S)
        return trained.backward()

    trained.step()
    with elixir.observe(trained.model) as study:
        for _ in range(3):
            plain.step(closure)
    assert_adds_up(study, 3)
    # The nap of the closure is within `step()`, before the first forward of the step, so it ends the step before.
    assert all(each.seconds_s["update"] >= NAP_S for each in study.summaries[:-1])
    assert all(each.seconds_s["forward"] > 0 and each.seconds_s["backward"] > 0 for each in study.summaries)


@pytest.mark.slow  # a compilation: 1 s
def test_two_optimizers_after_one_backward_are_one_step() -> None:
    trained = Trained()
    halves = [list(trained.model.blocks.parameters()), list(trained.model.head.parameters())]
    optimizers = [torch.optim.SGD(half, lr=1e-3) for half in halves]
    with elixir.observe(trained.model) as study:
        for _ in range(3):
            trained.backward()
            for optimizer in optimizers:
                optimizer.step()
    assert_adds_up(study, 3)


def test_an_evaluation_between_steps_is_the_callers() -> None:
    trained = Trained()
    with elixir.observe(trained.model) as study:
        for _ in range(3):
            trained.step()
            with torch.no_grad():
                trained.compiled(trained.batch)
                time.sleep(NAP_S)
    assert_adds_up(study, 3)
    assert study.summaries[1].seconds_s["caller"] >= NAP_S


def test_another_models_optimizer_ends_no_step() -> None:
    trained, other = Trained(), nn.Linear(2, 2)
    foreign = torch.optim.SGD(other.parameters(), lr=1e-3)
    with elixir.observe(trained.model) as study:
        for _ in range(2):
            trained.backward()
            other(torch.ones(1, 2)).sum().backward()
            foreign.step()
            trained.backward()
            trained.update()
    assert_adds_up(study, 2)


def fails_in_forward(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("elixir_compile.runtime.executor.Executor.ticket", _fail)
        with pytest.raises(KeyError):
            trained.compiled(trained.batch)


def fails_in_backward(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = trained.compiled(trained.batch * 2)
    with monkeypatch.context() as patch:
        patch.setattr("elixir_compile.runtime.executor.Executor.reduce", _fail)
        with pytest.raises(KeyError):
            loss.backward()


def fails_in_eager_backward(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = trained.batch.clone().requires_grad_()
    batch.register_hook(_fail)
    with pytest.raises(KeyError):
        trained.compiled(batch * 1).backward()


def fails_in_update(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("elixir_compile.optim.update.Updater.update", _fail)
        with pytest.raises(KeyError):
            trained.optimizer.step()


def _fail(*_: object) -> Any:
    raise KeyError("mine")


@pytest.mark.parametrize(
    "fail",
    [
        fails_in_forward,
        pytest.param(fails_in_backward, marks=pytest.mark.slow),  # each 1 s
        fails_in_eager_backward,
        fails_in_update,
    ],
)
def test_a_phase_that_an_exception_ends_is_closed(
    fail: Callable[[Trained, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained()
    with elixir.observe(trained.model) as study:
        for _ in range(2):
            trained.step()
        fail(trained, monkeypatch)
        trained.optimizer.zero_grad()
        trained.backward()
        time.sleep(NAP_S)
        trained.update()
        trained.step()
    assert_adds_up(study, 4)
    assert study.summaries[2].seconds_s["caller"] >= NAP_S, "the nap was counted in a phase that was never closed"


def test_without_an_optimizer_the_loop_says_where_a_step_ends() -> None:
    trained = Trained()
    with elixir.observe(trained.model) as study:
        for _ in range(3):
            trained.backward()
            with torch.no_grad():
                for param in trained.model.parameters():
                    param -= 1e-3 * param.grad
                    param.grad = None
            study.step()
    assert_adds_up(study, 3)
    assert all("update" not in each.seconds_s for each in study.summaries)


def test_a_model_may_be_compiled_later_and_in_place() -> None:
    model = seeded(Stack, 8, 1)
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-3)
    with elixir.observe(model) as study:
        assert study.latest is None
        assert study.scalars() == {}
        assert "no step" in str(study)
        model.compile(backend="elixir", options=SMALL)
        for batch in vectors(2, width=8):
            model(batch).backward()
            optimizer.step()
    assert_adds_up(study, 2)


def test_scalars_are_finite_floats_and_notes_belong_to_their_step() -> None:
    trained = Trained()
    with elixir.observe(trained.model) as study:
        study.note(lr=0.5)
        for number in range(3):
            trained.step()
            study.note(number=number, loss=float("nan"))
    assert [dict(each.notes) for each in study.summaries] == [
        {"lr": 0.5, "number": 0.0},
        {"number": 1.0},
        {"number": 2.0},
    ]
    assert study.latest is not None
    scalars = study.latest.scalars()
    assert scalars == study.scalars()
    assert scalars["elixir/of_step"] == 2
    assert scalars["elixir/period_s"] == study.latest.period_s
    assert all(type(value) is float and value == value for value in scalars.values())
    assert "device_peak_bytes" not in " ".join(scalars), "a CPU has no peak of its own to tell"
    assert "forward" in str(study)


def test_bytes_are_those_that_the_ledger_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Trained(planner="zero3_offload")
    trained.step()
    ledger = elixir.compilations(trained.model)[0]._planned._executor.ledger
    with elixir.observe(trained.model) as study:
        trained.step()
        before = ledger.bytes
        trained.step()
        moved = {key: nbytes - before[key] for key, nbytes in ledger.bytes.items() if nbytes > before[key]}
    assert study.latest is not None
    assert study.latest.moved_bytes.get("h2d", {}).keys() <= {"forward", "backward", "update"}
    for lane in study.latest.moved_bytes:
        assert study.latest.lane_bytes(lane) == sum(nbytes for (own, _), nbytes in moved.items() if own == lane)
    assert study.latest.lane_bytes("h2d") > 0


def test_a_second_observation_of_a_model_is_refused_until_the_first_stops() -> None:
    trained = Trained()
    with elixir.observe(trained.model), pytest.raises(elixir.NestedMeasurement, match="Stack is observed already"):
        elixir.observe(trained.compiled)
    elixir.observe(trained.model).stop()


def test_nothing_is_left_behind() -> None:
    trained = Trained()
    trained.step()
    before, threads = hooks(), threading.active_count()
    study = elixir.observe(trained.model)
    trained.step()
    assert hooks() == tuple(count + 1 for count in before)
    study.stop()
    study.stop()
    assert hooks() == before
    assert threading.active_count() == threads
    assert len(study.summaries) == 1
    trained.step()
    assert len(study.summaries) == 1


@pytest.mark.slow  # two compilations: 2 s
def test_the_bits_of_the_losses_are_those_without_observation() -> None:
    losses = [trained.step().item() for trained in [Trained()] for _ in range(3)]
    watched = Trained()
    with elixir.observe(watched.model):
        assert [watched.step().item() for _ in range(3)] == losses


def test_an_observation_does_not_keep_its_model() -> None:
    trained = Trained()
    trained.step()
    with elixir.observe(trained.model):
        trained.step()
        alive = []
        torch.utils.weak.weakref.finalize(trained.model, alive.append, "gone")
        del trained
        torch._dynamo.reset()
        gc.collect()
        assert alive == ["gone"]


class Event:
    """An event of a device: past once the test says so."""

    def __init__(self, at_s: float) -> None:
        self.at_s = at_s
        self.is_past = False

    def query(self) -> bool:
        return self.is_past

    def elapsed_time(self, other: "Event") -> float:
        assert self.is_past, "a moment was read before it was past"
        assert other.is_past, "a moment was read before it was past"
        return (other.at_s - self.at_s) * 1e3


def test_events_of_a_device_are_read_when_they_are_past_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Trained()
    trained.step()
    made: list[Event] = []

    def moment(lanes: object) -> observation.Moment:
        made.append(Event(float(len(made))))
        return observation.Moment(0.0, made[-1])

    monkeypatch.setattr(observation, "moment_now", moment)
    study = elixir.observe(trained.model)
    for _ in range(3):
        trained.step()
    assert study.latest is None
    for event in made:
        event.is_past = True
    trained.step()
    assert [each.step for each in study.summaries] == [0, 1], "the end of step 2 is not past yet"
    for event in made:
        event.is_past = True
    study.stop()
    assert_adds_up(study, 4)
    assert all(each.period_s == round(each.period_s) > 0 for each in study.summaries)


# ----------------------------------------------------------------------------------------------------------------------
# Two graphs in one step, of a graph break or of two models: figures of a step are told for each graph.


OPTIONS = {"inner": "aot_eager", "planner": "zero3_offload", "plan_cache": False, "update": "after_backward"}
NUM_STEPS = STEPS_SKIPPED + STEPS_TIMED + 1


class Broken(nn.Module):
    """Two halves of different sizes, with a graph break between them."""

    def __init__(self, *, is_broken: bool = True) -> None:
        super().__init__()
        self.small = nn.Linear(16, 16)
        self.large = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
        self.is_broken = is_broken

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.small(x)
        if self.is_broken:
            torch._dynamo.graph_break()
        return self.large(x).square().mean()


def lines_of(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    return [message for message in caplog.messages if message.startswith(word)]


def test_each_graph_of_a_step_has_its_own_spans_and_its_own_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="elixir_compile")
    model = seeded(Broken)
    compiled = torch.compile(model, backend="elixir", options=OPTIONS)
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-3)
    with elixir.observe(compiled, full=(NUM_STEPS - 2,), counters_hz=0) as study:
        for _ in range(NUM_STEPS):
            compiled(torch.ones(4, 16)).backward()
            optimizer.step()
            optimizer.zero_grad()
    (full,) = study.full_steps
    made = elixir.compilations(model)
    assert full.record.graphs == ("Broken", "Broken.1")
    assert len(full.summary.plans) == 2
    assert sum(full.summary.seconds_s.values()) == pytest.approx(full.summary.period_s, abs=1e-9)
    parts = [full.record.of_graph(each.name, [bucket.id for bucket in each.active.plan.buckets]) for each in made]
    for part, each in zip(parts, made, strict=True):
        active = each.active
        planned = simulate(active.graph, active.plan, active.problem.cluster)
        assert dict(tallies(part.spans)) == dict(tallies(planned.spans))
        # Seconds and peaks of a step are those of both graphs, so only counts are compared with the plan of one.
        found = run_diff(active.plan, full.record).comparisons
        assert {one.what for one in found} == {"gather", "release", "reduce", "offload"}
        assert not any(one.is_off for one in found)
        assert part.counts["gather"] == planned.counts["gather"] < full.record.counts["gather"]
    moved = sum(span.nbytes for part in parts for span in part.spans)
    assert moved == sum(full.summary.lane_bytes(lane) for lane in full.summary.moved_bytes)
    assert all(one.counts == full.record.counts for one in (full.record.of_graph("other"), replace(full.record)))
    # The profiler times each graph within the step that both share, and neither plan is made anew.
    lines = lines_of(caplog, "measured  peak")
    assert [line.split()[-1] for line in lines] == ["Broken", "Broken.1"]
    assert all("of it in this graph" in line for line in lines)
    assert not lines_of(caplog, "replanned")


def test_graphs_that_take_turns_have_no_step_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    """A period from one forward to the next of the same graph would hold a step of the other graph."""
    caplog.set_level(logging.INFO, logger="elixir_compile")
    model = seeded(Broken, is_broken=False)
    compiled = torch.compile(model, backend="elixir", options=OPTIONS, dynamic=False)
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-3)
    for number in range(2 * NUM_STEPS):
        compiled(torch.ones(4 + number % 2, 16)).backward()
        optimizer.step()
    assert len(elixir.compilations(model)) == 2
    assert lines_of(caplog, "measured  peak") == []


def test_two_forwards_before_a_backward_are_one_step() -> None:
    """A siamese model: its second forward begins no step, which is half as long as it would seem."""
    model = seeded(Broken, is_broken=False)
    compiled = torch.compile(model, backend="elixir", options=OPTIONS)
    for number in range(3):
        loss = compiled(torch.ones(4, 16)) + compiled(torch.zeros(4, 16))
        loss.backward()
        (graph,) = model_of(model).graphs
        assert len(graph.profiler._began_s) == number + 1


def test_two_models_in_a_step_have_figures_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="elixir_compile")
    first, second = seeded(Broken, is_broken=False), nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 16))
    forwards = [torch.compile(model, backend="elixir", options=OPTIONS) for model in (second, first)]
    optimizers = [elixir.HybridAdamW(model.parameters(), lr=1e-3) for model in (second, first)]
    studies = [elixir.observe(model, full=(NUM_STEPS - 2,), counters_hz=0) for model in (second, first)]
    for _ in range(NUM_STEPS):
        forwards[1](forwards[0](torch.ones(4, 16))).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for study, model in zip(studies, (second, first), strict=True):
        study.stop()
        (made,) = elixir.compilations(model)
        (full,) = study.full_steps
        active = made.active
        assert [each.step for each in study.summaries] == list(range(NUM_STEPS))
        planned = simulate(active.graph, active.plan, active.problem.cluster)
        assert dict(tallies(full.record.spans)) == dict(tallies(planned.spans))
        assert sum(full.summary.lane_bytes(lane) for lane in full.summary.moved_bytes) == sum(
            span.nbytes for span in full.record.spans
        )
        counts = {one.what: one.is_off for one in run_diff(active.plan, full.record).comparisons}
        assert not any(counts[verb] for verb in ("gather", "release", "reduce", "offload"))
    assert len(lines_of(caplog, "measured  peak")) == 2


# ----------------------------------------------------------------------------------------------------------------------
# The folder of an observed run: what is written, by option and environment too, and what is read back.


OFFLOADED = {"inner": "aot_eager", "report": False, "replan": False, "planner": "zero3_offload"}


def trained(num_steps: int, **options: object) -> torch.nn.Module:
    model = seeded(Stack, 8, 1)
    compiled = torch.compile(model, backend="elixir", options={**OFFLOADED, **options})
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
    compiled = torch.compile(model, backend="elixir", options=OFFLOADED)
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
    figures = next(each for each in reversed(study.summaries) if each.host_update_elements).scalars()
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
    script = "from tests.run.tools.test_observe import trained; trained(3)"
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
