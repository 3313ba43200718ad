"""The order that the verifier finds in a plan is the order that the accesses of its steps have in a run."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import elixir_compile as elixir
from elixir_compile.ir import Plan, StepGraph, Update
from elixir_compile.step.lane_order import Order
from elixir_compile.step.works import COMPUTE, PROGRAM, Do, Work
from tests.run.processes import spawn
from tests.run.races.combinations import Combination, batches_of, run_of
from tests.run.races.home import Moment, updates_at
from tests.run.races.recorded_order import Recording, claims_of, differences, recorded
from tests.run.ranks_training import batches, pair_of
from tests.run.ranks_updates import host_budget, train
from tests.run.training import Run

NUM_STEPS = 3
QUICK = (
    Combination(update=Update.IN_BACKWARD, share=0.5),
    Combination(update=Update.IN_BACKWARD, activations="offload", micro_batches=4),
)
# A CPU has one memory, so an update of parameters on the device by the thread of the updates is left out: it copies
# nothing there, and its accesses have no place among those of compute.
SLOW = (
    *(Combination(update=update, home="device") for update in Update),
    Combination(update=Update.AFTER_BACKWARD, home="split"),
    *(Combination(update=update) for update in Update),
    Combination(update=Update.ACROSS_STEPS, activations="offload"),
    Combination(update=Update.ACROSS_STEPS, share=0.5),
    Combination(update=Update.ACROSS_STEPS, is_mixed=True, activations="recompute"),
    Combination(update=Update.AFTER_BACKWARD, activations="offload", micro_batches=4),
)


def trained(
    case: Combination, folder: Path, moments: Sequence[Moment] = (Moment.LATE,)
) -> tuple[Sequence[Recording], StepGraph, Plan]:
    """Return the accesses of steps of `case`, whose updates are done at each of `moments`, and their graph and plan."""
    batches = batches_of(case, 2 + NUM_STEPS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ELIXIR_CHECK_RACES", "tests.races.checked")
        with run_of(case, folder) as run:
            optimizer: Any = run.optimizer
            run.train(batches[:2])
            optimizer.wait()
            recordings = [recorded_steps(run, batches[2:], moment) for moment in moments]
        compilation = elixir.compilations(run.model)[-1]
    assert compilation.graph is not None
    assert compilation.plan is not None
    return recordings, compilation.graph, compilation.plan


def recorded_steps(run: Run, batches: Sequence[torch.Tensor], moment: Moment) -> Recording:
    """Return the accesses of a step for each of `batches`, whose updates are done at `moment`."""
    optimizer: Any = run.optimizer
    with recorded() as recording, updates_at(moment):
        run.train(batches)
        optimizer.wait()
    return recording


@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=lambda case: str(case)
)
def test_the_rules_order_what_the_run_orders(case: Combination, tmp_path: Path) -> None:
    recordings, graph, plan = trained(case, tmp_path, tuple(Moment))
    claims = claims_of(graph, plan)
    for recording in recordings:
        found = differences(recording, NUM_STEPS, claims)
        assert found.num_agreeing >= 6
        assert found.claimed == []
        assert found.missing == []


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recording, StepGraph, Plan]:
    """Steps without the thread of the updates, whose copies come at moments of their own."""
    case = Combination(update=Update.AFTER_BACKWARD, share=0.5)
    (recording,), graph, plan = trained(case, tmp_path_factory.mktemp("streamed"))
    return recording, graph, plan


def test_without_another_thread_both_orders_are_the_same(streamed: tuple[Recording, StepGraph, Plan]) -> None:
    recording, graph, plan = streamed
    found = differences(recording, NUM_STEPS, claims_of(graph, plan))
    assert found.num_agreeing > 500
    assert found.claimed == found.more == []


@pytest.mark.parametrize("rule", ["the program waits for all", "compute waits for none"])
def test_a_wrong_rule_shows(
    rule: str, streamed: tuple[Recording, StepGraph, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, graph, plan = streamed
    run = Order._run

    def run_unless_compute_waits(self: Order, work: Work, step: int) -> None:
        if work.do is not Do.WAIT or work.actor != COMPUTE:
            run(self, work, step)

    def run_and_wait(self: Order, work: Work, step: int) -> None:
        run(self, work, step)
        self._over[PROGRAM] |= self._over[work.over]

    of = {"compute waits for none": run_unless_compute_waits, "the program waits for all": run_and_wait}
    monkeypatch.setattr(Order, "_run", of[rule])
    found = differences(recording, NUM_STEPS, claims_of(graph, plan))
    assert found.missing if rule == "compute waits for none" else found.claimed


def orders_on_a_rank(rank: int, world_size: int, update: str, home: str) -> dict[str, Any]:
    """Train on several ranks, with shards in their `home`, and return how the rules differ from the run."""
    os.environ["ELIXIR_CHECK_RACES"] = "tests.races.checked"
    steps = batches(2 + NUM_STEPS)
    budget: dict[str, Any] = {"device_memory": host_budget("odd", steps[0], world_size)} if home == "host" else {}
    pair = pair_of("odd", [world_size], dtype=torch.float32, planner="greedy", update=update, **budget)
    optimizer: Any = pair.optimizer
    train(pair, steps[:2])
    optimizer.wait()
    with recorded() as recording:
        train(pair, steps[2:])
        optimizer.wait()
    compilation = elixir.compilations(pair.model)[-1]
    assert compilation.graph is not None
    assert compilation.plan is not None
    sharded = {bucket.id for bucket in compilation.plan.buckets if bucket.is_sharded}
    homes = {str(placed.param) for placed in compilation.plan.placements if placed.bucket in sharded}
    claims = claims_of(compilation.graph, compilation.plan)
    found = differences(recording, NUM_STEPS, claims)
    wrong = [f"claimed {first} {second}" for first, second in found.claimed]
    wrong += [f"missing {first} {second}" for first, second in found.missing]
    return {"agreeing": found.num_agreeing, "homes": sorted(homes), "wrong": wrong}


@pytest.mark.slow
@pytest.mark.parametrize("home", ["device", "host"])
@pytest.mark.parametrize("update", Update)
def test_the_rules_order_what_each_of_two_ranks_orders(update: Update, home: str, tmp_path: Path) -> None:
    for found in spawn(orders_on_a_rank, 2, update.value, home, folder=tmp_path, limit_s=120.0):
        assert home in found["homes"]
        assert found["agreeing"] > 100
        assert found["wrong"] == []
