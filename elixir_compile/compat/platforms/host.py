"""Find the memory of the host that this process may use, the cores beside a device, and the number and the cores of the
threads of updates.
"""

import os
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import psutil
import torch
from torch import distributed

from elixir_compile.base.process import (
    GROUPS,
    MEMBERSHIPS,
    allowed_cores,
    group_limit_bytes,
    num_usable_cores,
    numbers_in,
)
from elixir_compile.compat.platforms.platform import platform_of

# ----------------------------------------------------------------------------------------------------------------------
# The cores beside a device: threads on them reach the memory node of the device, and take new pages from it.


T = TypeVar("T")


def cores_beside(device: torch.device) -> frozenset[int]:
    """Return the cores of the memory node of `device`; empty for a CPU, or if the system does not tell."""
    address = platform_of(device).pci_address(device)
    return frozenset() if address is None else cores_of_node(address, Path("/sys"))


def cores_of_node(address: str, system: Path) -> frozenset[int]:
    """Return the cores of the memory node of the PCI device at `address`, from files under `system` (`/sys`)."""
    try:
        node = int((system / "bus/pci/devices" / address / "numa_node").read_text(encoding="ascii"))
        return numbers_in((system / f"devices/system/node/node{node}/cpulist").read_text(encoding="ascii").strip())
    except (OSError, ValueError):
        return frozenset()


def bind_thread(cores: Collection[int]) -> None:
    """Bind the calling thread, and threads that it starts later, to `cores`; do nothing if `cores` is empty."""
    if cores:
        os.sched_setaffinity(0, cores)  # 0 is this thread, not the process


def on_cores(cores: Collection[int], work: Callable[[], T]) -> T:
    """Return the result of `work`, run by a thread that is bound to those of `cores` that this process may use.

    Runs it on the calling thread if there are none. An exception of `work` passes through.
    """
    usable = frozenset(cores) & os.sched_getaffinity(0) if cores else frozenset[int]()
    if not usable:
        return work()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            bind_thread(usable)
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="elixir on cores")
    thread.start()
    thread.join()
    if errors:
        raise errors.pop()
    return results[0]


# ----------------------------------------------------------------------------------------------------------------------
# The memory of the host that this process may use, and the ranks that share it.


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


# ----------------------------------------------------------------------------------------------------------------------
# The threads of updates on the host: as many, and on the same cores, in training and in measurements.
#
# number of threads = cores of this process / ranks on this machine - 1 for the training thread, at least 1


class UpdateThreads(NamedTuple):
    """The threads of updates beside a device."""

    num_threads: int
    cores: frozenset[int]
    """The cores to which the threads are bound; empty if they are not bound."""


def update_threads(device: torch.device | None) -> UpdateThreads:
    """Return the threads of updates beside `device`; for None, they are not bound."""
    beside = frozenset() if device is None else allowed_cores() & cores_beside(device)
    num_cores = num_usable_cores()
    return UpdateThreads(num_host_threads(num_cores, num_local_ranks(), len(beside) or num_cores), beside)


def num_host_threads(num_cores: int, num_ranks: int, most: int) -> int:
    """Return the number of threads of a rank: its share of the cores less 1, at least 1 and at most `most`."""
    return max(min(num_cores // num_ranks - 1, most), 1)


def as_update(work: Callable[[], T], threads: UpdateThreads) -> T:
    """Return the result of `work`, run with the threads and on the cores of an update."""

    def run() -> T:
        with at_least_threads(threads.num_threads):
            return work()

    return on_cores(threads.cores, run)


@contextmanager
def at_least_threads(num_threads: int) -> Iterator[None]:
    """Let torch's own kernels use at least `num_threads` threads inside this context."""
    usual = torch.get_num_threads()
    if usual >= num_threads:
        yield
        return
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(usual)
