"""Moments in fewer bytes on a second device: updated there by torch's ops, on the host by a pass, or streamed."""

import copy
import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import elixir_compile as elixir
from elixir_compile.ir import Update
from elixir_compile.optim.precision import MomentForm, form_of
from tests.device import emulated
from tests.run.optim.test_mixed_precision import ADAM, BF16, mixed_run, recorded
from tests.run.optim.test_narrow_state import NARROW, narrow_adamw, rows, steps
from tests.run.training import Run, assert_same_tensors, loss_of
from tests.run.updating import hybrid_run

DEVICE = torch.device(emulated.NAME, 0)


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
