"""Two ranks of which one has less memory: each has homes and activations of its own, and the weights are those of ranks
that keep everything, bit by bit."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import elixir_compile as elixir
from elixir_compile.graph.capture.modules import executor_of
from elixir_compile.ir import Lane, Plan, Verb
from elixir_compile.runtime.distributed.control import new_control_channel
from elixir_compile.runtime.lowering import PlacedRegion
from elixir_compile.search import Problem, plan
from elixir_compile.search.joint.ranks import plan_classes
from elixir_compile.session import agreement as unequal
from elixir_compile.session.agreement import agreed_plan
from elixir_compile.step.structure import collectives_of
from tests.run.distributed.test_agreement import greedy, outcome, question
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
    assert compilation.plan is not None
    return compilation.plan


def trains(rank: int, world_size: int, name: str, share: float) -> dict[str, Any]:
    """Train three steps with room for everything, and again with `share` of it on rank 1."""
    steps = batches(3)
    roomy = pair_of(name, [world_size], dtype=torch.float32)
    expected = trained(roomy, steps)
    kept_bytes = plan_of(roomy).prediction.device_peak_bytes
    budget = int((1.0, share)[rank] * kept_bytes) + 4096
    # Smaller micro-batches would round differently.
    pair = pair_of(name, [world_size], dtype=torch.float32, device_memory=budget, micro_batches=1)
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


class Lines(logging.Handler):
    """The lines that were logged."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def suggests(rank: int, world_size: int) -> list[str]:
    """Train nine steps in which each region of rank 1 takes a while, and return the lines about uneven ranks."""
    lines = Lines()
    logging.getLogger("elixir_compile").addHandler(lines)
    logging.getLogger("elixir_compile").setLevel(logging.INFO)
    pair = pair_of("odd", [world_size], report=True)
    run = PlacedRegion.forward
    with pytest.MonkeyPatch.context() as patch:
        if rank:

            def slow(region: PlacedRegion, box: list[Any]) -> Any:
                with region._ledger.span(Lane.COMPUTE, region._label, times=0):
                    time.sleep(0.05)
                return run(region, box)

            patch.setattr(PlacedRegion, "forward", slow)
        trained(pair, batches(9))
    return [line for line in lines.said if line.startswith("uneven")]


def test_other_rows_are_suggested_once_if_a_rank_is_slower(tmp_path: Path) -> None:
    """Emulated: rank 1 sleeps in each region."""
    first, second = spawn(suggests, 2, folder=tmp_path, limit_s=400)
    assert second == []  # one rank writes
    (line,) = first
    rows = [int(number) for number in line.partition("shares would be ")[2].partition(":")[0].split("/")]
    assert rows[0] > rows[1] >= 2


def swapped(made: Plan) -> Plan:
    """The plan with its first two gathers in the other order."""
    actions = list(made.schedules[0].actions)
    first, second = [at for at, action in enumerate(actions) if action.verb is Verb.GATHER][:2]
    actions[first], actions[second] = actions[second], actions[first]
    return replace(made, schedules=(replace(made.schedules[0], actions=tuple(actions)),))


def agrees(rank: int, world_size: int) -> dict[str, Any]:
    """What comes of plans that cannot be followed together, of a rank without room, and of a rank that fails."""
    control = new_control_channel(range(world_size))
    kept = plan(question(world_size), "keep_all").prediction.device_peak_bytes
    roomy, small = question(world_size, budget_bytes=2 * kept), question(world_size, budget_bytes=int(0.6 * kept))

    def asked(least: Problem, search: Callable[[Problem], Plan] = greedy) -> dict[str, Any]:
        return outcome(lambda: agreed_plan(control, least if rank else roomy, search, may_differ=True))

    def fails(problem: Problem) -> Plan:
        if rank:
            raise ValueError("no search today")
        return greedy(problem)

    found = {"fit": asked(small), "short": asked(replace(small, budget_bytes=10)), "failed": asked(small, fails)}
    found["equal"] = outcome(
        lambda: agreed_plan(control, small, lambda problem: searched_by(0, rank, problem), may_differ=True)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unequal, "plan_classes", lambda *args: hand_made(plan_classes(*args), rank))
        found["swapped"] = asked(small)
    return found


def searched_by(leader: int, rank: int, problem: Problem) -> Plan:
    assert rank == leader, "equal ranks are searched once"
    assert problem.released is None
    return greedy(problem)


def hand_made(plans: Sequence[Plan], rank: int) -> Sequence[Plan]:
    return [swapped(made) if rank else made for made in plans]


def test_ranks_that_differ_agree_or_all_raise(tmp_path: Path) -> None:
    rich, poor = spawn(agrees, 2, folder=tmp_path, limit_s=400)
    assert rich["fit"]["budget_bytes"] > poor["fit"]["budget_bytes"]
    assert rich["equal"]["digest"] == poor["equal"]["digest"]
    assert rich["short"] == poor["short"]
    assert rich["short"]["error"] == "NoFeasiblePlan"
    assert [own["swapped"]["error"] for own in (rich, poor)] == ["RanksDiffer"] * 2
    assert "gather and reduce in another order" in rich["swapped"]["text"]
    assert (rich["failed"]["error"], poor["failed"]["error"]) == ("PeerFailed", "ValueError")
    assert "no search today" in rich["failed"]["text"]


def test_a_rank_with_less_memory_has_homes_of_its_own(tmp_path: Path) -> None:
    rich, poor = spawn(trains, 2, "gpt2", 0.6, folder=tmp_path, limit_s=400)
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
