"""A device with less memory than the plan counts on: training goes on under a plan for less."""

import gc

import pytest
import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.optim import device_masters
from elixir_compile.platforms import platform_of
from tests.device import fakegpu
from tests.run.models import Stack, seeded
from tests.run.training import by_elixir, plain_step, planned_peak_bytes

DEVICE = torch.device(fakegpu.NAME, 0)
PLAIN = {"planner": "greedy", "plan_cache": False}


def test_a_forward_that_does_not_fit_is_planned_again_for_less() -> None:
    model, batches = seeded(Stack, 64).to(DEVICE), [torch.randn(2048, 64).to(DEVICE) for _ in range(3)]
    free = by_elixir(model, **PLAIN).train(batches)
    losses, peak_bytes = [loss.item() for loss in free.losses], planned_peak_bytes(free)
    weights = {name: value.cpu() for name, value in free.model.state_dict().items()}
    plain = elixir.compilations(free.model)[0].plan
    del free
    gc.collect()
    run = by_elixir(model, device_memory=2 * peak_bytes, **PLAIN)
    held_bytes = torch.accelerator.memory_allocated(DEVICE)
    with fakegpu.capacity(held_bytes + peak_bytes // 2):
        run.train(batches)
    (record,) = elixir.compilations(run.model)
    assert record.plan.base_bytes > plain.base_bytes + peak_bytes // 2
    assert [loss.item() for loss in run.losses] == losses
    assert all(torch.equal(weights[name], value.cpu()) for name, value in run.model.state_dict().items())


def test_measuring_keeps_the_peak_that_the_user_reads() -> None:
    before = torch.empty(32 << 20, dtype=torch.uint8, device=DEVICE)
    del before
    peak_bytes = torch.accelerator.max_memory_allocated(DEVICE)
    assert peak_bytes >= 32 << 20
    model, batches = seeded(Stack).to(DEVICE), [torch.randn(8, 64).to(DEVICE) for _ in range(9)]
    run = by_elixir(model, profile_regions=True, report=True, planner="greedy", plan_cache=False).train(batches)
    assert torch.accelerator.max_memory_allocated(DEVICE) == peak_bytes
    record = elixir.measure_step(lambda: run.compiled(batches[0]).backward(), device=fakegpu.NAME)
    assert record.device_peak_bytes < 32 << 20
    assert torch.accelerator.max_memory_allocated(DEVICE) == peak_bytes


def test_measuring_restores_no_peak_that_the_user_reset_meanwhile() -> None:
    before = torch.empty(32 << 20, dtype=torch.uint8, device=DEVICE)
    del before
    model, batches = seeded(Stack).to(DEVICE), [torch.randn(8, 64).to(DEVICE) for _ in range(9)]
    run = by_elixir(model, report=True, planner="greedy", plan_cache=False).train(batches[:5])
    torch.accelerator.reset_peak_memory_stats(DEVICE)
    run.train(batches[5:])
    assert 0 < torch.accelerator.max_memory_allocated(DEVICE) < 32 << 20


def test_a_peak_that_the_allocator_has_no_memory_for_is_not_restored() -> None:
    before = torch.empty(32 << 20, dtype=torch.uint8, device=DEVICE)
    del before
    platform = platform_of(DEVICE)
    with platform.own_peak(DEVICE):
        platform.reset_peak(DEVICE)
        platform.empty_cache()
        held_bytes = platform.reserved_bytes(DEVICE)
    assert platform.reserved_bytes(DEVICE) == held_bytes
    assert platform.user_peak_bytes(DEVICE) < 32 << 20


@pytest.mark.slow
def test_measured_peaks_are_the_bytes_of_tensors_without_roundings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="elixir_compile")
    model, batches = seeded(Stack).to(DEVICE), [torch.randn(8, 64).to(DEVICE) for _ in range(9)]
    foreign_bytes = torch.accelerator.memory_stats(DEVICE)["requested_bytes.all.current"]
    run = by_elixir(model, report=True, planner="greedy", plan_cache=False).train(batches)
    (record,) = elixir.compilations(run.model)
    (line,) = [line for line in caplog.messages if line.startswith("measured  peak")]
    assert "reserved" in line
    measured = elixir.measure_step(lambda: plain_step(run.compiled, run.optimizer, batches[0]), device=fakegpu.NAME)
    stats = torch.accelerator.memory_stats(DEVICE)
    rounded_bytes = stats["allocated_bytes.all.current"] - stats["requested_bytes.all.current"]
    over_bytes = measured.device_peak_bytes - foreign_bytes - record.plan.prediction.device_peak_bytes
    assert abs(over_bytes) < rounded_bytes / 4


@pytest.mark.slow
def test_timing_regions_reseeds_no_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    def seeded_again(seed: int) -> None:
        raise AssertionError("torch.manual_seed changes the generators of all devices")

    model, batch = seeded(Stack).to(DEVICE), torch.randn(8, 64).to(DEVICE)
    run = by_elixir(model, profile_regions=True, planner="greedy", plan_cache=False)
    before = torch.get_rng_state()
    monkeypatch.setattr(torch, "manual_seed", seeded_again)
    run.train([batch])
    assert torch.equal(torch.get_rng_state(), before)


def test_masters_on_the_device_are_updated_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_masters, "BLOCK", 1 << 12)
    model = elixir.prepare(nn.Linear(256, 256, bias=False).to(DEVICE), param_dtype="bfloat16")
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(torch.randn(4, 256, device=DEVICE, dtype=torch.bfloat16)).sum().backward()
        before = torch.accelerator.memory_allocated(DEVICE)
        torch.accelerator.reset_peak_memory_stats(DEVICE)
        optimizer.step()
        optimizer.zero_grad()
    # Gradients are 128 KiB; the temporaries of a whole parameter would be 256 KiB each. Blocks have two and a mask.
    assert torch.accelerator.max_memory_allocated(DEVICE) - before < 2.5 * 4 * (1 << 12) + 4096
