"""Models that call functions of torch which run graphs, as `cond` and `scan`, with parameters inside."""

from collections.abc import Callable

import torch
from torch import nn
from torch._higher_order_ops import scan
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_rows
from torch.nn import functional

WIDTH, WIDE, ROWS = 16, 256, 6


class Calling(nn.Module):
    """A wide pair of layers `f` and weights for three rows, which `call` reads inside of bodies; returns the loss."""

    def __init__(self, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.call = call
        self.first = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)
        self.weights = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 4)

    def f(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self, self.first(x)).square().mean()


def branch(model: Calling, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > -1e9, model.f, lambda t: model.f(t * 2), (x,))


def branch_of_two_sizes(model: Calling, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > -1e9, model.f, lambda t: t + 1, (x,))


def branch_not_taken(model: Calling, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() < -1e9, model.f, lambda t: t + 1, (x,))


def branches_in_turn(model: Calling, x: torch.Tensor) -> torch.Tensor:
    """A parameter in a branch that is taken in some steps, beside one in both branches of every step."""
    inside = torch.cond(x.mean() > 0, lambda t: t @ model.weights[0], lambda t: t + 1, (x,))
    return torch.cond(x.mean() < 0, lambda t: model.f(t) @ model.weights[1], lambda t: model.f(t * 2), (inside,))


def branch_not_taken_in_scan(model: Calling, x: torch.Tensor) -> torch.Tensor:
    def turn(carried: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        carried = torch.cond(weight.sum() < -1e9, lambda c, w: model.f(c @ w), lambda c, w: c @ w, (carried, weight))
        return carried, carried.mean(0)

    last, means = scan(turn, x, model.weights)
    return last + means.sum(0)


def branch_in_branch(model: Calling, x: torch.Tensor) -> torch.Tensor:
    def outer(t: torch.Tensor) -> torch.Tensor:
        return model.f(t) + torch.cond(t.mean() > -1e9, lambda u: u @ model.weights[0], lambda u: model.f(u), (t,))

    return torch.cond(x.sum() > -1e9, outer, lambda t: t + 1, (x,))


def each_row(model: Calling, x: torch.Tensor) -> torch.Tensor:
    return map_rows(model.f, x)


def scan_of_weights(model: Calling, x: torch.Tensor) -> torch.Tensor:
    def turn(carried: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        carried = carried + model.f(carried @ weight)
        return carried, carried.mean(0)

    last, means = scan(turn, x, model.weights)
    return last + means.sum(0)


def branch_in_scan(model: Calling, x: torch.Tensor) -> torch.Tensor:
    def turn(carried: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        carried = torch.cond(weight.sum() > -1e9, lambda c, w: model.f(c @ w), lambda c, w: c @ w, (carried, weight))
        return carried, carried.mean(0)

    last, means = scan(turn, x, model.weights)
    return last + means.sum(0)


def loop_without_gradients(model: Calling, x: torch.Tensor) -> torch.Tensor:
    def turn(i: torch.Tensor, carried: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return i + 1, torch.tanh(model.f(carried))

    with torch.no_grad():
        _, last = torch.while_loop(lambda i, carried: i.sum() < 3, turn, (x.new_zeros(1), x))
    return x * last


def loop(model: Calling, x: torch.Tensor) -> torch.Tensor:
    def turn(i: torch.Tensor, carried: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return i + 1, torch.tanh(model.f(carried))

    return torch.while_loop(lambda i, carried: i < 3, turn, (torch.tensor(0), x))[1]


def associative(model: Calling, x: torch.Tensor) -> torch.Tensor:
    def combine(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return a[0] * b[0], b[0] * a[1] + b[1]

    return associative_scan(combine, (model.f(x).sigmoid(), x), 1, combine_mode="generic")[1]


def seeded(call: Callable[..., torch.Tensor]) -> Calling:
    torch.manual_seed(0)
    return Calling(call)


def batch(seed: int = 1) -> torch.Tensor:
    return torch.randn(ROWS, 32, WIDTH, generator=torch.Generator().manual_seed(seed))
