"""What tells code of torch that a graph is being captured: one flag per process, whichever thread captures."""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Thread(threading.local):
    """What one thread does."""

    is_outside_captures = False


_thread = _Thread()


@contextmanager
def outside_captures() -> Iterator[None]:
    """Let `torch.compiler.is_compiling()` be False on this thread inside, whatever other threads capture.

    While it is True, torch's optimizers compute with tensors what they otherwise compute with Python numbers, which
    rounds otherwise. It reads `torch.compiler._is_compiling_flag`, which is one per process: `torch.export` sets it,
    in torch 2.13 also `torch.compile`. So the first call of this context gives the function other code. It stays the
    same object, by which Dynamo recognises it; and there is no lock for which a capture and an update that needs
    Dynamo could wait crosswise. Checked on torch 2.13; without the flag: AttributeError at the first step of
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
    torch.compiler._elixir_thread = _thread  # the code below runs with the globals of `torch.compiler`, not with ours
    torch.compiler.is_compiling.__code__ = _is_compiling.__code__


def _is_compiling() -> bool:
    # As in torch, but for the last line. TorchScript reads this text, too, and compiles the first branch alone.
    if torch.jit.is_scripting():
        return False
    else:  # noqa: RET505
        return torch.compiler._is_compiling_flag and not torch.compiler._elixir_thread.is_outside_captures
