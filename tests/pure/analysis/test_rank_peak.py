"""Bytes of all stages that a rank runs: those of a stage as in its plan, and of others what outlasts their calls."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.ir import BackwardOrder, Calls, Kind, Phase, Plan, Saving, StepGraph
from elixir_compile.search import plan
from elixir_compile.step import liveness
from elixir_compile.step.bucket_bytes import resting
from elixir_compile.step.stages import Done, Run, StageBytes, most_beside, stage_peaks
from elixir_compile.step.timeline import plan_timeline
from tests.pure.analysis.test_call_bytes import problem_of_calls
from tests.pure.analysis.test_lean_bytes import small_pair
from tests.pure.calls_walk import order_of

LETTERS = {"F": Phase.FORWARD, "B": Phase.BACKWARD}


def runs_of(order: str) -> list[Run]:
    """Return runs from their texts, stage, letter and micro-batch: `0F0 1F0 1B0 0B0`."""
    return [Run(int(run[0]), LETTERS[run[1]], int(run[2])) for run in order.split()]


def kept(calls: Calls) -> tuple[StepGraph, Plan]:
    problem = problem_of_calls(calls, share=2.0)
    return problem.graph, plan(problem, "keep_all")


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 9), st.integers(1, 9), st.sampled_from([2.0, 0.8, 0.6]), st.sampled_from(list(Saving)))
def test_one_stage_has_the_peak_of_its_plan(num: int, outstanding: int, share: float, saving: Saving) -> None:
    calls = Calls(num=num, outstanding=min(num, outstanding))
    problem = replace(problem_of_calls(calls, share=share), savings=frozenset({Saving.KEEP, saving}))
    try:
        made = plan(problem, "greedy")
    except NoFeasiblePlan:
        return
    order = order_of(num, calls.outstanding)
    runs = [Run(0, LETTERS[letter], order[:at].count(letter)) for at, letter in enumerate(order)]
    (peak,) = stage_peaks([[StageBytes(problem.graph, made)]], runs)
    assert peak.beside_bytes == 0
    assert peak.own_bytes == plan_timeline(problem.graph, made).peak.nbytes


@pytest.mark.parametrize("order", [BackwardOrder.FIRST_FIRST, BackwardOrder.LAST_FIRST])
@pytest.mark.parametrize("num_full", [1, 3, 5])
def test_one_stage_with_lean_calls_has_the_peak_of_its_plan(order: BackwardOrder, num_full: int) -> None:
    problem, made = small_pair(order, num_full)
    micro_batches = list(range(made.calls.num))
    runs = [Run(0, Phase.FORWARD, number) for number in micro_batches]
    reverse = order is BackwardOrder.LAST_FIRST
    runs += [Run(0, Phase.BACKWARD, number) for number in sorted(micro_batches, reverse=reverse)]
    (peak,) = stage_peaks([[StageBytes(problem.graph, made)]], runs)
    assert peak.own_bytes == plan_timeline(problem.graph, made).peak.nbytes


def held_by_hand(graph: StepGraph, made: Plan, num_waiting: int, *, has_grads: bool) -> int:
    """Return what a stage with everything on the device holds while `num_waiting` of its forwards wait."""
    num_forward = sum(op.phase is Phase.FORWARD for op in graph.ops)
    lives, outputs = liveness(graph).lives, graph.outputs
    moved = [storage for storage in graph.storages if storage.kind in (Kind.SAVED, Kind.TEMP)]
    waiting = [s for s in moved if s.id in outputs or lives[s.id].first < num_forward <= lives[s.id].last]
    inputs = made.calls.num * sum(storage.nbytes for storage in graph.storages if storage.kind is Kind.INPUT)
    homes = zip(made.buckets, made.placements, strict=True)
    total = inputs + made.base_bytes + sum(nbytes for home in homes for _, nbytes in resting(*home))
    grads = sum(storage.nbytes for storage in graph.storages if storage.kind is Kind.GRAD) if has_grads else 0
    return total + grads + num_waiting * sum(storage.nbytes for storage in waiting)


def test_a_stage_between_its_runs_holds_what_waits_and_the_sums_of_gradients() -> None:
    graph, made = kept(Calls(num=4, outstanding=4))
    stage = StageBytes(graph, made)
    for started, ended in [(0, 0), (1, 0), (4, 0), (4, 1), (4, 3), (4, 4)]:
        by_hand = held_by_hand(graph, made, started - ended, has_grads=ended > 0)
        assert stage.idle_bytes(Done(started, ended)) == by_hand


def test_stages_one_after_another_hold_less_than_their_peaks_together() -> None:
    graph, made = kept(Calls(num=2, outstanding=2))
    stage = StageBytes(graph, made)
    runs = runs_of("0F0 0F1 1F0 1F1 1B1 1B0 0B1 0B0")  # breadth-first
    first, second = stage_peaks([[stage], [stage]], runs)
    alone = plan_timeline(graph, made).peak.nbytes
    # The first stage has its peak after all backward passes of the second, whose gradients wait for the update.
    assert first.own_bytes == alone
    assert first.beside_bytes == held_by_hand(graph, made, 0, has_grads=True)
    # Both forwards of the first stage wait whenever the second runs; at its update, there are only gradients.
    beside_bytes = [held_by_hand(graph, made, 2, has_grads=False), held_by_hand(graph, made, 0, has_grads=True)]
    assert most_beside([stage], 0, 1, runs) == max(beside_bytes)
    assert second.beside_bytes in beside_bytes
    assert max(first.nbytes, second.nbytes) < 2 * alone


@pytest.mark.parametrize(("held", "most", "times"), [("more_outputs", 2, [0, 1, 2]), ("input_grads", 3, [0, 1, 3])])
def test_what_the_caller_holds_counts_between_runs(held: str, most: int, times: list[int]) -> None:
    plain, calls = Calls(num=3, outstanding=3), Calls(num=3, outstanding=3, **{held: most})
    graph, made = kept(plain)
    without, there = (StageBytes(graph, replace(made, calls=each)) for each in (plain, calls))
    more = [there.idle_bytes(Done(*state)) - without.idle_bytes(Done(*state)) for state in ((3, 0), (3, 1), (3, 3))]
    assert more[1] > 0
    assert more == [number * more[1] for number in times]
    assert there.idle_bytes(Done(3, 3), is_over=True) == without.idle_bytes(Done(3, 3), is_over=True)
