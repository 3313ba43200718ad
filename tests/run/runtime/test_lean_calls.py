"""Full and lean calls of a step train as torch does, whatever the order, and lean ones run where no full one may."""

import collections
import functools
import gc
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.ir import BackwardOrder, Plan, Saving
from elixir_compile.step.lean_calls import num_full_calls
from tests.run.lean_plans import pairs_by_hand
from tests.run.pipeline_checks import Stage, loss_of
from tests.run.processes import apart

WIDTH, ROWS, LAYERS = 16, 4, 2
OPTIONS: Mapping[str, Any] = {"inner": "aot_eager", "report": False, "plan_cache": False, "search_timeout": 0.5}
UNPLANNED_BYTES = 4096
"""Step counters, tickets and losses."""
ORDERS = {"all first": "FFFFFBBBBB", "in turn": "FFFBFBFBBB"}


def prepared(order: str, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Stage, Any, Stage]:
    """Return a stage for steps in `order`, its compiled form, and a double that torch trains."""
    torch.manual_seed(0)
    double = Stage(LAYERS, WIDTH).to(dtype)
    torch.manual_seed(0)
    module = Stage(LAYERS, WIDTH).to(dtype)
    outstanding = max(order[:end].count("F") - order[:end].count("B") for end in range(len(order)))
    elixir.prepare(module, outstanding=outstanding, calls=order.count("F"))
    return module, torch.compile(module, backend="elixir", options={**OPTIONS, **options}), double


def step(module: Any, order: str, rows: torch.Tensor, *, takes_last: bool = False) -> None:
    """Run the micro-batches `rows` forward and backward in `order`, each backward that of the last or first forward."""
    waiting: collections.deque[torch.Tensor] = collections.deque()
    unread = iter(rows)
    for letter in order:
        if letter == "F":
            waiting.append(loss_of(module(next(unread)), torch.ones((), dtype=rows.dtype)))
        else:
            (waiting.pop() if takes_last else waiting.popleft()).backward()


def assert_same_gradients(module: nn.Module, double: nn.Module, within: float) -> None:
    for own, other in zip(module.parameters(), double.parameters(), strict=True):
        assert own.grad is not None
        assert other.grad is not None
        assert (own.grad - other.grad).abs().max().item() <= within


@pytest.mark.parametrize("lean", ["recompute", "offload"])
@pytest.mark.parametrize("name", ORDERS)
def test_training_is_that_of_torch_in_each_order(name: str, lean: str) -> None:
    order, rows = ORDERS[name], torch.randn(5, ROWS, WIDTH, dtype=torch.float64)
    module, compiled, double = prepared(order)
    with pairs_by_hand(lean, 2) as plans:
        for takes_last in (False, True):
            step(compiled, order, rows, takes_last=takes_last)
            step(double, order, rows, takes_last=takes_last)
            assert_same_gradients(module, double, 1e-12)
            module.zero_grad()
            double.zero_grad()
    assert plans[-1].lean is not None
    saving = Saving.RECOMPUTE if lean == "recompute" else Saving.OFFLOAD
    assert saving in {group.saving for group in plans[-1].lean.activations}
    assert executor_of(module).saved.num_outstanding == 0


@pytest.mark.parametrize("lean", ["recompute", "offload"])
@pytest.mark.parametrize("name", ORDERS)
def test_in_fp32_gradients_are_bitwise_those_of_aot_eager(name: str, lean: str) -> None:
    order, rows = ORDERS[name], torch.randn(5, ROWS, WIDTH)
    module, compiled, double = prepared(order, torch.float32)
    exact = torch.compile(double, backend="aot_eager")
    with pairs_by_hand(lean, 1):
        for takes_last in (False, True):
            step(compiled, order, rows, takes_last=takes_last)
            step(exact, order, rows, takes_last=takes_last)
            assert_same_gradients(module, double, 0.0)
            module.zero_grad()
            double.zero_grad()


@pytest.mark.parametrize("name", ORDERS)
def test_as_many_ops_run_again_as_there_are_lean_calls(name: str) -> None:
    order, rows = ORDERS[name], torch.randn(5, ROWS, WIDTH, dtype=torch.float64)
    module, compiled, _ = prepared(order)
    with pairs_by_hand("recompute", 2) as plans:
        step(compiled, order, rows)
    module.zero_grad()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiled:
        step(compiled, order, rows)
    counts = collections.Counter(event.name for event in profiled.events())
    num_lean = 5 - num_full_calls(plans[-1].calls, 2)
    assert num_lean == {"all first": 3, "in turn": 1}[name]
    assert counts["aten::gelu"] == LAYERS * (5 + num_lean)


def test_offloads_are_those_of_lean_calls() -> None:
    order, rows = ORDERS["all first"], torch.randn(5, ROWS, WIDTH, dtype=torch.float64)
    module, compiled, _ = prepared(order)
    with pairs_by_hand("offload", 3) as plans:
        step(compiled, order, rows)
    assert plans[-1].lean is not None
    offloaded = sum(group.saving is Saving.OFFLOAD for group in plans[-1].lean.activations)
    counts = executor_of(module).ledger.counts
    assert (counts["offload"], counts["prefetch"]) == (2 * offloaded, 2 * offloaded)


def test_a_forward_that_is_dropped_or_in_evaluation_takes_no_place_of_a_full_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order, rows = "FFFBBB", torch.randn(3, ROWS, WIDTH, dtype=torch.float64)
    module, compiled, double = prepared(order)
    ran = kinds_of(module, monkeypatch)
    with pairs_by_hand("recompute", 1):
        step(compiled, order, rows)
        assert ran() == [False, True, True]
        compiled(rows[0])  # dropped
        with torch.no_grad():
            assert torch.equal(compiled(rows[0]), double(rows[0]))
        asked = rows[0].clone().requires_grad_()
        torch.autograd.grad(compiled(asked).sum(), [asked])
        module.zero_grad()
        step(compiled, order, rows)
        assert ran()[-3:] == [False, True, True]
    step(double, order, rows)
    assert_same_gradients(module, double, 1e-12)


def test_after_an_exception_the_next_forward_is_a_full_one(monkeypatch: pytest.MonkeyPatch) -> None:
    order, rows = "FFFBBB", torch.randn(3, ROWS, WIDTH, dtype=torch.float64)
    module, compiled, double = prepared(order)
    ran = kinds_of(module, monkeypatch)
    with pairs_by_hand("recompute", 1):
        step(compiled, order, rows)
        waiting = [compiled(x).sum() for x in rows]
        with torch.no_grad():
            module.h[0].up.weight.mul_(1.0)
        with pytest.raises(elixir.StaleParameters):
            waiting[1].backward()
        module.zero_grad()
        step(compiled, order, rows)
    assert ran() == [False, True, True] * 3
    step(double, order, rows)
    assert_same_gradients(module, double, 1e-12)
    del waiting
    assert executor_of(module).saved.num_outstanding == 0


def test_a_lean_forward_whose_saved_tensors_hooks_copy_runs_its_own_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(2, ROWS, WIDTH, dtype=torch.float64)
    module, compiled, double = prepared("FFBB")
    ran = kinds_of(module, monkeypatch)
    with pairs_by_hand("recompute", 1):
        first = loss_of(compiled(rows[0]), rows[0])
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda packed: packed):
            second = loss_of(compiled(rows[1]), rows[1])
        second.backward()
        first.backward()
    assert ran() == [False, True]
    for x in rows:
        loss_of(double(x), x).backward()
    assert_same_gradients(module, double, 1e-12)


def kinds_of(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[bool]]:
    """Return a function that returns, for each forward of a call of `module` since, whether it was a lean one."""
    calls, seen = executor_of(module).calls, list[bool]()
    note = calls.note_forward

    def noted(number: int, *, is_lean: bool) -> None:
        seen.append(is_lean)
        note(number, is_lean=is_lean)

    monkeypatch.setattr(calls, "note_forward", noted)
    return lambda: seen


@pytest.mark.slow
@pytest.mark.parametrize("lean", ["recompute", "offload"])
def test_inductor_trains_as_aot_eager_does(lean: str) -> None:
    order, rows = ORDERS["in turn"], torch.randn(5, ROWS, WIDTH, dtype=torch.float64)
    module, compiled, double = prepared(order, inner="inductor")
    with pairs_by_hand(lean, 2):
        step(compiled, order, rows)
    step(double, order, rows)
    assert_same_gradients(module, double, 1e-12)


def peaks(order: str, options: Mapping[str, Any], width: int = 32, rows: int = 256) -> tuple[Plan, int, int]:
    """Return the plan of a settled step, its measured peak and the times of gelu; run in a process of its own."""
    own = Stage(3, width)
    outstanding = max(order[:end].count("F") - order[:end].count("B") for end in range(len(order)))
    elixir.prepare(own, outstanding=outstanding, calls=order.count("F"))
    calls = executor_of(own).calls
    calls.spec = replace(calls.spec, backward_order=BackwardOrder.FIRST_FIRST)  # as of a schedule of torch
    compiled = torch.compile(own, backend="elixir", options={**OPTIONS, **options})
    optimizer = elixir.HybridAdamW(own.parameters(), lr=1e-3)
    batch = torch.randn(order.count("F"), rows, width)

    def run() -> None:
        step(compiled, order, batch)
        optimizer.step()
        optimizer.zero_grad()

    run()
    run()
    gc.collect()
    record = elixir.measure_step(run, device="cpu")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiled:
        run()
    plan = elixir.compilations(own)[-1].plan
    assert plan is not None
    return plan, record.device_peak_bytes, sum(event.name == "aten::gelu" for event in profiled.events())


@functools.cache
def kept_bytes(order: str) -> int:
    """Return the peak of a step that keeps all activations."""
    return apart(peaks, order, {})[0].prediction.device_peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "share", "lean"),
    [
        ("F" * 8 + "B" * 8, 0.8, "recompute"),
        ("F" * 8 + "B" * 8, 0.9, "offload"),
        ("FFFF" + "BF" * 6 + "BBBB", 0.9, "recompute"),
    ],
)
def test_a_budget_that_cannot_keep_all_is_kept_by_some(order: str, share: float, lean: str) -> None:
    budget_bytes = int(share * kept_bytes(order))
    plan, measured_bytes, num_gelu = apart(peaks, order, {"activations": lean, "device_memory": budget_bytes})
    planned_bytes = plan.prediction.device_peak_bytes
    assert plan.lean is not None
    assert planned_bytes <= budget_bytes
    assert measured_bytes <= budget_bytes + UNPLANNED_BYTES
    assert abs(measured_bytes / planned_bytes - 1) <= 0.01
    recomputed = [
        sum("gelu" in name for own in groups if own.saving is Saving.RECOMPUTE for name in own.storages)
        for groups in (plan.activations, plan.lean.activations)
    ]
    num, num_full = plan.calls.num, num_full_calls(plan.calls, plan.lean.num_full)
    assert num_gelu == 3 * num + num_full * recomputed[0] + (num - num_full) * recomputed[1]
