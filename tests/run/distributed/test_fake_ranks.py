"""A prepared model on a process group that is none: its plan for any number of ranks, without a cluster.

Each group has a process of its own: a process has one default group.
"""

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import elixir_compile as elixir
from tests.run.processes import apart


def prepared(model: nn.Module, num_ranks: int) -> nn.Module:
    """Return `model` as the first of so many ranks has it."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    return elixir.prepare(model, mesh=init_device_mesh("cpu", (num_ranks,)))


def planned_for_many() -> list[int]:
    """Return the ranks of a plan, the bytes of one rank's shards as planned, and its bytes as they are."""
    model = prepared(nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)), 256)
    options = {"inner": "aot_eager", "report": False, "plan_cache": False}
    compiled = torch.compile(model, backend="elixir", options=options)
    compiled(torch.randn(4, 512)).square().mean().backward()
    plan = elixir.compilations(compiled)[-1].plan
    shards_bytes = sum(bucket.shard_nbytes() for bucket in plan.buckets)
    return [plan.num_ranks, shards_bytes, sum(param.to_local().nbytes for param in model.parameters())]


def test_a_model_is_planned_for_256_ranks() -> None:
    num_ranks, planned_bytes, own_bytes = apart(planned_for_many)
    # 4 rows of 512 floats and 2 of 1024, and of the biases 4 and 2 elements: 256 copies of 2 KiB are too many.
    assert num_ranks == 256
    assert planned_bytes == own_bytes == 4 * (4 * 512 + 2 * 1024 + 4 + 2)


def writes_in_the_graph() -> str:
    """Return the error about an embedding that scales its rows in the forward."""
    model = prepared(nn.Sequential(nn.Embedding(64, 64, max_norm=1.0), nn.Linear(64, 64)), 2)
    compiled = torch.compile(model, backend="elixir", options={"inner": "aot_eager", "report": False})
    with pytest.raises(elixir.UnsupportedModel) as caught:
        compiled(torch.arange(4))
    return str(caught.value)


def test_several_ranks_refuse_a_forward_that_writes_a_parameter() -> None:
    said = apart(writes_in_the_graph)
    assert "0.weight is not supported: the forward writes it (embedding), and several ranks share it" in said


class Broken(nn.Module):
    """Two graphs, and between them eager code that reads one parameter and writes those it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Linear(256, 256), nn.Linear(256, 4)
        self.written: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.large(x)
        self.touch()
        return self.small(x)

    @torch.compiler.disable
    def touch(self) -> None:
        self.large.weight.sum()
        with torch.no_grad():
            for name in self.written:
                self.get_submodule(name).weight.clamp_(-0.01, 0.01)


def writes_beside_the_graph() -> str:
    """Write a parameter that each rank has whole, which is allowed, then one that is cut; return the error of that."""
    model = prepared(Broken(), 2)
    compiled = torch.compile(model, backend="elixir", options={"inner": "aot_eager", "report": False})

    def step() -> None:
        compiled(torch.randn(4, 256)).square().mean().backward()

    step()
    step()
    model.written = ["small"]
    step()
    step()
    assert model.small._parameters["weight"].to_local().abs().max() <= 0.01
    model.written = ["large"]
    with pytest.raises(elixir.UnsupportedModel) as caught:
        step()
    return str(caught.value)


def test_a_write_of_eager_code_to_a_part_of_a_parameter_is_refused() -> None:
    said = apart(writes_beside_the_graph)
    assert "large.weight is not supported: eager code, outside of the compiled graphs, wrote in place" in said
