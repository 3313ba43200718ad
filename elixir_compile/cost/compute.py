"""Seconds of ops: by the roofline model, or as measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elixir_compile.errors import InvalidPlan
from elixir_compile.hardware import DeviceProfile
from elixir_compile.ir.bucket import Activations
from elixir_compile.ir.graph import Op
from elixir_compile.ir.kinds import OpId


def is_free(op: Op) -> bool:
    """Return whether `op` launches no kernel: a view, or a result computed inside its readers."""
    return op.flops == 0 and op.moved_bytes == 0


def op_s(op: Op, device: DeviceProfile, dtype: str = "float32") -> float:
    """Return the seconds of `op` on `device` by the roofline model, or 0 if it launches no kernel."""
    if is_free(op):
        return 0.0
    flops_per_s = device.flops_per_s.get(dtype, device.flops_per_s["float32"])
    return device.launch_s + max(op.flops / flops_per_s, op.moved_bytes / device.memory_bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Consecutive ops, from `first` to `last` (included), with their measured seconds together."""

    first: OpId
    last: OpId
    run_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.run_s < float("inf"):
            raise InvalidPlan(f"the ops from {self.first} to {self.last} took {self.run_s} s; expected 0 or more.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measured stretches, which do not overlap, and the activations that were recomputed or offloaded in that step."""

    stretches: tuple[Stretch, ...] = ()
    activations: tuple[Activations, ...] = ()


def corrected_s(seconds: Sequence[float], index: Mapping[OpId, int], stretches: Sequence[Stretch]) -> list[float]:
    """Return the seconds of every op, with the ops of each stretch scaled to its measured seconds.

    `index` is the place of each op in `seconds`. Raises InvalidPlan if a stretch names an op without a place.
    """
    found = list(seconds)
    for stretch in stretches:
        if stretch.first not in index or stretch.last not in index:
            raise InvalidPlan(f"measured ops {stretch.first} to {stretch.last} are not all in this graph.")
        first, end = index[stretch.first], index[stretch.last] + 1
        priced_s = sum(seconds[first:end])
        for i in range(first, end):
            share = seconds[i] / priced_s if priced_s > 0 else 1 / (end - first)
            found[i] = stretch.run_s * share
    return found
