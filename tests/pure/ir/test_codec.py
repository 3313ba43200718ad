"""Values as JSON and back: any plain dataclass, the files of graphs, plans and records, and files that nobody wrote
so."""

import copy
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import FrameType
from typing import Any, NewType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_compile.base.codec import LEFT_OUT, Form, from_json, to_json
from elixir_compile.base.errors import ElixirError, InvalidPlan, InvalidProfile, PlanFileError, ProfileFileError
from elixir_compile.ir import (
    Activations,
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
    Saving,
    Shards,
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
    sizes,
    tallies,
    verb_of,
    what_of,
)
from elixir_compile.ir.hardware import cluster_from_json, cluster_to_json, preset
from elixir_compile.step import plan_at, verify
from elixir_compile.step.liveness import activation_groups
from tests.pure.plans import bucket_of, make_plan, mixed_plans, planned_graphs
from tests.pure.strategies import Layer, chain, symbolic

# ----------------------------------------------------------------------------------------------------------------------
# `codec`: any dataclass of plain fields as JSON and back, with the caller's error.


BoxId = NewType("BoxId", str)


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lid:
    width_s: float
    names: tuple[str, ...] = ()
    colour: Colour = field(default=Colour.RED, metadata=LEFT_OUT)

    def __post_init__(self) -> None:
        if self.width_s < 0:
            raise InvalidProfile("lid", "width_s", "0 or more", self.width_s)
        if self.width_s > 9:
            raise InvalidPlan("too wide.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    id: BoxId
    colour: Colour
    counts: Mapping[str, int]
    pair: tuple[int, bool]
    lid: Lid | None
    tags: frozenset[Colour] = frozenset()


FORM = Form(what="box", version=3, error=ProfileFileError)
BOX = Box(id=BoxId("a"), colour=Colour.RED, counts={"x": 1}, pair=(1, True), lid=Lid(width_s=1.5))
INTEGERS = st.integers(1 - 2**63, 2**63 - 1)
BOXES = st.builds(
    Box,
    id=st.text(),
    colour=st.sampled_from(Colour),
    counts=st.dictionaries(st.text(), INTEGERS),
    pair=st.tuples(INTEGERS, st.booleans()),
    lid=st.none()
    | st.builds(Lid, width_s=st.floats(0, 9), names=st.lists(st.text()).map(tuple), colour=st.sampled_from(Colour)),
    tags=st.frozensets(st.sampled_from(Colour)),
)


@given(BOXES)
def test_values_read_back(box: Box) -> None:
    assert from_json(FORM, Box, to_json(FORM, box)) == box


def test_a_field_that_is_left_out_has_its_default() -> None:
    blue = Lid(width_s=1.5, colour=Colour.BLUE)
    assert to_json(FORM, Lid(width_s=1.5), indent=None).endswith('"width_s": 1.5, "names": []}')
    assert to_json(FORM, blue, indent=None).endswith('"colour": "blue"}')
    assert from_json(FORM, Lid, to_json(FORM, blue)) == blue
    assert from_json(FORM, Lid, to_json(FORM, Lid(width_s=1.5))) == Lid(width_s=1.5)
    with pytest.raises(ProfileFileError, match="colour: expected one of red, blue"):
        from_json(FORM, Lid, to_json(FORM, blue).replace('"blue"', '"green"'))


def test_the_error_is_the_form_s() -> None:
    for error in (PlanFileError, ProfileFileError):
        with pytest.raises(error) as caught:
            from_json(Form(what="box", version=4, error=error), Box, to_json(FORM, BOX))
        assert vars(caught.value) == {"field": "format", "expected": "4", "got": 3}
        assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("old", "new", "field", "expected"),
    [
        ('"red"', '"green"', "colour", "one of red, blue"),
        ('"x": 1', '"x": NaN', "counts.x", "a whole number"),
        ('"x": 1', '"x": 1, "x": 2', "x", "each field once"),
        ('"x": 1', f'"x": {"1" * 5000}', "a number", "a number of fewer digits"),
        ("1.5", "-Infinity", "lid.width_s", "a finite number"),
        ("1.5", "-2", "lid.width_s", "0 or more"),
        ("1.5", "10", "lid", "values that agree"),
        ("true", "true, 3", "pair", "a list of 2"),
        ('"names": []', '"names": [1]', "lid.names[0]", "a text"),
        ('"tags": []', '"tags": {}', "tags", "a list"),
        ('"tags": []', '"tags": ["green"]', "tags[0]", "one of red, blue"),
        ('"tags": []', '"tags": ["red", "red"]', "tags", "a list with each item once"),
    ],
)
def test_errors_name_the_field_of_a_plain_dataclass(old: str, new: str, field: str, expected: str) -> None:
    text = to_json(FORM, BOX)
    assert old in text
    with pytest.raises(ProfileFileError) as caught:
        from_json(FORM, Box, text.replace(old, new))
    assert (caught.value.field, caught.value.expected) == (field, expected)


def test_a_frozenset_is_a_sorted_list() -> None:
    box = Box(id=BoxId("a"), colour=Colour.RED, counts={}, pair=(1, True), lid=None, tags=frozenset(Colour))
    assert to_json(FORM, box, indent=None).endswith('"tags": ["blue", "red"]}')


def test_the_reason_is_the_cause() -> None:
    with pytest.raises(ProfileFileError) as caught:
        from_json(FORM, Box, to_json(FORM, BOX).replace("1.5", "10"))
    assert isinstance(caught.value.__cause__, InvalidPlan)


def test_equal_values_have_equal_text() -> None:
    one, other = (
        Box(id=BoxId("a"), colour=Colour.RED, counts=counts, pair=(1, True), lid=None)
        for counts in ({"x": 1, "y": 2}, {"y": 2, "x": 1})
    )
    assert one == other
    assert to_json(FORM, one) == to_json(FORM, other)


def test_numbers_that_are_not_finite_are_not_written() -> None:
    box = Box(id=BoxId("a"), colour=Colour.RED, counts={}, pair=(1, True), lid=Lid(width_s=float("nan")))
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json(FORM, box)


# ----------------------------------------------------------------------------------------------------------------------
# JSON that reads back to the same value, and strict errors that name the field.


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
        (["format"], 5, "format", "8 or 7"),
        (["format"], True, "format", "8 or 7"),
        (["format"], ..., "format", "8 or 7"),
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
        (["buckets", 0, "shard_numels"], 10, "buckets[0].shard_numels", "an object with the fields of Shards"),
        (["buckets", 0, "shard_numels", "runs"], 10, "buckets[0].shard_numels.runs", "a list"),
        (["buckets", 0, "shard_numels", "runs", 0, 0], "10", "buckets[0].shard_numels.runs[0][0]", "a whole number"),
        (["buckets", 0, "shard_numels", "runs", 0], [-1, 1], "buckets[0].shard_numels", "values that agree"),
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


def test_a_plan_of_format_7_reads_as_one_of_format_8() -> None:
    """It has the elements of each rank in a list, however many ranks have equal ones."""
    of_many = tuple(replace(bucket, shard_numels=Shards(((3, 9000), (1, 2)))) for bucket in PLAN.buckets)
    plan = replace(PLAN, buckets=of_many)
    data = json.loads(plan_to_json(plan)) | {"format": 7}
    assert len(json.dumps(data)) < 2 * len(plan_to_json(PLAN))
    for bucket in data["buckets"]:
        bucket["shard_numels"] = [3] * 9000 + [1] * 2
    assert plan_from_json(json.dumps(data)) == plan
    for wrong in (10, ["3"], None):
        data["buckets"][0]["shard_numels"] = wrong
        with pytest.raises(PlanFileError, match=r"buckets\[0\].shard_numels: expected an object with the fields"):
            plan_from_json(json.dumps(data))


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


# ----------------------------------------------------------------------------------------------------------------------
# Files that nobody wrote by hand: whatever is read ends in a value or in an error that names the field, and soon.


MOST_CALLS = 100_000
"""Of functions while one small file is read and verified; a good one takes some 3,000."""
GROWING = symbolic(chain([Layer(module=f"l{n}", params=((f"w{n}", 10),), frozen=False, act_numel=4) for n in range(3)]))
EVIL = st.sampled_from(
    [
        *(
            10**400,
            -(10**400),
            2**63,
            2**63 - 1,
            2**55,
            -1,
            0,
            3,
            1e308,
            5e-324,
            float("nan"),
            float("inf"),
            True,
            None,
        ),
        *("", "device", "disk", "b0", "b0.grad", "bwd.0", "x" * 100_000, "\x00", "\ud800", "9" * 5000),
        *("(a+b+c+d+e+f+g)**16", "((a**16)**16)**16", "-" * 5000 + "a", "+".join(["a"] * 5000), "2**s0", "s0//0"),
        *("*".join(["9223372036854775807"] * 150), "Max(" * 90 + "s0" + ")" * 90, "Mod(s0, s0 - 3)", "10**4000"),
        *([], {}, [[]], [None], ["b0"] * 1000, {"b0": 1}, [["s0", 3], ["s0", 5]], [10**30] * 3),
    ]
)


class TooManySteps(Exception):  # noqa: N818 - no error of the package: the test fails with it
    """More was called than a small file is worth."""


@contextmanager
def few_steps(most: int = MOST_CALLS) -> Iterator[None]:
    """Fail inside once more than `most` functions were called, which no clock of a busy machine changes."""
    num_calls = 0

    def count(_frame: FrameType, event: str, _arg: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"
        if num_calls > most:
            raise TooManySteps(f"more than {most} calls")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(before)


def mutated(draw: st.DataObject, text: str) -> str:
    """Return the JSON `text` with up to three of its values replaced, removed, repeated or renamed."""
    data = json.loads(text)
    for _ in range(draw.draw(st.integers(1, 3))):
        inner: Any = data
        while True:
            keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
            if not keys:
                break
            key = draw.draw(st.sampled_from(keys))
            if isinstance(inner[key], dict | list) and inner[key] and draw.draw(st.integers(0, 3)):
                inner = inner[key]
                continue
            change = draw.draw(st.sampled_from(["replace", "replace", "replace", "remove", "swap", "rename"]))
            if change == "replace":
                inner[key] = copy.deepcopy(draw.draw(EVIL))  # a later change may be inside of it
            elif change == "swap":
                inner[key] = inner[draw.draw(st.sampled_from(keys))]
            elif change == "rename" and isinstance(inner, dict):
                inner[f"{key}s"] = inner.pop(key)
            else:
                del inner[key]
            break
    return json.dumps(data)


def read_or_refused(text: str) -> Plan | None:
    """Return the plan of `text`, None if it is refused with an error that a person can read."""
    try:
        return plan_from_json(text)
    except (PlanFileError, InvalidPlan) as refused:
        told = str(refused)
    assert 0 < len(told) < 5000
    return None


def plans() -> list[str]:
    """Return the JSON of plans of three kinds: of fixed sizes, of growing ones, and with activations that move."""
    buckets = [bucket_of(GROWING, f"b{n}", [s for s in GROWING.storages if s.id == f"w{n}"]) for n in range(3)]
    growing = make_plan(GROWING, buckets, ["host", "device", "split"])
    growing = plan_at(GROWING, replace(growing, symbols=(("s0", 2),)))
    groups = [group for group in _groups() if group.saving is not Saving.KEEP]
    assert groups
    moved = make_plan(GRAPH, PLAN.buckets, ["host"] * len(PLAN.buckets), tuple(groups))
    return [plan_to_json(plan) for plan in (PLAN, growing, moved)]


def _groups() -> Iterator[Activations]:
    for number, group in enumerate(activation_groups(GRAPH)):
        saving = Saving.OFFLOAD if number % 2 else Saving.KEEP
        yield Activations(id=group.id, storages=group.storages, nbytes=group.nbytes, saving=saving)


PLANS = plans()


@given(st.data())
@settings(max_examples=300)
def test_a_mutated_plan_is_read_or_refused(data: st.DataObject) -> None:
    number = data.draw(st.integers(0, len(PLANS) - 1))
    text = mutated(data, PLANS[number])
    with few_steps():
        plan = read_or_refused(text)
        if plan is None:
            return
        assert plan_from_json(plan_to_json(plan)) == plan
        assert str(plan)
        graph = GROWING if number == 1 else GRAPH
        with suppress(ElixirError):
            verify(graph, plan)
        with suppress(ElixirError):
            plan_at(graph, plan)
        with suppress(ElixirError):
            plan.largest_batch()


@given(st.data())
@settings(max_examples=100)
def test_a_mutated_graph_is_read_or_refused(data: st.DataObject) -> None:
    text = mutated(data, graph_to_json(data.draw(st.sampled_from([GRAPH, GROWING]))))
    with few_steps(), suppress(PlanFileError):
        graph_from_json(text)


@given(st.data())
@settings(max_examples=100)
def test_a_mutated_record_or_machine_is_read_or_refused(data: st.DataObject) -> None:
    with few_steps(), suppress(PlanFileError):
        record_from_json(mutated(data, record_to_json(RECORD)))
    with few_steps(), suppress(ProfileFileError):
        cluster_from_json(mutated(data, cluster_to_json(preset("a100-40g", 2, 2))))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("(a+b)**1000", "holds '(a + b) ** 1000'"),
        ("(a+b+c+d+e+f+g)**16", "has too many products"),
        ("((a+b+c+d)**4)**4*((a+b+c+d)**4)**4", "has too many products"),
        ("((a**16)**16)**16", "multiplies more than 64 symbols"),
        ("*".join(["a"] * 65), "multiplies more than 64 symbols"),
        ("+".join(["a"] * 1000), "nests more than 200 operations"),
        ("+".join(["a"] * 300_000), "is not an expression|nests more than"),
        ("-" * 1000 + "a", "nests more than 200 operations|is not an expression"),
        ("9" * 20, "holds"),
        ("9" * 5000, "is not an expression"),
        ("a" * (1 << 21), "has 2097152 characters"),
    ],
)
def test_sizes_that_take_too_long_are_refused(text: str, sentence: str) -> None:
    with few_steps(400_000), pytest.raises(InvalidPlan) as caught:
        sizes.check_text(text)
    assert any(part in str(caught.value) for part in sentence.split("|"))
    assert len(str(caught.value)) < 1000


def test_a_value_of_too_many_bits_is_refused() -> None:
    with pytest.raises(InvalidPlan, match="more than 4096 bits"):
        sizes.evaluate("*".join(["9223372036854775807"] * 70), {})
    assert sizes.evaluate("a**16*b**16 - a**16*b**16 + 1", {"a": 2**62, "b": 2**62}) == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda plan: plan | {"loss_chunks": 1 << 40}, "a loss of 1099511627776 chunks"),
        (lambda plan: plan | {"num_copies": 1 << 40}, "1099511627776 copies of its parts"),
        (lambda plan: plan | {"base_bytes": 1 << 56}, "counts 72057594037"),
        (
            lambda plan: plan | {"base_bytes": 1 << 63},
            "base_bytes: expected a whole number of at most 9223372036854775807",
        ),
        (lambda plan: plan | {"budget_bytes": True}, "budget_bytes: expected a whole number, got True"),
        (lambda plan: plan | {"symbols": [["s0", 1], ["s0", 2]]}, "expected each once, 0 or more"),
        (lambda plan: plan | {"symbols": [["s0", -1]]}, "expected each once, 0 or more"),
    ],
)
def test_absurd_numbers_are_refused(change: Callable[[dict[str, Any]], dict[str, Any]], sentence: str) -> None:
    with pytest.raises(PlanFileError) as caught:
        plan_from_json(json.dumps(change(json.loads(PLANS[0]))))
    assert sentence in str(caught.value)


def test_sums_of_bytes_that_overflow_are_refused() -> None:
    data = json.loads(graph_to_json(GRAPH))
    for storage in data["storages"]:
        storage["nbytes"] = 1 << 62
    with pytest.raises(PlanFileError, match="expected at most 36028797018963968"):
        graph_from_json(json.dumps(data))
