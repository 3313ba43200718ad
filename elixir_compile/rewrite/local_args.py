"""The arguments of an op for one micro-batch: its sizes are divided.

`view(x, [64, 512, 768])` of slices of 8 rows becomes `view(x', [8, 512, 768])`.
"""

from typing import Any

import torch
from torch import fx

from elixir_compile.capture.node_facts import tensor_of

_aten = torch.ops.aten
_SHAPES = {
    _aten.view.default: 1,
    _aten._unsafe_view.default: 1,
    _aten.reshape.default: 1,
    _aten.expand.default: 1,
    _aten.new_empty.default: 1,
    _aten.new_zeros.default: 1,
    _aten.new_ones.default: 1,
    _aten.new_full.default: 1,
    _aten.full.default: 0,
    _aten.zeros.default: 0,
    _aten.ones.default: 0,
    _aten.empty.memory_format: 0,
    _aten.rand.default: 0,
    _aten.randn.default: 0,
    _aten.slice_backward.default: 1,
    _aten.select_backward.default: 1,
}
"""The place of the argument that is the shape of the result."""
_CREATED = (_aten.full.default, _aten.zeros.default, _aten.ones.default, _aten.scalar_tensor.default)
_SEEDED = ("prims.inductor_random.default", "prims.inductor_randint.default")
"""Ops with a shape and a seed, by name: torch has them once Inductor is loaded."""


def is_created(node: fx.Node) -> bool:
    """Return whether `node` makes a tensor of one value, which any part of a region can make for itself."""
    return node.target in _CREATED


def is_seeded(node: fx.Node) -> bool:
    """Return whether `node` draws random numbers from a seed among its inputs."""
    return str(node.target) in _SEEDED


def local_args(node: fx.Node, dim: int | None, num: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `node` for one of `num` micro-batches.

    `dim` is the dimension of the slices of its result, None if the result has none.
    """
    place = 0 if is_seeded(node) else _SHAPES.get(node.target)  # pyright: ignore[reportArgumentType, reportCallIssue]
    if dim is None or place is None:
        return node.args, dict(node.kwargs)
    shape = list(tensor_of(node).shape)
    shape[dim] //= num
    return (*node.args[:place], shape, *node.args[place + 1 :]), dict(node.kwargs)
