"""Under plans made by hand, activations that are dropped, offloaded or kept give the same training, bit for bit."""

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import elixir_compile as elixir
from elixir_compile.base.errors import ActivationsGone
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.ir import Phase, Saving
from elixir_compile.runtime.bucket import live_slab_bytes
from elixir_compile.runtime.executor import Executor
from elixir_compile.runtime.measure import Resident
from elixir_compile.session import programs
from elixir_compile.step import Depth, Group
from elixir_compile.step.timeline import plan_timeline
from tests.covering import covering
from tests.fx.handmade import CHOICES, from_host, keep, layers_by_saving, mix, offload, planned, to_depth
from tests.run.models import Block, Stack, hf_batches, seeded, small_gpt2, vectors
from tests.run.training import Run, assert_same, by_elixir, by_torch, loss_of, plain_step


def executor(run: Run) -> Executor:
    found = executor_of(run.model)
    assert found is not None
    return found


@functools.cache
def gpt2_by_torch() -> Run:
    return by_torch(small_gpt2()).train(hf_batches())


def assert_close(expected: Run, got: Run) -> None:
    for name, weight in expected.weights.items():
        torch.testing.assert_close(got.weights[name], weight, rtol=1e-5, atol=1e-6, msg=name)


LATE = ("offload", "from_host", "mix")
"""Choices that offload: a plan of the others is the same whether the backward waits late for what leaves or not."""


@pytest.mark.parametrize(
    ("name", "waits_late"),
    [*((name, False) for name in CHOICES), *((name, True) for name in LATE)],
    ids=[*(f"{name}-waits_early" for name in CHOICES), *(f"{name}-waits_late" for name in LATE)],
)
def test_training_is_bitwise_the_same(name: str, waits_late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = hf_batches()
    with planned(monkeypatch, CHOICES[name], waits_late=waits_late) as plans:
        got = by_elixir(small_gpt2()).train(batches)
    assert_same(gpt2_by_torch(), got)
    chosen = layers_by_saving(plans[-1])
    assert Saving.RECOMPUTE in chosen or name == "offload"
    done, num_steps = executor(got).ledger.times, len(batches)
    for group in chosen.get(Saving.OFFLOAD, ()):
        assert (done[f"offload {group}"], done[f"prefetch {group}"]) == (num_steps, num_steps)


@pytest.mark.parametrize(
    ("name", "num_regions"),
    [
        ("from_host", 3),
        *(pytest.param("mix", number, marks=pytest.mark.slow) for number in (1, 3)),
        pytest.param("from_host", 1, marks=pytest.mark.slow),
    ],
)
def test_compiled_training_is_that_of_inductor(name: str, num_regions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = seeded(Stack), vectors()
    expected = by_torch(model, backend="inductor").train(batches)
    with planned(monkeypatch, CHOICES[name], num_regions=num_regions) as plans:
        got = by_elixir(model, inner="inductor").train(batches)
    assert_close(expected, got)
    assert {Saving.RECOMPUTE, Saving.OFFLOAD} <= set(layers_by_saving(plans[-1]))


class Dropping(Stack):
    """Dropout behind every block."""

    def features(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = functional.dropout(block(x), 0.1, self.training)
        return self.head(x)


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_dropout_repeats_the_same_mask(inner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask is kept where it comes from the generator, and drawn again from its seed where it comes from one."""
    model, batches = seeded(Dropping), vectors()
    runs = []
    for choose in (keep, to_depth(Depth.MATMUL), from_host):
        torch.manual_seed(7)
        with planned(monkeypatch, choose) as plans:
            runs.append(by_elixir(model, inner=inner).train(batches))
    assert Saving.RECOMPUTE in layers_by_saving(plans[-1])
    for other in runs[1:]:
        assert_same(runs[0], other) if inner == "aot_eager" else assert_close(runs[0], other)


class Checkpointed(nn.Module):
    """Blocks of which one is recomputed because the user says so, one but for its matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        x = checkpoint(self.blocks[1], x, use_reentrant=False)
        x = checkpoint(self.blocks[2], x, use_reentrant=False, context_fn=_save_products)
        return self.blocks[3](x).square().mean()


def _policy(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    is_product = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def _save_products() -> Any:
    return create_selective_checkpoint_contexts(_policy)


@pytest.mark.parametrize("name", ["matmul", "fixed", "from_host"])
def test_the_users_own_checkpoints_are_honoured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = seeded(Checkpointed), vectors()
    expected = by_torch(model).train(batches)
    with planned(monkeypatch, CHOICES[name]) as plans:
        got = by_elixir(model).train(batches)
    assert_same(expected, got)
    assert Saving.RECOMPUTE in layers_by_saving(plans[-1])


def two_forwards(compiled: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    first, second = compiled(batch), compiled(2 * batch)
    first.backward()
    second.backward()
    optimizer.step()
    optimizer.zero_grad()
    return first + second


def accumulate(compiled: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    losses = []
    for scale in (1.0, 2.0, 3.0, 4.0):
        losses.append(compiled(scale * batch))
        losses[-1].backward()
    optimizer.step()
    optimizer.zero_grad()
    return sum(losses, start=torch.zeros(()))


def backward_twice(compiled: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    loss = compiled(batch)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.parametrize(
    ("name", "step"), covering(["offload", "from_host"], [two_forwards, accumulate, backward_twice])
)
def test_forwards_have_their_own_host_memory(
    name: str, step: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batches = seeded(Stack), vectors()
    expected = by_torch(model).train(batches, step)
    with planned(monkeypatch, CHOICES[name]):
        got = by_elixir(model).train(batches, step)
    assert_same(expected, got)


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_new_plan_leaves_outstanding_forwards_their_plan(inner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second forward is planned anew, because the first still holds activations. In the next step both are
    planned once more, because the second backward found the gradients of the first."""
    model, batches = seeded(Stack), vectors()
    expected = by_torch(model, backend=inner).train(batches, two_forwards)
    turns = [to_depth(Depth.MATMUL), offload]

    def choose(group: Group) -> Saving | None:
        return turns[min(len(plans), len(turns) - 1)](group)

    with planned(monkeypatch, choose) as plans:
        got = by_elixir(model, inner=inner).train(batches, two_forwards)
    savings = [set(layers_by_saving(plan)) for plan in plans]
    assert savings == [{Saving.KEEP, Saving.RECOMPUTE}, *[{Saving.OFFLOAD}] * 3]
    assert [plan.counts_staying_gradients for plan in plans] == [False, False, True, True]
    assert_same(expected, got) if inner == "aot_eager" else assert_close(expected, got)


def test_slabs_are_used_again_and_return(monkeypatch: pytest.MonkeyPatch) -> None:
    before = live_slab_bytes()
    model, batches = seeded(Stack), vectors(6)
    with planned(monkeypatch, offload) as plans:
        run = by_elixir(model).train(batches[:2])
        held = live_slab_bytes() - before
        run.train(batches[2:])
        assert live_slab_bytes() - before == held
    groups = layers_by_saving(plans[-1])[Saving.OFFLOAD]
    planned_bytes = sum(group.nbytes for group in plans[-1].activations)
    assert planned_bytes <= held <= planned_bytes + len(groups) * 2 * 4096
    executor(run).saved.drop_free_slabs()
    assert live_slab_bytes() == before


def test_an_exception_between_forward_and_backward_leaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = live_slab_bytes()
    model, (batch, *_) = seeded(Stack), vectors()
    with planned(monkeypatch, offload):
        run = by_elixir(model).train([batch])
        loss = run.compiled(batch)
        assert executor(run).saved.device_bytes() == 0 < live_slab_bytes() - before
        with pytest.raises(ZeroDivisionError):
            _fail(loss)
        del loss
    gc.collect()
    executor(run).saved.drop_free_slabs()
    assert live_slab_bytes() == before
    run.train([batch])


def _fail(loss: torch.Tensor) -> None:
    raise ZeroDivisionError(str(loss.item()))


def test_views_of_activations_that_are_not_saved_hold_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward of GPT-2 ends with the transposes of the saved inputs of all products."""
    with Resident() as earlier:  # the models that earlier tests of this process keep
        earlier_bytes = earlier.nbytes
    ids = torch.randint(128, (16, 64))
    batch = {"input_ids": ids, "labels": ids}
    with planned(monkeypatch, to_depth(Depth.POINTWISE)):
        run = by_elixir(small_gpt2()).train([batch])
    record = elixir.measure_step(lambda: loss_of(run.compiled, batch))
    (compilation,) = elixir.compilations(run.model)
    num_ops = sum(op.phase is Phase.FORWARD for op in compilation.graph.ops)
    planned_bytes = max(plan_timeline(compilation.graph, compilation.plan).live_bytes[:num_ops])
    assert record.device_peak_bytes - earlier_bytes == pytest.approx(planned_bytes, rel=0.01)


def test_a_backward_whose_ticket_was_packed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (batch, *_) = seeded(Stack), vectors()
    with planned(monkeypatch, offload):
        run = by_elixir(model).train([batch])
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda packed: packed):
            loss = run.compiled(batch)
        with pytest.raises(ActivationsGone, match="saved-tensor hooks"):
            loss.backward()
        run.optimizer.zero_grad()
        plain_step(run.compiled, run.optimizer, batch)


def test_recomputation_alone_works_under_saved_tensor_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = seeded(Stack), vectors()

    def step(compiled: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda packed: packed):
            loss = compiled(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    expected = by_torch(model).train(batches, step)
    with planned(monkeypatch, to_depth(Depth.MATMUL)):
        assert_same(expected, by_elixir(model).train(batches, step))


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_batches_of_changing_size(inner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = seeded(Stack)
    batches = [batch for rows in (8, 6, 12) for batch in vectors(1, rows=rows)]
    for batch in batches:
        torch._dynamo.mark_dynamic(batch, 0)
    expected = by_torch(model, backend=inner).train(batches)
    with planned(monkeypatch, mix) as plans:
        got = by_elixir(model, inner=inner).train(batches)
    assert_same(expected, got) if inner == "aot_eager" else assert_close(expected, got)
    assert plans[-1].symbols == () or len(plans) > 1
    assert {Saving.RECOMPUTE, Saving.OFFLOAD} <= set(layers_by_saving(plans[-1]))


@pytest.fixture
def storages(monkeypatch: pytest.MonkeyPatch) -> dict[str, weakref.ref]:
    """What regions of the forward made, by the name of the value: weak references to storages."""
    seen: dict[str, weakref.ref] = {}

    class Watched(programs.PlacedRegion):
        def __init__(self, compiled: Any, lanes: Any, ledger: Any, label: str) -> None:
            super().__init__(compiled, lanes, ledger, label)
            self.label = label

        def forward(self, box: list[Any]) -> Any:
            results = super().forward(box)
            if self.label.startswith("run fwd"):
                for place, value in enumerate(results):
                    seen[f"{self.label}[{place}]"] = weakref.ref(value.untyped_storage())
            return results

    monkeypatch.setattr(programs, "PlacedRegion", Watched)
    return seen


@pytest.mark.parametrize("name", ["keep", "offload", "from_host"])
def test_activations_not_kept_are_freed_after_the_forward(
    name: str, storages: dict[str, weakref.ref], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (batch, *_) = seeded(Stack), vectors()
    with planned(monkeypatch, {"keep": keep, **CHOICES}[name]):
        run = by_elixir(model).train([batch])
        storages.clear()
        loss = run.compiled(batch)
    alive = [storage for reference in storages.values() if (storage := reference()) is not None]
    nbytes = sum({storage._cdata: storage.nbytes() for storage in alive}.values()) - loss.nbytes
    assert nbytes == executor(run).saved.device_bytes()
    assert (nbytes == 0) == (name != "keep")
    loss.backward()
