"""Models of one process share the budget of their device: measured by the allocator, in each step from the first on."""

import copy
import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from tests.run.processes import apart
from tests.run.training import by_elixir, on_host

WIDTH, ROWS, NUM_STEPS = 64, 128, 5
UNPLANNED_BYTES = 4096
"""Step counters, tickets and losses."""
Step = Callable[[int], list[torch.Tensor]]


class Net(nn.Module):
    """Three layers and a head of `num_outputs`; returns the outputs, or with targets their loss."""

    def __init__(self, num_outputs: int = 1, *, normed: bool = False) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)]
        norms = [nn.BatchNorm1d(WIDTH)] if normed else []
        self.body = nn.Sequential(*layers, *norms, nn.Linear(WIDTH, num_outputs))

    def forward(self, rows: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        out = self.body(rows)
        return out if target is None else (out - target).square().mean()


def nets(*num_outputs: int) -> list[Net]:
    torch.manual_seed(0)
    return [Net(number) for number in num_outputs]


def rows_of(step: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def compiled(model: nn.Module, budget_bytes: int | None) -> Any:
    options = {"inner": "aot_eager", "plan_cache": False, "search_timeout": 0.3, "report": False}
    given = {} if budget_bytes is None else {"device_memory": budget_bytes}
    return torch.compile(model, backend="elixir", options={**options, **given})


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return elixir.HybridAdamW(model.parameters(), lr=1e-3)


def update(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def generator_and_discriminator(budget_bytes: int | None) -> Step:
    """The generator waits for its backward while the discriminator trains, of which two forwards wait. Gradients of
    both stay through the next forward, which is noticed in the second step."""
    torch.manual_seed(0)
    made, judged = Net(WIDTH, normed=True), Net()
    make, judge = compiled(made, budget_bytes), compiled(judged, budget_bytes)
    optimizers = adamw(made), adamw(judged)
    real, false = torch.ones(ROWS, 1), torch.zeros(ROWS, 1)

    def step(number: int) -> list[torch.Tensor]:
        fake = make(rows_of(number))
        own = update(optimizers[1], judge(rows_of(-number), real) + judge(fake.detach(), false))
        return [own, update(optimizers[0], judge(fake, real))]

    return step


def in_turn(*shares: float) -> Callable[[int | None], Step]:
    """Models that train one after another in each step, with a share of the budget each."""

    def case(budget_bytes: int | None) -> Step:
        budgets = [None if budget_bytes is None else int(budget_bytes * share) for share in shares]
        models = nets(*(1 for _ in shares))
        forwards = [compiled(model, own) for model, own in zip(models, budgets, strict=True)]
        optimizers = [adamw(model) for model in models]

        def step(number: int) -> list[torch.Tensor]:
            pairs = zip(forwards, optimizers, strict=True)
            return [update(own, forward(rows_of(number), torch.zeros(ROWS, 1))) for forward, own in pairs]

        return step

    return case


def in_epochs(budget_bytes: int | None) -> Step:
    """Each of two models trains for two steps."""
    first, second = nets(1, 1)
    pairs = [(compiled(model, budget_bytes), adamw(model)) for model in (first, second)]

    def step(number: int) -> list[torch.Tensor]:
        forward, own = pairs[number // 2 % 2]
        return [update(own, forward(rows_of(number), torch.zeros(ROWS, 1)))]

    return step


def teacher_and_student(budget_bytes: int | None) -> Step:
    teacher, student = nets(WIDTH, WIDTH)
    teach, study = compiled(teacher.requires_grad_(False).eval(), budget_bytes), compiled(student, budget_bytes)
    optimizer = adamw(student)

    def step(number: int) -> list[torch.Tensor]:
        with torch.no_grad():
            target = teach(rows_of(number))
        return [update(optimizer, study(rows_of(number), target))]

    return step


def chained(budget_bytes: int | None) -> Step:
    """One backward through two models, whose optimizers are made after the first forward."""
    models = nets(WIDTH, 1)
    first, second = (compiled(model, budget_bytes) for model in models)
    optimizers: list[torch.optim.Optimizer] = []

    def step(number: int) -> list[torch.Tensor]:
        loss = second(first(rows_of(number)), torch.zeros(ROWS, 1))
        loss.backward()
        optimizers.extend(() if optimizers else map(adamw, models))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return [loss.detach()]

    return step


def with_average(budget_bytes: int | None) -> Step:
    """A prepared copy that never runs follows the weights."""
    (model,) = nets(1)
    average = elixir.prepare(copy.deepcopy(model).requires_grad_(False))
    forward, optimizer = compiled(model, budget_bytes), adamw(model)

    def step(number: int) -> list[torch.Tensor]:
        loss = update(optimizer, forward(rows_of(number), torch.zeros(ROWS, 1)))
        with torch.no_grad():
            for mean, param in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(param, 0.1)
        return [loss]

    return step


def deleted(budget_bytes: int | None) -> Step:
    """A new model every other step, in place of the one before."""
    there: dict[str, Any] = {}

    def step(number: int) -> list[torch.Tensor]:
        if number % 2 == 0:
            there.clear()
            (model,) = nets(1)
            there.update(forward=compiled(model, budget_bytes), optimizer=adamw(model))
        return [update(there["optimizer"], there["forward"](rows_of(number), torch.zeros(ROWS, 1)))]

    return step


CASES: dict[str, Callable[[int | None], Step]] = {
    "generator and discriminator": generator_and_discriminator,
    "actor and critic": in_turn(1.0, 1.0),
    "other budgets": in_turn(1.0, 0.9, 0.95),
    "in epochs": in_epochs,
    "teacher and student": teacher_and_student,
    "chained": chained,
    "with average": with_average,
    "deleted": deleted,
}
SETTLED = {"generator and discriminator": 2}
"""The first step for which plans know all that stays, if it is not the first of all."""
SLOW = {"in epochs", "chained", "with average", "deleted", "other budgets"}


def trained(name: str, budget_bytes: int | None) -> tuple[list[int], list[list[float]]]:
    """Return the measured peak and the losses of each step."""
    torch._dynamo.reset()
    gc.collect()
    step, peaks, losses = CASES[name](budget_bytes), list[int](), list[list[float]]()
    for number in range(NUM_STEPS):
        record = elixir.measure_step(lambda number=number: losses.append([float(loss) for loss in step(number)]))
        peaks.append(record.device_peak_bytes)
    return peaks, losses


def measured(name: str, share: float) -> tuple[int, list[int], bool]:
    """Return `share` of the peak without a budget, the peaks of steps under this budget, and whether the losses are
    bitwise equal; run in a process of its own."""
    free, expected = trained(name, None)
    budget_bytes = int(share * max(free))
    peaks, losses = trained(name, budget_bytes)
    return budget_bytes, peaks, losses == expected


@pytest.mark.parametrize("share", [0.5, pytest.param(0.7, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in CASES])
def test_every_step_keeps_the_budget_beside_other_models(name: str, share: float) -> None:
    budget_bytes, peaks, is_equal = apart(measured, name, share)
    assert is_equal
    assert max(peaks[SETTLED.get(name, 0) :]) <= budget_bytes + UNPLANNED_BYTES
    assert max(peaks) >= budget_bytes // 2


def test_an_idle_model_makes_room_and_comes_back() -> None:
    """A second model fills the budget alone; when the first trains again, both share it."""
    first, second = nets(1, 1)
    batch, options = rows_of(0), {"plan_cache": False, "search_timeout": 0.3}
    target = torch.zeros(ROWS, 1)

    def step(forward: Any, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> torch.Tensor:
        return update(optimizer, forward(rows, target))

    alone = by_elixir(first, **options).train([batch] * 3, step)
    weights, budget_bytes = (
        alone.weights,
        2 * max(r.plan.prediction.device_peak_bytes for r in elixir.compilations(alone.model)) // 3,
    )
    del alone
    gc.collect()
    idle = by_elixir(first, device_memory=2 * budget_bytes, **options).train([batch] * 2, step)
    assert not on_host(idle)
    other = by_elixir(second, device_memory=budget_bytes, **options).train([batch] * 2, step)
    assert on_host(idle)
    idle.train([batch], step)
    for name, weight in idle.weights.items():
        assert torch.equal(weight, weights[name])
    assert other.losses


def test_an_idle_model_whose_memory_is_held_is_named(caplog: pytest.LogCaptureFixture) -> None:
    first, second = nets(1, 1)
    options = {"plan_cache": False, "search_timeout": 0.3}

    def step(forward: Any, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> torch.Tensor:
        return update(optimizer, forward(rows, torch.zeros(ROWS, 1)))

    idle = by_elixir(first, **options).train([rows_of(0)], step)
    held = dict(idle.model.state_dict())
    peak_bytes = max(made.plan.prediction.device_peak_bytes for made in elixir.compilations(idle.model))
    with caplog.at_level(logging.WARNING, "elixir_compile"):
        by_elixir(second, device_memory=peak_bytes, **options).train([rows_of(0)], step)
    assert "models that do not train now hold" in caplog.text
    assert not on_host(idle)
    assert held
