"""Tables of a plan: what is held at the peak, the bytes of layers, and the rates of links."""

import json
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
    Lane,
    Origin,
    Plan,
    Record,
    RegionRef,
    Span,
    StepGraph,
    Target,
    Update,
    Verb,
)
from elixir_compile.ir.hardware import preset
from elixir_compile.search import Problem, plan
from elixir_compile.step import plan_rows, plan_timeline
from elixir_compile.step.bucket_bytes import bytes_at
from elixir_compile.step.plan_rows import PlanRows
from elixir_compile.tools.observed import Counters
from elixir_compile.tools.report import figures
from elixir_compile.tools.report.explain import answer, answer_of, bucket_answer, region_answer
from elixir_compile.tools.report.figures import NUM_BINS, LinkRates, link_rates, rate_columns
from elixir_compile.tools.report.page import PlanSheet, page, page_data
from elixir_compile.tools.report.tables import SEVERAL, Move, Subject, Survey, layer_bytes, split
from tests.pure.plans import mixed_plans
from tests.pure.problems import needed_bytes, problems, tight_problem
from tests.pure.tools.pages import sheet_of, tight

# ----------------------------------------------------------------------------------------------------------------------
# `held`: one pass over a plan gives what separate timelines and walks gave for each bucket and region.


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


# ----------------------------------------------------------------------------------------------------------------------
# `layer_bytes`: the bytes of all layers add up to those of the timeline, at every op, and belong where they are.


def assert_adds_up(graph: StepGraph, made: Plan) -> None:
    timeline, held = plan_timeline(graph, made), Survey(made, graph).held
    assert held is not None
    for at, op in enumerate(timeline.ops):
        sums: Counter[Kind] = Counter()
        for own in layer_bytes(held, op).values():
            assert all(own.values()), "zeros are left out"
            sums.update(own)
        expected = {kind: live[at] for kind, live in timeline.live_bytes_by_kind.items() if live[at]}
        assert dict(sums) == expected, op


@given(mixed_plans())
@settings(max_examples=25)
def test_layers_add_up_to_the_timeline_of_plans_with_activations_that_move(planned: tuple[StepGraph, Plan]) -> None:
    assert_adds_up(*planned)


@given(problems(training=True))
@settings(max_examples=25)
def test_layers_add_up_to_the_timeline_of_plans_of_one_or_two_ranks(problem: Problem) -> None:
    problem = replace(problem, budget_bytes=needed_bytes(problem))
    assert_adds_up(problem.graph, plan(problem, "greedy"))


@pytest.mark.parametrize("base_bytes", [0, 1000])
def test_streamed_updates_and_external_usage_count_beside_the_layers(base_bytes: int) -> None:
    placed = [replace(p, streamed=p.optim != "device") for p in MADE.placements]
    made = replace(MADE, placements=tuple(placed), base_bytes=base_bytes)
    assert_adds_up(TIGHT.graph, made)
    held = Survey(made, TIGHT.graph).held
    assert held is not None
    assert SEVERAL in layer_bytes(held, held.timeline.ops[-1])


def test_a_bucket_of_two_layers_is_shared_out_by_the_bytes_of_their_parameters() -> None:
    assert split(10, {"blocks.0": 30, "blocks.1": 60}) == {"blocks.0": 4, "blocks.1": 6}
    assert split(7, {}) == {"other ops": 7}
    assert split(7, {"head": 0}) == {"head": 7}


# ----------------------------------------------------------------------------------------------------------------------
# The rate of the link over a step: the bins hold the bytes of the copies, and the chart draws them on its seconds.


CLUSTER = preset("a100-40g")
STEP_S = 2.0
BIN_S = STEP_S / NUM_BINS


def copy(lane: Lane, start_s: float, end_s: float, nbytes: int) -> Span:
    return Span(lane=lane, label="gather b0", start_s=start_s, end_s=end_s, nbytes=nbytes)


def sheet() -> PlanSheet:
    return sheet_of(*tight())


def rates_of(*spans: Span, counters: Counters | None = None) -> dict[Lane, LinkRates]:
    record = Record(origin=Origin.MEASURED, step_s=STEP_S, device_peak_bytes=0, host_peak_bytes=0, spans=spans)
    return {each.lane: each for each in link_rates(record, figures.MEASURED, CLUSTER, counters)}


def test_a_copy_counts_in_each_bin_by_its_seconds_there() -> None:
    found = rates_of(copy(Lane.H2D, 0.5 * BIN_S, 2.5 * BIN_S, 1000), copy(Lane.H2D, BIN_S, 2 * BIN_S, 100))
    up = found[Lane.H2D]
    assert up.bytes_per_s[:4] == pytest.approx([250 / BIN_S, 600 / BIN_S, 250 / BIN_S, 0])
    assert up.nbytes == pytest.approx(1100)
    assert not any(found[Lane.D2H].bytes_per_s)


def test_all_bytes_are_in_the_bins_whatever_the_times() -> None:
    spans = [copy(Lane.H2D, 0.013 * place, 0.021 * place, 10 + place) for place in range(90)]
    spans += [copy(Lane.D2H, STEP_S, STEP_S, 77), copy(Lane.D2H, 3 * BIN_S, 3 * BIN_S, 5)]
    found = rates_of(*spans, copy(Lane.GATHER, 0, 1, 10**9))
    for lane in (Lane.H2D, Lane.D2H):
        assert found[lane].nbytes == pytest.approx(sum(span.nbytes for span in spans if span.lane is lane))
    assert found[Lane.D2H].bytes_per_s[3] == pytest.approx(5 / BIN_S)
    assert found[Lane.D2H].bytes_per_s[-1] == pytest.approx(77 / BIN_S)


def test_a_step_without_copies_has_no_rates() -> None:
    assert rates_of(Span(lane=Lane.COMPUTE, label="run fwd.0", start_s=0, end_s=1)) == {}


def test_the_driver_counts_what_the_device_receives_as_what_goes_to_it() -> None:
    counters = Counters(
        at_s=(0.5, 1.0), values={"link_rx_bytes_per_s": (3.0, None), "link_tx_bytes_per_s": (None, 4.0)}
    )
    found = rates_of(copy(Lane.H2D, 0, 1, 1), counters=counters)
    assert (found[Lane.H2D].counted, found[Lane.D2H].counted) == (((0.5, 3.0),), ((1.0, 4.0),))


def test_the_table_has_a_row_where_a_rate_changes() -> None:
    table = rate_columns(tuple(rates_of(copy(Lane.H2D, 0.5, 1.0, 10**9)).values()))
    rows = list(zip(*table.values(), strict=True))
    up = [(at_s, rate) for _, link, at_s, rate in rows if link == "h2d"]
    assert up == [(0.0, 0.0), (0.5, 2.0), (1.0, 0.0), (2.0, 0.0)]
    assert [row for row in rows if row[1] == "d2h"] == [("measured", "d2h", 0.0, 0.0), ("measured", "d2h", 2.0, 0.0)]


@pytest.mark.skipif(not figures.can_draw(), reason="needs Altair and vl-convert")
def test_the_chart_stands_below_the_lanes_on_their_seconds_and_zooms_with_them() -> None:
    made = sheet()
    assert {each.lane for each in made.rates} == {Lane.H2D, Lane.D2H}
    args = (made.memory, made.bars, made.plan.budget_bytes, (), made.rates)
    spec = figures.step_chart(*args)
    assert [spec["vconcat"][1]["name"], spec["vconcat"][2]["layer"][0]["name"]] == ["lanes", "rates"]
    assert [param["views"] for param in spec["params"]] == [["hover", "lanes", "rates"]]
    assert spec["datasets"]["rates"] == [rate_columns(made.rates)]
    assert spec["resolve"]["scale"]["x"] == "shared"
    drawn = figures.svg(figures.step_chart(*args, is_static=True))
    assert ">GB/s</text>" in drawn
    assert ">h2d</text>" in drawn
    without = figures.svg(figures.lanes_chart(made.bars))
    assert ">GB/s</text>" not in without
    counted = tuple(replace(each, counted=((made.planned.step_s / 2, 1e9),)) for each in made.rates)
    dotted = figures.lanes_chart(made.bars, counted)
    assert len(dotted["vconcat"][1]["layer"]) == len(spec["vconcat"][2]["layer"]) + 1
    assert figures.svg(dotted) != figures.svg(figures.lanes_chart(made.bars, made.rates))


def test_the_data_of_the_page_has_the_rates_once() -> None:
    made = sheet()
    data = page_data(made)
    assert data["rates"] == rate_columns(made.rates)
    text = page(made)
    assert text.count(json.dumps(data["rates"], separators=(",", ":"))) == 1
    up = next(each for each in made.rates if each.lane is Lane.H2D)
    assert up.nbytes == pytest.approx(sum(span.nbytes for span in made.planned.spans if span.lane is Lane.H2D))
    assert "of what the link could carry" in text
