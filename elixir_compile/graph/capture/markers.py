"""Recognise the nodes of captured graphs that stand for a parameter or its gradient, and the collectives of torch's
tensor-parallel styles.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.node import Argument, has_side_effect

from elixir_compile import compat
from elixir_compile.graph.capture.node_facts import dense_tensors_of, int_of
from elixir_compile.graph.ops.gather import GATHER, REDUCE
from elixir_compile.ir.graph import Ring

# ----------------------------------------------------------------------------------------------------------------------
# Collectives in captured graphs: what torch's tensor-parallel styles put between the ops of a model.
#
#   y = all_reduce(x, "sum", group)      an op: it allocates y, and sends it twice round the ranks of the group
#   z = wait_tensor(y)                   a view of y: torch waits for the sum at once, where z is first read
#
# torch starts a collective and waits for it as two ops. No plan puts anything between them: the wait is a view, so it
# stays in the region of its collective, and the seconds of both are those of the collective on the lane of compute.
# Collectives are never recomputed, because `node_facts.runs_once` says so of every op outside of `aten` and `prims`. So
# all ranks of the axis run the same ones in the same order.


_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "_dtensor")
_WAIT = "_c10d_functional.wait_tensor.default"


def is_wait(target: Any) -> bool:
    """Return whether the op `target` waits for a collective: its result is the memory of the collective's result."""
    return compat.is_op_overload(target) and target.namespace == "_c10d_functional" and str(target) == _WAIT


def is_collective(node: fx.Node) -> bool:
    """Return whether `node` is a collective of several ranks."""
    is_op = node.op == "call_function" and compat.is_op_overload(node.target)
    return is_op and _group_place(node.target) is not None


def ring_of(node: fx.Node, count: Any) -> Ring | None:
    """Return what `node` sends if it is a collective, else None; `count(size)` is a size as a number and as text."""
    if not is_collective(node):
        return None
    place = _group_place(node.target)
    assert place is not None, "a collective names its group"
    results, given = (sum(map(_nbytes, tensors)) for tensors in (dense_tensors_of(node), _operands(node)))
    passes = 2 if "all_reduce" in str(node.target) else 1
    is_gather = "all_gather" in str(node.target)
    nbytes, size = count(results if is_gather or not _operands(node) else given)
    return Ring(num_ranks=compat.group_size(node.args[place]), nbytes=nbytes, passes=passes, size=size)


def _operands(node: fx.Node) -> list[torch.Tensor]:
    return [tensor for source in node.all_input_nodes for tensor in dense_tensors_of(source)]


def _nbytes(value: torch.Tensor) -> Any:
    return math.prod(value.shape) * value.element_size()


def _group_place(target: Any) -> int | None:
    """Return the place of the group among the arguments of `target`; None if it is no collective."""
    if target.namespace not in _NAMESPACES or is_wait(target):
        return None
    names = [argument.name for argument in compat.schema_of(target).arguments]
    return next((place for place, name in enumerate(names) if name in ("group_name", "group")), None)


# ----------------------------------------------------------------------------------------------------------------------
# The nodes that stand for a parameter in captured graphs, and the parameter of each.
#
#     Dynamo's and joint graphs        gather(handle, size, stride, key)      reduce(grad, key)
#     forward and backward             parameter(key)                         gradient(grad, key)     ticket(keys)
#
# `parameter`, `gradient` and `ticket` are markers: functions that no graph calls, because `rewrite` replaces them by
# the actions of the schedule. `key` is the key of the parameter in the registry.


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
