"""Seconds of one op, by the roofline: the slower of arithmetic and memory, plus a launch.

    op_s = launch_s + max(flops / flops_per_s[dtype], moved_bytes / memory_bytes_per_s)

It does not model fusion, caches or small shapes.
"""

from elixir_compile.hardware import DeviceProfile
from elixir_compile.ir.graph import Op


def is_free(op: Op) -> bool:
    """Return whether `op` launches nothing: a view, or what is computed inside its readers."""
    return op.flops == 0 and op.moved_bytes == 0


def op_s(op: Op, device: DeviceProfile, dtype: str = "float32") -> float:
    """Return the seconds that `op` computes; 0 for a view, which launches nothing."""
    if is_free(op):
        return 0.0
    flops_per_s = device.flops_per_s.get(dtype, device.flops_per_s["float32"])
    return device.launch_s + max(op.flops / flops_per_s, op.moved_bytes / device.memory_bytes_per_s)
