"""What tests ask of real ranks, each of which owns some parameters whole; see `processes.spawn`."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.optim import Adafactor, Muon, Optimizer

import elixir_compile as elixir
from elixir_compile import compat
from elixir_compile.graph.ops.shards import own_shard, owner_of
from elixir_compile.ir import Update
from elixir_compile.optim.disk import DiskState
from elixir_compile.optim.host.flat_step import split
from tests.run.optim.tensor_wise_classes import Soap
from tests.run.ranks_training import compiled_with, full, mesh_of
from tests.run.updating import placed, small_buckets, small_pieces

NUM_STEPS = 2
WIDTH, OTHER = 96, 91
"""91 rows are divided by neither 2 nor 3. A tensor of fewer elements is not sharded over 2 ranks."""
SMALL_ROWS = 8
CLASSES: Mapping[str, type[Optimizer]] = {"Muon": Muon, "Adafactor": Adafactor, "Soap": Soap}
WITH_MASTERS = " with masters"
"""Behind the name of a class: on bfloat16 parameters with fp32 masters."""


class Tower(nn.Module):
    """Wide and narrow matrices in turn, and one that is so small that each rank has it."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [(WIDTH, OTHER)[number % 2] for number in range(num_layers + 1)]
        self.layers = nn.ModuleList(
            nn.Linear(sizes[number], sizes[number + 1], bias=False) for number in range(num_layers)
        )
        self.small = nn.Linear(sizes[-1], SMALL_ROWS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.small.weight.dtype)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.small(x).square().mean()


def batches(num: int = NUM_STEPS) -> list[torch.Tensor]:
    """Return as many different batches, whose rows 1, 2 and 3 ranks share out."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(6, WIDTH, generator=generator) for _ in range(num)]


Shares = Sequence[tuple[int, float]]
"""By rank, its rows of a batch and its part of the state; empty if all ranks have as much."""


def owned_run(
    name: str, num_ranks: int, num_layers: int = 3, shares: Shares = (), **options: Any
) -> tuple[nn.Module, Any, Any]:
    """Return a tower of which the ranks own whole matrices, its compiled form and its optimizer, by its name."""
    model = Tower(num_layers)
    mesh = mesh_of([num_ranks]) if num_ranks > 1 else None
    given = [elixir.Share(rank=rank, num_rows=rows, state=state) for rank, (rows, state) in enumerate(shares)]
    names, dtype = [own for own, _ in model.named_parameters()], "bfloat16" if name.endswith(WITH_MASTERS) else None
    elixir.prepare(model, mesh=mesh, shares=given, whole=names, param_dtype=dtype)
    return model, compiled_with(model, **options), elixir.hybrid(class_of(name))(model.parameters())


def class_of(name: str) -> type[Optimizer]:
    """Return the class called `name`."""
    return CLASSES[name.removesuffix(WITH_MASTERS)]


def nearest(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the value in `dtype`, fp32 or bfloat16, that is nearest to `master`."""
    if dtype == torch.float32:
        return master
    high, low = torch.empty_like(master, dtype=dtype), torch.empty_like(master, dtype=torch.int16)
    split(master, high, low)
    return high


def own_rows(batch: torch.Tensor, rank: int, num_ranks: int, shares: Shares) -> torch.Tensor:
    """Return the rows of `rank`, or two that count 0 if its share has none."""
    if not shares:
        return batch.chunk(num_ranks)[rank]
    return own if len(own := batch.split([rows for rows, _ in shares])[rank]) else batch[:2]


@contextmanager
def shapes_seen() -> Iterator[list[tuple[int, ...]]]:
    """Yield a list that gets the shape of each large tensor with memory that Muon orthogonalises inside."""
    seen: list[tuple[int, ...]] = []
    module = torch.optim._muon
    usual = module._zeropower_via_newtonschulz

    def noted(grad: torch.Tensor, *args: Any) -> torch.Tensor:
        if not compat.is_fake(grad) and sorted(grad.shape) == [OTHER, WIDTH]:
            seen.append(tuple(grad.shape))
        return usual(grad, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_zeropower_via_newtonschulz", noted)
        yield seen


@contextmanager
def at_home(home: str, update: str, folder: str) -> Iterator[dict[str, Any]]:
    """Yield options under which all state is on the device, on the host, streamed from there, or on disk in `folder`,
    in several pieces."""
    options: dict[str, Any] = {"update": update}
    if home == "host":
        options |= {"placement_policy": "static", "offload_param_frac": 1.0, "offload_optim_frac": 1.0}
    with ExitStack() as stack:
        if home == "disk":
            options |= {"disk_path": folder, "disk_check": True, "replan": False}
            stack.enter_context(small_pieces())
        if home in ("disk", "streamed"):
            split = "split disk" if home == "disk" else "split"
            stack.enter_context(small_buckets(lambda plan: placed(plan, split, 1.0, Update(update))))
        yield options


def has_the_bits_of_the_class(
    rank: int, world_size: int, name: str, num_layers: int, home: str, update: str, folder: str, shares: Shares
) -> dict[str, Any]:
    """Train, and beside it the class alone on the same gradients; weights are equal bit by bit, and the gradients are
    those of one process. Return what this rank owns, what it planned and what Muon saw."""
    alone = Tower(num_layers)
    reference = class_of(name)(alone.parameters())
    is_exact = not name.endswith(WITH_MASTERS)
    with at_home(home, update, folder) as options, shapes_seen() as seen:
        model, compiled, optimizer = owned_run(name, world_size, num_layers, shares, **options)
        for batch in batches():
            compiled(own_rows(batch, rank, world_size, shares)).backward()
            alone(batch).backward()
            grads = [full(param.grad) for param in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            weights = [full(param.detach()) for param in model.parameters()]  # waits for queued updates
            num_here = len(seen)
            for param, grad in zip(alone.parameters(), grads, strict=True):
                assert (param.grad - grad).abs().max() <= (2e-6 if is_exact else 0.05) * grad.abs().max()
                param.grad = grad.float()
            reference.step()
            reference.zero_grad()
            del seen[num_here:]
            for param, weight in zip(alone.parameters(), weights, strict=True):
                assert torch.equal(nearest(param.detach(), weight.dtype), weight)
        masters = dict(alone.named_parameters())
        for own, entry in states_by_name(model, optimizer).items():
            assert is_exact or torch.equal(entry["master"], masters[own].detach()), own
        (plan,) = {record.plan for record in elixir.compilations(model)}
        owned = [param for param in model.parameters() if own_shard(param).numel()]
        assert set(map(id, optimizer.state)) == set(map(id, owned))
        large = [bucket for bucket in plan.buckets if bucket.is_sharded]
        files = [each for own in Path(folder).glob(f"*rank{rank}-*") if own.is_dir() for each in own.iterdir()]
        assert all(bucket.whole_update is not None for bucket in plan.buckets)
        return {
            "owners": [owner_of(param) for param in model.parameters()],
            "shapes": [tuple(own_shard(param).shape) for param in owned if owner_of(param) is not None],
            "seen": seen,
            "state_bytes": sum(bucket.shard_state_nbytes() for bucket in large),
            "held_bytes": held_bytes(optimizer, [param for param in owned if owner_of(param) is not None]),
            "all_held_bytes": held_bytes(optimizer, owned),
            "flops": sum(bucket.own_update.total_flops for bucket in large if bucket.own_update is not None),
            "homes": sorted({str(placement.optim) for placement in plan.placements}),
            "on_disk": all(isinstance(entry, DiskState) for entry in optimizer.state.values()),
            "disk_bytes": sum(each.stat().st_size for each in files),
        }


def held_bytes(optimizer: Optimizer, params: Sequence[nn.Parameter]) -> int:
    leaves = (leaf for param in params for leaf in optimizer.state[param].values())
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim())


def trains_as_one_process(rank: int, world_size: int, name: str) -> float:
    """Return how far the weights of all ranks are from those that one process trains on the whole batch."""
    alone = Tower()
    reference = class_of(name)(alone.parameters())
    model, compiled, optimizer = owned_run(name, world_size)
    for batch in batches():
        for each, loss in ((optimizer, compiled(batch.chunk(world_size)[rank])), (reference, alone(batch))):
            loss.backward()
            each.step()
            each.zero_grad()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max((full(param.detach()) - own).abs().max().item() for param, own in pairs)


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoints and state dicts of owners.


def states_by_name(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the state dict of `optimizer` by the names of the parameters."""
    names = [name for name, _ in model.named_parameters()]
    return {names[index]: entry for index, entry in optimizer.state_dict()["state"].items()}


def saves(rank: int, world_size: int, name: str, home: str, folder: str) -> None:
    """Train, save a checkpoint, and beside it the weights and what the state dict of each rank has."""
    with at_home(home, "after_backward", folder) as options:
        model, compiled, optimizer = owned_run(name, world_size, **options)
        for batch in batches():
            compiled(batch.chunk(world_size)[rank]).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert {isinstance(entry, DiskState) for entry in optimizer.state.values()} == {home == "disk"}
        elixir.save(f"{folder}/{name}", model, optimizer, step=NUM_STEPS)
        weights = {own: full(param.detach()) for own, param in model.named_parameters()}
        torch.save((weights, states_by_name(model, optimizer)), f"{folder}/{name}-{rank}.pt")


def loads(rank: int, world_size: int, name: str, home: str, folder: str, num_saved: int, shares: Shares) -> int:
    """Load the checkpoint of `num_saved` ranks, and what their state dicts have together; the state is equal bit by
    bit. Train on, with the bits of the class, and return the number of parameters whose state this rank has."""
    saved = [torch.load(f"{folder}/{name}-{other}.pt", weights_only=False) for other in range(num_saved)]
    weights, states = saved[0][0], {own: entry for _, part in saved for own, entry in part.items()}
    assert states.keys() == weights.keys()
    alone = Tower()
    alone.load_state_dict({own: states[own].get("master", weight) for own, weight in weights.items()})
    places = {own: place for place, own in enumerate(weights)}
    reference = class_of(name)(alone.parameters())
    together = {"state": {places[own]: entry for own, entry in states.items()}}
    reference.load_state_dict(copy.deepcopy({**reference.state_dict(), **together}))
    for entry in reference.state.values():
        entry.pop("master", None)
    with at_home(home, "after_backward", folder) as options:
        model, compiled, optimizer = owned_run(name, world_size, shares=shares, **options)
        elixir.load(f"{folder}/{name}", model, optimizer)
        for own, param in model.named_parameters():
            assert torch.equal(full(param.detach()), weights[own]), own
        here = {own for own, param in model.named_parameters() if own_shard(param).numel()}
        by_checkpoint = states_by_name(model, optimizer)
        optimizer.load_state_dict(copy.deepcopy({**optimizer.state_dict(), **together}))
        for found in (by_checkpoint, states_by_name(model, optimizer)):
            assert found.keys() == here
            for own, entry in found.items():
                assert_same(entry, states[own], own)
        for batch in batches():
            compiled(own_rows(batch, rank, world_size, shares)).backward()
            for param, own in zip(alone.parameters(), model.parameters(), strict=True):
                param.grad = full(own.grad).float()
            for each in (optimizer, reference):
                each.step()
                each.zero_grad()
        for param, own in zip(alone.parameters(), model.parameters(), strict=True):
            assert torch.equal(full(own.detach()), nearest(param.detach(), own.dtype))
        assert {isinstance(entry, DiskState) for entry in optimizer.state.values()} == {home == "disk"}
    return len(optimizer.state)


def assert_same(found: Any, expected: Any, path: str) -> None:
    """Fail unless nested `found` and `expected` are equal, bit by bit, and no tensor is a DTensor."""
    if isinstance(expected, Mapping | list | tuple):
        assert len(found) == len(expected), path
        keys = expected if isinstance(expected, Mapping) else range(len(expected))
        for key in keys:
            assert_same(found[key], expected[key], f"{path}.{key}")
    elif isinstance(expected, torch.Tensor):
        assert type(found) is torch.Tensor is type(expected), path
        assert torch.equal(found, expected), path
    else:
        assert found == expected, path


# ----------------------------------------------------------------------------------------------------------------------
# What is refused, and elements of whole parameters.


def refuses(rank: int, world_size: int) -> list[str]:
    """Return the errors of unknown names, of another axis, and of other names on one rank."""
    from torch.distributed.device_mesh import init_device_mesh

    cases: Sequence[tuple[Any, list[str]]] = (
        (mesh_of([world_size]), ["layers.0.bias"]),
        (init_device_mesh("cpu", (world_size, 1)), ["layers.0.weight"]),
        (mesh_of([world_size]), [f"layers.{rank}.weight"]),
    )
    found = []
    for mesh, names in cases:
        try:
            elixir.prepare(Tower(), mesh=mesh, whole=names)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        distributed.barrier()
    return found


def updates_elements_too(rank: int, world_size: int) -> float:
    """Return how far AdamW is from one process, on parameters of which one rank has all rows."""
    alone, model = Tower(2).double(), Tower(2).double()
    elixir.prepare(model, mesh=mesh_of([world_size]), whole=["layers.1.weight"])
    assert [owner_of(param) for param in model.parameters()] == [None, 0, None]
    compiled = compiled_with(model)
    pair = elixir.HybridAdamW(model.parameters(), eps=1e-3), torch.optim.AdamW(alone.parameters(), eps=1e-3)
    for batch in batches():
        losses = compiled(batch.double().chunk(world_size)[rank]), alone(batch.double())
        for each, loss in zip(pair, losses, strict=True):
            loss.backward()
            each.step()
            each.zero_grad()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    return max((full(param.detach()) - own).abs().max().item() for param, own in pairs)
