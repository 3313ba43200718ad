"""State that torch's own optimizers keep beside host parameters on a CPU: in no plan, so it is said how much."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from torch.optim import SGD, AdamW, Optimizer

import elixir_compile as elixir
from elixir_compile.measure.step import Resident
from tests.run.models import Stack, seeded, vectors
from tests.run.training import Run, by_elixir, loss_of, planned_peak_bytes, tight_bytes

Make = Callable[[Any], Optimizer]


def budget_of(make: Make) -> int:
    """Return a budget under which parameters of the model live on the host."""
    return tight_bytes(seeded(Stack), vectors(1)[0], optimizer=make)


def told(run: Run, steps: int = 3) -> list[str]:
    """Return what is said of state while `run` trains."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run.train(vectors(steps))
    assert all(warning.filename == __file__ or "training" in warning.filename for warning in said)
    return [str(warning.message) for warning in said]


def peak_bytes(run: Run) -> int:
    """Return the most bytes that are on the device in a step, what else is in this process included."""
    batch = vectors(1)[0]

    def step() -> None:
        loss_of(run.compiled, batch).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()

    return elixir.measure_step(step, device="cpu").device_peak_bytes


def in_bytes(text: str) -> int:
    number, unit = text.split()
    return round(float(number) * {"B": 1, "KiB": 2**10, "MiB": 2**20}[unit])


def test_the_warned_bytes_are_the_bytes_that_a_step_takes() -> None:
    budget = budget_of(AdamW)
    other_bytes = Resident().nbytes
    run = by_elixir(seeded(Stack), optimizer=AdamW, device_memory=budget)
    (said,) = told(run)
    sizes = re.findall(r"[\d.]+ (?:B|[KM]iB)", said)
    assert said.startswith("AdamW keeps ")
    state, step, _, planned = map(in_bytes, sizes)
    kept = sum(t.nbytes for entry in run.optimizer.state.values() for t in entry.values())
    assert state == pytest.approx(kept, rel=0.05)
    assert planned == pytest.approx(planned_peak_bytes(run), rel=0.05)
    assert budget < peak_bytes(run) - other_bytes == pytest.approx(step, rel=0.06)
    assert "elixir_compile.HybridAdamW" in said


@pytest.mark.parametrize("make", [elixir.HybridAdamW, elixir.hybrid(SGD), lambda params: SGD(params, lr=0.1)])
def test_no_warning_if_the_plan_is_kept(make: Make) -> None:
    assert told(by_elixir(seeded(Stack), optimizer=make, device_memory=budget_of(make))) == []


def test_no_warning_if_the_budget_suffices() -> None:
    assert told(by_elixir(seeded(Stack), optimizer=AdamW, planner="zero3_offload")) == []


def test_many_optimizers_warn_once() -> None:
    """One for each parameter, as users have them who step in the backward."""

    class Each:
        def __init__(self, params: Any) -> None:
            self.each = [AdamW([param]) for param in params]

        def step(self) -> None:
            for optimizer in self.each:
                optimizer.step()

        def zero_grad(self) -> None:
            for optimizer in self.each:
                optimizer.zero_grad()

    make: Any = Each
    assert len(told(by_elixir(seeded(Stack), optimizer=make, device_memory=budget_of(make)))) == 1


def test_state_from_before_the_compilation_counts() -> None:
    model, batches = seeded(Stack), vectors(2)
    optimizer = AdamW(model.parameters())
    model(batches[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    run = by_elixir(model, optimizer=AdamW, device_memory=budget_of(AdamW))
    run.optimizer.load_state_dict(optimizer.state_dict())
    assert len(told(run, steps=1)) == 1
