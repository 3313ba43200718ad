"""What `test_take_shares` asks of real ranks of which one is slower for each row, **emulated** by sleeping."""

import logging
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.ir import Lane
from elixir_compile.runtime.lowering import PlacedRegion
from tests.run.ranks_training import adamw, compiled_with, full, hybrid, mesh_of
from tests.run.shares_checks import WIDTH, Rows, shares_of

STEPS, BATCH = 14, 16
ROW_S = 0.03
"""Seconds that a region of the slow rank sleeps for each of its rows; of the others a third. A step takes 25 to 60 ms
besides, which would hide what other rows gain if the sleeps were as short."""


def sleeping(rank: int, rows: list[int]) -> Any:
    """Return a forward of regions that sleeps for each of the `rows` of the present batch, within the seconds that
    count as compute."""
    run = PlacedRegion.forward

    def slow(region: PlacedRegion, box: list[Any]) -> Any:
        with region._ledger.span(Lane.COMPUTE, region._label, times=0):
            time.sleep(ROW_S * rows[0] / (1 if rank == 1 else 3))
        return run(region, box)

    return slow


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
    data = torch.randn(STEPS * BATCH, WIDTH, dtype=torch.float64, generator=generator)
    sampler = elixir.ShareSampler(len(data), shares, seed=0)
    alone = elixir.ShareSampler(len(data), shares_of([BATCH]), rank=0, seed=0)
    found: dict[str, Any] = {"rows": [], "step_s": [], "grads": 0.0, "losses": 0.0}
    present = [0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlacedRegion, "forward", sleeping(rank, present))
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


def all_of(rank: int, world_size: int, checks: Sequence[Sequence[Any]]) -> list[Any]:
    """Return what each check returns: the name of a function of this module, and its arguments."""
    return [globals()[name](rank, world_size, *arguments) for name, *arguments in checks]
