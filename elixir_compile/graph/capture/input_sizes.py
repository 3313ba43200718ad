"""Give a graph of AOTAutograd each dynamic size of its inputs as a number among its inputs.

`add_sizes` does so for the forward, `save_sizes` for the backward.

```text
  Dynamo       s0, x [s0, 64]                     the size of a plain tensor comes as a number
  AOTAutograd  values [s1, 64], offsets [s2 + 1]  a tensor subclass is taken apart; s1 is no number of the graph
  here         values, offsets, s1                s1 becomes the last input; each call reads it from the tensor
```

So what counts, saves or divides by numbers among the inputs does so for tensors inside of subclasses too. The length of
the jagged dimension of a nested tensor stays an input that no op reads: it names the offsets and is no number.

```text
  partitioner  forward   h = view(x, [mul(s0, s1), 64]); return ..., h, s0, s1
               backward  s0, s1, h, g -> n = sym_size(h, 0); r = view(g, [n, 64]);  ...;  w = mm(r, t(h))
  here         forward   n = mul(s0, s1); h = view(x, [n, 64]); return ..., h, s0, s1, n
               backward  s0, s1, n, h, g -> r = view(g, [n, 64]);  ...;  w = mm(r, t(h))
```

So the saved tensor `h` may be on the host, or not be made again yet, until an op reads its elements.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.graph.capture.markers import first_op
from elixir_compile.graph.capture.node_facts import (
    has_tensor,
    is_number,
    is_tangent,
    outputs_of,
    set_outputs,
    source_of,
    tensor_of,
    value_of,
)
from elixir_compile.graph.capture.rewire import fresh_value, view_chain

_SIZE_OF = "elixir_size_of"
"""The key in `node.meta` of an added input: the position of the tensor among the inputs, and the dimension."""
_aten = torch.ops.aten
SIZES = (_aten.sym_size.int, _aten.sym_stride.int, _aten.sym_numel.default, _aten.sym_storage_offset.default)
"""Ops that return a number about a tensor without a look at its elements."""


def add_sizes(graph: fx.Graph) -> None:
    """Add an input behind those of the forward for each symbol that is a size of a tensor among them, and no number."""
    given = [node for node in graph.find_nodes(op="placeholder") if not is_tangent(node)]
    known = {compat.symbol_of(value_of(node)) for node in given if is_number(node)}
    added: dict[str, fx.Node] = {}
    last = given[-1]
    for position, node in enumerate(given):
        for symbol, dim in _symbols_of(node):
            if symbol not in known and symbol not in added:
                added[symbol] = last = compat.new_input(graph, f"elixir_size_{symbol}", last)
                last.meta = {"val": tensor_of(node).shape[dim], _SIZE_OF: (position, dim)}
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int):
        if (symbol := compat.symbol_of(value_of(node))) in added:
            node.replace_all_uses_with(added[symbol])
            graph.erase_node(node)


def added_sizes(graph: fx.Graph) -> list[tuple[int, int]]:
    """Return the position among the inputs and the dimension of the tensor whose size is each input that `add_sizes`
    added, in their order."""
    return [node.meta[_SIZE_OF] for node in graph.find_nodes(op="placeholder") if _SIZE_OF in node.meta]


def sizes_in(args: Sequence[Any], added: Sequence[tuple[int, int]]) -> list[int]:
    """Return the values of the inputs `added` in a call with the other inputs `args`."""
    return [args[position].shape[dim] for position, dim in added]


def _symbols_of(node: fx.Node) -> Iterator[tuple[str, int]]:
    for dim, size in enumerate(tensor_of(node).shape if has_tensor(node) else ()):
        if symbol := compat.symbol_of(size):
            yield symbol, dim


def save_sizes(forward: fx.Graph, backward: fx.Graph) -> None:
    """Let `backward` take the sizes that it reads off saved tensors as numbers, which `forward` returns last.

    A number with the same expression that the backward takes already, or that the forward has, stands for the size.
    Sizes of views that the backward makes of saved tensors stay if no number stands for them; `step_graph` counts them
    as reads.
    """
    made = {node.name: node for node in forward.nodes}
    known = _by_expression(node for node in backward.nodes if node.op == "placeholder")
    before = _by_expression(forward.nodes)
    read = [
        node for node in backward.nodes if node.target in SIZES and view_chain(source_of(node))[-1].op == "placeholder"
    ]
    for node in read:
        expression = _expression(node)
        if expression not in known:
            source = before.get(expression) or _read_in_forward(forward, node, made.get(source_of(node).name))
            if source is None:
                continue
            set_outputs(forward, (*outputs_of(forward), source))
            known[expression] = add_numbers(backward, [source])[0]
        node.replace_all_uses_with(known[expression])
        backward.erase_node(node)


def add_numbers(backward: fx.Graph, numbers: Sequence[fx.Node]) -> list[fx.Node]:
    """Add a placeholder to `backward` for each of `numbers` of the forward, behind those of other numbers, which come
    first, as AOTAutograd orders them."""
    known = [node for node in backward.find_nodes(op="placeholder") if is_number(node)]
    return add_placeholders(backward, known[-1] if known else None, numbers)


def add_placeholders(backward: fx.Graph, last: fx.Node | None, nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Add a placeholder to `backward` for each of `nodes` of the forward, behind `last`, or at the front if `last` is
    None, and return them."""
    found: list[fx.Node] = []
    for node in nodes:
        with backward.inserting_before(next(iter(backward.nodes)) if last is None else last.next):
            last = backward.placeholder(node.name)
        last.meta = {**node.meta, "val": fresh_value(node)}
        found.append(last)
    return found


def _by_expression(nodes: Iterable[fx.Node]) -> dict[str, fx.Node]:
    """Return the first of `nodes` with each expression of dynamic sizes."""
    found: dict[str, fx.Node] = {}
    for node in nodes:
        if expression := _expression(node):
            found.setdefault(expression, node)
    return found


def _expression(node: fx.Node) -> str:
    value = value_of(node)
    return compat.expression_of(value)[0] if isinstance(value, torch.SymInt) else ""


def _read_in_forward(forward: fx.Graph, size: fx.Node, tensor: fx.Node | None) -> fx.Node | None:
    """Read `size`, which the backward reads off a saved tensor, directly behind `tensor`, which is the saved tensor in
    the forward; return None if it is None."""
    if tensor is None:
        return None
    with forward.inserting_before(first_op(forward) if tensor.op == "placeholder" else tensor.next):
        return forward.node_copy(size, lambda _: tensor)
