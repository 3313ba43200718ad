"""By default a batch runs whole if any plan for it fits the budget, else in as many micro-batches as are planned."""

import logging

import pytest
import torch

import elixir_compile as elixir
from elixir_compile.tools.testing import MemorySchedules
from tests.run.micro_batches.stepping import OPTIONS, Rows, batch_of, divided_regions, gradients, loop

BATCH = batch_of(64)


def by_default(model: torch.nn.Module, budget_bytes: int, **options: object) -> object:
    torch._dynamo.reset()
    return torch.compile(model, backend="elixir", options={**OPTIONS, "device_memory": budget_bytes, **options})


@pytest.fixture(scope="module")
def whole_bytes() -> int:
    """The smallest budget for the whole batch."""
    with pytest.raises(elixir.NoFeasiblePlan) as caught:
        by_default(Rows(), 1, micro_batches=1)(*BATCH)
    assert "micro-batches" not in str(caught.value)
    return caught.value.needed_bytes


def test_the_smallest_budget_for_the_whole_batch_keeps_its_plan_and_its_bits(whole_bytes: int):
    model, found = Rows(), []
    for options in ({}, {"micro_batches": 1}):
        step = by_default(model, whole_bytes, **options)
        step(*BATCH).backward()
        found.append((elixir.compilations(step)[-1].plan, gradients(model)))
        model.zero_grad()
    (plan, own), (other_plan, other) = found
    assert set(divided_regions(step)) == {1}
    assert (plan.regions, plan.schedules, plan.activations) == (
        other_plan.regions,
        other_plan.schedules,
        other_plan.activations,
    )
    assert all(torch.equal(own[name], other[name]) for name in other)


def test_a_batch_that_does_not_fit_whole_trains_in_micro_batches_and_the_log_says_so_once(
    whole_bytes: int, caplog: pytest.LogCaptureFixture
):
    budget_bytes, model = int(0.8 * whole_bytes), Rows()
    step = by_default(model, budget_bytes, report=False)
    with caplog.at_level(logging.INFO, "elixir_compile"):
        for _ in range(2):
            model.zero_grad()
            step(*BATCH).backward()
    found = gradients(model)
    (number,) = set(divided_regions(step)) - {1}
    (record,) = caplog.records
    line = record.getMessage()
    assert record.levelno == logging.WARNING
    assert "dropout draws other numbers" in line
    assert line.startswith(f"in micro-batches: {number} of {64 // number} rows, as the whole batch at once needs ")
    assert line.endswith("; micro_batches=1 forbids it")
    twin = Rows()
    twin.load_state_dict(model.state_dict())
    wanted = loop(twin, number, *BATCH)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    del twin, wanted, found
    model.zero_grad()
    record = elixir.measure_step(lambda: step(*BATCH).backward())
    plan = elixir.compilations(step)[-1].plan
    assert record.device_peak_bytes <= 1.002 * plan.prediction.device_peak_bytes <= 1.002 * budget_bytes
    with pytest.raises(elixir.NoFeasiblePlan):
        by_default(Rows(), budget_bytes, micro_batches=1)(*BATCH)


def test_the_error_names_the_number_that_needs_the_fewest_bytes_and_so_many_are_enough(whole_bytes: int):
    with pytest.raises(elixir.NoFeasiblePlan) as caught:
        by_default(Rows(), 1)(*BATCH)
    needed_bytes, number = caught.value.needed_bytes, caught.value.micro_batches
    assert needed_bytes < whole_bytes
    assert f" in {number} micro-batches, budget 1 B" in str(caught.value)
    step = by_default(Rows(), needed_bytes)
    step(*BATCH).backward()
    assert max(divided_regions(step)) == number


def test_a_plan_made_without_training_is_divided_alike(whole_bytes: int, memory_schedule: MemorySchedules):
    options = {**OPTIONS, "device_memory": int(0.8 * whole_bytes)}
    found = memory_schedule(Rows(), BATCH, **options)
    assert max(region.micro_batches for region in found.plan.regions) > 1
    found.assert_peak_below(options["device_memory"])
    with pytest.raises(elixir.NoFeasiblePlan):
        memory_schedule(Rows(), BATCH, **{**options, "micro_batches": 1})


def test_activations_of_outstanding_forwards_leave_before_the_batch_is_divided(whole_bytes: int):
    """Two forwards are outstanding at once. Both fit whole, as the activations of the first are offloaded."""
    model = Rows()
    step = by_default(model, int(1.3 * whole_bytes))
    (step(*BATCH) + step(*BATCH)).backward()
    assert set(divided_regions(step)) == {1}
