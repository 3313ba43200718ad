"""Simulate a step of several ranks that differ, each on lanes of its own.

```text
  rank 0    run fwd.0 |  gather b1 .....====|  run fwd.1 |          issued early: it waits for rank 1
  rank 1    run fwd.0               | gather b1 ====|  run fwd.1 |
```

Programs have one order of collectives. The i-th collective starts on all ranks when the last of them has issued it, and
ends for all at once. So ranks are simulated from one collective to the next, without any search.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from elixir_compile.cost import Measured
from elixir_compile.errors import InvalidPlan
from elixir_compile.hardware import Cluster
from elixir_compile.ir.graph import StepGraph
from elixir_compile.ir.kinds import BucketId, Lane, Update, Verb
from elixir_compile.ir.plan import Plan
from elixir_compile.ir.record import Record, Span
from elixir_compile.simulate.engine import Player, actions_of, played_once, player_of, record_of

_COLLECTIVE_LANES = (Lane.GATHER, Lane.REDUCE)
_MOST_CYCLES = 3
"""Steps that are simulated if updates run on beside the next step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """The step of a class of like ranks: what a rank runs, and on what."""

    graph: StepGraph
    plan: Plan
    cluster: Cluster
    measured: Measured


def simulate_ranks(steps: Sequence[RankStep]) -> tuple[Record, ...]:
    """Return the record of a rank of each class; the seconds of all records are those of the slowest.

    Raises InvalidPlan if the plans issue other collectives.
    """
    players = [player_of(step.graph, step.plan, step.cluster, step.measured) for step in steps]
    if any(player.cycle.update is not Update.AFTER_BACKWARD for player in players):
        step_s = _play_cycles(players, steps)
    else:
        _play_jointly(players, steps)
        step_s = max(played_once(player).step_s for player in players)
    return tuple(record_of(step.graph, step.plan, player, step_s) for step, player in zip(steps, players, strict=True))


def busy_share(record: Record) -> float:
    """Return the share of the step in which the device of `record` computes; 0 for a step without seconds."""
    busy_s = sum(span.end_s - span.start_s for span in record.spans if span.lane is Lane.COMPUTE)
    return min(1.0, busy_s / record.step_s) if record.step_s else 0.0


def _play_cycles(players: Sequence[Player], steps: Sequence[RankStep]) -> float:
    """Simulate steps whose updates run on beside the next one, and return the seconds of the last."""
    step_s = 0.0
    for _ in range(_MOST_CYCLES):
        found = [player.begin() for player in players]
        _play_jointly(players, steps)
        # Memory of the host is counted from the begin of each step.
        passed_s = max(max(player.lanes.issued_s, player.lanes.free_s[Lane.COMPUTE]) for player in players)
        step_s = max(passed_s, *(player.lanes.memory_s for player in players))
        for player in players:
            player.lanes.begin_again(passed_s)
        if found == [player.lanes.rounded() for player in players]:
            break
    return step_s


def _play_jointly(players: Sequence[Player], steps: Sequence[RankStep]) -> None:
    """Simulate one step, from each collective of all ranks to the next."""
    acting = [player.acting(actions_of(step.plan)) for player, step in zip(players, steps, strict=True)]
    sharded = frozenset(bucket.id for bucket in steps[0].plan.buckets if bucket.is_sharded)
    while True:
        issued: list[tuple[Verb, BucketId] | None] = []
        for own in acting:
            found = next(own, None)
            # A bucket that is not sharded is copied from the host of each rank alone.
            while found is not None and found[0] is Verb.GATHER and found[1] not in sharded:
                found = next(own, None)
            issued.append(found)
        first = issued[0]
        if any(other != first for other in issued):
            raise InvalidPlan(f"ranks issue other collectives: {', '.join(map(str, issued))}.")
        if first is None:
            return
        _meet(players, *first)


def _meet(players: Sequence[Player], verb: Verb, bucket: BucketId) -> None:
    """Let the collective that all `players` issued last start when the last has issued it."""
    drawn = [_last_spans(player, bucket) for player in players]
    num_spans = {len(places) for places in drawn}
    if num_spans == {0}:
        return
    spans = [[_drawn(player)[place] for place in places] for player, places in zip(players, drawn, strict=True)]
    starts_s = max(own[0].start_s for own in spans)
    ends_s = max(own[-1].end_s for own in spans if own[0].start_s == starts_s)
    longest_s = max(own[-1].end_s - own[0].start_s for own in spans)
    latest = next(own for own in spans if own[0].start_s == starts_s)
    if longest_s > latest[-1].end_s - latest[0].start_s:
        ends_s = starts_s + longest_s
    for player, places, own in zip(players, drawn, spans, strict=True):
        if own[-1].end_s == ends_s:
            continue
        shift_s = starts_s - own[0].start_s
        for place, span in zip(places, own, strict=True):
            is_last = place == places[-1]
            end_s = ends_s if is_last else span.end_s + shift_s
            _drawn(player)[place] = replace(span, start_s=min(span.start_s + shift_s, end_s), end_s=end_s)
        player.lanes.delay(verb, bucket, ends_s)


def _last_spans(player: Player, bucket: BucketId) -> list[int]:
    """Return the places of the spans of the collective that was issued last: one, or two if copies are averaged."""
    spans, places = _drawn(player), list[int]()
    for place in range(len(spans) - 1, max(-1, len(spans) - 5), -1):
        span = spans[place]
        if span.lane in _COLLECTIVE_LANES and span.label.endswith(f" {bucket}"):
            places.append(place)
        elif span.lane is not Lane.COMPUTE or span.end_s > span.start_s:
            break
    return places[::-1]


def _drawn(player: Player) -> list[Span]:
    assert player.lanes.drawing is not None, "`player_of` draws"
    return player.lanes.drawing.spans
