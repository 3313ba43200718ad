"""A device that is full in an early step: one new plan with less memory, then an error with the largest tensors."""

import logging
import pickle
from typing import Any

import pytest
import torch
from models import Stack, seeded, vectors
from training import Run, assert_same, by_elixir, loss_of, plain_step, planned_peak_bytes

import elixir_compile as elixir
from elixir_compile.errors import OutOfDeviceMemory
from elixir_compile.runtime.executor import Executor
from elixir_compile.units import KIB

PLAIN = {"planner": "greedy", "plan_cache": False}
TEXT = "CUDA out of memory. Tried to allocate 64.00 KiB. GPU 0 has a total capacity of 79.11 GiB"


def fail(monkeypatch: pytest.MonkeyPatch, verb: str, *numbers: int) -> None:
    """Let the calls of `verb` with these numbers, from 0, find the device full."""
    real, calls = getattr(Executor, verb), []

    def called(*args: Any) -> Any:
        calls.append(verb)
        if len(calls) - 1 in numbers:
            raise torch.OutOfMemoryError(TEXT)
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
    fail(monkeypatch, "ticket", 0)
    run.train(vectors(3))
    assert_same(expected, run)
    assert base_bytes(run) == base_bytes(expected) + 64 * KIB
    assert planned_peak_bytes(run) <= planned_peak_bytes(expected) + 16 * KIB
    assert any("64.0 KiB requested" in message and "64.0 KiB less" in message for message in caplog.messages)


def test_after_a_backward_that_finds_the_device_full_the_next_forward_is_planned_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = run_with_slack()
    expected.train(vectors(2))
    run = run_with_slack()
    fail(monkeypatch, "check", 0)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        plain_step(run.compiled, run.optimizer, vectors(1)[0])
    run.train(vectors(2))
    assert_same(expected, run)
    assert base_bytes(run) == base_bytes(expected) + 64 * KIB


@pytest.mark.parametrize(("verb", "numbers"), [("ticket", (0, 1)), ("check", (0, 1))])
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
