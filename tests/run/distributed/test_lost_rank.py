"""A rank that dies in the middle of a step is an error on the others, in time; no checkpoint, no plan is at stake."""

import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import elixir_compile as elixir
from tests.run.processes import spawn

TIMEOUT_S = 20.0


def loses_one(rank: int, world_size: int, where: str) -> list[object]:
    """Train one step; in the second, the last rank dies `where`. Return what the others got, and after how long."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(160, 320), nn.GELU(), nn.Linear(320, 320), nn.GELU(), nn.Linear(320, 8))
    elixir.prepare(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = elixir.HybridAdamW(model.parameters())
    compiled = torch.compile(model, backend="elixir", options={"inner": "aot_eager", "report": False})
    began_s = 0.0
    try:
        for step in range(3):
            began_s = time.monotonic()
            is_last = step == 1 and rank == world_size - 1
            if is_last and where == "before the forward":
                os._exit(1)
            loss = compiled(torch.randn(4, 160)).square().mean()
            if is_last and where == "in the backward":
                loss.register_hook(lambda grad: os._exit(1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    except elixir.PeerFailed as error:
        return [step, str(error), time.monotonic() - began_s]
    return [3, "", 0.0]


def test_a_rank_that_dies_in_a_step_is_an_error_on_the_others(tmp_path: Path) -> None:
    for where in ("before the forward", "in the backward"):
        found = spawn(loses_one, 3, where, folder=tmp_path, timeout_s=TIMEOUT_S, lost=[2])
        for step, said, waited_s in found[:2]:
            assert step == 1
            assert "It died, hangs or is late" in said
            assert waited_s < TIMEOUT_S + 5
