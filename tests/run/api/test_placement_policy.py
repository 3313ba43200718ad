"""The option `placement_policy`: every legal combination of Gemini's fractions trains the same bits as torch alone."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import elixir_compile as elixir
from elixir_compile.ir import Bucket, Placement, Plan, Tier
from tests.run.models import Stack, seeded, vectors
from tests.run.processes import spawn

OPTIONS = {"inner": "aot_eager", "report": False, "plan_cache": False, "replan": False, "planner": "greedy"}
BATCH = vectors(1, rows=64)[0]
NUM_STEPS = 2


def legal() -> Iterator[dict[str, float]]:
    """The combinations of the fractions 0, 0.5 and 1 that Gemini documents as useful."""
    for shard, optim, param in itertools.product((0.0, 0.5, 1.0), repeat=3):
        if param == 0.0 or shard == optim == 1.0:
            yield {"shard_param_frac": shard, "offload_optim_frac": optim, "offload_param_frac": param}


def compiled(model: nn.Module, **options: object) -> Any:
    torch._dynamo.reset()  # it keeps at most eight compiled forms of a forward
    return torch.compile(model, backend="elixir", options={**OPTIONS, **options})


def small() -> nn.Module:
    return Stack(num_blocks=2)


def losses(step: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for _ in range(NUM_STEPS):
        loss = step(BATCH)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().clone())
    return found


def share_of(placed: list[tuple[Bucket, Placement]], met: list[bool]) -> float:
    numels = [bucket.numel for bucket, _ in placed]
    return sum(itertools.compress(numels, met)) / sum(numels)


def assert_placed(plan: Plan, fractions: dict[str, float]) -> None:
    """Say that the placements of `plan` are the fractions, but for less than the largest bucket."""
    placed = list(zip(plan.buckets, plan.placements, strict=True))
    excess = max(bucket.numel for bucket in plan.buckets) / sum(bucket.numel for bucket in plan.buckets)
    sharded = [(bucket, own) for bucket, own in placed if bucket.is_sharded]
    found = {
        "offload_optim_frac": share_of(placed, [own.optim is Tier.HOST for _, own in placed]),
        "offload_param_frac": share_of(placed, [own.param is Tier.HOST for _, own in placed]),
    }
    if sharded:
        found["shard_param_frac"] = share_of(sharded, [not own.resident for _, own in sharded])
    for name, share in found.items():
        assert 0 <= share - fractions[name] < excess, (name, share, fractions)


def test_every_legal_combination_trains_the_bits_of_torch() -> None:
    """One model takes each combination in turn, so each of them also takes over what the one before it left where."""
    model, twin = seeded(small), seeded(small)
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-2)
    other = torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True)
    for fractions in legal():
        step = compiled(model, placement_policy="static", **fractions)
        ours, theirs = losses(step, optimizer), losses(twin, other)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), fractions
        assert_placed(elixir.compilations(step)[-1].plan, fractions)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


FEW = (
    {"shard_param_frac": 0.5, "offload_optim_frac": 0.5, "offload_param_frac": 0.0},
    {"shard_param_frac": 1.0, "offload_optim_frac": 1.0, "offload_param_frac": 0.5},
)


def trains(rank: int, world_size: int, combinations: list[dict[str, float]]) -> list[float]:
    """Return the losses of `combinations` in turn; every rank has the same batch, so that the twin alone has them."""
    mesh = init_device_mesh("cpu", (world_size,))
    twin = seeded(small)
    other = torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True)
    expected = losses(twin, other)
    found: list[float] = []
    for fractions in combinations:
        model = elixir.prepare(seeded(small), mesh=mesh)
        optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-2)
        step = compiled(model, placement_policy="static", **fractions)
        ours = losses(step, optimizer)
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True)), fractions
        plan = elixir.compilations(step)[-1].plan
        assert_placed(plan, fractions)
        assert any(bucket.is_sharded for bucket in plan.buckets)
        found += [loss.item() for loss in ours]
    return found


@pytest.mark.parametrize(
    "combinations", [FEW, pytest.param(tuple(legal()), marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_combinations_train_the_bits_of_torch_on_two_ranks(
    combinations: tuple[dict[str, float], ...], tmp_path: Path
) -> None:
    first, second = spawn(trains, 2, combinations, folder=tmp_path)
    assert first == second
    assert len(first) == NUM_STEPS * len(combinations)


class TwoGraphs(nn.Module):
    """A graph break between two stacks: each has a graph, with buckets of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Stack(num_blocks=1), Stack(num_blocks=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first.features(x)
        torch._dynamo.graph_break()
        return self.second(x)


def test_each_graph_keeps_the_fractions_and_an_evaluation_moves_nothing() -> None:
    model, twin = seeded(TwoGraphs), seeded(TwoGraphs)
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-2)
    other = torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True)
    fractions = {"offload_optim_frac": 1.0, "offload_param_frac": 0.5}
    step = compiled(model, placement_policy="static", **fractions)
    homes: list[list[Placement]] = []
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(losses(step, optimizer), losses(twin, other), strict=True))
        plans = [found.plan for found in elixir.compilations(step)]
        homes.append(sorted({own for plan in plans for own in plan.placements}, key=lambda own: own.bucket))
        with torch.no_grad():
            assert torch.equal(step(BATCH), twin(BATCH))
    assert homes[0] == homes[1]
    for plan in plans[:2]:
        assert_placed(plan, fractions)


def in_turns(step: Any, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Train four micro-batches as 1F1B does: two forwards wait, then each backward is followed by a forward."""
    rows = BATCH.chunk(4)
    waiting = [step(own) for own in rows[:2]]
    done: list[torch.Tensor] = []
    for own in (*rows[2:], None, None):
        done.append(waiting.pop(0))
        done[-1].backward()
        waiting += [] if own is None else [step(own)]
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(done).detach()


def test_a_stage_of_a_pipeline_keeps_the_fractions() -> None:
    model, twin = elixir.prepare(seeded(small), outstanding=2, calls=4), seeded(small)
    optimizer = elixir.HybridAdamW(model.parameters(), lr=1e-2)
    other = torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True)
    fractions = {"offload_optim_frac": 1.0, "offload_param_frac": 0.5}
    step = compiled(model, placement_policy="static", **fractions)
    for _ in range(NUM_STEPS):
        assert torch.equal(in_turns(step, optimizer), in_turns(twin, other))
    assert_placed(elixir.compilations(step)[-1].plan, fractions)


def test_state_stays_with_parameters_of_another_optimizer() -> None:
    model = seeded(small)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = compiled(model, placement_policy="static", offload_optim_frac=0.5)
    with pytest.raises(elixir.StateNotApart, match=r"HybridAdamW\(model\.parameters\(\)\) before the first forward"):
        losses(step, optimizer)
