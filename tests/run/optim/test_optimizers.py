"""Every habit of a training loop around `optimizer.step()`, against torch's own fused AdamW in the same run."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.ir import Tier
from tests.run.models import Stack, seeded, vectors
from tests.run.training import (
    Run,
    assert_offloads,
    assert_same,
    assert_same_tensors,
    by_elixir,
    by_torch,
    fused_adamw,
    loss_of,
    planned_peak_bytes,
    tight_bytes,
)
from tests.run.updating import closure_step, flat_state

Compiled = Callable[..., torch.Tensor]


def pair(model: torch.nn.Module, batch: Any, **options: Any) -> tuple[Run, Run]:
    """Return a run by torch and one by Elixir under a tight budget."""
    return by_torch(model), by_elixir(model, device_memory=tight_bytes(model, batch), **options)


def test_state_equals_torchs_and_lives_where_the_plan_says() -> None:
    model, batches = seeded(Stack), vectors()
    expected, got = pair(model, batches[0])
    expected.train(batches)
    got.train(batches)
    assert_offloads(got)
    assert_same_tensors(flat_state(expected.optimizer), flat_state(got.optimizer))
    executor = executor_of(got.model)
    placed = executor.buckets.in_force(for_training=True)
    assert all(placement.optim is Tier.HOST for _, placement in placed)
    assert executor.ledger.counts["update"] == len(placed) * len(batches)


def test_state_stays_on_the_host_while_parameters_stay_on_the_device() -> None:
    model, batches = seeded(Stack), vectors()
    expected = by_torch(model).train(batches)
    full = planned_peak_bytes(by_elixir(model).train(batches[:1]))
    got = by_elixir(model, device_memory=int(0.8 * full)).train(batches)
    placements = elixir.compilations(got.model)[0].plan.placements
    assert any(placement.param is Tier.DEVICE and placement.optim is Tier.HOST for placement in placements)
    assert_same(expected, got)


def test_a_state_dict_continues_in_torch_and_back() -> None:
    model, batches = seeded(Stack), vectors(6)
    expected, got = pair(model, batches[0])
    expected.train(batches)
    got.train(batches[:2])
    plain = by_torch(seeded(Stack))
    plain.model.load_state_dict(got.model.state_dict())
    plain.optimizer.load_state_dict(got.optimizer.state_dict())
    plain.train(batches[2:4])
    back = by_elixir(seeded(Stack), device_memory=tight_bytes(model, batches[0]))
    back.train(batches[4:5])
    back.model.load_state_dict(plain.model.state_dict())
    back.optimizer.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))
    back.train(batches[4:])
    assert_offloads(back)
    assert_same_tensors(expected.weights, back.weights)
    assert_same_tensors(flat_state(expected.optimizer), flat_state(back.optimizer))


@pytest.mark.parametrize(
    "options", [{"amsgrad": True}, {"maximize": True}, {"weight_decay": 0.3, "betas": (0.5, 0.9), "eps": 1e-3}]
)
def test_every_option_of_adamw(options: dict[str, Any]) -> None:
    model, batches = seeded(Stack), vectors()
    expected = by_torch(model, optimizer=lambda params: fused_adamw(params, **options)).train(batches)

    def hybrid(params: Any) -> torch.optim.Optimizer:
        return elixir.HybridAdamW(params, lr=1e-2, **options)

    got = by_elixir(model, optimizer=hybrid, device_memory=tight_bytes(model, batches[0])).train(batches)
    assert_offloads(got)
    assert_same(expected, got)


def test_groups_with_their_own_learning_rate() -> None:
    def groups(params: Any) -> list[dict[str, Any]]:
        params = list(params)
        return [{"params": params[:7], "lr": 1e-3}, {"params": params[7:], "weight_decay": 0.0}]

    model, batches = seeded(Stack), vectors()
    expected = by_torch(model, optimizer=lambda params: fused_adamw(groups(params))).train(batches)

    def hybrid(params: Any) -> torch.optim.Optimizer:
        return elixir.HybridAdamW(groups(params), lr=1e-2)

    got = by_elixir(model, optimizer=hybrid, device_memory=tight_bytes(model, batches[0])).train(batches)
    assert_offloads(got)
    assert_same(expected, got)


def test_a_learning_rate_scheduler() -> None:
    model, batches = seeded(Stack), vectors(4)
    runs = pair(model, batches[0])
    for run in runs:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, max_lr=0.1, total_steps=5)
        for batch in batches:
            run.train([batch])
            scheduler.step()
    assert_offloads(runs[1])
    assert_same(*runs)
    assert runs[0].optimizer.param_groups[0]["lr"] == runs[1].optimizer.param_groups[0]["lr"]


def test_closures_and_optimizer_hooks() -> None:
    model, batches = seeded(Stack), vectors()
    runs = pair(model, batches[0])
    told: dict[int, list[str]] = {}

    for run in runs:
        said = told.setdefault(id(run), [])
        run.optimizer.register_step_pre_hook(lambda *_, said=said: said.append("pre"))
        run.optimizer.register_step_post_hook(lambda *_, said=said: said.append("post"))
        run.train(batches, closure_step)
        assert said == ["pre", "post"] * len(batches)
    assert_offloads(runs[1])
    assert_same(*runs)


def autocast_step(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    def step(compiled: Compiled, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=dtype):
            loss = loss_of(compiled, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def test_bfloat16_autocast() -> None:
    model, batches = seeded(Stack), vectors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # The weights' casts are saved for the backward, so the least budget is a larger one.
        expected, got = pair(model, batches[0])
    step = autocast_step(torch.bfloat16)
    expected.train(batches, step)
    got.train(batches, step)
    assert_offloads(got)
    assert_same(expected, got)
    assert not torch.equal(by_torch(model).train(batches).losses[-1], got.losses[-1])


def test_a_bfloat16_model() -> None:
    model, batches = seeded(Stack).bfloat16(), [batch.bfloat16() for batch in vectors()]
    expected, got = pair(model, batches[0])
    expected.train(batches)
    got.train(batches)
    assert_offloads(got)
    assert_same(expected, got)


def test_float16_scaler_skips_an_overflow_completely() -> None:
    model, batches = seeded(Stack), vectors(4)
    with torch.autocast("cpu", dtype=torch.float16):
        runs = pair(model, batches[0])
    for run in runs:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)

        def step(
            compiled: Compiled, optimizer: torch.optim.Optimizer, batch: torch.Tensor, scaler: Any = scaler
        ) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_of(compiled, batch)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss

        run.train(batches[:2], step)
        before = {**run.weights, **{name: value.clone() for name, value in flat_state(run.optimizer).items()}}
        run.train([batches[2] * float("inf")], step)
        after = {**run.weights, **flat_state(run.optimizer)}
        assert_same_tensors(before, after)
        assert scaler.get_scale() == 2.0**9
        run.losses.pop()
        run.train(batches[3:], step)
    assert_offloads(runs[1])
    assert_same(*runs)
    assert_same_tensors(flat_state(runs[0].optimizer), flat_state(runs[1].optimizer))


@pytest.mark.parametrize("make", ["SGD", "AdamW", "AdamW fused", "Adafactor"])
def test_a_plain_torch_optimizer_trains_a_prepared_model(make: str) -> None:
    optimizers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
        "AdamW fused": fused_adamw,
        "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    }
    model, batches = seeded(Stack), vectors()
    expected = by_torch(model, optimizer=optimizers[make]).train(batches)
    held = [value for entry in expected.optimizer.state.values() for value in entry.values()]
    state_bytes = sum(value.nbytes for value in held if isinstance(value, torch.Tensor))
    # No plan moves the state: on a CPU it stays beside the parameters, and counts.
    budget = tight_bytes(model, batches[0], optimizer=optimizers[make]) + int(1.05 * state_bytes)
    got = by_elixir(model, optimizer=optimizers[make], device_memory=budget).train(batches)
    assert_offloads(got)
    assert_same(expected, got)


def test_a_pickled_optimizer_continues() -> None:
    model, batches = seeded(Stack), vectors(4)
    expected, got = pair(model, batches[0])
    expected.train(batches)
    got.train(batches[:2])
    restored = copy.deepcopy(got.optimizer)
    assert isinstance(restored, elixir.HybridAdamW)
    assert_same_tensors(flat_state(got.optimizer), flat_state(restored))
    got.train(batches[2:])
    assert_same(expected, got)
