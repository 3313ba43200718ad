"""Measure the rates at which optimizer state is read from and written to the disk of a folder."""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

from elixir_compile.hardware import Cluster
from elixir_compile.runtime.disk.disk_queue import DiskTransfer
from elixir_compile.runtime.disk.disk_store import DiskStore
from elixir_compile.runtime.disk.staging import StagingBuffers
from elixir_compile.units import MIB

_NBYTES = 256 * MIB
"""Twice the bytes after which four threads of 4 MiB reached their rate."""
_NUM_RUNS = 3


def with_disk(cluster: Cluster, disk_path: "str | os.PathLike[str]", nbytes: int = _NBYTES) -> Cluster:
    """Return `cluster` with the rates of the disk of the folder `disk_path`, measured with a file of `nbytes`.

    Raises DiskFailed if the folder cannot be written, DiskFull if the disk is full.
    """
    store = DiskStore(disk_path)
    try:
        region = store.allocate("measure", nbytes)
        buffer = StagingBuffers(1, nbytes).acquire().tensor
        buffer.random_(0, 256)  # random bytes, because a drive may store zeros faster
        region.write_from(buffer).wait()  # not timed, because the first write also allocates the blocks of the file
        write_s = _median_s(lambda: region.write_from(buffer))
        read_s = _median_s(lambda: region.read_into(buffer))
    finally:
        store.close()
    rates = {"disk_read_bytes_per_s": _rounded(nbytes / read_s), "disk_write_bytes_per_s": _rounded(nbytes / write_s)}
    nodes = tuple(replace(node, host=replace(node.host, **rates)) for node in cluster.nodes)
    return replace(cluster, nodes=nodes)


def _median_s(begin: Callable[[], DiskTransfer]) -> float:
    seconds: list[float] = []
    for _ in range(_NUM_RUNS):
        began_s = time.perf_counter()
        begin().wait()
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds)


def _rounded(rate: float) -> float:
    """Return `rate` rounded to four digits, the precision of a measurement."""
    return float(f"{rate:.4g}")
