"""Room for the frames of Python's own calls while a step is captured."""

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

T = TypeVar("T")
_HALF_BYTES = 512 * 1024
"""Calls two thousand deep take less."""
_SLOT_BYTES = 8


def with_deep_calls(run: Callable[[], T]) -> T:
    """Return what `run` returns, called where calls inside it find room for their frames that is there already.

    CPython, from 3.11 on, keeps frames in chunks of 16 KB: it maps one when a call does not fit the last, and unmaps it
    when that call returns. A loop whose calls just cross the end of a chunk maps and unmaps one for each of them, in
    about ten microseconds. Whether a loop does depends on how deep it is called: below this package's frames torch's
    partitioner and the passes before it did so 198,000 times for 16 layers of Llama, with 270,000 page faults, where
    `torch.compile` alone did not. A frame of more than `_HALF_BYTES` gets a chunk of twice that, of which calls inside
    use the rest.
    """
    return _in_wide_frame(run)


def _call(run: Callable[[], Any]) -> Any:
    return run()


_in_wide_frame = FunctionType(_call.__code__.replace(co_stacksize=_HALF_BYTES // _SLOT_BYTES), {})
