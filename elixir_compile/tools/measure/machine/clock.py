"""Measure the median seconds of several warm runs of a function, alone or beside another function."""

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from elixir_compile.compat.platforms import platform_of

MIN_REPEATS = 3
MAX_REPEATS = 50


def median_s(run: Callable[[], object], device: torch.device, at_most_s: float) -> float:
    """Return the median seconds of `run`, including its queued compute on `device`.

    The first run is not counted. The others stop after `at_most_s`, but there are at least `MIN_REPEATS` and at most
    `MAX_REPEATS`.
    """
    _timed_s(run, device)
    ends_s = time.perf_counter() + at_most_s
    seconds: list[float] = []
    while len(seconds) < MIN_REPEATS or (len(seconds) < MAX_REPEATS and time.perf_counter() < ends_s):
        seconds.append(_timed_s(run, device))
    return statistics.median(seconds)


def _timed_s(run: Callable[[], object], device: torch.device) -> float:
    began_s = time.perf_counter()
    run()
    # Not the whole device: a function that runs beside `run` has its own stream.
    platform_of(device).synchronize_compute(device)
    return time.perf_counter() - began_s


@contextmanager
def beside(run: Callable[[], object]) -> Iterator[None]:
    """Repeat `run` in a second thread during the block. An exception of `run` is raised at the end of the block."""
    is_over, has_begun = threading.Event(), threading.Event()

    def repeat() -> None:
        try:
            while not is_over.is_set():
                run()
                has_begun.set()
        finally:
            has_begun.set()

    with ThreadPoolExecutor(max_workers=1) as pool:
        repeating = pool.submit(repeat)
        has_begun.wait()
        try:
            yield
        finally:
            is_over.set()
        repeating.result()
