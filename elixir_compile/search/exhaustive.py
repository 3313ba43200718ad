"""Every placement of a few buckets, the simulator as judge: slow, and the oracle of the other planners."""

import itertools
import math
from dataclasses import replace

from elixir_compile.errors import InvalidOption
from elixir_compile.ir import Decision
from elixir_compile.search.draft import Draft
from elixir_compile.search.judge import Judge
from elixir_compile.search.levels import level_text
from elixir_compile.search.prefetch import raise_prefetch
from elixir_compile.units import format_s

MAX_PLACEMENTS = 4096
"""Four levels of six buckets; a few seconds."""


def num_placements(judge: Judge) -> int:
    """Return how many placements there are to try."""
    return math.prod(len(levels) for levels in judge.facts.choices)


def place_exhaustively(judge: Judge) -> Draft | None:
    """Return the fastest placement that fits, of equal ones that with the fewest host bytes; None when none fits.

    Raises `InvalidOption` when there are more than `MAX_PLACEMENTS`.
    """
    choices = judge.facts.choices
    count = num_placements(judge)
    if count > MAX_PLACEMENTS:
        raise InvalidOption(
            "planner",
            "exhaustive",
            f"'greedy': {len(choices)} buckets have {count} placements, too many to try",
        )
    best: tuple[float, int, Draft] | None = None
    for levels in itertools.product(*choices):
        if not judge.fits(levels, ahead=0):
            continue
        moves = raise_prefetch(judge, levels)
        step_s = judge.step_s(levels, moves)
        if best is None or (step_s, judge.host_bytes(levels)) < best[:2]:
            draft = Draft(levels=levels, moves=moves, step_s=step_s, decisions=())
            best = (step_s, judge.host_bytes(levels), draft)
    return None if best is None else _explained(judge, best[2], count)


def _explained(judge: Judge, draft: Draft, count: int) -> Draft:
    decisions = tuple(
        Decision(
            subject=bucket.id,
            choice=level_text(level),
            because=f"the fastest of {count} placements, {format_s(draft.step_s)} per step",
        )
        for bucket, level, start in zip(judge.facts.buckets, draft.levels, judge.facts.start_levels, strict=True)
        if level != start
    )
    return replace(draft, decisions=decisions, planner="exhaustive")
