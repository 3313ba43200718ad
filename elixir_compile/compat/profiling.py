"""Read when the allocators took and freed memory: the history of an accelerator's blocks, and the events of the CPU's
allocator.
"""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch.autograd import profiler as autograd_profiler
from torch.profiler import record_function

from elixir_compile.compat.tensors import is_profiling

# ----------------------------------------------------------------------------------------------------------------------
# The history that torch's allocator of an accelerator keeps of its blocks.


def start_allocator_history(device_type: str, most_entries: int) -> bool:
    """Let the allocator of `device_type` keep its last `most_entries` entries, from none; return whether it does.

    It does not if torch has no history for the type, or if somebody reads the history already.

    `torch.cuda.memory._record_memory_history`, `torch._C._cuda_isHistoryEnabled`: torch 2.11 to 2.13. Gone: observed
    steps on an accelerator have no bytes by kind.
    """
    found: Any = getattr(getattr(torch, device_type, None), "memory", None)
    is_on = getattr(torch._C, f"_{device_type}_isHistoryEnabled", None)
    can_keep = all(callable(getattr(found, name, None)) for name in ("_record_memory_history", "_snapshot"))
    if not can_keep or (is_on is not None and is_on()):
        return False
    # Without stacks: an entry then takes less than a microsecond, and no kind is told by the lines of a program.
    found._record_memory_history(context=None, stacks="python", max_entries=most_entries, clear_history=True)
    return True


def allocator_snapshot(device_type: str) -> Mapping[str, Any]:
    """Return the blocks of the allocator of `device_type` and its history, as torch writes them.

    `torch.cuda.memory._snapshot`: torch 2.11 to 2.13. Gone: AttributeError at the first step that is observed with
    its memory on an accelerator.
    """
    return getattr(torch, device_type).memory._snapshot()


def stop_allocator_history(device_type: str) -> None:
    """Let the allocator of `device_type` forget its history and keep none.

    `torch.cuda.memory._record_memory_history`: see `start_allocator_history`.
    """
    getattr(torch, device_type).memory._record_memory_history(enabled=None)


# ----------------------------------------------------------------------------------------------------------------------
# The events of the CPU's allocator, in the order in which they happened beside marks of the caller.


_MARK = "elixir mark "
_LEVEL = "KINETO_LOG_LEVEL"
_QUIET = "99"
"""A level above all levels of kineto."""


def can_profile() -> bool:
    """Return whether torch.profiler may be started here, to be stopped at another place of the program.

    It cannot be started a second time. In torch 2.11 it can never be started again in this process after a thread ended
    with it on, so there the main thread alone may start it; torch 2.13 has no such fault.
    """
    is_safe = torch.__version__ >= "2.13" or threading.current_thread() is threading.main_thread()
    return is_safe and not is_profiling()


class AllocatorProfile:
    """torch's profiler from the creation to `stop`, or to the end of a `with` block, for the memory of the CPU alone.

    It sees the threads that inherit it: the caller's and autograd's. `stop` must be called on the thread that made it.

    `torch.profiler.profile` makes objects of Python of all ops when it ends, if it shall not warn of cycles. Nothing
    reads them here, and they took 4 % of the CPU seconds of a test that captures a model and measures a few steps. The
    profiler of `torch.autograd`, which it wraps, does not.
    """

    def __init__(self) -> None:
        self._profiler = autograd_profiler.profile(use_kineto=True, profile_memory=True)
        with _quiet():
            self._profiler.__enter__()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def mark(self, number: int) -> None:
        """Note `number` among the events."""
        with record_function(f"{_MARK}{number}"):
            pass

    def stop(self) -> None:
        """End the profile."""
        with _quiet():
            self._profiler.__exit__(None, None, None)

    def events(self) -> Sequence[tuple[int, int | None, int]]:
        """Return (time, address, bytes) for each block allocated or freed, and (time, None, number) for each mark.

        They are in order. Times are ns on the clock of `time.time_ns`. Bytes are negative if the block was freed, and 0
        if it was allocated before any profile.

        `kineto_results`, `torch._C._profiler._ExtraFields_Allocation`: torch 2.11 to 2.13. Gone: AttributeError
        or ImportError in `measure_step`, and in the first measured step under a budget, on a CPU.
        """
        from torch._C._profiler import _ExtraFields_Allocation

        if self._profiler.kineto_results is None:
            raise RuntimeError("the profiler has not ended")
        found: list[tuple[int, int | None, int]] = []
        pending = list(self._profiler.kineto_results.experimental_event_tree())
        while pending:
            event = pending.pop()
            pending.extend(event.children)
            block = event.extra_fields
            if isinstance(block, _ExtraFields_Allocation):
                if block.device.type == "cpu":
                    found.append((event.start_time_ns, block.ptr, block.alloc_size))
            elif event.name.startswith(_MARK):
                found.append((event.start_time_ns, None, int(event.name[len(_MARK) :])))
        return sorted(found, key=lambda event: event[0])

    def allocations(self) -> list[tuple[int, int, int]]:
        """Return (time, address, bytes) for each block allocated or freed: the `events` without marks."""
        return [(time_ns, address, nbytes) for time_ns, address, nbytes in self.events() if address is not None]


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep kineto from writing a line to stderr for each start and stop, unless the user asks for its lines.

    kineto reads the level from the environment when it is used first: torch 2.11 to 2.13. Otherwise: two lines.
    """
    if _LEVEL in os.environ:
        yield
        return
    os.environ[_LEVEL] = _QUIET
    try:
        yield
    finally:
        os.environ.pop(_LEVEL, None)
