"""Steps of several calls on ranks of which one leaves a step by an exception: all ranks learn of it at once."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import elixir_compile as elixir
from tests.run.pipeline_checks import DEFAULTS, WIDTH, Stage, loss_of
from tests.run.processes import spawn

ROWS, NUM_CALLS = 4, 4
TIMEOUT_S = 60.0


def leaves_alone(rank: int, world_size: int, outstanding: int) -> dict[str, Any]:
    """Train a step; in the second, rank 0 catches an exception of a backward and goes on; then train a third step.

    Returns what each rank got in the second step and after how long, and how far the weights are from those of one
    process that trains the first and the third step.
    """
    torch.manual_seed(0)
    module, double = Stage(2).double(), Stage(2).double()
    double.load_state_dict(module.state_dict())
    elixir.prepare(module, mesh=init_device_mesh("cpu", (world_size,)), outstanding=outstanding, calls=NUM_CALLS)
    compiled = torch.compile(module, backend="elixir", options=DEFAULTS)
    optimizer = elixir.HybridAdamW(module.parameters(), lr=1e-3)
    double_optimizer = torch.optim.AdamW(double.parameters(), lr=1e-3)
    rows = torch.randn(NUM_CALLS, world_size, ROWS, WIDTH, dtype=torch.float64)
    waiting: list[torch.Tensor] = []

    def forward(number: int) -> None:
        waiting.append(loss_of(compiled(rows[number, rank]), rows[number, rank].flip(0)) / NUM_CALLS)

    def step() -> None:
        waiting.clear()
        for number in range(NUM_CALLS):
            forward(number)
            if number + 1 >= outstanding:
                waiting.pop(0).backward()
        while waiting:
            waiting.pop(0).backward()
        optimizer.step()
        optimizer.zero_grad()
        for part in rows.flatten(0, 1):
            (loss_of(double(part), part.flip(0)) / NUM_CALLS / world_size).backward()
        double_optimizer.step()
        double_optimizer.zero_grad()

    step()
    for number in range(outstanding):
        forward(number)
    waiting.pop(0).backward()
    if outstanding == 1:
        forward(1)
    if rank == 0:
        with torch.no_grad():
            module.h[0].down.weight.add_(0.0)
        with pytest.raises(elixir.StaleParameters):
            waiting.pop(0).backward()
    else:
        waiting.pop(0).backward()
    began_s = time.monotonic()
    with pytest.raises(elixir.RanksDiffer) as caught:
        waiting.pop(0).backward() if waiting else forward(2)
    took_s = time.monotonic() - began_s
    optimizer.zero_grad()
    step()
    weights = [param.full_tensor() for param in module.parameters()]
    apart = max((p - q).abs().max().item() for p, q in zip(weights, double.parameters(), strict=True))
    return {"said": str(caught.value), "took_s": took_s, "apart": apart}


@pytest.mark.parametrize("outstanding", [1, 3])
def test_a_rank_that_leaves_a_step_alone_is_an_error_on_all_ranks_at_once(tmp_path: Path, outstanding: int) -> None:
    for found in spawn(leaves_alone, 2, outstanding, folder=tmp_path, timeout_s=TIMEOUT_S):
        assert found["took_s"] < 5
        if outstanding == 1:
            assert (
                "rank 0 is about to run Stage (call 1 of 4; an exception in call 2 ended the step before)"
                in (found["said"])
            )
            assert "rank 1 is about to run Stage (call 3 of 4)" in found["said"]
        else:
            assert "rank 1 begins the backward of Stage (call 3 of 4)" in found["said"]
        assert "Catch an exception in the middle of a step on all ranks, or on none." in found["said"]
        assert found["apart"] <= 1e-12
