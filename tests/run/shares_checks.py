"""What tests ask of real ranks with unequal rows, speeds (**emulated** by sleeping) and parts; see
`processes.spawn`."""

import copy
import io
import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import pytest
import torch
from safetensors import torch as safetensors
from torch import distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.graph.ops.shards import Portion, TensorAxis, new_portion, own_shard, rows_of
from elixir_compile.graph.ops.shards import full as full_of_shards
from elixir_compile.ir.share import Share
from elixir_compile.optim.guard import watch
from elixir_compile.runtime.distributed.ranks import Ranks
from elixir_compile.session.cast_and_shard import ranks_of
from tests.run import ranks_checks
from tests.run.processes import in_turn
from tests.run.ranks_training import adamw, compiled_with, full, hybrid, mesh_of, slower

# ----------------------------------------------------------------------------------------------------------------------
# What `test_unequal_shares` asks of three real ranks that train unequal numbers of rows; see `processes.spawn`.


WIDTH, NUM_WORDS, LENGTH = 12, 23, 6
BATCH = 8


class Rows(nn.Module):
    """Two layers; the loss is a mean over rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.down(functional.gelu(self.up(x)))).square().mean()


class Tokens(nn.Module):
    """A tagger; the loss is a mean over the tokens that have a target."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(NUM_WORDS, WIDTH), nn.Linear(WIDTH, NUM_WORDS)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.out(self.embed(ids)).flatten(0, 1), targets.flatten())


class Sums(nn.Module):
    """A product with whole numbers; its gradients are sums of the rows, exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight).sum(1).mean()


def shares_of(rows: Sequence[int]) -> tuple[elixir.Share, ...]:
    return tuple(elixir.Share(rank=rank, num_rows=count, state=1 / len(rows)) for rank, count in enumerate(rows))


def prepared(model: nn.Module, shares: Sequence[elixir.Share]) -> tuple[nn.Module, Any]:
    """Return `model` prepared with `shares` over all ranks, and its compiled form."""
    model = elixir.prepare(model, mesh=mesh_of([len(shares)]), shares=shares)
    return model, compiled_with(model)


def trains(rank: int, world_size: int, rows: Sequence[int], dtype_name: str, close: float) -> None:
    """Train three steps of AdamW on the rows of `rows`, as one process trains all of them."""
    dtype = getattr(torch, dtype_name)
    shares = shares_of(rows)
    model, compiled = prepared(Rows().to(dtype), shares)
    double = Rows().to(dtype)
    optimizer, other = hybrid(model.parameters()), adamw(double.parameters())
    data = torch.randn(3 * BATCH, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(1)) * torch.linspace(
        0.1, 3.0, 3 * BATCH, dtype=dtype
    ).unsqueeze(1)
    sampler = elixir.ShareSampler(len(data), shares, seed=0)
    alone = elixir.ShareSampler(len(data), shares_of([BATCH]), rank=0, seed=0)
    for own, whole in zip(sampler, alone, strict=True):
        assert len(own) == (rows[rank] or 2)
        loss, expected = compiled(data[own]), double(data[whole])
        loss.backward()
        expected.backward()
        assert abs(elixir.mean_loss(model, loss) - expected).item() < close
        for name, param in double.named_parameters():
            grad = full(dict(model.named_parameters())[name].grad)
            assert (grad - param.grad).abs().max().item() < close, name
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    for name, value in double.state_dict().items():
        assert (full(model.state_dict()[name]) - value).abs().max().item() < close, name


def needs_its_weights(rank: int, world_size: int, rows: Sequence[int]) -> float:
    """Return how far the gradients are off if each rank counts alike, whatever its rows are."""
    model, compiled = prepared(Rows().double(), shares_of(rows))
    double = Rows().double()
    data = torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    data *= torch.linspace(0.1, 3.0, BATCH, dtype=torch.float64).unsqueeze(1)
    executor_of(model).ranks.weigh_by([1] * world_size)
    compiled(data.split(list(rows))[rank]).backward()
    double(data).backward()
    return max(
        (full(dict(model.named_parameters())[name].grad) - param.grad).abs().max().item()
        for name, param in double.named_parameters()
    )


def weighs_tokens(rank: int, world_size: int, rows: Sequence[int]) -> None:
    """Weight by targets, of which ranks have unequal numbers per row too."""
    model, compiled = prepared(Tokens().double(), shares_of(rows))
    double = Tokens().double()
    generator = torch.Generator().manual_seed(2)
    for step in range(2):
        ids = torch.randint(NUM_WORDS, (BATCH, LENGTH), generator=generator)
        targets = torch.randint(NUM_WORDS, (BATCH, LENGTH), generator=generator)
        targets[torch.rand(BATCH, LENGTH, generator=generator) < 0.2 * (1 + step)] = -100
        targets[:4, 1:] = -100
        own_ids, own_targets = ids.split(list(rows))[rank], targets.split(list(rows))[rank]
        elixir.weigh(model, int((own_targets != -100).sum()))
        loss, expected = compiled(own_ids, own_targets), double(ids, targets)
        loss.backward()
        expected.backward()
        assert abs(elixir.mean_loss(model, loss) - expected).item() < 1e-12
        for name, param in double.named_parameters():
            assert (full(dict(model.named_parameters())[name].grad) - param.grad).abs().max().item() < 1e-12, name
        for each in (model, double):
            each.zero_grad()


def is_exact_in_whole_numbers(rank: int, world_size: int, rows: Sequence[int]) -> None:
    """Gradients of whole numbers have no rounding, so each bit is that of one process.

    A rank divides by its own rows and not by those of all: a fifth is no binary number, so what 5 rows add up to is
    exact only if 5 divides it, and if the sum never gets smaller on the way. The weights, 15/8, 6/8 and 3/8 of three
    ranks, are exact, and so is the last division by 3 of what was three times the mean.
    """
    model, compiled = prepared(Sums(), shares_of(rows))
    double = Sums()
    data = 40.0 * torch.randint(0, 9, (BATCH, WIDTH), generator=torch.Generator().manual_seed(3)).float()
    compiled(data.split(list(rows))[rank]).backward()
    double(data).backward()
    grad = full(dict(model.named_parameters())["weight"].grad)
    assert torch.equal(grad, double.weight.grad)
    assert torch.equal(grad, grad.round())
    assert grad.min() > 0


class Joined(nn.Module):
    """Two layers; every rank compares its rows with those of all ranks, which a collective of the model joins."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.group = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.down(functional.gelu(self.up(x)))
        others = rows if self.group is None else all_gather_tensor_autograd(rows, 0, self.group)
        return (rows @ others.T).square().mean()


def trains_with_a_collective_of_its_own(rank: int, world_size: int) -> tuple[dict[str, Any], list[str]]:
    """Train a model with a collective between the ranks along the data axis, under budgets that differ; return what the
    plan says, and the errors of ranks that weigh their rows unequally behind the capture and before it."""
    mesh = mesh_of([world_size])
    model = elixir.prepare(Joined(mesh.get_group()).double(), mesh=mesh)
    compiled = compiled_with(model, device_memory=60_000 if rank else 80_000)
    double = Joined(None).double()
    data = torch.randn(world_size * BATCH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        compiled(data.chunk(world_size)[rank]).backward()
        double(data).backward()
        for name, param in double.named_parameters():
            assert (full(dict(model.named_parameters())[name].grad) - param.grad).abs().max().item() < 1e-12, name
        for each in (model, double):
            each.zero_grad()
    plan = elixir.compilations(model)[-1].plan
    elixir.weigh(model, 3)
    said: list[str] = []
    with pytest.raises(elixir.RanksDiffer) as after:
        elixir.weigh(model, 3 + rank)
    said.append(str(after.value))
    early = elixir.prepare(Joined(mesh.get_group()).double(), mesh=mesh)
    elixir.weigh(early, 3 + rank)
    with pytest.raises((elixir.RanksDiffer, elixir.PeerFailed)) as before:
        compiled_with(early)(data.chunk(world_size)[rank])
    return {
        "budget": plan.budget_bytes,
        "own": asdict(plan.own_collectives),
        "tensor": plan.tensor,
        "text": elixir.explain(plan),
        "peak": plan.prediction.device_peak_bytes,
    }, [*said, str(before.value)]


def refuses_other_shares(rank: int, world_size: int) -> list[str]:
    """Return the errors of ranks with different shares, of shares that do not fit the ranks, and of a mesh of two
    axes."""
    found: list[str] = []
    equal = shares_of([2] * world_size)
    other = shares_of([3] * world_size) if rank == 1 else equal
    wrong = (
        equal if rank else (),
        other,
        equal[:-1],
        tuple(elixir.Share(rank=number, num_rows=2, state=0.5) for number in range(world_size)),
    )
    meshes = [mesh_of([world_size])] * len(wrong) + [mesh_of([world_size, 1])]
    for shares, mesh in zip([*wrong, equal], meshes, strict=True):
        with pytest.raises((elixir.RanksDiffer, elixir.InvalidOption, elixir.UnsupportedModel)) as caught:
            elixir.prepare(Rows(), mesh=mesh, shares=shares)
        found.append(f"{type(caught.value).__name__}: {caught.value}")
    return found


def refuses_other_questions(rank: int, world_size: int) -> list[str]:
    """Return the errors of `shares` for a mesh of two axes, a fleet of another size, a batch of one row, a batch that
    is another on one rank, a batch of a large prime number, which ranks cannot share out, half a row, and a batch for
    which no rank has memory."""
    found: list[str] = []
    wrong: list[dict[str, Any]] = [
        {"mesh": mesh_of([world_size, 1])},
        {"hardware": "2 x l4-24g"},
        {"hardware": "1 x l4-24g + 1 x p40-24g"},
        {"batch": 1},
        {"batch": 8 + 2 * (rank == 1)},
        {"batch": 4099},
        {"batch": 7.5},
        {"options": {"device_memory": "1MiB", "host_memory": "1MiB"}, "batch": 1 << 20},
    ]
    for asked in wrong:
        with pytest.raises(elixir.ElixirError) as caught:
            elixir.shares(Rows(), [torch.empty(4, WIDTH)], **{"batch": 8, "mesh": mesh_of([world_size]), **asked})
        found.append(f"{type(caught.value).__name__}: {caught.value}")
    return found


def warns_of_other_rows(rank: int, world_size: int) -> list[str]:
    """Return the warnings of batches whose rows are not those of the share, on the first rank alone, in a run that
    trains larger batches than any before."""
    _, compiled = prepared(Rows(), shares_of([2] * world_size))
    found: list[str] = []
    for rows in (2, 3, 3, 5, 9):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            compiled(torch.randn(rows if rank == 0 else 2, WIDTH)).backward()
        found += [str(each.message) for each in caught if issubclass(each.category, elixir.ElixirWarning)]
    return found


# ----------------------------------------------------------------------------------------------------------------------
# What `test_unequal_shares` asks of real ranks of which one is slower for each row, **emulated** by a clock that jumps.


STEPS, TAKEN_BATCH = 14, 16
ROW_S = 3.0
"""Emulated seconds that a region of the slow rank computes for each of its rows; of the others a third."""


class Lines(logging.Handler):
    """The lines that were logged about uneven ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("uneven"):
            self.said.append(record.getMessage())


def takes(rank: int, world_size: int, rows: Sequence[int], has_shares: bool) -> dict[str, Any]:
    """Train with `rows`, take the rows of the suggestion when it comes, and go on; a double trains the whole batches.

    Returns the rows and seconds of each step, the largest differences from the double, and the line that was logged.
    """
    lines = Lines()
    logging.getLogger("elixir_compile").addHandler(lines)
    logging.getLogger("elixir_compile").setLevel(logging.INFO)
    shares = shares_of(rows)
    mesh = mesh_of([world_size])
    model = elixir.prepare(Rows().double(), mesh=mesh, **({"shares": shares} if has_shares else {}))
    compiled = compiled_with(model, replan=True, report=True)
    double = Rows().double()
    optimizer, other = hybrid(model.parameters()), adamw(double.parameters())
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(STEPS * TAKEN_BATCH, WIDTH, dtype=torch.float64, generator=generator)
    sampler = elixir.ShareSampler(len(data), shares, seed=0)
    alone = elixir.ShareSampler(len(data), shares_of([TAKEN_BATCH]), rank=0, seed=0)
    found: dict[str, Any] = {"rows": [], "step_s": [], "grads": 0.0, "losses": 0.0}
    present = [0]
    with slower(lambda: ROW_S * present[0] / (1 if rank == 1 else 3)):
        for own, whole in zip(sampler, alone, strict=True):
            present[0] = len(own)
            began_s = time.perf_counter()
            loss = compiled(data[own])
            loss.backward()
            found["step_s"].append(time.perf_counter() - began_s)
            found["rows"].append(len(own))
            expected = double(data[whole])
            expected.backward()
            found["losses"] = max(found["losses"], abs(elixir.mean_loss(model, loss) - expected).item())
            for name, param in double.named_parameters():
                grad = full(dict(model.named_parameters())[name].grad)
                found["grads"] = max(found["grads"], (grad - param.grad).abs().max().item())
            for each in (optimizer, other):
                each.step()
                each.zero_grad()
            suggested = elixir.suggested_shares(model)
            if suggested and "taken" not in found:
                found["taken"] = [len(found["rows"]), [share.num_rows for share in suggested]]
                sampler.take(suggested, compiled)
                assert elixir.suggested_shares(model) == ()
    found["line"] = lines.said[:1]
    return found


def refuses_to_take(rank: int, world_size: int) -> list[str]:
    """Return the errors of shares that ranks cannot take together, after which each has what it had."""
    shares = shares_of([6, 2])
    model = elixir.prepare(Rows(), mesh=mesh_of([world_size]), shares=shares)
    sampler = elixir.ShareSampler(64, shares, seed=0)
    batches = iter(sampler)
    next(batches)
    found: list[str] = []
    unequal_parts = tuple(elixir.Share(rank=number, num_rows=4, state=part) for number, part in enumerate((0.75, 0.25)))
    wrong = (shares_of([4 + rank, 4 - rank]), shares_of([6, 4]), unequal_parts, shares_of([4, 2, 2]))
    for others in wrong:
        with pytest.raises((elixir.RanksDiffer, elixir.InvalidOption)) as caught:
            sampler.take(others, model)
        found.append(f"{type(caught.value).__name__}: {caught.value}")
    if rank:
        next(batches)
    with pytest.raises(elixir.RanksDiffer) as differ:
        sampler.take(shares_of([4, 4]), model)
    found.append(str(differ.value))
    assert sampler.shares == shares
    assert executor_of(model).ranks.shares == shares
    assert executor_of(model).ranks.weight == pytest.approx((1.5, 0.5)[rank])
    with pytest.raises(elixir.NotPrepared, match="`take` is for a model"):
        sampler.take(shares, Rows())
    return found


# ----------------------------------------------------------------------------------------------------------------------
# What `test_unequal_shares` asks of real ranks that own unequal parts; each function runs on all of them at once.


WHOLE = torch.arange(40.0).view(10, 4)
ROWS = (7, 2, 1)


def all_with_shards(rank: int, world_size: int, state: list[float], checks: list[list[Any]]) -> list[Any]:
    """Return what each of `checks`, names in `ranks_checks` with arguments, returns if each rank owns its shard of
    `state`."""

    with shards_of(state):
        return in_turn(rank, world_size, ranks_checks.__name__, checks)


@contextmanager
def shards_of(state: Sequence[float]) -> Iterator[None]:
    """Let the ranks of models that are prepared inside own the shards `state`, and count alike whatever their rows."""

    def uneven(mesh: DeviceMesh | None, tensor_axis: TensorAxis | None = None) -> Ranks | None:
        ranks = ranks_of(mesh, tensor_axis)
        if ranks is not None:
            ranks.shares = tuple(Share(rank=own, num_rows=0, state=shard) for own, shard in enumerate(state))
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
    """A linear model and its optimizer, on ranks that own the shards `state`, or on one rank if there are none."""

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
        found = {name: full_of_shards(value).clone() for name, value in self.model.state_dict().items()}
        for index, own in self.optimizer.state_dict()["state"].items():
            found |= {f"{index}.{name}": full_of_shards(value).clone() for name, value in own.items()}
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
    whole = {name: full_of_shards(value).clone() for name, value in model.state_dict().items()}
    found = elixir.full_state_dict(model)
    elixir.export(model, out)
    distributed.barrier()
    assert bool(found) == (rank == 0)
    equal(found or whole, whole)
    equal(safetensors.load_file(out), whole)
    copied = copy.deepcopy(model)
    assert [rows_of(param) for param in copied.parameters()] == [rows_of(param) for param in model.parameters()]
    equal({name: full_of_shards(value) for name, value in copied.state_dict().items()}, whole)


def holds(run: Run, part: float) -> None:
    """Fail unless this rank has `part` of weights and statistics, give or take a row of each parameter that is cut."""
    cut = [param for param in run.model.parameters() if rows_of(param) is not None]
    assert [tuple(param.shape) for param in cut] == [(301, 96), (96, 301)]
    state = run.optimizer.state_dict()["state"].values()
    moments = [value for own in state for value in own.values() if rows_of(value) is not None]
    assert len(moments) == 2 * len(cut)
    own_bytes = sum(own_shard(value).nbytes for value in (*cut, *moments))
    whole_bytes = sum(12 * param.numel() for param in cut)
    row_bytes = sum(12 * param.shape[1] for param in cut)
    assert abs(own_bytes - part * whole_bytes) <= row_bytes


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []
