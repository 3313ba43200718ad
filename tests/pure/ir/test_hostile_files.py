"""Files that nobody wrote by hand: whatever is read ends in a value or in an error that names the field, and soon."""

import copy
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_compile.base.errors import ElixirError, InvalidPlan, PlanFileError, ProfileFileError
from elixir_compile.ir import (
    Activations,
    Plan,
    Saving,
    graph_from_json,
    graph_to_json,
    plan_from_json,
    plan_to_json,
    record_from_json,
    record_to_json,
    sizes,
)
from elixir_compile.ir.hardware import cluster_from_json, cluster_to_json, preset
from elixir_compile.step import plan_at, verify
from elixir_compile.step.liveness import activation_groups
from tests.pure.ir.test_codec import GRAPH, PLAN, RECORD
from tests.pure.plans import bucket_of, make_plan
from tests.pure.strategies import Layer, chain, symbolic

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
