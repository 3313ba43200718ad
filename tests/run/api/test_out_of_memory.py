"""A device that is full in an early step: one new plan with less memory, then an error with the largest tensors."""

import logging
import pickle
import weakref
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from models import Stack, seeded, vectors
from training import Run, assert_same, by_elixir, least_bytes, loss_of, plain_step, planned_peak_bytes

import elixir_compile as elixir
from elixir_compile.base.errors import EXPANDABLE_SEGMENTS, NoFeasiblePlan, OutOfDeviceMemory
from elixir_compile.base.units import GIB, KIB
from elixir_compile.compat.platforms import platform_of
from elixir_compile.ir import StepGraph
from elixir_compile.runtime.executor import Executor
from elixir_compile.session import over_budget as out_of_memory
from elixir_compile.session.over_budget import EarlyShortage, FailedAllocation
from elixir_compile.session.step_profiler import StepProfiler

PLAIN = {"planner": "greedy", "plan_cache": False}
TEXT = "CUDA out of memory. Tried to allocate 64.00 KiB. GPU 0 has a total capacity of 79.11 GiB"


def fail(monkeypatch: pytest.MonkeyPatch, verb: str, *numbers: int, text: str = TEXT) -> None:
    """Let the calls of `verb` with these numbers, from 0, find the device full."""
    real, calls = getattr(Executor, verb), []

    def called(*args: Any) -> Any:
        calls.append(verb)
        if len(calls) - 1 in numbers:
            raise torch.OutOfMemoryError(text)
        return real(*args)

    monkeypatch.setattr(Executor, verb, called)


def run_with_slack() -> Run:
    """Return a run under a budget 64 KiB above what it needs if nothing is offloaded."""
    full = planned_peak_bytes(by_elixir(seeded(Stack), **PLAIN).train(vectors(1)))
    return by_elixir(seeded(Stack), device_memory=full + 16 * KIB, **PLAIN)


def base_bytes(run: Run) -> int:
    return elixir.compilations(run.model)[0].plan.base_bytes


def test_a_forward_that_finds_the_device_full_is_planned_again_and_repeated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="elixir_compile")
    expected = run_with_slack()
    expected.train(vectors(3))
    run = run_with_slack()
    fail(monkeypatch, "ticket", 0, 1)
    run.train(vectors(3))
    assert_same(expected, run)
    assert base_bytes(run) == base_bytes(expected) + 128 * KIB
    assert planned_peak_bytes(run) <= planned_peak_bytes(expected) + 16 * KIB
    assert any("64.0 KiB requested" in message and "128.0 KiB less" in message for message in caplog.messages)


def test_a_first_forward_that_finds_the_device_full_runs_again_under_its_plan(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Kernels are tuned in it, which takes memory that later forwards do not need."""
    expected = run_with_slack()
    expected.train(vectors(3))
    run = run_with_slack()
    fail(monkeypatch, "ticket", 0)
    platform = Mock(wraps=platform_of(torch.device("cpu")))
    monkeypatch.setattr(out_of_memory, "platform_of", lambda device: platform)
    run.train(vectors(3))
    assert_same(expected, run)
    assert elixir.compilations(run.model)[0].plan == elixir.compilations(expected.model)[0].plan
    assert platform.empty_cache.call_count == 1
    assert any("which tunes kernels: it runs again" in message for message in caplog.messages)


def test_a_later_forward_that_finds_the_device_full_is_planned_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run_with_slack()
    expected.train(vectors(3))
    run = run_with_slack()
    fail(monkeypatch, "ticket", 1)
    run.train(vectors(3))
    assert_same(expected, run)
    assert base_bytes(run) == base_bytes(expected) + 128 * KIB


def test_after_a_backward_that_finds_the_device_full_the_next_forward_is_planned_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = run_with_slack()
    expected.train(vectors(2))
    run = run_with_slack()
    fail(monkeypatch, "check", 0)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate") as raised:
        plain_step(run.compiled, run.optimizer, vectors(1)[0])
    (note,) = raised.value.__notes__
    del raised  # it holds the tensors of the step
    assert "64.0 KiB were asked for beside 0 B of tensors and 0 B of gaps" in note
    (record,) = elixir.compilations(run.model)
    assert record.plan is not None
    assert f"device_memory={record.plan.budget_bytes - 128 * KIB} would leave room for that" in note
    assert EXPANDABLE_SEGMENTS in note
    assert "The next forward is planned with so much less" in note
    run.train(vectors(2))
    assert_same(expected, run)
    assert base_bytes(run) == base_bytes(expected) + 128 * KIB


@pytest.mark.parametrize(("verb", "numbers"), [("ticket", (0, 1, 2)), ("check", (0, 1))])
def test_a_second_time_the_error_names_the_largest_tensors(
    verb: str, numbers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with_slack()
    fail(monkeypatch, verb, *numbers)
    if verb == "check":
        with pytest.raises(torch.OutOfMemoryError):
            plain_step(run.compiled, run.optimizer, vectors(1)[0])
    with pytest.raises(OutOfDeviceMemory) as raised:
        plain_step(run.compiled, run.optimizer, vectors(1)[0])
    error = raised.value
    assert len(error.largest) == 5
    assert max(error.largest, key=lambda name: error.largest[name]) in str(error)
    assert "expandable_segments:True" in str(error)
    assert isinstance(error.__cause__, torch.OutOfMemoryError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_late_step_raises_the_error_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    run = by_elixir(seeded(Stack), **PLAIN)
    run.train(vectors(8))
    before = base_bytes(run)
    fail(monkeypatch, "ticket", 0)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        loss_of(run.compiled, vectors(1)[0])
    run.train(vectors(1))
    assert base_bytes(run) == before


@pytest.mark.parametrize(
    ("budget", "planned", "allocated", "gap", "limit", "excess"),
    [
        (60, 60, 80, 0, None, 2),  # a measured budget leaves the 20 GiB of others out already
        (60, 50, 80, 0, None, 12),  # 10 GiB that the plan did not count, the request, and a gap of its size
        (60, 60, 60, 0, None, 2),
        (80, 80, 80, 0, 80, 22),  # a budget of the user with the 20 GiB of others in it
        (100, 100, 80, 0, 80, 42),
        (50, 50, 70, 0, 80, 1),  # a budget of the user that leaves more than the 20 GiB
        (80, 80, 80, 19, 100, 20),  # gaps of 19 GiB that no tensor fits in: as much less, and the request
        (60, 60, 60, 15, None, 16),
        (60, 60, 80, 15, 200, 1),  # the device has room for the gaps beside the budget
    ],
)
def test_the_excess_counts_each_byte_once(
    budget: int, planned: int, allocated: int, gap: int, limit: int | None, excess: int
) -> None:
    failed = FailedAllocation(
        budget_bytes=budget * GIB,
        planned_bytes=planned * GIB,
        allocated_bytes=allocated * GIB,
        requested_bytes=GIB,
        gap_bytes=gap * GIB,
    )
    assert failed.excess_bytes(20 * GIB, None if limit is None else limit * GIB) == excess * GIB


def test_an_unknown_request_counts_as_a_sixteenth_of_the_budget() -> None:
    failed = FailedAllocation(budget_bytes=64, planned_bytes=60, allocated_bytes=60, requested_bytes=0)
    assert failed.excess_bytes(0, None) == 4 + 4


def test_an_early_forward_keeps_no_input_alive_and_does_not_run_again_without_it() -> None:
    runs: list[str] = []

    def run_forward(args: list[Any]) -> None:
        runs.append("forward")
        died = weakref.ref(args[0])
        args.clear()
        assert died() is None
        raise torch.OutOfMemoryError(TEXT)

    prediction = SimpleNamespace(device_peak_bytes=1)
    plan = SimpleNamespace(budget_bytes=1, prediction=prediction)
    active = SimpleNamespace(plan=plan, graph=StepGraph(name="m", ops=(), storages=(), outputs=()))
    graph: Any = SimpleNamespace(active=active, run_forward=run_forward)
    planner: Any = SimpleNamespace(may_replan=True, excess_bytes=0)
    shortage = EarlyShortage("m", Executor(torch.device("cpu"), "m"), planner)
    for number, wants_plan in enumerate([False, True]):
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            shortage.forward(graph, [torch.zeros(2), 3])
        assert runs == ["forward"] * (number + 1)
        assert shortage.wants_plan == wants_plan, "the first forward may lack what tuning took"


class Normed(Stack):
    """A stack whose forward writes statistics of its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = torch.nn.BatchNorm1d(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.statistics(x))


def test_a_forward_that_writes_its_inputs_does_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = by_elixir(seeded(Normed), **PLAIN)
    loss_of(expected.compiled, vectors(1)[0])
    expected.train(vectors(2))
    run = by_elixir(seeded(Normed), **PLAIN)
    fail(monkeypatch, "end", 0)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        loss_of(run.compiled, vectors(1)[0])
    run.train(vectors(2))
    assert_same(expected, run)
    assert base_bytes(run) == base_bytes(expected) + 128 * KIB


def test_the_backward_of_the_last_early_forward_is_early(monkeypatch: pytest.MonkeyPatch) -> None:
    run = by_elixir(seeded(Stack), **PLAIN)
    run.train(vectors(6))
    before = base_bytes(run)
    fail(monkeypatch, "check", 0)
    with pytest.raises(torch.OutOfMemoryError):
        plain_step(run.compiled, run.optimizer, vectors(1)[0])
    run.train(vectors(1))
    assert base_bytes(run) == before + 128 * KIB


@pytest.mark.parametrize("verb", ["ticket", "check"])
def test_if_no_plan_needs_so_much_less_it_is_planned_with_as_much_as_there_is(
    verb: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, expected = run_with_slack(), run_with_slack()
    full_bytes = planned_peak_bytes(expected.train(vectors(2)))
    fail(monkeypatch, verb, 0, *([1] if verb == "ticket" else []), text=TEXT.replace("64.00 KiB", "64.00 GiB"))
    if verb == "check":
        with pytest.raises(torch.OutOfMemoryError):
            plain_step(run.compiled, run.optimizer, vectors(1)[0])
    run.train(vectors(2))
    assert_same(expected, run)
    base = base_bytes(run) - base_bytes(expected)
    assert 0 < base < full_bytes
    assert planned_peak_bytes(run) - base < 0.6 * full_bytes
    assert any("no plan needs so much less; it is planned with" in message for message in caplog.messages)


@pytest.mark.parametrize("verb", ["ticket", "check"])
def test_if_no_plan_needs_less_the_error_names_the_largest_tensors(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = seeded(Stack)
    run = by_elixir(model, device_memory=least_bytes(model, vectors(1)[0]), **PLAIN)
    fail(monkeypatch, verb, 0, 1, text=TEXT.replace("64.00 KiB", "64.00 GiB"))
    if verb == "check":
        with pytest.raises(torch.OutOfMemoryError):
            plain_step(run.compiled, run.optimizer, vectors(1)[0])
    with pytest.raises(OutOfDeviceMemory, match="no plan with less memory helped") as raised:
        plain_step(run.compiled, run.optimizer, vectors(1)[0])
    assert len(raised.value.largest) == 5
    assert isinstance(raised.value.__cause__, NoFeasiblePlan)


def test_the_first_steps_of_a_later_plan_are_early_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer batch is planned again: under the new plan the device may be full, although it was not before."""
    run = by_elixir(seeded(Stack), dynamic=True, **PLAIN).train(vectors(9))
    fail(monkeypatch, "check", 0)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        plain_step(run.compiled, run.optimizer, torch.cat(vectors(3)))
    assert "The next forward is planned with so much less" in raised.value.__notes__[0]


def test_the_steps_are_measured_anew_after_a_new_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_with_slack()
    restarted: list[StepProfiler] = []
    monkeypatch.setattr(StepProfiler, "restart", lambda profiler: restarted.append(profiler))
    fail(monkeypatch, "ticket", 3)
    run.train(vectors(3))
    assert not restarted
    run.train(vectors(1))
    assert len(restarted) == 1


@pytest.mark.parametrize("verb", ["ticket", "check"])
def test_a_shortage_in_a_later_step_names_the_plan_and_its_largest_tensors(
    monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """`ticket` is called in the forward, `check` in the backward."""
    run = by_elixir(seeded(Stack), **PLAIN, micro_batches=1).train(vectors(8))
    fail(monkeypatch, verb, 0)
    with pytest.raises(torch.OutOfMemoryError, match=r"64\.00 KiB") as raised:
        run.train(vectors(1))
    (note,) = raised.value.__notes__
    compilation = elixir.compilations(run.model)[0]
    assert compilation.plan is not None
    assert compilation.plan.prediction.device_peak_at in note
    assert "blocks." in note
    assert "64.0 KiB were asked for" in note
    assert "The next forward" not in note, "later steps are not planned again"
    assert "KiB" in note
    run.train(vectors(1))
