"""Seconds of ops, transfers and updates on a machine, in closed forms. More bytes never take fewer seconds."""

from elixir_compile.cost.compute import Measured, Stretch, corrected_s, is_free, op_s
from elixir_compile.cost.transfer import average_s, collective_s, copy_s, disk_s
from elixir_compile.cost.update import host_memory_s, stream_bytes, stream_s, streamed_bytes, update_bytes, update_s

__all__ = [
    "Measured",
    "Stretch",
    "average_s",
    "collective_s",
    "copy_s",
    "corrected_s",
    "disk_s",
    "host_memory_s",
    "is_free",
    "op_s",
    "stream_bytes",
    "stream_s",
    "streamed_bytes",
    "update_bytes",
    "update_s",
]
