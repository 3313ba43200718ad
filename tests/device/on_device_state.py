"""State on a second device: checkpoints, reentrant backwards, its measured machine, and moments in fewer bytes."""

import copy
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import elixir_compile as elixir
from elixir_compile.compat.platforms import platform_of
from elixir_compile.ir import Update
from elixir_compile.optim.precision import MomentForm, form_of
from elixir_compile.optim.state import StateBuffers
from elixir_compile.optim.update import BucketUpdate
from elixir_compile.runtime.bucket import RunningBucket
from elixir_compile.runtime.lanes import Event
from elixir_compile.runtime.updates import Job
from elixir_compile.tools.cli import demo
from elixir_compile.tools.measure import machine as rates
from elixir_compile.tools.measure.machine import measure_machine
from tests.device import emulated
from tests.run.models import ShortStack, seeded, vectors
from tests.run.optim.test_mixed_precision import ADAM, BF16, mixed_run, recorded
from tests.run.optim.test_narrow_state import NARROW, narrow_adamw, rows, steps
from tests.run.training import (
    Run,
    assert_same,
    assert_same_tensors,
    by_elixir,
    by_torch,
    loss_of,
    plain_step,
    tight_bytes,
)
from tests.run.updating import hybrid_run

# ----------------------------------------------------------------------------------------------------------------------
# What else a model does on a second device: alignment, checkpoints, reentrant backwards, its measured machine.


DEVICE = torch.device(emulated.NAME, 0)
PLAIN = {"planner": "greedy", "plan_cache": False, "replan": False}


def model() -> nn.Module:
    return seeded(ShortStack).to(DEVICE)


def batches(num: int = 3) -> list[torch.Tensor]:
    return [batch.to(DEVICE) for batch in vectors(num)]


def test_a_parameter_at_an_odd_address_is_copied_to_an_aligned_one() -> None:
    own = model()
    memory = torch.zeros(own.head.weight.numel() + 1, device=DEVICE)
    odd = memory[1:].view_as(own.head.weight).copy_(own.head.weight.detach())
    own.head.weight = nn.Parameter(odd)
    assert own.head.weight.data_ptr() % 16 == 4
    prepared = elixir.prepare(own)
    compiled = torch.compile(prepared, backend="elixir", options={"inner": "aot_eager", **PLAIN})
    got = compiled(batches(1)[0])
    assert own.head.weight.data_ptr() % 16 == 0
    assert torch.equal(got.cpu(), by_elixir(model(), **PLAIN).compiled(batches(1)[0]).cpu())


def test_prepare_moves_a_model_to_the_device() -> None:
    prepared = elixir.prepare(seeded(ShortStack), device=DEVICE)
    run = torch.compile(prepared, backend="elixir", options={"inner": "aot_eager", **PLAIN})
    loss = run(batches(1)[0])
    loss.backward()
    assert loss.device == DEVICE
    assert all(param.grad is not None for param in prepared.parameters())


@pytest.mark.parametrize("is_tight", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_training_continues_from_a_checkpoint_bitwise(is_tight: bool, tmp_path: Path) -> None:
    options = dict(PLAIN)
    if is_tight:
        options["device_memory"] = tight_bytes(model(), batches()[0], **PLAIN)
    with emulated.policy(emulated.LATE):
        first = by_elixir(model(), **options).train(batches(2))
        elixir.save(tmp_path / "run", model=first.model, optimizer=first.optimizer)
        first.train(batches(3)[2:])
        again = by_elixir(seeded(ShortStack).to(DEVICE), **options)
        elixir.load(tmp_path / "run", model=again.model, optimizer=again.optimizer)
        again.train(batches(3)[2:])
    del first.losses[:2]
    assert_same(first, again)
    whole = elixir.full_state_dict(first.model)
    assert all(value.device.type == "cpu" for value in whole.values())


def test_a_reentrant_backward_onto_leaves_on_the_cpu_and_the_device() -> None:
    """A hook of the backward runs another backward through a second compiled model, as reentrant checkpoints do."""
    outer, inner, on_cpu = by_elixir(model(), **PLAIN), by_elixir(model(), **PLAIN), nn.Linear(4, 1)
    plain_outer, plain_inner = by_torch(model()), by_torch(model())
    batch = batches(1)[0]

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value: torch.Tensor, run: Run) -> torch.Tensor:
            ctx.run = run
            return value.clone()

        @staticmethod
        def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            with torch.enable_grad():
                ctx.run.compiled(batch).backward()
                on_cpu(torch.ones(4)).sum().backward()
            return grad, None

    for first, second in ((outer, inner), (plain_outer, plain_inner)):
        Again.apply(first.compiled(batch), second).backward()
    for ours, theirs in ((outer, plain_outer), (inner, plain_inner)):
        grads = {name: param.grad for name, param in theirs.model.named_parameters()}
        for name, param in ours.model.named_parameters():
            torch.testing.assert_close(param.grad.cpu(), grads[name].cpu(), rtol=1e-5, atol=1e-7)
    assert torch.equal(on_cpu.weight.grad, torch.full((1, 4), 2.0))
    plain_step(outer.compiled, outer.optimizer, batch)


@pytest.mark.slow
def test_a_backward_on_the_device_that_ends_in_parameters_on_the_host() -> None:
    """The published gradients of host buckets are leaves of the CPU, whose thread finishes after the device's."""
    options = {**PLAIN, "device_memory": tight_bytes(model(), batches()[0], **PLAIN)}
    with emulated.policy(emulated.RANDOM, 3):
        run = by_elixir(model(), **options)
        run.compiled(batches(1)[0]).backward()
        homes = {param.device.type for param in run.model.parameters()}
        assert homes >= {"cpu"}
        expected = by_torch(model())
        expected.compiled(batches(1)[0]).backward()
        for (name, ours), theirs in zip(run.model.named_parameters(), expected.model.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.cpu(), theirs.grad.cpu(), msg=name)


@pytest.mark.slow
def test_the_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for sizes in ("_LAYERS", "_POINTWISE_ROWS", "_WIDTHS"):  # those of a GPU would take minutes here
        monkeypatch.setitem(getattr(rates, sizes), "accelerator", getattr(rates, sizes)["host"])
    cluster = measure_machine(DEVICE, seconds=1.0)
    assert cluster.device.memory_bytes == platform_of(DEVICE).total_bytes(DEVICE)
    assert cluster.device.name == platform_of(DEVICE).name(DEVICE)
    assert min(cluster.h2d.bytes_per_s, cluster.d2h.bytes_per_s) > 0


@pytest.mark.slow
def test_the_demo_keeps_its_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SHAPE", demo.Shape(num_layers=3, width=64, num_heads=2, context=32))
    real, eager = torch.compile, {"inner": "aot_eager", "plan_cache": False}
    monkeypatch.setattr(torch, "compile", lambda *model, options, **more: real(*model, options=options | eager, **more))
    assert demo.run_demo(text=None, steps=4) == 0


def test_updates_on_the_host_start_all_their_copies_before_the_first_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of later buckets run beside the update of the first, as the simulator counts them."""
    happened: list[str] = []
    copies, work = StateBuffers.copies, BucketUpdate.work

    def noted_copies(self: StateBuffers, bucket: RunningBucket, *args: Any) -> list[torch.Tensor]:
        happened.append("copy")
        return copies(self, bucket, *args)

    def noted_work(self: BucketUpdate, arrived: Event | None) -> Job:
        update = work(self, arrived)
        return lambda: (happened.append("update"), update())[1]

    options = {**PLAIN, "planner": "zero_offload", "update": "after_backward"}
    expected = by_elixir(model(), **options).train(batches())
    monkeypatch.setattr(StateBuffers, "copies", noted_copies)
    monkeypatch.setattr(BucketUpdate, "work", noted_work)
    with emulated.policy(emulated.LATE):
        got = by_elixir(model(), **options).train(batches())
    assert_same(expected, got)
    num = happened.count("update") // len(batches())
    assert num > 1, "the plan updates one bucket on the host: there is nothing to overlap"
    of_a_step = ["copy"] * (happened.count("copy") // len(batches())) + ["update"] * num
    assert happened == of_a_step * len(batches())


# ----------------------------------------------------------------------------------------------------------------------
# Moments in fewer bytes on a second device: updated there by torch's ops, on the host by a pass, or streamed.


def on_cpu(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def trained(state_dtype: str, home: str, update: Update, share: float = 0.0) -> Run:
    optimizer = functools.partial(narrow_adamw, state_dtype=state_dtype)
    model, batches = steps().to(DEVICE), [batch.to(DEVICE) for batch in rows(4)]
    with (
        emulated.policy(emulated.LATE),
        hybrid_run(model, batches[0], home=home, update=update, share=share, optimizer=optimizer) as run,
    ):
        run.train(batches)
        assert {form_of(state) for state in run.optimizer.state.values()} == {MomentForm(state_dtype)}
        run.losses = [loss.cpu() for loss in run.losses]
        return run


@pytest.mark.parametrize("state_dtype", NARROW)
def test_streamed_moments_are_bitwise_those_on_the_device(state_dtype: str) -> None:
    there = trained(state_dtype, "device", Update.AFTER_BACKWARD)
    streamed = trained(state_dtype, "split", Update.AFTER_BACKWARD, share=1.0)
    assert_same_tensors(on_cpu(there.weights), on_cpu(streamed.weights))
    for own, other in zip(
        there.optimizer.state_dict()["state"].values(), streamed.optimizer.state_dict()["state"].values(), strict=True
    ):
        assert_same_tensors(on_cpu(own), on_cpu(other))


@pytest.mark.parametrize("state_dtype", [NARROW[0], pytest.param(NARROW[1], marks=pytest.mark.slow)])
def test_the_host_and_the_device_round_without_bias(state_dtype: str) -> None:
    """Single operations round in another way on the host, and then the noise of an element is another one too."""
    there = on_cpu(trained(state_dtype, "device", Update.AFTER_BACKWARD).weights)
    on_the_host = on_cpu(trained(state_dtype, "split", Update.ACROSS_STEPS).weights)
    for name, start in steps().state_dict().items():
        moved, apart = there[name] - start, there[name] - on_the_host[name]
        assert apart.abs().mean() <= 0.05 * moved.abs().mean()
        assert apart.mean().abs() <= 0.01 * moved.abs().mean()


class DeviceReads(TorchDispatchMode):
    """Counts the values that the host reads from the device, each of which waits for all work before it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_reads += func is torch.ops.aten._local_scalar_dense.default and args[0].device == DEVICE
        return func(*args, **(kwargs or {}))


def capturable(params: Any) -> torch.optim.Optimizer:
    return elixir.hybrid(torch.optim.NAdam, "bfloat16")(params, lr=1e-2, capturable=True)


@pytest.mark.parametrize("home", ["device", "split"])
@pytest.mark.parametrize(
    "optimizer", [functools.partial(narrow_adamw, state_dtype=NARROW[0]), functools.partial(narrow_adamw), capturable]
)
def test_no_update_on_the_device_waits_for_a_step_counter(optimizer: Any, home: str) -> None:
    model, batches = steps().to(DEVICE), [batch.to(DEVICE) for batch in rows(4)]
    share = 0.0 if home == "device" else 1.0
    with hybrid_run(
        model, batches[0], home=home, update=Update.AFTER_BACKWARD, share=share, optimizer=optimizer
    ) as run:
        run.train(batches[:2])
        loss_of(run.compiled, batches[2]).backward()
        with DeviceReads() as seen:
            run.optimizer.step()
        assert seen.num_reads == 0
        counters = [state["step"] for state in run.optimizer.state.values()]
        for counter in counters:  # as a user who resumes a run
            counter.fill_(7)
        run.optimizer.step()
        assert {int(counter) for counter in counters} == {8}


def test_masters_beside_narrow_moments_on_the_device() -> None:
    adam = {**ADAM, "state_dtype": "int8"}
    batches = [batch.to(DEVICE) for batch in rows(3, BF16)]
    with mixed_run(steps().to(DEVICE), batches[0], adam=adam) as run:
        there = recorded(run, batches)
    with mixed_run(steps().to(DEVICE), batches[0], home="split", share=1.0, adam=adam) as run:
        streamed = recorded(run, batches)
    assert_same_tensors(on_cpu(there.weights), on_cpu(streamed.weights))
    own = copy.copy(there.state["up.weight"])
    assert own["master"].dtype == torch.float32
    assert_same_tensors(on_cpu(own), on_cpu(streamed.state["up.weight"]))
