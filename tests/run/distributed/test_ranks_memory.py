"""Several ranks hold no more at once than their plan says, whatever their gradients count."""

import gc
from pathlib import Path

import torch
from torch import nn

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.runtime.measure import Resident
from tests.run.processes import spawn
from tests.run.ranks_training import compiled_with, hybrid, mesh_of

WIDTH = 1024


def own_peaks(rank: int, world_size: int, batches: list[list[int]]) -> list[dict[str, int]]:
    """Train one matrix, which is a bucket by itself, and small tensors; return bytes of a step for each of `batches`,
    the samples that ranks say they have."""
    gc.collect()
    with Resident() as resident:
        before_bytes = resident.nbytes
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.LayerNorm(WIDTH))
    model = elixir.prepare(model, mesh=mesh_of([world_size]))
    compiled, optimizer = compiled_with(model), hybrid(model.parameters())
    batch = torch.ones(2, WIDTH)

    def step() -> None:
        compiled(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    plan = elixir.compilations(model)[-1].plan
    assert min(len(bucket.params) for bucket in plan.buckets) == 1
    found = []
    for sizes in batches:
        elixir.weigh(model, sizes[rank])
        texts_bytes = sum(text.nbytes for text in executor_of(model).ranks.control._held)
        measured_bytes = elixir.measure_step(step, device="cpu").device_peak_bytes - before_bytes - texts_bytes
        found.append({"measured": measured_bytes, "planned": plan.prediction.device_peak_bytes})
    return found


def test_two_ranks_that_weigh_their_batches_stay_within_the_plan(tmp_path: Path) -> None:
    for own in spawn(own_peaks, 2, [[2, 2], [1, 3], [0, 2]], folder=tmp_path):
        for found in own:
            assert found["measured"] <= found["planned"]
            # A packed copy of the matrix's gradient would not fit in between.
            assert found["planned"] - found["measured"] < 4 * WIDTH * WIDTH
