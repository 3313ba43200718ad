"""Run a graph in micro-batches op by op, by the states that `graph.capture.batch` found, and put the results
together."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from elixir_compile.graph.capture.batch import Walked, walk
from elixir_compile.graph.capture.batch_call import State, States, states_in
from elixir_compile.ir import Batched

_aten = torch.ops.aten
SIZES: Mapping[Any, int] = {
    _aten.view.default: 1,
    _aten._unsafe_view.default: 1,
    _aten.reshape.default: 1,
    _aten.expand.default: 1,
    _aten.new_zeros.default: 1,
    _aten.slice_backward.default: 1,
    _aten.select_backward.default: 1,
    _aten.full.default: 0,
    _aten.zeros.default: 0,
    _aten.ones.default: 0,
}
"""The place of the argument that is the shape of the result."""
_ROWS = {_aten.native_group_norm.default: 3, _aten.native_group_norm_backward.default: 5}
"""The place of the argument that is the number of rows."""


def traced(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> fx.Graph:
    """Return the ATen ops of `function` of copies of its inputs, with fake tensors as the values of its nodes.

    A view of an input, but not of a copy, is taken of the whole input.
    """

    def of_copies(*inputs: torch.Tensor) -> Any:
        return function(*map(torch.clone, inputs))

    return make_fx(of_copies, tracing_mode="fake")(*inputs).graph


def walked(graph: fx.Graph, states: Sequence[State], batch: int) -> Walked:
    """Return the states of `graph` if its inputs have `states`."""
    return walk(graph, dict(zip(graph.find_nodes(op="placeholder"), states, strict=True)), batch)


def mixing(found: Walked) -> dict[str, str]:
    """Return why ops mix the batch, by op."""
    return {str(node.target): why for node, why in found.mixes.items()}


def run_in_micro_batches(
    graph: fx.Graph, found: Walked, inputs: Sequence[torch.Tensor], micro_batches: int
) -> list[torch.Tensor]:
    """Return the outputs of `graph` if each of its ops runs once per micro-batch."""
    parts = [_run_part(graph, found, inputs, micro_batches, at) for at in range(micro_batches)]
    outputs = _leaves(graph.output_node().args[0])
    return [_whole(found.states[node], [part[node] for part in parts]) for node in outputs]


def _leaves(value: Any) -> list[fx.Node]:
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value] if isinstance(value, fx.Node) else []


def _whole(state: States, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    assert isinstance(state, State)
    assert not state.is_total
    if state.is_each:
        return torch.cat(list(parts), dim=state.dim)
    if state.batched is Batched.SUM:
        return torch.stack(list(parts)).sum(0)
    assert all(torch.equal(part, parts[0]) for part in parts)
    return parts[0]


def _run_part(graph: fx.Graph, found: Walked, inputs: Sequence[torch.Tensor], num: int, at: int) -> dict[fx.Node, Any]:
    values: dict[fx.Node, Any] = {}
    left = list(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            state = found.states[node]
            values[node] = _slice(left.pop(0), state.dim, num, at) if state.is_each else left.pop(0)
        elif node.target is operator.getitem:
            values[node] = values[node.args[0]][node.args[1]]
        elif node.op == "call_function":

            def read(source: fx.Node, node: fx.Node = node) -> Any:
                dim = found.narrowed.get((node, source))
                return values[source] if dim is None else _slice(values[source], dim, num, at)

            args, kwargs = fx.map_arg((_local_args(node, found, num), dict(node.kwargs)), read)
            values[node] = node.target(*args, **kwargs)
    return values


def _slice(value: torch.Tensor, dim: int, num: int, at: int) -> torch.Tensor:
    size = value.shape[dim] // num
    return value.narrow(dim, at * size, size)


def _local_args(node: fx.Node, found: Walked, num: int) -> tuple[Any, ...]:
    """Return the arguments of `node` with the sizes of one micro-batch."""
    args, state = list(node.args), found.states[node]
    if node.target in SIZES and isinstance(state, State) and state.is_each:
        shape = list(node.meta["val"].shape)
        shape[state.dim] //= num
        args[SIZES[node.target]] = shape
    elif node.target in _ROWS and any(part.is_each for part in states_in(state)):
        args[_ROWS[node.target]] = args[_ROWS[node.target]] // num
    return tuple(args)
