"""What `test_shares` asks of three real ranks that train unequal numbers of rows; see `processes.spawn`."""

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of
from tests.run.ranks_training import adamw, compiled_with, full, hybrid, mesh_of

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


def all_of(rank: int, world_size: int, checks: Sequence[Sequence[Any]]) -> list[Any]:
    """Return what each check returns: the name of a function of this module, and its arguments."""
    return [globals()[name](rank, world_size, *arguments) for name, *arguments in checks]
