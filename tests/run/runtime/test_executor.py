"""Gradients and optimizer state between their production and where they belong."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.graph.ops.gather import GATHER
from elixir_compile.runtime.bucket import is_slab_memory
from elixir_compile.runtime.executor import Executor
from elixir_compile.runtime.gathers import check_move
from tests.run.models import Stack, seeded, vectors
from tests.run.training import assert_offloads, assert_same, by_elixir, by_torch, fused_adamw, loss_of, tight_bytes


def test_each_parameter_of_a_sum_has_a_gradient_of_its_own() -> None:
    executor = Executor(torch.device("cpu"), "sum")
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    slots = [executor.add_slot(str(index), param) for index, param in enumerate(params)]
    first, second = (GATHER(slot.handle(), [4], [1], slot.key) for slot in slots)
    (first + second).sum().backward()
    params[0].grad.mul_(3)
    assert params[1].grad.tolist() == [1, 1, 1, 1]


def test_gradients_that_accumulate_take_turns_in_two_slabs() -> None:
    model, batches = seeded(Stack), vectors(8)
    run = by_elixir(model, device_memory=tight_bytes(model, batches[0]))
    seen: set[int] = set()

    def step(compiled: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            loss = loss_of(compiled, batch)
            loss.backward()
        seen.add(run.model.head._parameters["weight"].grad.data_ptr())
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run.train(batches, step)
    assert_offloads(run)
    assert len(seen) <= 2
    assert all(is_slab_memory(address) for address in seen)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_model_cast_after_its_capture_is_refused(dtype: torch.dtype) -> None:
    model, batches = seeded(Stack), vectors(1)
    for budget in (None, tight_bytes(model, batches[0])):
        run = by_elixir(model, device_memory=budget).train(batches)
        run.model.to(dtype)
        with pytest.raises(elixir.UnsupportedModel, match=f"torch.float32 .* and is {dtype}"):
            run.compiled(batches[0])


def test_nobody_else_holds_the_autograd_nodes_of_a_model() -> None:
    run = by_elixir(seeded(Stack), device_memory=None).train(vectors(2))
    slots = [slot for slot in executor_of(run.model).slots.values() if slot.param.requires_grad]
    assert not any(slot.has_node_holders for slot in slots)
    held = slots[0].param.expand_as(slots[0].param).grad_fn.next_functions[0][0]
    assert [slot.has_node_holders for slot in slots] == [True] + [False] * (len(slots) - 1)
    del held
    assert not slots[0].has_node_holders


@pytest.mark.parametrize("is_held", [True, False])
def test_hooks_on_an_autograd_node_that_a_move_would_lose_are_refused(is_held: bool) -> None:
    executor = Executor(torch.device("cpu"), "moved")
    param = torch.nn.Parameter(torch.ones(4, device="meta"))  # a device apart from the host
    slot = executor.add_slot("weight", param)
    node = param.expand_as(param).grad_fn.next_functions[0][0] if is_held else None
    slot.find_node()
    with pytest.raises(elixir.UnsupportedModel, match=r"weight .* another autograd node") if is_held else nullcontext():
        check_move([slot], [slot], executor.sites)
    del node


def groups(params: Any) -> list[dict[str, Any]]:
    """Weights decay, biases do not: two groups that share every bucket."""
    params = list(params)
    matrices = [param for param in params if param.dim() > 1]
    return [{"params": matrices}, {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0}]


def test_loaded_state_of_every_group_goes_where_the_plan_says() -> None:
    model, batches = seeded(Stack), vectors(4)
    expected = by_torch(model, optimizer=lambda params: fused_adamw(groups(params))).train(batches)

    def hybrid(params: Any) -> torch.optim.Optimizer:
        return elixir.HybridAdamW(groups(params), lr=1e-2)

    run = by_elixir(model, optimizer=hybrid, device_memory=tight_bytes(model, batches[0])).train(batches[:2])
    saved = {name: value.clone() for name, value in run.optimizer.state_dict()["state"][0].items()}
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    assert all(torch.equal(value, run.optimizer.state_dict()["state"][0][name]) for name, value in saved.items())
    run.train(batches[2:])
    assert_offloads(run)
    assert_same(expected, run)
    entries = run.optimizer.state.values()
    assert all(is_slab_memory(entry[name].data_ptr()) for entry in entries for name in ("exp_avg", "exp_avg_sq"))


def test_state_that_was_dropped_starts_from_zero() -> None:
    model, batches = seeded(Stack), vectors(2)
    run = by_elixir(model, device_memory=tight_bytes(model, batches[0]))
    plain = by_torch(model)
    for batch in batches:
        for each in (plain, run):
            each.train([batch])
            each.optimizer.state.clear()
    assert_offloads(run)
    assert_same(plain, run)
