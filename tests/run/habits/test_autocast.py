"""`torch.autocast`: around the step, inside the forward, with a scaler, and under budgets that make casts again."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.ir import Saving
from tests.run.habits.habit import habit
from tests.run.models import ShortStack, Stack, Tied, seeded, vectors
from tests.run.training import Run, assert_same, by_elixir, by_torch, least_bytes, loss_of, scaled_bytes

AREA = "Mixed precision"
QUICK: dict[str, Any] = {"search_timeout": 0.3}
"""What the search has found by then is good enough: the planner is the default one."""


def autocast(*dtypes: torch.dtype, **options: bool) -> torch.autocast:
    return torch.autocast(torch.get_default_device().type, *dtypes, **options)


def bf16() -> torch.autocast:
    return autocast(torch.bfloat16)


def autocast_step(compiled: Callable[..., Any], optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    with bf16():
        loss = loss_of(compiled, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def words(num_batches: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randint(0, 128, (4, 16)) for _ in range(num_batches)]


def savings_of(run: Run) -> set[Saving]:
    """Return what the plans of `run` do with activations."""
    return {group.saving for record in elixir.compilations(run.model) for group in record.plan.activations}


class Inside(nn.Module):
    """A model that enters autocast itself, and leaves it for what needs single precision."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(num_blocks=2)
        self.scale = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with bf16():
            y = self.stack.features(x)
            with autocast(enabled=False):
                y = self.scale(y.float())
            return self.stack.head(y).float().square().mean()


class Decorated(ShortStack):
    """A model whose forward is decorated with autocast."""

    @autocast(torch.bfloat16)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


@habit("A step under `torch.autocast` with a budget close to the smallest possible budget", area=AREA)
@pytest.mark.parametrize("share", [1.0, 1.2, pytest.param(1.5, marks=pytest.mark.slow)])
def test_autocast_around_the_step_trains_under_tight_budgets(share: float) -> None:
    model, batches = seeded(ShortStack), vectors(rows=64)
    with bf16():
        budget = scaled_bytes(model, least_bytes(model, batches[0]), share)
    run = by_elixir(model, device_memory=budget, **QUICK).train(batches, autocast_step)
    assert_same(by_torch(model).train(batches, autocast_step), run)
    # Which of the two a search finds in its short time depends on the machine.
    assert share > 1.2 or not savings_of(run).isdisjoint({Saving.RECOMPUTE, Saving.OFFLOAD})


@habit("A model with tied weights under `torch.autocast` with a budget", area=AREA)
def test_autocast_with_tied_weights_trains_under_a_tight_budget() -> None:
    model, batches = seeded(Tied), words()
    with bf16():
        budget = scaled_bytes(model, least_bytes(model, batches[0]), 1.3)
    run = by_elixir(model, device_memory=budget, **QUICK).train(batches, autocast_step)
    assert_same(by_torch(model).train(batches, autocast_step), run)


@habit("`torch.autocast` inside the forward, switched off for a part of the forward, or as its decorator", area=AREA)
@pytest.mark.parametrize("make", [Inside, Decorated])
def test_autocast_inside_the_forward_trains_under_a_tight_budget(make: Callable[[], nn.Module]) -> None:
    model, batches = seeded(make), vectors(rows=64)
    budget = scaled_bytes(model, least_bytes(model, batches[0]), 1.2)
    run = by_elixir(model, device_memory=budget, **QUICK).train(batches)
    # Eager autocast casts a weight once for several uses, and so adds up gradients in another order than compiled code.
    assert_same(by_torch(model, backend="aot_eager").train(batches), run)


@habit("`torch.autocast` of float16 with `torch.amp.GradScaler` and a budget", area=AREA)
def test_a_scaler_with_autocast_trains_under_a_tight_budget() -> None:
    model, batches = seeded(Stack, num_blocks=2), vectors(3, rows=64)

    def step_with(scaler: torch.amp.GradScaler) -> Callable[..., torch.Tensor]:
        def step(compiled: Callable[..., Any], optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
            with autocast(torch.float16):
                loss = loss_of(compiled, batch)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss

        return step

    with autocast(torch.float16):
        budget = scaled_bytes(model, least_bytes(model, batches[0]), 1.2)
    scalers = [
        torch.amp.GradScaler(torch.get_default_device().type, init_scale=2.0**40, growth_interval=2) for _ in range(2)
    ]
    run = by_elixir(model, device_memory=budget, **QUICK).train(batches, step_with(scalers[0]))
    assert_same(by_torch(model).train(batches, step_with(scalers[1])), run)
    assert scalers[0].get_scale() == scalers[1].get_scale() < 2.0**40


@habit("Several forwards in one `torch.autocast`, whose cache keeps the casts of weights", area=AREA)
def test_gradients_accumulated_in_one_autocast_train_under_a_tight_budget() -> None:
    model, batches = seeded(Stack, num_blocks=2), vectors(3, rows=64)

    def step(compiled: Callable[..., Any], optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
        with autocast(torch.bfloat16):
            losses = [loss_of(compiled, half) for half in batch.chunk(2)]
            for loss in losses:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum()

    with bf16():
        budget = scaled_bytes(model, least_bytes(model, batches[0][:32]), 1.6)
    run = by_elixir(model, device_memory=budget, **QUICK).train(batches, step)
    assert_same(by_torch(model).train(batches, step), run)


@habit("`torch.autocast` in some steps only", area=AREA)
def test_autocast_that_comes_and_goes_is_compiled_for_each() -> None:
    model = seeded(Stack, num_blocks=2)
    batches = list(zip([False, True, False, False, True], vectors(5, rows=64), strict=True))

    def step(compiled: Callable[..., Any], optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
        is_lower, rows = batch
        with bf16() if is_lower else nullcontext():
            loss = loss_of(compiled, rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    budget = scaled_bytes(model, least_bytes(model, batches[0][1]), 1.3)
    run = by_elixir(model, device_memory=budget, **QUICK).train(batches, step)
    assert_same(by_torch(model).train(batches, step), run)


@habit("Evaluation under `torch.autocast` and `torch.no_grad()` between steps", area=AREA)
def test_evaluation_under_autocast_between_steps_sees_the_trained_weights() -> None:
    model, batches = seeded(Stack, num_blocks=2), vectors(3, rows=64)

    def step(compiled: Callable[..., Any], optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
        loss = autocast_step(compiled, optimizer, batch)
        with torch.no_grad(), bf16():
            return loss.detach() + loss_of(compiled, batch)

    with bf16():
        budget = scaled_bytes(model, least_bytes(model, batches[0][1]), 1.3)
    run = by_elixir(model, device_memory=budget, **QUICK).train(batches, step)
    assert_same(by_torch(model).train(batches, step), run)
