"""When transfers start: spread out as far as memory allows, or just in time."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from elixir_compile.ir import Lane
from elixir_compile.search.evaluator import Evaluator
from elixir_compile.search.schedule import cut_regions
from elixir_compile.search.space.facts import Facts
from elixir_compile.search.space.levels import Level
from elixir_compile.search.space.modes import leave_ends
from elixir_compile.search.space.residency import Moves, Residency, gradient_ends, residencies

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


def just_in_time(evaluator: Evaluator, levels: Sequence[Level]) -> Moves:
    """Return the moves of `levels`, which fit with transfers at their use, each transfer as late as its link allows."""
    moves = evaluator.at_use(levels)
    planned = _Planned(
        evaluator=evaluator,
        levels=levels,
        free_bytes=evaluator.facts.problem.budget_bytes - evaluator.memory.live_bytes(levels, moves),
        starts=[cut.first for cut in cut_regions(evaluator.facts, levels, moves)],
    )
    placed = planned.gathered(moves.residencies)
    ends, leaving = dict(moves.grad_ends), dict(moves.leave_ends)
    if leaves_beside(evaluator):
        planned.let_activations_leave(leaving)
        planned.let_gradients_leave(ends)
    return Moves(tuple(placed), ends, leaving, moves.streamed)


@dataclass(slots=True, kw_only=True)
class _Planned:
    """The memory that is left by segment, as transfers take it."""

    evaluator: Evaluator
    levels: Sequence[Level]
    free_bytes: NDArray[np.int64]
    starts: Sequence[int]
    """The first op of each region: where a gather can be issued."""
    _issued: dict[tuple[int, Lane], int] = field(default_factory=dict)
    """By phase and lane, where the latest transfer of the lane was issued."""
    _released: dict[int, int] = field(default_factory=dict)

    def gathered(self, at_use: Sequence[Residency]) -> list[Residency]:
        """Return the stays with each gather where it should be issued, or later where memory is short."""
        return [self._placed(stay, wanted) for stay, wanted in zip(at_use, self._wanted(at_use), strict=True)]

    def _wanted(self, at_use: Sequence[Residency]) -> list[int]:
        """The op at which each gather should be issued."""
        facts, prices = self.evaluator.facts, self.evaluator.prices
        wanted: list[int] = []
        phase, gather_s, copy_s = -1, math.inf, math.inf
        for stay in reversed(at_use):
            start = facts.phase_start(stay.first)
            if start != phase:
                phase, gather_s, copy_s = start, math.inf, math.inf
            shared_s, copied_s = self._seconds(stay)
            begin_s = prices.before_s[stay.first]
            if shared_s:
                gather_s = min(begin_s, gather_s) - shared_s
                begin_s = gather_s
            if copied_s:
                copy_s = min(begin_s, copy_s) - copied_s
                begin_s = copy_s
            op = bisect_right(prices.before_s, begin_s) - 1 if begin_s > prices.before_s[start] else start
            region = self.starts[bisect_right(self.starts, max(op, start)) - 1]
            wanted.append(max(start, min(stay.first, region)))
        return wanted[::-1]

    def _seconds(self, stay: Residency) -> tuple[float, float]:
        """Seconds of the all-gather before a stay, and of the copy from the host before that."""
        facts, prices = self.evaluator.facts, self.evaluator.prices
        if stay.bucket >= len(facts.buckets):
            return 0.0, prices.h2d_s[str(facts.offload_intervals[stay.bucket - len(facts.buckets)].group)]
        name = facts.buckets[stay.bucket].id
        is_sent = self.levels[stay.bucket].has_param_on_host
        return prices.gather_s[name], prices.h2d_s[name] if is_sent else 0.0

    def _lanes(self, stay: Residency) -> Sequence[Lane]:
        shared_s, copied_s = self._seconds(stay)
        if shared_s and copied_s:
            return (Lane.GATHER, Lane.H2D)
        return (Lane.GATHER,) if shared_s else (Lane.H2D,)

    def _placed(self, stay: Residency, wanted: int) -> Residency:
        facts, segment_of = self.evaluator.facts, self.evaluator.memory.segment_of
        phase = facts.phase_start(stay.first)
        # A lane is first in, first out: not before what is needed earlier on it. What other lanes carry holds up none.
        lanes = [(phase, lane) for lane in self._lanes(stay)]
        issued = max(self._issued.get(lane, 0) for lane in lanes)
        gather = max(wanted, issued, self._released.get(stay.bucket, 0))
        nbytes = stay_bytes(facts, self.levels, stay)
        gather = self._first_free(gather, stay.first, nbytes)
        if gather < stay.first:
            take(self.free_bytes, segment_of(gather), segment_of(stay.gather), nbytes)
        self._issued |= dict.fromkeys(lanes, min(gather, stay.first))
        self._released[stay.bucket] = stay.last + 1
        return stay._replace(gather=min(gather, stay.first))

    def _first_free(self, gather: int, use: int, nbytes: int) -> int:
        """Return the first start of a region, not before op `gather`, from which `nbytes` are free until op `use`."""
        segment_of = self.evaluator.memory.segment_of
        first, end = segment_of(gather), segment_of(use)
        short = np.flatnonzero(self.free_bytes[first:end] < nbytes)
        if gather >= use or not len(short):
            return gather
        free_from = first + int(short[-1]) + 1
        later = self.starts[bisect_left(self.starts, gather) : bisect_left(self.starts, use)]
        return next((start for start in later if segment_of(start) >= free_from), use)

    def let_activations_leave(self, leaving: dict[int, int]) -> None:
        """Give each absence the time that its copy takes, or as much of it as memory is free for."""
        facts, prices = self.evaluator.facts, self.evaluator.prices
        last = facts.num_forward - 1
        gone_s = 0.0
        for number, absence in enumerate(facts.offload_intervals):
            gone_s = max(gone_s, prices.before_s[absence.leave + 1]) + prices.d2h_s[str(absence.group)]
            later = [other.leave for other in facts.offload_intervals[number:]] + [last]
            leaving[number] = self._latest(leaving[number], later, gone_s, absence.nbytes)

    def let_gradients_leave(self, ends: dict[int, int]) -> None:
        """Give the gradients of each bucket the time that their reduce and their copy take, or as much of it as memory
        is free for."""
        facts, prices = self.evaluator.facts, self.evaluator.prices
        completes = [gradients.complete for i in ends if (gradients := facts.gradients[i]) is not None]
        reduced_s = gone_s = 0.0
        for place, (i, end) in enumerate(list(ends.items())):
            name = facts.buckets[i].id
            begin_s = max(reduced_s, prices.before_s[completes[place] + 1])
            reduced_s = done_s = begin_s + prices.reduce_s[name] + prices.average_s.get(name, 0.0)
            if self.levels[i].has_param_on_host:
                gone_s = done_s = max(gone_s, reduced_s) + prices.d2h_s[name]
            later = [*completes[place + 1 :], facts.num_run - 1]
            ends[i] = self._latest(end, later, done_s, grown_bytes(facts, self.levels, i))

    def _latest(self, now: int, later: Sequence[int], done_s: float, nbytes: int) -> int:
        """Return the op of `later`, in order, behind which something that is over at `done_s` is waited for: the first
        that ends then, or the last before it until which `nbytes` are free."""
        before_s, segment_of = self.evaluator.prices.before_s, self.evaluator.memory.segment_of
        wanted = next((op for op in later if before_s[op + 1] >= done_s), later[-1])
        for op in sorted({op for op in later if now < op <= wanted}, reverse=True):
            if take(self.free_bytes, segment_of(now + 1), segment_of(op + 1), nbytes):
                return op
        return now
