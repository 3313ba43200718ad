"""The threads of updates on the host: as many, and on the same cores, in training and in measurements.

number of threads = cores of this process / ranks on this machine - 1 for the training thread, at least 1
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch

from elixir_compile.base.control_groups import allowed_cores, num_usable_cores
from elixir_compile.compat.platforms.cores import cores_beside, on_cores
from elixir_compile.compat.platforms.host import num_local_ranks

T = TypeVar("T")


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
