"""What one kind of optimizer computes: from gradients and statistics to new weights, in place.

A rule knows nothing of placements, threads or devices; `update` calls it with tensors of one bucket and one param
group. Here is AdamW in the parameter's own dtype; `class_rule` has that of any other class.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Protocol

import torch
from torch.optim import adamw

State = MutableMapping[str, Any]
"""The statistics of one parameter by name, and what counts, such as `step`."""

GRAD_SCALE = "grad_scale"
"""What gradients are multiplied by, among the hyperparameters that an update gets; 1 where it is not there."""


def scaled(groups: Sequence[dict[str, Any]], factor: float) -> Sequence[Mapping[str, Any]]:
    """Return `groups` with what their updates multiply gradients by; as they are where that is 1."""
    return groups if factor == 1.0 else [{**group, GRAD_SCALE: factor} for group in groups]


class UpdateRule(Protocol):
    """How tensors of one bucket are updated; `group` holds the hyperparameters of their param group."""

    @property
    def makes_state(self) -> bool:
        """Whether `update` makes the state of a parameter that has none; else it is zeros."""
        ...

    def now(self) -> "UpdateRule":
        """Return the rule as it is now, for updates that run later."""
        ...

    def obstacle(self, groups: Sequence[Mapping[str, Any]]) -> str:
        """Return why parameters of `groups` may not be updated bucket by bucket; empty where they may."""
        ...

    def travels(self, name: str, group: Mapping[str, Any]) -> bool:
        """Whether the entry `name` of a state goes where the update is."""
        ...

    def statistics(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the statistics, each shaped like its parameter."""
        ...

    def kinds(self, param: torch.Tensor, group: Mapping[str, Any]) -> Mapping[str, torch.dtype]:
        """Return what is kept for `param` by name, each shaped like it, with the dtypes."""
        ...

    def start(self, param: torch.Tensor, state: State, device: torch.device, *, is_fresh: bool) -> None:
        """Get ready, on the thread that trains, for updates of `param` on `device` or beside it; fill fresh state, all
        zero or not there, that does not begin at zero."""
        ...

    def update(
        self,
        weights: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        states: Sequence[State],
        group: Mapping[str, Any],
    ) -> None:
        """Update `weights` and `states` in place; all tensors of one index are on one device."""
        ...


class AdamWRule:
    """torch's fused AdamW: every tensor as a tensor of its own, bitwise `torch.optim.AdamW(fused=True)`."""

    makes_state = False

    def now(self) -> "AdamWRule":
        """Return the rule: it has no attributes."""
        return self

    def obstacle(self, groups: Sequence[Mapping[str, Any]]) -> str:
        """Return nothing: AdamW treats each element alone."""
        return ""

    def travels(self, name: str, group: Mapping[str, Any]) -> bool:
        """Return True: the fused kernel reads `step` where the moments are."""
        return True

    def statistics(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the moments, each shaped like its parameter."""
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")

    def kinds(self, param: torch.Tensor, group: Mapping[str, Any]) -> Mapping[str, torch.dtype]:
        """Return the moments by name, each shaped like `param` and in its dtype."""
        return dict.fromkeys(self.statistics(group), param.dtype)

    def start(self, param: torch.Tensor, state: State, device: torch.device, *, is_fresh: bool) -> None:
        """Leave the moments at zero, where they begin."""

    def update(
        self,
        weights: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        states: Sequence[State],
        group: Mapping[str, Any],
    ) -> None:
        """Update `weights` and `states` in place."""
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, weight in enumerate(weights):
            kinds.setdefault((weight.device, weight.dtype), []).append(index)
        for indices in kinds.values():
            own = [states[index] for index in indices]
            adamw.adamw(
                [weights[index] for index in indices],
                [grads[index] for index in indices],
                [state["exp_avg"] for state in own],
                [state["exp_avg_sq"] for state in own],
                [state["max_exp_avg_sq"] for state in own] if group["amsgrad"] else [],
                [state["step"] for state in own],
                fused=True,
                amsgrad=group["amsgrad"],
                lr=beside(group["lr"], weights[indices[0]]),
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=group["maximize"],
            )


def beside(lr: "float | torch.Tensor", weight: torch.Tensor) -> "float | torch.Tensor":
    """Return `lr` where the kernel of `weight` reads it: a number and a tensor on the host are read everywhere."""
    is_elsewhere = isinstance(lr, torch.Tensor) and lr.device.type != "cpu" and lr.device != weight.device
    return lr.to(weight.device) if is_elsewhere else lr
