"""The moves of given levels: the times of transfers, and the buckets with streamed updates, chosen by simulated steps.

The copy of a bucket to the device waits for its update, and compute waits for the copy at the first use. If the host is
late, some of its updates may take less time on the device, with their state streamed there and back: a share x, from 0
to 1, of the elements with host updates.

    x = 0      host     u_b0 | u_b1 | u_b2 | u_b3          compute waits for the last
    x = 1/2    compute  stream b0 | stream b1 | forward    the first are needed first, so the first are streamed
               host     u_b2 | u_b3
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from elixir_compile.base.units import format_s
from elixir_compile.ir import Decision, Lane, Update
from elixir_compile.search.evaluator import Evaluator
from elixir_compile.search.heuristics.transfers import just_in_time, raise_prefetch
from elixir_compile.search.space.levels import Level
from elixir_compile.search.space.residency import Moves

_MIN_SHARE = 1e-3
"""Nothing is streamed if compute waits for updates for less than this share of a step."""
_MAX_BISECTED = 16
"""If more buckets may be streamed, the search for their number begins at a number that was good before, if known."""

Lower = Callable[[frozenset[int]], float]
"""The set of streamed buckets to a lower limit on the seconds of a step at the same levels."""


def best_moves(
    evaluator: Evaluator,
    levels: Sequence[Level],
    limit_s: float = math.inf,
    *,
    good_s: Lower | None = None,
    near: int | None = None,
) -> tuple[Moves, float]:
    """Return the best moves found for `levels`, which must fit with transfers at their use, and the seconds of a step.

    Transfers are just in time, or as early as memory allows if this makes the step shorter. Early transfers are not
    tried if the step takes at most `good_s` of its streamed buckets. Streamed updates are not tried if they cannot make
    the step shorter than `limit_s`. `near` is a number of streamed buckets that was good for similar levels.
    """
    trial = _Trial(evaluator, levels)
    if not _is_any_beside(evaluator):
        return _with_streams(evaluator, levels, trial, raise_prefetch(evaluator, levels), limit_s, near)
    moves, step_s = _with_streams(evaluator, levels, trial, just_in_time(evaluator, levels), limit_s, near)
    if good_s is not None and step_s <= good_s(moves.streamed):
        return moves, step_s
    early = raise_prefetch(evaluator, levels)._replace(streamed=moves.streamed)
    early_s = trial.step_s(early)
    return (early, early_s) if early_s < step_s else (moves, step_s)


def _is_any_beside(evaluator: Evaluator) -> bool:
    """Return whether any transfer runs beside compute; if none does, the times of transfers change nothing."""
    lane_of = evaluator.prices.lane_of
    return any(lane_of[lane] is not Lane.COMPUTE for lane in (Lane.H2D, Lane.GATHER, Lane.REDUCE, Lane.D2H))


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

    if near is None or len(order) <= _MAX_BISECTED:
        count = _bisected(seconds, len(order))
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


def _bisected(seconds: Callable[[int], float], high: int) -> int:
    """Return the number of streams, from 0 to `high`, with the shortest step, by bisection.

    Each further stream makes the step shorter as long as the host is late, and longer from then on.
    """
    low = 0
    while low < high:
        middle = (low + high) // 2
        if seconds(middle + 1) < seconds(middle):
            low = middle + 1
        else:
            high = middle
    return low


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
    return [
        i
        for i in sorted(facts.streamable)
        if levels[i].has_state_on_host and memory.streamed_bytes(i, levels[i].home) <= free_bytes
    ]


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
    rejected: list[str] = []
    if moves.streamed - facts.streamed:
        other_s = evaluator.step_s(levels, moves._replace(streamed=facts.streamed))
        rejected.append(f"x = 0: {format_s(other_s - step_s)} longer")
    more = [i for i in may_be_streamed(evaluator, levels, moves) if i not in moves.streamed]
    if more:
        other_s = evaluator.step_s(levels, moves._replace(streamed=moves.streamed | {more[0]}))
        rejected.append(f"{facts.buckets[more[0]].id} streamed too: {format_s(max(other_s - step_s, 0.0))} longer")
    return (
        Decision(
            subject="update",
            choice=f"{evaluator.update}, a share x = {share:.2f} of the state on the host streamed to the device",
            because=f"compute hides {hidden_share:.0%} of the seconds of the host's updates",
            rejected=tuple(rejected),
        ),
    )
