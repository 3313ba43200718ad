"""Measure the machine of this process as a `Cluster`; each rate comes from real runs.

clock      median seconds of a function, alone or beside another
links      copies between host and device, alone and both at once; all-gather and reduce-scatter by size
rates      matrix products, pointwise kernels, launches, the host's DRAM and updates; all rates in several rounds
limits     the memory of this process, and the ranks that share it
cluster    the `Cluster` of all rates and limits, and of the reads and writes of optimizer state on a disk
"""

from elixir_compile.measure.machine.cluster import measure_fleet, measure_machine, with_disk
from elixir_compile.measure.machine.limits import (
    available_host_bytes,
    host_memory_bytes,
    memory_sizes_bytes,
    num_local_ranks,
)

__all__ = [
    "available_host_bytes",
    "host_memory_bytes",
    "measure_fleet",
    "measure_machine",
    "memory_sizes_bytes",
    "num_local_ranks",
    "with_disk",
]
