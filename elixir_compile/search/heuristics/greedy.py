"""The greedy planner: move buckets off the device, the cheapest bytes first, until the step fits.

Start with the placements in force. While the step does not fit, move the bucket that saves the most bytes at the peak,
counted up to the excess, per second added to the simulated step. Then undo needless moves, and start transfers as early
as the free memory allows.

    score = min(saved at the peak, excess) / (step_s after the move - step_s before)

Early gathers need free memory, but the memory left is not known while moves are chosen. So the search runs for each
prefetch distance, with memory left free for it, with and without moves of optimizer state alone. The fastest draft plan
wins. Seconds of a move are remembered, and simulated again only if the move has the best score (lazily, as in CELF,
Leskovec et al. 2007).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elixir_compile.base.units import format_bytes, format_s
from elixir_compile.ir import Decision
from elixir_compile.search.evaluator import MAX_AHEAD, DraftPlan, Evaluator
from elixir_compile.search.heuristics.streaming import best_moves
from elixir_compile.search.space.levels import Level, level_text
from elixir_compile.search.space.residency import moves_at_use

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
        budget_bytes = self.evaluator.facts.problem.budget_bytes
        while True:
            live_bytes = self._live_bytes(self.levels)
            segment = int(live_bytes.argmax())
            excess = int(live_bytes[segment]) - budget_bytes
            if excess <= 0:
                return self._fits_host(self.levels)  # offloaded activations alone may exceed the host budget
            move, others = self._best_move(segment, excess, int(live_bytes[segment]))
            if move is None:
                return self._move_all()
            self._make(move, others, segment, excess)

    def undo_needless(self) -> None:
        """Bring buckets back as far as the budget allows: the last move first, because it cost the most."""
        for bucket in reversed(list(self.moved)):
            for level in self.evaluator.facts.choices[bucket]:
                if level >= self.levels[bucket]:
                    break
                if self._may_return(bucket, level):
                    self.levels[bucket] = level
                    break

    def _may_return(self, bucket: int, level: Level) -> bool:
        """Return whether the step still fits with `bucket` at `level`.

        If the bucket does not return to its first level, the step must not get longer either.
        """
        levels = self._with(bucket, level)
        if not self.evaluator.facts.allows(levels):
            return False
        if self.evaluator.memory.peak_bytes(levels, self.ahead) > self._budget_bytes:
            return False
        if self.spares_host:
            return self.evaluator.added_host_bytes(bucket, self.levels[bucket], level) <= 0
        is_start = level is self.evaluator.facts.choices[bucket][0]
        return is_start or self.evaluator.step_s(levels) <= self.evaluator.step_s(self.levels)

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
        moves = self._moves(segment, excess)
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

    def _moves(self, segment: int, excess: int) -> list[_Move]:
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
        return moves

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

    def _make(self, move: _Move, others: list[_Move], segment: int, excess: int) -> None:
        op = self.evaluator.facts.graph.ops[self.evaluator.memory.highest_op(segment)]
        self.moved.pop(move.bucket, None)
        self.moved[move.bucket] = Decision(
            subject=self.evaluator.facts.buckets[move.bucket].id,
            choice=level_text(move.level),
            because=f"device short by {format_bytes(excess)} at {op.id}",
            cost_s=0.0 if move.cost_s <= _MIN_COST_S else move.cost_s,
            saves_bytes=move.saves_bytes,
            rejected=tuple(
                f"{self.evaluator.facts.buckets[other.bucket].id} {level_text(other.level)} "
                f"(saves {format_bytes(other.saves_bytes)}, {self._price(other)})"
                for other in others
            ),
        )
        self.levels[move.bucket] = move.level
        self.fresh.clear()
        for level in Level:
            self.cost_s.pop((move.bucket, level), None)

    def _price(self, move: _Move) -> str:
        if not self.spares_host:
            return f"costs {format_s(move.cost_s)}"
        added_bytes = self.evaluator.added_host_bytes(move.bucket, self.levels[move.bucket], move.level)
        return f"takes {format_bytes(added_bytes)} of the host"

    def _move_all(self) -> bool:
        """Move all buckets to the levels with the fewest bytes; return whether the step then fits.

        Runs if no single move lowers the peak: several moves together may still lower it.
        """
        furthest = self.evaluator.min_memory_levels
        if self.evaluator.memory.peak_bytes(furthest, self.ahead) > self._budget_bytes:
            return False
        if not self._fits_host(furthest):
            return False
        for bucket, level in enumerate(furthest):
            if level != self.levels[bucket]:
                short = format_bytes(int(self._live_bytes(self.levels).max()) - self._budget_bytes)
                self.moved[bucket] = Decision(
                    subject=self.evaluator.facts.buckets[bucket].id,
                    choice=level_text(level),
                    because=f"device still short by {short}, and no single move saves at the peak: all move together",
                )
                self.levels[bucket] = level
        return True


def place_greedily(evaluator: Evaluator, *, limits_host: bool = True, spares_host: bool = False) -> DraftPlan | None:
    """Return the fastest draft plan found within the budgets, or None.

    If `limits_host` is False, the host budget is ignored. If `spares_host`, moves are chosen by device bytes saved per
    host byte instead of per second.
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
            levels=list(evaluator.facts.start_levels),
            cost_s={},
        )
        if not walk.descend():
            continue
        walk.undo_needless()
        draft = _draft(evaluator, walk)
        key = (draft.step_s, evaluator.host_bytes(draft.levels))
        if best is None or key < best[0]:
            best = (key, draft)
    return None if best is None else best[1]


def _draft(evaluator: Evaluator, walk: _Walk) -> DraftPlan:
    levels = tuple(walk.levels)
    starts = evaluator.facts.start_levels
    decisions = tuple(
        _restated(decision, levels[bucket])
        for bucket, decision in walk.moved.items()
        if levels[bucket] != starts[bucket]
    )
    moves, step_s = best_moves(evaluator, levels)
    return DraftPlan(levels=levels, modes=evaluator.facts.modes, moves=moves, step_s=step_s, decisions=decisions)


def _restated(decision: Decision, level: Level) -> Decision:
    """Return `decision` with the final `level` of its bucket, which `undo_needless` may have changed."""
    if decision.choice == level_text(level):
        return decision
    return Decision(
        subject=decision.subject,
        choice=level_text(level),
        because=f"{decision.because}; brought back from {decision.choice}, which was more than needed",
        rejected=decision.rejected,
    )
