"""A plain model is captured once: its first call prepares it, and what Dynamo checks from then on stays true."""

import copy
import gc
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import is_swapped, model_of
from tests.run.models import WIDTH, Stack, Tied, seeded, vectors
from tests.run.training import (
    Run,
    assert_offloads,
    assert_same,
    by_elixir_unprepared,
    by_torch,
    hybrid_adamw,
    loss_of,
    tight_bytes,
)


@pytest.fixture(autouse=True)
def _no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", elixir.ElixirWarning)
        yield


def captures_of(model: nn.Module) -> int:
    """Return how many graphs of `model` were captured, of training and of evaluation."""
    return len(model_of(model).compilations)


def runs_of(model: nn.Module, batch: torch.Tensor, *, is_tight: bool) -> tuple[Run, Run]:
    """Return a run by torch and one by Elixir, of a plain model, under a tight budget or without one."""
    budget = {"device_memory": tight_bytes(copy.deepcopy(model).requires_grad_(True), batch)} if is_tight else {}
    return by_torch(model), by_elixir_unprepared(model, **budget)


@pytest.mark.parametrize("is_tight", [False, True])
def test_four_steps_are_one_capture(is_tight: bool) -> None:
    model, batches = seeded(Stack, num_blocks=2), vectors(4)
    expected, got = runs_of(model, batches[0], is_tight=is_tight)
    assert_same(expected.train(batches), got.train(batches))
    assert captures_of(got.model) == 1
    if is_tight:
        assert_offloads(got)


def test_no_guard_of_dynamo_checks_the_device_of_a_parameter() -> None:
    batch = torch.randint(0, 128, (2, 8))
    torch._dynamo.reset()
    model = seeded(Tied)
    torch.compile(model, backend="elixir", options={"inner": "aot_eager", "report": False})(batch).backward()
    (entry,) = _debug_get_cache_entry_list(Tied.forward.__code__)
    checks = [line for line in str(entry.guard_manager).splitlines() if "._parameters['" in line]
    assert any("ID_MATCH" in line for line in checks)
    assert not any("TENSOR_MATCH" in line for line in checks)


def test_freezing_needs_no_capture_and_thawing_needs_one() -> None:
    model, batches = seeded(Stack, num_blocks=2), vectors(8)
    model.blocks[0].requires_grad_(False)
    runs = runs_of(model, batches[0], is_tight=True)
    captures: list[int] = []
    for run in runs:
        run.train(batches[:2])
        captures += [captures_of(run.model)] if run is runs[1] else []
        for param in run.model._modules["head"]._parameters.values():
            param.requires_grad_(False)
        run.train(batches[2:4])
        captures += [captures_of(run.model)] if run is runs[1] else []
        for param in run.model.parameters():
            param.requires_grad_(True)
        if run is runs[0]:
            torch._dynamo.reset()  # torch 2.11 alone goes on with the frozen graph: its weights are not those of eager
        run.train(batches[4:])
    assert_offloads(runs[1])
    assert_same(*runs)
    assert [*captures, captures_of(runs[1].model)] == [1, 1, 2]


def test_evaluation_is_captured_apart_and_training_keeps_its_capture() -> None:
    model, batches = seeded(Stack, num_blocks=2), vectors(4)
    runs = runs_of(model, batches[0], is_tight=True)
    seen: list[float] = []
    for run in runs:
        run.train(batches[:2])
        with torch.no_grad():
            seen.append(loss_of(run.compiled, batches[2]).item())
        run.train(batches[2:])
    assert seen[0] == seen[1]
    assert_same(*runs)
    assert [record.is_inference for record in model_of(runs[1].model).compilations] == [False, True]


def test_a_model_that_is_evaluated_first_trains_as_torch_does() -> None:
    model, batches = seeded(Stack, num_blocks=2), vectors(3)
    model.head.requires_grad_(False)
    runs = runs_of(model, batches[0], is_tight=False)
    for run in runs:
        with torch.no_grad():
            loss_of(run.compiled, batches[0])
        run.model._modules["head"].requires_grad_(True)
        run.train(batches)
    assert_same(*runs)
    assert [record.is_inference for record in model_of(runs[1].model).compilations] == [True, False]


def test_a_second_model_of_a_class_has_a_capture_of_its_own() -> None:
    first, second = seeded(Stack, num_blocks=2), Stack(num_blocks=2)
    batches = vectors()
    runs = by_torch(first), by_elixir_unprepared(first)
    twins = by_torch(second), copy.deepcopy(second)
    own = Run(
        model=twins[1],
        compiled=torch.compile(twins[1], backend="elixir", options={"inner": "aot_eager", "report": False}),
        optimizer=hybrid_adamw(twins[1].parameters()),
    )
    for batch in batches:
        for run in (*runs, twins[0], own):
            run.train([batch])
    assert_same(*runs)
    assert_same(twins[0], own)
    assert captures_of(runs[1].model) == captures_of(own.model) == 1


class Broken(nn.Module):
    """Two graphs in one forward, with a layer that both read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.shared(self.first(x)))
        torch._dynamo.graph_break()
        return self.last(self.shared(x)).square().mean()


def test_a_model_with_a_graph_break_is_captured_once_per_graph() -> None:
    model, batches = seeded(Broken), vectors(4)
    expected, got = by_torch(model), by_elixir_unprepared(model)
    assert_same(expected.train(batches), got.train(batches))
    assert captures_of(got.model) == 2


def test_buffers_on_meta_stay_on_meta() -> None:
    model, batches = seeded(Stack, num_blocks=2), vectors()
    model.register_buffer("elsewhere", torch.ones(3, device="meta"), persistent=False)
    expected, got = by_torch(model), by_elixir_unprepared(model)
    assert_same(expected.train(batches), got.train(batches))
    assert got.model._buffers["elsewhere"].device.type == "meta"
    assert captures_of(got.model) == 1


def test_a_function_of_a_parameter_is_captured_for_each_parameter() -> None:
    layers = [nn.Linear(4, 4), nn.Linear(4, 6)]
    x = torch.randn(2, 4)

    def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, weight).square().mean()

    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="elixir", options={"inner": "aot_eager", "report": False}, dynamic=False)
    for layer in layers * 2:
        weight = layer._parameters["weight"]
        (expected,) = torch.autograd.grad(loss(x, weight), weight)
        weight.grad = None
        compiled(x, weight).backward()
        assert torch.equal(weight.grad, expected)


def test_a_model_that_was_cast_after_its_capture_is_refused() -> None:
    model, batches = seeded(Stack, num_blocks=2), vectors()
    got = by_elixir_unprepared(model)
    got.train(batches[:1])
    got.model.half()
    with pytest.raises(elixir.UnsupportedModel, match=r"torch.float16 of shape .* now"):
        loss_of(got.compiled, batches[0])


def test_a_model_that_does_not_fit_stays_plain_and_fits_later() -> None:
    model, batches = seeded(Stack, num_blocks=2), vectors()
    torch._dynamo.reset()
    options = {"inner": "aot_eager", "report": False}
    with pytest.raises(elixir.NoFeasiblePlan):
        torch.compile(model, backend="elixir", options={**options, "device_memory": 1})(batches[0])
    assert not any(is_swapped(module) for module in model.modules())
    gc.collect()
    expected = by_torch(model)
    got = Run(
        model=model,
        compiled=torch.compile(model, backend="elixir", options=options),
        optimizer=hybrid_adamw(model.parameters()),
    )
    assert_same(expected.train(batches), got.train(batches))
    assert captures_of(model) == 1
