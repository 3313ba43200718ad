"""Accelerate trains a compiled model bit for bit as it trains an eager one, with its accumulation and its clipping."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.run.clients.client_runs import (
    assert_equal,
    assert_moved,
    compiled,
    eager_adamw,
    hybrid_adamw,
    own_copy,
    rows,
    weights,
)
from tests.run.models import small_gpt2

accelerate = pytest.importorskip("accelerate")


def train(model: nn.Module, *, elixir: bool) -> tuple[nn.Module, list[float]]:
    """Train a copy of `model` for two steps of two micro-batches; return it with its losses."""
    own = own_copy(model)
    optimizer: Any = hybrid_adamw(compiled(own)) if elixir else eager_adamw(own)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    own, optimizer, loader = accelerator.prepare(own, optimizer, DataLoader(rows(8), batch_size=2))
    found = []
    for batch in loader:
        with accelerator.accumulate(own):
            loss = own(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(own.parameters(), 0.1)
                assert norm > 0.1
            optimizer.step()
            optimizer.zero_grad()
        found.append(loss.item())
    return accelerator.unwrap_model(own), found


@pytest.mark.slow
def test_accumulation_and_clipping_are_those_of_eager_training() -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = small_gpt2(num_layers=2)
    expected, expected_losses = train(model, elixir=False)
    got, got_losses = train(model, elixir=True)
    assert got_losses == expected_losses
    assert_equal(weights(expected), weights(got))
    assert_moved(got)
