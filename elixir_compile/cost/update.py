"""Seconds of one bucket's optimizer update on the tier where it happens: numel / update_elements_per_s.

The ranks of one node share its host. State that lives on the host can be streamed, updated on the device for the price
of two copies:

    there   state, and parameters and gradients that live on the host
    back    state, and parameters that live on the host
"""

from elixir_compile.cost.transfer import copy_s
from elixir_compile.errors import InvalidPlan
from elixir_compile.hardware import Cluster
from elixir_compile.ir.bucket import Bucket
from elixir_compile.ir.kinds import Tier


def update_s(bucket: Bucket, tier: Tier, cluster: Cluster) -> float:
    """Return the seconds in which one rank updates what it owns, transfers excluded; 0 for a frozen bucket.

    Raises `InvalidPlan` for a tier that cannot compute.
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
    """Return the device bytes that a streamed update of what `rank` owns takes, of parameters that live on `param`."""
    there_bytes = 0 if param is Tier.DEVICE else bucket.shard_nbytes(rank) + bucket.update_grad_nbytes(rank)
    return bucket.shard_state_nbytes(rank) + there_bytes


def stream_s(bucket: Bucket, param: Tier, cluster: Cluster) -> tuple[float, float]:
    """Return the seconds of the copies to the device and back, of parameters that live on `param`.

    Each of Adam's two moments, and each parameter and gradient, is a copy of its own.
    """
    there_bytes, back_bytes = stream_bytes(bucket, param)
    num_states, num_params = 2 * len(bucket.params), 0 if param is Tier.DEVICE else len(bucket.params)
    return (
        copy_s(there_bytes, cluster.h2d, num_states + 2 * num_params),
        copy_s(back_bytes, cluster.d2h, num_states + num_params),
    )


def stream_bytes(bucket: Bucket, param: Tier) -> tuple[int, int]:
    """Return the bytes that a streamed update of one rank's part carries to the device and back."""
    back_bytes = bucket.shard_state_nbytes() + (0 if param is Tier.DEVICE else bucket.shard_nbytes())
    return streamed_bytes(bucket, param), back_bytes
