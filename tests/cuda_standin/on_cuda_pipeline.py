"""Stages of a pipeline, a process and a device for each rank: what torch's allocator holds keeps the rank's budget."""

import gc
import itertools
import warnings
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

import elixir_compile as elixir
from elixir_compile.session.allocator_gaps import SEGMENT_BYTES
from elixir_compile.session.machine import library_bytes
from tests.cuda_standin.on_cuda_nccl import ranks
from tests.run.pipeline_checks import DEFAULTS, LOOPED, loss_of
from tests.run.processes import spawn
from tests.run.training import fused_adamw, hybrid_adamw

WIDTHS = (64, 256, 96, 160, 128, 224, 80, 192, 64)
"""Of the layers of a stage."""
ROWS, NUM_MICRO_BATCHES = 1 << 16, 4
"""A micro-batch has tensors of 4 to 16 MiB."""
NUM_STEPS, NUM_FIRST = 9, 6
SHARE = 0.5
Budget = int | Literal["torch"] | None
"""The budget of a rank in bytes; "torch" trains without Elixir."""


class Layers(nn.Sequential):
    """The layers of one stage."""

    def __init__(self) -> None:
        pairs = itertools.pairwise(WIDTHS)
        super().__init__(*itertools.chain.from_iterable((nn.Linear(a, b), nn.GELU()) for a, b in pairs))


def compiled(module: nn.Module, budget: Budget) -> Any:
    if budget == "torch":
        return torch.compile(module.cuda(), backend="aot_eager")
    options = {**DEFAULTS, "device_memory": budget}
    return torch.compile(elixir.prepare(module, device="cuda"), backend="elixir", options=options)


def steps(rank: int, num_ranks: int, group: Any, name: str, budget: Budget, num: int) -> dict[str, Any]:
    """Train `num` steps by the schedule `name`.

    Return the losses, what the allocator held beside the whole batch in each step, and the peak of the plans."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    num_stages = num_ranks * (2 if name in LOOPED else 1)
    torch.manual_seed(0)
    modules = [Layers() for _ in range(num_stages)][rank::num_ranks]
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(ROWS, WIDTHS[0], generator=generator).cuda() for _ in range(2))
    before_bytes = torch.cuda.memory_reserved()  # the whole batch is the caller's
    stages = [
        PipelineStage(compiled(module, budget), number, num_stages, x.device, group=group)
        for number, module in zip(range(rank, num_stages, num_ranks), modules, strict=True)
    ]
    schedule = getattr(pipelining, name)(stages if name in LOOPED else stages[0], NUM_MICRO_BATCHES, loss_fn=loss_of)
    if budget != "torch":
        for module in modules:
            elixir.prepare(module, outstanding=schedule)
    adamw = fused_adamw if budget == "torch" else hybrid_adamw
    optimizers = [adamw(module.parameters()) for module in modules]
    found: dict[str, Any] = {"losses": [], "held": []}
    for _ in range(num):
        losses: list[torch.Tensor] = []
        torch.cuda.reset_peak_memory_stats()
        schedule.step(*([x] if rank == 0 else []), **({"target": y, "losses": losses} if rank == num_ranks - 1 else {}))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        found["losses"] += [loss.item() for loss in losses]
        found["held"].append(torch.cuda.max_memory_reserved() - before_bytes)
    if budget != "torch":
        found["planned"] = elixir.compilations(modules[0])[-1].rank_peak_bytes
    return found


def in_a_budget(rank: int, num_ranks: int, name: str) -> dict[str, Any]:
    """Train by torch, then by Elixir in `SHARE` of what the rank needs beside the workspaces of libraries."""
    with ranks(rank, "early") as mesh, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        group = mesh.get_group()
        by_torch = steps(rank, num_ranks, group, name, "torch", NUM_STEPS)
        outside_bytes = library_bytes(torch.device("cuda", rank))
        full = steps(rank, num_ranks, group, name, None, 1)
        budget = outside_bytes + int(SHARE * (full["planned"] - outside_bytes))
        found = steps(rank, num_ranks, group, name, budget, NUM_STEPS)
    return {"budget": budget, "torch": by_torch, "full": full, "tight": found}


@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_the_allocator_of_each_rank_keeps_its_budget(name: str, tmp_path: Path) -> None:
    """Each rank has one stage, or two, whose plans share its budget."""
    for found in spawn(in_a_budget, 2, name, folder=tmp_path, limit_s=400):
        print(name, found["budget"], found["tight"]["planned"], found["tight"]["held"])
        assert found["tight"]["losses"] == found["torch"]["losses"]
        assert found["tight"]["planned"] <= found["budget"] < found["full"]["planned"]
        assert max(found["tight"]["held"][NUM_FIRST:]) <= found["budget"] + SEGMENT_BYTES
