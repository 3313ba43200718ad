"""Run one story, training with something in between, by eager PyTorch and by Elixir, and compare bit for bit."""

from collections.abc import Callable

import torch
from torch import nn

from tests.run.habits.same import BUDGETS, compiled, eager
from tests.run.models import vectors
from tests.run.training import Run, assert_same, fused_adamw

WIDTH = 8
BATCHES = vectors(6, rows=4, width=WIDTH)

Story = Callable[[Run], None]
"""Trains a run, and does to its model what the test is about."""


class Layers(nn.Module):
    """Three linear layers; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.middle(torch.tanh(self.first(x))))).square().mean()


def layers() -> Layers:
    """Return three layers, the same weights every time."""
    torch.manual_seed(0)
    return Layers()


def values(*shape: int) -> torch.Tensor:
    """Return the same values for the same shape every time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7)) / 3


def new_optimizer(run: Run) -> None:
    """Make the optimizer anew, for the parameters that the model has now and that are trained."""
    run.optimizer = fused_adamw([param for param in run.model.parameters() if param.requires_grad])


def assert_same_story(story: Story, *, budget: str, model: nn.Module | None = None) -> Run:
    """Fail unless `story` ends with the losses and weights of eager PyTorch under `BUDGETS[budget]`; return the run of
    Elixir."""
    model = layers() if model is None else model
    runs = [eager(model), compiled(model, BUDGETS[budget])]
    for run in runs:
        torch.manual_seed(0)
        story(run)
    assert_same(*runs)
    return runs[1]
