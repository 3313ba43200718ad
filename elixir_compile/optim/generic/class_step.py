"""Run the step of an optimizer class on chosen tensors, for an update.

A transient optimizer is an instance of the user's class that holds the tensors of a bucket during a single update.
"""

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from elixir_compile import compat
from elixir_compile.optim.rule import ParamUpdate, State

_NOT_COPIED = frozenset(
    {"state", "param_groups", "step", "_updater", "_early", "_overflow"}
    | {"_is_accumulating", "_has_stepped", "_has_warned"}
)
"""Attributes not to copy: params, state, a `step` that a scheduler wrapped, and the attributes of `Hybrid`."""


def attributes_of(optimizer: Optimizer) -> Mapping[str, Any]:
    """Return the attributes of `optimizer` for its class's step to read."""
    return {name: value for name, value in vars(optimizer).items() if name not in _NOT_COPIED}


def transient_optimizer(cls: type[Optimizer], attributes: Mapping[str, Any], group: dict[str, Any]) -> Optimizer:
    """Return an instance of `cls` with `attributes` whose only param group is `group`, without hooks or state."""
    optimizer = cls.__new__(cls)
    hooks = {name: OrderedDict() for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")}
    vars(optimizer).update(attributes, **hooks, param_groups=[group], state=defaultdict(dict))
    return optimizer


def plain_step(cls: type[Optimizer]) -> Callable[..., Any]:
    """Return the `step` of `cls` without torch's wrapper, which calls the hooks of a user."""
    step = cls.step
    return inspect.unwrap(step, stop=lambda inner: not getattr(inner, "hooked", False))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassStep:
    """The step of `cls` for a param group, with the attributes of the user's optimizer."""

    cls: type[Optimizer]
    attributes: Mapping[str, Any]
    group: Mapping[str, Any]

    def take(self, rows: Sequence[ParamUpdate]) -> None:
        """Update weights in place, and the entries of states in place or by new values, as the class does."""
        params = [nn.Parameter(row.weight) for row in rows]
        optimizer = self._transient(params, rows[0].weight)
        for param, row in zip(params, rows, strict=True):
            param.grad = row.grad.data  # `detach()` would share the version, which GradientGuard checks
            if row.state:
                optimizer.state[param] = dict(row.state)
        self._step(optimizer)
        for param, row in zip(params, rows, strict=True):
            if param.data_ptr() != row.weight.data_ptr():  # the class assigned `param.data = ...`
                row.weight.copy_(param.detach())
            if param in optimizer.state:
                row.state.update({name: _unaliased(value, row.grad) for name, value in optimizer.state[param].items()})

    def take_dry(self, row: ParamUpdate) -> tuple[torch.Tensor, State]:
        """Run the step on meta tensors as if they were on the host; return the weight and the state after the step."""
        param = nn.Parameter(row.weight)
        optimizer = self._transient([param], torch.empty(0, device="cpu"))
        if "foreach" in self.group:  # the bits are the same, and `ClassPasses` compares them
            optimizer.param_groups[0]["foreach"] = False
        param.grad = row.grad
        if row.state:
            optimizer.state[param] = dict(row.state)
        self._step(optimizer)
        return param.data, optimizer.state[param]

    def _step(self, optimizer: Optimizer) -> None:
        with compat.outside_captures():  # the training thread may capture a graph meanwhile
            plain_step(self.cls)(optimizer)

    def _transient(self, params: Sequence[nn.Parameter], beside: torch.Tensor) -> Optimizer:
        return transient_optimizer(
            self.cls, self.attributes, {**_group_for(self.group, beside), "params": list(params)}
        )


def _unaliased(value: Any, grad: torch.Tensor) -> Any:
    """Return `value`, an entry of a state; a copy if the class stored the user's gradient tensor itself."""
    if not isinstance(value, torch.Tensor) or {value.layout, grad.layout} != {torch.strided}:
        return value
    return value.clone() if value.dim() and value.data_ptr() == grad.data_ptr() else value


def _group_for(group: Mapping[str, Any], weight: torch.Tensor) -> Mapping[str, Any]:
    """Return `group` for the device of `weight`: on the host, tensors are copied there and `capturable` is False."""
    is_on_host = weight.device.type == "cpu"
    moved = {
        name: value.to(weight.device) if is_on_host and isinstance(value, torch.Tensor) else value
        for name, value in group.items()
    }
    return {**moved, "capturable": False} if is_on_host and moved.get("capturable") else moved
