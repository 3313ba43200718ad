"""When things move and which updates are streamed, for levels that are given: judged by the simulator.

The copy of a bucket waits for its update, and compute where it reads the bucket. Where the host is behind, a part of
the updates may be better off on the device, its state streamed there and back: a share x of what the host updates,
from 0 to 1.

    x = 0      host     u_b0 | u_b1 | u_b2 | u_b3          compute waits for the last
    x = 1/2    compute  stream b0 | stream b1 | forward    the first are needed first, so the first are streamed
               host     u_b2 | u_b3
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from elixir_compile.ir import Decision, Lane, Update
from elixir_compile.search.evaluator import Evaluator
from elixir_compile.search.heuristics.transfers import just_in_time, raise_prefetch
from elixir_compile.search.space.levels import Level
from elixir_compile.search.space.residency import Moves
from elixir_compile.units import format_s

_LEAST_SHARE = 1e-3
"""Of a step: compute that waits less than this for updates has no reason to wait differently."""
_MOST_BISECTED = 16
"""Where more buckets than this may be streamed, a number known to be good elsewhere is where to begin."""

Lower = Callable[[frozenset[int]], float]
"""Seconds below which no step can be at the levels asked about, by the buckets that are streamed."""


def best_moves(
    evaluator: Evaluator,
    levels: Sequence[Level],
    limit_s: float = math.inf,
    *,
    good_s: Lower | None = None,
    near: int | None = None,
) -> tuple[Moves, float]:
    """Return the moves of `levels`, which fit with transfers at their use, and the seconds of a step.

    Transfers are just in time, or as early as memory allows where that is shorter, which is not looked into where a
    step takes no more than `good_s`. Steps that cannot be shorter than `limit_s` are not looked into either. `near` is
    how many buckets a good answer streams.
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
    """Whether some transfer runs beside compute: else all are work for it, whenever they begin."""
    lane_of = evaluator.prices.lane_of
    return any(lane_of[lane] is not Lane.COMPUTE for lane in (Lane.H2D, Lane.GATHER, Lane.REDUCE, Lane.D2H))


def _with_streams(
    evaluator: Evaluator, levels: Sequence[Level], trial: "_Trial", moves: Moves, limit_s: float, near: int | None
) -> tuple[Moves, float]:
    """`moves` with the updates streamed that make the step the shortest, and its seconds."""
    step_s = trial.step_s(moves)
    stalled_s = trial.stalled_s[moves.streamed]
    if stalled_s <= _LEAST_SHARE * step_s or step_s - stalled_s >= limit_s:
        return moves, step_s
    order = may_be_streamed(evaluator, levels, moves)
    # One bucket streamed takes compute at least its copies, and spares it at most what it waits for.
    if not order or evaluator.stream_s(order[0], levels[order[0]]) >= stalled_s:
        return moves, step_s

    @functools.cache
    def seconds(count: int) -> float:
        return trial.step_s(moves._replace(streamed=moves.streamed.union(order[:count])))

    if near is None or len(order) <= _MOST_BISECTED:
        count = _bisected(seconds, len(order))
    else:
        count = _climbed(seconds, len(order), near)
    return moves._replace(streamed=moves.streamed.union(order[:count])), seconds(count)


@dataclass(slots=True)
class _Trial:
    """Moves of the same levels, played."""

    evaluator: Evaluator
    levels: Sequence[Level]
    stalled_s: dict[frozenset[int], float] = field(default_factory=dict)
    """Least seconds that compute waits for updates, by what is streamed."""

    def step_s(self, moves: Moves) -> float:
        played = self.evaluator.played(self.levels, moves)
        least_s = self.stalled_s.get(moves.streamed, math.inf)
        self.stalled_s[moves.streamed] = min(least_s, played.stalled_s)
        return played.step_s


def _bisected(seconds: Callable[[int], float], most: int) -> int:
    """The number of streams, of `most`, with the shortest step: more is shorter while the host is behind, and longer
    from then on."""
    least = 0
    while least < most:
        middle = (least + most) // 2
        if seconds(middle + 1) < seconds(middle):
            least = middle + 1
        else:
            most = middle
    return least


def _climbed(seconds: Callable[[int], float], most: int, near: int) -> int:
    """The same, in steps from `near` that double as long as the step becomes shorter, and then halve."""
    at = min(near, most)
    for way in (1, -1):
        width = 1
        while 0 <= at + way * width <= most and seconds(at + way * width) < seconds(at):
            at += way * width
            width *= 2
        while width > 1:
            width //= 2
            if 0 <= at + way * width <= most and seconds(at + way * width) < seconds(at):
                at += way * width
    return at


def may_be_streamed(evaluator: Evaluator, levels: Sequence[Level], moves: Moves) -> list[int]:
    """Return the buckets that the host updates and the device has room for, the first needed first."""
    facts, memory = evaluator.facts, evaluator.memory
    kept = moves._replace(streamed=frozenset())
    in_update = memory.live_bytes(levels, kept)[memory.segment_of(facts.num_run) :]
    free_bytes = facts.problem.budget_bytes - int(in_update.max(initial=0))
    return [
        i
        for i in sorted(facts.streamable)
        if levels[i].has_state_on_host and memory.streamed_bytes(i, levels[i].home) <= free_bytes
    ]


def update_decisions(
    evaluator: Evaluator, levels: Sequence[Level], moves: Moves, hidden_share: float
) -> tuple[Decision, ...]:
    """Return why updates of the host run when they do, and why so many of them are streamed; nothing where the host
    updates nothing, or waits for nothing.

    `hidden_share` of the host's seconds are under compute.
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
            choice=f"{evaluator.update}, a share x = {share:.2f} of what lives on the host streamed to the device",
            because=f"{hidden_share:.0%} of the seconds that the host updates are under compute",
            rejected=tuple(rejected),
        ),
    )
