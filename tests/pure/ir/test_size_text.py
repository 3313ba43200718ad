"""Sizes as text: read without running it, evaluated, expanded and solved."""

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from elixir_compile.base.errors import InvalidPlan
from elixir_compile.ir import sizes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4*s0*(s1 - 1) + 4*s0", (("s0*s1", 4),)),
        ("-(s0 - 3)**2", (("s0**2", -1), ("s0", 6), ("", -9))),
        ("8*s1*s0*s1", (("s0*s1**2", 8),)),
        ("s0 - s0", ()),
        ("12", (("", 12),)),
        ("8*Max(1, s0)", (("(8 * Max(1, s0))", 1),)),
    ],
)
def test_terms(text: str, expected: sizes.Terms) -> None:
    assert sizes.terms(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2*s0*s1 + 1", 31),
        ("s0//2", 1),
        ("Max(1, s0 - 7)*Min(s0, s1)", 3),
        ("Mod(s1, s0)", 2),
        ("ceiling(s0/2) + floor(s0/2)", 3),
        ("ModularIndexing(s1, 2, 2)", 0),
        ("-s0 + s1", 2),
    ],
)
def test_evaluate_at_3_and_5(text: str, expected: int) -> None:
    assert sizes.evaluate(text, {"s0": 3, "s1": 5}) == expected


@pytest.mark.parametrize(
    "text",
    ["", "s0 s1", "__import__('os').getcwd()", "s0.real", "1.5*s0", "True", "2**s0", "s0**99", "~s0", "f(s0)", "Max()"],
)
def test_text_other_than_a_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidPlan, match="the size"):
        sizes.terms(text)


@pytest.mark.parametrize("text", ["s2", "s0/0", "s0/2", "Mod(s0)"])
def test_sizes_without_a_value_are_refused(text: str) -> None:
    with pytest.raises(InvalidPlan, match="the size"):
        sizes.evaluate(text, {"s0": 3})


POLYNOMIALS = st.recursive(
    st.sampled_from(["s0", "s1", "b"]) | st.integers(0, 9).map(str),
    lambda inner: st.builds("({} {} {})".format, inner, st.sampled_from("+-*"), inner) | inner.map("(-{})**2".format),
    max_leaves=6,
)


@given(POLYNOMIALS)
def test_expansion_equals_sympys(text: str) -> None:
    canonical = sizes.canonical(text)
    assert sizes.canonical(canonical) == canonical
    assert sympy.expand(sympy.sympify(text) - sympy.sympify(canonical)) == 0
    values = {"s0": 3, "s1": 5, "b": 7}
    assert sizes.evaluate(canonical, values) == sizes.evaluate(text, values)
    assert sizes.canonical(str(sympy.sympify(text))) == canonical


def test_symbols_are_matched_as_whole_words() -> None:
    assert sizes.canonical("4*s1*s10", {"s1": "v1", "s10": "v0"}) == "4*v0*v1"
    assert sizes.symbols_of("Max(s1, s0)*s10") == ("s0", "s1", "s10")


@given(st.integers(0, 50), st.integers(1, 50), st.integers(0, 50), st.integers(0, 10**6))
def test_largest_returns_the_last_value_that_fits(square: int, slope: int, constant: int, limit_bytes: int) -> None:
    text = f"Max({square}*s0**2 + s1, {slope}*s0 + {constant})"
    found = sizes.largest(text, "s0", {"s0": 99, "s1": 4}, limit_bytes)
    assert found is not None
    assert sizes.evaluate(text, {"s0": found + 1, "s1": 4}) > limit_bytes
    assert found == 0 or sizes.evaluate(text, {"s0": found, "s1": 4}) <= limit_bytes


def test_a_size_that_does_not_grow_has_no_largest_value() -> None:
    assert sizes.largest("s1 + 5", "s0", {"s1": 2}, 7) is None
    assert sizes.largest("s1 + 5", "s0", {"s1": 2}, 6) == 0
