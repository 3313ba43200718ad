"""A gradient becomes `param.grad`, or is added to what is there: what autograd does when one reaches a leaf.

    reduce dtype None       the sum has the dtype of the parameter, as in eager code
    reduce dtype float32    from the second micro-batch on the sum is fp32; one micro-batch alone costs nothing more.
                            Of several ranks it is fp32 from the first on, as their mean is

Only parameters with a master have such a sum: their update reads gradients of any dtype.
"""

from collections.abc import Callable

import torch

from elixir_compile.ops.masters import has_master
from elixir_compile.ops.shards import as_dtensor, is_dtensor, own_part
from elixir_compile.runtime.slab import flat

_BLOCK = 1 << 19
"""Elements that are widened at once, in the cache: `add_` of another dtype takes ten times as long on a host."""


def fitted(param: torch.nn.Parameter, grad: torch.Tensor) -> torch.Tensor:
    """Return `grad`, this rank's part of a gradient, where `param` lives and in its memory layout."""
    own = own_part(param)
    if grad.device != own.device:
        grad = grad.to(own.device)
    if grad.stride() != own.stride():
        grad = torch.empty_like(own, dtype=grad.dtype).copy_(grad)
    return grad


def widen_sum(param: torch.nn.Parameter, dtype: torch.dtype, room: Callable[[], torch.Tensor] | None) -> None:
    """Let `param.grad` hold the sum of what is there and a gradient of `dtype`; `room` makes memory for an fp32 sum,
    None sums in the dtype of `param`."""
    if is_dtensor(param):
        if dtype != param.dtype:
            param.grad_dtype = None  # any: torch would refuse one that differs from the parameter's
    elif room is not None and param.grad is not None and param.grad.dtype == param.dtype and has_master(param):
        total = room().copy_(param.grad)
        param.grad_dtype = None
        param.grad = total


def publish(param: torch.nn.Parameter, grad: torch.Tensor, room: Callable[[], torch.Tensor] | None) -> None:
    """Add `grad` to the gradient of `param`, unless that is frozen by now; `room` as for `widen_sum`."""
    if not param.requires_grad:
        return
    grad = fitted(param, grad)
    widen_sum(param, grad.dtype, room)
    if param.grad is None:
        param.grad = as_dtensor(grad, param)
    elif is_dtensor(param):
        own_part(param.grad).add_(grad)
        torch.autograd.graph.increment_version(param.grad)
    elif param.grad.dtype == grad.dtype:
        param.grad.add_(grad)
    else:
        _add_narrow(param.grad, grad)


def _add_narrow(total: torch.Tensor, grad: torch.Tensor) -> None:
    """Add `grad` to `total`, which is wider and in the same memory layout."""
    wide, narrow = flat(total), flat(grad)
    for start in range(0, total.numel(), _BLOCK):
        block = slice(start, start + _BLOCK)
        wide[block].add_(narrow[block].to(wide.dtype))
