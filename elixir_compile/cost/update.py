"""Seconds of one bucket's optimizer update on the tier where its state lives: numel / update_elements_per_s."""

from elixir_compile.errors import InvalidPlan
from elixir_compile.hardware import Cluster
from elixir_compile.ir.bucket import Bucket
from elixir_compile.ir.kinds import Tier


def update_s(bucket: Bucket, tier: Tier, cluster: Cluster) -> float:
    """Return the seconds to update the bucket, transfers excluded; 0 for a frozen one.

    Raises `InvalidPlan` for a tier that cannot compute.
    """
    if not bucket.trainable:
        return 0.0
    if tier is Tier.DEVICE:
        return cluster.device.launch_s + bucket.numel / cluster.device.update_elements_per_s
    if tier is Tier.HOST:
        return bucket.numel / cluster.host.update_elements_per_s
    raise InvalidPlan(f"bucket {bucket.id}: nothing can be updated on {tier}.")
