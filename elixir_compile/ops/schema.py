"""What Dynamo sees for a parameter, `elixir::gather`, and its gradient `elixir::reduce`.

`gather(handle, size, stride, key)` stands for the whole parameter on the compute device. `handle` is a tensor of one
element that carries `requires_grad`, a leaf while a graph is captured (see `gate`); the parameter itself is no input of
Dynamo's graph, so its device, dtype and placement can change without a guard noticing. AOTAutograd gets most parameters
as inputs (`capture/parameter_inputs.py`) and traces both of these for the rest; they are functional as far as tracing
can tell. In a compiled graph neither survives: the rewriter replaces them by the actions of the schedule. In eager code
(evaluation, `generate`, code outside the compiled region) they do what they say.
"""

from collections.abc import Sequence

import torch

from elixir_compile.ops.registry import slot_by_key

_LIBRARY = torch.library.Library("elixir", "DEF")
_LIBRARY.define("gather(Tensor handle, int[] size, int[] stride, int key) -> Tensor")
_LIBRARY.define("reduce(Tensor grad, int key) -> Tensor")


def _gather(handle: torch.Tensor, size: Sequence[int], stride: Sequence[int], key: int) -> torch.Tensor:
    return slot_by_key(key).whole()


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
    # Autograd keeps a parameter that is deleted before the backward. A tensor that is traced would keep the slot for as
    # long as its graph, which is longer than the model lives.
    ctx.slot = slot_by_key(inputs[3]) if type(inputs[0]) is torch.Tensor else None


def _gather_backward(ctx, grad: torch.Tensor):
    return torch.ops.elixir.reduce(grad, ctx.key), None, None, None


# Between the graphs of a model that breaks, Dynamo would compile what they do, collectives of DTensors included.
_LIBRARY.impl("gather", torch.compiler.disable(_gather), "CompositeExplicitAutograd")
_LIBRARY.impl("reduce", torch.compiler.disable(_reduce), "CompositeExplicitAutograd")
torch.library.register_fake("elixir::gather", _gather_fake, lib=_LIBRARY)
torch.library.register_fake("elixir::reduce", _reduce_fake, lib=_LIBRARY)
torch.library.register_autograd("elixir::gather", _gather_backward, setup_context=_setup_context, lib=_LIBRARY)

GATHER = torch.ops.elixir.gather.default
REDUCE = torch.ops.elixir.reduce.default
