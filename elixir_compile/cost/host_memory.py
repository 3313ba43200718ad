"""Seconds of the host's memory, which its updates and the copies of all devices share, at its full rate.

    a copy       bytes / rate                            an update    what it reads and writes / rate

Over a whole step they add up to no more than the step. The rate is what `measure` saw at once: the update beside copies
both ways. Where that was not measured, it is that of the memory, or what one kind alone takes. Ranks of one node all do
the same. Not modelled: what the ops of a CPU read, and what waits while there is too little for all.
"""

from elixir_compile.hardware import Cluster
from elixir_compile.hardware.paper import ADAM_BYTES_PER_ELEMENT
from elixir_compile.ir.bucket import Bucket


def host_memory_bytes_per_s(cluster: Cluster) -> float:
    """Return the bytes per second that host memory carries, read and written."""
    host, h2d, d2h, num_devices = cluster.host, cluster.h2d, cluster.d2h, cluster.num_local_ranks
    alone = (ADAM_BYTES_PER_ELEMENT * host.update_elements_per_s, num_devices * max(h2d.bytes_per_s, d2h.bytes_per_s))
    if host.busy_update_elements_per_s is None:
        return max(host.memory_bytes_per_s, *alone)
    copies = (h2d.busy_bytes_per_s or h2d.bytes_per_s) + (d2h.busy_bytes_per_s or d2h.bytes_per_s)
    return max(ADAM_BYTES_PER_ELEMENT * host.busy_update_elements_per_s + num_devices * copies, *alone)


def host_memory_s(nbytes: int, cluster: Cluster) -> float:
    """Return the seconds in which every rank of a node reads, or writes, `nbytes` of host memory."""
    return cluster.num_local_ranks * nbytes / host_memory_bytes_per_s(cluster)


def update_bytes(bucket: Bucket) -> int:
    """Return what an update of the host's reads and writes of one rank's part, at most what Adam in fp32 does: state
    and parameters both ways, gradients one way."""
    nbytes = 2 * bucket.shard_state_nbytes() + 3 * bucket.shard_nbytes()
    return min(nbytes, ADAM_BYTES_PER_ELEMENT * bucket.shard_numels[0]) if bucket.trainable else 0
