"""Seconds of optimizer updates, and of the host memory shared by updates and copies."""

from elixir_compile.cost.transfer import copy_s
from elixir_compile.errors import InvalidPlan
from elixir_compile.hardware import Cluster
from elixir_compile.hardware.presets import ADAM_BYTES_PER_ELEMENT
from elixir_compile.ir.bucket import Bucket
from elixir_compile.ir.kinds import Tier


def host_memory_bytes_per_s(cluster: Cluster) -> float:
    """Return the bytes per second that host memory can read and write in all."""
    host, h2d, d2h, num_devices = cluster.host, cluster.h2d, cluster.d2h, cluster.num_local_ranks
    alone = (ADAM_BYTES_PER_ELEMENT * host.update_elements_per_s, num_devices * max(h2d.bytes_per_s, d2h.bytes_per_s))
    if host.busy_update_elements_per_s is None:
        return max(host.memory_bytes_per_s, *alone)
    copies = (h2d.busy_bytes_per_s or h2d.bytes_per_s) + (d2h.busy_bytes_per_s or d2h.bytes_per_s)
    return max(ADAM_BYTES_PER_ELEMENT * host.busy_update_elements_per_s + num_devices * copies, *alone)


def host_memory_s(nbytes: int, cluster: Cluster) -> float:
    """Return the seconds for every rank of a node to read or write `nbytes` of host memory."""
    return cluster.num_local_ranks * nbytes / host_memory_bytes_per_s(cluster)


def update_bytes(bucket: Bucket) -> int:
    """Return the bytes of host memory that an update of `bucket` reads and writes on a rank.

    State and parameters are read and written, gradients are read. The result is at most the bytes of Adam in fp32.
    """
    nbytes = 2 * bucket.shard_state_nbytes() + 3 * bucket.shard_nbytes()
    return min(nbytes, ADAM_BYTES_PER_ELEMENT * bucket.shard_numels[0]) if bucket.trainable else 0


def update_s(bucket: Bucket, tier: Tier, cluster: Cluster) -> float:
    """Return the seconds of the update of `bucket` by the device or the host, without transfers; 0 if it is frozen.

    Raises InvalidPlan if `tier` is the disk.
    """
    if not bucket.trainable:
        return 0.0
    numel = bucket.shard_numels[0]
    if tier is Tier.DEVICE:
        return cluster.device.launch_s + numel / cluster.device.update_elements_per_s
    if tier is Tier.HOST:
        return numel * cluster.num_local_ranks / cluster.host.update_elements_per_s
    raise InvalidPlan(f"bucket {bucket.id}: nothing can be updated on {tier}.")


def streamed_bytes(bucket: Bucket, param: Tier, rank: int = 0) -> int:
    """Return the device bytes of a streamed update on `rank`; `param` is the home of the parameters."""
    there_bytes = 0 if param is Tier.DEVICE else bucket.shard_nbytes(rank) + bucket.update_grad_nbytes(rank)
    return bucket.shard_state_nbytes(rank) + there_bytes


def stream_s(bucket: Bucket, param: Tier, cluster: Cluster) -> tuple[float, float]:
    """Return the seconds of the copies of a streamed update to the device and back; `param` is the parameters' home.

    Each moment (two, as of Adam), parameter and gradient is a copy of its own.
    """
    there_bytes, back_bytes = stream_bytes(bucket, param)
    num_states, num_params = 2 * len(bucket.params), 0 if param is Tier.DEVICE else len(bucket.params)
    return (
        copy_s(there_bytes, cluster.h2d, num_states + 2 * num_params),
        copy_s(back_bytes, cluster.d2h, num_states + num_params),
    )


def stream_bytes(bucket: Bucket, param: Tier) -> tuple[int, int]:
    """Return the bytes that a streamed update copies to the device and back on a rank."""
    back_bytes = bucket.shard_state_nbytes() + (0 if param is Tier.DEVICE else bucket.shard_nbytes())
    return streamed_bytes(bucket, param), back_bytes
