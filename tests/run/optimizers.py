"""Optimizer classes that users write: one that is element-wise, and several that are not, each for a reason of its
own."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """Element-wise; replaces its statistic instead of writing it, and counts in a plain number."""

    def __init__(self, params: Any, lr: float = 1e-2, beta: float = 0.9, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, group)
        return loss

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        average = state.get("average", torch.zeros_like(param))
        direction = torch.lerp(param.grad, average, group["beta"]).sign_()
        param.data = param.data * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * direction
        state["average"] = torch.lerp(param.grad, average, 0.99)
        state["count"] = state.get("count", 0) + 1


class Scaled(Lion):
    """Each tensor by its own norm, as LAMB does."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.sub_(param.grad, alpha=group["lr"] * float(param.norm() / param.grad.norm()))


class RowScaled(Lion):
    """Each row by its own norm."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.sub_(torch.nn.functional.normalize(param.grad, dim=-1), alpha=group["lr"])


class Clipped(Lion):
    """By the mean square of the gradient, above a threshold only."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.sub_(param.grad / max(1.0, float(param.grad.square().mean().sqrt()) / 5), alpha=group["lr"])


class Noisy(Lion):
    """With noise."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.sub_(param.grad + torch.randn_like(param), alpha=group["lr"])


class Factored(Lion):
    """Keeps one number per row."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        self.state[param]["rows"] = param.grad.reshape(len(param), -1)[:, 0].clone()
        param.sub_(param.grad, alpha=group["lr"])


class CountsInGroup(Lion):
    """Counts steps in the param group."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        group["count"] = group.get("count", 0) + 1
        param.sub_(param.grad, alpha=group["lr"] / group["count"])


class CountsInItself(Lion):
    """Counts steps in an attribute."""

    count = 0

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        self.count += 1
        param.sub_(param.grad, alpha=group["lr"] / self.count)


class Centered(Lion):
    """Takes the mean out of the gradients of convolutions."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        grad = param.grad - param.grad.mean(dim=(1, 2, 3), keepdim=True) if param.dim() == 4 else param.grad
        param.sub_(grad, alpha=group["lr"])


class FastNumbers(Lion):
    """Moves numbers faster than tensors."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.sub_(param.grad, alpha=group["lr"] if param.dim() else 10 * group["lr"])


class SlowGiants(Lion):
    """Moves large tensors slower than small ones."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.sub_(param.grad, alpha=group["lr"] if param.numel() < 4096 else group["lr"] / 10)


class FastSquares(Lion):
    """Moves matrices of 13 x 13 faster than other tensors, which no dry step finds out."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        self.state[param]["last"] = param.grad.clone()
        param.sub_(param.grad, alpha=10 * group["lr"] if param.shape == (13, 13) else group["lr"])


class LateAverage(Lion):
    """Begins to average the weights in place at the fourth step, after all dry steps."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        state["count"] = state.get("count", 0) + 1
        param.sub_(param.grad, alpha=group["lr"])
        if state["count"] >= 4:
            if "slow" not in state:
                state["slow"] = torch.zeros_like(param)
            state["slow"].lerp_(param, 0.5)
            param.add_(state["slow"], alpha=-0.01)


class StepsByTwo(Lion):
    """Keeps in `step` a number that is not that of the steps."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        step = self.state[param].setdefault("step", torch.zeros(()))
        step += 2
        param.sub_(param.grad, alpha=group["lr"])
