"""Choose, for given levels, the times of transfers and the buckets with streamed updates, by simulated steps."""

import functools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from elixir_compile.ir import Decision, Lane, Update
from elixir_compile.search.evaluator import DraftPlan, Evaluator
from elixir_compile.search.outer import decision
from elixir_compile.search.schedule import cut_regions
from elixir_compile.search.space.buckets import Level
from elixir_compile.search.space.layers import leave_ends
from elixir_compile.search.space.profiles import Moves, Residency, gradient_ends, residencies

# ----------------------------------------------------------------------------------------------------------------------
# The times of transfers at given levels: as early as memory allows, or just in time for each use.


_ROUNDS = ((1, 0), (2, 2), (4, 0), (8, 4))
"""Rounds of `raise_prefetch`: windows by which gathers are early, and later buckets during whose gradients a bucket's
gradients may leave (0: unchanged)."""


def raise_prefetch(evaluator: Evaluator, levels: Sequence[Level]) -> Moves:
    """Return moves of `levels` with transfers as early, or as long, as the device budget allows.

    `levels` must fit with transfers at their use.
    """
    moves = evaluator.at_use(levels)
    placed, ends, leaving = list(moves.residencies), dict(moves.grad_ends), dict(moves.leave_ends)
    free_bytes = evaluator.facts.problem.budget_bytes - evaluator.memory.live_bytes(levels, moves)
    facts, memory, is_beside = evaluator.facts, evaluator.memory, leaves_beside(evaluator)
    behind = memory.segment_behind

    def delay(waits: dict[int, int], later: Mapping[int, int], bytes_of: Callable[[int], int]) -> None:
        """Let transfers end where they do `later` if what they take is free until then."""
        for number, end in later.items():
            now = waits[number]
            if now < end and reserve(free_bytes, behind(now), behind(end), bytes_of(number)):
                waits[number] = end

    for ahead, lag in _ROUNDS:
        issued: dict[int, int] = {}
        for i, wanted in enumerate(residencies(facts, levels, ahead)):
            now = placed[i]
            phase = facts.phase_start(now.first)
            # Lanes are first in, first out, so a gather is not issued before gathers needed earlier.
            gather = max(wanted.gather, issued.get(phase, 0))
            first, end = memory.segment_of(gather), memory.segment_of(now.gather)
            if gather < now.gather and reserve(free_bytes, first, end, memory.early_bytes(now, levels)):
                placed[i] = now._replace(gather=gather)
            issued[phase] = placed[i].gather
        if is_beside:
            later = leave_ends(facts.offload_intervals, facts.num_forward, ahead)
            delay(leaving, later, lambda number: facts.offload_intervals[number].leaving_bytes)
        if lag and is_beside:
            later = gradient_ends(facts, levels, lag)
            delay(ends, later, lambda bucket: memory.late_bytes(bucket, levels[bucket]))
    return Moves(tuple(placed), ends, leaving, moves.streamed)


def leaves_beside(evaluator: Evaluator) -> bool:
    """Return whether any transfer from the device runs beside compute; if not, it ends before the next op begins."""
    return any(evaluator.prices.lane_of[lane] is not Lane.COMPUTE for lane in (Lane.D2H, Lane.REDUCE))


def reserve(free_bytes: NDArray[np.int64], first: int, end: int, nbytes: int) -> bool:
    """Subtract `nbytes` from the segments `first` to before `end` if they are free in all of them; return whether."""
    if (free_bytes[first:end] < nbytes).any():
        return False
    free_bytes[first:end] -= nbytes
    return True


def just_in_time(evaluator: Evaluator, levels: Sequence[Level], budget_bytes: int | None = None) -> Moves:
    """Return moves of `levels` with each transfer as late as its link allows without a wait, if memory is free.

    `levels` must fit `budget_bytes`, by default those of the problem, with transfers at their use.
    """
    moves = evaluator.at_use(levels)
    budget_bytes = evaluator.facts.problem.budget_bytes if budget_bytes is None else budget_bytes
    planned = _JustInTime(
        evaluator=evaluator,
        levels=levels,
        free_bytes=budget_bytes - evaluator.memory.live_bytes(levels, moves),
        starts=[cut.first for cut in cut_regions(evaluator.facts, levels, moves)],
    )
    placed = planned.gathered(moves.residencies)
    ends, leaving = dict(moves.grad_ends), dict(moves.leave_ends)
    if leaves_beside(evaluator):
        planned.extend_activations(leaving)
        planned.extend_gradients(ends)
    return Moves(tuple(placed), ends, leaving, moves.streamed)


@dataclass(slots=True, kw_only=True)
class _JustInTime:
    """Places transfers just in time, and keeps count of the free device memory by segment."""

    evaluator: Evaluator
    levels: Sequence[Level]
    free_bytes: NDArray[np.int64]
    starts: Sequence[int]
    """The first op of each region, in order: gathers are issued before these ops only."""
    _issued: dict[tuple[int, Lane], int] = field(default_factory=dict)
    """By phase and lane, the op before which the latest transfer of the lane was issued."""
    _released: dict[int, int] = field(default_factory=dict)
    """By bucket, the op before which its latest residency was released."""

    def gathered(self, at_use: Sequence[Residency]) -> list[Residency]:
        """Return the residencies `at_use`, each with its gather at the op before which it has to be issued to be done
        at its use, by the prices of its lanes, or later if memory is short."""
        facts, prices = self.evaluator.facts, self.evaluator.prices
        wanted: list[tuple[int, list[Lane]]] = []
        phase, gather_s, copy_s = -1, math.inf, math.inf
        for residency in reversed(at_use):
            start = facts.phase_start(residency.first)
            if start != phase:
                phase, gather_s, copy_s = start, math.inf, math.inf
            if residency.bucket < len(facts.buckets):
                name = facts.buckets[residency.bucket].id
                is_sent = self.levels[residency.bucket].has_param_on_host
                all_gather_s, copied_s = prices.gather_s[name], prices.h2d_s[name] if is_sent else 0.0
            else:
                group = facts.offload_intervals[residency.bucket - len(facts.buckets)].group
                all_gather_s, copied_s = 0.0, prices.h2d_s[str(group)]
            begin_s = prices.before_s[residency.first]
            if all_gather_s:
                gather_s = min(begin_s, gather_s) - all_gather_s
                begin_s = gather_s
            if copied_s:
                copy_s = min(begin_s, copy_s) - copied_s
                begin_s = copy_s
            op = bisect_right(prices.before_s, begin_s) - 1 if begin_s > prices.before_s[start] else start
            region = self.starts[bisect_right(self.starts, max(op, start)) - 1]
            lanes = [Lane.GATHER] * bool(all_gather_s) + [Lane.H2D] * (bool(copied_s) or not all_gather_s)
            wanted.append((max(start, min(residency.first, region)), lanes))
        return [self._placed(residency, *own) for residency, own in zip(at_use, reversed(wanted), strict=True)]

    def _placed(self, residency: Residency, wanted: int, on: Sequence[Lane]) -> Residency:
        """Return `residency` with its gather, which takes the lanes `on`, at op `wanted` or later, and reserve its
        memory."""
        segment_of, use = self.evaluator.memory.segment_of, residency.first
        phase = self.evaluator.facts.phase_start(use)
        # A lane is first in, first out, so a transfer is not issued before transfers needed earlier on its own lanes.
        lanes = [(phase, lane) for lane in on]
        issued = max(self._issued.get(lane, 0) for lane in lanes)
        gather = max(wanted, issued, self._released.get(residency.bucket, 0))
        nbytes = self.evaluator.memory.early_bytes(residency, self.levels)
        first = segment_of(gather)
        short = np.flatnonzero(self.free_bytes[first : segment_of(use)] < nbytes)
        if gather < use and len(short):
            # The first start of a region, not before the gather, from which the bytes are free until the use.
            free_from = first + int(short[-1]) + 1
            later = self.starts[bisect_left(self.starts, gather) : bisect_left(self.starts, use)]
            gather = next((start for start in later if segment_of(start) >= free_from), use)
        if gather < use:
            reserve(self.free_bytes, segment_of(gather), segment_of(residency.gather), nbytes)
        self._issued |= dict.fromkeys(lanes, min(gather, use))
        self._released[residency.bucket] = residency.last + 1
        return residency._replace(gather=min(gather, use))

    def extend_activations(self, leaving: dict[int, int]) -> None:
        """Delay the ends in `leaving` until the copies of offloaded activations are done, as far as memory is free.

        `leaving` has, for each offload interval, the last op with its activations still on the device.
        """
        facts, prices = self.evaluator.facts, self.evaluator.prices
        last = facts.num_forward - 1
        gone_s = 0.0
        for number, interval in enumerate(facts.offload_intervals):
            gone_s = max(gone_s, prices.before_s[interval.leave + 1]) + prices.d2h_s[str(interval.group)]
            later = [other.leave for other in facts.offload_intervals[number:]] + [last]
            leaving[number] = self._latest(leaving[number], later, gone_s, interval.leaving_bytes)

    def extend_gradients(self, ends: dict[int, int]) -> None:
        """Delay `ends` until reduces of gradients and their copies to the host are done, as far as memory is free.

        `ends` has, for each bucket with leaving gradients, the last op with them on the device.
        """
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
            ends[i] = self._latest(end, later, done_s, self.evaluator.memory.late_bytes(i, self.levels[i]))

    def _latest(self, now: int, later: Sequence[int], done_s: float, nbytes: int) -> int:
        """Return the op after which the step waits for a transfer done at `done_s`; reserve its memory.

        It is the first op of `later`, in order, that ends at `done_s` or after, or the last op before it up to which
        `nbytes` stay free; `now` if there is none.
        """
        before_s, behind = self.evaluator.prices.before_s, self.evaluator.memory.segment_behind
        wanted = next((op for op in later if before_s[op + 1] >= done_s), later[-1])
        if wanted <= now:
            return now
        first = behind(now)
        taken = np.flatnonzero(self.free_bytes[first : behind(wanted)] < nbytes)
        ops = sorted(op for op in later if now < op <= wanted)
        # Up to the first segment without so many free bytes.
        num_free = bisect_right(ops, first + int(taken[0]), key=behind) if len(taken) else len(ops)
        if not num_free:
            return now
        self.free_bytes[first : behind(ops[num_free - 1])] -= nbytes
        return ops[num_free - 1]


# ----------------------------------------------------------------------------------------------------------------------
# The moves of given levels: the times of transfers, and the buckets with streamed updates, chosen by simulated steps.
#
# The copy of a bucket to the device waits for its update, and compute waits for the copy at the first use. If the host
# is late, some of its updates may take less time on the device, with their state streamed there and back: a share x,
# from 0 to 1, of the elements with host updates.
#
#     x = 0      host     u_b0 | u_b1 | u_b2 | u_b3          compute waits for the last
#     x = 1/2    compute  stream b0 | stream b1 | forward    the first are needed first, so the first are streamed
#                host     u_b2 | u_b3


_MIN_SHARE = 1e-3
"""Nothing is streamed if compute waits for updates for less than this share of a step."""
_MAX_BISECTED = 16
"""If more buckets may be streamed, the search for their number begins at a number that was good before, if known."""

Lower = Callable[[frozenset[int]], float]
"""The set of streamed buckets to a lower limit on the seconds of a step at the same levels."""


def best_draft(
    evaluator: Evaluator,
    levels: Sequence[Level],
    limit_s: float = math.inf,
    *,
    good_s: Lower | None = None,
    near: int | None = None,
) -> DraftPlan:
    """Return the draft plan of `levels`, which must fit with transfers at their use, with the best moves found.

    Transfers are just in time, or as early as memory allows if this makes the step shorter. Early transfers are not
    tried if the step takes at most `good_s` of its streamed buckets. Streamed updates are not tried if they cannot make
    the step shorter than `limit_s`. `near` is a number of streamed buckets that was good for similar levels.
    """
    trial = _Trial(evaluator, levels)
    lanes = (Lane.H2D, Lane.GATHER, Lane.REDUCE, Lane.D2H)
    # If no transfer runs beside compute, their times change nothing.
    is_beside = any(evaluator.prices.lane_of[lane] is not Lane.COMPUTE for lane in lanes)
    first = just_in_time(evaluator, levels) if is_beside else raise_prefetch(evaluator, levels)
    moves, step_s = _with_streams(evaluator, levels, trial, first, limit_s, near)
    if is_beside and (good_s is None or step_s > good_s(moves.streamed)):
        early = raise_prefetch(evaluator, levels)._replace(streamed=moves.streamed)
        early_s = trial.step_s(early)
        moves, step_s = (early, early_s) if early_s < step_s else (moves, step_s)
    return DraftPlan(levels=tuple(levels), modes=evaluator.facts.modes, moves=moves, step_s=step_s)


def _with_streams(
    evaluator: Evaluator, levels: Sequence[Level], trial: "_Trial", moves: Moves, limit_s: float, near: int | None
) -> tuple[Moves, float]:
    """Return `moves` with the best number of streamed updates, and the seconds of the step.

    Updates are streamed in the order of first use.
    """
    step_s = trial.step_s(moves)
    stalled_s = trial.stalled_s[moves.streamed]
    if stalled_s <= _MIN_SHARE * step_s or step_s - stalled_s >= limit_s:
        return moves, step_s
    order = may_be_streamed(evaluator, levels, moves)
    # A streamed bucket adds its copies and its update to compute, and saves at most the wait of compute.
    if not order or evaluator.stream_s(order[0], levels[order[0]]) >= stalled_s:
        return moves, step_s

    @functools.cache
    def seconds(count: int) -> float:
        return trial.step_s(moves._replace(streamed=moves.streamed.union(order[:count])))

    count = 0
    if near is None or len(order) <= _MAX_BISECTED:
        # Each further stream makes the step shorter as long as the host is late, and longer from then on.
        high = len(order)
        while count < high:
            middle = (count + high) // 2
            count, high = (middle + 1, high) if seconds(middle + 1) < seconds(middle) else (count, middle)
    else:
        count = _climbed(seconds, len(order), near)
    return moves._replace(streamed=moves.streamed.union(order[:count])), seconds(count)


@dataclass(slots=True)
class _Trial:
    """Simulates steps of the same levels with different moves."""

    evaluator: Evaluator
    levels: Sequence[Level]
    stalled_s: dict[frozenset[int], float] = field(default_factory=dict)
    """By streamed buckets: the fewest seconds that compute waited for updates in a simulated step."""

    def step_s(self, moves: Moves) -> float:
        """Simulate a step with `moves`; return its seconds and note its `stalled_s`."""
        played = self.evaluator.played(self.levels, moves)
        known_s = self.stalled_s.get(moves.streamed, math.inf)
        self.stalled_s[moves.streamed] = min(known_s, played.stalled_s)
        return played.step_s


def _climbed(seconds: Callable[[int], float], high: int, near: int) -> int:
    """Return the number of streams, from 0 to `high`, with the shortest step found from `near` up and then down.

    The width of a move doubles as long as the step becomes shorter, and then halves.
    """
    at = min(near, high)
    for way in (1, -1):
        width = 1
        while 0 <= at + way * width <= high and seconds(at + way * width) < seconds(at):
            at += way * width
            width *= 2
        while width > 1:
            width //= 2
            if 0 <= at + way * width <= high and seconds(at + way * width) < seconds(at):
                at += way * width
    return at


def may_be_streamed(evaluator: Evaluator, levels: Sequence[Level], moves: Moves) -> list[int]:
    """Return the buckets that the host updates and whose streamed update fits the device, in the order of first use."""
    facts, memory = evaluator.facts, evaluator.memory
    unstreamed = moves._replace(streamed=frozenset())
    in_update = memory.live_bytes(levels, unstreamed)[memory.segment_of(facts.num_run) :]
    free_bytes = facts.problem.budget_bytes - int(in_update.max(initial=0))
    # The rooms of one bucket are there beside the work space of another, so all buckets that are returned fit together.
    rooms_bytes = work_bytes = 0
    found: list[int] = []
    for i in (*sorted(moves.streamed), *sorted(facts.streamable - moves.streamed)):
        if levels[i].has_state_on_host:
            own_bytes = memory.work_bytes[i]
            most = max(rooms_bytes, memory.streamed_bytes(i, levels[i].home) - own_bytes), max(work_bytes, own_bytes)
            if sum(most) <= free_bytes:
                rooms_bytes, work_bytes = most
                found += [i] if i in facts.streamable else []
    return sorted(found)


def update_decisions(
    evaluator: Evaluator, levels: Sequence[Level], moves: Moves, hidden_share: float
) -> tuple[Decision, ...]:
    """Return the decision on the update mode and on the share of streamed updates.

    Empty if the host updates no bucket, or updates after the backward. `hidden_share` is the share of the host's update
    seconds that pass beside compute.
    """
    facts = evaluator.facts
    on_host = [i for i, bucket in enumerate(facts.buckets) if bucket.trainable and levels[i].has_state_on_host]
    if not on_host or evaluator.update is Update.AFTER_BACKWARD:
        return ()
    numel = sum(facts.buckets[i].numel for i in on_host)
    share = sum(facts.buckets[i].numel for i in moves.streamed.intersection(on_host)) / numel
    step_s = evaluator.step_s(levels, moves)
    others: list[tuple[str, float]] = []
    if moves.streamed - facts.streamed:
        others.append(("x = 0", evaluator.step_s(levels, moves._replace(streamed=facts.streamed)) - step_s))
    more = [i for i in may_be_streamed(evaluator, levels, moves) if i not in moves.streamed]
    if more:
        other_s = evaluator.step_s(levels, moves._replace(streamed=moves.streamed | {more[0]}))
        others.append((f"{facts.buckets[more[0]].id} streamed too", max(other_s - step_s, 0.0)))
    choice = f"{evaluator.update}, a share x = {share:.2f} of the state on the host streamed to the device"
    because = f"compute hides {hidden_share:.0%} of the seconds of the host's updates"
    return (decision("update", choice, because, others=others),)
