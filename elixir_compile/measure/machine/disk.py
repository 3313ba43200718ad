"""A folder -> how fast optimizer state is read from the disk it is on, and written there."""

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
"""Four threads of 4 MiB reached their rate within half of it."""
_NUM_RUNS = 3


def with_disk(cluster: Cluster, disk_path: "str | os.PathLike[str]", nbytes: int = _NBYTES) -> Cluster:
    """Return `cluster` with the rates of the disk that the folder `disk_path` is on, measured with `nbytes`.

    Raises DiskFailed where it is no folder that can be written, and DiskFull.
    """
    store = DiskStore(disk_path)
    try:
        region = store.allocate("measure", nbytes)
        buffer = StagingBuffers(1, nbytes).acquire().tensor
        buffer.random_(0, 256)  # a drive may be faster with zeros
        region.write_from(buffer).wait()  # the first write also makes the extents
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
    """Return `rate` with the four digits that a measurement may carry."""
    return float(f"{rate:.4g}")
