"""`simulate_ranks`: ranks that differ, each on lanes of its own, meet at their collectives."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_compile.base.errors import InvalidPlan
from elixir_compile.ir import Lane, Plan, Update
from elixir_compile.ir.cost import Measured, Stretch
from elixir_compile.ir.record import Record
from elixir_compile.search import Problem, plan
from elixir_compile.search.reasons import write_out
from elixir_compile.step.seconds import RankStep, busy_share, simulate, simulate_ranks
from tests.pure.search.test_planner import CLUSTERS, chain_of, problem_of
from tests.pure.search.test_shards import drawn, shared_problems

PROBLEM = problem_of(chain_of(6), CLUSTERS["2 x cuda"])


def step_of(problem: Problem, made: Plan, measured: Measured | None = None) -> RankStep:
    return RankStep(graph=problem.graph, plan=made, cluster=problem.cluster, measured=measured or problem.measured)


def ends_s(record: Record) -> dict[str, float]:
    """The end of the last span of each label on each lane."""
    return {f"{span.lane} {span.label}": span.end_s for span in record.spans}


@given(shared_problems(fewest=2), st.integers(0, 2**32), st.booleans(), st.sampled_from(Update))
@settings(max_examples=15)
def test_equal_ranks_play_as_one_does_to_the_bit(problem: Problem, seed: int, is_spread: bool, update: Update) -> None:
    evaluator, draft = drawn(problem, seed, is_spread=is_spread)
    made = replace(write_out(evaluator, draft), update=update)
    alone = simulate(problem.graph, made, problem.cluster, problem.measured)
    step = step_of(problem, made)
    for record in simulate_ranks([step, step, step]):
        if update is Update.IN_BACKWARD:
            assert record.step_s == pytest.approx(alone.step_s, rel=1e-6)
        else:
            assert record == alone


def slow_in(made: Plan, region_id: str, times: float) -> Measured:
    """One region takes `times` as long as all ops of the step together."""
    region = next(region for region in made.regions if region.id == region_id)
    step_s = made.prediction.step_s
    return Measured(stretches=(Stretch(first=region.first, last=region.last, run_s=times * step_s),))


def test_a_rank_that_is_slow_in_one_lap_delays_only_what_waits_for_it() -> None:
    made = plan(PROBLEM, "fsdp_offload")
    regions = [region.id for region in made.regions]
    middle = regions[len(regions) // 2]
    slow = step_of(PROBLEM, made, slow_in(made, middle, 3.0))
    fast = step_of(PROBLEM, made)
    alone = simulate(PROBLEM.graph, made, PROBLEM.cluster)
    quick, late = simulate_ranks([fast, slow])
    assert quick.step_s == late.step_s > 3 * alone.step_s
    before, own = ends_s(alone), ends_s(quick)
    at = before[f"{Lane.COMPUTE} run {middle}"]
    for name, end_s in before.items():
        if end_s < at:
            assert own[name] == end_s
    collectives = [span for span in quick.spans if span.lane in (Lane.GATHER, Lane.REDUCE)]
    others = [span for span in late.spans if span.lane in (Lane.GATHER, Lane.REDUCE)]
    assert [(span.label, span.end_s) for span in collectives] == [(span.label, span.end_s) for span in others]
    assert busy_share(quick) < busy_share(late) <= 1.0


def test_plans_with_other_collectives_are_refused() -> None:
    ours = plan(PROBLEM, "fsdp_offload")
    theirs = plan(PROBLEM, "keep_all")
    with pytest.raises(InvalidPlan, match="ranks issue other collectives"):
        simulate_ranks([step_of(PROBLEM, ours), step_of(PROBLEM, theirs)])
