"""Warn of an optimizer whose first step updates no model that Elixir planned, although it should."""

import gc
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from elixir_compile import compat
from elixir_compile.capture.modules import model_of
from elixir_compile.errors import NoGraphCaptured
from elixir_compile.ops.registry import slot_of

_captured = WeakIdKeyDictionary()
"""The parameters that captured graphs read as plain inputs: no plan can move them, so they have no slot."""


def warn_if_unplanned(optimizer: Optimizer) -> None:
    """Warn if no parameter of `optimizer` belongs to a compiled or prepared model; called by its first `step()`."""
    if any(slot_of(param) is not None for param in _params(optimizer)):
        return
    warnings.warn(
        NoGraphCaptured(
            f"no parameter of this {type(optimizer).__name__} belongs to a model that Elixir compiled or prepared, "
            "so nothing is planned or offloaded. Call what `torch.compile(model, backend='elixir')` returns, "
            "not `model`. If torch has logged that `recompile_limit` was reached, call `torch.compiler.reset()` "
            "before compiling another model of the same class. Of a module of torch itself, such as `nn.Sequential`, "
            "Dynamo captures nothing if it is compiled in place, or around DistributedDataParallel: give the wrapper "
            "what `torch.compile(model, backend='elixir')` returns."
        ),
        stacklevel=4,
    )


def note_captured(inputs: Iterable[object]) -> None:
    """Note `inputs`, those of a graph that was captured: an optimizer of a parameter among them needs no warning."""
    for value in inputs:
        if isinstance(value, nn.Parameter):
            _captured[value] = True


def watch_plain_optimizers(backend: Callable[..., Any], hybrid: type[Optimizer]) -> None:
    """From now on, warn after the first step of each optimizer that is no `hybrid` one, if nothing of its model was
    captured although `torch.compile` was to compile the model by `backend`."""
    seen: WeakSet[Optimizer] = WeakSet()

    def inspect(optimizer: Optimizer, args: object, kwargs: object) -> None:
        if optimizer in seen:
            return
        seen.add(optimizer)
        params = _params(optimizer)
        if "torch._dynamo" not in sys.modules:
            return  # nothing was compiled in this process
        is_asked = not isinstance(optimizer, hybrid) and not any(
            slot_of(param) is not None or param in _captured for param in params
        )
        if is_asked and _is_compiled_by(backend, params):
            warn_if_unplanned(optimizer)

    hook: Any = torch.compiler.disable(inspect)
    register_optimizer_step_post_hook(hook)


def _params(optimizer: Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _is_compiled_by(backend: Callable[..., Any], params: Iterable[torch.Tensor]) -> bool:
    """Return whether a module in the process with any of `params` is compiled by `backend` and was not prepared."""
    wanted = {id(param) for param in params}
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    compiled = [module for module in modules if compat.backend_of(module) is backend and model_of(module) is None]
    return any(id(param) in wanted for module in compiled for param in module.parameters())
