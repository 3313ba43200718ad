"""Gradients between their production and where they belong: their memory, and the norm that the backward reads."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.graph.ops.gather import GATHER
from elixir_compile.ir import Update
from elixir_compile.optim import hybrid as clipping
from elixir_compile.runtime.bucket import is_slab_memory
from elixir_compile.runtime.executor import Executor
from elixir_compile.runtime.measure import Resident
from elixir_compile.runtime.placed import check_move
from tests.run.models import Stack, seeded, vectors
from tests.run.optim.test_mixed_precision import mixed_run
from tests.run.training import (
    Rows,
    Run,
    assert_offloads,
    assert_same,
    batch_of,
    by_elixir,
    by_torch,
    compiled,
    fused_adamw,
    loss_of,
    tight_bytes,
)
from tests.run.updating import hybrid_run, ladder, rows

# ----------------------------------------------------------------------------------------------------------------------
# The backward reads gradients for `clip_grad_norm_`: the same norm, without a second read, and never a stale one.


BF16, FP32 = torch.bfloat16, torch.float32
TINY = 1e-9
NUM_PARAMS = 7


@contextmanager
def training(dtype: torch.dtype, home: str, update: Update) -> Iterator[tuple[Run, list[torch.Tensor]]]:
    """Yield a run of the ladder under such a plan, and its batches."""
    batches = [batch.to(dtype) for batch in rows(16)]
    make = hybrid_run if dtype is FP32 else mixed_run
    options = {} if dtype is FP32 else {"dtype": dtype}
    with make(ladder(), batches[0], home=home, update=update, **options) as run:
        yield run, batches


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count gradients that are read for a norm, by who reads."""
    found: Counter[str] = Counter()
    sums, each = clipping.sum_of_squares, torch._foreach_norm

    def counted_sum(grad: torch.Tensor) -> float:
        found["sum"] += 1
        return sums(grad)

    def counted_norms(grads: list[torch.Tensor], *args: float) -> tuple[torch.Tensor, ...]:
        found["norm"] += len(grads)
        return each(grads, *args)

    monkeypatch.setattr(clipping, "sum_of_squares", counted_sum)
    monkeypatch.setattr(torch, "_foreach_norm", counted_norms)
    return found


def expected_norm(run: Run) -> torch.Tensor:
    """Return what torch computes now: of fp32 gradients bit for bit, of others in double."""
    grads = [param.grad.clone() for param in run.model.parameters() if param.grad is not None]
    if grads[0].dtype is BF16:
        return torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt().float()
    total = sum(float(grad.double().square().sum()) for grad in grads) ** 0.5
    found = torch.nn.utils.get_total_norm(grads)
    torch.testing.assert_close(found, torch.tensor(total), rtol=1e-6, atol=0, equal_nan=True, check_dtype=False)
    return found


def assert_norm(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Fail unless fp32 norms are the same bits, and others rounded from the same sum."""
    torch.testing.assert_close(found, expected, rtol=0 if dtype is FP32 else 2e-7, atol=0)


@pytest.mark.parametrize(
    ("dtype", "home", "update"),
    [
        (BF16, "host", Update.ACROSS_STEPS),
        (BF16, "device", Update.AFTER_BACKWARD),
        (FP32, "host", Update.AFTER_BACKWARD),
        (FP32, "split", Update.ACROSS_STEPS),
    ],
)
def test_no_gradient_is_read_again(dtype: torch.dtype, home: str, update: Update, reads: Counter[str]) -> None:
    with training(dtype, home, update) as (run, batches):
        for number, num_passes in enumerate([1, 1, 2, 2, 4, 4, 1]):
            reads.clear()
            for batch in batches[:num_passes]:
                loss_of(run.compiled, batch).backward()
            in_backward = reads.total()
            expected = expected_norm(run)
            reads.clear()
            assert_norm(run.optimizer.clip_grad_norm_(1e-3), expected, dtype)
            if number in (1, 3, 5):  # as many passes as in the step before
                assert (in_backward, reads.total()) == (NUM_PARAMS, 0)
            else:
                assert reads.total() == NUM_PARAMS
            run.optimizer.step()
            run.optimizer.zero_grad()


def test_gradients_are_read_early_only_while_clipping(reads: Counter[str]) -> None:
    with training(BF16, "host", Update.AFTER_BACKWARD) as (run, batches):
        run.train(batches[:2])
        assert not reads
        loss_of(run.compiled, batches[2]).backward()
        run.optimizer.clip_grad_norm_(1.0)
        run.optimizer.step()
        run.optimizer.zero_grad()
        reads.clear()
        run.train(batches[3:12])
        assert reads.total() == NUM_PARAMS


def unscaled(run: Run) -> None:
    """Do what `GradScaler.unscale_` does, which leaves versions alone."""
    grads = [param.grad for param in run.model.parameters()]
    torch._amp_foreach_non_finite_check_and_unscale_(grads, torch.zeros(1), torch.full((1,), 0.25))


def replaced(run: Run) -> None:
    run.model.steps[1].weight.grad = torch.randn_like(run.model.steps[1].weight)


def dropped(run: Run) -> None:
    run.model.steps[1].weight.grad = None


CHANGES: dict[str, Callable[[Run], object]] = {
    "in place": lambda run: run.model.steps[1].weight.grad.mul_(3.0),
    "past the version": lambda run: run.model.steps[2].weight.grad.data.mul_(3.0),
    "unscaled": unscaled,
    "replaced": replaced,
    "dropped": dropped,
    "nan": lambda run: run.model.steps[0].bias.grad.fill_(float("nan")),
    "inf": lambda run: run.model.steps[0].bias.grad.fill_(float("inf")),
    "clipped by torch": lambda run: torch.nn.utils.clip_grad_norm_(run.model.parameters(), TINY),
}


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_changed_gradient_is_read_again(dtype: torch.dtype, reads: Counter[str]) -> None:
    with training(dtype, "host", Update.AFTER_BACKWARD) as (run, batches):
        for name, change in {"nothing": lambda run: None, **CHANGES}.items():
            loss_of(run.compiled, batches[0]).backward()
            change(run)
            expected = expected_norm(run)
            reads.clear()
            norm = run.optimizer.clip_grad_norm_(1.0)
            if expected.isfinite():
                assert_norm(norm, expected, dtype)
            else:
                torch.testing.assert_close(norm, expected, equal_nan=True)
            if name in ("in place", "replaced"):
                assert reads.total() == 1, name
            run.optimizer.zero_grad()


def test_gradients_come_out_as_torchs(reads: Counter[str]) -> None:
    with training(FP32, "host", Update.AFTER_BACKWARD) as (run, batches):
        for bad, max_norm in ((1.0, 1e-3), (1.0, 1e-3), (1.0, 1e3), (float("inf"), 1e-3), (float("nan"), 1e3)):
            loss_of(run.compiled, batches[0] * bad).backward()
            params, twins = list(run.model.parameters()), copy.deepcopy(list(run.model.parameters()))
            for param, twin in zip(params, twins, strict=True):
                twin.grad = param.grad.clone()
            expected = torch.nn.utils.clip_grad_norm_(twins, max_norm)
            found = run.optimizer.clip_grad_norm_(max_norm)
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
            for param, twin in zip(params, twins, strict=True):
                torch.testing.assert_close(param.grad, twin.grad, rtol=0, atol=0, equal_nan=True)
            run.optimizer.zero_grad()


def test_parameters_outside_of_the_model_count(reads: Counter[str]) -> None:
    with training(BF16, "host", Update.AFTER_BACKWARD) as (run, batches):
        other = nn.Parameter(torch.ones(3))
        run.optimizer.add_param_group({"params": [other]})
        for _ in range(3):
            loss_of(run.compiled, batches[0]).backward()
            other.grad = torch.full((3,), 5.0)
            expected = (expected_norm(run).double() ** 2 + 75.0).sqrt().float()
            reads.clear()
            assert_norm(run.optimizer.clip_grad_norm_(1.0), expected, BF16)
            run.optimizer.zero_grad()
        assert reads.total() == 1


def test_norms_that_fp32_cannot_hold_are_computed_again_in_double() -> None:
    """A device says infinity of 1e25 and nothing of 1e-25; what is on the host says more."""
    for value in (1e25, 1e-25):
        param = nn.Parameter(torch.zeros(4))
        param.grad = torch.full((4,), value)
        known = {id(param): torch.linalg.vector_norm(param.grad)}
        assert clipping.sum_of_all_squares([param], known) == pytest.approx(4 * value**2, rel=1e-6)
    param.grad.fill_(1.0)
    assert clipping.sum_of_all_squares([param], {id(param): torch.tensor(3.0)}) == 9.0


# ----------------------------------------------------------------------------------------------------------------------
# Gradients and optimizer state between their production and where they belong.


def test_each_parameter_of_a_sum_has_a_gradient_of_its_own() -> None:
    executor = Executor(torch.device("cpu"), "sum")
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    slots = [executor.add_slot(str(index), param) for index, param in enumerate(params)]
    first, second = (GATHER(slot.handle(), [4], [1], slot.key) for slot in slots)
    (first + second).sum().backward()
    params[0].grad.mul_(3)
    assert params[1].grad.tolist() == [1, 1, 1, 1]


def test_gradients_that_accumulate_take_turns_in_two_slabs() -> None:
    model, batches = seeded(Stack), vectors(8)
    run = by_elixir(model, device_memory=tight_bytes(model, batches[0]))
    seen: set[int] = set()

    def step(compiled: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            loss = loss_of(compiled, batch)
            loss.backward()
        seen.add(run.model.head._parameters["weight"].grad.data_ptr())
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run.train(batches, step)
    assert_offloads(run)
    assert len(seen) <= 2
    assert all(is_slab_memory(address) for address in seen)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_model_cast_after_its_capture_is_refused(dtype: torch.dtype) -> None:
    model, batches = seeded(Stack), vectors(1)
    for budget in (None, tight_bytes(model, batches[0])):
        run = by_elixir(model, device_memory=budget).train(batches)
        run.model.to(dtype)
        with pytest.raises(elixir.UnsupportedModel, match=f"torch.float32 .* and is {dtype}"):
            run.compiled(batches[0])


def test_nobody_else_holds_the_autograd_nodes_of_a_model() -> None:
    run = by_elixir(seeded(Stack), device_memory=None).train(vectors(2))
    slots = [slot for slot in executor_of(run.model).slots.values() if slot.param.requires_grad]
    assert not any(slot.has_node_holders for slot in slots)
    held = slots[0].param.expand_as(slots[0].param).grad_fn.next_functions[0][0]
    assert [slot.has_node_holders for slot in slots] == [True] + [False] * (len(slots) - 1)
    del held
    assert not slots[0].has_node_holders


@pytest.mark.parametrize("is_held", [True, False])
def test_hooks_on_an_autograd_node_that_a_move_would_lose_are_refused(is_held: bool) -> None:
    executor = Executor(torch.device("cpu"), "moved")
    param = torch.nn.Parameter(torch.ones(4, device="meta"))  # a device apart from the host
    slot = executor.add_slot("weight", param)
    node = param.expand_as(param).grad_fn.next_functions[0][0] if is_held else None
    slot.find_node()
    with pytest.raises(elixir.UnsupportedModel, match=r"weight .* another autograd node") if is_held else nullcontext():
        check_move([slot], [slot], executor.sites)
    del node


def groups(params: Any) -> list[dict[str, Any]]:
    """Weights decay, biases do not: two groups that share every bucket."""
    params = list(params)
    matrices = [param for param in params if param.dim() > 1]
    return [{"params": matrices}, {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0}]


def test_loaded_state_of_every_group_goes_where_the_plan_says() -> None:
    model, batches = seeded(Stack), vectors(4)
    expected = by_torch(model, optimizer=lambda params: fused_adamw(groups(params))).train(batches)

    def hybrid(params: Any) -> torch.optim.Optimizer:
        return elixir.HybridAdamW(groups(params), lr=1e-2)

    run = by_elixir(model, optimizer=hybrid, device_memory=tight_bytes(model, batches[0])).train(batches[:2])
    saved = {name: value.clone() for name, value in run.optimizer.state_dict()["state"][0].items()}
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    assert all(torch.equal(value, run.optimizer.state_dict()["state"][0][name]) for name, value in saved.items())
    run.train(batches[2:])
    assert_offloads(run)
    assert_same(expected, run)
    entries = run.optimizer.state.values()
    assert all(is_slab_memory(entry[name].data_ptr()) for entry in entries for name in ("exp_avg", "exp_avg_sq"))


def test_state_that_was_dropped_starts_from_zero() -> None:
    model, batches = seeded(Stack), vectors(2)
    run = by_elixir(model, device_memory=tight_bytes(model, batches[0]))
    plain = by_torch(model)
    for batch in batches:
        for each in (plain, run):
            each.train([batch])
            each.optimizer.state.clear()
    assert_offloads(run)
    assert_same(plain, run)


# ----------------------------------------------------------------------------------------------------------------------
# The memory of gradients: it is free once a gradient has other memory.


def resident_bytes() -> int:
    with Resident() as resident:
        return resident.nbytes


def test_a_gradient_that_gets_other_memory_leaves_none_behind():
    """So do gradients that stay, as zeros or as sums, if their bucket moves to the host."""
    model, batch = Rows(), batch_of(4)
    compiled(model, 1)(*batch).backward()
    params = list(model.parameters())
    grads_bytes = sum(param.grad.nbytes for param in params)
    before_bytes = resident_bytes()
    for param in params:
        param.grad.data = param.data  # memory that is there in any case
    assert before_bytes - resident_bytes() == grads_bytes
