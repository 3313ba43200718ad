"""Floating-point operations of one ATen call, by torch's own formulas."""

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

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
