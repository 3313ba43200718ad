"""Parameters that the forward itself writes: clipped weights, momentum encoders, codebooks, renormalized embeddings."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import elixir_compile as elixir
from elixir_compile.capture.modules import executor_of
from tests.run.habits.habit import habit
from tests.run.habits.same import BUDGETS, assert_trains_as_eager, compiled, eager
from tests.run.models import seeded, vectors
from tests.run.training import Run, assert_same, on_host

WIDTH = 16
NUM_WORDS = 10

budgets = pytest.mark.parametrize("budget", BUDGETS)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for param in params if param.requires_grad], lr=0.1)


def hybrid(params: Any) -> torch.optim.Optimizer:
    return elixir.HybridAdamW([param for param in params if param.requires_grad], lr=1e-2)


def step(run: Run, batch: Any) -> torch.Tensor:
    loss = run.compiled(batch)
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    return loss


def assert_writes_as_eager(
    make: Callable[[], nn.Module], budget: str, *written: str, step: Callable[..., torch.Tensor] = step
) -> None:
    """Fail unless the model trains as in eager PyTorch, plain and prepared, and only `written` stays whole."""
    model, batches = seeded(make), vectors(4, rows=4, width=WIDTH)
    assert_trains_as_eager(model, step, batches, budget=budget, optimizer=sgd)
    expected = eager(model, sgd)
    got = compiled(elixir.prepare(copy.deepcopy(model)), BUDGETS[budget], sgd)
    for run in (expected, got):
        for batch in batches:
            run.losses.append(step(run, batch).detach().clone())
    assert_same(expected, got)
    assert set(executor_of(got.model).whole_because) == set(written)
    if budget == "offload":
        own = {name for name, _ in got.model.named_parameters()}
        assert set(on_host(got)) == own - set(written)


class Layers(nn.Module):
    """Two linear layers in a row, and a third beside the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.beside = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def write(self) -> None:
        """Write a parameter, in subclasses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.write()
        return (self.head(self.first(x)) + self.beside(x)).square().mean()


class Clamped(Layers):
    @torch.no_grad()
    def write(self) -> None:
        self.first.weight.clamp_(-0.1, 0.1)


class DataClamped(Layers):
    def write(self) -> None:
        self.first.weight.data.clamp_(-0.1, 0.1)


class ViewWritten(Layers):
    @torch.no_grad()
    def write(self) -> None:
        self.first.weight.t().chunk(2)[1].mul_(0.5)


class ItemWritten(Layers):
    @torch.no_grad()
    def write(self) -> None:
        self.first.weight[0] = 0.0


class OutWritten(Layers):
    @torch.no_grad()
    def write(self) -> None:
        torch.mul(self.first.weight, 0.9, out=self.first.weight)


class ForeachWritten(Layers):
    @torch.no_grad()
    def write(self) -> None:
        torch._foreach_mul_([self.first.weight], 0.9)


class OnTheSphere(Layers):
    @torch.no_grad()
    def write(self) -> None:
        weight = self.first.weight
        weight /= weight.norm(dim=1, keepdim=True)


class Standardised(Layers):
    @torch.no_grad()
    def write(self) -> None:
        weight = self.first.weight
        weight.copy_((weight - weight.mean(1, keepdim=True)) / (weight.std(1, keepdim=True) + 1e-5))


@habit("`weight.clamp_()` under `no_grad` in the forward", area="Parameters")
@budgets
def test_a_weight_clipped_in_the_forward_is_clipped(budget: str) -> None:
    assert_writes_as_eager(Clamped, budget, "first.weight")


@habit("`weight.data.clamp_()` in the forward", area="Parameters")
@budgets
def test_data_clipped_in_the_forward_is_clipped(budget: str) -> None:
    assert_writes_as_eager(DataClamped, budget, "first.weight")


@habit(
    "A view of a weight, an item, `out=weight` or `torch._foreach_*_([weight])` written in the forward",
    area="Parameters",
)
@pytest.mark.parametrize("make", [ViewWritten, ItemWritten, OutWritten, ForeachWritten])
@budgets
def test_every_way_to_write_a_weight_lands(make: type[nn.Module], budget: str) -> None:
    assert_writes_as_eager(make, budget, "first.weight")


@habit("Weights normalised to the unit sphere, or standardised, in place in the forward", area="Parameters")
@pytest.mark.parametrize("make", [OnTheSphere, Standardised])
@budgets
def test_weights_normalised_in_place_stay_normalised(make: type[nn.Module], budget: str) -> None:
    assert_writes_as_eager(make, budget, "first.weight")


class Renormalized(nn.Module):
    """A layer on an embedding whose rows are shortened as they are read, alone or in bags."""

    def __init__(self, kind: type[nn.Module] = nn.Embedding) -> None:
        super().__init__()
        self.words = kind(NUM_WORDS, WIDTH, max_norm=0.5)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = x.abs().mul(4).long().clamp(max=NUM_WORDS - 1)[:, :3]
        return self.head(self.words(ids)).square().mean()


@habit("`nn.Embedding(max_norm=...)` and `nn.EmbeddingBag(max_norm=...)`", area="Modules")
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@budgets
def test_an_embedding_that_renormalizes_its_rows(kind: type[nn.Module], budget: str) -> None:
    assert_writes_as_eager(lambda: Renormalized(kind), budget, "words.weight")


class Momentum(nn.Module):
    """A student and a teacher that follows it, each of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        with torch.no_grad():
            for param in self.teacher.parameters():
                param.mul_(0.5)

    def follow(self) -> None:
        with torch.no_grad():
            for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                own.mul_(0.9).add_(other, alpha=0.1)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.teacher(x)
        return functional.mse_loss(self.student(x), wanted)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.follow()
        return self.loss(x)


class MomentumByData(Momentum):
    def follow(self) -> None:
        for own, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            own.data = own.data * 0.9 + other.data * 0.1


class MomentumByName(Momentum):
    @torch.no_grad()
    def follow(self) -> None:
        for index in (0, 2):
            own, other = self.teacher[index], self.student[index]
            own.weight.lerp_(other.weight, 0.1)
            own.bias.copy_(own.bias * 0.9 + other.bias * 0.1)


class MomentumByNameAndData(Momentum):
    def follow(self) -> None:
        for index in (0, 2):
            own, other = self.teacher[index], self.student[index]
            own.weight.data = own.weight.data * 0.9 + other.weight.data * 0.1
            own.bias.data = own.bias.data * 0.9 + other.bias.data * 0.1


class MomentumBehind(Momentum):
    """The teacher follows when the loss is known: it is read, then written."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.loss(x)
        self.follow()
        return loss


TEACHER = ("teacher.0.weight", "teacher.0.bias", "teacher.2.weight", "teacher.2.bias")


@habit(
    "A momentum encoder (MoCo, BYOL) that the forward updates: `mul_().add_()`, `lerp_`, `copy_`, `.data =`",
    area="Training loops",
)
@pytest.mark.parametrize("make", [Momentum, MomentumByData, MomentumByName, MomentumByNameAndData, MomentumBehind])
@budgets
def test_a_teacher_that_the_forward_updates(make: type[nn.Module], budget: str) -> None:
    assert_writes_as_eager(make, budget, *TEACHER)


class OnlyLoss(Momentum):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(x)


@habit("A momentum encoder that the loop updates behind the step", area="Training loops")
@budgets
def test_a_teacher_that_the_loop_updates(budget: str) -> None:
    def step_and_follow(run: Run, batch: Any) -> torch.Tensor:
        loss = step(run, batch)
        run.model.follow()
        return loss

    assert_writes_as_eager(OnlyLoss, budget, step=step_and_follow)


@habit("A momentum encoder that a compiled function of its own updates", area="Training loops")
@budgets
def test_a_teacher_that_a_compiled_function_updates(budget: str) -> None:
    def step_and_follow(run: Run, batch: Any) -> torch.Tensor:
        loss = step(run, batch)
        follow = run.model.follow
        if run.compiled is not run.model:
            follow = torch.compile(follow, backend="elixir", options={"inner": "aot_eager", "report": False})
        follow()
        return loss

    assert_writes_as_eager(OnlyLoss, budget, step=step_and_follow)


@habit("Weight clipping behind the step (WGAN)", area="Training loops")
@budgets
def test_weights_clipped_behind_the_step(budget: str) -> None:
    def step_and_clip(run: Run, batch: Any) -> torch.Tensor:
        loss = step(run, batch)
        for param in run.model.parameters():
            param.data.clamp_(-0.1, 0.1)
        return loss

    assert_writes_as_eager(Layers, budget, step=step_and_clip)
