"""Train a model, a story or a loop of the user's twice, by eager PyTorch and by Elixir, and compare bit for bit."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import elixir_compile as elixir
from tests.run.models import seeded, vectors
from tests.run.training import Run, assert_same, assert_same_tensors, fused_adamw

# ----------------------------------------------------------------------------------------------------------------------
# Train the same model by eager PyTorch and by Elixir, with one step of the user's, and compare bit for bit.


BUDGETS: Mapping[str, Mapping[str, object]] = {
    "free": {},
    "offload": {"planner": "zero3_offload"},
}
"""Options by name: everything stays on the device; every parameter lives on the host."""

Step = Callable[[Run, Any], torch.Tensor]
"""One training step of a run on a batch; returns the loss."""


def eager(model: nn.Module, optimizer: Any = fused_adamw) -> Run:
    """Return a run of a copy of `model` that nothing compiles."""
    own = copy.deepcopy(model)
    return Run(model=own, compiled=own, optimizer=optimizer(own.parameters()))


def compiled(model: nn.Module, options: Mapping[str, object], optimizer: Any = fused_adamw) -> Run:
    """Return a run of a copy of `model` that the backend compiles at its first call, op by op."""
    own = copy.deepcopy(model)
    torch._dynamo.reset()
    options = {"inner": "aot_eager", "report": False, **options}
    run = torch.compile(own, backend="elixir", options=options)
    return Run(model=own, compiled=run, optimizer=optimizer(own.parameters()))


def assert_trains_as_eager(
    model: nn.Module, step: Step, batches: Iterable[Any], *, budget: str, optimizer: Any = fused_adamw
) -> None:
    """Fail unless losses and weights after `batches` equal those of eager PyTorch, under `BUDGETS[budget]`."""
    batches = list(batches)
    runs = [eager(model, optimizer), compiled(model, BUDGETS[budget], optimizer)]
    for run in runs:
        torch.manual_seed(0)
        for batch in batches:
            run.losses.append(step(run, batch).detach().clone())
    assert_same(*runs)


# ----------------------------------------------------------------------------------------------------------------------
# Run one story, training with something in between, by eager PyTorch and by Elixir, and compare bit for bit.


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


# ----------------------------------------------------------------------------------------------------------------------
# Run a training loop of the user's twice, eagerly and with its models compiled, and compare what it returns.


BOTH_WIDTH = 16


class Net(nn.Module):
    """Three linear layers with a norm between; returns features, so that a loop makes its own loss."""

    def __init__(self, width: int = BOTH_WIDTH) -> None:
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
    return [torch.randn(rows, BOTH_WIDTH, generator=generator) for _ in range(count)]


def copies_of(*models: nn.Module) -> list[torch.Tensor]:
    """Return copies of the parameters of `models`."""
    return [param.detach().clone() for model in models for param in model.parameters()]


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    """Return copies of the gradients of the parameters of `model`, None for those that have none."""
    return [None if param.grad is None else param.grad.clone() for param in model.parameters()]
