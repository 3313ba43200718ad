"""`graph.capture.loss`: the same loss and gradients as unchunked, and a lower peak."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from elixir_compile.compat import boxed, compile_with_aot_eager, compile_with_inductor, lower_plainly_with_inductor
from elixir_compile.graph.capture.loss import chunk_loss, find_loss
from elixir_compile.runtime.measure import measure_step
from tests.fx.losses import (
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
