"""Threads for host passes: few, each making a single large call into C, which runs without the GIL.

`compat.platforms.update_threads` has their number. The cores of this process follow its affinity mask and the CPU quota
of its container. `OMP_NUM_THREADS` is ignored, because torchrun sets it to 1. On a machine with several memory nodes,
these threads are bound to the cores beside the device. So are the update thread and the OpenMP threads that it starts.
The user's threads are never bound.
"""

import logging
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

from elixir_compile.base.control_groups import allowed_cores, num_usable_cores
from elixir_compile.compat.platforms import bind_thread, num_local_ranks
from elixir_compile.compat.platforms.update_threads import at_least_threads, update_threads

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
