"""A small model whose loss is a sum over rows, its steps in micro-batches, and the same steps by a user's loop."""

from typing import Any

import torch
from torch import nn

import elixir_compile as elixir
from tests.run.models import Block

WIDTH, TOKENS = 32, 8
OPTIONS = {"inner": "aot_eager", "report": False, "plan_cache": False, "replan": False}


class Rows(nn.Module):
    """Two blocks between two linear layers. Returns half the squared distance to `y`, over a constant."""

    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return (self.head(x) - y).square().sum() / 64


def batch_of(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (rows, TOKENS, WIDTH)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def compiled(model: nn.Module, micro_batches: object, **options: object) -> Any:
    return torch.compile(model, backend="elixir", options={**OPTIONS, "micro_batches": micro_batches, **options})


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def loop(model: nn.Module, parts: int, *batch: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradients of a user's loop over `parts` micro-batches of `batch`, and leave none behind."""
    for slices in zip(*(tensor.chunk(parts) for tensor in batch), strict=True):
        model(*slices).backward()
    found = gradients(model)
    model.zero_grad()
    return found


def divided_regions(step: Any) -> list[int]:
    """Return the micro-batches of each region of the last compiled graph of `step`."""
    return [region.micro_batches for region in elixir.compilations(step)[-1].plan.regions]
