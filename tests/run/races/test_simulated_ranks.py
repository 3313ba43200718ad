"""Two ranks whose copies, compute and collectives come at the worst legal moments have the bits of plain lanes."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.runtime import executor
from elixir_compile.runtime.distributed.ranks import Ranks
from tests.run.processes import spawn
from tests.run.races.combinations import POLICIES, digest
from tests.run.races.simulated import LateCollective, Simulated
from tests.run.ranks_training import Pair, batches, pair_of
from tests.run.ranks_updates import host_budget, local_values, train

# ----------------------------------------------------------------------------------------------------------------------
# What `test_simulated_ranks` asks of two real ranks: the bits of plain lanes, whenever their collectives are done.


MODEL = "odd"


def late_collectives(patch: pytest.MonkeyPatch) -> list[Simulated]:
    """Let executors made from now on have simulated lanes, and ranks late collectives; return the lanes."""
    made: list[Simulated] = []

    def lanes_for(device: torch.device) -> Simulated:
        made.append(Simulated(device, "late"))
        return made[-1]

    def late(usual: Callable[..., Any]) -> Callable[..., Any]:
        def collective(ranks: Ranks, target: torch.Tensor, source: torch.Tensor, what: str) -> LateCollective:
            made[-1].world.current.settle()
            return LateCollective(lambda result, given: usual(ranks, result, given, what), target, source)

        return collective

    patch.setattr(executor, "lanes_for", lanes_for)
    for name in ("all_gather", "reduce_scatter"):
        patch.setattr(Ranks, name, late(getattr(Ranks, name)))
    return made


def bits_under(rank: int, world_size: int, options: dict[str, Any], policies: list[str]) -> int:
    """Train two steps under each of `policies` on plain lanes and on simulated ones; return how many were late."""
    steps = batches(2 * len(policies))
    known = {"planner": "greedy", "dtype": torch.float32, **options}
    if known.pop("is_tight"):
        known["device_memory"] = host_budget(MODEL, steps[0], world_size)

    def bits_of(pair: Pair, begin: Callable[[str], None]) -> list[str]:
        found = []
        for number, policy in enumerate(policies):
            begin(policy)
            losses = train(pair, steps[2 * number : 2 * number + 2])
            found.append(f"{policy}: {losses} {digest(local_values(pair))}")
        return found

    expected = bits_of(pair_of(MODEL, [world_size], **known), lambda policy: None)
    with pytest.MonkeyPatch.context() as patch:
        made = late_collectives(patch)
        pair = pair_of(MODEL, [world_size], **known)
        lanes = executor_of(pair.model).lanes
        assert isinstance(lanes, Simulated)
        assert made == [lanes]
        assert bits_of(pair, lanes.world.follow) == expected
        assert lanes.num_late
        return lanes.num_hidden


# ----------------------------------------------------------------------------------------------------------------------
# Two ranks whose copies, compute and collectives come at the worst legal moments have the bits of plain lanes.


UPDATES = ("after_backward", "in_backward", "across_steps")


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.slow
@pytest.mark.parametrize("is_tight", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("update", UPDATES)
def test_two_ranks_have_the_bits_of_plain_lanes(update: str, is_tight: bool, tmp_path: Path) -> None:
    options = {"update": update, "is_tight": is_tight}
    assert all(spawn(bits_under, 2, options, list(POLICIES), folder=tmp_path, limit_s=900.0, timeout_s=300.0))
