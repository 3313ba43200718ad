"""The arguments of a host pass, flat tensors of a bucket and the scalars of the step; and the pass in torch's ops.

Without a compiler, a pass runs as torch's ops on blocks that stay in the CPU cache between cast, update and cast:

    a block of 512 K elements:  grad -> fp32,  fused AdamW on views of the master and the moments,  -> param

Takes 1.5 times as long as the kernel on a single thread; casts of whole tensors take 1.7 times as long. Runs on torch's
threads. Moments in fewer bytes are decoded and encoded a block at a time too.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw

from elixir_compile import compat
from elixir_compile.optim import precision as moment_forms
from elixir_compile.optim.precision import MomentForm, Moments

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
    """The fp32 master; or its int16 low half, if `param` is its high half; or the bf16 parameter, without a master."""
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    max_exp_avg_sq: torch.Tensor | None = None
    grad: torch.Tensor
    param: torch.Tensor | None
    rule: Rule
    form: MomentForm = MomentForm.FLOAT32
    exp_avg_scale: torch.Tensor | None = None
    """The fp32 scales of the blocks of `exp_avg`, if the form has scales."""
    exp_avg_sq_scale: torch.Tensor | None = None
    seed: int = 0
    """Of the noise with which moments in fewer bytes, and bf16 weights without a master, are rounded."""

    @property
    def is_plain(self) -> bool:
        """Return whether moments and master are exact."""
        return self.form is MomentForm.FLOAT32 and self.weights.dtype != torch.bfloat16

    @property
    def key(self) -> int:
        """Return the key of the noise of this step."""
        return moment_forms.noise_key(self.seed, self.rule.step)

    @property
    def is_split(self) -> bool:
        """Return whether the master is split between `param` and `weights`."""
        return self.weights.dtype == torch.int16

    def __post_init__(self) -> None:
        floats = (torch.float32,)
        if self.weights.dtype != torch.bfloat16:
            check_tensor("low" if self.is_split else "master", self.weights, (torch.int16, *floats), self.weights)
        for name, dtype in zip(("exp_avg", "exp_avg_sq"), self.form.dtypes, strict=True):
            check_tensor(name, getattr(self, name), (dtype,), self.weights)
        check_tensor("max_exp_avg_sq", self.max_exp_avg_sq, floats, self.weights)
        if self.max_exp_avg_sq is not None and not self.is_plain:
            raise ValueError(f"max_exp_avg_sq: AMSGrad needs moments in float32 and a master, not {self.form.value}")
        num_scales = moment_forms.num_scales(self.weights.numel())
        for name in ("exp_avg_scale", "exp_avg_sq_scale") if self.form.has_scales else ():
            scale = getattr(self, name)
            if scale is None:
                raise ValueError(f"{name} None: moments in {self.form.value} have scales")
            check_tensor(name, scale, (torch.float32,), self.weights, num_scales)
        check_tensor("grad", self.grad, GRADIENT_DTYPES, self.weights)
        if self.is_split and self.param is None:
            raise ValueError("param None: it is the high half of a split master")
        check_tensor("param", self.param, PARAMETER_DTYPES[: 1 if self.is_split else 2], self.weights)


def check_tensor(
    name: str,
    tensor: torch.Tensor | None,
    dtypes: tuple[torch.dtype, ...],
    like: torch.Tensor,
    numel: int | None = None,
) -> None:
    """Raise ValueError unless `tensor` is None or contiguous on the CPU, in one of `dtypes`, and as large as `like`.

    With `numel` it needs that many elements instead.
    """
    if tensor is None:
        return
    numel = like.numel() if numel is None else numel
    facts: Mapping[str, bool] = {
        f"dtype {tensor.dtype}: needs {' or '.join(str(dtype) for dtype in dtypes)}": tensor.dtype in dtypes,
        f"device {tensor.device}: needs cpu": tensor.device.type == "cpu",
        f"strides {tensor.stride()}: needs to be contiguous": tensor.is_contiguous(),
        f"{tensor.numel()} elements: needs {numel}": tensor.numel() == numel,
        "a negative bit: needs its values in memory, as `resolve_neg()` returns them": not compat.is_lazy(tensor),
    }
    for wrong, holds in facts.items():
        if not holds:
            raise ValueError(f"{name} has {wrong}")


BLOCK = 1 << 19


@torch.no_grad()
def take_step(flat: FlatStep) -> None:
    """Run the AdamW step `flat` in place."""
    key = flat.key
    whole = Moments(flat.exp_avg.view(-1), flat.exp_avg_sq.view(-1), flat.exp_avg_scale, flat.exp_avg_sq_scale)
    for block in _blocks(flat.weights.numel()):
        grad = _of(flat.grad, block).to(torch.float32, copy=True)
        if flat.rule.grad_factor != 1.0:
            grad.mul_(flat.rule.grad_factor)
        weights = _of(flat.weights, block)
        high = _of(flat.param, block) if flat.is_split and flat.param is not None else None
        master = weights.to(torch.float32) if high is None else joined(high, weights)
        most = [] if flat.max_exp_avg_sq is None else [_of(flat.max_exp_avg_sq, block)]
        stored = whole.part(block.start, block.stop)
        moments = moment_forms.decode(stored, flat.form)
        rule, exp_avg, exp_avg_sq = flat.rule, *moments
        adamw(
            [master],
            [grad],
            [exp_avg],
            [exp_avg_sq],
            most,
            [torch.tensor(rule.step - 1.0, device="cpu")],
            fused=True,
            amsgrad=bool(most),
            lr=rule.lr,
            beta1=rule.beta1,
            beta2=rule.beta2,
            weight_decay=rule.weight_decay,
            eps=rule.eps,
            maximize=False,
        )
        if weights.dtype == torch.bfloat16:
            weights.copy_(moment_forms.rounded_weights(master, *moments, flat.form, key))
        moment_forms.store(stored, *moments, flat.form, key)
        if high is not None:
            split(master, high, weights)
        elif flat.param is not None:
            _of(flat.param, block).copy_(master)


def joined(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return the fp32 master joined from its bf16 high half and its int16 low half."""
    bits = high.view(torch.int16).to(torch.int32)
    return bits.bitwise_left_shift_(16).add_(low).view(torch.float32)


def split(master: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    """Split `master` into `high`, the nearest bf16 (away from zero at a tie), and `low`, the signed difference."""
    bits = torch.where(master.isnan(), torch.nan, master).view(torch.int32)
    low.copy_(bits)  # the low 16 bits
    high.view(torch.int16).copy_((bits - low).bitwise_right_shift_(16))


@torch.no_grad()
def sum_of_squares(grad: torch.Tensor) -> float:
    """Return the sum of squares of `grad`, computed in double."""
    wide = (_of(grad, block).to(torch.float64) for block in _blocks(grad.numel()))
    return sum((float(torch.dot(block, block)) for block in wide), 0.0)


def _blocks(numel: int) -> Iterator[slice]:
    return (slice(start, min(start + BLOCK, numel)) for start in range(0, numel, BLOCK))


def _of(tensor: torch.Tensor, block: slice) -> torch.Tensor:
    return tensor.detach().view(-1)[block]
