"""Host passes over flat tensors: each byte of a bucket is read and written once.

    mixed_adamw      grad, master, moments -> master, moments, param      28 B per parameter (16-bit grad and param)
    split_adamw      grad, param, low, moments -> param, low, moments     26 B, and 14 B of host memory instead of 16
    sum_of_squares   grad -> a number                                      2 B

They run in C (`kernel.c`) if there is a compiler, else in blocks of torch's ops (`flat_step.py`). Calls into C release
the GIL. Parameters in fp32 do not use these passes: torch's own fused AdamW is as fast, and users compare bits with it.

`coalesce` joins tensors that follow each other in host memory, so that a bucket takes a single call into C:

    slab of the parameters   |-- a --|pad|---- b ----|pad|-- c --|
    slab of a moment         |-- a --|pad|---- b ----|pad|-- c --|      the same elements, each of another size

In a slab, each tensor starts at the end of the tensor before it, rounded up to `ALIGN_BYTES` of the parameters. Only
padding is between them, so an update may run over the padding too. See `RunningBucket.state_buffers`.
"""

import ctypes
import math
import threading
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NotRequired, TypedDict, Unpack

import torch
from torch.autograd.graph import increment_version

from elixir_compile.errors import ElixirWarning
from elixir_compile.optim.host import flat_step
from elixir_compile.optim.host.build import BuildError, loaded_kernel
from elixir_compile.optim.host.flat_step import GRADIENT_DTYPES, FlatStep, Rule, check_tensor
from elixir_compile.optim.host.threads import GRAIN, HostThreads, host_threads_for
from elixir_compile.runtime.slab import ALIGN_BYTES, aligned_bytes, flat, is_slab_memory

KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""The value of the enum `Kind` in `kernel.c` for the dtype of a gradient or a parameter."""


class Coefficients(ctypes.Structure):
    """The scalars of a step, in fp32."""

    _fields_ = tuple(
        (name, ctypes.c_float)
        for name in (
            "step_size",
            "inverse_correction2",
            "beta1",
            "one_minus_beta1",
            "beta2",
            "one_minus_beta2",
            "eps",
            "decay",
            "grad_factor",
        )
    )


class Moments(ctypes.Structure):
    """The addresses of the fp32 moments; the last is None without AMSGrad."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"))


class Gradient(ctypes.Structure):
    """The address of a gradient, the address of a total to add to it or None, and the dtype as in `KINDS`."""

    _fields_ = (("values", ctypes.c_void_p), ("total", ctypes.c_void_p), ("kind", ctypes.c_int))


_lock = threading.Lock()


def kernel() -> ctypes.CDLL | None:
    """Return the compiled kernel; None if it cannot be built, and then an `ElixirWarning` says why once."""
    with _lock:
        return _kernel()


@cache
def _kernel() -> ctypes.CDLL | None:
    try:
        return _typed(loaded_kernel())
    except BuildError as error:
        warnings.warn(
            f"no host kernel: {error}. Host updates of 16-bit parameters use torch's own ops: same results but for "
            "rounding, 1.5 times the time or more.",
            ElixirWarning,
            stacklevel=4,
        )
        return None


def _typed(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, size, kind = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    scalars = ctypes.POINTER(Coefficients)
    arguments = {
        "mixed_adamw": (pointer, Moments, Gradient, pointer, kind, size, scalars),
        "split_adamw": (pointer, Moments, Gradient, pointer, size, scalars),
        "sums_of_squares": (ctypes.POINTER(ctypes.c_double), Gradient, size, size),
    }
    for name, types in arguments.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, None
    return library


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
        return flat_step.sum_of_squares(grad)
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
    coefficients = Coefficients(*given.rule.scalars())

    def part(start: int, stop: int) -> None:
        moments = Moments(*(_at(moment, start) for moment in (given.exp_avg, given.exp_avg_sq, given.max_exp_avg_sq)))
        gradient = _gradient(given.grad, given.total, start)
        weights, high = _at(given.weights, start), _at(given.param, start)
        size_and_scalars = (stop - start, ctypes.byref(coefficients))
        if given.is_split:
            library.split_adamw(weights, moments, gradient, high, *size_and_scalars)
        else:
            kind = 0 if given.param is None else KINDS[given.param.dtype]
            library.mixed_adamw(weights, moments, gradient, high, kind, *size_and_scalars)

    (threads or host_threads_for()).run(given.weights.numel(), part)
    # Autograd must see these writes, as it sees torch's own in-place ops.
    written = (given.weights, given.exp_avg, given.exp_avg_sq, given.max_exp_avg_sq, given.param)
    increment_version([tensor for tensor in written if tensor is not None])


def _at(tensor: torch.Tensor | None, start: int) -> int | None:
    """Return the address of `tensor[start]`; None, which is NULL in C, if there is no tensor."""
    return None if tensor is None else tensor.data_ptr() + start * tensor.element_size()


def _gradient(grad: torch.Tensor, total: torch.Tensor | None, start: int) -> Gradient:
    return Gradient(_at(grad, start), _at(total, start), KINDS[grad.dtype])


Row = Sequence[torch.Tensor]
"""The tensors of a parameter, dense and of equal element count: the parameter first, the others in a fixed order."""


def coalesce(rows: Sequence[Row], steps: Sequence[int]) -> Iterator[tuple[list[int], Row]]:
    """Yield groups of rows that are neighbours in memory and at the same step: their indices and joined tensors."""
    order = sorted(range(len(rows)), key=lambda index: rows[index][0].data_ptr())
    members: list[int] = []
    for index in order:
        if members and not (steps[members[-1]] == steps[index] and _follows(rows[members[-1]], rows[index])):
            yield members, _joined(rows, members)
            members = []
        members.append(index)
    if members:
        yield members, _joined(rows, members)


def _follows(row: Row, following: Row) -> bool:
    """Return whether each tensor of `following` comes right behind the same kind of tensor of `row` in a slab."""
    step = aligned_bytes(row[0].nbytes) // row[0].element_size()
    return all(
        (tensor.dtype, tensor.data_ptr() + step * tensor.element_size()) == (behind.dtype, behind.data_ptr())
        for tensor, behind in zip(row, following, strict=True)
    ) and all(map(_is_cut, (*row, *following)))


def _is_cut(tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() % ALIGN_BYTES == 0 and is_slab_memory(tensor.data_ptr())


def _joined(rows: Sequence[Row], members: Sequence[int]) -> Row:
    first, last = rows[members[0]], rows[members[-1]]
    if len(members) == 1:
        return [flat(tensor) for tensor in first]
    return [_between(start, end) for start, end in zip(first, last, strict=True)]


def _between(first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return the memory from the start of `first` to the end of `last`; valid only while both are alive."""
    nbytes = last.data_ptr() + last.nbytes - first.data_ptr()
    memory = (ctypes.c_byte * nbytes).from_address(first.data_ptr())
    return torch.frombuffer(memory, dtype=first.dtype)
