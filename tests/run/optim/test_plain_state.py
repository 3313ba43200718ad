"""State that torch's own optimizers keep beside host parameters on a CPU: plans count it from the second step on."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer

import elixir_compile as elixir
from elixir_compile.runtime.measure import Resident
from tests.run.models import Stack, seeded, vectors
from tests.run.training import Run, assert_same, by_elixir, by_torch, least_bytes, loss_of, tight_bytes
from tests.run.updating import Several

Make = Callable[[Any], Optimizer]
UNPLANNED_BYTES = 4096
"""Step counters, tickets and losses."""


def each(params: Any) -> Any:
    """Return one optimizer for each parameter."""
    return Several(AdamW([param]) for param in params)


def momentum(params: Any) -> Optimizer:
    return SGD(params, lr=0.1, momentum=0.9)


def plain(params: Any) -> Optimizer:
    return SGD(params, lr=0.1)


def state_bytes(run: Run) -> int:
    entries = run.optimizer.state.values()
    return sum(value.nbytes for entry in entries for value in entry.values() if isinstance(value, torch.Tensor))


def told(run: Run, caplog: pytest.LogCaptureFixture, steps: int = 2) -> list[str]:
    """Return what is said of state while `run` trains."""
    with caplog.at_level(logging.WARNING, "elixir_compile"):
        run.train(vectors(steps))
    return [record.getMessage() for record in caplog.records if "keeps its state for parameters" in record.getMessage()]


def peak_bytes(run: Run) -> int:
    """Return the most bytes that are on the device in a step, without what else is in this process."""
    batch = vectors(1)[0]

    def step() -> None:
        loss_of(run.compiled, batch).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()

    return elixir.measure_step(step, device="cpu").device_peak_bytes


@pytest.mark.parametrize("make", [AdamW, momentum, each])
def test_plans_count_the_state_of_plain_optimizers(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """The budget has room for the whole state and for the step of a model whose parameters are on the host."""
    model, batches = seeded(Stack), vectors(4)
    trained = by_torch(model, optimizer=make).train(batches[:1])
    budget_bytes = int(1.05 * (least_bytes(model, batches[0], optimizer=make) + state_bytes(trained)))
    expected = by_torch(model, optimizer=make).train(batches)
    other_bytes = Resident().nbytes
    run = by_elixir(model, optimizer=make, device_memory=budget_bytes, search_timeout=1)
    assert len(told(run, caplog)) == 1
    run.train(vectors(4)[2:])
    assert_same(expected, run)
    assert peak_bytes(run) - other_bytes <= budget_bytes + UNPLANNED_BYTES


@pytest.mark.parametrize("make", [AdamW, each])
def test_a_budget_without_room_for_the_state_is_an_error_of_the_second_step(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    model, (batch, *_) = seeded(Stack), vectors(1)
    run = by_elixir(model, optimizer=make, device_memory=tight_bytes(model, batch, optimizer=make))
    (said,) = told(run, caplog, steps=1)
    assert said.startswith("AdamW keeps its state for parameters of Stack")
    assert "elixir_compile.HybridAdamW" in said
    with pytest.raises(elixir.NoFeasiblePlan) as caught:
        run.train([batch])
    assert caught.value.needed_bytes >= state_bytes(run)


@pytest.mark.parametrize("make", [elixir.HybridAdamW, elixir.hybrid(SGD), plain])
def test_nothing_changes_if_the_plan_is_kept(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    model, (batch, *_) = seeded(Stack), vectors(1)
    run = by_elixir(model, optimizer=make, device_memory=tight_bytes(model, batch, optimizer=make))
    assert told(run, caplog) == []


def test_nothing_changes_if_the_budget_suffices(caplog: pytest.LogCaptureFixture) -> None:
    assert told(by_elixir(seeded(Stack), optimizer=AdamW, planner="zero3_offload"), caplog) == []


def test_state_from_before_the_compilation_counts(caplog: pytest.LogCaptureFixture) -> None:
    model, batches = seeded(Stack), vectors(2)
    optimizer = AdamW(model.parameters())
    model(batches[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    run = by_elixir(model, optimizer=AdamW, device_memory=tight_bytes(model, batches[0], optimizer=AdamW))
    run.optimizer.load_state_dict(optimizer.state_dict())
    assert len(told(run, caplog, steps=1)) == 1
