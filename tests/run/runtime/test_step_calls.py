"""Steps of several calls, full and lean: numbers, orders, errors, and calls that are none of the step."""

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
from elixir_compile.base.errors import (
    IncompleteStep,
    InvalidOption,
    PlanMismatch,
    TooManyForwards,
    UnsupportedBackward,
    UnsupportedModel,
)
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.ir import BackwardOrder, Plan, Saving
from elixir_compile.step.plan_rows import num_full_calls
from tests.run.pipeline_checks import ALL_ON_THE_HOST, Block, Stage, loss_of
from tests.run.processes import apart
from tests.run.updating import pairs_by_hand

# ----------------------------------------------------------------------------------------------------------------------
# Steps of several calls: numbers, errors, exceptions in the middle, and calls that are none of the step.


OPTIONS = {"inner": "aot_eager", "report": False, "plan_cache": False}


class Pair(nn.Module):
    """Two layers; the gradient of both biases of the first is the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
        self.more = nn.Parameter(torch.zeros(8))
        self.skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return self.second(torch.tanh(hidden if self.skips else hidden + self.more))


def prepared(**calls: Any) -> tuple[Pair, Any, Pair]:
    """Return a stage, its compiled form, and a double that torch trains."""
    torch.manual_seed(0)
    double = Pair()
    torch.manual_seed(0)
    module = elixir.prepare(Pair(), **calls)
    assert isinstance(module, Pair)
    return module, torch.compile(module, backend="elixir", options=OPTIONS), double


def mean_square_of(module: Any, x: torch.Tensor) -> torch.Tensor:
    return module(x).square().mean()


def broken(module: Pair, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(module.first(x) + module.more)
    torch._dynamo.graph_break()
    return module.second(hidden).square().mean()


def assert_same_gradients(module: nn.Module, double: nn.Module) -> None:
    for own, other in zip(module.parameters(), double.parameters(), strict=True):
        assert own.grad is not None
        assert other.grad is not None
        assert torch.equal(own.grad, other.grad)


@pytest.mark.parametrize("order", ["FFFBBB", "FFBFBB", "FBFBFB"])
def test_gradients_appear_after_the_last_backward(order: str) -> None:
    most = max(order[:end].count("F") - order[:end].count("B") for end in range(6))
    module, compiled, double = prepared(outstanding=most, calls=3)
    rows = list(torch.randn(3, 2, 4))
    for step in range(2):
        waiting = []
        for number, letter in enumerate(order):
            if letter == "F":
                waiting.append(mean_square_of(compiled, rows[order[:number].count("F")]))
            else:
                assert all(param.grad is None for param in module.parameters())
                waiting.pop(0).backward()
        for x in rows:
            mean_square_of(double, x).backward()
        assert_same_gradients(module, double)
        module.zero_grad()
        double.zero_grad()
        assert executor_of(module).ledger.counts["reduce"] == (step + 1) * len(
            elixir.compilations(module)[-1].plan.buckets
        )


def test_micro_batches_of_several_sizes_are_calls_of_one_step() -> None:
    """Each size is a graph of its own."""
    module, compiled, double = prepared(outstanding=3)
    rows = [torch.randn(size, 4) for size in (3, 3, 2)]
    for _ in range(2):
        for loss in [mean_square_of(compiled, x) for x in rows]:
            assert all(param.grad is None for param in module.parameters())
            loss.backward()
        for x in rows:
            mean_square_of(double, x).backward()
        assert_same_gradients(module, double)
        module.zero_grad()
        double.zero_grad()


def test_calls_on_both_sides_of_a_graph_break_are_counted_apart() -> None:
    module, _, double = prepared(outstanding=2)
    compiled = torch.compile(lambda x: broken(module, x), backend="elixir", options=OPTIONS)
    rows = list(torch.randn(2, 2, 4))
    for loss in [compiled(x) for x in rows]:
        loss.backward()
    for x in rows:
        broken(double, x).backward()
    assert_same_gradients(module, double)


def test_calls_that_train_nothing_are_no_calls_of_the_step() -> None:
    module, compiled, double = prepared(outstanding=2)
    rows = list(torch.randn(2, 2, 4))
    asked = torch.randn(2, 4, requires_grad=True)
    torch.autograd.grad(mean_square_of(compiled, asked), [asked])
    mean_square_of(compiled, rows[0])  # dropped
    first = mean_square_of(compiled, rows[0])
    with torch.no_grad():
        assert torch.equal(compiled(rows[0]), double(rows[0]))
    second = mean_square_of(compiled, rows[1])
    first.backward()
    second.backward()
    for x in rows:
        mean_square_of(double, x).backward()
    assert_same_gradients(module, double)


def test_after_an_exception_the_next_forward_begins_a_step() -> None:
    module, compiled, double = prepared(outstanding=2)
    rows = list(torch.randn(2, 2, 4))
    for x in rows:  # the plan is made
        mean_square_of(compiled, x).backward()
    module.zero_grad()
    first, second = (mean_square_of(compiled, x) for x in rows)
    first.backward()
    with torch.no_grad():
        module.second.weight.mul_(1.0)  # stale for the second backward, which raises
    with pytest.raises(elixir.StaleParameters):
        second.backward()
    del first, second
    for x in rows:
        mean_square_of(compiled, x).backward()
        mean_square_of(double, x).backward()
    assert_same_gradients(module, double)


def test_more_forwards_than_said_are_refused() -> None:
    module, compiled, _ = prepared(outstanding=2, calls=4)
    x = torch.randn(2, 4)
    kept = [mean_square_of(compiled, x), mean_square_of(compiled, x)]
    with pytest.raises(TooManyForwards, match=r"at most 2 outstanding forwards.*outstanding=3, calls=4"):
        mean_square_of(compiled, x)
    assert len(kept) == 2
    assert all(param.grad is None for param in module.parameters())


def test_an_update_before_the_last_backward_is_refused() -> None:
    module, compiled, _ = prepared(outstanding=1, calls=3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    mean_square_of(compiled, torch.randn(2, 4)).backward()
    with pytest.raises(ValueError, match="before the first call"):
        elixir.weigh(module, num_samples=2)
    with pytest.raises(IncompleteStep, match="after 1 of 3 backward passes"):
        optimizer.step()


def test_after_an_incomplete_step_the_next_forward_begins_a_step() -> None:
    """As if other code raised an exception between two calls: this model sees nothing of it before the update."""
    module, compiled, double = prepared(outstanding=1, calls=3)
    other = elixir.prepare(nn.Linear(4, 4), outstanding=1, calls=3)
    second = torch.compile(other, backend="elixir", options=OPTIONS)
    optimizer = torch.optim.SGD([*module.parameters(), *other.parameters()], lr=0.0)
    rows = list(torch.randn(3, 2, 4))
    for _ in range(2):  # of the step that is not ended
        mean_square_of(compiled, rows[0]).backward()
        mean_square_of(second, rows[0]).backward()
    optimizer.zero_grad()
    for x in rows:
        mean_square_of(compiled, x).backward()
        mean_square_of(second, x).backward()
    with pytest.raises(IncompleteStep, match=r"after 2 of 3 backward passes.*the next forward begins a new step"):
        optimizer.step()
    optimizer.zero_grad()
    for x in rows:
        mean_square_of(compiled, x).backward()
        mean_square_of(second, x).backward()
        mean_square_of(double, x).backward()
    optimizer.step()
    assert_same_gradients(module, double)


def hooked(param: nn.Parameter, where: str, hook: Any) -> Any:
    """Register `hook` on `param`, or on the node that accumulates its gradient; return what removes it."""
    if where == "parameter":
        return param.register_hook(hook).remove
    held = [torch.autograd.graph.get_gradient_edge(param).node]
    getattr(held[0], where)(hook)
    return held.clear


@pytest.mark.parametrize("where", ["parameter", "register_hook", "register_prehook"])
def test_a_hook_that_autograd_calls_in_each_backward_is_refused(where: str) -> None:
    module, compiled, double = prepared(outstanding=2)
    rows, seen = list(torch.randn(2, 2, 4)), []
    remove = hooked(module.first.weight, where, lambda *grads: seen.append(grads))
    waiting = [mean_square_of(compiled, x) for x in rows]
    with pytest.raises(
        UnsupportedBackward, match=r"a hook on .* of first\.weight in a step of 2 calls.*post_accumulate"
    ):
        waiting[0].backward()
    assert not seen
    remove()
    del waiting
    for x in rows:
        mean_square_of(compiled, x).backward()
        mean_square_of(double, x).backward()
    assert_same_gradients(module, double)


def test_a_hook_after_accumulation_runs_once_with_the_gradient_of_the_step() -> None:
    module, compiled, double = prepared(outstanding=2, calls=3)
    rows, seen = list(torch.randn(3, 2, 4)), []
    module.more.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
    optimizers = [torch.optim.SGD([own.second.weight], lr=0.1) for own in (module, double)]
    module.second.weight.register_post_accumulate_grad_hook(lambda _: optimizers[0].step())
    given = rows[0].clone().requires_grad_()
    given.register_hook(lambda _: 1 // 0)
    mean_square_of(compiled, rows[0]).backward()
    with pytest.raises(ZeroDivisionError):  # and the hooks are still there in the next step
        mean_square_of(compiled, given).backward()
    assert not seen
    for _ in range(2):
        for x in rows:
            mean_square_of(compiled, x).backward()
            mean_square_of(double, x).backward()
        optimizers[1].step()
        assert len(seen) == 1
        assert torch.equal(seen.pop(), double.more.grad)
        assert_same_gradients(module, double)
        assert torch.equal(module.second.weight, double.second.weight)
        module.zero_grad()
        double.zero_grad()


def test_a_hook_that_is_removed_after_an_exception_does_not_come_back() -> None:
    module, compiled, _ = prepared(outstanding=1, calls=2)
    x, seen = torch.randn(2, 4), []
    names = ("removed", "kept")
    handles = [module.more.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name)) for name in names]
    given = x.clone().requires_grad_()
    given.register_hook(lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        mean_square_of(compiled, given).backward()
    handles[0].remove()
    for _ in range(2):
        mean_square_of(compiled, x).backward()
    assert seen == ["kept"]


def test_a_hook_runs_if_the_last_call_has_no_gradient_for_its_parameter() -> None:
    module, compiled, double = prepared(outstanding=1, calls=2)
    x, seen = torch.randn(2, 4), []
    module.more.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
    for module.skips, double.skips in ((False, False), (True, True)):
        assert not seen
        mean_square_of(compiled, x).backward()
        mean_square_of(double, x).backward()
    assert len(seen) == 1
    assert torch.equal(seen[0], double.more.grad)


@pytest.mark.parametrize("order", ["FFBFBFBB", "FFFFBBBB"])
@pytest.mark.parametrize("home", ["device", "host"])
def test_gradients_in_16_bits_are_summed_over_the_calls_in_fp32(order: str, home: str) -> None:
    """Bit for bit the sums in fp32 of the gradients that the micro-batches have one by one in 16 bits."""
    double = Block(64).bfloat16()
    module, most = Block(64), 4 if "FFFF" in order else 2
    module.load_state_dict(double.state_dict())
    elixir.prepare(module, param_dtype="bfloat16", outstanding=most, calls=4)
    optimizer = elixir.HybridAdamW(module.parameters())
    options = {**OPTIONS, "reduce_dtype": "float32", **(ALL_ON_THE_HOST if home == "host" else {})}
    compiled = torch.compile(module, backend="elixir", options=options)
    exact = torch.compile(double, backend="aot_eager")
    rows = list(torch.randn(4, 8, 64, dtype=torch.bfloat16))
    for _ in range(2):
        forwards, waiting = iter(rows), []
        for letter in order:
            if letter == "F":
                waiting.append(mean_square_of(compiled, next(forwards)))
            else:
                waiting.pop(0).backward()
        sums = {name: torch.zeros(param.shape) for name, param in double.named_parameters()}
        for x in rows:
            mean_square_of(exact, x).backward()
            for name, param in double.named_parameters():
                sums[name] += param.grad
                param.grad = None
        for name, param in module.named_parameters():
            assert param.grad.dtype == torch.float32
            assert torch.equal(param.grad, sums[name])
        optimizer.zero_grad()
    assert {placement.param.value for placement in elixir.compilations(module)[-1].plan.placements} == {home}


def test_a_split_backward_is_refused() -> None:
    module, compiled, _ = prepared(outstanding=2)
    x = torch.randn(2, 4)
    kept = [mean_square_of(compiled, x), mean_square_of(compiled, x)]
    with pytest.raises(UnsupportedBackward, match=r"chosen parameters in a step of 2 calls.*split backward"):
        torch.autograd.grad(kept[0], [module.first.weight])


def test_a_second_backward_of_a_forward_is_refused() -> None:
    _, compiled, _ = prepared(outstanding=2)
    loss = mean_square_of(compiled, torch.randn(2, 4))
    loss.backward(retain_graph=True)
    with pytest.raises(UnsupportedBackward, match="second backward"):
        loss.backward()


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ({"outstanding": 0}, "outstanding"),
        ({"outstanding": True}, "outstanding"),
        ({"outstanding": -3, "calls": 4}, "outstanding"),
        ({"outstanding": 4, "calls": 3}, "calls"),
        ({"calls": 3}, "calls"),
        ({"outstanding": "ScheduleGPipe"}, "ScheduleGPipe, Schedule1F1B"),
    ],
)
def test_unusable_numbers_are_refused(calls: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidOption, match=said):
        elixir.prepare(Pair(), **calls)


def test_a_stage_without_parameters_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="no parameter"):
        elixir.prepare(nn.Tanh(), "cpu", outstanding=2)


def test_calls_cannot_change_after_the_first_step() -> None:
    module, compiled, _ = prepared(outstanding=1, calls=2)
    mean_square_of(compiled, torch.randn(2, 4)).backward()
    elixir.prepare(module, outstanding=1, calls=2)
    with pytest.raises(UnsupportedModel, match="for steps of 2 calls, 1 outstanding, and cannot change to 3 calls"):
        elixir.prepare(module, outstanding=3)


def test_calls_cannot_be_named_after_a_forward_that_saved_activations() -> None:
    module, compiled, double = prepared()
    x = torch.randn(2, 4)
    compiled(x)
    with pytest.raises(UnsupportedModel, match=r"a forward of it was planned for steps of 1 call, .*torch\.no_grad"):
        elixir.prepare(module, outstanding=2)
    module, compiled, double = prepared()
    with torch.no_grad():
        compiled(x)
    elixir.prepare(module, outstanding=2)
    for loss in [mean_square_of(compiled, x), mean_square_of(compiled, x)]:
        loss.backward()
        mean_square_of(double, x).backward()
    assert_same_gradients(module, double)


def test_the_plan_of_another_number_of_calls_is_refused(tmp_path: Any) -> None:
    module, compiled, _ = prepared(outstanding=2)
    kept = [mean_square_of(compiled, torch.randn(2, 4)) for _ in range(2)]
    plan = elixir.compilations(module)[-1].plan
    elixir.save_plan(plan, tmp_path / "plan.json")
    assert elixir.load_plan(tmp_path / "plan.json") == plan
    assert "calls 2  outstanding 2" in str(plan)
    assert "2 calls, 2 outstanding" in elixir.explain(plan)
    other = torch.compile(
        elixir.prepare(Pair()), backend="elixir", options={**OPTIONS, "plan": str(tmp_path / "plan.json")}
    )
    with pytest.raises(PlanMismatch, match="number of calls in a step"):
        mean_square_of(other, torch.randn(2, 4))
    assert kept


# ----------------------------------------------------------------------------------------------------------------------
# Full and lean calls of a step train as torch does, whatever the order, and lean ones run where no full one may.


WIDTH, ROWS, LAYERS = 16, 4, 2
LEAN_OPTIONS: Mapping[str, Any] = {"inner": "aot_eager", "report": False, "plan_cache": False, "search_timeout": 0.5}
UNPLANNED_BYTES = 4096
"""Step counters, tickets and losses."""
ORDERS = {"all first": "FFFFFBBBBB", "in turn": "FFFBFBFBBB"}


def prepared_stage(order: str, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Stage, Any, Stage]:
    """Return a stage for steps in `order`, its compiled form, and a double that torch trains."""
    torch.manual_seed(0)
    double = Stage(LAYERS, WIDTH).to(dtype)
    torch.manual_seed(0)
    module = Stage(LAYERS, WIDTH).to(dtype)
    outstanding = max(order[:end].count("F") - order[:end].count("B") for end in range(len(order)))
    elixir.prepare(module, outstanding=outstanding, calls=order.count("F"))
    return module, torch.compile(module, backend="elixir", options={**LEAN_OPTIONS, **options}), double


def step(module: Any, order: str, rows: torch.Tensor, *, takes_last: bool = False) -> None:
    """Run the micro-batches `rows` forward and backward in `order`, each backward that of the last or first forward."""
    waiting: collections.deque[torch.Tensor] = collections.deque()
    unread = iter(rows)
    for letter in order:
        if letter == "F":
            waiting.append(loss_of(module(next(unread)), torch.ones((), dtype=rows.dtype)))
        else:
            (waiting.pop() if takes_last else waiting.popleft()).backward()


def assert_close_gradients(module: nn.Module, double: nn.Module, within: float) -> None:
    for own, other in zip(module.parameters(), double.parameters(), strict=True):
        assert own.grad is not None
        assert other.grad is not None
        assert (own.grad - other.grad).abs().max().item() <= within


@pytest.mark.parametrize("lean", ["recompute", "offload"])
@pytest.mark.parametrize("name", ORDERS)
def test_training_is_that_of_torch_in_each_order(name: str, lean: str) -> None:
    order, rows = ORDERS[name], torch.randn(5, ROWS, WIDTH, dtype=torch.float64)
    module, compiled, double = prepared_stage(order)
    with pairs_by_hand(lean, 2) as plans:
        for takes_last in (False, True):
            step(compiled, order, rows, takes_last=takes_last)
            step(double, order, rows, takes_last=takes_last)
            assert_close_gradients(module, double, 1e-12)
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
    module, compiled, double = prepared_stage(order, torch.float32)
    exact = torch.compile(double, backend="aot_eager")
    with pairs_by_hand(lean, 1):
        for takes_last in (False, True):
            step(compiled, order, rows, takes_last=takes_last)
            step(exact, order, rows, takes_last=takes_last)
            assert_close_gradients(module, double, 0.0)
            module.zero_grad()
            double.zero_grad()


@pytest.mark.parametrize("name", ORDERS)
def test_as_many_ops_run_again_as_there_are_lean_calls(name: str) -> None:
    order, rows = ORDERS[name], torch.randn(5, ROWS, WIDTH, dtype=torch.float64)
    module, compiled, _ = prepared_stage(order)
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
    module, compiled, _ = prepared_stage(order)
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
    module, compiled, double = prepared_stage(order)
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
    assert_close_gradients(module, double, 1e-12)


def test_after_an_exception_the_next_forward_is_a_full_one(monkeypatch: pytest.MonkeyPatch) -> None:
    order, rows = "FFFBBB", torch.randn(3, ROWS, WIDTH, dtype=torch.float64)
    module, compiled, double = prepared_stage(order)
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
    assert_close_gradients(module, double, 1e-12)
    del waiting
    assert executor_of(module).saved.num_outstanding == 0


def test_a_lean_forward_whose_saved_tensors_hooks_copy_runs_its_own_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(2, ROWS, WIDTH, dtype=torch.float64)
    module, compiled, double = prepared_stage("FFBB")
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
    assert_close_gradients(module, double, 1e-12)


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
    module, compiled, double = prepared_stage(order, inner="inductor")
    with pairs_by_hand(lean, 2):
        step(compiled, order, rows)
    step(double, order, rows)
    assert_close_gradients(module, double, 1e-12)


def peaks(order: str, options: Mapping[str, Any], width: int = 32, rows: int = 256) -> tuple[Plan, int, int]:
    """Return the plan of a settled step, its measured peak and the times of gelu; run in a process of its own."""
    own = Stage(3, width)
    outstanding = max(order[:end].count("F") - order[:end].count("B") for end in range(len(order)))
    elixir.prepare(own, outstanding=outstanding, calls=order.count("F"))
    calls = executor_of(own).calls
    calls.spec = replace(calls.spec, backward_order=BackwardOrder.FIRST_FIRST)  # as of a schedule of torch
    compiled = torch.compile(own, backend="elixir", options={**LEAN_OPTIONS, **options})
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
