"""Measure the machine of this process as a `Cluster`; each rate comes from real runs.

clock         median seconds of a function, alone or beside another
copies        host to device, device to host, and both at once
updates       AdamW on the device, on the host, and on a host busy with copies
kernels       matrix products, pointwise kernels, the launch of an op, and the host's DRAM
collectives   all-gather and reduce-scatter by size
disk          reads and writes of optimizer state
rates         all rates, in several rounds
limits        the cores and the memory of this process
cluster       the `Cluster` of all rates and limits
"""

from elixir_compile.measure.machine.cluster import measure_machine
from elixir_compile.measure.machine.disk import with_disk
from elixir_compile.measure.machine.limits import (
    allowed_cores,
    available_host_bytes,
    memory_sizes_bytes,
    num_local_ranks,
    num_usable_cores,
)

__all__ = [
    "allowed_cores",
    "available_host_bytes",
    "measure_machine",
    "memory_sizes_bytes",
    "num_local_ranks",
    "num_usable_cores",
    "with_disk",
]
