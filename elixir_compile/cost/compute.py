"""Seconds of one op by the roofline, and measured seconds in its place."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elixir_compile.errors import InvalidPlan
from elixir_compile.hardware import DeviceProfile
from elixir_compile.ir.bucket import Activations
from elixir_compile.ir.graph import Op
from elixir_compile.ir.kinds import OpId


def is_free(op: Op) -> bool:
    """Return whether `op` launches nothing: a view, or what is computed inside its readers."""
    return op.flops == 0 and op.moved_bytes == 0


def op_s(op: Op, device: DeviceProfile, dtype: str = "float32") -> float:
    """Return the seconds that `op` computes; 0 for a view, which launches nothing."""
    if is_free(op):
        return 0.0
    flops_per_s = device.flops_per_s.get(dtype, device.flops_per_s["float32"])
    return device.launch_s + max(op.flops / flops_per_s, op.moved_bytes / device.memory_bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Consecutive ops, `first` to `last` with both ends included, that took `run_s` seconds together."""

    first: OpId
    last: OpId
    run_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.run_s < float("inf"):
            raise InvalidPlan(f"the ops from {self.first} to {self.last} are said to take {self.run_s} s.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Stretches that were measured, which do not overlap, and what was recomputed in the step that they are of."""

    stretches: tuple[Stretch, ...] = ()
    activations: tuple[Activations, ...] = ()


def corrected_s(seconds: Sequence[float], index: Mapping[OpId, int], stretches: Sequence[Stretch]) -> list[float]:
    """Return the seconds of every op, those of each stretch scaled to what the stretch took.

    `index` gives the place of each op in `seconds`; a stretch that names an op it lacks raises `InvalidPlan`.
    """
    found = list(seconds)
    for stretch in stretches:
        if stretch.first not in index or stretch.last not in index:
            raise InvalidPlan(f"measured seconds are of ops {stretch.first} to {stretch.last}, not all in this graph.")
        first, end = index[stretch.first], index[stretch.last] + 1
        priced_s = sum(seconds[first:end])
        for i in range(first, end):
            share = seconds[i] / priced_s if priced_s > 0 else 1 / (end - first)
            found[i] = stretch.run_s * share
    return found
