"""Copy a model with its modules and the shapes of its parameters, but without its weights.

Every parameter of the copy is a view of one allocation, as large as the largest parameter. Nobody reads or writes this
memory, so the operating system gives it addresses and no pages.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from elixir_compile import compat
from elixir_compile.errors import InvalidOption, UnsupportedModel
from elixir_compile.managed.masters import gets_master
from elixir_compile.ops.masters import add_master, has_master


def built(model: "nn.Module | Callable[[], nn.Module]") -> nn.Module:
    """Return `model`; if it is a function, the module that it builds on the `meta` device, where parameters take no
    memory.

    Raises InvalidOption if `model` is neither a module nor a function that returns one.
    """
    if isinstance(model, nn.Module):
        return compat.undo_compile(model)
    if not callable(model):
        raise InvalidOption("model", model, "a torch.nn.Module, or a function that returns one")
    with torch.device("meta"):
        made = model()
    if not isinstance(made, nn.Module):
        raise InvalidOption("model", made, "a function that returns a torch.nn.Module")
    return compat.undo_compile(made)


def stand_in(
    model: nn.Module, device: torch.device, dtype: torch.dtype | None = None
) -> tuple[nn.Module, torch.UntypedStorage]:
    """Return a copy of `model` without its weights, and the allocation shared by the parameters of the copy.

    The buffers of the copy are on `device`. If `dtype` is given, its parameters are as after a cast to `dtype`, with
    masters. `model` stays as it is.

    Raises UnsupportedModel if the model has no parameters, a parameter has no shape yet, or the model cannot be copied.
    """
    params = list(model.parameters())
    if not params:
        raise UnsupportedModel(type(model).__name__, "it has no parameters, so there is nothing to place")
    memo: dict[int, Any] = {}
    memory = torch.UntypedStorage(max(_nbytes(param) for param in params))
    for name, param in model.named_parameters():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise UnsupportedModel(name, "it has no shape yet: run the model once on a batch")
        is_cast = dtype is not None and gets_master(param, dtype)
        own = _without_weights(param, memory, dtype if is_cast else None)
        if is_cast or has_master(param):
            add_master(own, None)
        memo[id(param)] = own
    for module in model.modules():
        # Tensors that a module keeps as plain attributes are constants of its graph.
        for value in (*module._buffers.values(), *vars(module).values()):
            if isinstance(value, torch.Tensor) and id(value) not in memo:
                memo[id(value)] = _on_device(value, device)
    try:
        return copy.deepcopy(model, memo), memory
    except Exception as error:
        reason = f"it cannot be copied ({error}). Pass a function that makes it instead"
        raise UnsupportedModel(type(model).__name__, reason) from error


def _nbytes(param: nn.Parameter) -> int:
    is_uninitialized = isinstance(param, nn.parameter.UninitializedParameter)
    return 0 if is_uninitialized else param.numel() * param.element_size()


def _without_weights(param: nn.Parameter, memory: torch.UntypedStorage, dtype: torch.dtype | None) -> nn.Parameter:
    """Return a parameter with the shape and strides of `param` in `memory`.

    A parameter with gaps in memory, or of a tensor subclass, keeps its values: no plan moves it.
    """
    if type(param.data) is not torch.Tensor or not torch.ops.aten.is_non_overlapping_and_dense(param.data):
        return nn.Parameter(
            param.detach().to(dtype or param.dtype), requires_grad=param.requires_grad
        )  # no plan moves it
    empty = torch.empty(0, dtype=dtype or param.dtype)
    return nn.Parameter(empty.set_(memory, 0, param.shape, param.stride()), requires_grad=param.requires_grad)


def _on_device(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    return value.detach() if value.device == device else torch.zeros_like(value, device=device)
