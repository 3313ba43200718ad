"""Training loops under budgets: the plain loop, micro-batches, several models, and memory that no trace tells."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import elixir_compile as elixir
from tests.run.graph.test_kernel_bytes import FURTHER, KINDS, Layers
from tests.run.habits.habit import habit
from tests.run.habits.stories import BUDGETS, assert_trains_as_eager
from tests.run.models import ShortStack, seeded, vectors
from tests.run.processes import apart
from tests.run.random_runs import Draw, outcome_of
from tests.run.session.test_over_budget import MODELS
from tests.run.session.test_over_budget import WIDTH as ROW_WIDTH
from tests.run.training import Run, assert_same, by_elixir, by_elixir_unprepared, by_torch, fused_adamw, least_bytes
from tests.run.updating import Several

# ----------------------------------------------------------------------------------------------------------------------
# The training loop that every tutorial shows.


def clipped_step(run: Run, batch: Any) -> torch.Tensor:
    loss = run.compiled(batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.optimizer.step()
    run.optimizer.zero_grad()
    return loss


@habit("`loss.backward()`, `clip_grad_norm_`, `optimizer.step()`, `optimizer.zero_grad()`", area="Training loops")
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_loop_of_the_tutorials_trains_as_eager(budget: str) -> None:
    assert_trains_as_eager(seeded(ShortStack), clipped_step, vectors(4), budget=budget)


# ----------------------------------------------------------------------------------------------------------------------
# Steps under `device_memory` whose memory no trace tells, and what a budget is not kept for: the training is right.


def assert_trains_in_the_budget_of_its_errors(model: nn.Module, batches: list[torch.Tensor]) -> None:
    """Fail unless losses and weights are those of eager PyTorch with the same random numbers, under the first budget
    that is enough."""
    torch.manual_seed(0)
    expected = by_torch(model).train(batches)
    budget_bytes = 1
    for _ in range(10):
        torch.manual_seed(0)
        try:
            got = by_elixir_unprepared(
                model, device_memory=budget_bytes, micro_batches=1, plan_cache=False, planner="greedy"
            )
            got.train(batches)
        except elixir.NoFeasiblePlan as error:
            budget_bytes = max(error.needed_bytes, budget_bytes + 1)
            continue
        return assert_same(expected, got)
    raise AssertionError(f"no budget of the errors is enough, the last of them {budget_bytes}")


@habit(
    "Code that runs op by op between graphs: `compiler.disable`, GRU and LSTM, experts of a list, branches on values",
    area="Training loops",
    note="`device_memory` holds; the log names the lines and their bytes",
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [name if name == "disabled" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_code_between_graphs_under_a_budget(name: str) -> None:
    batches = [torch.randn(4, 16, ROW_WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in range(12)]
    assert_trains_in_the_budget_of_its_errors(MODELS[name](), batches)


@habit(
    "Convolutions, Fourier transforms, sorting, resizing and losses whose kernels allocate more than their traces say",
    area="Training loops",
    note="`device_memory` counts what the kernels of this machine allocate",
)
@pytest.mark.parametrize(
    "name",
    [name if name == "convolution" else pytest.param(name, marks=pytest.mark.slow) for name in {**KINDS, **FURTHER}],
)
def test_kernels_that_allocate_more_under_a_budget(name: str) -> None:
    make, loss, shape = {**KINDS, **FURTHER}[name]
    batches = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    torch.manual_seed(0)
    assert_trains_in_the_budget_of_its_errors(Layers(make, loss, num_layers=3), batches)


def refused_step() -> Any:
    """Return what a notebook keeps of a capture that failed: its exception, with the frames and their tensors."""
    torch._dynamo.reset()
    wrong = torch.compile(lambda x: x.sin().view(7, -1), backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError) as kept:
        wrong(torch.randn(4, 4, requires_grad=True))
    return kept


def refused_plan() -> Any:
    with pytest.raises(elixir.NoFeasiblePlan) as kept:
        by_elixir_unprepared(seeded(ShortStack), device_memory=64).compiled(vectors(1)[0])
    return kept


class Doubled(torch.autograd.Function):
    """Doubles values, and keeps a tensor for it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 2


def custom_function() -> Any:
    torch._dynamo.reset()
    layer = nn.Linear(4, 4)
    step = torch.compile(lambda x: Doubled.apply(layer(x)).sum(), backend="aot_eager")
    step(torch.randn(3, 4)).backward()
    return step, layer


def jagged() -> Any:
    return torch.nested.nested_tensor_from_jagged(torch.randn(10, 8), offsets=torch.tensor([0, 4, 10]))


def transformed() -> Any:
    kept: list[torch.Tensor] = []
    torch.vmap(lambda row: kept.append(row) or row.sum())(torch.ones(2, 8))
    return kept


@habit(
    "`measure_step` in a notebook that keeps the exception of a failed compile, beside custom functions, `vmap`, "
    "jagged tensors",
    area="Training loops",
)
@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated")  # Dynamo does
@pytest.mark.parametrize(
    "make", [refused_step, refused_plan, custom_function, jagged, transformed], ids=lambda make: make.__name__
)
def test_a_step_is_measured_beside_what_others_keep(make: Callable[[], Any]) -> None:
    kept = make()
    model, (batch,) = seeded(ShortStack), vectors(1)
    expected = by_torch(model).train([batch])
    got = by_elixir_unprepared(model)
    record = elixir.measure_step(lambda: got.train([batch]), device="cpu")
    assert_same(expected, got)
    assert record.device_peak_bytes > 2 * sum(param.nbytes for param in model.parameters())
    del kept


def hybrid(params: Any) -> torch.optim.Optimizer:
    return elixir.HybridAdamW(params, lr=1e-2)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9)


def through_mean(compiled: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    loss = compiled(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@habit(
    "The loop calls the model and not the result of `torch.compile`; a container of torch is compiled in place",
    area="Training loops",
    note="without a plan, and the warning `NoGraphCaptured` says so at the first step",
)
@pytest.mark.parametrize("optimizer", [hybrid, fused_adamw, momentum], ids=lambda make: make.__name__)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_of_which_nothing_is_captured_trains_and_is_warned_of(*, in_place: bool, optimizer: Any) -> None:
    torch._dynamo.reset()
    model, batches = seeded(lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))), vectors(2, width=64)
    own = copy.deepcopy(model)
    options: dict[str, Any] = {"inner": "aot_eager", "device_memory": "1KiB"}
    unused = (
        own.compile(backend="elixir", options=options)
        if in_place
        else torch.compile(own, backend="elixir", options=options)
    )
    run = Run(model=own, compiled=own, optimizer=optimizer(own.parameters()))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run.train(batches, through_mean)
    assert [one.category for one in seen if one.category is elixir.NoGraphCaptured] == [elixir.NoGraphCaptured]
    expected = by_torch(model, optimizer=fused_adamw if optimizer is hybrid else optimizer)
    assert_same(expected.train(batches, through_mean), run)
    del unused


# ----------------------------------------------------------------------------------------------------------------------
# Steps of several micro-batches under a budget: it holds, and losses and weights are those of torch's `aot_eager`.


USUAL = replace(
    Draw.of(0), model="stack", share=0.6, num_micro_batches=4, clips=True, update="auto", activations="any",
    planner="milp", is_prepared=True, keeps_zeros=False, accumulate=False,
)  # fmt: skip


def faults_of(draw: Draw) -> list[str]:
    outcome = outcome_of(draw)
    return [*outcome.faults] if outcome.budget_bytes > 1 << 20 else ["too small a budget to compare with"]


@habit(
    "Gradient accumulation: several `loss.backward()` for each `optimizer.step()`",
    area="Training loops",
    note="`device_memory` holds from the second micro-batch of the first step on",
)
def test_micro_batches_keep_the_budget() -> None:
    assert apart(faults_of, USUAL) == []


@habit(
    "One `loss.backward()` for each step, and `optimizer.zero_grad(set_to_none=False)`",
    area="Training loops",
    note="`device_memory` holds from the second step on",
)
def test_zeroed_gradients_keep_the_budget() -> None:
    assert apart(faults_of, replace(USUAL, num_micro_batches=1, keeps_zeros=True)) == []


# ----------------------------------------------------------------------------------------------------------------------
# Several models, or an optimizer for each parameter, under one budget of the device.


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
    model, batches = seeded(ShortStack), vectors(4)
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
    teacher, student, batches = seeded(ShortStack), seeded(ShortStack), vectors(4)
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
    model, batches, make = seeded(ShortStack), vectors(4), each
    params_bytes = sum(param.nbytes for param in model.parameters())
    budget_bytes = int(1.05 * (least_bytes(model, batches[0], optimizer=make) + 2 * params_bytes))
    expected = by_torch(model, optimizer=make).train(batches)
    assert_same(expected, by_elixir(model, optimizer=make, device_memory=budget_bytes, **OPTIONS).train(batches))
