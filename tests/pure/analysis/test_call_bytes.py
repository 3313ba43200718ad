"""Bytes of steps of several calls: by three kinds of calls, and by all calls carried out."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_compile.base.errors import InvalidPlan, NoFeasiblePlan
from elixir_compile.ir import Calls, Saving, plan_from_json, plan_to_json
from elixir_compile.search import Problem, plan
from elixir_compile.search.space.facts import Facts, gather_facts
from elixir_compile.search.space.memory import MemoryModel
from elixir_compile.search.space.profiles import moves_at_use
from elixir_compile.step.call_bytes import ONLY, call_at_most, call_kinds
from elixir_compile.step.timeline import plan_timeline
from tests.pure.calls_walk import peak_of_calls
from tests.pure.search.test_planner import chain_of, problem_of


def problem_of_calls(calls: Calls, layers: int = 4, share: float = 1.0) -> Problem:
    """Return a chain of `layers` in steps of `calls`, under `share` of what it takes with everything kept."""
    problem = replace(problem_of(chain_of(layers)), calls=calls)
    kept = plan(replace(problem, budget_bytes=1 << 40), "keep_all")
    return replace(problem, budget_bytes=int(share * kept.prediction.device_peak_bytes))


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 9), st.integers(1, 9), st.sampled_from([2.0, 0.8, 0.6]), st.sampled_from(list(Saving)))
def test_the_planned_peak_is_that_of_all_calls_carried_out(
    num: int, outstanding: int, share: float, saving: Saving
) -> None:
    calls = Calls(num=num, outstanding=min(num, outstanding))
    problem = replace(problem_of_calls(calls, share=share), savings=frozenset({Saving.KEEP, saving}))
    try:
        made = plan(problem, "greedy")
    except NoFeasiblePlan:
        return
    assert made.prediction.device_peak_bytes <= problem.budget_bytes
    assert plan_timeline(problem.graph, made).peak.nbytes == peak_of_calls(problem.graph, made)


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 9), st.integers(1, 9), st.booleans(), st.booleans(), st.sampled_from([0.9, 0.75, 0.65]))
def test_a_plan_fits_whatever_the_caller_holds(
    num: int, outstanding: int, keeps: bool, loss: bool, share: float
) -> None:
    held = num if keeps else 1
    calls = Calls(
        num=num,
        outstanding=min(num, outstanding),
        more_outputs=held - 1,
        output_grads=held,
        input_grads=held,
        has_loss=loss,
    )
    problem = problem_of_calls(calls, share=share)
    try:
        made = plan(problem, "greedy")
    except NoFeasiblePlan:
        return
    facts = gather_facts(problem)
    at_most = MemoryModel(facts).live_bytes(facts.start_levels, moves_at_use(facts, facts.start_levels))
    kept = plan(replace(problem, budget_bytes=1 << 40), "keep_all")
    exact = plan_timeline(problem.graph, kept).live_bytes
    assert all(nbytes <= at_most[segment] for nbytes, segment in zip(exact, segments_of(facts), strict=True))
    assert plan_timeline(problem.graph, made).peak.nbytes <= problem.budget_bytes


def segments_of(facts: Facts) -> list[int]:
    """Return the segment of each op."""
    return [MemoryModel(facts).segment_of(op) for op in range(len(facts.graph.ops))]


def test_more_outstanding_forwards_need_more_bytes() -> None:
    peaks = [
        plan(problem_of_calls(Calls(num=8, outstanding=k), share=2.0), "keep_all").prediction.device_peak_bytes
        for k in (1, 2, 4, 7)
    ]
    assert peaks == sorted(set(peaks))
    saved = {later - earlier for earlier, later in ((peaks[0], peaks[1]),)}
    assert peaks[2] - peaks[1] == 2 * saved.pop()


def test_activations_are_recomputed_or_offloaded_for_all_outstanding_forwards() -> None:
    calls = Calls(num=8, outstanding=8)
    problem = problem_of_calls(calls, share=0.6)
    made = plan(problem, "greedy")
    assert made.calls == calls
    assert made.bound_s is None
    assert Saving.OFFLOAD in {group.saving for group in made.activations}
    away = sum(group.nbytes for group in made.activations if group.saving is Saving.OFFLOAD)
    assert made.prediction.host_peak_bytes >= 8 * away
    assert plan_from_json(plan_to_json(made)) == made


def test_a_step_of_one_call_is_a_plain_step() -> None:
    assert call_kinds(Calls()) == (ONLY,)
    assert call_at_most(Calls()) is ONLY
    assert '"calls"' not in plan_to_json(plan(problem_of_calls(Calls()), "keep_all"))


@pytest.mark.parametrize(("num", "outstanding"), [(0, 0), (2, 3), (2, 0), (-1, 1)])
def test_impossible_calls_are_refused(num: int, outstanding: int) -> None:
    with pytest.raises(InvalidPlan):
        Calls(num=num, outstanding=outstanding)
