"""Host passes over flat tensors: each byte of a bucket is read and written once.

    mixed_adamw      grad, master, moments -> master, moments, param      28 B per parameter (16-bit grad and param)
    split_adamw      grad, param, low, moments -> param, low, moments     26 B, and 14 B of host memory instead of 16
    bf16_adamw       grad, param, moments -> param, moments               22 B, and no master
    sum_of_squares   grad -> a number                                      2 B

Moments take 8 B of these twice, or 4 or 2.1 B twice in another `MomentForm` (`optim/precision.py`).

They run in C (`kernel.c`, `reduced.c`) if there is a compiler, else in blocks of torch's ops (`flat_step.py`). Calls
into C release the GIL. Parameters in fp32 with exact moments do not use these passes: torch's own fused AdamW is as
fast, and users compare bits with it.

`coalesce` joins tensors that follow each other in host memory, so that a bucket takes a single call into C:

    slab of the parameters   |-- a --|pad|---- b ----|pad|-- c --|
    slab of a moment         |-- a --|pad|---- b ----|pad|-- c --|      the same elements, each of another size

In a slab, each tensor starts at the end of the tensor before it, rounded up to `ALIGN_BYTES` of the parameters. Only
padding is between them, so an update may run over the padding too. See `RunningBucket.state_buffers`.
"""

import ctypes
import threading
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NotRequired, TypedDict, Unpack

import torch
from torch.autograd.graph import increment_version

from elixir_compile.base.errors import ElixirWarning
from elixir_compile.optim.host import flat_step
from elixir_compile.optim.host import kernel as kernel_calls
from elixir_compile.optim.host.build import BuildError, loaded_kernel
from elixir_compile.optim.host.flat_step import GRADIENT_DTYPES, FlatStep, Rule, check_tensor
from elixir_compile.optim.host.kernel import HostThreads, host_threads_for, typed
from elixir_compile.optim.precision import MomentForm
from elixir_compile.runtime.bucket import ALIGN_BYTES, aligned_bytes, flat, is_slab_memory

_BESIDE_THE_RULE = (
    "max_exp_avg_sq",
    *("form", "exp_avg_scale", "exp_avg_sq_scale", "seed"),
)
"""The extras of a step that are fields of `FlatStep`; the others are scalars of its rule."""

_lock = threading.Lock()


def kernel() -> ctypes.CDLL | None:
    """Return the compiled kernel; None if it cannot be built, and then an `ElixirWarning` says why once."""
    with _lock:
        return _kernel()


@cache
def _kernel() -> ctypes.CDLL | None:
    try:
        return typed(loaded_kernel())
    except BuildError as error:
        warnings.warn(
            f"no host kernel: {error}. Host updates of 16-bit parameters use torch's own ops: same results but for "
            "rounding, 1.5 times the time or more.",
            ElixirWarning,
            stacklevel=4,
        )
        return None


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
    threads: NotRequired[HostThreads | None]
    form: NotRequired[MomentForm]
    exp_avg_scale: NotRequired[torch.Tensor | None]
    exp_avg_sq_scale: NotRequired[torch.Tensor | None]
    seed: NotRequired[int]


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
    is `grad * grad_scale`. With `max_exp_avg_sq` the step is AMSGrad. By default, `threads` are those of this process.
    Raises ValueError if a tensor has a wrong dtype, device, layout or size.

    With `form`, the moments are stored in fewer bytes, rounded with noise from `seed` and `step` (see
    `optim.precision`). Forms with scales need `exp_avg_scale` and `exp_avg_sq_scale`.
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


def bf16_adamw(
    param: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    step: int,
    **extras: Unpack[Extras],
) -> None:
    """Run the step of `mixed_adamw` on a bf16 `param` that has no master, and round it with noise.

    Stochastic rounding keeps the mean of steps that are smaller than the distance between two bf16 numbers.
    """
    if param.dtype != torch.bfloat16:
        raise ValueError(f"param has dtype {param.dtype}: needs torch.bfloat16")
    _step(param, exp_avg, exp_avg_sq, grad, None, step, extras)


def sum_of_squares(grad: torch.Tensor, threads: HostThreads | None = None) -> float:
    """Return the sum of squares of `grad` (bf16, fp16 or fp32); finite if and only if all values are.

    The number of threads changes no bit. Raises ValueError if `grad` has a wrong dtype, device or layout.
    """
    check_tensor("grad", grad, GRADIENT_DTYPES, grad)
    library = kernel()
    if library is None:
        return flat_step.sum_of_squares(grad)
    return kernel_calls.sum_of_squares(library, grad, threads or host_threads_for())


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
    threads = scalars.pop("threads", None)
    tensors = {name: scalars.pop(name) for name in _BESIDE_THE_RULE if name in scalars}
    given = FlatStep(
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
        flat_step.take_step(given)
        return
    coefficients = kernel_calls.Coefficients(*given.rule.scalars())

    run = kernel_calls.run_exact if given.is_plain else kernel_calls.run_reduced
    run(library, given, coefficients, threads or host_threads_for())
    # Autograd must see these writes, as it sees torch's own in-place ops.
    scales = (given.exp_avg_scale, given.exp_avg_sq_scale)
    written = (given.weights, given.exp_avg, given.exp_avg_sq, given.max_exp_avg_sq, given.param, *scales)
    increment_version([tensor for tensor in written if tensor is not None])


Operands = Sequence[torch.Tensor]
"""The tensors of a parameter, dense and of equal element count: the parameter first, the others in a fixed order."""


def coalesce(passes: Sequence[Operands], steps: Sequence[int]) -> Iterator[tuple[list[int], Operands]]:
    """Yield groups of passes that are neighbours in memory and at the same step: their indices and joined tensors."""
    order = sorted(range(len(passes)), key=lambda index: passes[index][0].data_ptr())
    members: list[int] = []
    for index in order:
        if members and not (steps[members[-1]] == steps[index] and _follows(passes[members[-1]], passes[index])):
            yield members, _joined(passes, members)
            members = []
        members.append(index)
    if members:
        yield members, _joined(passes, members)


def _follows(operands: Operands, following: Operands) -> bool:
    """Return whether each tensor of `following` comes right behind the same kind of tensor of `operands` in a slab."""
    step = aligned_bytes(operands[0].nbytes) // operands[0].element_size()
    return all(
        (tensor.dtype, tensor.data_ptr() + step * tensor.element_size()) == (behind.dtype, behind.data_ptr())
        for tensor, behind in zip(operands, following, strict=True)
    ) and all(
        tensor.data_ptr() % ALIGN_BYTES == 0 and is_slab_memory(tensor.data_ptr()) for tensor in (*operands, *following)
    )


def _joined(passes: Sequence[Operands], members: Sequence[int]) -> Operands:
    first, last = passes[members[0]], passes[members[-1]]
    if len(members) == 1:
        return [flat(tensor) for tensor in first]
    found: list[torch.Tensor] = []
    for start, end in zip(first, last, strict=True):
        # The memory from the start of one to the end of the other, which is valid only while both are alive.
        nbytes = end.data_ptr() + end.nbytes - start.data_ptr()
        memory = (ctypes.c_byte * nbytes).from_address(start.data_ptr())
        found.append(torch.frombuffer(memory, dtype=start.dtype))
    return found
