"""Values go to JSON and come back equal, of the same type, with tensors in their places."""

import json
from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elixir_compile.checkpoint.run_state import UnsupportedValue, from_plain, tensor_keys, to_plain

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.complex_numbers(allow_nan=False),
    st.text(), st.binary(max_size=8), st.sampled_from([torch.float32, torch.device("cpu"), torch.device("meta")]),
)  # fmt: skip
KEYS = st.one_of(st.text(), st.integers(), st.just("$"), st.tuples(st.integers(), st.text()))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(st.integers(), st.integers(), max_size=3).map(Counter),
    ),
    max_leaves=10,
)


def there_and_back(value: Any) -> Any:
    aside: dict[str, Any] = {}
    plain = to_plain(value, "v", aside)
    assert sorted(tensor_keys(plain)) == sorted(aside)
    return from_plain(json.loads(json.dumps(plain, allow_nan=False)), aside)


@settings(max_examples=50)
@given(value=VALUES)
def test_values_come_back_equal_and_with_the_same_types(value: Any) -> None:
    assert repr(there_and_back(value)) == repr(value)


def test_tensors_keep_their_places() -> None:
    first, second = torch.arange(3), torch.tensor(1.5)
    back = there_and_back({"a": [first, (second, float("nan"))], 3: {"b": first}})
    assert back["a"][0] is first
    assert back["a"][1][0] is second
    assert back["a"][1][1] != back["a"][1][1]
    assert back[3]["b"] is first


def test_an_ordered_dict_comes_back_as_a_dict_and_an_unsupported_object_is_named() -> None:
    assert there_and_back(OrderedDict(b=1, a=2)) == {"b": 1, "a": 2}
    with pytest.raises(UnsupportedValue, match="object") as raised:
        to_plain({"a": (1, object())}, "v", {})
    assert raised.value.key == "v.a.1"


def test_a_huge_integer_comes_back() -> None:
    assert there_and_back(10**400) == 10**400
