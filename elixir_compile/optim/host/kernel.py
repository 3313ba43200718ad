"""Call the C kernel for updates on the host, and choose the threads that it runs on."""

import ctypes
import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import cache
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from elixir_compile.base.process import allowed_cores, num_usable_cores
from elixir_compile.compat.platforms import bind_thread, num_local_ranks
from elixir_compile.compat.platforms.host import at_least_threads, update_threads
from elixir_compile.optim import precision as moment_forms
from elixir_compile.optim.host.flat_step import FlatStep
from elixir_compile.optim.precision import MomentForm

# ----------------------------------------------------------------------------------------------------------------------
# Threads for host passes: few, each making a single large call into C, which runs without the GIL.
#
# `compat.platforms.host` has their number. The cores of this process follow its affinity mask and the CPU
# quota of its container. `OMP_NUM_THREADS` is ignored, because torchrun sets it to 1. On a machine with several memory
# nodes, these threads are bound to the cores beside the device. So are the update thread and the OpenMP threads that it
# starts. The user's threads are never bound.


log = logging.getLogger("elixir_compile")
T = TypeVar("T")

GRAIN = 1 << 18
"""Parts are multiples of this many elements. Calls of 64 K took 8 % longer; more than 256 K gained nothing."""


class HostThreads:
    """`num_threads` threads, started at the first pass, that run the parts of a pass at the same time.

    The threads are daemons. They end when this object is collected, or with the process. A forked child starts new
    threads.
    """

    def __init__(self, num_threads: int, cores: Collection[int] = ()) -> None:
        if num_threads < 1:
            raise ValueError(f"{num_threads} threads: needs 1 or more")
        self.num_threads = num_threads
        self.cores = frozenset(cores)
        """The cores to which the threads are bound; empty if they are not bound."""
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[Any] | None = None
        self._process = 0

    def run(self, numel: int, part: Callable[[int, int], T]) -> list[T]:
        """Run `part(start, stop)` for each part of `numel` elements; return the results in order, after all have ended.

        A single part runs on the calling thread, unless threads are bound. The first exception of a part is raised.
        """
        spans = parts(numel, self.num_threads)
        if len(spans) < 2 and not self.cores:
            return [part(*span) for span in spans]
        jobs = self._started()
        futures = [Future[T]() for _ in spans]
        for number, span in enumerate(spans):
            jobs.put((futures[number], part, span))
        # Wait for all parts before raising: a running part writes to memory that the caller may free.
        failures = [future.exception() for future in futures]
        failure = next(filter(None, failures), None)
        try:
            if failure is not None:
                raise failure
            return [future.result() for future in futures]
        finally:
            del failure, failures, futures  # see `ElixirError.renewed`

    def _started(self) -> "SimpleQueue[Any]":
        with self._lock:
            if self._jobs is None or self._process != os.getpid():
                self._jobs, self._process = SimpleQueue(), os.getpid()
                for index in range(self.num_threads):
                    thread = threading.Thread(
                        target=_work, args=(self._jobs, self.cores), name=f"elixir-host-{index}", daemon=True
                    )
                    thread.start()
                # Not at exit: updates that are still queued then need the threads.
                weakref.finalize(self, _stop, self._jobs, self.num_threads).atexit = False
            return self._jobs


def _work(jobs: "SimpleQueue[Any]", cores: frozenset[int]) -> None:
    bind_thread(cores)
    while (job := jobs.get()) is not None:
        future, part, span = job
        try:
            future.set_result(part(*span))
        except BaseException as error:  # `run` raises it
            future.set_exception(error)
        del future, part, span, job  # an idle thread holds no tensors


def _stop(jobs: "SimpleQueue[Any]", num_threads: int) -> None:
    for _ in range(num_threads):
        jobs.put(None)


def parts(numel: int, num_threads: int) -> list[tuple[int, int]]:
    """Return at most `num_threads` spans that cover `numel` elements, each but the last a multiple of `GRAIN`."""
    grains = -(-numel // GRAIN)
    count = min(num_threads, grains)
    bounds = [index * grains // count * GRAIN for index in range(count)]
    return list(pairwise([*bounds, numel]))


@cache
def host_threads_for(device: torch.device | None = None) -> HostThreads:
    """Return the host threads for passes beside `device`, made once per device; for None, the threads are not bound.

    Logs the number of threads.
    """
    num_threads, beside = update_threads(device)
    num_cores, num_allowed = num_usable_cores(), len(allowed_cores())
    log.info(
        "host updates: %d threads of %d cores%s for %d local ranks%s, whatever OMP_NUM_THREADS says",
        num_threads,
        num_cores,
        f" (a CPU quota: there are {num_allowed})" if num_cores < num_allowed else "",
        num_local_ranks(),
        f", on the {len(beside)} cores beside {device}" if beside else "",
    )
    return HostThreads(num_threads, beside)


def on_host_threads(work: Callable[[], T], threads: HostThreads) -> Callable[[], T]:
    """Return `work` for the update thread, with as many torch threads as `threads` has, on the same cores."""

    def run() -> T:
        bind_thread(threads.cores)  # OpenMP threads started later inherit the cores
        with at_least_threads(threads.num_threads):
            return work()

    return run


# ----------------------------------------------------------------------------------------------------------------------
# Calls of the host kernel: its structures, and a step or a sum as calls for the parts of each thread.


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
    """The weights of a step that is not exact, as in `moments.c`."""

    _fields_ = (("values", ctypes.c_void_p), ("param", ctypes.c_void_p), ("form", ctypes.c_int))


class Gradient(ctypes.Structure):
    """The address of a gradient, and its dtype as in `KINDS`."""

    _fields_ = (("values", ctypes.c_void_p), ("kind", ctypes.c_int))


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
        gradient = _gradient(given.grad, start)
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
    weight_form = 4 if is_alone else 0  # the enum `WeightForm` in `moments.c`
    if not is_alone and given.param is not None:
        weight_form = 3 if given.is_split else 1 + KINDS[given.param.dtype]

    def part(start: int, stop: int) -> None:
        block = start // moment_forms.BLOCK  # parts begin at multiples of GRAIN
        moments = Reduced(
            *(_at(moment, start) for moment in (given.exp_avg, given.exp_avg_sq)),
            *(_at(scale, block) for scale in (given.exp_avg_scale, given.exp_avg_sq_scale)),
            key,
            tuple(MomentForm).index(given.form),
        )
        values = None if is_alone else _at(given.weights, start)
        weights = Weights(values, _at(given.weights if is_alone else given.param, start), weight_form)
        gradient = _gradient(given.grad, start)
        library.reduced_adamw(weights, moments, gradient, stop - start, ctypes.byref(coefficients))

    threads.run(numel, part)


def sum_of_squares(library: ctypes.CDLL, grad: torch.Tensor, threads: HostThreads) -> float:
    """Return the sum of squares of `grad`."""
    sums = (ctypes.c_double * -(-grad.numel() // GRAIN))()

    def part(start: int, stop: int) -> None:
        block_sums = ctypes.cast(ctypes.byref(sums, start // GRAIN * 8), ctypes.POINTER(ctypes.c_double))
        library.sums_of_squares(block_sums, _gradient(grad, start), stop - start, GRAIN)

    threads.run(grad.numel(), part)
    return math.fsum(sums)


def _at(tensor: torch.Tensor | None, start: int) -> int | None:
    """Return the address of `tensor[start]`; None, which is NULL in C, if there is no tensor."""
    return None if tensor is None else tensor.data_ptr() + start * tensor.element_size()


def _gradient(grad: torch.Tensor, start: int) -> Gradient:
    return Gradient(_at(grad, start), KINDS[grad.dtype])
