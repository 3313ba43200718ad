"""Models of one process share the budget of their device: measured by the allocator, in each step from the first on."""

import gc
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of, model_of
from elixir_compile.ir import Plan
from elixir_compile.session.planning import ExternalUsage
from elixir_compile.session.together import JointPlans
from tests.run.models import Stack, seeded, vectors
from tests.run.processes import apart
from tests.run.training import Run, assert_same, by_elixir, by_torch, least_bytes, on_host

WIDTH, ROWS, NUM_STEPS = 64, 128, 5
OPTIONS = {"plan_cache": False, "planner": "greedy"}
UNPLANNED_BYTES = 4096
"""Step counters, tickets and losses."""
Step = Callable[[int], list[torch.Tensor]]
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


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
    options = {"inner": "aot_eager", "report": False, **OPTIONS}
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
    "deleted": deleted,
}
SETTLED = 2
"""The first step for which plans know all that stays: models have run in turn, and gradients have stayed through a
forward."""
SLOW = {"in epochs", "chained", "deleted", "other budgets"}


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
    assert max(peaks[SETTLED:]) <= budget_bytes + UNPLANNED_BYTES
    assert max(peaks) >= budget_bytes // 2
    if name == "in epochs":  # nobody knows of the second model before it runs
        idle_bytes = sum(param.nbytes for param in nets(1)[0].parameters())
        assert max(peaks[:SETTLED]) <= budget_bytes + idle_bytes + UNPLANNED_BYTES


def step(forward: Any, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> torch.Tensor:
    return update(optimizer, forward(rows, torch.zeros(ROWS, 1)))


def plans_of(run: Run) -> list[Plan]:
    return [record.plan for record in elixir.compilations(run.model)]


@pytest.fixture(scope="module")
def alone() -> tuple[int, list[Plan], Mapping[str, torch.Tensor]]:
    """Return two thirds of the bytes that a step takes if nothing moves, and plans and weights within them."""
    full = by_elixir(*nets(1), **OPTIONS).train([rows_of(0)], step)
    budget_bytes = 2 * plans_of(full)[0].prediction.device_peak_bytes // 3
    run = by_elixir(*nets(1), device_memory=budget_bytes, **OPTIONS).train([rows_of(0)] * 3, step)
    return budget_bytes, plans_of(run), run.weights


def test_an_idle_model_makes_room_and_comes_back(alone: Any) -> None:
    """A second model fills the budget alone; when the first trains again, both share it."""
    budget_bytes, _, weights = alone
    idle = by_elixir(*nets(1), device_memory=2 * budget_bytes, **OPTIONS).train([rows_of(0)] * 2, step)
    assert not on_host(idle)
    by_elixir(*nets(1), device_memory=budget_bytes, **OPTIONS).train([rows_of(0)] * 2, step)
    assert on_host(idle)
    idle.train([rows_of(0)], step)
    for name, weight in idle.weights.items():
        assert torch.equal(weight, weights[name])


def test_an_idle_model_whose_memory_is_held_is_named(alone: Any, caplog: pytest.LogCaptureFixture) -> None:
    budget_bytes, plans, _ = alone
    idle = by_elixir(*nets(1), device_memory=4 * budget_bytes, **OPTIONS).train([rows_of(0)], step)
    held = dict(idle.model.state_dict())
    with caplog.at_level(logging.WARNING, "elixir_compile"):
        run = by_elixir(*nets(1), device_memory=budget_bytes, **OPTIONS).train([rows_of(0)] * 2, step)
    said = [text for text in caplog.messages if "beside other models" in text]
    assert "Net holds" in said[0]
    assert held
    assert not on_host(idle)
    assert plans_of(run) == plans


def trains(run: Run) -> object:
    return run.train([rows_of(0)] * 2, step)


def waits_for_its_backward(run: Run) -> object:
    return trains(run), run.compiled(rows_of(0), torch.zeros(ROWS, 1))


def keeps_gradients(run: Run) -> object:
    return trains(run), run.compiled(rows_of(0), torch.zeros(ROWS, 1)).backward()


def is_in_a_cycle(run: Run) -> object:
    """Nobody but the collector knows that it is garbage."""
    trains(run)
    cycle: list[object] = [run]
    cycle.append(cycle)
    return None


LEFT: dict[str, Callable[[Run], object]] = {
    "never ran": lambda run: run,
    "trained": trains,
    "waits for its backward": waits_for_its_backward,
    "keeps gradients": keeps_gradients,
    "garbage": is_in_a_cycle,
}


@pytest.mark.parametrize("share", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("left", LEFT)
def test_a_model_that_ran_before_changes_no_plan(left: str, share: int, alone: Any) -> None:
    """It has the same budget as the other model, or four times as much."""
    budget_bytes, plans, weights = alone
    kept = LEFT[left](by_elixir(*nets(2), device_memory=share * budget_bytes, **OPTIONS))
    run = by_elixir(*nets(1), device_memory=budget_bytes, **OPTIONS).train([rows_of(0)] * 3, step)
    assert plans_of(run) == plans
    assert all(torch.equal(weight, weights[name]) for name, weight in run.weights.items())
    del kept


def test_a_model_without_a_budget_counts_in_no_plan(alone: Any) -> None:
    budget_bytes, plans, _ = alone
    free = by_elixir(*nets(1), **OPTIONS)
    run = by_elixir(*nets(1), device_memory=budget_bytes, **OPTIONS)
    for _ in range(3):
        free.train([rows_of(0)], step)
        run.train([rows_of(0)], step)
    assert plans_of(run) == plans
    assert not on_host(free)


def test_the_smallest_budget_of_models_in_turn_leaves_the_others_to_words() -> None:
    """A measured step of one model holds what the others allocate, and their losses outside of all graphs are not known
    before the first step ends."""
    models = nets(1, 1)
    pairs = [(adamw(model), compiled(model, 1024)) for model in models]

    def step() -> None:
        for optimizer, forward in pairs:
            update(optimizer, forward(rows_of(0)).square().mean())

    step()
    for _ in range(2):
        with pytest.raises(elixir.NoFeasiblePlan, match=r"\d and more for other models, which run in turn with it"):
            step()


def test_models_of_two_threads_do_not_move_each_other(alone: Any, caplog: pytest.LogCaptureFixture) -> None:
    budget_bytes, plans, weights = alone
    runs = [by_elixir(*nets(1), device_memory=budget_bytes, **OPTIONS) for _ in range(2)]
    with caplog.at_level(logging.WARNING, "elixir_compile"), ExitStack() as stack:
        threads = [stack.enter_context(ThreadPoolExecutor(1)) for _ in runs]
        for _ in range(3):
            for run, thread in zip(runs, threads, strict=True):
                thread.submit(run.train, [rows_of(0)], step).result()
    for run in runs:
        assert plans_of(run) == plans
        assert all(torch.equal(weight, weights[name]) for name, weight in run.weights.items())
    assert any("Net and Net train in different threads" in text for text in caplog.messages)


@pytest.mark.parametrize("make", [torch.optim.AdamW, pytest.param(MOMENTUM, marks=pytest.mark.slow)])
def test_models_whose_state_nobody_can_move_train_beyond_the_budget_with_a_warning(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Each fits the budget alone. State of plain optimizers is in the memory of the device, which is a CPU."""
    model, batches = seeded(Stack), vectors(4)
    expected = by_torch(model, optimizer=make).train(batches)
    state_bytes = sum(
        entry.nbytes for state in expected.optimizer.state.values() for entry in state.values() if entry is not None
    )
    budget_bytes = int(1.05 * (least_bytes(model, batches[0], optimizer=make) + state_bytes))
    with caplog.at_level(logging.WARNING, "elixir_compile"):
        runs = [by_elixir(model, optimizer=make, device_memory=budget_bytes, **OPTIONS) for _ in range(2)]
        for batch in batches:
            for run in runs:
                run.train([batch])
    assert any("beside other models" in text and "Stack holds" in text for text in caplog.messages)
    for run in runs:
        assert_same(expected, run)


def test_all_problems_of_a_graph_count_what_no_plan_places(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """State of plain optimizers and buckets of DistributedDataParallel, in joint problems too."""
    run = by_elixir(*nets(1), device_memory=alone[0], **OPTIONS).train([rows_of(0)], step)
    outstanding, (graph,) = model_of(run.model)._together, model_of(run.model).graphs

    def base_bytes() -> list[int]:
        planner, own = graph.planner, graph.active.captured
        (joint,) = JointPlans({outstanding: [graph]}).requests()
        problem = planner.problem(own, graph.active.graph, ExternalUsage(), is_new=False)
        return [joint.problem.base_bytes, problem.base_bytes]

    before = base_bytes()
    assert before[0] == before[1]
    executor = executor_of(run.model)
    optimizer = torch.optim.SGD(run.model.parameters())
    executor.plain_state.note(optimizer, {"weight": 1000})
    assert base_bytes() == before
    executor.plain_state.is_counted = True
    monkeypatch.setattr(executor.reducers, "bucket_bytes", lambda device: 500)
    assert base_bytes() == [nbytes + 1500 for nbytes in before]
    del optimizer
    gc.collect()
    assert base_bytes() == [nbytes + 500 for nbytes in before]
