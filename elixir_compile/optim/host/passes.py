"""Host passes over flat tensors: each byte of a bucket is read and written once.

    mixed_adamw      grad, master, moments -> master, moments, param      28 B per parameter (16-bit grad and param)
    split_adamw      grad, param, low, moments -> param, low, moments     26 B, and 14 B of host memory instead of 16
    sum_of_squares   grad -> a number                                      2 B

They run in C if there is a compiler, else in blocks of torch's ops (`fallback.py`). Parameters in fp32 do not use these
passes: torch's own fused AdamW is as fast, and users compare bits with it.
"""

import ctypes
import math
from typing import Any, NotRequired, TypedDict, Unpack

import torch
from torch.autograd.graph import increment_version

from elixir_compile.optim.host import fallback
from elixir_compile.optim.host.flat import GRADIENT_DTYPES, FlatStep, Rule, check_tensor
from elixir_compile.optim.host.kernel import KINDS, Coefficients, Gradient, Moments, kernel
from elixir_compile.optim.host.threads import GRAIN, HostThreads, host_threads_for


class Scalars(TypedDict):
    """The hyperparameters of AdamW, and the factor and sign of gradients."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_scale: NotRequired[float]
    maximize: NotRequired[bool]


class Extras(Scalars):
    """Optional tensors and threads of a step."""

    max_exp_avg_sq: NotRequired[torch.Tensor | None]
    total: NotRequired[torch.Tensor | None]
    threads: NotRequired[HostThreads | None]


def mixed_adamw(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    param: torch.Tensor | None,
    step: int,
    **extras: Unpack[Extras],
) -> None:
    """Run step number `step` of AdamW in place, 1 for the first; write the rounded master to `param` unless it is None.

    `master` and the moments are fp32, `grad` is bf16, fp16 or fp32, `param` is bf16 or fp16. The gradient of the step
    is `(total + grad) * grad_scale`; `total`, fp32, holds earlier micro-batches. With `max_exp_avg_sq` the step is
    AMSGrad. `threads` defaults to the threads of this process. Raises ValueError if a tensor has a wrong dtype, device,
    layout or size.
    """
    _step(master, exp_avg, exp_avg_sq, grad, param, step, extras)


def split_adamw(
    low: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    param: torch.Tensor,
    step: int,
    **extras: Unpack[Extras],
) -> None:
    """Run the same step as `mixed_adamw`, bit for bit, with the master split into `param` (bf16) and `low` (int16).

    `param` is the bf16 value nearest to the master. At a tie, the greater magnitude is taken; `mixed_adamw` takes the
    even value.
    """
    if low.dtype != torch.int16:
        raise ValueError(f"low has dtype {low.dtype}: needs torch.int16")
    _step(low, exp_avg, exp_avg_sq, grad, param, step, extras)


def sum_of_squares(grad: torch.Tensor, threads: HostThreads | None = None) -> float:
    """Return the sum of squares of `grad` (bf16, fp16 or fp32); finite if and only if all values are.

    The number of threads changes no bit. Raises ValueError if `grad` has a wrong dtype, device or layout.
    """
    check_tensor("grad", grad, GRADIENT_DTYPES, grad)
    library = kernel()
    if library is None:
        return fallback.sum_of_squares(grad)
    sums = (ctypes.c_double * -(-grad.numel() // GRAIN))()

    def part(start: int, stop: int) -> None:
        block_sums = ctypes.cast(ctypes.byref(sums, start // GRAIN * 8), ctypes.POINTER(ctypes.c_double))
        library.sums_of_squares(block_sums, _gradient(grad, None, start), stop - start, GRAIN)

    (threads or host_threads_for()).run(grad.numel(), part)
    return math.fsum(sums)


def _step(
    weights: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    param: torch.Tensor | None,
    step: int,
    extras: Extras,
) -> None:
    scalars: dict[str, Any] = dict(extras)
    tensors = {name: scalars.pop(name, None) for name in ("max_exp_avg_sq", "total")}
    threads = scalars.pop("threads", None)
    flat = FlatStep(
        weights=weights,
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        grad=grad,
        param=param,
        rule=Rule(step=step, **scalars),
        **tensors,
    )
    library = kernel()
    if library is None:
        fallback.take_step(flat)
        return
    coefficients = Coefficients(*flat.rule.scalars())

    def part(start: int, stop: int) -> None:
        moments = Moments(*(_at(moment, start) for moment in (flat.exp_avg, flat.exp_avg_sq, flat.max_exp_avg_sq)))
        gradient = _gradient(flat.grad, flat.total, start)
        weights, high = _at(flat.weights, start), _at(flat.param, start)
        size_and_scalars = (stop - start, ctypes.byref(coefficients))
        if flat.is_split:
            library.split_adamw(weights, moments, gradient, high, *size_and_scalars)
        else:
            kind = 0 if flat.param is None else KINDS[flat.param.dtype]
            library.mixed_adamw(weights, moments, gradient, high, kind, *size_and_scalars)

    (threads or host_threads_for()).run(flat.weights.numel(), part)
    # Autograd must see these writes, as it sees torch's own in-place ops.
    written = (flat.weights, flat.exp_avg, flat.exp_avg_sq, flat.max_exp_avg_sq, flat.param)
    increment_version([tensor for tensor in written if tensor is not None])


def _at(tensor: torch.Tensor | None, start: int) -> int | None:
    """Return the address of `tensor[start]`; None, which is NULL in C, if there is no tensor."""
    return None if tensor is None else tensor.data_ptr() + start * tensor.element_size()


def _gradient(grad: torch.Tensor, total: torch.Tensor | None, start: int) -> Gradient:
    return Gradient(_at(grad, start), _at(total, start), KINDS[grad.dtype])
