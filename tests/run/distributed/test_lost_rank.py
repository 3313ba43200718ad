"""A rank that dies in the middle of a step is an error on the others, in time; no checkpoint, no plan is at stake."""

import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import elixir_compile as elixir
from tests.run.processes import spawn

TIMEOUT_S = 20.0


def loses_one(rank: int, world_size: int, where: str, small_bytes: int | None = None) -> list[object]:
    """Train one step; in the second, the last rank dies `where`. Return what the others got, after how long, and how
    many classes of ranks have plans of their own: two if rank 1 has `small_bytes` of device memory."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(160, 320), nn.GELU(), nn.Linear(320, 320), nn.GELU(), nn.Linear(320, 8))
    elixir.prepare(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = elixir.HybridAdamW(model.parameters())
    options: dict[str, object] = {"inner": "aot_eager", "report": False, "plan_cache": small_bytes is None}
    if small_bytes is not None:
        options |= {"device_memory": small_bytes if rank == 1 else 10 * small_bytes, "micro_batches": 1}
    compiled = torch.compile(model, backend="elixir", options=options)
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
        late_s = time.monotonic() - began_s
        classes = [len(made.plan.classes) for made in elixir.compilations(model) if made.plan is not None]
        return [step, str(error), late_s, max(classes)]
    return [3, "", 0.0, 0]


def test_a_rank_that_dies_in_a_step_is_an_error_on_the_others(tmp_path: Path) -> None:
    for where in ("before the forward", "in the backward"):
        found = spawn(loses_one, 3, where, folder=tmp_path, timeout_s=TIMEOUT_S, lost=[2])
        for step, said, waited_s, num_classes in found[:2]:
            assert step == 1
            assert num_classes == 0
            assert "It died, hangs or is late" in said
            assert waited_s < TIMEOUT_S + 5


@pytest.mark.slow  # 5 s of CPU time
def test_a_rank_that_dies_is_an_error_on_ranks_with_other_plans(tmp_path: Path) -> None:
    """The ranks that are left have plans that differ: one keeps all on its device, one does not."""
    for where in ("before the forward", "in the backward"):
        found = spawn(loses_one, 3, where, 1_200_000, folder=tmp_path, timeout_s=TIMEOUT_S, lost=[2])
        for step, said, waited_s, num_classes in found[:2]:
            assert (step, num_classes) == (1, 2)
            assert "It died, hangs or is late" in said
            assert waited_s < TIMEOUT_S + 5
