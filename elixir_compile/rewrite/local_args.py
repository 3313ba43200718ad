"""The arguments of an op for one micro-batch: its sizes are divided.

`view(x, [64, 512, 768])` of slices of 8 rows becomes `view(x', [8, 512, 768])`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from elixir_compile.capture.batch_sizes import rows_place, shape_place
from elixir_compile.capture.node_facts import as_node, tensor_of

_aten = torch.ops.aten
_CREATED = (_aten.full.default, _aten.zeros.default, _aten.ones.default, _aten.scalar_tensor.default)


def is_created(node: fx.Node) -> bool:
    """Return whether `node` makes a tensor of one value, which any part of a region can make for itself."""
    return node.target in _CREATED


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
