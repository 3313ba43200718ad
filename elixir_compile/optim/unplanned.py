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
from elixir_compile.base.errors import NoGraphCaptured
from elixir_compile.graph.capture.modules import model_of
from elixir_compile.graph.ops.registry import slot_of

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
    compiled = _Compiled(backend)

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
        if is_asked and any(map(compiled.has, params)):
            warn_if_unplanned(optimizer)

    hook: Any = torch.compiler.disable(inspect)
    register_optimizer_step_post_hook(hook)


def _params(optimizer: Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


class _Compiled:
    """Finds the parameters of modules that `torch.compile` was to compile by one backend, and that were not prepared.

    It looks through all objects of the process, once for all parameters of a model, which may have an optimizer each.
    """

    def __init__(self, backend: Callable[..., Any]) -> None:
        self._backend = backend
        self._has = WeakIdKeyDictionary()

    def has(self, param: torch.Tensor) -> bool:
        """Return whether `param` was such a parameter when one of its model was looked for first."""
        if param not in self._has:
            self._has[param] = False
            modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
            children = {id(child) for module in modules for child in module.children()}
            roots = [module for module in modules if id(module) not in children]
            for root in roots:
                params = list(root.parameters())
                if any(own is param for own in params):
                    self._note(root, params)
        return bool(self._has[param])

    def _note(self, root: nn.Module, params: Iterable[torch.Tensor]) -> None:
        """Note which of `params`, those of `root`, belong to a module in it that was to be compiled."""
        backend = self._backend
        compiled = [each for each in root.modules() if compat.backend_of(each) is backend and model_of(each) is None]
        wanted = {id(own) for module in compiled for own in module.parameters()}
        for own in params:
            self._has[own] = id(own) in wanted or self._has.get(own, False)
