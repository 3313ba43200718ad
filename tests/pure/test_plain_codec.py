"""`codec`: any dataclass of plain fields as JSON and back, with the caller's error."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.base.codec import LEFT_OUT, Form, from_json, to_json
from elixir_compile.base.errors import InvalidPlan, InvalidProfile, PlanFileError, ProfileFileError

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
def test_errors_name_the_field(old: str, new: str, field: str, expected: str) -> None:
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
