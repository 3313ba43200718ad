"""The loss in chunks as a decision of the plan: taken where memory is short, never without need."""

import copy
import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import elixir_compile as elixir
from elixir_compile.base.errors import NoFeasiblePlan, UnsupportedModel
from elixir_compile.base.units import MIB
from elixir_compile.ir import Plan, plan_from_json, plan_to_json
from elixir_compile.search.joint import variants as loss
from elixir_compile.search.joint.variants import is_pressed
from elixir_compile.session import backend
from elixir_compile.tools.testing import MemorySchedules

NUM_TOKENS, NUM_CLASSES, WIDTH = 1024, 8192, 32
LOGITS_BYTES = NUM_TOKENS * NUM_CLASSES * 4
OPTIONS = {"inner": "aot_eager", "plan_cache": False, "report": False}


class Head(nn.Module):
    """A layer and the loss of its projection; the logits go nowhere else."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(self.body(x).tanh()), labels)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(NUM_TOKENS, WIDTH), torch.randint(0, NUM_CLASSES, (NUM_TOKENS,))


def trained(model: nn.Module, options: dict[str, object]) -> tuple[torch.Tensor, Plan]:
    """Take two steps; return the loss of the second and the plan."""
    compiled = torch.compile(model, backend="elixir", options={**OPTIONS, **options})
    return two_steps(compiled), elixir.compilations(model)[-1].plan


def two_steps(model: nn.Module) -> torch.Tensor:
    """Return the loss of the second step."""
    x, labels = inputs()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(x, labels)
        loss.backward()
        optimizer.step()
    return loss.detach()


def test_a_loss_that_fits_is_not_chunked() -> None:
    _, plan = trained(Head(), {})
    assert plan.loss_chunks == 1
    assert "loss" not in {decision.subject for decision in plan.decisions}


def test_a_loss_that_does_not_fit_is_chunked_and_the_plan_says_so(tmp_path: Path) -> None:
    model = Head()
    twin, again = copy.deepcopy(model), copy.deepcopy(model)
    budget = LOGITS_BYTES * 3 // 2
    torch.manual_seed(1)
    loss, plan = trained(model, {"device_memory": budget})
    torch.manual_seed(1)
    torch.testing.assert_close(loss, two_steps(twin), rtol=1e-5, atol=0)
    assert plan.loss_chunks > 1
    assert plan.prediction.device_peak_bytes <= budget
    (decision,) = [decision for decision in plan.decisions if decision.subject == "loss"]
    assert decision.choice == f"{plan.loss_chunks} chunks over tokens"
    assert "32.0 MiB of logits" in decision.because
    assert decision.rejected[0].startswith("whole: needs")
    assert plan_from_json(plan_to_json(plan)) == plan

    # The capture with the loss whole is gone, and with it what its frames hold.
    gc.collect()
    kept = [thing for thing in gc.get_objects() if type(thing) is NoFeasiblePlan]
    assert [error.__traceback__ for error in kept if error.__traceback__ is not None] == []

    # What is trained under a budget can be evaluated under it.
    with torch.no_grad():
        x, labels = inputs()
        evaluated = torch.compile(model, backend="elixir", options={**OPTIONS, "device_memory": budget})(x, labels)
        torch.testing.assert_close(evaluated, functional.cross_entropy(model.head(model.body(x).tanh()), labels))

    # A saved plan computes the loss as it did when it was made.
    path = tmp_path / "plan.json"
    elixir.save_plan(plan, path)
    torch.manual_seed(1)
    loss_again, loaded = trained(again, {"plan": str(path), "device_memory": budget})
    assert loaded.loss_chunks == plan.loss_chunks
    assert torch.equal(loss_again, loss)


@pytest.fixture
def pressed(monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, Any]:
    """A model after its first forward, of a pressed plan that was no worse than a loss in chunks; Dynamo has forgotten
    the step, and captures it once more at the second."""
    _, roomy = trained(Head(), {})
    model = Head()
    options = {**OPTIONS, "device_memory": roomy.prediction.device_peak_bytes - 1, "report": True}
    compiled = torch.compile(model, backend="elixir", options=options)
    with monkeypatch.context() as patch:
        patch.setattr(loss, "if_better", lambda *_: None)
        compiled(*inputs()).backward()
    torch._dynamo.reset()
    return model, compiled


def test_if_the_chunked_capture_fails_the_first_capture_stays(
    pressed: tuple[nn.Module, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, compiled = pressed
    before = elixir.compilations(model)
    assert [is_pressed(record.plan) for record in before] == [True]

    def fail(*_: object) -> None:
        raise UnsupportedModel("Head", "a test says so")

    monkeypatch.setattr(backend, "chunk_loss", fail)
    with pytest.raises(UnsupportedModel):
        compiled(*inputs())
    assert elixir.compilations(model) == before


def test_a_capture_with_a_chunked_loss_replaces_the_first_capture(
    pressed: tuple[nn.Module, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, compiled = pressed
    (before,) = elixir.compilations(model)
    monkeypatch.setattr(loss, "if_better", lambda chunks, plan, _: replace(plan, loss_chunks=chunks.num_chunks))
    with caplog.at_level("INFO", logger="elixir_compile"):
        compiled(*inputs()).backward()
    (record,) = elixir.compilations(model)
    assert record is not before
    assert record.plan.loss_chunks > 1
    assert [line for line in caplog.messages if line.endswith(record.plan.name)]


def test_planning_without_training_takes_the_same_decision(memory_schedule: MemorySchedules) -> None:
    budget_bytes = LOGITS_BYTES * 3 // 2
    chunked = memory_schedule(Head(), inputs(), **{**OPTIONS, "device_memory": budget_bytes})
    assert chunked.plan.loss_chunks > 1
    chunked.assert_peak_below(budget_bytes)
    assert memory_schedule(Head(), inputs(), **OPTIONS).plan.loss_chunks == 1


def test_activations_keep_refuses_a_budget_that_needs_chunks() -> None:
    with pytest.raises(NoFeasiblePlan) as caught:
        trained(Head(), {"device_memory": LOGITS_BYTES * 3 // 2, "activations": "keep", "micro_batches": 1})
    assert caught.value.needed_bytes > LOGITS_BYTES * 3 // 2


def test_a_budget_below_the_chunked_loss_names_the_bytes_needed() -> None:
    with pytest.raises(NoFeasiblePlan) as caught:
        trained(Head(), {"device_memory": MIB})
    needed = caught.value.needed_bytes
    assert MIB < needed < LOGITS_BYTES
    made = elixir.plan(Head(), inputs(), options={**OPTIONS, "device_memory": needed})
    assert made.loss_chunks > 1
    with pytest.raises(NoFeasiblePlan):
        elixir.plan(Head(), inputs(), options={**OPTIONS, "device_memory": needed - 1})
