"""Python bindings of `kernel.c`; each call releases the GIL."""

import ctypes
import threading
import warnings
from functools import cache

import torch

from elixir_compile.errors import ElixirWarning
from elixir_compile.optim.host.build import BuildError, loaded_kernel

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
