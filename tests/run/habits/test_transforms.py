"""Function transforms of torch inside of a compiled forward: `vmap`, `grad`, `jvp`, `vjp`, `jacrev`, and more."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import func, nn

from elixir_compile.compat import unwrapped
from tests.run.habits.habit import habit

WIDTH = 8
OPTIONS: dict[str, Any] = {"inner": "aot_eager", "report": False, "plan_cache": False, "planner": "zero3_offload"}
Forward = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def jvp(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return func.jvp(lambda z: model.layer(z).sin(), (x,), (torch.ones_like(x),))[1].square().mean()


def vjp(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    result, pull = func.vjp(lambda z: model.layer(z).sin(), x)
    return pull(result)[0].square().mean()


FORWARDS: dict[str, Forward] = {
    "vmap": lambda model, x: torch.vmap(lambda row: model.layer(row).sin())(x).square().mean(),
    "vmap in vmap": lambda model, x: torch.vmap(torch.vmap(lambda row: model.layer(row).sin()))(x[None]).mean(),
    "ensemble": lambda model, x: torch.vmap(lambda w: torch.tanh(x @ w))(model.stack).square().mean(),
    "grad": lambda model, x: func.vmap(func.grad(lambda row: model.layer(row).sin().sum()))(x).square().mean(),
    "jvp": jvp,
    "vjp": vjp,
    "jacrev": lambda model, x: func.vmap(func.jacrev(lambda row: model.layer(row).sin()))(x).square().mean(),
    "jacfwd": lambda model, x: func.vmap(func.jacfwd(lambda row: model.layer(row).sin()))(x).square().mean(),
    "hessian": lambda model, x: func.hessian(lambda row: model.layer(row).sin().sum())(x[0]).square().mean(),
}


class Transformed(nn.Module):
    """A linear layer and a stack of matrices, read by the forward called `name`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.stack = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / WIDTH**0.5)
        self.forward_of = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return FORWARDS[self.forward_of](self, x) + self.layer(x).mean() + self.stack.mean()


@habit("`vmap`, `torch.func.grad`, `jvp`, `vjp`, `jacrev`, `jacfwd`, `hessian` in a forward; ensembles", area="Modules")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")  # by forward mode of torch itself
@pytest.mark.parametrize("name", FORWARDS)
def test_a_function_transform_trains_as_by_torch(name: str) -> None:
    torch.manual_seed(0)
    models = [Transformed(name)]
    models.append(copy.deepcopy(models[0]))
    losses = []
    for model, backend, given in zip(models, ("aot_eager", "elixir"), (None, OPTIONS), strict=True):
        torch._dynamo.reset()
        step, optimizer = torch.compile(model, backend=backend, options=given), torch.optim.SGD(model.parameters(), 0.1)
        for seed in range(2):
            loss = step(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:2] == losses[2:]
    assert losses[0] != losses[1]
    for own, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(own.cpu(), other.cpu())


class Counting(nn.Module):
    """Writes a parameter within `vmap`, or reads it there after a write."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.seen = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def row(weight: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.seen.add_(1)
            return weight.sin() * self.seen

        return torch.vmap(row)(self.layer(x)).square().mean()


def test_a_parameter_that_a_transform_writes_is_written() -> None:
    torch.manual_seed(0)
    models = [Counting()]
    models.append(copy.deepcopy(models[0]))
    losses = []
    for model, backend, given in zip(models, ("aot_eager", "elixir"), (None, OPTIONS), strict=True):
        torch._dynamo.reset()
        step = torch.compile(model, backend=backend, options=given)
        for _ in range(2):
            losses.append(step(torch.ones(4, WIDTH)))
            losses[-1].backward()
    assert losses[:2] == losses[2:]
    assert models[0].seen[0] == models[1].seen[0] == 2


def test_wrappers_of_all_levels_come_off() -> None:
    x, seen = torch.randn(3, 4, 5), []

    def note(inner: torch.Tensor) -> torch.Tensor:
        seen.append(unwrapped(inner))
        return inner.sum()

    torch.vmap(torch.vmap(func.grad(note)))(x)
    assert seen[0].untyped_storage()._cdata == x.untyped_storage()._cdata
    assert unwrapped(x) is x
    assert unwrapped("x") == "x"
