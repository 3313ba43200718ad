"""Loading takes no more memory of a process than what it keeps and a tensor on its way."""

import gc
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import elixir_compile as elixir
from elixir_compile.graph.ops.shards import own_part
from tests.run.processes import spawn
from tests.run.ranks_checks import most_resident_bytes

WIDTH, NUM_LAYERS = 768, 24
TENSOR_BYTES = 4 * WIDTH * WIDTH
MORE_BYTES = 12 * 2**20
"""Python's own, the blocks in which files are compared with their checksums, and pages that are not full."""


def training(rank: int, mesh: object) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(rank)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))
    model = elixir.prepare(model, "cpu", mesh=mesh)
    return model, elixir.HybridAdamW(model.parameters(), lr=1e-3)


def saves(path: Path) -> None:
    model, optimizer = training(9, None)
    model(torch.ones(2, WIDTH)).square().mean().backward()
    optimizer.step()
    elixir.save(path, model, optimizer, step=1)


def loads(rank: int, world_size: int, path: str) -> list[int]:
    """Return the bytes that a load adds at most, and those that it leaves."""
    model, optimizer = training(rank, init_device_mesh("cpu", (world_size,)))
    gc.collect()
    before_bytes = most_resident_bytes(afresh=True)
    assert elixir.load(path, model, optimizer).step == 1
    most_bytes = most_resident_bytes() - before_bytes
    states = optimizer.state_dict()["state"].values()
    kept_bytes = sum(own_part(value).nbytes for own in states for value in own.values() if value.numel() > 1)
    return [most_bytes, kept_bytes]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel tells no peak since a moment")
def test_ranks_load_a_checkpoint_of_one_process_tensor_by_tensor(tmp_path: Path) -> None:
    saves(tmp_path / "run")
    for most_bytes, kept_bytes in spawn(loads, 2, str(tmp_path / "run"), folder=tmp_path):
        # Two moments of half of each weight; weights are read into themselves.
        assert kept_bytes == 2 * NUM_LAYERS * TENSOR_BYTES // 2
        assert most_bytes < kept_bytes + 2 * TENSOR_BYTES + MORE_BYTES < 3 * NUM_LAYERS * TENSOR_BYTES
