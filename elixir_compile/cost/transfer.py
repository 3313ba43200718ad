"""Seconds to carry one bucket over one link: latency_s + bytes / bytes_per_s."""

from elixir_compile.hardware import Link
from elixir_compile.ir.bucket import Bucket


def gather_s(bucket: Bucket, link: Link) -> float:
    """Return the seconds to bring the bucket's parameters from the host to the device."""
    return link.latency_s + bucket.nbytes / link.bytes_per_s


def offload_s(bucket: Bucket, link: Link) -> float:
    """Return the seconds to take the bucket's gradient, as large as its parameters, from the device to the host."""
    return link.latency_s + bucket.nbytes / link.bytes_per_s
