"""What updates take besides parameters, gradients and state is planned: the disk's buffers, fp32 sums of gradients."""

import gc
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.ir import Tier, Update
from elixir_compile.runtime.bucket import live_slab_bytes
from elixir_compile.runtime.measure import Resident
from elixir_compile.step.timeline import host_bytes
from tests.run.optim.test_mixed_precision import mixed_of, mixed_run
from tests.run.training import Run, loss_of
from tests.run.updating import hybrid_run, small_buckets

BF16 = torch.bfloat16
WIDTH = 512


class Pair(nn.Module):
    """Two linear layers whose bytes are whole pages; returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x)).square().mean()


NUMEL = sum(param.numel() for param in Pair().parameters())
BLOCK_BYTES = 2 << 20
"""What an addition to a sum widens at once."""
BATCH = torch.ones(1, WIDTH, dtype=BF16)


def step_of(run: Run, num_passes: int, batch: torch.Tensor = BATCH) -> elixir.Record:
    """Measure the second step of so many backward passes."""

    def step() -> None:
        for _ in range(num_passes):
            loss_of(run.compiled, batch).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()

    step()
    run.optimizer.wait()
    return elixir.measure_step(step, device="cpu")


def planned(run: Run) -> Any:
    return elixir.compilations(run.model)[0].plan


@pytest.mark.parametrize("num_passes", [2, 3])
def test_planned_bytes_include_fp32_gradient_sums_on_the_host(num_passes: int) -> None:
    """14 bytes per element of a bfloat16 parameter, the sum, and a second room for gradients."""
    with small_buckets(lambda plan: plan), pytest.raises(elixir.NoFeasiblePlan) as raised:
        loss_of(mixed_of(Pair(), device_memory=1, reduce_dtype="float32").compiled, BATCH).backward()
    gc.collect()
    before_bytes = live_slab_bytes()
    with small_buckets(lambda plan: plan):
        run = mixed_of(Pair(), device_memory=raised.value.needed_bytes, reduce_dtype="float32")
        record = step_of(run, num_passes)
    assert {home.param for home in planned(run).placements} == {Tier.HOST}
    assert planned(run).prediction.host_peak_bytes == 20 * NUMEL
    assert record.host_peak_bytes - before_bytes == 20 * NUMEL


def test_planned_bytes_include_fp32_gradient_sums_on_the_device() -> None:
    gc.collect()
    with Resident() as resident:
        before_bytes = resident.nbytes
    with small_buckets(lambda plan: plan):
        run = mixed_of(Pair(), reduce_dtype="float32")
        record = step_of(run, 3)
        without = mixed_of(Pair())
        loss_of(without.compiled, BATCH).backward()
    prediction = planned(run).prediction
    assert {home.param for home in planned(run).placements} == {Tier.DEVICE}
    assert prediction.device_peak_bytes == planned(without).prediction.device_peak_bytes + 4 * NUMEL
    assert 0.95 * prediction.device_peak_bytes < record.device_peak_bytes - before_bytes
    assert record.device_peak_bytes - before_bytes < prediction.device_peak_bytes + BLOCK_BYTES + 4096


@pytest.mark.parametrize(("dtype", "ring_mib"), [(torch.float32, 50), (BF16, 62)])
def test_planned_bytes_include_staging_buffers_of_the_disk(dtype: torch.dtype, ring_mib: int, tmp_path: Path) -> None:
    def on_disk() -> AbstractContextManager[Run]:
        how: dict[str, Any] = {"home": "host disk", "update": Update.ACROSS_STEPS, "disk_path": tmp_path}
        return hybrid_run(Pair(), batch, **how) if dtype is torch.float32 else mixed_run(Pair(), batch, **how)

    batch = BATCH.to(dtype)
    with on_disk() as run:
        gc.collect()
        before_bytes = live_slab_bytes() - (2 * NUMEL if dtype is BF16 else 0)  # low halves, which go to disk
        record = step_of(run, 1, batch)
        plan = planned(run)
    assert {home.optim for home in plan.placements} == {Tier.DISK}
    held_bytes = record.host_peak_bytes - before_bytes
    expected_bytes = 2 * dtype.itemsize * NUMEL + (ring_mib << 20)
    assert held_bytes <= host_bytes(plan) == expected_bytes
    assert held_bytes > 0.99 * expected_bytes
