"""Planners for comparison: the rules of other systems, and the enumeration of all candidates of a small problem."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from elixir_compile.base.options import Planner
from elixir_compile.base.units import format_s
from elixir_compile.ir import Decision
from elixir_compile.ir.hardware.presets import PaperRates, paper_rates
from elixir_compile.search.evaluator import DraftPlan, Evaluator
from elixir_compile.search.heuristics.streaming import best_moves
from elixir_compile.search.space.levels import Level, level_text
from elixir_compile.search.space.modes import mode_text

Levels = tuple[Level, ...]


def gathers_first(num_ranks: int, rates: PaperRates, *, item_bytes: int = 2, master_bytes: int = 4) -> bool:
    """Return the decision of the Elixir paper: whether free memory goes to gathered copies before optimizer state.

    A kept gathered copy (rCache) saves I seconds per element, its optimizer state on the device saves J seconds:

        I = e_p / c2g + e_p / g2c
        J = n / r_os * (e_o / c2g + I + e_p / g2c + 1 / v_cpu - 1 / v_gpu)

    with e_p (`item_bytes`) and e_o (`master_bytes`) bytes of an element and of its master, and r_os = 7 bytes of
    optimizer state per byte of the parameter, as for Adam in mixed precision. Source: arXiv 2212.05339.
    """
    to_device, to_host = rates.h2d_bytes_per_s, rates.d2h_bytes_per_s
    gathered_s = item_bytes / to_device + item_bytes / to_host
    update_s = 1 / rates.host_update_elements_per_s - 1 / rates.device_update_elements_per_s
    state_s = num_ranks / 7 * (master_bytes / to_device + gathered_s + item_bytes / to_host + update_s)
    return gathered_s > state_s


def _everywhere(evaluator: Evaluator, wanted: Sequence[Level]) -> Levels:
    """Return, for each bucket, the first of the levels `wanted` among its choices, or its level in force if none is."""
    return tuple(
        next((level for level in wanted if level in choices), choices[0]) for choices in evaluator.facts.choices
    )


def _keep_all(evaluator: Evaluator) -> Levels:
    return evaluator.facts.start_levels


def _zero_offload(evaluator: Evaluator) -> Levels:
    return _everywhere(evaluator, (Level.STATE_OFF,))


def _zero3_offload(evaluator: Evaluator) -> Levels:
    return evaluator.facts.furthest_levels


def _fsdp_offload(evaluator: Evaluator) -> Levels:
    kept = _everywhere(evaluator, (Level.ON_DEVICE_RELEASED, Level.ON_DEVICE))
    return kept if evaluator.fits(kept, ahead=0) else evaluator.facts.furthest_levels


def _elixir(evaluator: Evaluator) -> Levels:
    """Return the Elixir paper's levels: all on the host, then free memory filled with copies or optimizer state first.

    The paper's search keeps copies in the order of Belady's rule for a chain that runs forward and then back: with
    memory for k of K equal chunks it loads 2K - k times, as does keeping any k chunks from forward to backward.
    """
    num_ranks = evaluator.facts.problem.num_shards
    order = (Level.ALL_OFF, Level.ON_DEVICE)
    if not gathers_first(num_ranks, paper_rates(num_ranks)):
        order = (Level.ON_DEVICE, Level.ALL_OFF)
    levels = list(evaluator.facts.furthest_levels)
    memory, budget_bytes = evaluator.memory, evaluator.facts.problem.budget_bytes
    # `own_bytes` is exact on several ranks, and a bucket moved closer to the device takes no more host bytes. So levels
    # within the budget by these bytes fit, without a count of the entire step.
    is_exact = num_ranks > 1 and not evaluator.facts.streamed and evaluator.fits(levels, ahead=0)
    own_bytes = memory.own_bytes()
    live_bytes = memory.rest_bytes + sum(own_bytes[i, level] for i, level in enumerate(levels))
    for wanted in order:
        # The last layers are used last in the forward and first in the backward: their copies wait the shortest.
        for bucket in reversed(range(len(levels))):
            before = levels[bucket]
            if wanted not in evaluator.facts.choices[bucket] or wanted >= before:
                continue
            more_bytes = own_bytes[bucket, wanted] - own_bytes[bucket, before]
            # This count is never above the real bytes, so a level above the budget by this count does not fit.
            if int((live_bytes + more_bytes).max()) > budget_bytes:
                continue
            levels[bucket] = wanted
            if is_exact or evaluator.fits(levels, ahead=0):
                live_bytes = live_bytes + more_bytes
            else:
                levels[bucket] = before
    return tuple(levels)


RULES: Mapping[str, Callable[[Evaluator], Levels]] = {
    "elixir": _elixir,
    "zero3_offload": _zero3_offload,
    "zero_offload": _zero_offload,
    "fsdp_offload": _fsdp_offload,
    "keep_all": _keep_all,
}


def drafted(evaluator: Evaluator, levels: Sequence[Level], planner: Planner) -> DraftPlan:
    """Return the draft plan of `levels`, which fit, with the best moves found for them."""
    moves, step_s = best_moves(evaluator, levels)
    moved = tuple(
        Decision(subject=bucket.id, choice=level_text(level), because=f"the rule {planner} puts it there")
        for bucket, level, start in zip(evaluator.facts.buckets, levels, evaluator.facts.start_levels, strict=True)
        if level != start
    )
    return DraftPlan(
        levels=tuple(levels),
        modes=evaluator.facts.modes,
        moves=moves,
        step_s=step_s,
        decisions=moved,
        planner=planner,
    )


MAX_PLACEMENTS = 4096
"""The most candidates that are enumerated, such as four levels of six buckets; they take a few seconds."""


def num_placements(evaluator: Evaluator) -> int:
    """Return the number of candidates: of combinations of levels and modes."""
    return math.prod(len(options) for options in (*evaluator.facts.choices, *_modes(evaluator)))


def place_exhaustively(evaluator: Evaluator) -> DraftPlan | None:
    """Return the fastest draft plan of all candidates, among equals with the fewest host bytes.

    None if no candidate fits, or if there are more than `MAX_PLACEMENTS`. On a host of few bytes it finds plans that
    greedy moves miss: in 1 of 50 random problems of up to six buckets that have a plan.
    """
    count = num_placements(evaluator)
    if count > MAX_PLACEMENTS:
        return None
    best: tuple[float, int, DraftPlan] | None = None
    for modes in itertools.product(*_modes(evaluator)):
        here = evaluator.at(modes)
        for levels in itertools.product(*evaluator.facts.choices):
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
    return replace(draft, decisions=decisions)
