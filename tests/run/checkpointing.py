"""Runs that are saved, interrupted and resumed, and what must be equal then."""

import copy
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import elixir_compile as elixir
from tests.run.training import Run, assert_same_tensors, by_elixir
from tests.run.updating import Ladder, eager_run, weights_of


class Noisy(Ladder):
    """The ladder with dropout."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            x = functional.dropout(torch.tanh(step(x)), 0.2)
        return x.square().mean()


class Training:
    """A run with a scheduler; trains on batches and keeps the losses."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 2, 0.5)

    @property
    def parts(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        return self.run.model, self.run.optimizer

    def train(self, batches: Iterable[Any]) -> "Training":
        def step(compiled: Any, optimizer: Any, batch: Any) -> torch.Tensor:
            loss = compiled(batch)
            loss.backward()
            optimizer.step()
            self.scheduler.step()
            optimizer.zero_grad()
            return loss

        self.run.train(batches, step)
        return self

    def save(self, path: Any, **options: Any) -> elixir.SaveHandle:
        return elixir.save(path, *self.parts, scheduler=self.scheduler, **options)

    def load(self, path: Any) -> elixir.Checkpoint:
        return elixir.load(path, *self.parts, self.scheduler)


class Elsewhere(MutableMapping[str, Any]):
    """State of one parameter that is not in memory: a new tensor each time it is asked for."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state
        self.num_reads = 0

    def __getitem__(self, name: str) -> Any:
        self.num_reads += 1
        return self.state[name].clone()

    def __setitem__(self, name: str, value: Any) -> None:
        self.state[name] = value

    def __delitem__(self, name: str) -> None:
        del self.state[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.state)

    def __len__(self) -> int:
        return len(self.state)


def other(model: nn.Module) -> nn.Module:
    """Return a model like `model` with weights that are none of its."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for param in changed.parameters():
            param.fill_(0.125)
    return changed


def by_elixir_noisy() -> Training:
    torch.manual_seed(7)
    return Training(by_elixir(Noisy()))


def eager(model: nn.Module) -> Training:
    return Training(eager_run(model))


def everything(training: Training) -> dict[str, torch.Tensor]:
    """Return copies of all that a step changes, by name."""
    state = training.run.optimizer.state_dict()["state"]
    moments = {f"{index}.{kind}": value.clone() for index, own in state.items() for kind, value in own.items()}
    rates = {f"lr.{index}": torch.tensor(rate) for index, rate in enumerate(training.scheduler.get_last_lr())}
    return weights_of(training.run) | dict(sorted(moments.items())) | rates


def assert_resumed(expected: Training, got: Training, *, num_steps: int) -> None:
    """Fail unless the last `num_steps` losses of `expected` are those of `got`, and both ended in the same state."""
    losses = [[loss.item() for loss in training.run.losses[-num_steps:]] for training in (expected, got)]
    assert losses[0] == losses[1]
    assert_same_tensors(everything(expected), everything(got))
