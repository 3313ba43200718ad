"""A rank that runs more graphs per forward, or more forwards, than the others is found where it does, with its graphs
named."""

import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import elixir_compile as elixir
from tests.run.processes import spawn

TIMEOUT_S = 30.0
NUM_STEPS = 3


class Layers(nn.Module):
    """Two layers, and what may be between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(160, 160), nn.Linear(160, 160)
        self.breaks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.second(x).square().mean()


class Partition(Layers):
    """Two losses, each of a graph of its own."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.first(x).square().mean()
        torch._dynamo.graph_break()
        return first, self.second(x).square().mean()


def trains_other_halves(rank: int, world_size: int) -> str:
    """Train both halves, then another one on each rank, and return what that says."""
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
    model = elixir.prepare(Partition(), mesh=init_device_mesh("cpu", (world_size,)))
    compiled = torch.compile(model, backend="elixir", options={"inner": "aot_eager", "report": False})
    sum(compiled(torch.ones(4, 160))).backward()
    with pytest.raises(elixir.RanksDiffer) as caught:
        compiled(torch.ones(4, 160))[rank].backward()
    return str(caught.value)


def test_gradients_of_different_graphs_are_not_mixed(tmp_path: Path) -> None:
    for said in spawn(trains_other_halves, 2, folder=tmp_path, timeout_s=TIMEOUT_S):
        assert "rank 0 begins the backward of Partition" in said
        assert "rank 1 begins the backward of Partition.1" in said


def differs(rank: int, world_size: int, how: str, first: int) -> list[object]:
    """Train, the last rank otherwise than the others from the step `first` on, and return what it ended with."""
    torch._dynamo.reset()
    # Dynamo looks at the gradient of what goes on behind a break.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
    is_odd = rank == world_size - 1
    model = elixir.prepare(Layers(), mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = elixir.HybridAdamW(model.parameters())
    compiled = torch.compile(model, backend="elixir", options={"inner": "aot_eager", "report": False})
    for step in range(NUM_STEPS):
        began_s = time.monotonic()
        is_other = step >= first and (is_odd or how == "all break")
        model.breaks = is_other and how.endswith("break")
        try:
            loss = compiled(torch.ones(4, 160))
            if is_other and how == "two forwards":
                loss = loss + compiled(torch.ones(4, 160))
            loss.backward()
        except elixir.RanksDiffer as error:
            return [step, list(error.ranks), str(error), time.monotonic() - began_s]
        optimizer.step()
        optimizer.zero_grad()
    return [NUM_STEPS, [], "", 0.0]


@pytest.mark.parametrize(("how", "first"), [("break", 0), ("break", 1), ("two forwards", 1)])
def test_a_call_on_one_rank_alone_is_named_at_once(how: str, first: int, tmp_path: Path) -> None:
    for step, odd, said, waited_s in spawn(differs, 2, how, first, folder=tmp_path, timeout_s=TIMEOUT_S):
        assert (step, odd) == (first, [1])
        assert "rank 0 begins the backward of Layers" in said
        if how == "break":
            assert "rank 1 is about to run Layers." in said
            assert f"(up to the graph break at {__file__}:" in said
        else:
            assert "rank 1 is about to run Layers behind Layers, whose backward is still to come" in said
        assert "call the model" in said
        assert waited_s < TIMEOUT_S / 2


def test_a_graph_break_on_all_ranks_raises_no_error(tmp_path: Path) -> None:
    assert spawn(differs, 2, "all break", 1, folder=tmp_path) == [[NUM_STEPS, [], "", 0.0]] * 2
