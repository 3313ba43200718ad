"""Plans for any number of ranks without a cluster: a process group that is none, sizes of meshes, and streams of
gathers."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock
from unittest.mock import MagicMock

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import elixir_compile as elixir
from elixir_compile.base.errors import InvalidOption
from elixir_compile.base.options import parse_options
from elixir_compile.base.units import GIB
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.ir import BucketId
from elixir_compile.ir.hardware import Cluster, preset, profile_for
from elixir_compile.optim import guard
from elixir_compile.optim import hybrid as clipping
from elixir_compile.runtime.distributed.sharded import ShardGather
from elixir_compile.session.planning import cluster_of
from elixir_compile.session.step_profiler import STEPS_SKIPPED, STEPS_TIMED, RankBalance
from tests.run.processes import apart

# ----------------------------------------------------------------------------------------------------------------------
# A prepared model on a process group that is none: its plan for any number of ranks, without a cluster.
#
# Each group has a process of its own: a process has one default group.


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


def two_layers(mesh: DeviceMesh) -> nn.Module:
    """Return two layers cut along the tensor axis `mesh`."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def sums_along_a_tensor_axis() -> list[str]:
    """Return the dtype of the gradient of each parameter after two backward passes in bf16, with sums in fp32."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    model = two_layers(init_device_mesh("cpu", (4,), mesh_dim_names=("tensor",)))
    elixir.prepare(model, "cpu", param_dtype="bfloat16")
    options = {"inner": "aot_eager", "report": False, "plan_cache": False, "reduce_dtype": "float32"}
    compiled = torch.compile(model, backend="elixir", options=options)
    for _ in range(2):
        compiled(torch.randn(4, 64, dtype=torch.bfloat16)).float().square().mean().backward()
    return [str(param.grad.dtype) for param in model.parameters() if param.grad is not None]


def test_gradients_of_parts_along_a_tensor_axis_are_summed_in_fp32() -> None:
    assert apart(sums_along_a_tensor_axis) == ["torch.float32"] * 4


def noted_balances() -> list[int]:
    """Return how often ranks note what they compute, without a tensor axis and with one."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    alone = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    counts = []
    for model in (alone, two_layers(mesh["tensor"])):
        elixir.prepare(model, mesh=mesh["data"])
        options = {"inner": "aot_eager", "plan_cache": False}
        compiled = torch.compile(model, backend="elixir", options=options)
        with mock.patch.object(RankBalance, "note") as note:
            for _ in range(STEPS_SKIPPED + STEPS_TIMED + 1):
                compiled(torch.randn(4, 64)).square().mean().backward()
                model.zero_grad()
        counts.append(note.call_count)
    return counts


def test_ranks_of_a_tensor_parallel_model_suggest_no_shares() -> None:
    assert apart(noted_balances) == [1, 0]


def weighed_on_two_axes() -> list[str]:
    """Return the weight of rank 0 on a mesh of 2 x 2 ranks, and the error if a rank of a tensor axis has another."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = elixir.prepare(two_layers(mesh["tensor"]), mesh=mesh["data"])
    executor = executor_of(model)
    control = executor.peers.control
    with mock.patch.object(control, "exchange", return_value=["3", "3", "5", "5"]):
        elixir.weigh(model, 3)
    weight = executor.ranks.weight
    other = mock.patch.object(control, "exchange", return_value=["3", "3", "5", "4"])
    with other, pytest.raises(elixir.RanksDiffer) as caught:
        elixir.weigh(model, 3)
    return [str(weight), str(executor.ranks.weight), str(caught.value)]


def test_ranks_of_a_tensor_axis_weigh_one_batch() -> None:
    weight, after, said = apart(weighed_on_two_axes)
    assert (weight, after) == ("0.75", "0.75")
    assert "rank 2 weighs its batch by 5 samples\n  rank 3 weighs its batch by 4 samples" in said
    assert "Ranks along a tensor axis have the same rows" in said


def refusals_along_a_tensor_axis() -> dict[str, str]:
    """Return the error about each tensor-parallel model that no plan can hold."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def in_shards(tensor: torch.Tensor) -> DTensor:
        return distribute_tensor(tensor.detach(), mesh["tensor"], [Shard(0)])

    buffer, recurrent = two_layers(mesh["tensor"]), nn.LSTM(64, 64)
    buffer.register_buffer("scale", in_shards(torch.ones(64)))
    for name, param in list(recurrent.named_parameters()):
        setattr(recurrent, name, nn.Parameter(in_shards(param)))
    shares = [elixir.Share(rank=rank, num_rows=rows, state=0.5) for rank, rows in enumerate((3, 5))]
    tries = {
        "shares": (two_layers(mesh["tensor"]), {"shares": shares}),
        "buffer": (buffer, {}),
        "lstm": (recurrent, {}),
    }
    said = {}
    for name, (model, how) in tries.items():
        with pytest.raises(elixir.UnsupportedModel) as caught:
            elixir.prepare(model, mesh=mesh["data"], **how)
        said[name] = str(caught.value)
    with pytest.raises(elixir.UnsupportedModel) as caught:
        elixir.plan(two_layers(mesh["tensor"]), torch.randn(4, 64), hardware="4 x a100-40g")
    return {**said, "plan": str(caught.value)}


def test_models_that_no_plan_can_hold_along_a_tensor_axis_are_refused() -> None:
    said = apart(refusals_along_a_tensor_axis)
    assert "a tensor axis of 2 ranks is beside it. Give all ranks along the data axis as many rows" in said["shares"]
    assert "buffer scale is not supported: it is a DTensor of shape (64,)" in said["buffer"]
    assert said["lstm"].startswith("weight_ih_l0 is not supported: LSTM reads its parameters directly")
    assert "it is cut along a tensor axis of 2 ranks" in said["lstm"]
    assert "cut over a mesh of 2 ranks" in said["plan"]
    assert "init_process_group('fake'" in said["plan"]
    for name in ("buffer", "lstm"):
        assert "out of the plan of `parallelize_module`" in said[name]


def sums_of_two_meshes() -> list[tuple[str, float]]:
    """Return the axis and this rank's number of each sum over ranks, for parameters on two meshes."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    params = [
        nn.Parameter(distribute_tensor(torch.ones(4, 4), square, [Shard(0), Replicate()])),
        nn.Parameter(distribute_tensor(torch.ones(4, 4), line, [Shard(0)])),
    ]
    for param in params:
        param.grad = torch.ones_like(param)
    seen: list[tuple[str, float]] = []

    def note(number: float, param: DTensor, axes: list[int]) -> float:
        seen.extend((param.device_mesh.mesh_dim_names[axis], number) for axis in axes)
        return number

    with mock.patch.object(clipping, "sum_over_shards", note), mock.patch.object(guard, "sum_over_shards", note):
        assert clipping.sum_of_all_squares(params, {}) == 8.0 + 4.0  # this rank has 2 rows of one and 1 of the other
        params[1].grad.to_local().fill_(torch.inf)
        guard.Overflow().spread([{"params": params}])
    return seen


def test_gradients_on_two_meshes_are_summed_over_the_ranks_of_each() -> None:
    assert apart(sums_of_two_meshes) == [("all", 4.0), ("data", 8.0), ("all", True), ("data", False)]


# ----------------------------------------------------------------------------------------------------------------------
# `rank_sizes`: the machine that a mesh of ranks is planned for.


ALONE = profile_for("cpu", GIB, GIB, "cpu")
SQUARE: Any = SimpleNamespace(
    num_ranks=4, num_shards=2, num_copies=2, num_local=4, control=SimpleNamespace(is_echo=False)
)
"""Two copies of two parts, all on one host."""


def test_measured_links_count_for_shards_and_copies() -> None:
    node = replace(ALONE.nodes[0], num_devices=4, peer=replace(ALONE.h2d, bytes_per_s=123.0))
    measured = Cluster(nodes=(node,))
    assert cluster_of(measured, SQUARE, parse_options({})) is measured
    assert cluster_of(measured, None, parse_options({})) == measured.alone()


def test_ranks_that_nobody_measured_share_their_host_by_a_rough_link() -> None:
    found = cluster_of(ALONE, SQUARE, parse_options({}))
    assert (found.num_ranks, found.num_local_ranks, found.nodes[0].peer is None) == (4, 4, False)
    over_two_hosts: Any = SimpleNamespace(**{**vars(SQUARE), "num_local": 2})
    found = cluster_of(ALONE, over_two_hosts, parse_options({}))
    assert (found.num_ranks, found.num_local_ranks, found.network is None) == (4, 2, False)


def test_a_machine_by_name_has_a_device_for_every_rank() -> None:
    named = preset("a100-40g", 4)
    assert cluster_of(named, SQUARE, parse_options({"hardware": "4 x a100-40g"})) is named
    with pytest.raises(InvalidOption, match="a machine with 4 devices"):
        cluster_of(preset("a100-40g", 2), SQUARE, parse_options({"hardware": "2 x a100-40g"}))


# ----------------------------------------------------------------------------------------------------------------------
# On which streams the gather of a sharded bucket begins.


@pytest.mark.parametrize("is_away", [False, True])
def test_only_a_shard_on_the_host_takes_the_lane_of_copies(is_away: bool) -> None:
    """If a gather of a shard on the device made h2d wait for compute, the host, which waits for h2d at the end of the
    backward, would begin its updates when compute is through and not when the gradients have come."""
    lanes, bucket = MagicMock(device=torch.device("cpu")), MagicMock(is_away=is_away, own=torch.zeros(2))
    bucket.spec.id = BucketId("b0")
    ledger: Any = MagicMock()
    ledger.started.side_effect = lambda lane, name, nbytes, start: start()
    ShardGather(bucket, lanes, ledger)
    bucket.ranks.all_gather.assert_called_once()
    calls = [
        name for name, _, _ in lanes.h2d.mock_calls if not name.startswith(("behind_compute()", "beside_compute()"))
    ]
    assert calls == (["behind_compute", "copy", "mark", "beside_compute"] if is_away else [])
