"""What `test_uneven_ranks` asks of real ranks that own unequal parts; each function runs on all of them at once."""

import copy
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from safetensors import torch as safetensors
from torch import distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import elixir_compile as elixir
from elixir_compile.graph.ops.shards import Portion, TensorAxis, full, new_portion, own_part, rows_of
from elixir_compile.ir.share import Share
from elixir_compile.optim.guard import watch
from elixir_compile.runtime.distributed.ranks import Ranks
from elixir_compile.session.cast_and_shard import ranks_of
from tests.run import ranks_checks
from tests.run.ranks_training import mesh_of

WHOLE = torch.arange(40.0).view(10, 4)
ROWS = (7, 2, 1)


def all_of(rank: int, world_size: int, state: list[float], checks: list[list[Any]]) -> list[Any]:
    """Return what each of `checks`, names in `ranks_checks` with arguments, returns if each rank owns its part of
    `state`."""

    with parts_of(state):
        return ranks_checks.all_of(rank, world_size, checks)


@contextmanager
def parts_of(state: Sequence[float]) -> Iterator[None]:
    """Let the ranks of models that are prepared inside own the parts `state`, and count alike whatever their rows."""

    def uneven(mesh: DeviceMesh | None, tensor_axis: TensorAxis | None = None) -> Ranks | None:
        ranks = ranks_of(mesh, tensor_axis)
        if ranks is not None:
            ranks.shares = tuple(Share(rank=own, num_rows=0, state=part) for own, part in enumerate(state))
        return ranks

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("elixir_compile.session.prepare.ranks_of", uneven)
        yield


def portion_of(whole: torch.Tensor, rows: Sequence[int], mesh: DeviceMesh) -> Portion:
    own = whole.split(list(rows))[mesh.get_local_rank()].clone()
    return new_portion(own, rows, mesh, whole.shape)


def answers_as_the_whole(rank: int, world_size: int, folder: str) -> None:
    """Read, copy, train, save and load tensors of which the ranks own 7, 2 and 1 rows."""
    mesh = mesh_of([world_size])
    param = nn.Parameter(portion_of(WHOLE, ROWS, mesh))
    reads(param, mesh)
    copies(param, mesh)
    trains_by_torch(param, mesh)
    saves(param, mesh, folder)


def reads(param: nn.Parameter, mesh: DeviceMesh) -> None:
    twice = torch._foreach_mul([param.detach(), portion_of(WHOLE[:5], (3, 1, 1), mesh)], 2.0)
    assert [type(value) for value in twice] == [Portion, Portion]
    assert torch.equal(twice[0].full_tensor(), 2 * WHOLE)
    assert torch.equal(twice[1].full_tensor(), 2 * WHOLE[:5])
    assert torch.equal(param.view_as(param).full_tensor(), WHOLE)
    replicated = param.redistribute(placements=[Replicate()])
    assert torch.equal(replicated.to_local(), WHOLE)
    assert param.redistribute(placements=[Shard(0)]) is param
    with pytest.raises(NotImplementedError, match=r"own 7-2-1 rows cannot become .* `full_tensor\(\)`"):
        param.redistribute(placements=[Shard(1)])
    for op in (lambda: param[2:5], param.t, lambda: param.cumsum(0), lambda: torch.cat([param, param])):
        with pytest.raises(NotImplementedError, match=r"own 7-2-1 rows, or cut it .* `full_tensor\(\)`"):
            op()
    with pytest.raises(ValueError, match=r"own 7-2-1 rows of one tensor and equal parts of another"):
        torch.add(param, distribute_tensor(torch.ones(10, 1), mesh, [Shard(0)]))
    sums = param.detach().sum(1)
    assert rows_of(sums) == ROWS
    assert torch.equal(sums.full_tensor(), WHOLE.sum(1))
    assert torch.equal(param.detach().sum(0).full_tensor(), WHOLE.sum(0))
    own = param.detach()
    torch.testing.assert_close((own / own.norm()).full_tensor(), WHOLE / WHOLE.norm())
    weights = torch.arange(40.0).view(10, 4)
    (param.full_tensor() * weights).sum().backward()
    assert torch.equal(param.grad.full_tensor(), weights)
    watch(param.grad)
    assert torch.equal((param.grad * 2).full_tensor(), 2 * weights)
    assert torch.linalg.vector_norm(param.detach()).full_tensor() == WHOLE.norm()
    param.grad = None


def copies(param: nn.Parameter, mesh: DeviceMesh) -> None:
    for copied in (copy.deepcopy(param), from_bytes(param)):
        assert isinstance(copied, nn.Parameter)
        assert torch.equal(copied.full_tensor(), WHOLE)
    other = portion_of(-WHOLE, (0, 5, 5), mesh)
    even = distribute_tensor(WHOLE + 1, mesh, [Shard(0)])
    for pair in ((param.detach(), other), (other, even), (even, other)):
        with pytest.raises(ValueError, match=r"own .* rows of one tensor and .* of another: `full_tensor\(\)`"):
            torch.add(*pair)
    other.copy_(param.detach())
    assert torch.equal(other.full_tensor(), WHOLE)
    other.copy_(even)
    assert torch.equal(other.full_tensor(), WHOLE + 1)
    even.copy_(param.detach())
    assert torch.equal(even.full_tensor(), WHOLE)


def from_bytes(param: nn.Parameter) -> Any:
    kept = io.BytesIO()
    torch.save(param, kept)
    kept.seek(0)
    return torch.load(kept, weights_only=False)


def trains_by_torch(param: nn.Parameter, mesh: DeviceMesh) -> None:
    """Take three steps of torch's AdamW with clipping beside one process, with the same bits."""
    alone = nn.Parameter(WHOLE.clone())
    own, other = (torch.optim.AdamW([each], lr=0.1, foreach=True) for each in (param, alone))
    for step in range(3):
        grad = torch.full((10, 4), 3.0 + step)
        param.grad, alone.grad = portion_of(grad, ROWS, mesh), grad
        norms = [nn.utils.clip_grad_norm_([each], 1.0) for each in (param, alone)]
        torch.testing.assert_close(norms[0].full_tensor(), norms[1])
        param.grad = portion_of(alone.grad, ROWS, mesh)  # the norm is a sum in another order
        own.step()
        other.step()
    assert torch.equal(param.full_tensor(), alone)
    moment = own.state[param]["exp_avg"]
    assert type(moment) is Portion
    assert torch.equal(moment.full_tensor(), other.state[alone]["exp_avg"])


def saves(param: nn.Parameter, mesh: DeviceMesh, folder: str) -> None:
    """Save 7-2-1 rows by torch's distributed checkpoints, and load 0-5-5 and equal parts."""
    module = nn.Module()
    module.weight = param
    assert module.state_dict()["weight"].to_local().shape[0] == ROWS[mesh.get_local_rank()]
    now = param.detach().full_tensor()
    dcp.save(module.state_dict(), checkpoint_id=folder)
    like = torch.zeros_like(WHOLE)
    for loaded in (portion_of(like, (0, 5, 5), mesh), distribute_tensor(like, mesh, [Shard(0)])):
        dcp.load({"weight": loaded}, checkpoint_id=folder)
        assert torch.equal(loaded.full_tensor(), now)


class Run:
    """A linear model and its optimizer, on ranks that own the parts `state`, or on one rank if there are none."""

    def __init__(self, mesh: DeviceMesh, state: Sequence[float] = ()) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(96, 301), nn.Tanh(), nn.Linear(301, 96))
        shares = [Share(rank=rank, num_rows=8, state=part) for rank, part in enumerate(state)]
        self.model = elixir.prepare(model, mesh=mesh if state else None, shares=shares)
        self.optimizer = elixir.HybridAdamW(self.model.parameters(), lr=0.1)

    def train(self) -> None:
        x = torch.linspace(-1.0, 1.0, 8 * 96).view(8, 96)
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def whole(self) -> dict[str, torch.Tensor]:
        """Return the full weights and statistics by name."""
        found = {name: full(value).clone() for name, value in self.model.state_dict().items()}
        for index, own in self.optimizer.state_dict()["state"].items():
            found |= {f"{index}.{name}": full(value).clone() for name, value in own.items()}
        return found


def reshards(rank: int, world_size: int, folder: str) -> list[int]:
    """Save from ranks with 0.7, 0.2 and 0.1 of the state, load on one rank, save there, and load on ranks with 0, 0.5
    and 0.5; return the rows of the first weight on each rank at the end."""
    mesh = mesh_of([world_size])
    first = Run(mesh, (0.7, 0.2, 0.1))
    first.train()
    holds(first, (0.7, 0.2, 0.1)[rank])
    expected = first.whole()
    has_plain_forms(first.model, f"{folder}/model.safetensors", rank)
    elixir.save(f"{folder}/first", first.model, first.optimizer, step=1)
    alone = Run(mesh)
    elixir.load(f"{folder}/first", alone.model, alone.optimizer)
    equal(alone.whole(), expected)
    if rank == 0:
        elixir.save(f"{folder}/second", alone.model, alone.optimizer, step=1)
    distributed.barrier()
    last = Run(mesh, (0.0, 0.5, 0.5))
    elixir.load(f"{folder}/second", last.model, last.optimizer)
    equal(last.whole(), expected)
    elixir.save(f"{folder}/third", last.model, last.optimizer, step=1)
    elixir.load(f"{folder}/third", first.model, first.optimizer)
    equal(first.whole(), expected)
    last.train()
    first.train()
    for name, value in last.whole().items():
        torch.testing.assert_close(value, first.whole()[name], rtol=0, atol=1e-6)
    last.model.load_state_dict(first.model.state_dict())  # from parts to other parts
    return list(rows_of(last.model.state_dict()["0.weight"]) or ())


def has_plain_forms(model: nn.Module, out: str, rank: int) -> None:
    """Read the weights as plain tensors on the first rank, write them to the file `out`, and copy the model."""
    whole = {name: full(value).clone() for name, value in model.state_dict().items()}
    found = elixir.full_state_dict(model)
    elixir.export(model, out)
    distributed.barrier()
    assert bool(found) == (rank == 0)
    equal(found or whole, whole)
    equal(safetensors.load_file(out), whole)
    copied = copy.deepcopy(model)
    assert [rows_of(param) for param in copied.parameters()] == [rows_of(param) for param in model.parameters()]
    equal({name: full(value) for name, value in copied.state_dict().items()}, whole)


def holds(run: Run, part: float) -> None:
    """Fail unless this rank has `part` of weights and statistics, give or take a row of each parameter that is cut."""
    cut = [param for param in run.model.parameters() if rows_of(param) is not None]
    assert [tuple(param.shape) for param in cut] == [(301, 96), (96, 301)]
    state = run.optimizer.state_dict()["state"].values()
    moments = [value for own in state for value in own.values() if rows_of(value) is not None]
    assert len(moments) == 2 * len(cut)
    own_bytes = sum(own_part(value).nbytes for value in (*cut, *moments))
    whole_bytes = sum(12 * param.numel() for param in cut)
    row_bytes = sum(12 * param.shape[1] for param in cut)
    assert abs(own_bytes - part * whole_bytes) <= row_bytes


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []
