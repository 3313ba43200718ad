"""Options on an accelerator: update modes, masters, disk, activations, profiles, and more than seven steps.

Seven steps are measured before a plan is corrected, so longer runs go on under a plan that knows the device.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import elixir_compile as elixir
from elixir_compile.ir import Tier, Update
from tests.gpu.accelerator import DEVICE, Attention, assert_close, inputs, stack
from tests.run.models import seeded
from tests.run.training import (
    Run,
    assert_offloads,
    by_elixir,
    by_torch,
    hybrid_adamw,
    plain_step,
    scaled_bytes,
    tight_bytes,
)
from tests.run.updating import buckets_of, hybrid_run

pytestmark = pytest.mark.gpu

NUM_STEPS = 9
BF16_RTOL = 2e-2
"""Eight bits of a 16-bit parameter, which the kernels of host and device may round to neighbours."""


@pytest.mark.parametrize("update", [mode.value for mode in Update])
def test_update_modes_by_name_train_as_torch_does(update: Any) -> None:
    """In float64, because nine steps of this model multiply the rounding of float32 updates, which differs between the
    kernels of host and device, by a thousand (measured on an H200: losses 1.8e-3 apart)."""
    model, batches = stack().double(), [batch.double() for batch in inputs(NUM_STEPS)]
    expected = by_torch(model).train(batches)
    options: dict[str, Any] = {"update": update, "planner": "greedy"}
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0], **options), **options).train(batches)
    assert_offloads(got)
    assert elixir.compilations(got.model)[0].plan.update.value == update
    assert_close(expected, got, rtol=1e-9)


@pytest.mark.parametrize(
    ("home", "update", "share"),
    [
        ("split", Update.AFTER_BACKWARD, 0.0),
        ("split", Update.ACROSS_STEPS, 1.0),
        ("host", Update.IN_BACKWARD, 0.5),
        ("host", Update.ACROSS_STEPS, 1.0),
    ],
)
def test_placed_and_streamed_updates_train_as_torch_does(home: str, update: Update, share: float) -> None:
    model, batches = stack(), inputs(4)
    expected = by_torch(model).train(batches)
    with hybrid_run(model, batches[0], home=home, update=update, share=share) as got:
        assert_close(expected, got.train(batches))
        assert any(bucket.placement.streamed for bucket in buckets_of(got)) == bool(share)


@pytest.mark.parametrize("home", ["split disk", "host disk"])
@pytest.mark.parametrize("update", [Update.AFTER_BACKWARD, Update.ACROSS_STEPS])
def test_state_on_disk_trains_as_torch_does(home: str, update: Update, tmp_path: Path) -> None:
    model, batches = stack(), inputs(4)
    expected = by_torch(model).train(batches)
    with hybrid_run(model, batches[0], home=home, update=update, disk_path=tmp_path, disk_check=True) as got:
        assert_close(expected, got.train(batches))
        assert {bucket.placement.optim for bucket in buckets_of(got)} >= {Tier.DISK}


def in_bfloat16(step: Callable[[Run], Run], **options: Any) -> Run:
    """Return a run of a stack of bf16 parameters with masters."""
    model = elixir.prepare(stack(), param_dtype="bfloat16")
    compiled = torch.compile(model, backend="elixir", options={"inner": "aot_eager", "report": False, **options})
    return step(Run(model=model, compiled=compiled, optimizer=hybrid_adamw(model.parameters())))


def test_masters_on_the_host_train_as_masters_on_the_device() -> None:
    batches = [batch.bfloat16() for batch in inputs(4)]

    def train(run: Run) -> Run:
        return run.train(batches)

    expected = in_bfloat16(train)
    peak_bytes = elixir.compilations(expected.model)[0].plan.prediction.device_peak_bytes
    torch._dynamo.reset()
    got = in_bfloat16(train, device_memory=scaled_bytes(expected.model, peak_bytes, 0.6))
    assert_offloads(got)
    assert_close(expected, got, rtol=BF16_RTOL)
    entries = [entry for entry in got.optimizer.state.values() if "master_low" in entry]
    assert {entry["master_low"].device.type for entry in entries} >= {"cpu"}


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload", "any"])
def test_every_treatment_of_activations_trains_as_torch_does(activations: str) -> None:
    model, batches = stack(), inputs(3)
    expected = by_torch(model).train(batches)
    options: dict[str, Any] = {"activations": activations, "planner": "greedy"}
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0], **options), **options).train(batches)
    assert_offloads(got)
    assert_close(expected, got)


def test_profiled_regions_change_no_loss_over_many_steps() -> None:
    model, batches = stack(), inputs(NUM_STEPS)
    expected = by_torch(model).train(batches)
    got = by_elixir(model, profile_regions=True, planner="greedy").train(batches)
    assert_close(expected, got)


def test_attention_with_dropout_is_profiled_and_offloaded() -> None:
    """The seed of its kernel may be on the host."""
    model = seeded(Attention).to(DEVICE).train()
    batches = [torch.randn(2, 64, 128).to(DEVICE) for _ in range(3)]
    options: dict[str, Any] = {"activations": "offload", "planner": "greedy"}
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0], **options), **options).train(batches)
    assert_offloads(got)


def test_a_measured_step_has_spans_of_every_lane_that_works() -> None:
    model, batches = stack(), inputs(NUM_STEPS)
    options: dict[str, Any] = {"planner": "greedy"}
    got = by_elixir(model, device_memory=tight_bytes(model, batches[0], **options), **options).train(batches)
    record = elixir.measure_step(lambda: plain_step(got.compiled, got.optimizer, batches[0]), device=DEVICE)
    lanes = {span.lane.value for span in record.spans}
    assert lanes >= {"compute", "h2d", "d2h"}
    assert all(span.end_s >= span.start_s >= 0 for span in record.spans)
