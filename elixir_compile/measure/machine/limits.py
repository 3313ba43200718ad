"""Find the cores and the memory that this process may use: affinity, control groups, page-locked memory."""

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
from torch import distributed

from elixir_compile.errors import ElixirWarning
from elixir_compile.platforms import platform_of
from elixir_compile.runtime.slab import Slab
from elixir_compile.units import GIB, MIB

MEMBERSHIPS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")


def group_folders(memberships: Path, groups: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Yield the folder of each group that limits this process by `controller`, such as "cpu", and its version, 1 or 2.

    A group comes before its parents, whose limits hold too. `memberships` is a file such as `/proc/self/cgroup`,
    `groups` a folder such as `/sys/fs/cgroup`.
    """
    try:
        lines = memberships.read_text(encoding="utf-8").splitlines()
    except OSError:  # a system without control groups
        return
    for line in lines:
        _, controllers, own = line.split(":", 2)
        if controllers == "":
            yield from ((folder, 2) for folder in _upwards(groups, own))
        elif controller in controllers.split(","):
            root = groups / controllers  # such as "cpu,cpuacct"; on most systems "cpu" is a link to it
            yield from ((folder, 1) for folder in _upwards(root if root.exists() else groups / controller, own))


def _upwards(root: Path, own: str) -> Iterator[Path]:
    # Inside a container the path may be a path of the host. Then only the root has files.
    folder = root / own.lstrip("/")
    yield from (place for place in (folder, *folder.parents) if place.is_relative_to(root))


def text_of(file: Path) -> str:
    """Return the text of a file of a group, empty if the file cannot be read."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def allowed_cores() -> frozenset[int]:
    """Return the cores allowed by the affinity of this process."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(os.getpid()))
    return frozenset(range(os.cpu_count() or 1))


def num_usable_cores() -> int:
    """Return the number of cores that this process can keep busy, by its affinity and its CPU quota."""
    allowed = len(allowed_cores())
    quota = quota_cores(MEMBERSHIPS, GROUPS)
    # With more threads than the quota, all threads stop for the rest of each period.
    return allowed if quota is None else max(min(allowed, int(quota)), 1)


def quota_cores(memberships: Path, groups: Path) -> float | None:
    """Return the smallest CPU quota of this process's control groups, in cores; None if no group has a quota.

    See `group_folders` for the arguments. Docker's `--cpus=2.5` and Kubernetes' CPU limits are such quotas.
    """
    quotas: list[float] = []
    for folder, version in group_folders(memberships, groups, "cpu"):
        if version == 2:
            time_us, _, period_us = text_of(folder / "cpu.max").partition(" ")
        else:
            time_us, period_us = text_of(folder / "cpu.cfs_quota_us"), text_of(folder / "cpu.cfs_period_us")
        if (
            time_us.isdecimal() and period_us.isdecimal() and int(period_us)
        ):  # without a quota it is "max", -1, or the file is missing
            quotas.append(int(time_us) / int(period_us))
    return min(quotas, default=None)


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


def group_limit_bytes(memberships: Path, groups: Path) -> int | None:
    """Return the smallest memory limit of this process's control groups and their parents, None without a limit.

    See `group_folders` for the arguments.
    """
    names = {1: "memory.limit_in_bytes", 2: "memory.max"}
    found = group_folders(memberships, groups, "memory")
    texts = [text_of(folder / names[version]) for folder, version in found]
    return min((int(text) for text in texts if text.isdecimal()), default=None)


def pinned_limit_bytes(device: torch.device) -> int:
    """Return the most bytes of page-locked host memory; all, if `device` is a CPU and none must be."""
    memory_bytes = host_memory_bytes()
    if not platform_of(device).has_own_memory:
        return memory_bytes
    limit_bytes = _lock_limit_bytes()
    if limit_bytes is None or limit_bytes >= memory_bytes:
        return memory_bytes
    # Most CUDA drivers ignore the limit, whose default is 8 MiB: try whether more memory can be pinned.
    if limit_bytes <= GIB:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ElixirWarning)
            if Slab(limit_bytes + MIB, pin=True).is_pinned:
                return memory_bytes
    return limit_bytes


def _lock_limit_bytes() -> int | None:
    try:
        import resource
    except ImportError:  # Windows has no limit
        return None
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit_bytes == resource.RLIM_INFINITY else limit_bytes
