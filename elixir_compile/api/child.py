"""Work that a forked process does beside this one, if that is safe and there is a core for it."""

import contextlib
import os
import pickle
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

Value = TypeVar("Value")

_PATIENCE_S = 60.0
"""A child that has not answered so long after this process asked for its result is not waited for. The capture that it
makes takes seconds, as those do that this process makes meanwhile."""


@contextlib.contextmanager
def beside(work: Callable[[], Value]) -> Iterator[Callable[[], Value]]:
    """Do `work` in a forked process meanwhile; yield a function that waits for its result and returns it.

    The result is pickled. If no process can be forked, or if it fails, that function does `work` here, and raises what
    it raises. What the child prints is dropped, and it ends with the context.
    """
    if not _may_fork():
        yield work
        return
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that libraries have threads, which they stop for a fork
        child = os.fork()
    if child == 0:
        _answer(work, writing)
    os.close(writing)

    def result() -> Value:
        answer = _read(reading)
        return pickle.loads(answer) if answer else work()

    try:
        yield result
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)  # it has ended if it was waited for
        os.waitpid(child, 0)


def _may_fork() -> bool:
    """Whether the process has one thread, as far as Python knows, no CUDA context, and a core that nobody else uses; on
    Linux, as the libraries of other systems do not expect forks.

    Both processes import and initialise Inductor. On two cores that others use too, two processes took 24 s for what
    one does in 16 s.
    """
    is_alone = threading.active_count() == 1 and not torch.cuda.is_initialized()
    if sys.platform != "linux" or not is_alone:
        return False
    return os.getloadavg()[0] <= len(os.sched_getaffinity(0)) / 2


def _answer(work: Callable[[], object], writing: int) -> None:
    """Do `work` in the child, write its pickled result and end the child, whatever happens."""
    try:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        torch.set_num_threads(1)  # the threads of the parent are not here
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(pickle.dumps(work()))
    finally:
        os._exit(0)


def _read(reading: int) -> bytes:
    """Return what the child wrote, nothing if it failed or did not come to an end."""
    ends_s = time.monotonic() + _PATIENCE_S
    pieces: list[bytes] = []
    while select.select([reading], [], [], max(0.0, ends_s - time.monotonic()))[0]:
        piece = os.read(reading, 1 << 20)
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
    return b""
