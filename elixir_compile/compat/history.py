"""The history that torch's allocator of an accelerator keeps of its blocks."""

from collections.abc import Mapping
from typing import Any

import torch


def start_allocator_history(device_type: str, most_entries: int) -> bool:
    """Let the allocator of `device_type` keep its last `most_entries` entries, from none; return whether it does.

    It does not if torch has no history for the type, or if somebody reads the history already.

    `torch.cuda.memory._record_memory_history`, `torch._C._cuda_isHistoryEnabled`: torch 2.11 to 2.13. Gone: observed
    steps on an accelerator have no bytes by kind.
    """
    found = _memory_module(device_type)
    is_on = getattr(torch._C, f"_{device_type}_isHistoryEnabled", None)
    if found is None or (is_on is not None and is_on()):
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


def _memory_module(device_type: str) -> Any:
    """Return torch's module of the memory of `device_type` if it can keep a history, else None."""
    found = getattr(getattr(torch, device_type, None), "memory", None)
    names = ("_record_memory_history", "_snapshot")
    return found if all(callable(getattr(found, name, None)) for name in names) else None
