"""Parameters of tests that are a product: each value in `make test`, every combination in `make test-slow`."""

import itertools
from collections.abc import Sequence
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
