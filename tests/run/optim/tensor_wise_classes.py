"""Optimizer classes that read whole tensors, in a few lines each, and such that read other parameters too."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer


class Plain(Optimizer):
    """The base of the classes here: `update` gets the parameters of a group that have gradients."""

    defaults_of_class: ClassVar[dict[str, Any]] = {}

    def __init__(self, params: Any, lr: float = 1e-2, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **self.defaults_of_class, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            self.update([param for param in group["params"] if param.grad is not None], group)
        return loss

    def update(self, params: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        for param in params:
            self.update_one(param, group)

    def update_one(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError


# ----------------------------------------------------------------------------------------------------------------------
# Tensor-wise classes.


class Lars(Plain):
    """LARS (https://arxiv.org/abs/1708.03888): the rate of a tensor follows its norm; the norms are stacked first."""

    defaults_of_class: ClassVar[dict[str, Any]] = {"momentum": 0.9, "trust": 0.01}

    def update(self, params: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        norms = torch.stack([param.norm() for param in params])
        grad_norms = torch.stack([param.grad.norm() for param in params])
        rates = group["trust"] * norms / (grad_norms + 1e-8)
        rates = torch.where((norms > 0) & (grad_norms > 0), rates, torch.ones_like(rates)).mul_(group["lr"])
        for param, rate in zip(params, rates.unbind(), strict=True):
            state = self.state[param]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(param)
            state["momentum_buffer"].mul_(group["momentum"]).add_(param.grad * rate)
            param.sub_(state["momentum_buffer"])


class Lamb(Plain):
    """LAMB (https://arxiv.org/abs/1904.00962). With `global_norm`, gradients are clipped by the norm of all of them."""

    defaults_of_class: ClassVar[dict[str, Any]] = {"betas": (0.9, 0.999), "global_norm": False}

    def update(self, params: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        grads = [param.grad for param in params]
        if group["global_norm"]:
            norm = torch.stack(torch._foreach_norm(grads)).norm().clamp(min=1)
            grads = torch._foreach_div(grads, norm)
        for param, grad in zip(params, grads, strict=True):
            state, (first, second) = self.state[param], group["betas"]
            if not state:
                state["step"] = 0
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
            state["step"] += 1
            state["exp_avg"].lerp_(grad, 1 - first)
            state["exp_avg_sq"].lerp_(grad.square(), 1 - second)
            step = state["exp_avg"] / (1 - first ** state["step"])
            step /= (state["exp_avg_sq"] / (1 - second ** state["step"])).sqrt() + 1e-6
            ratio = param.norm().clamp(0.01, 10) / step.norm().clamp(min=1e-6)
            param.sub_(step * ratio, alpha=group["lr"])


class Came(Plain):
    """CAME (https://arxiv.org/abs/2307.02047): factored second moments, and how well they predict the update."""

    def update_one(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["step"], state["RMS"] = 0, 0.0
            state["exp_avg"] = torch.zeros_like(param)
            for name in ("row", "col", "res_row", "res_col"):
                state[name] = param.new_zeros(
                    param.shape[:-1] if "row" in name else param.shape[:-2] + param.shape[-1:]
                )
        state["step"] += 1
        state["RMS"] = float(param.square().mean().sqrt())
        step = param.grad * self.root(state, "", param.grad.square() + 1e-30)
        step /= (step.square().mean().sqrt()).clamp(min=1.0)
        state["exp_avg"].lerp_(step, 0.1)
        unsure = (step - state["exp_avg"]).square() + 1e-16
        param.sub_(state["exp_avg"] * self.root(state, "res_", unsure), alpha=group["lr"] * max(1e-3, state["RMS"]))

    @staticmethod
    def root(state: Any, kind: str, squares: torch.Tensor) -> torch.Tensor:
        """Return one over the root of `squares` from their factors in `state`."""
        row = state[f"{kind}row"].lerp_(squares.mean(dim=-1), 0.01)
        col = state[f"{kind}col"].lerp_(squares.mean(dim=-2), 0.01)
        return (row / row.mean(dim=-1, keepdim=True)).rsqrt().unsqueeze(-1) * col.rsqrt().unsqueeze(-2)


class Shampoo(Plain):
    """Shampoo (https://arxiv.org/abs/1802.09568): a matrix for each dimension, in lists; roots every second step."""

    def update_one(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["step"] = 0
            state["GG"] = [torch.eye(size, device=param.device) * 1e-4 for size in param.shape]
            state["roots"] = [torch.eye(size, device=param.device) for size in param.shape]
        grad = param.grad.float()
        for dim, sum_ in enumerate(state["GG"]):
            rows = grad.movedim(dim, 0).reshape(param.shape[dim], -1)
            sum_.add_(rows @ rows.T)
            if state["step"] % 2 == 0:
                values, vectors = torch.linalg.eigh(sum_)
                power = values.clamp(min=1e-6) ** (-1 / (2 * param.dim()))
                state["roots"][dim] = vectors @ torch.diag(power) @ vectors.T
        for dim, root in enumerate(state["roots"]):
            grad = torch.tensordot(root, grad, dims=([1], [dim])).movedim(0, dim)
        state["step"] += 1
        param.sub_(grad.to(param.dtype), alpha=group["lr"])


class Soap(Plain):
    """SOAP (https://arxiv.org/abs/2409.11321): Adam in the eigenbasis of Shampoo's matrices, by a QR step in every
    step, or as `every` says."""

    defaults_of_class: ClassVar[dict[str, Any]] = {"every": 1}

    def update_one(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state, grad = self.state[param], param.grad
        if param.dim() != 2:
            raise ValueError(f"a tensor of {param.dim()} dimensions")
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
            state["GG"] = [grad @ grad.T, grad.T @ grad]
            state["Q"] = [torch.linalg.eigh(sum_)[1] for sum_ in state["GG"]]
        left, right = state["Q"]
        turned = left.T @ grad @ right
        state["step"] += 1
        state["exp_avg"].lerp_(grad, 0.1)
        state["exp_avg_sq"].lerp_(turned.square(), 0.05)
        step = left.T @ state["exp_avg"] @ right / (state["exp_avg_sq"].sqrt() + 1e-8)
        param.sub_(left @ step @ right.T, alpha=group["lr"])
        for index, outer in enumerate((grad @ grad.T, grad.T @ grad)):
            state["GG"][index].lerp_(outer, 0.05)
            if state["step"] % group["every"] == 0:
                state["Q"][index] = torch.linalg.qr(state["GG"][index] @ state["Q"][index])[0]


class ByColumns(Plain):
    """Sums gradients in a matrix that is stored by columns, and reads it in the order of its memory: after a copy by
    rows it takes other steps."""

    def update_one(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["sum"], state["square"] = torch.zeros_like(param.T).T, param.new_zeros(3, param.shape[0]).T
        state["sum"].add_(param.grad / param.grad.norm())
        state["square"].add_(param.grad[:, :3])
        for each in state.values():
            steps = each.as_strided((each.numel(),), (1,))
            param.view(-1)[: each.numel()].sub_(steps, alpha=group["lr"])


class CountsSteps(Plain):
    """Counts steps, and adds up rates, in the param group, as classes of pytorch_optimizer do; a tensor by its own
    norm."""

    def update(self, params: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        group["step"] = group.get("step", 0) + 1
        group["weight_sum"] = group.get("weight_sum", 0.0) + group["lr"] ** 2
        rate = group["lr"] ** 2 / group["weight_sum"] / (1 - 0.9 ** group["step"])
        for param in params:
            state = self.state[param]
            if not state:
                state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg"].lerp_(param.grad / param.grad.norm(), 0.1)
            param.sub_(state["exp_avg"], alpha=0.1 * rate)


class KeepsMostInGroup(Plain):
    """Keeps the largest norm of a gradient in the param group."""

    def update(self, params: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        group["most"] = max([group.get("most", 0.0), *(float(param.grad.norm()) for param in params)])
        for param in params:
            param.sub_(param.grad / param.grad.norm(), alpha=group["lr"] * min(1.0, 1e20 / group["most"]))


class SharedScratch(Plain):
    """Scratch by shape in an attribute, written before it is read; a tensor by its own norm."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.scratch: dict[torch.Size, torch.Tensor] = {}

    def update_one(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        scratch = self.scratch.setdefault(param.shape, torch.empty_like(param))
        torch.mul(param.grad, group["lr"], out=scratch)
        param.sub_(scratch / param.grad.norm())
        scratch.copy_(param)
        param.sub_(scratch, alpha=1e-3)


class Flattened(Plain):
    """By way of one flat tensor of all parameters, taken apart again; a tensor by its own norm."""

    def update(self, params: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        flat = torch.cat([(param.grad / param.grad.norm()).flatten() for param in params])
        steps = (flat * group["lr"]).clamp_(-1, 1).split([param.numel() for param in params])
        for param, step in zip(params, steps, strict=True):
            param.sub_(step.view_as(param))


class NormsInPlace(Plain):
    """Writes the norms into the elements of one tensor, and reads them from there."""

    def update(self, params: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        norms = torch.empty(len(params))
        for index, param in enumerate(params):
            norms[index] = param.grad.norm()
        norms.clamp_(min=1e-3)
        for index, param in enumerate(params):
            param.sub_(param.grad / norms[index], alpha=group["lr"])


class ReadsItsNorm(Plain):
    """Reads the norm of each tensor on the host, and branches on it."""

    def update_one(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        norm = float(param.grad.norm())
        if bool(param.norm() > 1.0):
            norm = max(norm, 1.0)
        param.sub_(param.grad, alpha=group["lr"] / norm)


def direction(grad: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        grad = grad / grad.norm()
    return grad


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # optimizers of older libraries still have such functions
    scripted_direction: Callable[[torch.Tensor], torch.Tensor] = torch.jit.script(direction)


class Scripted(Plain):
    """By a function that TorchScript runs."""

    def update_one(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.sub_(scripted_direction(param.grad), alpha=group["lr"])


class PerParam(Plain):
    """A rate for each parameter in a list of the param group, and another for biases, by name."""

    defaults_of_class: ClassVar[dict[str, Any]] = {"rates": None}

    def update(self, params: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        assert len(group["rates"]) == len(group["params"])
        for param, rate in zip(params, group["rates"], strict=True):
            param.sub_(param.grad, alpha=rate)


TENSOR_WISE: tuple[type[Optimizer], ...] = (Lars, Lamb, Came, Shampoo, Soap)


# ----------------------------------------------------------------------------------------------------------------------
# Classes that read other parameters.


class GlobalNormItem(Plain):
    """Clips by the norm of all gradients, as a number of Python."""

    def update(self, params: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        norm = sum(param.grad.norm().item() ** 2 for param in params) ** 0.5
        for param in params:
            param.add_(param.grad, alpha=-group["lr"] / max(1, norm))


class GlobalNormTensor(Plain):
    """Clips by the norm of all gradients, as a tensor."""

    def update(self, params: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        norm = torch.stack([param.grad.norm() for param in params]).norm().clamp(min=1)
        for param in params:
            param.sub_(group["lr"] * param.grad / norm)


class RareGlobal(Plain):
    """Clips by a norm that no dry step reaches: every result is that of the tensor alone."""

    def update(self, params: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        factor = torch.where(norm > 1e20, 1e20 / norm, torch.ones_like(norm))
        for param in params:
            param.sub_(param.grad / param.grad.norm() * factor, alpha=group["lr"])


class RareGlobalItem(Plain):
    """The same as a number of Python: no op joins two parameters."""

    def update(self, params: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        norms = [param.grad.norm().item() for param in params]
        norm = sum(norms)
        for param, own in zip(params, norms, strict=True):
            param.sub_(param.grad / own * (1e6 / norm if norm > 1e6 else 1.0), alpha=group["lr"])


class RareGlobalFlag(Plain):
    """Skips the step if the direction of any tensor has a large norm, which never happens: the flags are read."""

    def update(self, params: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        directions = [param.grad / param.grad.norm() for param in params]
        if max([bool(each.norm() > 2) for each in directions]):
            return
        for param, direction in zip(params, directions, strict=True):
            param.sub_(direction, alpha=group["lr"])


class RareGlobalByNumpy(Plain):
    """Clips by the norm of all gradients beyond a threshold, read without an op of torch."""

    def update(self, params: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        norm = sum(float(abs(param.grad.float().numpy()).sum()) for param in params)
        for param in params:
            step = param.grad / param.grad.norm()
            param.sub_(step * (1e6 / norm if norm > 1e6 else 1.0), alpha=group["lr"])


class EveryHundred(Plain):
    """Adds the mean gradient of all parameters in every 100th step, or as `every` says."""

    defaults_of_class: ClassVar[dict[str, Any]] = {"every": 100}

    def update(self, params: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        for param in params:
            state = self.state[param]
            state["k"] = state.get("k", 0) + 1
            if state["k"] % group["every"] == 0:
                param.sub_(sum(other.grad.mean() for other in params))
            param.sub_(param.grad / param.grad.norm(), alpha=group["lr"])


class ByIndex(Plain):
    """The rate depends on the place in the group."""

    def update(self, params: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        for index, param in enumerate(params):
            param.sub_(param.grad / param.grad.norm(), alpha=group["lr"] / (1 + index))


class ByCount(Plain):
    """The rate depends on the number of parameters."""

    def update(self, params: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        for param in params:
            param.sub_(param.grad / param.grad.norm(), alpha=group["lr"] / len(params))


class BySum(Plain):
    """Joins all gradients of large parameters."""

    def update(self, params: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        large = [param.grad.norm() for param in params if param.numel() > 100_000]
        norm = sum(large) if len(large) > 1 else 1.0
        for param in params:
            param.sub_(param.grad / (param.grad.norm() * norm), alpha=group["lr"])


class Prodigy(Plain):
    """In the manner of Prodigy (https://arxiv.org/abs/2306.06101): one estimate of the distance for all parameters,
    which is at first far below what the steps find."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.distance = torch.full((2,), 1e-6)

    def update(self, params: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        for param in params:
            self.state[param].setdefault("start", param.clone())
        gained = sum((param.grad * (self.state[param]["start"] - param)).sum() for param in params)
        torch.maximum(self.distance, gained * 1e-30, out=self.distance)
        for param in params:
            param.sub_(param.grad / param.grad.norm() * self.distance[0])


class SharedState(Plain):
    """Keeps one tensor in the states of all parameters."""

    def update(self, params: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        known = [self.state[param]["scale"] for param in params if self.state[param]]
        scale = known[0] if known else torch.ones(())
        for param in params:
            self.state[param]["scale"] = scale
            param.sub_(param.grad / param.grad.norm() * scale, alpha=group["lr"])


class Relay(Plain):
    """Hands what the last parameter left in an attribute to the first one in the next step."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.left: list[torch.Tensor] = []

    def update(self, params: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        for param in params:
            step = param.grad / param.grad.norm()
            if self.left:
                step = torch.where(self.left[0] > 1e20, torch.zeros(()), step)
            param.sub_(step, alpha=group["lr"])
        self.left = [params[-1].grad.norm()]


class Swallows(Plain):
    """Joins two parameters, and goes on if that fails."""

    def update(self, params: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        try:
            factor = torch.stack([param.grad.norm() for param in params]).max().clamp(1, 1)
        except Exception:
            factor = 1.0
        for param in params:
            param.sub_(param.grad / param.grad.norm() * factor, alpha=group["lr"])


class Draws(Plain):
    """With noise in every 20th step, which no dry step sees, unless `every` is less."""

    defaults_of_class: ClassVar[dict[str, Any]] = {"every": 1}

    def update_one(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        state["k"] = state.get("k", 0) + 1
        noise = torch.randn_like(param) if state["k"] % group["every"] == 0 else 0.0
        param.sub_(param.grad / param.grad.norm() + noise, alpha=group["lr"])


class CountsInDict(Plain):
    """Counts its steps in a dictionary of the optimizer."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.facts = {"count": 0}

    def update(self, params: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        self.facts["count"] += 1
        for param in params:
            param.sub_(param.grad / param.grad.norm(), alpha=group["lr"] / self.facts["count"])


class MaskedSize(Plain):
    """The number of large elements makes the rate: a size that depends on values."""

    def update_one(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        count = len(param.grad[param.grad.abs() > 1])
        param.sub_(param.grad, alpha=group["lr"] / (1 + count))


class KeepsElsewhere(Plain):
    """Keeps its momentum in an attribute, by the object that `key` makes of a parameter."""

    key: ClassVar[Callable[[Any], Any]] = staticmethod(lambda param: param)

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.momenta: dict[Any, torch.Tensor] = {}

    def update_one(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        momentum = self.momenta.setdefault(self.key(param), torch.zeros_like(param))
        momentum.mul_(0.9).add_(self.direction(param.grad))
        param.sub_(momentum, alpha=group["lr"])

    def direction(self, grad: torch.Tensor) -> torch.Tensor:
        return grad / grad.norm()


class KeepsElsewhereById(KeepsElsewhere):
    """By its id."""

    key = staticmethod(id)


class KeepsElementsElsewhere(KeepsElsewhere):
    """Each element by itself."""

    def direction(self, grad: torch.Tensor) -> torch.Tensor:
        return grad
