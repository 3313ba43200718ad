"""Embeddings whose gradient is sparse."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import model_of
from tests.run.habits.habit import habit
from tests.run.habits.stories import BUDGETS, compiled, eager
from tests.run.models import seeded, vectors
from tests.run.training import Run, assert_same, on_host

WIDTH = 16
NUM_WORDS = 10


class Words(nn.Module):
    """Three embeddings with sparse gradients, the last one a parameter of this module, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, WIDTH, sparse=True)
        self.bags = nn.EmbeddingBag(NUM_WORDS, WIDTH, sparse=True, mode="sum")
        self.places = nn.Parameter(torch.randn(NUM_WORDS, WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = x.abs().mul(4).long().clamp(max=NUM_WORDS - 1)
        hidden = self.words(ids[:, 0]) + self.bags(ids[:, 1:4])
        hidden = hidden + functional.embedding(ids[:, 4], self.places, sparse=True)
        return self.head(hidden).square().mean()


SPARSE = ("words.weight", "bags.weight", "places")


class Both(torch.optim.Optimizer):
    """One optimizer for sparse gradients, and another for the rest."""

    def __init__(self, model: nn.Module, dense: Any) -> None:
        own = dict(model.named_parameters())
        self.both = [
            torch.optim.SparseAdam([own[name] for name in SPARSE], lr=0.1),
            dense([param for name, param in own.items() if name not in SPARSE], lr=1e-2),
        ]

    def step(self) -> None:
        for one in self.both:
            one.step()

    def zero_grad(self) -> None:
        for one in self.both:
            one.zero_grad()


def train(run: Run) -> None:
    """Train four steps; the second adds up the gradients of two backward passes."""
    for number, batch in enumerate(vectors(4, rows=4, width=WIDTH)):
        for _ in range(1 + (number == 1)):
            loss = run.compiled(batch)
            loss.backward()
            run.losses.append(loss.detach().clone())
        assert run.model.words.weight.grad.is_sparse
        run.optimizer.step()
        run.optimizer.zero_grad()


@habit("`nn.Embedding(sparse=True)`, `nn.EmbeddingBag(sparse=True)` and `torch.optim.SparseAdam`", area="Modules")
@pytest.mark.parametrize("budget", BUDGETS)
def test_sparse_gradients_train_as_eager(budget: str) -> None:
    model = seeded(Words)
    expected, got = eager(model), compiled(model, BUDGETS[budget])
    if budget == "offload":
        elixir.prepare(got.model)
    expected.optimizer = Both(expected.model, partial(torch.optim.AdamW, fused=True))
    got.optimizer = Both(got.model, elixir.HybridAdamW)
    train(expected)
    train(got)
    assert_same(expected, got)
    assert set(model_of(got.model).unmanaged_because) == set(SPARSE)
    assert on_host(got) == (["head.weight", "head.bias"] if budget == "offload" else [])


@habit(
    "`HybridAdamW` on parameters with sparse gradients, as `torch.optim.AdamW` refuses",
    area="Optimizers",
    refused=elixir.UnsupportedModel,
    says="its gradient is sparse, and HybridAdamW updates dense ones",
)
def test_an_optimizer_for_dense_gradients_refuses_sparse_ones() -> None:
    model, batch = seeded(Words), vectors(1, rows=4, width=WIDTH)[0]
    own = eager(model)
    own.compiled(batch).backward()
    with pytest.raises(RuntimeError, match="sparse"):
        own.optimizer.step()
    got = compiled(model, {}, elixir.HybridAdamW)
    got.compiled(batch).backward()
    got.optimizer.step()
