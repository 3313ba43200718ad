"""How many cores this process may use: its affinity mask says which, its control groups for how much of the time."""

import os
from pathlib import Path

from elixir_compile.measure.machine.groups import GROUPS, MEMBERSHIPS, group_folders, text_of


def allowed_cores() -> frozenset[int]:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(os.getpid()))
    return frozenset(range(os.cpu_count() or 1))


def num_usable_cores() -> int:
    """Return how many cores this process can keep busy: those it may run on, and no more than a control group pays
    for."""
    allowed = len(allowed_cores())
    quota = quota_cores(MEMBERSHIPS, GROUPS)
    # Threads beyond the quota stand still for the rest of each period, all of them at once.
    return allowed if quota is None else max(min(allowed, int(quota)), 1)


def quota_cores(memberships: Path, groups: Path) -> float | None:
    """Return the smallest CPU quota of this process's control groups, in cores; None if no group has one.

    See `group_folders` for the arguments. Docker's `--cpus=2.5` and Kubernetes' CPU limits are such quotas.
    """
    quotas: list[float] = []
    for folder, version in group_folders(memberships, groups, "cpu"):
        if version == 2:
            time_us, _, period_us = text_of(folder / "cpu.max").partition(" ")
        else:
            time_us, period_us = text_of(folder / "cpu.cfs_quota_us"), text_of(folder / "cpu.cfs_period_us")
        if time_us.isdecimal() and period_us.isdecimal() and int(period_us):  # else "max" or -1, or there is no file
            quotas.append(int(time_us) / int(period_us))
    return min(quotas, default=None)
