"""Choose levels without a solver: the greedy planner, and for comparison the rules of other systems and the enumeration
of all candidates of a small problem.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elixir_compile.base.options import Planner
from elixir_compile.base.units import format_bytes, format_s
from elixir_compile.ir import Decision
from elixir_compile.ir.hardware.presets import PaperRates, paper_rates
from elixir_compile.search.evaluator import MAX_AHEAD, DraftPlan, Evaluator
from elixir_compile.search.outer import decision
from elixir_compile.search.space.buckets import Level
from elixir_compile.search.space.facts import Facts
from elixir_compile.search.space.profiles import moves_at_use
from elixir_compile.search.transfers import best_draft

# ----------------------------------------------------------------------------------------------------------------------
# Planners for comparison: the rules of other systems, and the enumeration of all candidates of a small problem.


Levels = tuple[Level, ...]


def gathers_first(num_ranks: int, rates: PaperRates) -> bool:
    """Return the decision of the Elixir paper: whether free memory goes to gathered copies before optimizer state.

    A kept gathered copy (rCache) saves I seconds per element, its optimizer state on the device saves J seconds:

        I = e_p / c2g + e_p / g2c
        J = n / r_os * (e_o / c2g + I + e_p / g2c + 1 / v_cpu - 1 / v_gpu)

    with e_p = 2 and e_o = 4 bytes of an element and of its master, and r_os = 7 bytes of optimizer state per byte of
    the parameter, as for Adam in mixed precision. Source: arXiv 2212.05339.
    """
    item_bytes, master_bytes = 2, 4
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
    "zero3_offload": lambda evaluator: evaluator.facts.furthest_levels,
    "zero_offload": lambda evaluator: _everywhere(evaluator, (Level.STATE_OFF,)),
    "fsdp_offload": _fsdp_offload,
    "keep_all": lambda evaluator: evaluator.facts.start_levels,
}


def drafted(evaluator: Evaluator, levels: Sequence[Level], planner: Planner) -> DraftPlan:
    """Return the draft plan of `levels`, which fit, with the best moves found for them."""
    decisions = moved(evaluator.facts, levels, f"the rule {planner} puts it there")
    return replace(best_draft(evaluator, levels), decisions=decisions, planner=planner)


def moved(facts: Facts, options: Sequence[int], because: str) -> tuple[Decision, ...]:
    """Return a decision on each bucket, and layer if `options` has those of layers, that moves; all have one reason."""
    return tuple(
        decision(facts.subject_of(change.i), facts.text_of(change.i, change.now), because)
        for change in facts.changes(options)
    )


MAX_PLACEMENTS = 4096
"""The most candidates that are enumerated, such as four levels of six buckets; they take a few seconds."""


def num_placements(evaluator: Evaluator) -> int:
    """Return the number of candidates: of combinations of levels and modes."""
    return math.prod(map(len, evaluator.facts.options))


def place_exhaustively(evaluator: Evaluator) -> DraftPlan | None:
    """Return the fastest draft plan of all candidates, among equals with the fewest host bytes.

    None if no candidate fits, or if there are more than `MAX_PLACEMENTS`. On a host of few bytes it finds plans that
    greedy moves miss: in 1 of 50 random problems of up to six buckets that have a plan.
    """
    count = num_placements(evaluator)
    if count > MAX_PLACEMENTS:
        return None
    best: tuple[float, int, DraftPlan] | None = None
    for modes in itertools.product(*(range(len(layer.modes)) for layer in evaluator.facts.layers)):
        here = evaluator.at(modes)
        for levels in itertools.product(*evaluator.facts.choices):
            if not here.fits(levels, ahead=0):
                continue
            draft = best_draft(here, levels, math.inf if best is None else best[0])
            if best is None or (draft.step_s, here.host_bytes(levels)) < best[:2]:
                best = (draft.step_s, here.host_bytes(levels), draft)
    if best is None:
        return None
    _, _, draft = best
    because = f"the fastest of {count} candidates, {format_s(draft.step_s)} per step"
    return replace(draft, decisions=moved(evaluator.facts, draft.candidate.options, because))


# ----------------------------------------------------------------------------------------------------------------------
# The greedy planner: move buckets off the device, the cheapest bytes first, until the step fits.
#
# Start with the placements in force. While the step does not fit, move the bucket that saves the most bytes at the
# peak, counted up to the excess, per second added to the simulated step. Then undo needless moves, and start transfers
# as early as the free memory allows.
#
#     score = min(saved at the peak, excess) / (step_s after the move - step_s before)
#
# Early gathers need free memory, but the memory left is not known while moves are chosen. So the search runs for each
# prefetch distance, with memory left free for it, with and without moves of optimizer state alone. The fastest draft
# plan wins. Seconds of a move are remembered, and simulated again only if the move has the best score (lazily, as in
# CELF, Leskovec et al. 2007).


_MIN_COST_S = 1e-9
"""Seconds of a move that makes the step no longer, so that its score is finite."""
_MAX_REFRESHES = 4
"""Moves that are simulated again for each move made."""
_NUM_REJECTED = 2
"""Rejected moves that a decision names."""


class _Move(NamedTuple):
    score: float
    bucket: int
    level: Level
    saves_bytes: int
    cost_s: float


@dataclass(slots=True, kw_only=True)
class _Walk:
    """The moves from the placements in force to a step that fits, for one prefetch distance."""

    evaluator: Evaluator
    own_bytes: NDArray[np.int64]
    """Device bytes by bucket, level and segment, from `MemoryModel.own_bytes`."""
    ahead: int
    """Windows by which gathers are early."""
    limits_host: bool
    """If False, the host budget is ignored."""
    spares_host: bool
    """If True, moves are ranked by the host bytes that they take, and never simulated; else by their seconds."""
    splits_state: bool
    """Whether optimizer state may leave the device without its parameters."""
    levels: list[Level]
    """The present level of each bucket."""
    cost_s: dict[tuple[int, Level], float]
    """Seconds by which each move makes the step longer, as last simulated."""
    fresh: set[tuple[int, Level]] = field(default_factory=set)
    """Moves with seconds that were simulated from the present levels."""
    moved: dict[int, Decision] = field(default_factory=dict)
    """The last decision on each moved bucket, in the order of the moves."""

    def descend(self) -> bool:
        """Move buckets off the device until the step fits; return whether it does."""
        facts, memory = self.evaluator.facts, self.evaluator.memory
        while True:
            live_bytes = self._live_bytes(self.levels)
            segment = int(live_bytes.argmax())
            excess = int(live_bytes[segment]) - self._budget_bytes
            if excess <= 0:
                return self._fits_host(self.levels)  # offloaded activations alone may exceed the host budget
            move, others = self._best_move(segment, excess, int(live_bytes[segment]))
            if move is None:
                break
            self.moved.pop(move.bucket, None)
            self.moved[move.bucket] = decision(
                *self._texts(move.bucket, move.level),
                f"device short by {format_bytes(excess)} at {facts.graph.ops[memory.highest_op(segment)].id}",
                others=[
                    (
                        f"{' '.join(self._texts(other.bucket, other.level))} "
                        f"(saves {format_bytes(other.saves_bytes)}, {self._price(other)})",
                        "",
                    )
                    for other in others
                ],
                cost_s=0.0 if move.cost_s <= _MIN_COST_S else move.cost_s,
                saves_bytes=move.saves_bytes,
            )
            self.levels[move.bucket] = move.level
            self.fresh.clear()
            for level in Level:
                self.cost_s.pop((move.bucket, level), None)
        # No single move lowers the peak: several moves together may still lower it.
        furthest = self.evaluator.min_memory_levels
        if memory.peak_bytes(furthest, self.ahead) > self._budget_bytes or not self._fits_host(furthest):
            return False
        for bucket, level in enumerate(furthest):
            if level != self.levels[bucket]:
                short = format_bytes(int(self._live_bytes(self.levels).max()) - self._budget_bytes)
                because = f"device still short by {short}, and no single move saves at the peak: all move together"
                self.moved[bucket] = decision(*self._texts(bucket, level), because)
                self.levels[bucket] = level
        return True

    def undo_needless(self) -> None:
        """Bring buckets back as far as the budget allows: the last move first, because it cost the most.

        If a bucket does not return to its first level, the step must not get longer either.
        """

        def may_return(bucket: int, level: Level) -> bool:
            levels = self._with(bucket, level)
            # Parameters that may be on disk take fewer bytes of the host than the staging of those on the device.
            if not (self.evaluator.facts.allows(levels) and self._fits_host(levels)):
                return False
            if self.evaluator.memory.peak_bytes(levels, self.ahead) > self._budget_bytes:
                return False
            if self.spares_host:
                return self.evaluator.added_host_bytes(bucket, self.levels[bucket], level) <= 0
            is_start = level is self.evaluator.facts.choices[bucket][0]
            return is_start or self.evaluator.step_s(levels) <= self.evaluator.step_s(self.levels)

        for bucket in reversed(list(self.moved)):
            now = self.levels[bucket]
            nearer = (level for level in self.evaluator.facts.choices[bucket] if level < now)
            self.levels[bucket] = next((level for level in nearer if may_return(bucket, level)), now)

    def _fits_host(self, levels: Sequence[Level]) -> bool:
        return (
            not self.limits_host or self.evaluator.host_bytes(levels) <= self.evaluator.facts.problem.host_budget_bytes
        )

    @property
    def _budget_bytes(self) -> int:
        return self.evaluator.facts.problem.budget_bytes

    def _live_bytes(self, levels: list[Level]) -> NDArray[np.int64]:
        return self.evaluator.memory.live_bytes(levels, moves_at_use(self.evaluator.facts, levels, self.ahead))

    def _with(self, bucket: int, level: Level) -> list[Level]:
        levels = list(self.levels)
        levels[bucket] = level
        return levels

    def _best_move(self, segment: int, excess: int, peak_bytes: int) -> tuple[_Move | None, list[_Move]]:
        """Return the best move that lowers the peak in `segment`, and the moves next in score.

        The first is None if no move lowers the peak.
        """
        facts = self.evaluator.facts
        at_peak = self.own_bytes[:, :, segment]
        host_free = facts.problem.host_budget_bytes - self.evaluator.host_bytes(self.levels)
        moves: list[_Move] = []
        for bucket, now in enumerate(self.levels):
            for level in facts.choices[bucket]:
                saves_bytes = int(at_peak[bucket, now] - at_peak[bucket, level])
                if level <= now or saves_bytes <= 0:
                    continue
                if level.has_state_on_host and not level.has_param_on_host and not self.splits_state:
                    continue
                if self.limits_host and self.evaluator.added_host_bytes(bucket, now, level) > host_free:
                    continue
                if not facts.allows(self._with(bucket, level)):
                    continue
                if not self.spares_host and (bucket, level) not in self.cost_s:
                    self._simulate(bucket, level)
                moves.append(self._scored(bucket, level, saves_bytes, excess))
        refreshes = 0
        while moves:
            moves.sort(key=lambda move: (-move.score, move.bucket, move.level))
            best = moves[0]
            key = (best.bucket, best.level)
            if not self.spares_host and key not in self.fresh and refreshes < _MAX_REFRESHES:
                refreshes += 1
                self._simulate(best.bucket, best.level)
                moves[0] = self._scored(best.bucket, best.level, best.saves_bytes, excess)
                continue
            # `own_bytes` leaves out prefetches and gradients on their way out: count the step after the move in full.
            if int(self._live_bytes(self._with(best.bucket, best.level))[segment]) < peak_bytes:
                return best, moves[1 : 1 + _NUM_REJECTED]
            moves.pop(0)
        return None, []

    def _scored(self, bucket: int, level: Level, saves_bytes: int, excess: int) -> _Move:
        saved_bytes = min(saves_bytes, excess)
        if self.spares_host:
            # A bucket on the host takes no more host bytes if it moves further: count 1, not 0.
            added_bytes = max(self.evaluator.added_host_bytes(bucket, self.levels[bucket], level), 1)
            return _Move(saved_bytes / added_bytes, bucket, level, saves_bytes, 0.0)
        cost_s = self.cost_s[bucket, level]
        return _Move(saved_bytes / cost_s, bucket, level, saves_bytes, cost_s)

    def _simulate(self, bucket: int, level: Level) -> None:
        after_s = self.evaluator.step_s(self._with(bucket, level))
        self.cost_s[bucket, level] = max(after_s - self.evaluator.step_s(self.levels), _MIN_COST_S)
        self.fresh.add((bucket, level))

    def _texts(self, bucket: int, level: Level) -> tuple[str, str]:
        return self.evaluator.facts.subject_of(bucket), self.evaluator.facts.text_of(bucket, level)

    def _price(self, move: _Move) -> str:
        if not self.spares_host:
            return f"costs {format_s(move.cost_s)}"
        added_bytes = self.evaluator.added_host_bytes(move.bucket, self.levels[move.bucket], move.level)
        return f"takes {format_bytes(added_bytes)} of the host"

    def draft(self) -> DraftPlan:
        """Return the draft plan of the present levels, with the best moves found for them."""
        evaluator, levels = self.evaluator, tuple(self.levels)
        decisions: list[Decision] = []
        for bucket, said in self.moved.items():
            choice = evaluator.facts.text_of(bucket, levels[bucket])
            if levels[bucket] != evaluator.facts.start_levels[bucket]:
                # `undo_needless` may have changed the level.
                because = f"{said.because}; brought back from {said.choice}, which was more than needed"
                changed = replace(said, choice=choice, because=because, cost_s=0.0, saves_bytes=0)
                decisions.append(said if said.choice == choice else changed)
        return replace(best_draft(evaluator, levels), decisions=tuple(decisions))


def place_greedily(
    evaluator: Evaluator,
    *,
    start: Levels | None = None,
    limits_host: bool = True,
    spares_host: bool = False,
) -> DraftPlan | None:
    """Return the fastest draft plan found within the budgets, or None.

    Buckets move from their levels in `start`, by default from those nearest to the device. If `limits_host` is False,
    the host budget is ignored. If `spares_host`, moves are chosen by device bytes saved per host byte instead of per
    second.
    """
    cluster = evaluator.facts.problem.cluster
    # If copies are work for the device itself, early copies save no time, so no memory is left free for them.
    is_early = cluster.h2d.overlaps_compute and not spares_host
    distances = range(MAX_AHEAD, -1, -1) if is_early else (0,)
    own_bytes = evaluator.memory.own_bytes()
    best: tuple[tuple[float, int], DraftPlan] | None = None
    # Moves of optimizer state alone are cheap at first and can be a dead end: no compute is left to hide later moves.
    splits = (
        (True, False)
        if any(
            {Level.STATE_OFF, Level.STATE_OFF_RELEASED}.intersection(levels[1:]) for levels in evaluator.facts.choices
        )
        else (False,)
    )
    for ahead, splits_state in itertools.product(distances, splits):
        walk = _Walk(
            evaluator=evaluator,
            own_bytes=own_bytes,
            ahead=ahead,
            limits_host=limits_host,
            spares_host=spares_host,
            splits_state=splits_state,
            levels=list(evaluator.facts.start_levels if start is None else start),
            cost_s={},
        )
        if not walk.descend():
            continue
        walk.undo_needless()
        draft = walk.draft()
        key = (draft.step_s, evaluator.host_bytes(draft.levels))
        if best is None or key < best[0]:
            best = (key, draft)
    return None if best is None else best[1]
