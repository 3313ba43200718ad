"""A transient instance of an optimizer class that holds other tensors, and the class's own step on one bucket."""

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from elixir_compile import compat
from elixir_compile.optim.rule import State

_OWN = frozenset(
    {"state", "param_groups", "step", "_rule", "_line", "_placer", "_early", "_overflow"}
    | {"_is_accumulating", "_has_stepped", "_has_warned"}
)
"""Attributes that no shadow takes: what the optimizer holds, a `step` that a scheduler wrapped, what `Hybrid` adds."""


def attributes_of(optimizer: Optimizer) -> Mapping[str, Any]:
    """Return the attributes of `optimizer` that its class may read in a step."""
    return {name: value for name, value in vars(optimizer).items() if name not in _OWN}


def transient_optimizer(cls: type[Optimizer], attributes: Mapping[str, Any], group: dict[str, Any]) -> Optimizer:
    """Return an instance of `cls` that holds `group` and nothing else."""
    optimizer = cls.__new__(cls)
    hooks = {name: OrderedDict() for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")}
    vars(optimizer).update(attributes, **hooks, param_groups=[group], state=defaultdict(dict))
    return optimizer


def plain_step(cls: type[Optimizer]) -> Callable[..., Any]:
    """Return the `step` of `cls` without the hooks that torch wraps around it once an instance exists."""
    step = cls.step
    return inspect.unwrap(step, stop=lambda inner: not getattr(inner, "hooked", False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one parameter has."""

    weight: torch.Tensor
    grad: torch.Tensor
    state: State


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassStep:
    """The step of `cls` as an optimizer with these attributes takes it for one param group."""

    cls: type[Optimizer]
    attributes: Mapping[str, Any]
    group: Mapping[str, Any]

    def take(self, rows: Sequence[Row]) -> None:
        """Update weights in place and the entries of states, which a class may also replace."""
        shadows = [nn.Parameter(row.weight) for row in rows]
        optimizer = self._transient(shadows, rows[0].weight)
        for shadow, row in zip(shadows, rows, strict=True):
            shadow.grad = row.grad.data  # not `detach()`, which shares the count of changes that guards the gradient
            if row.state:
                optimizer.state[shadow] = dict(row.state)
        self._step(optimizer)
        for shadow, row in zip(shadows, rows, strict=True):
            if shadow.data_ptr() != row.weight.data_ptr():  # the class wrote `param.data = ...`
                row.weight.copy_(shadow.detach())
            if shadow in optimizer.state:
                row.state.update({name: _apart(value, row.grad) for name, value in optimizer.state[shadow].items()})

    def take_dry(self, row: Row) -> tuple[torch.Tensor, State]:
        """Take the step on tensors of the device `meta`, for a host; return the weight and the state after it."""
        shadow = nn.Parameter(row.weight)
        optimizer = self._transient([shadow], torch.empty(0))
        if "foreach" in self.group:  # which is another way to the same bits, or the comparison with the class shows it
            optimizer.param_groups[0]["foreach"] = False
        shadow.grad = row.grad
        if row.state:
            optimizer.state[shadow] = dict(row.state)
        self._step(optimizer)
        return shadow.data, optimizer.state[shadow]

    def _step(self, optimizer: Optimizer) -> None:
        with compat.outside_captures():  # the thread that trains may capture a graph while the worker is here
            plain_step(self.cls)(optimizer)

    def _transient(self, shadows: Sequence[nn.Parameter], beside: torch.Tensor) -> Optimizer:
        return transient_optimizer(self.cls, self.attributes, {**_beside(self.group, beside), "params": list(shadows)})


def _apart(value: Any, grad: torch.Tensor) -> Any:
    """Return an entry of a state; a copy where the class kept the gradient itself, which is the user's."""
    if not isinstance(value, torch.Tensor) or {value.layout, grad.layout} != {torch.strided}:
        return value
    return value.clone() if value.dim() and value.data_ptr() == grad.data_ptr() else value


def _beside(group: Mapping[str, Any], weight: torch.Tensor) -> Mapping[str, Any]:
    """Return `group` for weights that live where `weight` does: hyperparameters that are tensors come along, and what
    a CUDA graph could capture, the host cannot."""
    is_on_host = weight.device.type == "cpu"
    moved = {
        name: value.to(weight.device) if is_on_host and isinstance(value, torch.Tensor) else value
        for name, value in group.items()
    }
    return {**moved, "capturable": False} if is_on_host and moved.get("capturable") else moved
