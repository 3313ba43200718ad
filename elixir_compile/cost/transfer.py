"""Seconds of transfers: over a link, in a collective of ranks, and to the disk and back."""

from elixir_compile.hardware import Cluster, Link
from elixir_compile.ir.bucket import Bucket


def copy_s(nbytes: int, link: Link, num_copies: int = 1) -> float:
    """Return the seconds to copy `nbytes` between host and device in `num_copies` consecutive copies."""
    return num_copies * link.latency_s + nbytes / link.bytes_per_s


def collective_s(nbytes: int, cluster: Cluster, num_copies: int = 1) -> float:
    """Return the seconds of an all-gather or a reduce-scatter of `nbytes` in all over the ranks of a copy; 0 for a
    single rank."""
    num_parts = cluster.num_ranks // num_copies
    is_within_a_node = cluster.num_local_ranks % num_parts == 0
    return _ring_s(nbytes, num_parts, cluster.nodes[0].peer if is_within_a_node else cluster.collective)


def average_s(nbytes: int, cluster: Cluster, num_copies: int) -> float:
    """Return the seconds of the all-reduces over copies, of `nbytes` on each rank; 0 for a single copy.

    All parts of a bucket are averaged at the same time. Between nodes they share the network of a node; within a node
    each device has its own link.
    """
    num_at_once = min(cluster.num_ranks // num_copies, cluster.num_local_ranks) if len(cluster.nodes) > 1 else 1
    return 2 * _ring_s(nbytes * num_at_once, num_copies, cluster.collective)


def _ring_s(nbytes: int, num_ranks: int, link: Link | None) -> float:
    if link is None or num_ranks == 1:
        return 0.0
    return (num_ranks - 1) * (link.latency_s + nbytes / num_ranks / link.bytes_per_s)


ROUGH_DISK_BYTES_PER_S = 1e9
"""Order of magnitude of a shared NVMe drive: good enough to compare placements, not to predict seconds."""


def disk_s(bucket: Bucket, cluster: Cluster) -> float:
    """Return the seconds to read and write back the optimizer state of `bucket` on each rank of a node, which share the
    disk."""
    nbytes = bucket.shard_state_nbytes() * cluster.num_local_ranks
    read_per_s = cluster.host.disk_read_bytes_per_s or ROUGH_DISK_BYTES_PER_S
    write_per_s = cluster.host.disk_write_bytes_per_s or ROUGH_DISK_BYTES_PER_S
    return nbytes / read_per_s + nbytes / write_per_s
