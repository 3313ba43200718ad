"""When buckets are updated: as asked, else across steps where the host does any."""

from dataclasses import replace

import pytest

from elixir_compile.ir import Tier, Update
from elixir_compile.search import plan
from tests.pure.problems import tight_problem

TIGHT = tight_problem()


def test_the_host_updates_across_steps_and_the_device_after_the_backward() -> None:
    tight = plan(TIGHT, "greedy")
    assert any(placement.update is Tier.HOST for placement in tight.placements)
    assert tight.update is Update.ACROSS_STEPS
    assert plan(replace(TIGHT, budget_bytes=2**40), "greedy").update is Update.AFTER_BACKWARD


@pytest.mark.parametrize("update", list(Update))
def test_the_requested_update_time_is_planned(update: Update) -> None:
    assert plan(replace(TIGHT, update=update), "greedy").update is update


def test_only_the_hybrid_optimizer_has_a_choice() -> None:
    problem = replace(TIGHT, hybrid=False, update=Update.IN_BACKWARD)
    assert plan(problem, "greedy").update is Update.AFTER_BACKWARD
