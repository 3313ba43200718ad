"""Seconds to carry one bucket over one link: latency_s + bytes / bytes_per_s."""

from elixir_compile.hardware import Link
from elixir_compile.ir.bucket import Bucket


def copy_s(bucket: Bucket, link: Link) -> float:
    """Return the seconds to carry the parameters that one rank owns, or their gradient, between host and device."""
    return link.latency_s + bucket.shard_nbytes() / link.bytes_per_s
