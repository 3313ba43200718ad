"""The update rule of any optimizer class: run the class's own `step` on the tensors of a bucket.

    weights, grads, states  ->  a transient optimizer: an instance of the class with these tensors  ->  its `step()`

The parameters of the transient optimizer share memory with the weights and gradients. So no formula is written a second
time, and the result is bitwise equal to the class with the same flags on the same device. The class creates the state
of a parameter at the first step. Later steps on the host run as a host pass if `class_pass` can record the class.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from elixir_compile.optim.generic.class_pass import ClassPasses
from elixir_compile.optim.generic.state_schema import StateSchema, dry_step, group_key
from elixir_compile.optim.generic.transient import ClassStep, Row, attributes_of
from elixir_compile.optim.host import host_threads_for
from elixir_compile.optim.rule import State


class ClassRule:
    """The update rule of `cls`, with the attributes of its instance `optimizer`."""

    makes_state = True

    def __init__(self, cls: type[Optimizer], optimizer: Optimizer) -> None:
        self._cls = cls
        self._optimizer = weakref.ref(optimizer)
        self._attributes: Mapping[str, Any] = {}
        self._schemas: dict[tuple[object, ...], StateSchema] = {}
        self._passes = ClassPasses()
        self._dtypes: dict[int, tuple[int, tuple[torch.dtype, ...]]] = {}
        """By index of a param group, its number of parameters and their dtypes: a cache, read at each bucket."""

    def snapshot(self) -> "ClassRule":
        """Return the rule with the present attributes of the optimizer, for updates that run later."""
        rule = ClassRule.__new__(ClassRule)
        rule._cls, rule._optimizer = self._cls, self._optimizer
        rule._schemas, rule._passes = self._schemas, self._passes
        rule._attributes = self._attributes_now()
        return rule

    def schema(self, group: Mapping[str, Any], dtype: torch.dtype) -> StateSchema:
        """Return the state schema for parameters in `dtype` with the hyperparameters of `group`, from a dry step."""
        key = (dtype, *group_key(group))
        if key not in self._schemas:
            self._schemas[key] = dry_step(self._cls, self._attributes_now(), group, dtype)
        return self._schemas[key]

    def why_not_elementwise(self, groups: Sequence[Mapping[str, Any]]) -> str:
        """Return why the class is not element-wise for some param group; empty if it is element-wise for all."""
        for index, group in enumerate(groups):
            num_params, dtypes = self._dtypes.get(index, (-1, ()))
            if num_params != len(group["params"]):
                dtypes = tuple(dict.fromkeys(param.dtype for param in group["params"]))
                self._dtypes[index] = (len(group["params"]), dtypes)
            for dtype in dtypes:
                if because := self.schema(group, dtype).because:
                    return because
        return ""

    def statistics(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the statistics, each shaped like its parameter."""
        return tuple(self.schema(group, torch.float32).dtypes)

    def moves_with_update(self, name: str, group: Mapping[str, Any]) -> bool:
        """Return whether the entry `name` of a state must be on the device that updates the parameter.

        Statistics must. Counters stay on the host unless the class is `fused` or `capturable`.
        """
        return name in self.statistics(group) or bool(group.get("fused") or group.get("capturable"))

    def state_dtypes(self, param: torch.Tensor, group: Mapping[str, Any]) -> Mapping[str, torch.dtype]:
        """Return the dtype of each statistic of `param` by name; all have the shape of `param`."""
        return self.schema(group, param.dtype).dtypes

    def start(self, param: torch.Tensor, state: State, device: torch.device, *, is_fresh: bool) -> None:
        """Choose the host threads for `device`; the class creates the state at its first step."""
        self._passes.threads = host_threads_for(device)

    def update(
        self,
        weights: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        states: Sequence[State],
        group: Mapping[str, Any],
    ) -> None:
        """Update `weights` in place and the entries of `states` in place or by new values, as the class does."""
        rows = [
            Row(weight=weight, grad=grad, state=state)
            for weight, grad, state in zip(weights, grads, states, strict=True)
        ]
        step = ClassStep(cls=self._cls, attributes=self._attributes, group=group)
        if not group.get("fused"):  # torch's fused steps are single passes already
            rows = self._passes.update(step, rows, self.schema(group, weights[0].dtype))
        if rows:
            step.take(rows)

    def _attributes_now(self) -> Mapping[str, Any]:
        optimizer = self._optimizer()
        return self._attributes if optimizer is None else attributes_of(optimizer)
