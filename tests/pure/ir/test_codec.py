"""JSON that reads back to the same value, and strict errors that name the field."""

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.errors import PlanFileError
from elixir_compile.ir import (
    Lane,
    Origin,
    Plan,
    Record,
    Span,
    StepGraph,
    graph_from_json,
    graph_to_json,
    plan_from_json,
    plan_to_json,
    record_from_json,
    record_to_json,
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
    spans=(Span(lane=Lane.H2D, label="gather b0", start_s=0.0, end_s=0.1),),
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
        (["format"], 5, "format", "6"),
        (["format"], True, "format", "6"),
        (["format"], ..., "format", "6"),
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
        (record_to_json(RECORD), record_from_json, 1),
        (graph_to_json(GRAPH), graph_from_json, 3),
    ):
        with pytest.raises(PlanFileError, match=f"format: expected {version}, got 7"):
            read(text.replace(f'"format": {version}', '"format": 7'))
    with pytest.raises(PlanFileError, match=r"counts\.gather: expected a whole number"):
        record_from_json(record_to_json(RECORD).replace('"gather": 3', '"gather": "3"'))
    with pytest.raises(PlanFileError, match=r"aliases\[0\]: expected a list of 2"):
        graph_from_json(json.dumps(json.loads(graph_to_json(GRAPH)) | {"aliases": [["x"]]}))
