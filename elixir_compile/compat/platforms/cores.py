"""The cores beside a device: threads on them reach the memory node of the device, and take new pages from it."""

import os
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

import torch

from elixir_compile.base.control_groups import numbers_in
from elixir_compile.compat.platforms.platforms import platform_of

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
