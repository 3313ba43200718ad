"""Several models, or an optimizer for each parameter, under one budget of the device."""

from typing import Any

import torch
from torch.optim import AdamW

from tests.run.habits.habit import habit
from tests.run.models import Stack, seeded, vectors
from tests.run.training import Run, assert_same, by_elixir, by_torch, least_bytes
from tests.run.updating import Several

OPTIONS = {"planner": "greedy", "plan_cache": False}


def each(params: Any) -> Any:
    """Return one AdamW for each parameter."""
    return Several(AdamW([param], lr=1e-2) for param in params)


@habit(
    "Two models that train in turn, each compiled with `device_memory`, as an actor and a critic",
    area="Training loops",
    note="they share the budget of the device",
)
def test_two_models_that_train_in_turn_share_their_budget() -> None:
    model, batches = seeded(Stack), vectors(4)
    budget_bytes = int(1.3 * least_bytes(model, batches[0]))
    expected = by_torch(model).train(batches)
    runs = [by_elixir(model, device_memory=budget_bytes, **OPTIONS) for _ in range(2)]
    for batch in batches:
        for run in runs:
            run.train([batch])
    for run in runs:
        assert_same(expected, run)


def distilled(student: Any, teacher: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        target = teacher(batch)
    loss = (student(batch) - target).square()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@habit(
    "A teacher under `torch.no_grad()` beside the student, each compiled with `device_memory`",
    area="Training loops",
    note="they share the budget of the device",
)
def test_a_teacher_and_a_student_share_their_budget() -> None:
    teacher, student, batches = seeded(Stack), seeded(Stack), vectors(4)
    budget_bytes = int(1.3 * least_bytes(student, batches[0]))
    with torch.no_grad():
        for param in teacher.parameters():
            param.mul_(1.5)

    def trained(run: Run, teaches: Any) -> Run:
        return run.train(batches, lambda model, optimizer, batch: distilled(model, teaches, optimizer, batch))

    expected = trained(by_torch(student), teacher)
    teaches = by_elixir(teacher, device_memory=budget_bytes, **OPTIONS).compiled
    assert_same(expected, trained(by_elixir(student, device_memory=budget_bytes, **OPTIONS), teaches))


@habit(
    "An optimizer of torch for each parameter, under `device_memory` on a CPU",
    area="Optimizers",
    note="plans count the state of all of them from the second step on",
)
def test_an_optimizer_for_each_parameter_is_counted() -> None:
    model, batches, make = seeded(Stack), vectors(4), each
    params_bytes = sum(param.nbytes for param in model.parameters())
    budget_bytes = int(1.05 * (least_bytes(model, batches[0], optimizer=make) + 2 * params_bytes))
    expected = by_torch(model, optimizer=make).train(batches)
    assert_same(expected, by_elixir(model, optimizer=make, device_memory=budget_bytes, **OPTIONS).train(batches))
