"""The arguments of an op for one micro-batch: its sizes are divided.

`view(x, [64, 512, 768])` of slices of 8 rows becomes `view(x', [8, 512, 768])`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from elixir_compile.graph.capture.batch_sizes import rows_place, shape_place
from elixir_compile.graph.capture.node_facts import as_node, tensor_of

_aten = torch.ops.aten
_CREATED = (_aten.full.default, _aten.zeros.default, _aten.ones.default, _aten.scalar_tensor.default)


def is_created(node: fx.Node) -> bool:
    """Return whether `node` makes a tensor of one value, which any part of a region can make for itself."""
    return node.target in _CREATED


_NEW: dict[Any, Any] = {
    _aten.new_zeros.default: _aten.zeros.default,
    _aten.new_ones.default: _aten.ones.default,
    _aten.new_full.default: _aten.full.default,
    _aten.new_empty.default: _aten.empty.memory_format,
}


def copied(graph: fx.Graph, node: fx.Node, read: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """Return a copy of `node`, an op on the whole batch, in `graph`, where `read(source)` stands for a node `source`.

    A tensor of a stated size that takes only dtype and device from another, as `x.new_zeros(...)` does, is made without
    it: `x` may exist in slices alone.
    """
    target = _NEW.get(node.target)
    if target is None:
        return graph.node_copy(node, read)
    value = tensor_of(node)
    form = {"dtype": value.dtype, "device": value.device}
    made = graph.call_function(target, map_arg(node.args[1:], read), form)
    made.meta = dict(node.meta)
    return made


def local_args(
    node: fx.Node, dim: int | None, num: int, written: "Callable[[int | torch.SymInt], Any]"
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `node` for a micro-batch, whose slices have one `num`-th of the size.

    `dim` is the dimension of the slices of its result, None if the result has none. `written` turns a size into a
    number or a node.
    """
    rows = rows_place(node)
    if rows is not None:
        num_rows = tensor_of(as_node(node.args[0])).shape[0] // num
        return (*node.args[:rows], written(num_rows), *node.args[rows + 1 :]), dict(node.kwargs)
    place = shape_place(node)
    if dim is None or place is None:
        return node.args, dict(node.kwargs)
    shape = list(tensor_of(node).shape)
    shape[dim] //= num
    return (*node.args[:place], [written(size) for size in shape], *node.args[place + 1 :]), dict(node.kwargs)
