"""The memory of the host that this process may use, and the ranks that share it."""

import os

import psutil
import torch
from torch import distributed

from elixir_compile.base.control_groups import GROUPS, MEMBERSHIPS, group_limit_bytes
from elixir_compile.compat.platforms.platforms import platform_of


def num_local_ranks(unknown: int | None = None) -> int:
    """Return the number of ranks on this host, as set by `torchrun`; else `unknown`; else the number of all ranks."""
    started = os.environ.get("LOCAL_WORLD_SIZE")
    if started or unknown is not None:
        return max(int(started or unknown or 1), 1)
    is_up = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if is_up else 1


def memory_sizes_bytes(device: torch.device) -> tuple[int, int]:
    """Return the bytes of `device` and of its host. If the device is a CPU, both are the same memory."""
    host_bytes = host_memory_bytes()
    device_bytes = platform_of(device).total_bytes(device)
    return host_bytes if device_bytes is None else device_bytes, host_bytes


def host_memory_bytes() -> int:
    """Return the bytes of host memory allowed to this process. A control group may limit them."""
    total_bytes = psutil.virtual_memory().total
    limit_bytes = group_limit_bytes(MEMBERSHIPS, GROUPS)
    return total_bytes if limit_bytes is None else min(total_bytes, limit_bytes)


def available_host_bytes() -> int:
    """Return the bytes that this process may still allocate on the host, by free memory and its group's limit.

    The memory of other processes in the group is not subtracted from the limit.
    """
    left_bytes = host_memory_bytes() - psutil.Process().memory_info().rss
    return max(min(psutil.virtual_memory().available, left_bytes), 1)
