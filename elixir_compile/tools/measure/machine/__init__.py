"""Measure the machine of this process as a `Cluster`; each rate comes from real runs.

clock      median seconds of a function, alone or beside another
links      copies between host and device, alone and both at once; all-gather and reduce-scatter by size
rates      matrix products, pointwise kernels, launches, the host's DRAM and updates; all rates in several rounds
limits     the memory that this process may page-lock
cluster    the `Cluster` of all rates and limits, and of the reads and writes of optimizer state on a disk
"""

from elixir_compile.tools.measure.machine.cluster import measure_fleet, measure_machine, with_disk

__all__ = [
    "measure_fleet",
    "measure_machine",
    "with_disk",
]
