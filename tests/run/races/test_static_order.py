"""The order that the verifier finds in a plan is the order that the accesses of its steps have in a run."""

from pathlib import Path
from typing import Any

import pytest

import elixir_compile as elixir
from elixir_compile.analysis.lane_works import Works
from elixir_compile.ir import Plan, StepGraph, Tier, Update
from tests.run.races.combinations import Combination, batches_of, run_of
from tests.run.races.recorded_order import Recording, claims_of, differences, recorded

NUM_STEPS = 3
QUICK = (
    Combination(update=Update.IN_BACKWARD, share=0.5),
    Combination(update=Update.ACROSS_STEPS, activations="offload"),
    Combination(update=Update.IN_BACKWARD, activations="offload", micro_batches=4),
)
SLOW = (
    *(Combination(update=update, home=home) for update in Update for home in ("device", "split")),
    *(Combination(update=update) for update in Update),
    Combination(update=Update.ACROSS_STEPS, share=0.5),
    Combination(update=Update.ACROSS_STEPS, is_mixed=True, activations="recompute"),
    Combination(update=Update.AFTER_BACKWARD, activations="offload", micro_batches=4),
)


def trained(case: Combination, folder: Path) -> tuple[Recording, StepGraph, Plan]:
    """Return the accesses of steps of `case`, and their graph and plan."""
    batches = batches_of(case, 2 + NUM_STEPS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ELIXIR_CHECK_RACES", "1")
        with run_of(case, folder) as run:
            optimizer: Any = run.optimizer
            run.train(batches[:2])
            optimizer.wait()
            with recorded() as recording:
                run.train(batches[2:])
                optimizer.wait()
        compilation = elixir.compilations(run.model)[-1]
    assert compilation.graph is not None
    assert compilation.plan is not None
    return recording, compilation.graph, compilation.plan


def in_place_on_a_cpu(plan: Plan) -> set[str]:
    """Return the updates that need no copies if device and host are one: of parameters on the device, on the host."""
    homes = (home for home in plan.placements if home.param is Tier.DEVICE and home.update is not Tier.DEVICE)
    return {f"update {home.bucket}" for home in homes}


@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=lambda case: str(case)
)
def test_the_rules_order_what_the_run_orders(case: Combination, tmp_path: Path) -> None:
    recording, graph, plan = trained(case, tmp_path)
    found = differences(recording, NUM_STEPS, claims_of(graph, plan), in_place_on_a_cpu(plan))
    assert found.num_agreeing >= 6
    assert found.claimed == []
    assert found.missing == []


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recording, StepGraph, Plan]:
    """Steps without the thread of the updates, whose copies come at moments of their own."""
    return trained(Combination(update=Update.AFTER_BACKWARD, share=0.5), tmp_path_factory.mktemp("streamed"))


def test_without_another_thread_both_orders_are_the_same(streamed: tuple[Recording, StepGraph, Plan]) -> None:
    recording, graph, plan = streamed
    found = differences(recording, NUM_STEPS, claims_of(graph, plan), in_place_on_a_cpu(plan))
    assert found.num_agreeing > 500
    assert found.claimed == found.more == []


@pytest.mark.parametrize("rule", ["the program waits for all", "compute waits for none"])
def test_a_wrong_rule_shows(
    rule: str, streamed: tuple[Recording, StepGraph, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, graph, plan = streamed
    wait, apart = Works.wait, Works.apart

    def wait_unless_compute(self: Works, actor: Any, moment: int) -> None:
        if actor is not self.compute:
            wait(self, actor, moment)

    def apart_and_wait(self: Works, *args: Any) -> int:
        moment = apart(self, *args)
        wait(self, self.program, moment)
        return moment

    if rule == "compute waits for none":
        monkeypatch.setattr(Works, "wait", wait_unless_compute)
    else:
        monkeypatch.setattr(Works, "apart", apart_and_wait)
    found = differences(recording, NUM_STEPS, claims_of(graph, plan), in_place_on_a_cpu(plan))
    assert found.missing if rule == "compute waits for none" else found.claimed
