"""What the plans of ranks that differ say about each other: a line for each class of like ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from elixir_compile.base.codec import LEFT_OUT
from elixir_compile.base.errors import InvalidPlan
from elixir_compile.ir.words import real, word


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClass:
    """Ranks with like devices and memory, which follow plans with the same homes and activations."""

    ranks: tuple[int, ...]
    device: str
    """The name of the profile of their device."""
    budget_bytes: int
    device_peak_bytes: int
    host_peak_bytes: int
    busy_share: float
    """The share of the step in which their devices compute, 0 to 1, if all ranks are simulated together."""
    is_pressed: bool
    """Whether their plan keeps optimizer state off the device, or offloads or recomputes activations."""

    num_rows: int | None = field(default=None, metadata=LEFT_OUT)
    """Rows of the batch that each of them trains; None in a plan file of an earlier version."""
    micro_batches: int = field(default=1, metadata=LEFT_OUT)
    """Micro-batches in which they run their rows."""
    state: float | None = field(default=None, metadata=LEFT_OUT)
    """The part of the training state that each of them owns, 0 to 1; None in a plan file of an earlier version."""

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 0:
            raise InvalidPlan(f"a class has the ranks {self.ranks}; expected at least one, each 0 or more.")
        if not (math.isfinite(self.busy_share) and 0 <= self.busy_share <= 1):
            raise InvalidPlan(
                f"ranks {spans_text(self.ranks)} are busy for {self.busy_share} of a step; expected 0 to 1."
            )
        if (self.num_rows or 0) < 0 or self.micro_batches < 1 or not 0 <= (self.state or 0) <= 1:
            raise InvalidPlan(
                f"ranks {spans_text(self.ranks)} have {self.num_rows} rows in {self.micro_batches} micro-batches, and "
                f"{self.state} of the state; expected 0 or more rows in 1 or more, and 0 to 1."
            )
        if min(self.budget_bytes, self.device_peak_bytes, self.host_peak_bytes) < 0:
            raise InvalidPlan(f"ranks {spans_text(self.ranks)} have negative bytes.")

    def __str__(self) -> str:
        line = f"{spans_text(self.ranks):<6}  {word(self.device)}  budget {self.budget_bytes}"
        line += f"  peak {self.device_peak_bytes}  host {self.host_peak_bytes}  busy {real(self.busy_share)}"
        line += "" if self.num_rows is None else f"  rows {self.num_rows}"
        line += f"  micro-batches {self.micro_batches}" if self.micro_batches > 1 else ""
        line += "" if self.state is None else f"  state {real(self.state)}"
        return f"{line}  pressed" if self.is_pressed else line


def spans_text(ranks: Sequence[int]) -> str:
    """Return `ranks` as numbers and spans of them: `0-2,5`."""
    found = sorted(set(ranks))
    cuts = [place for place, (a, b) in enumerate(pairwise(found), start=1) if b != a + 1]
    runs = [found[start:end] for start, end in zip([0, *cuts], [*cuts, len(found)], strict=True)]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
