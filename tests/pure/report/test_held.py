"""`held`: one pass over a plan gives what separate timelines and walks gave for each bucket and region."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_compile.ir import (
    Action,
    Bucket,
    BucketRef,
    GradientRef,
    GroupRef,
    Kind,
    Plan,
    RegionRef,
    StepGraph,
    Target,
    Update,
    Verb,
)
from elixir_compile.search import Problem, plan
from elixir_compile.step import plan_rows, plan_timeline
from elixir_compile.step.bucket_bytes import bytes_at
from elixir_compile.step.plan_rows import PlanRows
from elixir_compile.tools.report.explain import answer, answer_of, bucket_answer, region_answer
from elixir_compile.tools.report.tables import Move, Subject, Survey
from tests.pure.plans import mixed_plans
from tests.pure.problems import tight_problem
from tests.pure.search.test_planner import needed_bytes, problems

TIGHT = tight_problem()
MADE = plan(TIGHT, "greedy")


def peak_bytes(made: Plan, bucket: Bucket, graph: StepGraph) -> Mapping[Kind, int]:
    """Return the bytes of `bucket` at the fullest position of the peak's op, by kind: with it, less without it."""
    empty = replace(bucket, nbytes=0, state_nbytes=0)
    without = replace(made, buckets=tuple(empty if other.id == bucket.id else other for other in made.buckets))
    storages = tuple(replace(s, nbytes=0) if s.of in bucket.params else s for s in graph.storages)
    timeline = plan_timeline(graph, made)
    position = timeline.positions[timeline.ops.index(made.prediction.device_peak_at)]
    held = Counter[Kind]()
    for row in PlanRows(graph, made).all():
        held[row.kind] += bytes_at(position, [row])
    for row in PlanRows(replace(graph, storages=storages), without).all():
        held[row.kind] -= bytes_at(position, [row])
    return {kind: nbytes for kind, nbytes in held.items() if nbytes}


def moves_of(made: Plan, targets: Collection[Target]) -> tuple[Move, ...]:
    """Return the moves of `targets`, looking for the wait and the region of each action anew."""
    actions = made.schedules[0].actions
    moves: list[Move] = []
    last = ""
    for at, action in enumerate(actions):
        if isinstance(action.target, RegionRef):
            last = action.target.region
        elif action.target in targets and action.verb is not Verb.WAIT:
            wait = Action(verb=Verb.WAIT, target=action.target)
            is_copy = action.verb in (Verb.GATHER, Verb.OFFLOAD, Verb.PREFETCH)
            end = next((i for i in range(at, len(actions)) if actions[i] == wait), at) if is_copy else at
            num_ahead = sum(between.verb is Verb.RUN for between in actions[at:end])
            runs = (other.target.region for other in actions[end:] if isinstance(other.target, RegionRef))
            region = next(runs, "") if action.verb in (Verb.GATHER, Verb.PREFETCH) else last
            moves.append(Move(verb=action.verb, region=region, num_ahead=num_ahead))
    return tuple(moves)


def assert_one_pass_says_the_same(made: Plan, graph: StepGraph) -> None:
    survey = Survey(made, graph)
    timeline = plan_timeline(graph, made)
    assert survey.held is not None
    assert survey.held.timeline == timeline
    for bucket in made.buckets:
        found = bucket_answer(survey, bucket, Subject(name=bucket.id, buckets=(bucket,)))
        assert found.peak_bytes == peak_bytes(made, bucket, graph), bucket.id
        assert found.moves == moves_of(made, (BucketRef(bucket.id), GradientRef(bucket.id)))
    for region in made.regions:
        found = region_answer(survey, region)
        first, last = timeline.ops.index(region.first), timeline.ops.index(region.last)
        assert found.num_ops == last + 1 - first
        assert found.peak_bytes == max(timeline.live_bytes[first : last + 1])
        for verb, told in ((Verb.OFFLOAD, found.leaving), (Verb.PREFETCH, found.returning)):
            moving = [
                group
                for group in made.activations
                if any((m.verb, m.region) == (verb, region.id) for m in moves_of(made, (GroupRef(group.id),)))
            ]
            assert list(told) == moving


@given(mixed_plans())
@settings(max_examples=25)
def test_one_pass_says_the_same_of_plans_with_activations_that_move(planned: tuple[StepGraph, Plan]) -> None:
    graph, made = planned
    assert_one_pass_says_the_same(made, graph)


@given(problems(training=True), st.sampled_from([0.0, 0.5]), st.sampled_from([None, Update.ACROSS_STEPS]))
@settings(max_examples=25)
def test_one_pass_says_the_same_of_plans_of_one_or_two_ranks(
    problem: Problem, share: float, update: Update | None
) -> None:
    problem = replace(problem, update=update if problem.hybrid else None)
    low, high = needed_bytes(problem), plan(problem, "keep_all").prediction.device_peak_bytes
    made = plan(replace(problem, budget_bytes=low + int((high - low) * share)), "greedy")
    assert_one_pass_says_the_same(made, problem.graph)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_bytes_held_in_turns_belong_to_the_largest_bucket(is_streamed: bool) -> None:
    """Two buckets of 8 and 3 streamed bytes of state hold 8 in turns, so without the larger the step holds 3."""
    placed = [replace(p, streamed=p.optim != "device" and is_streamed) for p in MADE.placements]
    assert not is_streamed or sum(placement.streamed for placement in placed) > 1
    made = replace(MADE, placements=tuple(placed), prediction=replace(MADE.prediction, device_peak_at="update"))
    assert_one_pass_says_the_same(made, TIGHT.graph)
    survey = Survey(made, TIGHT.graph)
    assert survey.held is not None
    held = [survey.held.of_bucket(bucket, made.prediction.device_peak_at) for bucket in made.buckets]
    in_turns = [own for placement, own in zip(placed, held, strict=True) if placement.streamed]
    assert not in_turns or any(Kind.MOMENT not in own for own in in_turns)


def test_the_answers_of_a_survey_are_those_asked_one_by_one() -> None:
    survey = Survey(MADE, TIGHT.graph)
    for subject in (*(bucket.id for bucket in MADE.buckets), *(region.id for region in MADE.regions), "p2"):
        assert answer_of(survey, subject) == answer(MADE, subject, TIGHT.graph)


def test_a_plan_is_counted_once_for_all_of_its_buckets_and_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[str] = []
    count = plan_rows._works
    monkeypatch.setattr(plan_rows, "_works", lambda *args: (counted.append("once"), count(*args))[1])
    survey = Survey(MADE, TIGHT.graph)
    for subject in (*(bucket.id for bucket in MADE.buckets), *(region.id for region in MADE.regions)):
        answer_of(survey, subject)
    assert counted == ["once"]
