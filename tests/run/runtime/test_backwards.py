"""Forwards and backwards in every order that a training loop uses, hooks, and what an exception leaves behind."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.ir import Tier
from tests.run.models import Stack, seeded, small_gpt2, vectors
from tests.run.training import (
    Run,
    Step,
    assert_offloads,
    assert_same,
    assert_same_tensors,
    by_elixir,
    by_torch,
    hybrid_adamw,
    loss_of,
    plain_step,
    planned_peak_bytes,
    tight_bytes,
)

Compiled = Callable[..., torch.Tensor]


def two_forwards_then_one_backward(compiled: Compiled, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    loss = loss_of(compiled, batch) + 3 * loss_of(compiled, 2 * batch)
    loss.backward()
    return finish(optimizer, loss)


def two_forwards_then_two_backwards(compiled: Compiled, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    first, second = loss_of(compiled, batch), loss_of(compiled, 2 * batch)
    first.backward()
    second.backward()
    return finish(optimizer, first + second)


def two_forwards_then_two_backwards_in_reverse(
    compiled: Compiled, optimizer: torch.optim.Optimizer, batch: Any
) -> torch.Tensor:
    first, second = loss_of(compiled, batch), loss_of(compiled, 2 * batch)
    second.backward()
    first.backward()
    return finish(optimizer, first + second)


def one_forward_whose_graph_is_used_twice(
    compiled: Compiled, optimizer: torch.optim.Optimizer, batch: Any
) -> torch.Tensor:
    loss = loss_of(compiled, batch)
    loss.backward(retain_graph=True)
    loss.backward()
    return finish(optimizer, loss)


def four_micro_batches(compiled: Compiled, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    total = torch.zeros(())
    for part in batch.split(2):
        loss = loss_of(compiled, part) / 4
        loss.backward()
        total += loss.detach()
    return finish(optimizer, total)


def gradients_zeroed_in_place(compiled: Compiled, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    loss = loss_of(compiled, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss


def a_forward_without_backward(compiled: Compiled, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
    loss_of(compiled, 5 * batch)
    return plain_step(compiled, optimizer, batch)


def finish(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> torch.Tensor:
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.parametrize(
    "step",
    [
        two_forwards_then_one_backward,
        two_forwards_then_two_backwards,
        two_forwards_then_two_backwards_in_reverse,
        one_forward_whose_graph_is_used_twice,
        four_micro_batches,
        gradients_zeroed_in_place,
        a_forward_without_backward,
    ],
)
def test_weights_equal_those_of_torch(step: Step) -> None:
    # Without donated buffers, which is how torch runs a graph twice.
    with torch._functorch.config.patch(donated_buffer=False):
        model, batches = seeded(Stack), vectors()
        expected = by_torch(model).train(batches, step)
        # A forward whose backward is still to come holds what it saved; 1.3 times the budget of one is enough for two.
        budget = int(1.3 * tight_bytes(model, batches[0]))
        got = by_elixir(model, device_memory=budget).train(batches, step)
    assert_offloads(got)
    assert_same(expected, got)


def test_hooks_on_parameters_fire_with_the_gradient() -> None:
    model, batches = seeded(Stack), vectors()
    expected = by_torch(model)
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0]))
    seen: dict[int, list[torch.Tensor]] = {}
    for run in (expected, got):
        params = dict(run.model.named_parameters())
        told = seen.setdefault(id(run), [])
        params["head.weight"].register_hook(lambda grad: 2 * grad)
        params["blocks.0.up.weight"].register_hook(lambda grad, told=told: told.append(grad.clone()))
        params["blocks.1.up.bias"].register_post_accumulate_grad_hook(
            lambda param, told=told: told.append(param.grad.clone())
        )
        run.train(batches)
    assert_offloads(got)
    assert_same(expected, got)
    assert len(seen[id(got)]) == 2 * len(batches)
    for ours, theirs in zip(sorted_by_size(seen[id(got)]), sorted_by_size(seen[id(expected)]), strict=True):
        assert torch.equal(ours, theirs)


def sorted_by_size(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return sorted(tensors, key=torch.Tensor.numel)


def test_a_gradient_still_referenced_keeps_its_values() -> None:
    model, batches = seeded(Stack), vectors(4)
    run = by_elixir(model, device_memory=tight_bytes(model, batches[0])).train(batches[:1])
    held: list[tuple[torch.Tensor, torch.Tensor]] = []

    def step(compiled: Compiled, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
        loss = loss_of(compiled, batch)
        loss.backward()
        held.extend((param.grad, param.grad.clone()) for param in run.model.parameters())
        return finish(optimizer, loss)

    run.train(batches[1:], step)
    assert_offloads(run)
    assert all(torch.equal(grad, copied) for grad, copied in held)


def test_a_step_between_forward_and_backward_is_refused() -> None:
    model, batches = seeded(Stack), vectors(4)
    expected = by_torch(model).train(batches[:2])
    got = by_elixir(model, device_memory=int(1.3 * tight_bytes(model, batches[0]))).train(batches[:1])
    loss = loss_of(got.compiled, batches[1])
    loss_of(got.compiled, batches[1]).backward()
    got.optimizer.step()
    with pytest.raises(elixir.StaleParameters, match=r"before `optimizer.step\(\)`"):
        loss.backward()
    got.optimizer.zero_grad()
    assert_same_tensors(expected.weights, got.weights)
    expected.train(batches[2:])
    got.train(batches[2:])
    assert_same_tensors(expected.weights, got.weights)


def test_a_resident_copy_is_never_older_than_its_parameter() -> None:
    model, batches = seeded(Stack), vectors(4)
    expected = by_torch(model).train(batches, a_forward_without_backward)
    full = planned_peak_bytes(by_elixir(model).train(batches[:1]))
    # The paper's rule keeps copies first.
    budget = {"device_memory": int(0.7 * full), "planner": "elixir"}
    got = by_elixir(model, **budget).train(batches, a_forward_without_backward)
    placements = elixir.compilations(got.model)[0].plan.placements
    assert any(placement.param is Tier.HOST and placement.resident for placement in placements)
    assert_same(expected, got)


class Failing(torch.autograd.Function):
    """Passes values through and fails in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("in the backward")


def no_offload_in_flight(run: Run) -> bool:
    executor = executor_of(run.model)
    return all(bucket.gathered is None for bucket in executor.buckets if bucket.is_on_host)


@pytest.mark.parametrize("verb", ["wait", "release"])
def test_an_exception_in_the_forward_leaves_a_usable_model(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = seeded(Stack), vectors(4)
    expected = by_torch(model).train(batches[:3])
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0])).train(batches[:2])
    fail_at_call(got, verb, 2, monkeypatch)
    with pytest.raises(ZeroDivisionError):
        loss_of(got.compiled, batches[3])
    monkeypatch.undo()
    assert no_offload_in_flight(got)
    assert_same(expected, got.train(batches[2:3]))


@pytest.mark.parametrize("verb", ["reduce", "offload", "release"])
def test_an_exception_in_the_backward_leaves_a_usable_model(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = seeded(Stack), vectors(4)
    expected = by_torch(model).train(batches[:3])
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0])).train(batches[:2])
    loss = loss_of(got.compiled, batches[3])
    fail_at_call(got, verb, 2, monkeypatch)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    monkeypatch.undo()
    assert no_offload_in_flight(got)
    assert all(param.grad is None for param in got.model.parameters())
    assert_same(expected, got.train(batches[2:3]))


def fail_at_call(run: Run, verb: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the executor's `verb` fail when it is called the `number`-th time."""
    executor = executor_of(run.model)
    act, calls = getattr(executor, verb), []

    def failing(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == number:
            raise ZeroDivisionError(verb)
        return act(*args)

    monkeypatch.setattr(executor, verb, failing)


def test_an_exception_beside_the_compiled_backward_leaves_a_usable_model() -> None:
    model, batches = seeded(Stack), vectors(4)
    expected = by_torch(model).train(batches[:3])
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0])).train(batches[:2])
    x = batches[3].clone().requires_grad_()
    with pytest.raises(ZeroDivisionError, match="in the backward"):
        loss_of(got.compiled, Failing.apply(x)).backward()
    got.optimizer.zero_grad()
    assert_same(expected, got.train(batches[2:3]))


def test_two_models_of_one_class_do_not_share_parameters() -> None:
    first, second = seeded(Stack), Stack()
    batches = vectors()
    expected = [by_torch(model).train(batches) for model in (first, second)]
    torch._dynamo.reset()
    got = []
    for model in (first, second):
        options = {"inner": "aot_eager", "report": False}
        compiled = torch.compile(model, backend="elixir", options=options)
        got.append(Run(model=model, compiled=compiled, optimizer=hybrid_adamw(model.parameters())))
    for batch in batches:
        for run in got:
            run.train([batch])
    for theirs, ours in zip(expected, got, strict=True):
        assert_same(theirs, ours)
        assert len(elixir.compilations(ours.model)) == 1


@pytest.mark.slow
def test_two_models_in_one_process_train_in_turn() -> None:
    gpt, stack = small_gpt2(), seeded(Stack)
    ids = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 128, (3, 2, 16))]
    expected = by_torch(gpt).train(ids), by_torch(stack).train(vectors())
    budgets = tight_bytes(gpt, ids[0]), tight_bytes(stack, vectors()[0])
    got = by_elixir(gpt, device_memory=budgets[0]), by_elixir(stack, device_memory=budgets[1])
    for batch, vector in zip(ids, vectors(), strict=True):
        got[0].train([batch])
        got[1].train([vector])
    for theirs, ours in zip(expected, got, strict=True):
        assert_offloads(ours)
        assert_same(theirs, ours)


def test_threads_train_one_model_in_turn() -> None:
    model, batches = seeded(Stack), vectors(4)
    expected = by_torch(model).train(batches)
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0]))
    failures: list[BaseException] = []

    def train(batch: torch.Tensor) -> None:
        try:
            got.train([batch])
        except BaseException as error:
            failures.append(error)

    for batch in batches:
        thread = threading.Thread(target=train, args=(batch,))
        thread.start()
        thread.join()
    assert not failures
    assert_offloads(got)
    assert_same(expected, got)


def test_a_second_forward_offloads_the_first_if_both_do_not_fit() -> None:
    """Under the least budget of one, what waits goes to the host, and nothing is left of a forward without backward."""
    model, batches = seeded(Stack), vectors(3)
    expected = by_torch(model).train(batches, two_forwards_then_two_backwards)
    budget_bytes = tight_bytes(model, batches[0])
    got = by_elixir(model, device_memory=budget_bytes).train(batches[:1], two_forwards_then_two_backwards)
    loss_of(got.compiled, batches[0])
    got.train(batches[1:], two_forwards_then_two_backwards)
    assert_same(expected, got)
    assert planned_peak_bytes(got) <= budget_bytes
    assert executor_of(got.model).saved.num_outstanding == 0


def test_gradients_of_inputs_are_those_of_torch() -> None:
    model, batch = seeded(Stack), vectors(1)[0]
    grads = []
    for run in (by_torch(model), by_elixir(model, device_memory=tight_bytes(model, batch))):
        x = batch.clone().requires_grad_()
        nn.functional.mse_loss(loss_of(run.compiled, x), torch.ones(())).backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_retain_graph_works_after_a_backward_without_it(inner: str) -> None:
    """The first backward decides how AOTAutograd compiles it, not what later ones may do."""
    model = Stack()
    compiled = torch.compile(model, backend="elixir", options={"inner": inner, "plan_cache": False, "report": False})
    (batch,) = vectors()[:1]
    for retains in (False, True, False, True):
        model.zero_grad()
        loss = loss_of(compiled, batch)
        loss.backward(retain_graph=retains)
        once = [param.grad.clone() for param in model.parameters()]
        if retains:
            loss.backward()
            for param, grad in zip(model.parameters(), once, strict=True):
                torch.testing.assert_close(param.grad, 2 * grad)
