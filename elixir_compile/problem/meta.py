"""Create the parameters of a model built on `meta` on the host, module by module."""

from collections.abc import Callable

import torch
from torch import nn

from elixir_compile.errors import UnsupportedModel
from elixir_compile.runtime.slab import Slab


def materialize(model: nn.Module) -> None:
    """Allocate every parameter and buffer of `model` that is on `meta` on the host, and let its module initialise it.

    A module initialises itself by `reset_parameters()`, or by the `_init_weights` of a Hugging Face model. Raises
    UnsupportedModel for a module with neither; use `torch.nn.Module.to_empty` and `load_state_dict` for such a model.
    """
    initialize = getattr(model, "_init_weights", None)
    tied: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        materialize_module(module, path, initialize, tied)


def materialize_module(
    module: nn.Module, path: str, initialize: Callable[[nn.Module], None] | None, tied: dict[int, nn.Parameter]
) -> None:
    """Allocate and initialise the parameters and buffers of `module` itself, without its children; see `materialize`.

    `path` is its name in the model, for errors. `initialize` is the model's `_init_weights`. `tied` has the parameters
    created so far, by the id of their parameter on `meta`; it is updated.
    """
    local = [*module._parameters.values(), *module._buffers.values()]
    if not any(tensor is not None and tensor.is_meta for tensor in local):
        return
    is_known = all(param is None or id(param) in tied for param in module._parameters.values()) and not module._buffers
    _allocate(module, tied)
    if is_known:
        return
    reset = getattr(module, "reset_parameters", None)
    if reset is None and initialize is None:
        raise UnsupportedModel(
            path or type(module).__name__, "it is on `meta` and has no `reset_parameters()` to start from"
        )
    with torch.no_grad():
        if reset is not None:
            reset()
        if initialize is not None:
            initialize(module)


def _allocate(module: nn.Module, tied: dict[int, nn.Parameter]) -> None:
    for name, param in module._parameters.items():
        if param is not None and param.is_meta:
            if id(param) not in tied:
                tied[id(param)] = nn.Parameter(_on_host(param), requires_grad=param.requires_grad)
            module._parameters[name] = tied[id(param)]
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device="cpu")


def _on_host(param: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised tensor for `param` in a slab: on a CPU-only machine only slabs count as host memory."""
    return Slab(param.numel() * param.element_size(), pin=False).tensor(param.dtype, param.shape, 0)
