"""Transfers spread out as far as memory allows: gathers ahead of their waits, waits for leaving gradients behind them.

In rounds: first every gather one window early, then every one two; then every gradient may leave while two buckets' are
produced instead of one; then the same further out. Each is taken where the memory left allows it. Early windows can be
small ones, which is why two windows are not always enough. `just_in_time` asks instead what each transfer takes.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from elixir_compile.ir import Lane
from elixir_compile.search.absences import leave_ends
from elixir_compile.search.facts import Facts
from elixir_compile.search.judge import Evaluator
from elixir_compile.search.levels import Level
from elixir_compile.search.stays import Moves, Residency, gradient_ends, residencies

_ROUNDS = ((1, 0), (2, 2), (4, 0), (8, 4))
"""Windows that gathers are early, buckets that gradients lag (0: as they are)."""


def raise_prefetch(evaluator: Evaluator, levels: Sequence[Level]) -> Moves:
    """Return the moves of `levels`, which fit with transfers at their use, spread out as far as the budget allows."""
    moves = evaluator.at_use(levels)
    placed, ends, leaving = list(moves.residencies), dict(moves.grad_ends), dict(moves.leave_ends)
    free_bytes = evaluator.facts.problem.budget_bytes - evaluator.memory.live_bytes(levels, moves)
    is_beside = leaves_beside(evaluator)
    for ahead, lag in _ROUNDS:
        _gather_early(evaluator, levels, ahead, placed, free_bytes)
        if is_beside:
            _leave_late(evaluator, ahead, leaving, free_bytes)
        if lag and is_beside:
            _wait_late(evaluator, levels, lag, ends, free_bytes)
    return Moves(tuple(placed), ends, leaving, moves.streamed)


def leaves_beside(evaluator: Evaluator) -> bool:
    """Return whether what leaves does so beside compute: else it is gone before the next op begins."""
    return any(evaluator.prices.lane_of[lane] is not Lane.COMPUTE for lane in (Lane.D2H, Lane.REDUCE))


def _gather_early(
    evaluator: Evaluator,
    levels: Sequence[Level],
    ahead: int,
    placed: list[Residency],
    free_bytes: NDArray[np.int64],
) -> None:
    facts, segment_of = evaluator.facts, evaluator.memory.segment_of
    issued: dict[int, int] = {}
    for i, wanted in enumerate(residencies(facts, levels, ahead)):
        now = placed[i]
        phase = facts.phase_start(now.first)
        # Lanes are first in, first out: not before the gather of what is needed earlier.
        gather = max(wanted.gather, issued.get(phase, 0))
        nbytes = stay_bytes(facts, levels, now)
        if gather < now.gather and take(free_bytes, segment_of(gather), segment_of(now.gather), nbytes):
            placed[i] = now._replace(gather=gather)
        issued[phase] = placed[i].gather


def _leave_late(evaluator: Evaluator, lag: int, leaving: dict[int, int], free_bytes: NDArray[np.int64]) -> None:
    facts, segment_of = evaluator.facts, evaluator.memory.segment_of
    for number, end in leave_ends(facts.offload_intervals, facts.num_forward, lag).items():
        now = leaving[number]
        if now < end and take(
            free_bytes, segment_of(now + 1), segment_of(end + 1), facts.offload_intervals[number].nbytes
        ):
            leaving[number] = end


def stay_bytes(facts: Facts, levels: Sequence[Level], stay: Residency) -> int:
    """Return the bytes on the device from a gather to its wait; on several ranks with the shard that came from the
    host."""
    num_buckets = len(facts.buckets)
    if stay.bucket >= num_buckets:
        return facts.offload_intervals[stay.bucket - num_buckets].nbytes
    bucket = facts.buckets[stay.bucket]
    is_sent = bucket.is_sharded and levels[stay.bucket].has_param_on_host
    return bucket.flat_nbytes + (bucket.flat_shard_nbytes if is_sent else 0)


def _wait_late(
    evaluator: Evaluator, levels: Sequence[Level], lag: int, ends: dict[int, int], free_bytes: NDArray[np.int64]
) -> None:
    facts, segment_of = evaluator.facts, evaluator.memory.segment_of
    for bucket, end in gradient_ends(facts, levels, lag).items():
        now, nbytes = ends[bucket], grown_bytes(facts, levels, bucket)
        if now < end and take(free_bytes, segment_of(now + 1), segment_of(end + 1), nbytes):
            ends[bucket] = end


def grown_bytes(facts: Facts, levels: Sequence[Level], bucket: int) -> int:
    """Return the bytes on the device of the gradients of one bucket while they leave."""
    gradients, spec = facts.gradients[bucket], facts.buckets[bucket]
    nbytes = sum(size for _, size in gradients.births) if gradients else 0
    if spec.is_packed:
        nbytes = spec.flat_grad_nbytes if spec.is_sharded else 0
    if levels[bucket].has_param_on_host and (spec.is_sharded or spec.is_packed):
        nbytes += spec.reduced_nbytes
    return nbytes


def take(free_bytes: NDArray[np.int64], first: int, end: int, nbytes: int) -> bool:
    """Take `nbytes` in the segments from `first` to before `end`; return whether they were free."""
    if (free_bytes[first:end] < nbytes).any():
        return False
    free_bytes[first:end] -= nbytes
    return True
