"""Two ranks of which one has less memory: each has homes and activations of its own, and the weights are those of ranks
that keep everything, bit by bit."""

from collections import Counter
from pathlib import Path
from typing import Any

import torch

import elixir_compile as elixir
from elixir_compile.analysis.collectives import collectives_of
from elixir_compile.capture.modules import executor_of
from elixir_compile.ir import Plan
from tests.run.processes import spawn
from tests.run.ranks_models import batches
from tests.run.ranks_training import Pair, full, pair_of


def trained(pair: Pair, steps: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights after `steps`."""
    for batch in steps:
        pair.own_backward(batch)
        pair.optimizer.step()
        pair.optimizer.zero_grad()
    return {name: full(value).clone() for name, value in pair.model.state_dict().items()}


def plan_of(pair: Pair) -> Plan:
    (compilation,) = elixir.compilations(pair.model)
    return compilation.plan


def trains(rank: int, world_size: int) -> dict[str, Any]:
    steps = batches(3)
    roomy = pair_of("gpt2", [world_size], dtype=torch.float32)
    expected = trained(roomy, steps)
    kept_bytes = plan_of(roomy).prediction.device_peak_bytes
    pair = pair_of("gpt2", [world_size], dtype=torch.float32, device_memory=int((1.0, 0.6)[rank] * kept_bytes) + 4096)
    found = trained(pair, steps[:1])
    ledger = executor_of(pair.model).ledger
    before = Counter(ledger.times)
    found = trained(pair, steps[1:])
    plan = plan_of(pair)
    return {
        "equal": all(torch.equal(found[name], value) for name, value in expected.items()),
        "rank": plan.rank,
        "collectives": list(map(str, collectives_of(plan))),
        "ran": dict((Counter(ledger.times) - before).items()),
        "homes": sorted({placement.optim.value for placement in plan.placements}),
        "savings": sorted({group.saving.value for group in plan.activations}),
    }


def test_a_rank_with_less_memory_has_homes_of_its_own(tmp_path: Path) -> None:
    rich, poor = spawn(trains, 2, folder=tmp_path, limit_s=200)
    assert (rich["rank"], poor["rank"]) == (0, 1)
    assert rich["equal"]
    assert poor["equal"]
    assert rich["collectives"] == poor["collectives"]
    for name in rich["collectives"]:
        assert rich["ran"][name] == poor["ran"][name] == 2 * rich["collectives"].count(name)
    assert (rich["homes"], rich["savings"]) == (["device"], [])
    assert not any(name.startswith(("offload", "prefetch")) for name in rich["ran"])
    assert "host" in poor["homes"]
    assert any(name.startswith("offload") for name in poor["ran"])
