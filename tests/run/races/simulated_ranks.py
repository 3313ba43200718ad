"""What `test_simulated_ranks` asks of two real ranks: the bits of plain lanes, whenever their collectives are done."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.runtime import executor
from elixir_compile.runtime.distributed.ranks import Ranks
from tests.run.races.combinations import digest
from tests.run.races.simulated import LateCollective, Simulated
from tests.run.ranks_models import batches
from tests.run.ranks_training import Pair, pair_of
from tests.run.ranks_updates import host_budget, local_values, train

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
            return LateCollective(lambda landing, given: usual(ranks, landing, given, what), target, source)

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
        assert lanes.num_landed
        return lanes.num_hidden
