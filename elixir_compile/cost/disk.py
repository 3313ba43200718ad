"""Seconds of one bucket's optimizer state to the disk and back again.

Only bytes count: a latency is nothing beside a block of 4 MiB."""

from elixir_compile.hardware import Cluster
from elixir_compile.ir.bucket import Bucket

ROUGH_DISK_BYTES_PER_S = 1e9
"""Order of magnitude of one NVMe drive that others use too; ranks choices, predicts nothing."""


def disk_s(bucket: Bucket, cluster: Cluster) -> float:
    """Return the seconds in which one rank reads what state it owns and writes it back, all ranks of a node sharing
    the disk."""
    nbytes = bucket.shard_state_nbytes() * cluster.num_local_ranks
    read_per_s = cluster.host.disk_read_bytes_per_s or ROUGH_DISK_BYTES_PER_S
    write_per_s = cluster.host.disk_write_bytes_per_s or ROUGH_DISK_BYTES_PER_S
    return nbytes / read_per_s + nbytes / write_per_s
