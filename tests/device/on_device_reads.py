"""Parameters whose home is the host, read on the device by eager code, by their names, and by an update without a plan.

On a CPU each of these reads finds the parameter itself, so only a device with memory of its own shows them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.graph.ops.shards import rehome
from tests.device import emulated
from tests.run.habits.stories import BUDGETS, compiled, eager
from tests.run.models import seeded, vectors
from tests.run.training import Run, assert_same, fused_adamw, hybrid_adamw, on_host, plain_step

DEVICE = torch.device(emulated.NAME, 0)
WIDTH = 8
OFFLOAD = BUDGETS["offload"]


class Layers(nn.Module):
    """Two linear layers; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.first(x))).square().mean()


def batches(num: int) -> list[torch.Tensor]:
    return [batch.to(DEVICE) for batch in vectors(num, rows=4, width=WIDTH)]


def pair(make: Callable[[], nn.Module], optimizer: Any = fused_adamw, own: Any = None) -> tuple[Run, Run]:
    """Return the run of eager PyTorch and the run in which everything lives on the host."""
    model = seeded(make).to(DEVICE)
    return eager(model, optimizer), compiled(model, OFFLOAD, own or optimizer)


def assert_trains(expected: Run, got: Run, step: Any = plain_step, num: int = 3) -> None:
    for run in (expected, got):
        run.train(batches(num), step)
    assert_same(expected, got)
    assert on_host(got)


@torch.compiler.disable
def op_by_op(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(layer(x))


class EagerLast(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return op_by_op(self.head, torch.tanh(self.first(x))).square().mean()


class EagerBetween(Layers):
    """Eager code and graphs read the same weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.first(op_by_op(self.first, op_by_op(self.head, self.head(x))))).square().mean()


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@pytest.mark.filterwarnings(
    "ignore:.*hold the memory they leave:elixir_compile.base.errors.ElixirWarning"
)  # the graph does
@pytest.mark.parametrize("make", [EagerLast, EagerBetween])
@pytest.mark.parametrize("own", [fused_adamw, hybrid_adamw])
def test_gradients_of_reads_before_a_move_arrive_behind_it(make: type[nn.Module], own: Any) -> None:
    """The first forward plans when eager code has read a parameter on the device, and moves the parameter."""
    assert_trains(*pair(make, fused_adamw, own))


class HookError(Exception):
    pass


def use_twice(param: nn.Parameter, backward: Callable[[], None], seen: list[Any]) -> None:
    backward()
    backward()


def use_a_sum(param: nn.Parameter, backward: Callable[[], None], seen: list[Any]) -> None:
    """The sum is one tensor, which a user may hold."""
    backward()
    total = param.grad
    backward()
    seen.append(param.grad is total)


def use_a_hook(param: nn.Parameter, backward: Callable[[], None], seen: list[Any]) -> None:
    param.register_post_accumulate_grad_hook(lambda leaf: seen.append([] if leaf.grad is None else leaf.grad.tolist()))
    use_twice(param, backward, seen)


def use_an_update(param: nn.Parameter, backward: Callable[[], None], seen: list[Any]) -> None:
    """An update in the backward takes the gradient, and the sum before it."""

    def update(leaf: torch.Tensor) -> None:
        assert leaf.grad is not None
        seen.append(leaf.grad.tolist())
        leaf.grad = None

    param.grad = torch.ones_like(param)
    param.register_post_accumulate_grad_hook(update)
    use_twice(param, backward, seen)


def use_an_error(param: nn.Parameter, backward: Callable[[], None], seen: list[Any]) -> None:
    """A hook that fails loses no sum."""

    def fail(leaf: torch.Tensor) -> None:
        raise HookError

    backward()
    handle = param.register_post_accumulate_grad_hook(fail)
    with pytest.raises(HookError):
        backward()
    handle.remove()
    backward()


def use_frozen(param: nn.Parameter, backward: Callable[[], None], seen: list[Any]) -> None:
    backward()
    param.requires_grad_(False)
    backward()


@pytest.mark.parametrize("use", [use_twice, use_a_sum, use_a_hook, use_an_update, use_an_error, use_frozen])
@pytest.mark.parametrize("homes", [("cpu",), ("cpu", DEVICE), ("cpu", DEVICE, "cpu")])
def test_gradients_behind_a_move_arrive_as_without_one(use: Any, homes: tuple[Any, ...]) -> None:
    """The graph that reads the parameter is older than the moves."""
    results = []
    for places in ((), homes):
        param, seen = nn.Parameter(torch.ones(3, device=DEVICE)), []
        loss = (param * torch.arange(3.0, device=DEVICE)).sum()
        for place in places:
            rehome(param, param.detach().to(place))
        use(param, lambda loss=loss: loss.backward(retain_graph=True), seen)
        results.append((None if param.grad is None else param.grad.tolist(), seen))
    assert results[0] == results[1]


class Penalized(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0.01 * sum(param.square().sum() for param in self.parameters())


class Following(Layers):
    """A teacher follows the first layer, which is read by the names of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), self.first.parameters(), strict=True):
                own.mul_(0.9).add_(other * 0.1)
        return super().forward(x) + (self.teacher(x) - self.first(x)).square().mean()


class OnlyByName(Layers):
    """No module reads the head."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.head.parameters()
        return (torch.tanh(self.first(x)) @ weight + bias).square().mean()


@pytest.mark.parametrize("is_prepared", [False, True])
@pytest.mark.parametrize("make", [Penalized, Following, OnlyByName])
def test_a_forward_reads_parameters_by_name(make: type[nn.Module], is_prepared: bool) -> None:
    expected, got = pair(make, momentum)
    if is_prepared:
        elixir.prepare(got.model)
    assert_trains(expected, got)
    assert "first.weight" in on_host(got)


class WritesInEvaluation(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            with torch.no_grad():
                self.first.weight.mul_(0.9)
        return super().forward(x)


def evaluating_step(run: Run, optimizer: Any, batch: torch.Tensor) -> torch.Tensor:
    loss = plain_step(run.compiled, optimizer, batch)
    run.model.eval()
    with torch.no_grad():
        run.losses.append(run.compiled(batch).clone())
    run.model.train()
    return loss


UPDATES: Mapping[str, tuple[Any, Any]] = {
    "AdamW": (fused_adamw, hybrid_adamw),
    "a class": (momentum, lambda params: elixir.hybrid(torch.optim.SGD)(params, lr=0.1, momentum=0.9)),
}


@pytest.mark.parametrize("update", UPDATES)
def test_state_follows_a_weight_that_no_plan_places_any_more(update: str) -> None:
    """The first evaluation shows that the weight is written, when its state is on the host already."""
    expected, got = pair(WritesInEvaluation, *UPDATES[update])
    for run in (expected, got):
        for batch in batches(3):
            evaluating_step(run, run.optimizer, batch)
    assert_same(expected, got)
    assert got.model.first.weight.device == DEVICE
    assert "head.weight" in on_host(got)


TRANSFORMS: Mapping[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "grad": lambda model, x: torch.func.grad(model)(x),
    "vjp": lambda model, x: torch.func.vjp(model, x)[1](torch.ones((), device=DEVICE))[0],
    "vmap": lambda model, x: torch.func.vmap(model)(x),
    "vmap of grad": lambda model, x: torch.func.vmap(torch.func.grad(model))(x),
    "jacrev": lambda model, x: torch.func.jacrev(model)(x),
    "grad of grad": lambda model, x: torch.func.grad(lambda y: torch.func.grad(model)(y).square().sum())(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_eager_code_read_parameters_on_the_host(transform: str) -> None:
    expected, got = pair(Layers)
    assert_trains(expected, got, num=1)
    x = batches(2)[1]
    assert torch.equal(*(TRANSFORMS[transform](run.model, x) for run in (expected, got)))
