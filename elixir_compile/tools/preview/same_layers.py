"""Check that all layers of a model equal the layers of a smaller model, so that a trace of few layers stands for all.

A trace of few layers cannot show that a later layer differs in its class, in the shapes of its parameters or in a flag.
So the modules of both models are compared, attribute by attribute. Attributes that differ, such as the number of a
layer, are deleted from the smaller model. A trace that reads a deleted attribute then fails.
"""

import functools
import types
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import nn

from elixir_compile.base.errors import UnsupportedModel

_OWN = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_backward_hooks"})
"""Attributes of every module whose contents are compared apart, or that do not matter to a forward."""


def hide_unlike(few: nn.Module, full: nn.Module, *, few_layers: int, layers: int) -> None:
    """Delete attributes from the modules of `few` that differ from the attributes of `full`.

    `few` is a model of `few_layers` layers, `full` the same model with `layers` layers. Raises UnsupportedModel if they
    differ in more than attributes.
    """
    comparison = _Comparison(few_layers, layers)
    comparison.compare(few, full, "")
    if not comparison.num_stacks:
        raise UnsupportedModel(type(full).__name__, f"it has no stack of {layers} layers")
    _require_own_parameters(full, layers)
    for module, name in comparison.unlike.values():
        delattr(module, name)


def _require_own_parameters(full: nn.Module, layers: int) -> None:
    """Raise UnsupportedModel if a layer shares a parameter with another module."""
    owners: dict[int, str] = {}
    stacks = [path for path, module in full.named_modules() if _is_stack(module, layers)]
    for path, module in full.named_modules(remove_duplicate=False):
        for name, param in module._parameters.items():
            here = f"{path}.{name}"
            known = here if param is None else owners.setdefault(id(param), here)
            if known != here and any(at.startswith(f"{stack}.") for stack in stacks for at in (known, here)):
                raise UnsupportedModel(here, f"it is the parameter {known} too")


def _is_stack(module: nn.Module, layers: int) -> TypeGuard[nn.ModuleList | nn.Sequential]:
    return isinstance(module, nn.ModuleList | nn.Sequential) and len(module) == layers


class _Comparison:
    """The comparison of the modules of two models."""

    def __init__(self, few_layers: int, layers: int) -> None:
        self._few_layers = few_layers
        self._layers = layers
        self.unlike: dict[tuple[int, str], tuple[nn.Module, str]] = {}
        """Attributes of the model of few layers that differ, by the id of their module and their name."""
        self.num_stacks = 0
        self._configs: dict[tuple[int, int], bool] = {}

    def compare(self, few: nn.Module, full: nn.Module, path: str) -> None:
        """Record the attributes in which `few` and `full`, both at `path`, differ.

        Raises UnsupportedModel if they differ in classes, children or tensors.
        """
        if _is_stack(few, self._few_layers) and _is_stack(full, self._layers):
            self.num_stacks += 1
            for number, layer in enumerate(full):
                self.compare(few[self._alike(number)], layer, f"{path}.{number}")
            return
        tensors = (_forms(few._parameters), _forms(few._buffers)) == (_forms(full._parameters), _forms(full._buffers))
        if type(few) is not type(full) or list(few._modules) != list(full._modules) or not tensors:
            raise UnsupportedModel(path, "this layer is another module than those beside it")
        for name, child in few._modules.items():
            other = full._modules[name]
            if child is not None and other is not None:
                self.compare(child, other, f"{path}.{name}")
            elif child is not other:
                raise UnsupportedModel(path, f"only some layers have {name}")
        mine, others = vars(few), vars(full)
        for name in mine.keys() | others.keys():
            if name in _OWN:
                continue
            if name not in mine:
                raise UnsupportedModel(path, f"only some layers have {name}")
            if name not in others or not self._is_known_same(_plain(name, mine[name]), _plain(name, others[name])):
                self.unlike[id(few), name] = few, name

    def _alike(self, number: int) -> int:
        """Return the number of the layer of the small model that stands for layer `number` of the full model.

        The first layer stands for the first, the last for the last, and the layers between take turns.
        """
        last = self._few_layers - 1
        if number == 0 or last < 2:
            return 0 if number == 0 else last
        return last if number == self._layers - 1 else 1 + (number - 1) % (last - 1)

    def _is_known_same(self, mine: Any, other: Any) -> bool:
        try:
            return self._is_same(mine, other)
        except (RuntimeError, TypeError, ValueError):  # for example, arrays compare element by element
            return False

    def _is_same(self, mine: Any, other: Any) -> bool:
        if mine is other:
            return True
        if type(mine) is not type(other):
            return False
        if isinstance(mine, torch.Tensor):
            return _form(mine) == _form(other)
        if isinstance(mine, Mapping):
            return list(mine) == list(other) and all(self._is_same(mine[key], other[key]) for key in mine)
        if isinstance(mine, list | tuple):
            if len(mine) == self._few_layers and len(other) == self._layers:
                return all(self._is_same(mine[0], entry) for entry in (*mine, *other))
            return len(mine) == len(other) and all(map(self._is_same, mine, other))
        if isinstance(mine, functools.partial):
            parts = ("func", "args", "keywords")
            return all(self._is_same(getattr(mine, part), getattr(other, part)) for part in parts)
        if isinstance(mine, types.FunctionType):
            values = [[cell.cell_contents for cell in function.__closure__ or ()] for function in (mine, other)]
            return mine.__code__ is other.__code__ and self._is_same(*values)
        if hasattr(mine, "to_dict"):
            return self._is_same_config(mine, other)
        return bool(mine == other) or (mine, other) == (self._few_layers, self._layers)

    def _is_same_config(self, mine: Any, other: Any) -> bool:
        key = id(mine), id(other)
        if key not in self._configs:
            self._configs[key] = True  # during the comparison: configurations may refer to each other
            self._configs[key] = self._is_same(vars(mine), vars(other))
        return self._configs[key]


def _plain(name: str, value: Any) -> Any:
    """Return the `value` of the attribute `name`; for hooks, without their numbers, which count over the process."""
    return list(value.values()) if name.endswith("_hooks") and isinstance(value, Mapping) else value


def _forms(tensors: Mapping[str, torch.Tensor | None]) -> Mapping[str, Any]:
    return {name: None if tensor is None else _form(tensor) for name, tensor in tensors.items()}


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
