"""Bytes of steps of several calls, full and lean, by the halves of calls and by all calls carried out."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_compile.base.errors import IllegalSchedule, InvalidPlan, NoFeasiblePlan
from elixir_compile.ir import (
    BackwardOrder,
    BucketRef,
    Calls,
    LeanCalls,
    Plan,
    Saving,
    Verb,
    plan_from_json,
    plan_to_json,
)
from elixir_compile.search import Problem, plan
from elixir_compile.search.space.facts import Facts, gather_facts
from elixir_compile.search.space.memory import MemoryModel
from elixir_compile.search.space.profiles import moves_at_use
from elixir_compile.step import closing_verbs, verify
from elixir_compile.step.bucket_bytes import ONLY, call_at_most
from elixir_compile.step.plan_rows import CallBytes, Halves, PlanRows, TwoPrograms, halves, num_full_calls, walked
from elixir_compile.step.timeline import plan_timeline
from tests.pure.memory_walk import peak_of_calls, turns_of
from tests.pure.problems import chain_of, pair_of, problem_of, problem_of_mlps

# ----------------------------------------------------------------------------------------------------------------------
# Bytes of steps of several calls: by three kinds of calls, and by all calls carried out.


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
    assert {half.call(Calls()) for half, _ in halves(Calls(), 1)} == {ONLY}
    assert call_at_most(Calls()) is ONLY
    assert '"calls"' not in plan_to_json(plan(problem_of_calls(Calls()), "keep_all"))


@pytest.mark.parametrize(("num", "outstanding"), [(0, 0), (2, 3), (2, 0), (-1, 1)])
def test_impossible_calls_are_refused(num: int, outstanding: int) -> None:
    with pytest.raises(InvalidPlan):
        Calls(num=num, outstanding=outstanding)


# ----------------------------------------------------------------------------------------------------------------------
# Steps with full and lean calls: bytes by kinds of halves, and by all calls carried out; what the verifier refuses.


KNOWN = (BackwardOrder.FIRST_FIRST, BackwardOrder.LAST_FIRST)


def recomputing(problem: Problem) -> tuple[list[int], list[int]]:
    """Return the modes that keep all activations, and those that recompute the most."""
    layers = gather_facts(problem).layers
    return [0] * len(layers), [max(i for i, mode in enumerate(own.modes) if not mode.away) for own in layers]


def small_pair(order: BackwardOrder = BackwardOrder.FIRST_FIRST, num_full: int = 2) -> tuple[Problem, Plan]:
    """Return a pair that keeps and recomputes, in a step of six calls that are all outstanding."""
    problem = problem_of_mlps(Calls(num=6, outstanding=6, backward_order=order))
    return problem, pair_of(problem, *recomputing(problem), num_full)


@st.composite
def pairs(draw: st.DrawFn, orders: tuple[BackwardOrder, ...] = KNOWN) -> tuple[Problem, Plan]:
    num = draw(st.integers(2, 9))
    outstanding = draw(st.integers(2, num))
    calls = Calls(num=num, outstanding=outstanding, backward_order=draw(st.sampled_from(orders)))
    problem = problem_of_mlps(calls, num_layers=3)
    facts = gather_facts(problem)
    full, lean = ([draw(st.integers(0, len(layer.modes) - 1)) for layer in facts.layers] for _ in range(2))
    levels = draw(st.sampled_from([facts.start_levels, facts.furthest_levels]))
    return problem, pair_of(problem, full, lean, draw(st.integers(1, outstanding - 1)), levels)


@settings(max_examples=30, deadline=None)
@given(pairs())
def test_the_planned_peak_of_full_and_lean_calls_is_that_of_all_calls_carried_out(found: tuple[Problem, Plan]) -> None:
    problem, made = found
    assert made.lean is not None
    assert plan_timeline(problem.graph, made).peak.nbytes == peak_of_calls(problem.graph, made)
    full, lean = (CallBytes(PlanRows(problem.graph, own)) for own in (made, made.of_lean_calls()))
    halves = Halves(made.calls, made.lean.num_full)
    assert TwoPrograms(full, lean).peak_bytes(halves) == made.prediction.device_peak_bytes


@settings(max_examples=20, deadline=None)
@given(pairs(orders=(BackwardOrder.ANY,)), st.data())
def test_a_step_in_any_order_holds_at_most_the_planned_peak(found: tuple[Problem, Plan], data: st.DataObject) -> None:
    problem, made = found
    orders = [turns_of(replace(made.calls, backward_order=order)) for order in KNOWN]
    for turns in (*orders, drawn_turns(data, made.calls)):
        assert peak_of_calls(problem.graph, made, turns) <= made.prediction.device_peak_bytes


def drawn_turns(data: st.DataObject, calls: Calls) -> list[int | None]:
    """Return forwards and backward passes in any order in which no more forwards wait than `calls` says."""
    turns: list[int | None] = []
    started = waiting = 0
    while len(turns) < 2 * calls.num:
        may_start = started < calls.num and waiting < calls.outstanding
        # If all forwards may wait, they come first.
        if may_start and (not waiting or not calls.alternate or data.draw(st.booleans())):
            started, waiting = started + 1, waiting + 1
            turns.append(None)
        else:
            waiting -= 1
            turns.append(data.draw(st.integers(0, waiting)))
    return turns


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 9), st.integers(2, 9), st.integers(1, 8), st.booleans(), st.booleans(), st.data())
def test_what_the_caller_holds_counts_as_if_all_calls_were_alike(
    num: int, outstanding: int, num_full: int, keeps: bool, loss: bool, data: st.DataObject
) -> None:
    """Full and lean calls with the same treatment hold what a plan of one treatment holds; in 1F1B, at most that: it
    is counted as if the last forward came after all other backward passes."""
    outstanding, held = min(num, outstanding), num if keeps else 1
    calls = Calls(
        num=num,
        outstanding=outstanding,
        more_outputs=held - 1,
        output_grads=held,
        input_grads=held,
        has_loss=loss,
        backward_order=data.draw(st.sampled_from(tuple(BackwardOrder))),
    )
    problem = problem_of_mlps(calls, num_layers=3)
    modes = [data.draw(st.integers(0, len(layer.modes) - 1)) for layer in gather_facts(problem).layers]
    made = pair_of(problem, modes, modes, min(num_full, outstanding - 1))
    alike = plan_timeline(problem.graph, replace(made, lean=None)).peak.nbytes
    assert made.prediction.device_peak_bytes <= alike
    if outstanding == num:
        assert made.prediction.device_peak_bytes == alike
    own = CallBytes(PlanRows(problem.graph, made))
    assert TwoPrograms(own, own).peak_bytes(Halves(made.calls, outstanding)) == alike


@pytest.mark.parametrize(("outstanding", "num_full"), [(8, 3), (3, 1), (3, 2)])
def test_full_forwards_are_those_that_find_room(outstanding: int, num_full: int) -> None:
    """All forwards first, the first ones are full; in 1F1B, each backward of a full forward makes room for another."""
    calls = Calls(num=8, outstanding=outstanding, backward_order=BackwardOrder.FIRST_FIRST)
    kinds = [half.is_lean for half, _ in walked(calls, num_full) if not half.is_backward]
    expected = [number % outstanding >= num_full for number in range(8)]
    assert kinds == (expected if outstanding < 8 else [number >= num_full for number in range(8)])
    assert num_full_calls(calls, num_full) == kinds.count(False)


def test_a_pair_is_legal_and_comes_back_from_its_file() -> None:
    for order in BackwardOrder:
        problem, made = small_pair(order)
        verify(problem.graph, made)
        again = plan_from_json(plan_to_json(made))
        assert again == made
        assert "lean calls beside 2 full" in str(made)
        alike = replace(made, lean=None)
        assert '"lean"' not in plan_to_json(alike)
        assert "lean" not in str(alike)


def test_one_full_forward_too_many_is_refused() -> None:
    problem, made = small_pair(BackwardOrder.ANY)
    assert made.lean is not None
    with pytest.raises(IllegalSchedule, match="peak"):
        verify(problem.graph, replace(made, lean=replace(made.lean, num_full=3)))


def test_lean_calls_that_move_other_buckets_are_refused() -> None:
    problem, made = small_pair()
    assert made.lean is not None
    schedule = made.lean.schedules[0]
    reduces = [at for at, action in enumerate(schedule.actions) if action.verb is Verb.REDUCE]
    swapped = list(schedule.actions)
    swapped[reduces[0]], swapped[reduces[1]] = swapped[reduces[1]], swapped[reduces[0]]
    for actions in ([*schedule.actions[: reduces[0]], *schedule.actions[reduces[0] + 1 :]], swapped):
        lean = replace(made.lean, schedules=(replace(schedule, actions=tuple(actions)),))
        with pytest.raises(IllegalSchedule):
            verify(problem.graph, replace(made, lean=lean))


def test_a_lean_program_is_verified_like_the_first() -> None:
    problem, made = small_pair()
    assert made.lean is not None
    recomputed = next(own for own in made.lean.activations if own.saving is Saving.RECOMPUTE)
    kept = tuple(replace(own, saving=Saving.KEEP) if own is recomputed else own for own in made.lean.activations)
    with pytest.raises(IllegalSchedule):
        verify(problem.graph, replace(made, lean=replace(made.lean, activations=kept)))


def test_lean_calls_without_a_schedule_are_refused() -> None:
    _, made = small_pair()
    assert made.lean is not None
    with pytest.raises(InvalidPlan, match="expected one for each rank"):
        replace(made, lean=replace(made.lean, schedules=()))


def test_a_bucket_with_another_last_action_in_lean_calls_is_not_updated_in_the_backward() -> None:
    problem = small_pair()[0]
    made = pair_of(problem, *recomputing(problem), 2, gather_facts(problem).furthest_levels)
    closing = closing_verbs(made)
    assert made.lean is not None
    schedule, bucket = made.lean.schedules[0], next(name for name, verb in closing.items() if verb is Verb.RELEASE)
    actions = [own for own in schedule.actions if (own.verb, own.target) != (Verb.RELEASE, BucketRef(bucket))]
    other = replace(made, lean=replace(made.lean, schedules=(replace(schedule, actions=tuple(actions)),)))
    assert closing_verbs(other) == {name: verb for name, verb in closing.items() if name != bucket}


@pytest.mark.parametrize("num_full", [0, 6, -1])
def test_impossible_numbers_of_full_forwards_are_refused(num_full: int) -> None:
    _, made = small_pair()
    assert made.lean is not None
    lean = made.lean
    with pytest.raises(InvalidPlan):
        replace(made, lean=LeanCalls(num_full=num_full, activations=(), regions=lean.regions, schedules=lean.schedules))
