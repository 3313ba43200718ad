"""Steps of several calls: numbers, errors, exceptions in the middle, and calls that are none of the step."""

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
from tests.run.pipeline_checks import ALL_ON_THE_HOST, Block

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


def loss_of(module: Any, x: torch.Tensor) -> torch.Tensor:
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
                waiting.append(loss_of(compiled, rows[order[:number].count("F")]))
            else:
                assert all(param.grad is None for param in module.parameters())
                waiting.pop(0).backward()
        for x in rows:
            loss_of(double, x).backward()
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
        for loss in [loss_of(compiled, x) for x in rows]:
            assert all(param.grad is None for param in module.parameters())
            loss.backward()
        for x in rows:
            loss_of(double, x).backward()
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
    torch.autograd.grad(loss_of(compiled, asked), [asked])
    loss_of(compiled, rows[0])  # dropped
    first = loss_of(compiled, rows[0])
    with torch.no_grad():
        assert torch.equal(compiled(rows[0]), double(rows[0]))
    second = loss_of(compiled, rows[1])
    first.backward()
    second.backward()
    for x in rows:
        loss_of(double, x).backward()
    assert_same_gradients(module, double)


def test_after_an_exception_the_next_forward_begins_a_step() -> None:
    module, compiled, double = prepared(outstanding=2)
    rows = list(torch.randn(2, 2, 4))
    for x in rows:  # the plan is made
        loss_of(compiled, x).backward()
    module.zero_grad()
    first, second = (loss_of(compiled, x) for x in rows)
    first.backward()
    with torch.no_grad():
        module.second.weight.mul_(1.0)  # stale for the second backward, which raises
    with pytest.raises(elixir.StaleParameters):
        second.backward()
    del first, second
    for x in rows:
        loss_of(compiled, x).backward()
        loss_of(double, x).backward()
    assert_same_gradients(module, double)


def test_more_forwards_than_said_are_refused() -> None:
    module, compiled, _ = prepared(outstanding=2, calls=4)
    x = torch.randn(2, 4)
    kept = [loss_of(compiled, x), loss_of(compiled, x)]
    with pytest.raises(TooManyForwards, match=r"at most 2 outstanding forwards.*outstanding=3, calls=4"):
        loss_of(compiled, x)
    assert len(kept) == 2
    assert all(param.grad is None for param in module.parameters())


def test_an_update_before_the_last_backward_is_refused() -> None:
    module, compiled, _ = prepared(outstanding=1, calls=3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loss_of(compiled, torch.randn(2, 4)).backward()
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
        loss_of(compiled, rows[0]).backward()
        loss_of(second, rows[0]).backward()
    optimizer.zero_grad()
    for x in rows:
        loss_of(compiled, x).backward()
        loss_of(second, x).backward()
    with pytest.raises(IncompleteStep, match=r"after 2 of 3 backward passes.*the next forward begins a new step"):
        optimizer.step()
    optimizer.zero_grad()
    for x in rows:
        loss_of(compiled, x).backward()
        loss_of(second, x).backward()
        loss_of(double, x).backward()
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
    waiting = [loss_of(compiled, x) for x in rows]
    with pytest.raises(
        UnsupportedBackward, match=r"a hook on .* of first\.weight in a step of 2 calls.*post_accumulate"
    ):
        waiting[0].backward()
    assert not seen
    remove()
    del waiting
    for x in rows:
        loss_of(compiled, x).backward()
        loss_of(double, x).backward()
    assert_same_gradients(module, double)


def test_a_hook_after_accumulation_runs_once_with_the_gradient_of_the_step() -> None:
    module, compiled, double = prepared(outstanding=2, calls=3)
    rows, seen = list(torch.randn(3, 2, 4)), []
    module.more.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
    optimizers = [torch.optim.SGD([own.second.weight], lr=0.1) for own in (module, double)]
    module.second.weight.register_post_accumulate_grad_hook(lambda _: optimizers[0].step())
    given = rows[0].clone().requires_grad_()
    given.register_hook(lambda _: 1 // 0)
    loss_of(compiled, rows[0]).backward()
    with pytest.raises(ZeroDivisionError):  # and the hooks are still there in the next step
        loss_of(compiled, given).backward()
    assert not seen
    for _ in range(2):
        for x in rows:
            loss_of(compiled, x).backward()
            loss_of(double, x).backward()
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
        loss_of(compiled, given).backward()
    handles[0].remove()
    for _ in range(2):
        loss_of(compiled, x).backward()
    assert seen == ["kept"]


def test_a_hook_runs_if_the_last_call_has_no_gradient_for_its_parameter() -> None:
    module, compiled, double = prepared(outstanding=1, calls=2)
    x, seen = torch.randn(2, 4), []
    module.more.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
    for module.skips, double.skips in ((False, False), (True, True)):
        assert not seen
        loss_of(compiled, x).backward()
        loss_of(double, x).backward()
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
                waiting.append(loss_of(compiled, next(forwards)))
            else:
                waiting.pop(0).backward()
        sums = {name: torch.zeros(param.shape) for name, param in double.named_parameters()}
        for x in rows:
            loss_of(exact, x).backward()
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
    kept = [loss_of(compiled, x), loss_of(compiled, x)]
    with pytest.raises(UnsupportedBackward, match=r"chosen parameters in a step of 2 calls.*split backward"):
        torch.autograd.grad(kept[0], [module.first.weight])


def test_a_second_backward_of_a_forward_is_refused() -> None:
    _, compiled, _ = prepared(outstanding=2)
    loss = loss_of(compiled, torch.randn(2, 4))
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
    loss_of(compiled, torch.randn(2, 4)).backward()
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
    for loss in [loss_of(compiled, x), loss_of(compiled, x)]:
        loss.backward()
        loss_of(double, x).backward()
    assert_same_gradients(module, double)


def test_the_plan_of_another_number_of_calls_is_refused(tmp_path: Any) -> None:
    module, compiled, _ = prepared(outstanding=2)
    kept = [loss_of(compiled, torch.randn(2, 4)) for _ in range(2)]
    plan = elixir.compilations(module)[-1].plan
    elixir.save_plan(plan, tmp_path / "plan.json")
    assert elixir.load_plan(tmp_path / "plan.json") == plan
    assert "calls 2  outstanding 2" in str(plan)
    assert "2 calls, 2 outstanding" in elixir.explain(plan)
    other = torch.compile(
        elixir.prepare(Pair()), backend="elixir", options={**OPTIONS, "plan": str(tmp_path / "plan.json")}
    )
    with pytest.raises(PlanMismatch, match="number of calls in a step"):
        loss_of(other, torch.randn(2, 4))
    assert kept
