"""The rule of any optimizer class: the class's own `step`, run on shadows of one bucket's tensors.

    weights, grads, states  ->  an instance of the class that holds only them  ->  its `step()`

A shadow shares memory with the weight and the gradient that it stands for, so no formula is written a second time, and
the result is bitwise what the class computes with the same flags from tensors on the same side. The class makes the
state of a parameter at its first step, as it always does; from then on the host takes one pass where `class_pass` can.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from elixir_compile.optim.generic.class_pass import ClassPasses
from elixir_compile.optim.generic.state_schema import StateSchema, dry_step, form_of
from elixir_compile.optim.generic.transient import ClassStep, Row, attributes_of
from elixir_compile.optim.host import host_threads_for
from elixir_compile.optim.rule import State


class ClassRule:
    """How `cls` updates; `optimizer` is the instance whose hyperparameters and attributes count."""

    makes_state = True

    def __init__(self, cls: type[Optimizer], optimizer: Optimizer) -> None:
        self._cls = cls
        self._optimizer = weakref.ref(optimizer)
        self._attributes: Mapping[str, Any] = {}
        self._kept: dict[tuple[object, ...], StateSchema] = {}
        self._passes = ClassPasses()
        self._dtypes: dict[int, tuple[int, tuple[torch.dtype, ...]]] = {}
        """By param group, how many parameters it had when these were their dtypes: asked for at each bucket."""

    def now(self) -> "ClassRule":
        """Return the rule with the attributes that the optimizer has now, for updates that run later."""
        rule = ClassRule.__new__(ClassRule)
        rule._cls, rule._optimizer = self._cls, self._optimizer
        rule._kept, rule._passes = self._kept, self._passes
        rule._attributes = self._attributes_now()
        return rule

    def kept(self, group: Mapping[str, Any], dtype: torch.dtype) -> StateSchema:
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
        """Note `device`; the class makes the state at its first step."""
        self._passes.threads = host_threads_for(device)

    def update(
        self,
        weights: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        states: Sequence[State],
        group: Mapping[str, Any],
    ) -> None:
        """Update `weights` in place and the entries of `states`, which a class may also replace."""
        rows = [
            Row(weight=weight, grad=grad, state=state)
            for weight, grad, state in zip(weights, grads, states, strict=True)
        ]
        step = ClassStep(cls=self._cls, attributes=self._attributes, group=group)
        if not group.get("fused"):  # which is one pass as it is
            rows = self._passes.update(step, rows, self.kept(group, weights[0].dtype))
        if rows:
            step.take(rows)

    def _attributes_now(self) -> Mapping[str, Any]:
        optimizer = self._optimizer()
        return self._attributes if optimizer is None else attributes_of(optimizer)
