"""Facts about one ATen call: its floating-point operations, kernel, whether it may run twice, overwritten inputs."""

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
"""Kernels without a formula in torch, each with a kernel that has one and takes the same first arguments."""


def flops_of(node: fx.Node) -> "int | torch.SymInt":
    """Return the floating-point operations of one ATen call, 0 if torch has no formula for it."""
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
    torch.ops.aten._unsafe_masked_index_put_accumulate.default,
    torch.ops.aten.scatter.src,
    torch.ops.aten.scatter.value,
    torch.ops.aten.scatter_add.default,
    torch.ops.aten.scatter_reduce.two,
    torch.ops.aten.index_add.default,
}


_PURE = ("aten", "prims")
"""Operator libraries whose tags and schemas tell whether an op draws random numbers or writes an input."""


def kernel_of(node: fx.Node) -> Kernel:
    """Return the kind of Inductor's kernel for `node`, by which it can be fused or not."""
    return _kernel_of_op(node.target) if compat.is_op_overload(node.target) else Kernel.OPAQUE


@functools.cache
def _kernel_of_op(op: Any) -> Kernel:
    if op in _ALLOCATES_NOTHING or op in compat.inductor_random_ops() or torch.Tag.pointwise in op.tags:
        return Kernel.POINTWISE
    return Kernel.REDUCTION if torch.Tag.reduction in op.tags else Kernel.OPAQUE


@functools.cache
def _may_be_random(op: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


def runs_once(node: fx.Node) -> bool:
    """Return whether `node` must not be recomputed.

    It must not if it draws random numbers, writes an input, is no operator of `aten` or `prims`, or is saved by the
    user's checkpoint policy. Inductor's random ops may run again, because they read saved seeds. A node with a
    dynamic size among its inputs is not recomputed either.
    """
    if not compat.is_op_overload(node.target):
        return not is_number(node)
    if node.target.namespace not in _PURE:
        return True
    schema = compat.schema_of(node.target)
    is_random = _may_be_random(node.target) and _dropout_p(node) != 0.0
    is_saved = node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE
    return is_random or is_saved or schema.is_mutable or any(is_number(source) for source in node.all_input_nodes)


def _dropout_p(node: fx.Node) -> object:
    """Return the dropout probability of an attention kernel, None if the op has no such argument."""
    for place, argument in enumerate(compat.schema_of(node.target).arguments):
        if argument.name == "dropout_p":
            default = node.kwargs.get("dropout_p", argument.default_value)
            return node.args[place] if place < len(node.args) else default
    return None


def overwritten_input(node: fx.Node) -> fx.Node | None:
    """Return the input into whose memory Inductor writes the result of a functional scatter; None if it allocates.

    Inductor writes into the input if no other node reads it.
    """
    if node.target not in _WRITES_INTO_FIRST or not isinstance(node.args[0], fx.Node):
        return None
    base = node.args[0]
    return base if len(base.users) == 1 and base.op == "call_function" else None
