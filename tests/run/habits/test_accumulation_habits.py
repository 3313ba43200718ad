"""Steps of several micro-batches under a budget: it holds, and losses and weights are those of torch's `aot_eager`."""

from dataclasses import replace

from tests.run.habits.habit import habit
from tests.run.processes import apart
from tests.run.random_runs import Draw, outcome_of

USUAL = replace(
    Draw.of(0), model="stack", share=0.6, num_micro_batches=4, clips=True, update="auto", activations="any",
    planner="milp", is_prepared=True, keeps_zeros=False, accumulate=False,
)  # fmt: skip


def faults_of(draw: Draw) -> list[str]:
    outcome = outcome_of(draw)
    return [*outcome.faults] if outcome.budget_bytes > 1 << 20 else ["too small a budget to compare with"]


@habit(
    "Gradient accumulation: several `loss.backward()` for each `optimizer.step()`",
    area="Training loops",
    note="`device_memory` holds from the second micro-batch of the first step on",
)
def test_micro_batches_keep_the_budget() -> None:
    assert apart(faults_of, USUAL) == []


@habit(
    "One `loss.backward()` for each step, and `optimizer.zero_grad(set_to_none=False)`",
    area="Training loops",
    note="`device_memory` holds from the second step on",
)
def test_zeroed_gradients_keep_the_budget() -> None:
    assert apart(faults_of, replace(USUAL, num_micro_batches=1, keeps_zeros=True)) == []
