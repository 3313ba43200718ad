"""Derive from levels and a prefetch distance the residencies: the ops between which gathered copies and prefetched
activations are on the device.

    op        0    1    2    3    4    5
    b1        g~~~~w====r                      gathered before op 0, awaited before op 1, released after op 2
    b2             g~~~~~~~~~w====r            gathered one window ahead: when the window of b1 begins

A gather is issued when the window `ahead` windows earlier begins, but not before its own phase begins, not before the
previous copy of the bucket is released, and not before a gather that is needed earlier, because lanes are first in,
first out. If `ahead` is 0, it is issued right before the wait.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from elixir_compile.search.space.facts import Facts
from elixir_compile.search.space.levels import Level, is_gathered
from elixir_compile.search.space.modes import leave_ends


class Residency(NamedTuple):
    """Op indices of one gathered copy or one prefetch. A tuple, because a search makes hundreds of thousands."""

    gather: int
    """Gathered before this op."""
    first: int
    """Awaited before this op."""
    last: int
    """Released after this op."""
    bucket: int
    """Index of the bucket, or the number of buckets plus the index of the offload interval that ends."""


class Moves(NamedTuple):
    """The times of all transfers of a step, as op indices."""

    residencies: tuple[Residency, ...]
    """Sorted by first op."""
    grad_ends: Mapping[int, int]
    """Per bucket whose gradients leave: the last op at which they occupy the device (`gradient_ends`)."""
    leave_ends: Mapping[int, int]
    """Per offload interval: the last op at which its activations still occupy the device."""
    streamed: frozenset[int] = frozenset()
    """Buckets with a streamed update."""


def moves_at_use(facts: Facts, levels: Sequence[Level], ahead: int = 0) -> Moves:
    """Return the moves with every gather `ahead` windows early, and waits for gradients as early as possible."""
    ends = leave_ends(facts.offload_intervals, facts.num_forward, 0)
    streamed = frozenset(i for i in facts.streamed if levels[i].has_state_on_host)
    return Moves(tuple(residencies(facts, levels, ahead)), gradient_ends(facts, levels), ends, streamed)


def residencies(facts: Facts, levels: Sequence[Level], ahead: int) -> list[Residency]:
    """Return every residency at these levels, by first op, each gathered `ahead` windows early."""
    unplaced = [
        (first, bucket, last) for bucket, level in enumerate(levels) for first, last in spans(facts, bucket, level)
    ]
    for number, interval in enumerate(facts.offload_intervals, start=len(facts.buckets)):
        unplaced.append((interval.first, number, max(last for last, _ in interval.lasts)))
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
    firsts = [residency.first for residency in placed]
    return [bisect_left(firsts, residency.first) - bisect_left(firsts, residency.gather) for residency in placed]


def spans(facts: Facts, bucket: int, level: Level) -> list[tuple[int, int]]:
    """Return the first and the last op of each gathered copy of a bucket."""
    windows = facts.windows[bucket]
    if not windows or not is_gathered(facts.buckets[bucket], level):
        return []
    if level.is_released:
        return [(window.first, window.last) for window in windows]
    return [(windows[0].first, windows[-1].last)]


def gradient_ends(facts: Facts, levels: Sequence[Level], lag: int = 1) -> dict[int, int]:
    """Return the last op at which unreduced gradients occupy the device, per bucket that reduces or offloads them.

    It is the op that completes the gradients of the bucket that comes `lag` later among these buckets, or the last op
    of the backward if there is none. The keys are in the order in which gradients leave.
    """
    order = sorted(
        (gradients.complete, bucket)
        for bucket, gradients in enumerate(facts.gradients)
        if gradients is not None and is_gathered(facts.buckets[bucket], levels[bucket])
    )
    ends = [complete for complete, _ in order] + [facts.num_run - 1] * lag
    return {bucket: end for (_, bucket), end in zip(order, ends[lag:], strict=True)}
