"""Calls of the host kernel: its structures, and a step or a sum as calls for the parts of each thread."""

import ctypes
import math

import torch

from elixir_compile.optim import moment_forms
from elixir_compile.optim.host.flat_step import FlatStep
from elixir_compile.optim.host.threads import GRAIN, HostThreads
from elixir_compile.optim.moment_forms import MomentForm

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


class Reduced(ctypes.Structure):
    """The moments of a step that is not exact, as in `moments.c`."""

    _fields_ = (
        ("exp_avg", ctypes.c_void_p),
        ("exp_avg_sq", ctypes.c_void_p),
        ("exp_avg_scale", ctypes.c_void_p),
        ("exp_avg_sq_scale", ctypes.c_void_p),
        ("key", ctypes.c_uint32),
        ("form", ctypes.c_int),
    )


class Weights(ctypes.Structure):
    """The weights of a step that is not exact, as in `reduced.c`."""

    _fields_ = (("values", ctypes.c_void_p), ("param", ctypes.c_void_p), ("form", ctypes.c_int))


class Gradient(ctypes.Structure):
    """The address of a gradient, the address of a total to add to it or None, and the dtype as in `KINDS`."""

    _fields_ = (("values", ctypes.c_void_p), ("total", ctypes.c_void_p), ("kind", ctypes.c_int))


def typed(library: ctypes.CDLL) -> ctypes.CDLL:
    """Return `library` with the types of the arguments of its functions."""
    pointer, size, kind = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    scalars = ctypes.POINTER(Coefficients)
    arguments = {
        "mixed_adamw": (pointer, Moments, Gradient, pointer, kind, size, scalars),
        "split_adamw": (pointer, Moments, Gradient, pointer, size, scalars),
        "reduced_adamw": (Weights, Reduced, Gradient, size, scalars),
        "sums_of_squares": (ctypes.POINTER(ctypes.c_double), Gradient, size, size),
    }
    for name, types in arguments.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, None
    return library


def run_exact(library: ctypes.CDLL, given: FlatStep, coefficients: Coefficients, threads: HostThreads) -> None:
    """Run the step `given` of exact moments and masters."""

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

    threads.run(given.weights.numel(), part)


def run_reduced(library: ctypes.CDLL, given: FlatStep, coefficients: Coefficients, threads: HostThreads) -> None:
    """Run the step `given` with moments in fewer bytes, or without a master."""
    numel, key = given.weights.numel(), given.key
    is_alone = given.weights.dtype == torch.bfloat16

    def part(start: int, stop: int) -> None:
        block = start // moment_forms.BLOCK  # parts begin at multiples of GRAIN
        moments = Reduced(
            *(_at(moment, start) for moment in (given.exp_avg, given.exp_avg_sq)),
            *(_at(scale, block) for scale in (given.exp_avg_scale, given.exp_avg_sq_scale)),
            key,
            tuple(MomentForm).index(given.form),
        )
        values = None if is_alone else _at(given.weights, start)
        weights = Weights(values, _at(given.weights if is_alone else given.param, start), _weight_form(given))
        gradient = _gradient(given.grad, given.total, start)
        library.reduced_adamw(weights, moments, gradient, stop - start, ctypes.byref(coefficients))

    threads.run(numel, part)


def _weight_form(given: FlatStep) -> int:
    """Return the value of the enum `WeightForm` in `reduced.c`."""
    if given.weights.dtype == torch.bfloat16:
        return 4
    if given.param is None:
        return 0
    return 3 if given.is_split else 1 + KINDS[given.param.dtype]


def sum_of_squares(library: ctypes.CDLL, grad: torch.Tensor, threads: HostThreads) -> float:
    """Return the sum of squares of `grad`."""
    sums = (ctypes.c_double * -(-grad.numel() // GRAIN))()

    def part(start: int, stop: int) -> None:
        block_sums = ctypes.cast(ctypes.byref(sums, start // GRAIN * 8), ctypes.POINTER(ctypes.c_double))
        library.sums_of_squares(block_sums, _gradient(grad, None, start), stop - start, GRAIN)

    threads.run(grad.numel(), part)
    return math.fsum(sums)


def _at(tensor: torch.Tensor | None, start: int) -> int | None:
    """Return the address of `tensor[start]`; None, which is NULL in C, if there is no tensor."""
    return None if tensor is None else tensor.data_ptr() + start * tensor.element_size()


def _gradient(grad: torch.Tensor, total: torch.Tensor | None, start: int) -> Gradient:
    return Gradient(_at(grad, start), _at(total, start), KINDS[grad.dtype])
