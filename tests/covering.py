"""Parameters of tests that are a product: a part of it in `make test`, every combination in `make test-slow`."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def covering(*axes: Sequence[Any]) -> list[Any]:
    """Return all combinations of a value of each of `axes`, marked slow but for the fewest that have every value.

    For `pytest.mark.parametrize` with as many names as there are axes."""
    quick = [tuple(axis[number % len(axis)] for axis in axes) for number in range(max(map(len, axes)))]
    return [
        pytest.param(*combination, marks=[] if combination in quick else [pytest.mark.slow])
        for combination in itertools.product(*axes)
    ]


def some_slow(combinations: Iterable[tuple[Any, ...]], is_quick: Callable[..., bool]) -> list[Any]:
    """Return `combinations` as parameters of a test, marked `slow` if they are not quick."""
    return [pytest.param(*each, marks=() if is_quick(*each) else pytest.mark.slow) for each in combinations]
