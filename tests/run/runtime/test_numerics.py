"""Under every budget, training is bitwise that of `torch.compile(backend="aot_eager")` with torch's fused AdamW."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.run.models import Stack, hf_batches, seeded, small_gpt2, small_llama, vectors
from tests.run.training import (
    assert_offloads,
    assert_same,
    by_elixir,
    by_elixir_unprepared,
    by_torch,
    least_bytes,
    loss_of,
    on_host,
    planned_peak_bytes,
    state_on_host,
)

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Any]]]] = {
    "gpt2": (lambda: small_gpt2(num_layers=2), hf_batches),
    "llama-tied": (lambda: small_llama(tied=True, num_layers=2), hf_batches),
    "llama-untied": (lambda: small_llama(tied=False), hf_batches),
    "stack": (lambda: seeded(Stack), vectors),
}
NAMES = ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama-tied", "llama-untied")), "stack"]
SHARES = {"gpt2": [0.7], "llama-tied": [0.5], "llama-untied": [0.7, 0.5], "stack": [0.7, 0.5]}
"""Of what a step takes without a budget: between that and the least. With layers enough, a model goes through both."""


@functools.cache
def least_of(name: str) -> int:
    """Return the smallest budget of a model, which takes a capture to know."""
    make, batches_of = MODELS[name]
    return least_bytes(make(), batches_of()[0])


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_bitwise_equal_under_every_budget(name: str) -> None:
    make, batches_of = MODELS[name]
    model, batches = make(), batches_of()
    expected = by_torch(model).train(batches)
    unbudgeted = by_elixir(model).train(batches)
    assert not on_host(unbudgeted)
    assert_same(expected, unbudgeted)
    full, least = planned_peak_bytes(unbudgeted), least_of(name)
    assert least < full / 2
    for share in SHARES[name]:
        got = by_elixir(model, device_memory=int(share * full)).train(batches)
        assert state_on_host(got)  # with room enough, optimizer state alone leaves the device
        assert_same(expected, got)
    got = by_elixir_unprepared(model, device_memory=least).train(batches)
    assert_offloads(got)
    assert_same(expected, got)


@pytest.mark.parametrize("name", NAMES)
def test_clipping_gives_the_same_norms_and_weights(name: str) -> None:
    make, batches_of = MODELS[name]
    model, batches = make(), batches_of()
    norms: dict[int, list[float]] = {}

    def step(compiled: Any, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
        loss = loss_of(compiled, batch)
        loss.backward()
        params = optimizer.param_groups[0]["params"]
        norms.setdefault(id(optimizer), []).append(torch.nn.utils.clip_grad_norm_(params, 0.01).item())
        optimizer.step()
        optimizer.zero_grad()
        return loss

    expected = by_torch(model).train(batches, step)
    got = by_elixir(model, device_memory=int(1.05 * least_of(name))).train(batches, step)
    assert_offloads(got)
    assert norms[id(expected.optimizer)] == norms[id(got.optimizer)]
    assert_same(expected, got)
