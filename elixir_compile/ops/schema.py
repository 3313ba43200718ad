"""The ops `elixir::gather`, which Dynamo captures for a parameter, and `elixir::reduce`, its backward.

`gather(handle, size, stride, key)` returns the gathered parameter on the compute device. `handle` is a tensor of a
single element that carries `requires_grad`, a leaf during capture (see `gate`). The parameter is no input of Dynamo's
graph, so its device, dtype and placement can change and no guard fails. AOTAutograd gets most parameters as inputs
(`capture/rewire.py`) and traces the ops for the others; for tracing, both ops are functional. A compiled
graph contains neither op, because the rewriter replaces them by the actions of the schedule. Eager code (evaluation,
`generate`, code outside of compiled graphs) runs the ops themselves.
"""

from collections.abc import Sequence

import torch

from elixir_compile.ops.registry import slot_by_key

_LIBRARY = torch.library.Library("elixir", "DEF")
_LIBRARY.define("gather(Tensor handle, int[] size, int[] stride, int key) -> Tensor")
_LIBRARY.define("reduce(Tensor grad, int key) -> Tensor")


def _gather(handle: torch.Tensor, size: Sequence[int], stride: Sequence[int], key: int) -> torch.Tensor:
    return slot_by_key(key).gather()


def _reduce(grad: torch.Tensor, key: int) -> torch.Tensor:
    slot = slot_by_key(key)
    slot.sink.gradients.accumulate(slot, grad)
    return grad.new_zeros(1)


def _gather_fake(handle: torch.Tensor, size: Sequence[int], stride: Sequence[int], key: int) -> torch.Tensor:
    return handle.new_empty_strided(size, stride)


def _reduce_fake(grad: torch.Tensor, key: int) -> torch.Tensor:
    return grad.new_empty(1)


def _setup_context(ctx, inputs, output) -> None:
    ctx.key = inputs[3]
    # Autograd keeps a parameter alive if it is deleted before the backward, so the context keeps the slot. Not during
    # tracing: the graph, and with it the slot, would outlive the model.
    ctx.slot = slot_by_key(inputs[3]) if type(inputs[0]) is torch.Tensor else None


def _gather_backward(ctx, grad: torch.Tensor):
    return torch.ops.elixir.reduce(grad, ctx.key), None, None, None


# Between the graphs of a model with graph breaks, Dynamo would compile these functions with their collectives.
_LIBRARY.impl("gather", torch.compiler.disable(_gather), "CompositeExplicitAutograd")
_LIBRARY.impl("reduce", torch.compiler.disable(_reduce), "CompositeExplicitAutograd")
torch.library.register_fake("elixir::gather", _gather_fake, lib=_LIBRARY)
torch.library.register_fake("elixir::reduce", _reduce_fake, lib=_LIBRARY)
torch.library.register_autograd("elixir::gather", _gather_backward, setup_context=_setup_context, lib=_LIBRARY)

GATHER = torch.ops.elixir.gather.default
REDUCE = torch.ops.elixir.reduce.default
