"""JSON that reads back to the same value, and strict errors that name the field."""

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.base.errors import PlanFileError
from elixir_compile.ir import (
    BucketId,
    BucketRef,
    GradientRef,
    GroupId,
    GroupRef,
    InnerVerb,
    Kept,
    Lane,
    Origin,
    Plan,
    Record,
    RegionId,
    RegionRef,
    Span,
    StateRef,
    StepGraph,
    Tally,
    Verb,
    graph_from_json,
    graph_to_json,
    label,
    plan_from_json,
    plan_to_json,
    record_from_json,
    record_to_json,
    tallies,
    verb_of,
    what_of,
)
from tests.pure.plans import bucket_of, make_plan, mixed_plans, planned_graphs
from tests.pure.strategies import Layer, chain

GRAPH = chain([Layer(module=f"l{n}", params=((f"w{n}", 10),), frozen=False, act_numel=4) for n in range(4)])
BUCKETS = [bucket_of(GRAPH, f"b{n}", [s for s in GRAPH.storages if s.id == f"w{n}"]) for n in range(4)]
PLAN = make_plan(GRAPH, BUCKETS, ["host", "device", "resident", "split"])
RECORD = Record(
    origin=Origin.MEASURED,
    step_s=0.25,
    device_peak_bytes=7,
    host_peak_bytes=0,
    spans=(
        Span(lane=Lane.H2D, label="gather b0", start_s=0.0, end_s=0.1, graph="GPT", nbytes=40, issued_s=-0.01, piece=1),
        Span(lane=Lane.CALLER, label="wait b0", start_s=0.0, end_s=0.1),
        Span(lane=Lane.DISK, label="read b0.state", start_s=0.0, end_s=0.1, nbytes=80),
    ),
    counts={"gather": 3, "release": 3},
)


@given(planned_graphs() | mixed_plans())
def test_graphs_and_plans_read_back(planned: tuple[StepGraph, Plan]) -> None:
    graph, plan = planned
    assert graph_from_json(graph_to_json(graph)) == graph
    assert plan_from_json(plan_to_json(plan)) == plan


def test_a_plan_without_micro_batches_has_the_text_of_before_they_existed() -> None:
    assert not {"micro_batches", "batched", "mixes", "times", "batch"} & set(
        json.loads(plan_to_json(PLAN))["regions"][0]
    )
    graph = json.loads(graph_to_json(GRAPH))
    assert not {"batch", "batched", "mixes", "times"} & {*graph, *graph["storages"][0], *graph["ops"][0]}
    regions = (dataclasses.replace(PLAN.regions[0], micro_batches=8), *PLAN.regions[1:])
    divided = dataclasses.replace(PLAN, regions=regions)
    assert plan_from_json(plan_to_json(divided)) == divided


def test_records_read_back() -> None:
    assert record_from_json(record_to_json(RECORD)) == RECORD


def test_a_record_of_format_1_is_read_with_the_labels_of_today() -> None:
    former = [
        ("compute", "fwd.0", "run fwd.0"),
        ("compute", "run bwd.0", "run bwd.0"),
        ("compute", "update b0", "update b0"),
        ("gather", "all-gather b0", "gather b0"),
        ("reduce", "all-reduce b0", "reduce b0"),
        ("d2h", "offload b12", "offload b12.grad"),
        ("d2h", "offload h.0.matmul", "offload h.0.matmul"),
        ("d2h", "offload b12.grad", "offload b12.grad"),
    ]
    spans = [{"lane": lane, "label": before, "start_s": 0.0, "end_s": 1.0} for lane, before, _ in former]
    data = json.loads(record_to_json(RECORD)) | {"format": 1, "spans": spans}
    read = record_from_json(json.dumps(data))
    assert [(span.lane, span.label) for span in read.spans] == [(lane, after) for lane, _, after in former]
    assert {(span.graph, span.nbytes, span.issued_s, span.piece) for span in read.spans} == {("", 0, None, 0)}


def test_a_record_of_a_later_format_is_refused_with_a_reason() -> None:
    text = record_to_json(RECORD).replace('"format": 2', '"format": 3')
    with pytest.raises(PlanFileError, match=r"expected 2 or 1 .a later elixir_compile wrote the record"):
        record_from_json(text)
    for other in ("0", '"2"', "true", "null"):
        with pytest.raises(PlanFileError, match="expected 2 or 1, got"):
            record_from_json(text.replace('"format": 3', f'"format": {other}'))


def test_pieces_count_once_and_waits_of_the_caller_not_at_all() -> None:
    """One gather in two pieces of 40 and 2 bytes, a second gather, and the same label on another lane."""
    first, wait, _ = RECORD.spans
    more = [dataclasses.replace(first, piece=0, nbytes=2), dataclasses.replace(first, piece=0, nbytes=40)]
    other = dataclasses.replace(first, lane=Lane.GATHER, piece=0, nbytes=7)
    assert tallies([first, wait, *more, other]) == {
        (Lane.H2D, "gather b0"): Tally(2, 82),
        (Lane.GATHER, "gather b0"): Tally(1, 7),
    }


def test_labels_are_a_verb_and_a_name() -> None:
    bucket = BucketId("b1")
    named = {
        label(Verb.RUN, RegionRef(RegionId("fwd.0"))): "run fwd.0",
        label(Verb.GATHER, BucketRef(bucket)): "gather b1",
        label(Verb.OFFLOAD, GradientRef(bucket)): "offload b1.grad",
        label(Verb.OFFLOAD, StateRef(bucket)): "offload b1.state",
        label(Verb.PREFETCH, GroupRef(GroupId("h.1.matmul"))): "prefetch h.1.matmul",
        label(InnerVerb.READ, StateRef(bucket)): "read b1.state",
        label(Verb.OFFLOAD, Kept.OUTSTANDING): "offload outstanding",
    }
    for made, text in named.items():
        assert made == text
        assert f"{verb_of(made)} {what_of(made)}" == text


@given(st.text(), st.floats(allow_nan=False, allow_infinity=False), st.none() | st.floats(0, 1e300))
def test_awkward_values_read_back(text: str, seconds: float, bound_s: float | None) -> None:
    decision = dataclasses.replace(PLAN.decisions[0], subject=text, because=text, cost_s=seconds, rejected=(text,))
    plan = dataclasses.replace(PLAN, name=text, decisions=(decision,), bound_s=bound_s)
    assert plan_from_json(plan_to_json(plan)) == plan


def changed(path: list[str | int], value: Any) -> str:
    """Return the plan's JSON with the field at `path` set to `value`, or removed where `value` is `...`."""
    data = json.loads(plan_to_json(PLAN))
    inner = data
    for step in path[:-1]:
        inner = inner[step]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value", "field", "expected"),
    [
        (["format"], 5, "format", "7"),
        (["format"], True, "format", "7"),
        (["format"], ..., "format", "7"),
        (["elixir"], "record", "elixir", "'plan'"),
        (["elixir"], ..., "elixir", "'plan'"),
        (["name"], ..., "name", "a value"),
        (["name"], 3, "name", "a text"),
        (["colour"], "red", "colour", "no such field"),
        (["placements", 3, "param"], ..., "placements[3].param", "a value"),
        (["placements", 3, "param"], "moon", "placements[3].param", "one of device, host, disk"),
        (["placements", 3, "param"], None, "placements[3].param", "one of device"),
        (["placements", 3, "colour"], 1, "placements[3].colour", "the fields are bucket, param, optim, resident"),
        (["placements", 3, "resident"], 1, "placements[3].resident", "true or false"),
        (["placements", 3], [], "placements[3]", "an object with the fields of Placement"),
        (["buckets", 0, "numel"], 1.0, "buckets[0].numel", "a whole number"),
        (["buckets", 0, "numel"], True, "buckets[0].numel", "a whole number"),
        (["buckets", 0, "numel"], -1, "buckets[0]", "values that agree"),
        (["buckets", 0, "shard_numels"], 10, "buckets[0].shard_numels", "a list"),
        (["buckets", 0, "shard_numels", 0], "10", "buckets[0].shard_numels[0]", "a whole number"),
        (["prediction", "step_s"], float("nan"), "prediction.step_s", "a finite number"),
        (["prediction", "step_s"], float("inf"), "prediction.step_s", "a finite number"),
        (["prediction", "step_s"], True, "prediction.step_s", "a finite number"),
        (["prediction", "step_s"], 10**400, "prediction.step_s", "a finite number"),
        (["placements"], [], "the whole text", "values that agree"),
        (["schedules", 0, "actions", 0, "target"], "b0", "schedules[0].actions[0].target", "an object with a kind"),
        (["schedules", 0, "actions", 0, "target"], {}, "schedules[0].actions[0].target.kind", "a value"),
        (
            ["schedules", 0, "actions", 0, "target", "kind"],
            "op",
            "schedules[0].actions[0].target.kind",
            "one of region, bucket, gradient, group",
        ),
        (["bound_s"], "1", "bound_s", "a finite number"),
    ],
)
def test_errors_name_the_field(path: list[str | int], value: Any, field: str, expected: str) -> None:
    with pytest.raises(PlanFileError) as caught:
        plan_from_json(changed(path, value))
    assert caught.value.field == field
    assert expected in caught.value.expected


def test_numbers_too_large_for_a_float_are_refused() -> None:
    with pytest.raises(PlanFileError, match=r"prediction\.step_s: expected a finite number"):
        plan_from_json(plan_to_json(PLAN).replace('"step_s": 0.2', '"step_s": 1e999'))


def test_whole_numbers_are_valid_seconds() -> None:
    assert plan_from_json(changed(["prediction", "step_s"], 2)).prediction.step_s == 2.0


@given(st.data())
def test_truncated_text_is_refused(data: st.DataObject) -> None:
    text = plan_to_json(PLAN)
    with pytest.raises(PlanFileError, match="JSON"):
        plan_from_json(text[: data.draw(st.integers(0, len(text) - 1))])


@pytest.mark.parametrize("text", ["", "[]", "3", "null", "[" * 100_000, '{"elixir": "plan", "elixir": "plan"}', "plan"])
def test_text_other_than_a_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanFileError):
        plan_from_json(text)


def test_records_and_graphs_have_a_format_too() -> None:
    for text, read, version in (
        (record_to_json(RECORD), record_from_json, 2),
        (graph_to_json(GRAPH), graph_from_json, 3),
    ):
        with pytest.raises(PlanFileError, match=f"format: expected {version}.* got 7"):
            read(text.replace(f'"format": {version}', '"format": 7'))
    with pytest.raises(PlanFileError, match=r"counts\.gather: expected a whole number"):
        record_from_json(record_to_json(RECORD).replace('"gather": 3', '"gather": "3"'))
    with pytest.raises(PlanFileError, match=r"aliases\[0\]: expected a list of 2"):
        graph_from_json(json.dumps(json.loads(graph_to_json(GRAPH)) | {"aliases": [["x"]]}))
