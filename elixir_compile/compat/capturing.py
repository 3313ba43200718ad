"""The flag of torch that a graph is being captured, made thread by thread: torch has one flag for the process."""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Thread(threading.local):
    """The state of one thread."""

    is_outside_captures = False


_thread = _Thread()


@contextmanager
def outside_captures() -> Iterator[None]:
    """Make `torch.compiler.is_compiling()` False on this thread inside, even if another thread captures a graph.

    If it is True, torch's optimizers compute with tensors instead of Python numbers, which rounds differently. The
    function reads `torch.compiler._is_compiling_flag`, a flag of the whole process: `torch.export` sets it, in torch
    2.13 `torch.compile` does too. So the first use of this context replaces the code of the function. The function
    object stays the same, because Dynamo recognises it by identity. A lock instead could deadlock a capture with an
    update that needs Dynamo.

    `torch.compiler._is_compiling_flag`: checked on torch 2.13. Gone: AttributeError at the first step of
    `hybrid(cls)`.
    """
    _let_threads_differ()
    before, _thread.is_outside_captures = _thread.is_outside_captures, True
    try:
        yield
    finally:
        _thread.is_outside_captures = before


@functools.cache
def _let_threads_differ() -> None:
    torch.compiler.__dict__["_elixir_thread"] = _thread  # `_is_compiling` runs with the globals of that module
    torch.compiler.is_compiling.__code__ = _is_compiling.__code__


def _is_compiling() -> bool:
    # The same text as in torch but for the last line: TorchScript reads it too, and compiles only the first branch.
    if torch.jit.is_scripting():  # pyright: ignore[reportPrivateImportUsage]
        return False
    else:  # noqa: RET505
        is_outside = torch.compiler._elixir_thread.is_outside_captures  # pyright: ignore[reportAttributeAccessIssue]
        return torch.compiler._is_compiling_flag and not is_outside
