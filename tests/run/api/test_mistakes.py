"""What one rank does alone by mistake is an error on all of them that names what each rank does."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import elixir_compile as elixir
from tests.run.processes import spawn
from tests.run.ranks_training import adamw, compiled_with, hybrid

ROWS = torch.ones(4, 160)


@torch.no_grad()
def evaluates(run: Callable[[torch.Tensor], torch.Tensor]) -> None:
    run(ROWS)


def mistakes(rank: int, world_size: int, folder: str) -> dict[str, str]:
    """Return what each mistake of the first rank ends in on this one, while the others begin a step."""
    mesh, found = init_device_mesh("cpu", (world_size,)), {}
    for name, mistake in {
        "evaluates eagerly": lambda model, compiled, optimizer: evaluates(model),
        "evaluates": lambda model, compiled, optimizer: evaluates(compiled),
        "saves": lambda model, compiled, optimizer: elixir.save(f"{folder}/saved", model, optimizer, step=1),
        "gathers all": lambda model, compiled, optimizer: elixir.full_state_dict(model),
        "weighs": lambda model, compiled, optimizer: elixir.weigh(model, 4),
    }.items():
        model = elixir.prepare(nn.Sequential(nn.Linear(160, 160), nn.Linear(160, 8)), mesh=mesh)
        compiled, optimizer = compiled_with(model), hybrid(model.parameters())
        with pytest.raises(elixir.RanksDiffer) as caught:
            mistake(model, compiled, optimizer) if rank == 0 else compiled(ROWS)
        found[name] = str(caught.value)
    assert not Path(f"{folder}/saved").exists()
    for make in (hybrid, adamw):
        model = nn.Linear(160, 160)
        optimizer = make(model.parameters())
        elixir.prepare(model, mesh=mesh)
        with pytest.raises(elixir.NotPrepared, match="Make the optimizer after `prepare`"):
            optimizer.step()
    return found


def forgets_the_mesh(rank: int, world_size: int) -> str:
    mesh = init_device_mesh("cpu", (world_size,))
    try:
        elixir.prepare(nn.Linear(160, 160), mesh=None if rank else mesh)
    except elixir.PeerFailed as error:
        return str(error)
    return ""


def test_what_the_first_rank_does_alone_is_named_on_all(tmp_path: Path) -> None:
    first, second = spawn(mistakes, 2, str(tmp_path), folder=tmp_path)
    assert first == second
    assert "rank 0 exchanges a parameter, 0.weight, in eager code" in first["evaluates eagerly"]
    assert "rank 1 has a graph of training, rank 0 one of inference" in first["evaluates"]
    assert "rank 0 saves a checkpoint" in first["saves"]
    assert "rank 0 gathers the full state dict" in first["gathers all"]
    assert "rank 0 weighs its batch" in first["weighs"]
    assert all("rank 1 is about to run its first graph" in said for name, said in first.items() if name != "evaluates")
    assert all("call the model, its backward, the optimizer and saves" in said for said in first.values())


def test_a_mesh_on_one_rank_only_is_an_error_there(tmp_path: Path) -> None:
    said, other = spawn(forgets_the_mesh, 2, folder=tmp_path, timeout_s=3.0)
    assert "no answer from rank 1" in said
    assert "prepared on all of them, with the same mesh" in said
    assert other == ""
