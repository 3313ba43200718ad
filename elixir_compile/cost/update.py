"""Seconds of one bucket's optimizer update on the tier where its state lives: numel / update_elements_per_s.

The ranks of one node share its host.
"""

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
