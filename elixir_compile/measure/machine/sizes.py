"""How much memory a device and its host have, and how much of it may be page-locked."""

import os
import warnings
from pathlib import Path

import psutil
import torch
from torch import distributed

from elixir_compile.errors import ElixirWarning
from elixir_compile.measure.machine.groups import GROUPS, MEMBERSHIPS, group_folders, text_of
from elixir_compile.runtime.slab import Slab
from elixir_compile.units import GIB, MIB


def num_local_ranks(unknown: int | None = None) -> int:
    """Return how many ranks share this host: those that `torchrun` started on it, else `unknown`, else all."""
    started = os.environ.get("LOCAL_WORLD_SIZE")
    if started or unknown is not None:
        return max(int(started or unknown or 1), 1)
    is_up = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if is_up else 1


def memory_sizes_bytes(device: torch.device) -> tuple[int, int]:
    """Return the bytes of `device` and of its host, which are one memory where the device is a CPU."""
    host_bytes = host_memory_bytes()
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory, host_bytes
    return host_bytes, host_bytes


def host_memory_bytes() -> int:
    """Return the bytes of the host that this process may use: a control group may allow less than there is."""
    total_bytes = psutil.virtual_memory().total
    limit_bytes = group_limit_bytes(MEMBERSHIPS, GROUPS)
    return total_bytes if limit_bytes is None else min(total_bytes, limit_bytes)


def available_host_bytes() -> int:
    """Return the bytes that this process may still allocate on the host: what is free, and what its group allows.

    Other processes of the group are not counted.
    """
    left_bytes = host_memory_bytes() - psutil.Process().memory_info().rss
    return max(min(psutil.virtual_memory().available, left_bytes), 1)


def group_limit_bytes(memberships: Path, groups: Path) -> int | None:
    """Return the smallest memory limit of this process's control groups and their parents, or None without one.

    See `group_folders` for the arguments.
    """
    names = {1: "memory.limit_in_bytes", 2: "memory.max"}
    found = group_folders(memberships, groups, "memory")
    texts = [text_of(folder / names[version]) for folder, version in found]
    return min((int(text) for text in texts if text.isdecimal()), default=None)


def pinned_limit_bytes(device: torch.device) -> int:
    """Return the bytes of host memory that may be page-locked; nothing has to be where the device is a CPU."""
    memory_bytes = host_memory_bytes()
    if device.type != "cuda":
        return memory_bytes
    limit_bytes = _lock_limit_bytes()
    if limit_bytes is None or limit_bytes >= memory_bytes:
        return memory_bytes
    # Most CUDA drivers pin without asking for the limit, whose default of 8 MiB would then be wrong by far: try.
    if limit_bytes <= GIB:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ElixirWarning)
            if Slab(limit_bytes + MIB, pin=True).is_pinned:
                return memory_bytes
    return limit_bytes


def _lock_limit_bytes() -> int | None:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return None
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit_bytes == resource.RLIM_INFINITY else limit_bytes
