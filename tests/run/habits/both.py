"""Run a training loop of the user's twice, eagerly and with its models compiled, and compare what it returns."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import elixir_compile as elixir
from tests.run.models import seeded
from tests.run.training import assert_same_tensors, fused_adamw

WIDTH = 16


class Net(nn.Module):
    """Three linear layers with a norm between; returns features, so that a loop makes its own loss."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(2 * width)
        self.second = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(functional.gelu(self.second(self.norm(functional.gelu(self.first(x))))))


@dataclass(frozen=True, slots=True)
class Tools:
    """What a loop needs: how models are compiled, and which optimizer updates them."""

    compile: Callable[[nn.Module], Any]
    optimizer: Callable[..., torch.optim.Optimizer]

    def net(self) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
        """Return a new `Net`, its compiled form and its optimizer; the same weights every time."""
        model = seeded(Net)
        return model, self.compile(model), self.optimizer(model.parameters())


Loop = Callable[[Tools], Sequence[torch.Tensor | None]]
"""A training loop; returns what must be the same."""


def hybrid_adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    """Return HybridAdamW with the learning rate of `fused_adamw`, whose updates it repeats bit for bit."""
    return elixir.HybridAdamW(params, lr=1e-2, **options)


PLACES = {
    "free": ({}, fused_adamw),
    "offload": ({"planner": "zero3_offload"}, hybrid_adamw),
}
"""Options and optimizer by name: everything stays on the device; parameters and optimizer state live on the host."""


def compiled_tools(place: str) -> Tools:
    """Return tools that compile by Elixir under `PLACES[place]`."""
    options, optimizer = PLACES[place]
    options = {"inner": "aot_eager", "report": False, **options}
    return Tools(lambda model: torch.compile(model, backend="elixir", options=options), optimizer)


def assert_same_in_both(loop: Loop, place: str) -> None:
    """Fail unless `loop` returns bitwise the same with eager models and with compiled ones; on a GPU, unless it is
    close."""
    torch.manual_seed(0)
    expected = _by_number(loop(Tools(lambda model: model, fused_adamw)))
    torch._dynamo.reset()
    torch.manual_seed(0)
    assert_same_tensors(expected, _by_number(loop(compiled_tools(place))))


def _by_number(found: Iterable[torch.Tensor | None]) -> dict[str, torch.Tensor]:
    return {str(number): value for number, value in enumerate(found) if value is not None}


def batches(count: int = 3, *, rows: int = 8) -> list[torch.Tensor]:
    """Return `count` different random inputs of `Net`."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, WIDTH, generator=generator) for _ in range(count)]


def values(*models: nn.Module) -> list[torch.Tensor]:
    """Return copies of the parameters of `models`."""
    return [param.detach().clone() for model in models for param in model.parameters()]


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    """Return copies of the gradients of the parameters of `model`, None for those that have none."""
    return [None if param.grad is None else param.grad.clone() for param in model.parameters()]
