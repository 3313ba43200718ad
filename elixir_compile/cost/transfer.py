"""Seconds to carry bytes over one link: num_copies * latency_s + bytes / bytes_per_s."""

from elixir_compile.hardware import Link


def copy_s(nbytes: int, link: Link, num_copies: int = 1) -> float:
    """Return the seconds to carry `nbytes` between host and device in `num_copies` copies, one after another."""
    return num_copies * link.latency_s + nbytes / link.bytes_per_s
