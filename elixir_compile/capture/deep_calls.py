"""Reserve stack memory for deep Python calls while a step is captured."""

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

T = TypeVar("T")
_HALF_BYTES = 512 * 1024
"""Two thousand nested calls take less."""
_SLOT_BYTES = 8


def with_deep_calls(run: Callable[[], T]) -> T:
    """Call `run` with memory for the frames of its calls already mapped, and return its result.

    CPython, from 3.11 on, keeps frames in chunks of 16 KB. It maps a chunk if a call does not fit the last chunk, and
    unmaps it as soon as the call returns. If the calls of a loop just cross the end of a chunk, each of them maps and
    unmaps a chunk, in about ten microseconds. A loop crosses or not by the depth at which it is called: below the
    frames of this package, torch's partitioner and the passes before it crossed 198,000 times for 16 layers of Llama,
    with 270,000 page faults; `torch.compile` alone did not. So `run` is called from a frame of more than `_HALF_BYTES`.
    CPython maps a chunk of twice that for the frame, and the calls inside use the rest of the chunk.
    """
    return _in_wide_frame(run)


def _call(run: Callable[[], Any]) -> Any:
    return run()


_in_wide_frame = FunctionType(_call.__code__.replace(co_stacksize=_HALF_BYTES // _SLOT_BYTES), {})
