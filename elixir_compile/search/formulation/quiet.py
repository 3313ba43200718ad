"""Drop what HiGHS prints from C while it solves, and nothing that Python prints.

HiGHS prints lines such as `HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();` though its output
is switched off, in the middle of the output of a training script. `stdout` of C is a variable, which a program may set
(glibc manual, 12.2 Standard Streams). During a solve it is a stream to nowhere. Python writes to file descriptor 1 and
does not use it, so what other threads print by Python appears as always; what they print by `printf` is dropped too.
"""

import ctypes
import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class _Streams(NamedTuple):
    """The variable `stdout` of C, and a stream that drops all that is written to it."""

    stdout: ctypes.c_void_p
    nowhere: int


@functools.cache
def _streams() -> _Streams | None:
    """Return the streams of this process; None if its C library is not glibc: in others the variable is a constant."""
    try:
        is_glibc = "glibc" in (os.confstr("CS_GNU_LIBC_VERSION") or "")
    except (AttributeError, ValueError):
        is_glibc = False
    if not is_glibc:
        return None
    library = ctypes.CDLL(None)
    library.fopen.restype = ctypes.c_void_p
    nowhere = library.fopen(os.devnull.encode(), b"w")
    # Never closed: a thread may be printing to it when a solve ends.
    return None if nowhere is None else _Streams(ctypes.c_void_p.in_dll(library, "stdout"), nowhere)


class _Silence:
    """Sets `stdout` of C while at least one thread solves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_solves = 0
        self._usual: int | None = None

    def begin(self, streams: _Streams) -> None:
        with self._lock:
            if self._num_solves == 0:
                self._usual, streams.stdout.value = streams.stdout.value, streams.nowhere
            self._num_solves += 1

    def end(self, streams: _Streams) -> None:
        with self._lock:
            self._num_solves -= 1
            if self._num_solves == 0:
                streams.stdout.value = self._usual


_silence = _Silence()


@contextmanager
def without_notes() -> Iterator[None]:
    """Drop what C code prints to its `stdout` during the block. Any number of threads may be in such a block."""
    streams = _streams()
    if streams is None:
        yield
        return
    _silence.begin(streams)
    try:
        yield
    finally:
        _silence.end(streams)
