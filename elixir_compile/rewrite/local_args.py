"""The arguments of an op for one micro-batch: its sizes are divided.

`view(x, [64, 512, 768])` of slices of 8 rows becomes `view(x', [8, 512, 768])`.
"""

from typing import Any

import torch
from torch import fx

from elixir_compile.capture.batch import State
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
}
"""The place of the argument that is the shape of the result."""
_INPUT_SHAPES = (_aten.slice_backward.default, _aten.select_backward.default)
"""Ops whose argument 1 is the shape of the result, which had the name `input_sizes`."""
_CREATED = (_aten.full.default, _aten.zeros.default, _aten.ones.default, _aten.scalar_tensor.default)
_SEEDED = ("prims.inductor_random.default", "prims.inductor_randint.default")
"""Ops with a shape and a seed, by name: torch has them once Inductor is loaded."""


def is_created(node: fx.Node) -> bool:
    """Return whether `node` makes a tensor of one value, which any part of a region can make for itself."""
    return node.target in _CREATED


def is_seeded(node: fx.Node) -> bool:
    """Return whether `node` draws random numbers from a seed among its inputs."""
    return str(node.target) in _SEEDED


def created_args(node: fx.Node, dim: int | None, num: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `node`, for which `is_created` holds, for a slice of 1 / `num` along `dim`."""
    if dim is None or node.target not in _SHAPES:
        return node.args, dict(node.kwargs)
    shape = list(tensor_of(node).shape)
    shape[dim] //= num
    return _with_shape(node, shape), dict(node.kwargs)


def local_args(node: fx.Node, state: State, num: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `node`, whose result is in `state`, with the sizes of one of `num` micro-batches."""
    args, kwargs = node.args, dict(node.kwargs)
    if not state.is_each:
        return args, kwargs
    if node.target in _SHAPES or is_seeded(node):
        shape = list(tensor_of(node).shape)
        shape[state.dim] //= num
        return _with_shape(node, shape), kwargs
    if node.target in _INPUT_SHAPES:
        shape = list(tensor_of(node).shape)
        shape[state.dim] //= num
        return (args[0], shape, *args[2:]), kwargs
    if node.target in (_aten.native_group_norm.default, _aten.native_group_norm_backward.default):
        place = 3 if node.target is _aten.native_group_norm.default else 5
        return (*args[:place], int(args[place]) // num, *args[place + 1 :]), kwargs  # pyright: ignore[reportArgumentType]
    return args, kwargs


def _with_shape(node: fx.Node, shape: list[int]) -> tuple[Any, ...]:
    place = _SHAPES.get(node.target, 0)  # pyright: ignore[reportArgumentType, reportCallIssue]
    return (*node.args[:place], shape, *node.args[place + 1 :])
