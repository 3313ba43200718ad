"""Fake values of one micro-batch, for the nodes of the body of a divided region."""

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.graph.capture.node_facts import leaves_of, value_of, values_of_arguments
from elixir_compile.graph.rewrite.divided_graph import Size, size_of


def narrowed(value: object, dim: int, num: int) -> torch.Tensor:
    """Return the first of `num` slices of the tensor `value` along `dim`."""
    assert isinstance(value, torch.Tensor)
    with compat.own_fake_mode(value):
        return value.narrow(dim, 0, value.shape[dim] // num)


def computed(node: fx.Node, like: object) -> object:
    """Return the value of `node`, computed on the fake values of its arguments; `like` is a value in the same mode."""
    fake = next(leaf for leaf in leaves_of(like) if isinstance(leaf, torch.Tensor))
    args, kwargs = values_of_arguments(node, value_of)
    with compat.own_fake_mode(fake):
        return node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]


def strides_by_rows(value: torch.Tensor, rows: str) -> tuple[Size, ...]:
    """Return the strides of `value` if they depend on the number of `rows`, a symbol, else none."""
    is_by_rows = bool(rows) and any(rows in compat.symbols_in(stride) for stride in value.stride())
    return tuple(map(size_of, value.stride())) if is_by_rows else ()
