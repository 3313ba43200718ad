"""Give a graph of AOTAutograd each dynamic size of its inputs as a number among its inputs.

```text
  Dynamo       s0, x [s0, 64]                     the size of a plain tensor comes as a number
  AOTAutograd  values [s1, 64], offsets [s2 + 1]  a tensor subclass is taken apart; s1 is no number of the graph
  here         values, offsets, s1                s1 becomes the last input; each call reads it from the tensor
```

So what counts, saves or divides by numbers among the inputs does so for tensors inside of subclasses too. The length of
the jagged dimension of a nested tensor stays an input that no op reads: it names the offsets and is no number.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.capture.node_facts import has_tensor, is_number, is_tangent, tensor_of, value_of

_SIZE_OF = "elixir_size_of"
"""The key in `node.meta` of an added input: the position of the tensor among the inputs, and the dimension."""


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
