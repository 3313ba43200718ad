"""The loss in chunks: the same numbers in less memory, and a decision of the plan."""

import copy
import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import elixir_compile as elixir
from elixir_compile.base.errors import NoFeasiblePlan, UnsupportedModel
from elixir_compile.base.units import MIB
from elixir_compile.compat import boxed, compile_with_aot_eager, compile_with_inductor, lower_plainly_with_inductor
from elixir_compile.graph.capture.loss import chunk_loss, find_loss
from elixir_compile.ir import Plan, plan_from_json, plan_to_json
from elixir_compile.runtime.measure import measure_step
from elixir_compile.search.joint import variants as loss
from elixir_compile.search.joint.variants import is_pressed
from elixir_compile.session import backend
from elixir_compile.tools.testing import MemorySchedules
from tests.fx.captures import (
    LOSSES,
    TOKENS,
    Loss,
    Model,
    by_module,
    chunking,
    dynamo_graph,
    flat,
    inputs,
    plain,
    shifted_labels,
    sliced_rows,
)

# ----------------------------------------------------------------------------------------------------------------------
# `graph.capture.loss`: the same loss and gradients as unchunked, and a lower peak.


# Relative to the largest element: see [Note: Tolerance] in `graph.capture.loss`.
FP32, BF16 = 1e-6, 2e-2


def run_op_by_op(gm: torch.fx.GraphModule, examples: object, **options: object) -> Callable[..., object]:
    return boxed(lambda values: gm(*values))


BACKENDS = {
    "aot_eager": partial(chunking, front_end=compile_with_aot_eager, lower=run_op_by_op),
    "inductor": partial(chunking, front_end=compile_with_inductor, lower=lower_plainly_with_inductor),
}


def step(run: Callable[..., torch.Tensor], model: nn.Module, *args: torch.Tensor) -> list[torch.Tensor]:
    """Return the loss and the gradients of all parameters that it depends on."""
    model.zero_grad()
    loss = run(*args)
    loss = loss[0] if isinstance(loss, tuple) else loss  # a graph of Dynamo returns a tuple
    loss.backward()
    return [loss.detach(), *(param.grad.clone() for param in model.parameters() if param.grad is not None)]


def off_by(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest difference, relative to the largest element of its tensor."""
    assert [value.dtype for value in got] == [value.dtype for value in expected]
    pairs = zip(got, expected, strict=True)
    return max(float((a.double() - b.double()).abs().max() / b.double().abs().max()) for a, b in pairs)


def compiled_steps(
    model: nn.Module, *args: torch.Tensor, num_chunks: int = 4
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return one step whole and one in chunks, both op by op."""
    found = []
    for chunks in (0, num_chunks):
        torch.compiler.reset()
        found.append(step(torch.compile(model, backend=BACKENDS["aot_eager"](chunks), fullgraph=True), model, *args))
    return found[0], found[1]


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradients_equal_the_unchunked_loss(loss: Loss) -> None:
    whole, chunked = compiled_steps(Model(loss), *inputs())
    assert off_by(chunked, whole) < (BF16 if loss.__name__ == "autocast" else FP32)


@pytest.mark.parametrize("loss", [plain, by_module, shifted_labels, sliced_rows])
def test_16_bit_models_round_as_with_the_unchunked_loss(loss: Loss) -> None:
    whole, chunked = compiled_steps(Model(loss).to(torch.bfloat16), *inputs(torch.bfloat16))
    assert off_by(chunked, whole) < BF16
    if loss is shifted_labels:  # the only one that upcasts: the others may round their loss to the next bf16
        assert off_by(chunked[:1], whole[:1]) < FP32


@pytest.mark.parametrize("loss", [plain, pytest.param(by_module, marks=pytest.mark.slow)])
def test_inductor_gives_the_same(loss: Loss) -> None:
    model, values = Model(loss), inputs()
    whole = step(model, model, *values)  # what tests above compare op by op; g++ would take 8 s for its kernels
    chunked = step(torch.compile(model, backend=BACKENDS["inductor"](4), fullgraph=True), model, *values)
    assert off_by(chunked, whole) < FP32


@pytest.mark.parametrize("num_chunks", [1, 2, 7, TOKENS, TOKENS + 5])
def test_the_loss_is_correct_for_any_number_of_chunks(num_chunks: int) -> None:
    whole, chunked = compiled_steps(Model(plain, bias=False), *inputs(), num_chunks=num_chunks)
    assert off_by(chunked, whole) < FP32


def test_the_chunked_graph_runs_op_by_op_too() -> None:
    model = Model(plain)
    gm, examples, _ = dynamo_graph(model, *inputs())
    whole = step(gm, model, *examples)
    split = torch.fx.GraphModule(gm, copy.deepcopy(gm.graph))
    chunk_loss(split, find_loss(gm), 4)
    assert off_by(step(split, model, *examples), whole) < FP32


def test_one_compilation_serves_every_number_of_tokens() -> None:
    model = Model(plain)
    x, labels = inputs()
    run = torch.compile(model, backend=BACKENDS["aot_eager"](4), fullgraph=True)
    for value in (x, labels):
        torch._dynamo.mark_dynamic(value, 0)
    step(run, model, x, labels)
    with torch.compiler.set_stance("fail_on_recompile"):
        for num_rows in (2, 3, 5):
            args = x[:1].repeat(num_rows, 1, 1) + torch.randn(num_rows, 1, 1), labels[:1].repeat(num_rows, 1)
            chunked = step(run, model, *args)
            assert off_by(chunked, step(lambda *values: model(*values), model, *args)) < FP32


@pytest.mark.parametrize("frozen", ["head.weight", "body"])
def test_frozen_operands_of_the_loss_get_no_gradient(frozen: str) -> None:
    model = Model(plain)
    model.body.requires_grad_(frozen != "body")
    model.head.weight.requires_grad_(frozen != "head.weight")
    whole, chunked = compiled_steps(model, *inputs())
    assert off_by(chunked, whole) < FP32


def test_tokens_that_are_all_ignored_give_no_gradient() -> None:
    x, labels = inputs()
    whole, chunked = compiled_steps(Model(plain), x, torch.full_like(labels, -100))
    for values in (whole, chunked):
        assert values[0].isnan()
        assert all(not grad.any() for grad in values[1:])


def test_the_loss_is_chunked_without_gradients_too() -> None:
    model, args = Model(plain), inputs()
    with torch.no_grad():
        run = torch.compile(model, backend=BACKENDS["aot_eager"](4), fullgraph=True)
        torch.testing.assert_close(run(*args), model(*args), rtol=FP32, atol=0)


class Large(nn.Module):
    """Logits that dwarf all else."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Linear(width, width)
        self.head = nn.Linear(width, num_classes, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(self.body(x)), flat(labels))


def peak_bytes(inner: str, num_chunks: int, num_tokens: int, width: int, num_classes: int) -> int:
    """Return the measured peak of a second step."""
    torch.compiler.reset()
    model = Large(width, num_classes)
    x, labels = torch.randn(num_tokens, width), torch.randint(0, num_classes, (num_tokens,))
    run = torch.compile(model, backend=BACKENDS[inner](num_chunks))

    def once() -> None:
        run(x, labels).backward()
        model.zero_grad()

    once()
    return measure_step(once, device="cpu").device_peak_bytes


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_peak_falls_by_more_than_the_logits(inner: str) -> None:
    sizes = (512, 16, 8192)
    logits_bytes = 512 * 8192 * 4
    assert peak_bytes(inner, 0, *sizes) - peak_bytes(inner, 8, *sizes) > logits_bytes


@pytest.mark.slow
@pytest.mark.parametrize("inner", BACKENDS)
def test_the_peak_with_128k_classes_falls_by_half_of_the_logits(inner: str) -> None:
    sizes = (2048, 256, 131072)
    logits_bytes = 2048 * 131072 * 4
    assert peak_bytes(inner, 0, *sizes) - peak_bytes(inner, 8, *sizes) >= logits_bytes // 2


# ----------------------------------------------------------------------------------------------------------------------
# The loss in chunks as a decision of the plan: taken where memory is short, never without need.


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


@pytest.fixture
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def hidden_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(NUM_TOKENS, WIDTH), torch.randint(0, NUM_CLASSES, (NUM_TOKENS,))


def trained(model: nn.Module, options: dict[str, object]) -> tuple[torch.Tensor, Plan]:
    """Take two steps; return the loss of the second and the plan."""
    compiled = torch.compile(model, backend="elixir", options={**OPTIONS, **options})
    return two_steps(compiled), elixir.compilations(model)[-1].plan


def two_steps(model: nn.Module) -> torch.Tensor:
    """Return the loss of the second step."""
    x, labels = hidden_and_labels()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(x, labels)
        loss.backward()
        optimizer.step()
    return loss.detach()


@pytest.mark.usefixtures("seeded")
def test_a_loss_that_fits_is_not_chunked() -> None:
    _, plan = trained(Head(), {})
    assert plan.loss_chunks == 1
    assert "loss" not in {decision.subject for decision in plan.decisions}


@pytest.mark.usefixtures("seeded")
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
        x, labels = hidden_and_labels()
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
        compiled(*hidden_and_labels()).backward()
    torch._dynamo.reset()
    return model, compiled


@pytest.mark.usefixtures("seeded")
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
        compiled(*hidden_and_labels())
    assert elixir.compilations(model) == before


@pytest.mark.usefixtures("seeded")
def test_a_capture_with_a_chunked_loss_replaces_the_first_capture(
    pressed: tuple[nn.Module, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, compiled = pressed
    (before,) = elixir.compilations(model)
    monkeypatch.setattr(loss, "if_better", lambda chunks, plan, _: replace(plan, loss_chunks=chunks.num_chunks))
    with caplog.at_level("INFO", logger="elixir_compile"):
        compiled(*hidden_and_labels()).backward()
    (record,) = elixir.compilations(model)
    assert record is not before
    assert record.plan.loss_chunks > 1
    assert [line for line in caplog.messages if line.endswith(record.plan.name)]


@pytest.mark.usefixtures("seeded")
def test_planning_without_training_takes_the_same_decision(memory_schedule: MemorySchedules) -> None:
    budget_bytes = LOGITS_BYTES * 3 // 2
    chunked = memory_schedule(Head(), hidden_and_labels(), **{**OPTIONS, "device_memory": budget_bytes})
    assert chunked.plan.loss_chunks > 1
    chunked.assert_peak_below(budget_bytes)
    assert memory_schedule(Head(), hidden_and_labels(), **OPTIONS).plan.loss_chunks == 1


@pytest.mark.usefixtures("seeded")
def test_activations_keep_refuses_a_budget_that_needs_chunks() -> None:
    with pytest.raises(NoFeasiblePlan) as caught:
        trained(Head(), {"device_memory": LOGITS_BYTES * 3 // 2, "activations": "keep", "micro_batches": 1})
    assert caught.value.needed_bytes > LOGITS_BYTES * 3 // 2


@pytest.mark.usefixtures("seeded")
def test_a_budget_below_the_chunked_loss_names_the_bytes_needed() -> None:
    with pytest.raises(NoFeasiblePlan) as caught:
        trained(Head(), {"device_memory": MIB})
    needed = caught.value.needed_bytes
    assert MIB < needed < LOGITS_BYTES
    made = elixir.plan(Head(), hidden_and_labels(), options={**OPTIONS, "device_memory": needed})
    assert made.loss_chunks > 1
    with pytest.raises(NoFeasiblePlan):
        elixir.plan(Head(), hidden_and_labels(), options={**OPTIONS, "device_memory": needed - 1})
