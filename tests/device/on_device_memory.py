"""A device with less memory than the plan counts on: training goes on under a plan for less."""

import gc

import torch

import elixir_compile as elixir
from tests.device import fakegpu
from tests.run.models import Stack, seeded
from tests.run.training import by_elixir, planned_peak_bytes

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
