"""Set `param.grad` to a gradient, or add the gradient to it, as autograd does at a leaf.

    reduce dtype None       the sum has the dtype of the parameter, as in eager code
    reduce dtype float32    the sum is fp32 from the second micro-batch on, so a single micro-batch costs nothing more.
                            With several ranks it is fp32 from the first micro-batch on, because their mean is

Only parameters with a master have an fp32 sum, because their update reads gradients of any dtype.
"""

from collections.abc import Callable

import torch

from elixir_compile.ops.masters import has_master
from elixir_compile.ops.shards import as_dtensor, is_dtensor, own_part
from elixir_compile.runtime.slab import flat

_BLOCK = 1 << 19
"""Elements that are converted to the wider dtype at once, so that they stay in the cache. `add_` of a tensor of another
dtype takes ten times as long on a host."""


def fitted(param: torch.nn.Parameter, grad: torch.Tensor) -> torch.Tensor:
    """Return `grad`, this rank's part of a gradient, on the device of `param` and with its strides."""
    own = own_part(param)
    if grad.device != own.device:
        grad = grad.to(own.device)
    if grad.stride() != own.stride():
        grad = torch.empty_like(own, dtype=grad.dtype).copy_(grad)
    return grad


def widen_sum(param: torch.nn.Parameter, dtype: torch.dtype, new_buffer: Callable[[], torch.Tensor] | None) -> None:
    """Prepare `param.grad` so that a gradient of `dtype` can be added: convert it to fp32 if the sum is kept in fp32.

    `new_buffer` returns memory for an fp32 sum; None if sums have the dtype of `param`.
    """
    if is_dtensor(param):
        if dtype != param.dtype:
            param.grad_dtype = None  # allows any dtype; torch would refuse a gradient of another dtype than `param`
    elif new_buffer is not None and param.grad is not None and param.grad.dtype == param.dtype and has_master(param):
        total = new_buffer().copy_(param.grad)
        param.grad_dtype = None
        param.grad = total


def publish(param: torch.nn.Parameter, grad: torch.Tensor, new_buffer: Callable[[], torch.Tensor] | None) -> None:
    """Add `grad` to the gradient of `param`, unless `param` is frozen by now; `new_buffer` as for `widen_sum`."""
    if not param.requires_grad:
        return
    grad = fitted(param, grad)
    widen_sum(param, grad.dtype, new_buffer)
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
    """Add `grad` to `total`, which has a wider dtype and the same memory layout."""
    wide, narrow = flat(total), flat(grad)
    for start in range(0, total.numel(), _BLOCK):
        block = slice(start, start + _BLOCK)
        wide[block].add_(narrow[block].to(wide.dtype))
