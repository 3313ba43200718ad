"""The arguments of a host pass: flat tensors of a bucket and the scalars of the step, checked when constructed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

GRADIENT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PARAMETER_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The scalars of an AdamW step."""

    step: int
    """The number of the step; the first step is 1."""
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_scale: float = 1.0
    """The factor of all gradients, such as clip coefficient / loss scale."""
    maximize: bool = False

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"step {self.step}: the first step is 1")
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} {getattr(self, name)}: needs 0 or more and less than 1")

    @property
    def grad_factor(self) -> float:
        """Return `grad_scale`, negated to maximize."""
        return -self.grad_scale if self.maximize else self.grad_scale

    def scalars(self) -> tuple[float, ...]:
        """Return the fields of `Coefficients` in `kernel.c`, each computed in double.

        `1 - beta2` in fp32 made the second moment wrong by 1.3e-5 of itself.
        """
        return (
            self.lr / (1.0 - self.beta1**self.step),
            1.0 / math.sqrt(1.0 - self.beta2**self.step),
            self.beta1,
            1.0 - self.beta1,
            self.beta2,
            1.0 - self.beta2,
            self.eps,
            self.lr * self.weight_decay,
            self.grad_factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatStep:
    """An AdamW step on the host; all tensors are contiguous, on the CPU and have equal element counts."""

    weights: torch.Tensor
    """The fp32 master; or its int16 low half, if `param` is its high half."""
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    max_exp_avg_sq: torch.Tensor | None = None
    grad: torch.Tensor
    total: torch.Tensor | None = None
    """The fp32 sum of the gradients of earlier micro-batches."""
    param: torch.Tensor | None
    rule: Rule

    @property
    def is_split(self) -> bool:
        """Return whether the master is split between `param` and `weights`."""
        return self.weights.dtype == torch.int16

    def __post_init__(self) -> None:
        floats = (torch.float32,)
        check_tensor("low" if self.is_split else "master", self.weights, (torch.int16, *floats), self.weights)
        for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "total"):
            check_tensor(name, getattr(self, name), floats, self.weights)
        check_tensor("grad", self.grad, GRADIENT_DTYPES, self.weights)
        if self.is_split and self.param is None:
            raise ValueError("param None: it is the high half of a split master")
        check_tensor("param", self.param, PARAMETER_DTYPES[: 1 if self.is_split else 2], self.weights)


def check_tensor(name: str, tensor: torch.Tensor | None, dtypes: tuple[torch.dtype, ...], like: torch.Tensor) -> None:
    """Raise ValueError unless `tensor` is None or contiguous on the CPU, in one of `dtypes`, and as large as `like`."""
    if tensor is None:
        return
    facts: Mapping[str, bool] = {
        f"dtype {tensor.dtype}: needs {' or '.join(str(dtype) for dtype in dtypes)}": tensor.dtype in dtypes,
        f"device {tensor.device}: needs cpu": tensor.device.type == "cpu",
        f"strides {tensor.stride()}: needs to be contiguous": tensor.is_contiguous(),
        f"{tensor.numel()} elements: needs {like.numel()}": tensor.numel() == like.numel(),
    }
    for wrong, holds in facts.items():
        if not holds:
            raise ValueError(f"{name} has {wrong}")
