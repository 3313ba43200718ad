"""What a planner decides, before it is written out as a plan."""

from dataclasses import dataclass

from elixir_compile.ir import Decision
from elixir_compile.search.judge import Ahead
from elixir_compile.search.levels import Level


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """One answer: a level per bucket, a prefetch distance per gather, and why."""

    levels: tuple[Level, ...]
    ahead: Ahead
    step_s: float
    decisions: tuple[Decision, ...]
