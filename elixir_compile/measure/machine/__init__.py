"""The machine this runs on -> `Cluster`, every rate from real runs.

sizes         how much memory there is          clock    seconds of one thing, alone or beside another
copies        h2d, d2h and both at once         updates  Adam on the device, on the host, on a busy host
kernels       matrix products, pointwise, launch, DRAM   collectives  all-gather and reduce-scatter by size
rounds        all rates, several times over             disk     reads and writes of optimizer state
cores         how many this process may keep busy       groups   the control groups that say so
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
