"""The spans and peaks of a step. Simulated and measured steps have the same type, so `diff` can compare the two."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from elixir_compile.errors import InvalidPlan
from elixir_compile.ir.kinds import Lane


class Origin(StrEnum):
    SIMULATED = "simulated"
    MEASURED = "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """An action on a lane, with its start and end in seconds since the step began."""

    lane: Lane
    label: str
    start_s: float
    end_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start_s) and math.isfinite(self.end_s) and self.start_s <= self.end_s):
            raise InvalidPlan(f"span {self.label} on {self.lane} lasts from {self.start_s} s to {self.end_s} s.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A step: its spans, its peaks in bytes, and the number of actions by verb."""

    origin: Origin
    step_s: float
    device_peak_bytes: int
    host_peak_bytes: int
    spans: tuple[Span, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    """Number of executed actions by verb: `gather`, `release`, `offload`, `reduce`."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.step_s) and self.step_s >= 0):
            raise InvalidPlan(f"a record says that the step took {self.step_s} s.")
        if min(self.device_peak_bytes, self.host_peak_bytes, *self.counts.values(), 0) < 0:
            raise InvalidPlan("a record holds a negative count or peak.")
