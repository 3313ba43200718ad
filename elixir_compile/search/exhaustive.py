"""Every level of a few buckets with every mode of a few layers, the simulator as evaluator: slow, the oracle of the other
planners."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from elixir_compile.errors import InvalidOption
from elixir_compile.ir import Decision
from elixir_compile.search.draft import DraftPlan
from elixir_compile.search.judge import Evaluator
from elixir_compile.search.levels import level_text
from elixir_compile.search.modes import mode_text
from elixir_compile.search.streaming import best_moves
from elixir_compile.units import format_s

MAX_PLACEMENTS = 4096
"""Four levels of six buckets; a few seconds."""


def num_placements(evaluator: Evaluator) -> int:
    """Return how many placements there are to try."""
    return math.prod(len(options) for options in (*evaluator.facts.choices, *_modes(evaluator)))


def place_exhaustively(evaluator: Evaluator) -> DraftPlan | None:
    """Return the fastest placement that fits, of equal ones that with the fewest host bytes; None when none fits.

    Raises `InvalidOption` when there are more than `MAX_PLACEMENTS`.
    """
    choices = evaluator.facts.choices
    count = num_placements(evaluator)
    if count > MAX_PLACEMENTS:
        raise InvalidOption(
            "planner",
            "exhaustive",
            f"'greedy': {len(choices)} buckets and {len(_modes(evaluator))} layers have {count} candidates, too many to try",
        )
    best: tuple[float, int, DraftPlan] | None = None
    for modes in itertools.product(*_modes(evaluator)):
        here = evaluator.at(modes)
        for levels in itertools.product(*choices):
            if not here.fits(levels, ahead=0):
                continue
            moves, step_s = best_moves(here, levels, math.inf if best is None else best[0])
            if best is None or (step_s, here.host_bytes(levels)) < best[:2]:
                draft = DraftPlan(levels=levels, modes=modes, moves=moves, step_s=step_s, decisions=())
                best = (step_s, here.host_bytes(levels), draft)
    return None if best is None else _explained(evaluator, best[2], count)


def _modes(evaluator: Evaluator) -> list[Sequence[int]]:
    return [range(len(layer.modes)) for layer in evaluator.facts.layers]


def _explained(evaluator: Evaluator, draft: DraftPlan, count: int) -> DraftPlan:
    facts = evaluator.facts
    because = f"the fastest of {count} candidates, {format_s(draft.step_s)} per step"
    placed = [
        (str(bucket.id), level_text(level))
        for bucket, level, start in zip(facts.buckets, draft.levels, facts.start_levels, strict=True)
        if level != start
    ]
    placed += [
        (layer.name or "step", mode_text(layer, layer.modes[mode]))
        for layer, mode in zip(facts.layers, draft.modes, strict=True)
        if mode
    ]
    decisions = tuple(Decision(subject=subject, choice=choice, because=because) for subject, choice in placed)
    return replace(draft, decisions=decisions, planner="exhaustive")
