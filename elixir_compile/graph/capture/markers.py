"""The nodes that stand for a parameter in captured graphs, and the parameter of each.

    Dynamo's and joint graphs        gather(handle, size, stride, key)      reduce(grad, key)
    forward and backward             parameter(key)                         gradient(grad, key)     ticket(keys)

`parameter`, `gradient` and `ticket` are markers: functions that no graph calls, because `rewrite` replaces them by the
actions of the schedule. `key` is the key of the parameter in the registry.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.node import Argument, has_side_effect

from elixir_compile.graph.capture.node_facts import int_of
from elixir_compile.graph.ops.gather import GATHER, REDUCE


def parameter(key: int) -> torch.Tensor:
    """Marker for the gathered parameter `key`."""
    raise AssertionError("a marker is replaced before a graph runs")


def gradient(grad: torch.Tensor, key: int) -> None:
    """Marker: `grad` is a term of the gradient of parameter `key`."""
    raise AssertionError("a marker is replaced before a graph runs")


def ticket(keys: tuple[int, ...]) -> torch.Tensor:
    """Marker for the ticket: the number of the forward, and the versions of the parameters `keys`.

    The backward compares the versions, to find out whether a parameter that it reads has changed.
    """
    raise AssertionError("a marker is replaced before a graph runs")


TICKET = "elixir_ticket"
"""The name of the backward's input for the ticket."""

has_side_effect(gradient)
has_side_effect(ticket)

MARKERS = (gradient, parameter, ticket)
_KEY_PLACE: dict[Any, int] = {GATHER: 3, REDUCE: 1, parameter: 0, gradient: 1}


def key_of(node: fx.Node) -> int:
    """Return the key of the parameter that `node` reads, or whose gradient it takes. `node` is a gather, a reduce or a
    marker."""
    return int_of(node, _KEY_PLACE[node.target])


def gather_keys(graph: fx.Graph) -> list[int]:
    """Return the keys of the parameters gathered in `graph`, in order of first use."""
    return list(dict.fromkeys(key_of(node) for node in graph.find_nodes(op="call_function", target=GATHER)))


def merge_markers(graph: fx.Graph) -> None:
    """Merge the `parameter` markers of each key into one, and move the markers in front of all ops."""
    first: dict[int, fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=parameter):
        marker = first.setdefault(key_of(node), node)
        if marker is not node:
            node.replace_all_uses_with(marker)
            graph.erase_node(node)
    op = next(node for node in graph.nodes if node.op != "placeholder" and node.target is not parameter)
    for key in sorted(first):
        op.prepend(first[key])


def marker_node(
    graph: fx.Graph, marker: Callable[..., object], args: tuple[Argument, ...], meta: Mapping[str, object]
) -> fx.Node:
    """Add a marker with a copy of `meta` at the insertion point of `graph`, and return it."""
    node = graph.call_function(marker, args)
    node.meta = dict(meta)
    return node


def first_op(graph: fx.Graph) -> fx.Node:
    """Return the first node behind the placeholders."""
    return next(node for node in graph.nodes if node.op != "placeholder")
