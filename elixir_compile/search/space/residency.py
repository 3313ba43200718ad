"""When gathered copies are on the device: a stay lasts from a bucket's gather to its release, or from the prefetch of
activations to their last use.

    op        0    1    2    3    4    5
    b1        g~~~~w====r                      gathered before op 0, awaited before op 1, released after op 2
    b2             g~~~~~~~~~w====r            gathered one window ahead: where the window of b1 begins

A gather is issued where the window `ahead` windows earlier begins, in its own phase, not before the release of the
bucket's previous stay, and not before a gather that is needed earlier: lanes are first in, first out. `ahead` 0 gathers
right before the wait.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from elixir_compile.search.space.facts import Facts
from elixir_compile.search.space.levels import Level, is_gathered
from elixir_compile.search.space.modes import leave_ends


class Residency(NamedTuple):
    """Op indices of one gathered copy. A tuple, because the search makes hundreds of thousands of them."""

    gather: int
    """Gathered before this op."""
    first: int
    """Awaited before this op."""
    last: int
    """Released after this op."""
    bucket: int
    """Index of the bucket; from the number of buckets on, of the absence that ends."""


class Moves(NamedTuple):
    """When things are on the device: what is gathered or comes back, by first op, and what is on its way out: gradients
    (`gradient_ends`) and activations (`leave_ends`)."""

    residencies: tuple[Residency, ...]
    grad_ends: Mapping[int, int]
    leave_ends: Mapping[int, int]
    """Last op at which each absence's activations are still on the device."""
    streamed: frozenset[int] = frozenset()
    """Buckets whose state passes the device for the update."""


def moves_at_use(facts: Facts, levels: Sequence[Level], ahead: int = 0) -> Moves:
    """Return the moves with every gather `ahead` windows early and gradients waited for soonest."""
    ends = leave_ends(facts.offload_intervals, facts.num_forward, 0)
    streamed = frozenset(i for i in facts.streamed if levels[i].has_state_on_host)
    return Moves(tuple(residencies(facts, levels, ahead)), gradient_ends(facts, levels), ends, streamed)


def residencies(facts: Facts, levels: Sequence[Level], ahead: int) -> list[Residency]:
    """Return every stay at these levels, by first op, each gathered `ahead` windows early."""
    unplaced = [
        (first, bucket, last) for bucket, level in enumerate(levels) for first, last in spans(facts, bucket, level)
    ]
    for number, absence in enumerate(facts.offload_intervals, start=len(facts.buckets)):
        unplaced.append((absence.first, number, max(last for last, _ in absence.lasts)))
    unplaced.sort()
    firsts: dict[int, list[int]] = {}
    issued: dict[int, int] = {}
    released: dict[int, int] = {}
    placed: list[Residency] = []
    for first, bucket, last in unplaced:
        start = facts.phase_start(first)
        earlier = firsts.setdefault(start, [])
        if ahead == 0:
            gather = first
        elif ahead > len(earlier):
            gather = start
        else:
            gather = earlier[-ahead]
        gather = max(gather, released.get(bucket, 0), issued.get(start, 0))
        placed.append(Residency(gather, first, last, bucket))
        issued[start] = gather
        earlier.append(first)
        released[bucket] = last + 1
    return placed


def num_ahead(placed: Sequence[Residency]) -> list[int]:
    """Return how many windows each of `placed`, sorted by first op, is gathered early."""
    firsts = [stay.first for stay in placed]
    return [bisect_left(firsts, stay.first) - bisect_left(firsts, stay.gather) for stay in placed]


def spans(facts: Facts, bucket: int, level: Level) -> list[tuple[int, int]]:
    """Return the first and the last op of each gathered copy of one bucket."""
    windows = facts.windows[bucket]
    if not windows or not is_gathered(facts.buckets[bucket], level):
        return []
    if level.is_released:
        return [(window.first, window.last) for window in windows]
    return [(windows[0].first, windows[-1].last)]


def gradient_ends(facts: Facts, levels: Sequence[Level], lag: int = 1) -> dict[int, int]:
    """Return, per bucket whose gradients leave or are shared out, the last op at which they are whole on the device.

    They leave while those of the next `lag` such buckets are produced: until the op that completes the last of them,
    or the last of the backward. The keys are in the order in which gradients leave.
    """
    order = sorted(
        (gradients.complete, bucket)
        for bucket, gradients in enumerate(facts.gradients)
        if gradients is not None and is_gathered(facts.buckets[bucket], levels[bucket])
    )
    ends = [complete for complete, _ in order] + [facts.num_run - 1] * lag
    return {bucket: end for (_, bucket), end in zip(order, ends[lag:], strict=True)}
