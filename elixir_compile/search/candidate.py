"""The values compared by planners: candidates, draft plans and their certificates."""

from dataclasses import dataclass
from typing import NamedTuple

from elixir_compile.ir import Decision
from elixir_compile.search.space.levels import Level
from elixir_compile.search.space.residency import Moves


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The bound of a problem, and the limits that hold it up."""

    bound_s: float
    """Every plan for the problem takes at least so many seconds."""
    binding: tuple[str, ...]
    """The full lanes and memories at the relaxed optimum, in words."""
    gib_saves_s: float | None
    """Seconds by which the bound falls with one more GiB of device memory; None if the time was too short to tell."""


class Candidate(NamedTuple):
    """A level for every bucket and a mode for every layer."""

    levels: tuple[Level, ...]
    modes: tuple[int, ...]
    """Indices into the `modes` of each layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """A candidate with the times of its transfers, its simulated seconds, and the reasons for its choices."""

    levels: tuple[Level, ...]
    moves: Moves
    step_s: float
    modes: tuple[int, ...]
    decisions: tuple[Decision, ...]
    planner: str = "greedy"
    certificate: Certificate | None = None

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.levels, self.modes)
