"""`graph.capture.batch_call`: which ops can run on fewer rows if the number of rows is a symbol."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from elixir_compile import compat
from elixir_compile.graph.capture.batch import Walked, walk
from elixir_compile.graph.capture.batch_call import SUM, TOTAL, each
from elixir_compile.graph.capture.node_facts import tensor_of
from tests.fx.micro_batches import mixing

ROWS, LENGTH = 8, 5


def walked(function: Callable[..., Any], *shape: int) -> tuple[Walked, tuple[fx.Node, ...]]:
    """Return the states of `function` of a tensor with slices and dynamic sizes, and the nodes of its results."""
    graph = make_fx(lambda x: function(x.clone()), tracing_mode="symbolic")(torch.zeros(shape)).graph
    (given,) = graph.find_nodes(op="placeholder")
    results = graph.output_node().args[0]
    batch = tensor_of(given).shape[0]
    assert compat.symbol_of(batch)
    return walk(graph, {given: each(0)}, batch), results if isinstance(results, tuple) else (results,)


def test_sizes_with_the_number_of_rows_are_local_and_other_numbers_are_of_the_whole_batch() -> None:
    def mean(x: torch.Tensor) -> Any:
        flat = x.view(x.shape[0] * x.shape[1], 3)
        return flat, flat / x.numel(), flat * x.shape[0] ** 0.5, flat.sum() / x.shape[0], flat[: flat.shape[0]]

    found, (flat, scaled, rooted, total, taken) = walked(mean, ROWS, LENGTH, 3)
    assert not found.mixes
    assert [found.states[node] for node in (flat, scaled, rooted, taken)] == [each(0)] * 4
    assert found.states[total] in (SUM, TOTAL)


def test_zeros_of_the_number_of_rows_are_made_at_the_size_of_a_micro_batch() -> None:
    found, _ = walked(lambda x: x.sin() + x.new_zeros(x.shape[0], 1), ROWS, LENGTH)
    zeros = next(node for node in found.states if str(node.target) == "aten.new_zeros.default")
    assert found.states[zeros] == each(0)
    assert not found.mixes


def test_a_sum_that_is_spread_over_the_rows_is_spread_behind_the_last_micro_batch() -> None:
    found, (spread,) = walked(lambda x: x.sum().expand(x.shape[0]) * 2, ROWS, LENGTH)
    assert found.states[spread] == TOTAL
    assert not found.mixes


@pytest.mark.parametrize(
    ("function", "shape", "why"),
    [
        (
            lambda x: torch.roll(x, x.shape[0], 1),
            (ROWS, LENGTH),
            "its argument shifts is computed from the number of rows",
        ),
        (
            lambda x: x * torch.ones(x.shape[0], x.shape[0], 1),
            (ROWS, 1, LENGTH),
            "the number of rows, s, is not only the size of slices in a tensor of [s, s, 1]",
        ),
        (
            lambda x: x.t().contiguous().view(-1),
            (ROWS, LENGTH),
            "a reshape of [s, s] to [s*s] takes the slices along dimension 1 apart",
        ),
        (
            lambda x: x + 1,
            (ROWS, ROWS),
            "the number of rows, s, is not only the size of slices in a tensor of [s, s]",
        ),
    ],
    ids=["argument", "made of rows by rows", "taken apart", "rows and columns of one symbol"],
)
def test_an_op_that_needs_the_number_of_all_rows_mixes(
    function: Callable[..., Any], shape: tuple[int, ...], why: str
) -> None:
    found, _ = walked(function, *shape)
    assert why in [re.sub(r"s\d+", "s", reason) for reason in mixing(found).values()]


def test_numbers_that_stand_in_for_sizes_differ_if_the_sizes_do() -> None:
    graph = make_fx(lambda x: x + 1, tracing_mode="symbolic")(torch.zeros(6, 7)).graph
    rows, length = tensor_of(next(iter(graph.nodes))).shape
    sizes = [rows, length, rows * length, rows * 7, rows + 1, rows * rows, rows // 2, rows * length + rows]
    assert len({compat.stand_in(size) for size in sizes}) == len(sizes)
    assert compat.stand_in(rows * (length + 1)) == compat.stand_in(rows * length + rows)
    symbol = compat.symbol_of(rows)
    multiples = [size for size in (*sizes, 6) if compat.is_multiple(size, symbol)]
    assert [str(size) for size in multiples] == [str(size) for size in (rows, rows * length, rows * 7)] + [
        str(rows * length + rows)
    ]
