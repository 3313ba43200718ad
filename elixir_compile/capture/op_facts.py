"""What an ATen call costs and allows: floating-point operations, fusion, running twice, overwritten inputs."""

import functools
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import flop_registry

from elixir_compile import compat
from elixir_compile.capture.views import is_number
from elixir_compile.ir import Kernel

_aten = torch.ops.aten
_SAME_AS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}
"""Kernels without a formula of their own, whose first arguments are those of one that has."""


def flops_of(node: fx.Node) -> "int | torch.SymInt":
    """Return the floating-point operations of one ATen call, 0 where torch has no formula."""
    packet = getattr(node.target, "overloadpacket", None)
    formula = flop_registry.get(_SAME_AS.get(packet, packet))
    if formula is None:
        return 0
    args = fx.node.map_aggregate(node.args, _value)
    kwargs = fx.node.map_aggregate(node.kwargs, _value)
    return formula(*args, **kwargs, out_val=node.meta.get("val"))


def _value(argument: object) -> object:
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument


_ALLOCATES_NOTHING = {
    torch.ops.aten.full.default,
    torch.ops.aten.full_like.default,
    torch.ops.prims.iota.default,
    torch.ops.aten.arange.default,
    torch.ops.aten.scalar_tensor.default,
    torch.ops.aten.embedding.default,
    torch.ops.aten.constant_pad_nd.default,
    torch.ops.aten.gather.default,
    torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select_scatter.default,
}

_WRITES_INTO_FIRST = {
    torch.ops.aten.index_put.default,
    torch.ops.aten._unsafe_index_put.default,
    torch.ops.aten.scatter.src,
    torch.ops.aten.scatter.value,
    torch.ops.aten.scatter_add.default,
    torch.ops.aten.scatter_reduce.two,
    torch.ops.aten.index_add.default,
}


_PURE = ("aten", "prims")
"""Libraries whose ops say by tags and schema what they draw and write; whose own ops do is not known."""


def kernel_of(node: fx.Node) -> Kernel:
    """Return what Inductor can fuse of `node`."""
    return _kernel_of_op(node.target) if _is_op(node) else Kernel.OPAQUE


def _is_op(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload)  # the type of every ATen op has no public name


@functools.cache
def _kernel_of_op(op: Any) -> Kernel:
    if op in _ALLOCATES_NOTHING or op in compat.inductor_random_ops() or torch.Tag.pointwise in op.tags:
        return Kernel.POINTWISE
    return Kernel.REDUCTION if torch.Tag.reduction in op.tags else Kernel.OPAQUE


@functools.cache
def _may_be_random(op: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


def runs_once(node: fx.Node) -> bool:
    """Return whether `node` must not be computed a second time.

    It draws random numbers (those that Inductor draws come from saved seeds, and do so again), writes what it is given,
    is no plain operator, or is what the user's checkpoint policy saves. A node that takes a dynamic size is not moved
    to the other half either.
    """
    if not _is_op(node):
        return not is_number(node)
    if node.target.namespace not in _PURE:
        return True
    schema = node.target._schema  # pyright: ignore
    is_random = _may_be_random(node.target) and _dropout_p(node) != 0.0
    is_saved = node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE
    return is_random or is_saved or schema.is_mutable or any(is_number(source) for source in node.all_input_nodes)


def _dropout_p(node: fx.Node) -> object:
    """Return by how much an attention kernel drops; None for an op that takes no such argument."""
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.name == "dropout_p":
            default = node.kwargs.get("dropout_p", argument.default_value)
            return node.args[place] if place < len(node.args) else default
    return None


def overwritten_input(node: fx.Node) -> fx.Node | None:
    """Return the input whose memory a functional scatter takes for its result, or None: Inductor writes into a
    value nobody else reads."""
    name = getattr(node.target, "_opname", "")
    writes_into_first = node.target in _WRITES_INTO_FIRST or name == "_unsafe_masked_index_put_accumulate"
    if not writes_into_first or not isinstance(node.args[0], fx.Node):
        return None
    base = node.args[0]
    return base if len(base.users) == 1 and base.op == "call_function" else None
