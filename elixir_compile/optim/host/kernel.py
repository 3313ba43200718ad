"""The functions of `kernel.c` as Python calls them; each releases the GIL while it runs."""

import ctypes
import threading
import warnings
from functools import cache

import torch

from elixir_compile.errors import ElixirWarning
from elixir_compile.optim.host.build import BuildError, loaded_kernel

KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""What `kernel.c` calls the dtype of a gradient or a parameter."""


class Coefficients(ctypes.Structure):
    """The scalars of one step, in fp32."""

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
    """Where the fp32 moments are; the last may be None."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"))


class Gradient(ctypes.Structure):
    """Where a gradient is, what is added to it (None: nothing) and one of `KINDS`."""

    _fields_ = (("values", ctypes.c_void_p), ("total", ctypes.c_void_p), ("kind", ctypes.c_int))


_lock = threading.Lock()


def kernel() -> ctypes.CDLL | None:
    """Return the compiled kernel, None where it cannot be built: then with one `ElixirWarning` that says why."""
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
