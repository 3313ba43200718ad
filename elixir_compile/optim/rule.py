"""What one kind of optimizer computes: from gradients and statistics to new weights, in place.

A rule knows nothing of placements, threads or devices; `update` calls it with tensors of one bucket and one param
group. AdamW in the parameter's own dtype is the first.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from elixir_compile import compat

State = Mapping[str, torch.Tensor]
"""The statistics of one parameter by name, and `step`, which counts."""


class UpdateRule(Protocol):
    """How tensors of one bucket are updated; `group` holds the hyperparameters of their param group."""

    def statistics(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the statistics, each shaped like its parameter."""
        ...

    def kinds(self, param: torch.Tensor, group: Mapping[str, Any]) -> Mapping[str, torch.dtype]:
        """Return what is kept for `param` by name, each shaped like it, with the dtypes."""
        ...

    def start(self, param: torch.Tensor, state: State, device: torch.device, *, is_fresh: bool) -> None:
        """Get ready, on the thread that trains, for updates of `param` on `device` or beside it; fill fresh state, all
        zero, that does not begin at zero."""
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
            compat.fused_adamw_(
                [weights[index] for index in indices],
                [grads[index] for index in indices],
                [state["exp_avg"] for state in own],
                [state["exp_avg_sq"] for state in own],
                [state["max_exp_avg_sq"] for state in own] if group["amsgrad"] else [],
                [state["step"] for state in own],
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
