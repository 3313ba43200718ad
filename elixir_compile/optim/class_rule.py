"""The rule of any optimizer class: the class's own `step`, run on shadows of one bucket's tensors.

    weights, grads, states  ->  an instance of the class that holds only them  ->  its `step()`

A shadow shares memory with the weight and the gradient that it stands for, so no formula is written a second time, and
the result is bitwise what the class computes with the same flags from tensors on the same side. The class makes the
state of a parameter at its first step, as it always does.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from elixir_compile.optim.dry_step import Kept, dry_step, form_of
from elixir_compile.optim.rule import State
from elixir_compile.optim.shadow import attributes_of, plain_step, shadow_of


class ClassRule:
    """How `cls` updates; `optimizer` is the instance whose hyperparameters and attributes count."""

    makes_state = True

    def __init__(self, cls: type[Optimizer], optimizer: Optimizer) -> None:
        self._cls = cls
        self._optimizer = weakref.ref(optimizer)
        self._attributes: Mapping[str, Any] = {}
        self._kept: dict[tuple[object, ...], Kept] = {}
        self._dtypes: dict[int, tuple[int, tuple[torch.dtype, ...]]] = {}
        """By param group, how many parameters it had when these were their dtypes: asked for at each bucket."""

    def now(self) -> "ClassRule":
        """Return the rule with the attributes that the optimizer has now, for updates that run later."""
        rule = ClassRule.__new__(ClassRule)
        rule._cls, rule._optimizer, rule._kept = self._cls, self._optimizer, self._kept
        rule._attributes = self._attributes_now()
        return rule

    def kept(self, group: Mapping[str, Any], dtype: torch.dtype) -> Kept:
        """Return what the class keeps for parameters of `group` in `dtype`, as a dry step shows."""
        form = (dtype, *form_of(group))
        if form not in self._kept:
            self._kept[form] = dry_step(self._cls, self._attributes_now(), group, dtype)
        return self._kept[form]

    def obstacle(self, groups: Sequence[Mapping[str, Any]]) -> str:
        """Return why the class is not element-wise, with the hyperparameters of one of `groups`."""
        for index, group in enumerate(groups):
            num_params, dtypes = self._dtypes.get(index, (-1, ()))
            if num_params != len(group["params"]):
                dtypes = tuple(dict.fromkeys(param.dtype for param in group["params"]))
                self._dtypes[index] = (len(group["params"]), dtypes)
            for dtype in dtypes:
                if because := self.kept(group, dtype).because:
                    return because
        return ""

    def statistics(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the statistics, each shaped like its parameter."""
        return tuple(self.kept(group, torch.float32).dtypes)

    def travels(self, name: str, group: Mapping[str, Any]) -> bool:
        """Whether the entry `name` of a state goes where the update is; what counts stays on the host unless the class
        wants it beside the parameter."""
        return name in self.statistics(group) or bool(group.get("fused") or group.get("capturable"))

    def kinds(self, param: torch.Tensor, group: Mapping[str, Any]) -> Mapping[str, torch.dtype]:
        """Return the statistics of `param` by name, each shaped like it, with the dtypes."""
        return self.kept(group, param.dtype).dtypes

    def start(self, param: torch.Tensor, state: State, device: torch.device, *, is_fresh: bool) -> None:
        """Do nothing: the class makes the state at its first step."""

    def update(
        self,
        weights: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        states: Sequence[State],
        group: Mapping[str, Any],
    ) -> None:
        """Update `weights` in place and the entries of `states`, which a class may also replace."""
        shadows = [nn.Parameter(weight) for weight in weights]
        optimizer = shadow_of(self._cls, self._attributes, {**_beside(group, weights[0]), "params": shadows})
        for shadow, grad, state in zip(shadows, grads, states, strict=True):
            shadow.grad = grad.data  # not `detach()`, which shares the count of changes that guards the gradient
            if state:
                optimizer.state[shadow] = dict(state)
        plain_step(self._cls)(optimizer)
        for shadow, weight, state in zip(shadows, weights, states, strict=True):
            if shadow.data_ptr() != weight.data_ptr():  # the class wrote `param.data = ...`
                weight.copy_(shadow.detach())
            if shadow in optimizer.state:
                state.update(optimizer.state[shadow])

    def _attributes_now(self) -> Mapping[str, Any]:
        optimizer = self._optimizer()
        return self._attributes if optimizer is None else attributes_of(optimizer)


def _beside(group: Mapping[str, Any], weight: torch.Tensor) -> Mapping[str, Any]:
    """Return `group` for weights that live where `weight` does: hyperparameters that are tensors come along, and what
    a CUDA graph could capture, the host cannot."""
    is_on_host = weight.device.type == "cpu"
    moved = {
        name: value.to(weight.device) if is_on_host and isinstance(value, torch.Tensor) else value
        for name, value in group.items()
    }
    return {**moved, "capturable": False} if is_on_host and moved.get("capturable") else moved
