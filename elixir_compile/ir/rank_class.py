"""What the plans of ranks that differ say about each other: a line for each class of like ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from elixir_compile.errors import InvalidPlan
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

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 0:
            raise InvalidPlan(f"a class has the ranks {self.ranks}; expected at least one, each 0 or more.")
        if not (math.isfinite(self.busy_share) and 0 <= self.busy_share <= 1):
            raise InvalidPlan(
                f"ranks {spans_text(self.ranks)} are busy for {self.busy_share} of a step; expected 0 to 1."
            )
        if min(self.budget_bytes, self.device_peak_bytes, self.host_peak_bytes) < 0:
            raise InvalidPlan(f"ranks {spans_text(self.ranks)} have negative bytes.")

    def __str__(self) -> str:
        line = f"{spans_text(self.ranks):<6}  {word(self.device)}  budget {self.budget_bytes}"
        line += f"  peak {self.device_peak_bytes}  host {self.host_peak_bytes}  busy {real(self.busy_share)}"
        return f"{line}  pressed" if self.is_pressed else line


def spans_text(ranks: Sequence[int]) -> str:
    """Return `ranks` as numbers and spans of them: `0-2,5`."""
    found = sorted(set(ranks))
    cuts = [place for place, (a, b) in enumerate(pairwise(found), start=1) if b != a + 1]
    runs = [found[start:end] for start, end in zip([0, *cuts], [*cuts, len(found)], strict=True)]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
