"""Slices of offloaded activations, and micro-batches that are refused or not needed.

The peaks are those of the whole process, so no fixture of this file may keep a model.
"""

import logging
import warnings
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

import elixir_compile as elixir
from elixir_compile.base.errors import IllegalSchedule, InvalidOption
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.ir import Lane, Plan, Saving, fingerprint
from elixir_compile.runtime import lowering as runtime
from elixir_compile.runtime.bucket import live_slab_bytes
from elixir_compile.runtime.executor import Executor
from elixir_compile.step import verify
from elixir_compile.tools.testing import MemorySchedules
from tests.fx.handmade import Choice, from_host, offload, planned
from tests.run.training import OPTIONS, Rows, batch_of, compiled, divided_regions, gradients, loop

NUM, BLOCKS = 8, 3


# ----------------------------------------------------------------------------------------------------------------------
# Offloaded activations that leave and come back in slices: the same gradients, fewer bytes on the device.


def executor(model: Rows) -> Executor:
    found = executor_of(model)
    assert found is not None
    return found


def stepped_in_slices(choose: Choice, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Rows, Any, Plan]:
    """Return a model after one step under a plan by hand, with its compiled form and the plan."""
    with planned(monkeypatch, choose, **options) as plans:
        model = Rows(num_blocks=BLOCKS)
        step = compiled(model, NUM)
        step(*batch_of(64)).backward()
    model.zero_grad()
    return model, step, plans[-1]


@pytest.mark.parametrize(
    ("choose", "waits_late"), [(offload, False), (offload, True), (from_host, False)], ids=["all", "late", "inputs"]
)
def test_gradients_and_counts_are_those_of_wholes_and_the_peak_is_the_planned(
    choose: Choice, waits_late: bool, monkeypatch: pytest.MonkeyPatch
):
    model, step, plan = stepped_in_slices(choose, monkeypatch, waits_late=waits_late)
    batch, ledger = batch_of(64), executor(model).ledger
    times, nbytes = Counter(ledger.times), Counter(ledger.bytes)
    record = elixir.measure_step(lambda: step(*batch).backward())
    times, nbytes = Counter(ledger.times) - times, Counter(ledger.bytes) - nbytes
    away = [group for group in plan.activations if group.saving is Saving.OFFLOAD]
    for lane, verb in ((Lane.D2H, "offload"), (Lane.H2D, "prefetch")):
        assert {f"{verb} {group.id}": 1 for group in away} == {k: n for k, n in times.items() if k.startswith(verb)}
        assert all(nbytes[lane, f"{verb} {group.id}"] == group.nbytes for group in away)
    # The plan counts the state of an optimizer, which this step does not have.
    planned_bytes = plan.prediction.device_peak_bytes - plan.buckets[0].state_nbytes
    assert record.device_peak_bytes == pytest.approx(planned_bytes, rel=1e-3)
    found = gradients(model)
    twin = Rows(num_blocks=BLOCKS)
    twin.load_state_dict(model.state_dict())
    wanted = loop(twin, NUM, *batch)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_second_backward_of_one_forward_reads_the_slices_again(monkeypatch: pytest.MonkeyPatch):
    model, step, _ = stepped_in_slices(offload, monkeypatch)
    loss = step(*batch_of(64))
    loss.backward(retain_graph=True)
    once = gradients(model)
    model.zero_grad()
    loss.backward()
    twice = gradients(model)
    assert all(torch.equal(twice[name], once[name]) for name in once)


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
def test_an_exception_in_the_second_micro_batch_leaves_no_slice_behind(
    in_backward: bool, monkeypatch: pytest.MonkeyPatch
):
    model, step, _ = stepped_in_slices(offload, monkeypatch)
    batch, own = batch_of(64), runtime.slice_of
    step(*batch).backward()
    wanted, slab_bytes = gradients(model), live_slab_bytes()
    model.zero_grad()

    def failing(value: object, read: runtime.Read, number: int, num: int) -> object:
        if number == 1:
            raise RuntimeError("no more memory")
        return own(value, read, number, num)

    for _ in range(3):
        loss = step(*batch) if in_backward else None
        with monkeypatch.context() as patch:
            patch.setattr(runtime, "slice_of", failing)
            with pytest.raises(RuntimeError, match="no more memory"):
                step(*batch) if loss is None else loss.backward()
        del loss
        model.zero_grad()
    assert executor(model).saved.num_outstanding == 0
    step(*batch).backward()
    found = gradients(model)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert live_slab_bytes() == slab_bytes


# ----------------------------------------------------------------------------------------------------------------------
# Micro-batches that cannot be: refused, or run on the whole batch with a warning that says why.


@pytest.mark.parametrize("value", [0, -2, True, 2.5, "8"])
def test_a_value_that_is_no_number_of_micro_batches_is_refused(value: object):
    with pytest.raises(InvalidOption, match=r'option micro_batches: got .*, expected "fit", "auto" or a number'):
        compiled(Rows(), value)(*batch_of(4))


def test_a_number_that_does_not_divide_the_batch_is_refused_with_its_divisors():
    with pytest.raises(InvalidOption, match="expected a divisor of the batch of 16: 1, 2, 4, 8, 16"):
        compiled(Rows(), 6)(*batch_of(16))


def test_evaluation_gives_the_loss_of_the_whole_batch_and_warns_of_nothing():
    model = Rows()
    step = compiled(model, 2)
    step(*batch_of(8)).backward()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        loss = step(*batch_of(8))
        torch.testing.assert_close(loss, model(*batch_of(8)))


def test_a_plan_that_divides_what_mixes_the_batch_is_illegal():
    model, batch = Rows(), batch_of(8)
    step = compiled(model, 2)
    step(*batch).backward()
    compilation = elixir.compilations(step)[-1]
    plan, graph = compilation.plan, compilation.graph
    verify(graph, plan)
    odd = replace(plan, regions=tuple(replace(region, micro_batches=3) for region in plan.regions))
    with pytest.raises(IllegalSchedule, match=r"fwd\.0 runs in 3 micro-batches, but the batch of 8 rows is not"):
        verify(graph, odd)
    first = plan.regions[0].first
    ops = tuple(replace(op, mixes="a test says so", source="x.py:1") if op.id == first else op for op in graph.ops)
    mixing = replace(graph, ops=ops)
    with pytest.raises(IllegalSchedule, match=r"fwd\.0 runs in 2 micro-batches, but .* mixes them: a test says so"):
        verify(mixing, replace(plan, graph=fingerprint(mixing)))


# ----------------------------------------------------------------------------------------------------------------------
# By default a batch runs whole if any plan for it fits the budget, else in as many micro-batches as are planned.


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
