"""What a planner decides, before it is written out as a plan."""

from dataclasses import dataclass
from typing import NamedTuple

from elixir_compile.ir import Decision
from elixir_compile.search.space.levels import Level
from elixir_compile.search.space.residency import Moves


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What is proved about every plan for a problem."""

    bound_s: float
    """No plan takes less."""
    binding: tuple[str, ...]
    """What is full at the optimum of the bound, in words."""
    gib_saves_s: float | None
    """By how much the bound falls with one more GiB of device memory; None where there was no time to tell."""


class Candidate(NamedTuple):
    """A level for every bucket and a mode for every layer."""

    levels: tuple[Level, ...]
    modes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """One candidate: a level per bucket, a mode per layer, when things move, and why."""

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
