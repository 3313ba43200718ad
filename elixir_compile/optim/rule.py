"""Update rules: the arithmetic of an optimizer class, from gradients and statistics to new weights, in place.

A rule does not know placements. `BucketUpdate` calls it with the tensors and hyperparameters of a group slice, which
were copied when the update was requested. `adamw_rule` has the rule of AdamW, `generic.class_rule` that of any other
optimizer class.
"""

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from elixir_compile import compat
from elixir_compile.base.errors import UnsupportedModel
from elixir_compile.graph.ops.optimizers import ParamState
from elixir_compile.graph.ops.registry import gathered_numel
from elixir_compile.graph.ops.shards import own_grad, own_part
from elixir_compile.optim.layout import StatisticLayout

State = MutableMapping[str, Any]
"""The optimizer state of a parameter by name: its statistics, and counters such as `step`."""


class ParamUpdate(NamedTuple):
    """The tensors of a parameter in an update, all on one device."""

    weight: torch.Tensor
    grad: torch.Tensor
    state: State


GRAD_SCALE = "grad_scale"
"""The hyperparameter by which an update multiplies gradients; 1 if the group has no such key."""


def scaled(groups: Sequence[dict[str, Any]], factor: float) -> Sequence[Mapping[str, Any]]:
    """Return `groups` with `GRAD_SCALE` set to `factor`; the groups themselves if `factor` is 1."""
    return groups if factor == 1.0 else [{**group, GRAD_SCALE: factor} for group in groups]


class UpdateRule:
    """The arithmetic of an optimizer class; `group` holds the hyperparameters of a param group.

    What is not overridden is right for a rule whose tensors may be updated one by one, in any order and at any time.
    """

    makes_state = False
    """Whether `update` creates missing state; if False, `StatePlacer` creates state as zeros."""

    def snapshot(self) -> "UpdateRule":
        """Return the rule with the optimizer's attributes as they are now, for an update that runs later."""
        return self

    def why_not_elementwise(self, groups: Sequence[Mapping[str, Any]]) -> str:
        """Return why `groups` may not be updated bucket by bucket; empty if the class is element-wise."""
        return ""

    def counts_steps(self, group: Mapping[str, Any]) -> bool:
        """Return whether `update` wants the entry `step` of a state beside the weight, and only reads it and adds 1."""
        return True

    def moves_with_update(self, name: str, group: Mapping[str, Any]) -> bool:
        """Return whether the entry `name` of a state must be on the device that updates the parameter."""
        return True

    def statistics(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the statistics of exact state, shaped like their parameter."""
        raise NotImplementedError

    def state_layouts(self, param: torch.Tensor, group: Mapping[str, Any]) -> Mapping[str, StatisticLayout]:
        """Return the layout of each statistic of `param` by name."""
        raise NotImplementedError

    def param_state(self, param: torch.Tensor, group: Mapping[str, Any]) -> ParamState:
        """Return the bytes of the state of `param`, in param group 0, and in which other dtypes a plan may store it."""
        return ParamState(group=0, nbytes=state_nbytes(param, self.state_layouts(param, group)))

    def as_planned(self, param: torch.Tensor, state: State, group: Mapping[str, Any]) -> State:
        """Return `state` of `param` in the layouts of `state_layouts`, converted if it is in others."""
        return state

    def start(self, param: torch.Tensor, state: State, device: torch.device, *, is_fresh: bool) -> None:
        """Prepare for updates of `param` on `device` or on the host; called on the training thread.

        If `is_fresh`, statistics in `state` are zeros or missing, and those that do not begin at zero are filled here.
        """

    def update(self, updates: Sequence[ParamUpdate], group: Mapping[str, Any]) -> None:
        """Update the weights and the states of `updates` in place."""
        raise NotImplementedError


def state_nbytes(param: torch.Tensor, layouts: Mapping[str, StatisticLayout]) -> int:
    """Return the bytes of statistics with `layouts` of all of `param`, on however many ranks it is."""
    return sum(layout.nbytes(gathered_numel(param)) for layout in layouts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSlice:
    """The tensors and hyperparameters of a param group in a bucket, for a single update."""

    params: tuple[nn.Parameter, ...]
    updates: tuple[ParamUpdate, ...]
    """Of each parameter what is on this rank: its own memory, or copies on the host for a host update."""
    buffers: tuple[Mapping[str, torch.Tensor], ...]
    """For each parameter, host tensors by name for statistics created by the update."""
    group: Mapping[str, Any]

    @property
    def weights(self) -> list[torch.Tensor]:
        """The weights of all parameters."""
        return [each.weight for each in self.updates]

    @property
    def grads(self) -> list[torch.Tensor]:
        """The gradients of all parameters."""
        return [each.grad for each in self.updates]

    @property
    def memory(self) -> list[torch.Tensor]:
        """The statistics in memory."""
        states = (each.state for each in self.updates if isinstance(each.state, dict))
        return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]


def snapshot(group: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a copy of the hyperparameters of `group`; tensors are cloned."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


def on_host(value: Any) -> Any:
    """Return `value`, a hyperparameter, readable on the host by any thread: a copy of a tensor on an accelerator.

    Waits for the tensor's device, so it is called by the thread that wrote the tensor.
    """
    if isinstance(value, tuple):
        return tuple(map(on_host, value))
    return value.to("cpu") if isinstance(value, torch.Tensor) and value.device.type != "cpu" else value


def group_slice_of(
    params: Sequence[nn.Parameter],
    states: Mapping[nn.Parameter, State],
    group: Mapping[str, Any],
    buffers: Sequence[Mapping[str, torch.Tensor]] = (),
) -> GroupSlice:
    """Return the slice of `group` with `params`; each parameter must have a gradient."""
    return GroupSlice(
        params=tuple(params),
        updates=tuple(
            ParamUpdate(own_part(param).detach(), compat.settled(own_grad(param)), states[param]) for param in params
        ),
        buffers=tuple(buffers),
        group=snapshot(group),
    )


def require_dense(params: Iterable[nn.Parameter]) -> None:
    """Raise UnsupportedModel if a parameter in `params` has a sparse gradient. Plans never place such parameters."""
    for param in params:
        if param.grad is not None and param.grad.is_sparse:
            raise UnsupportedModel(
                f"a parameter of shape {tuple(param.shape)}",
                "its gradient is sparse, and HybridAdamW updates dense ones. Give it to torch.optim.SparseAdam",
            )
