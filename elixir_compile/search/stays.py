"""When gathered copies are on the device: a stay lasts from a bucket's gather to its release.

    op        0    1    2    3    4    5
    b1        g~~~~w====r                      gathered before op 0, awaited before op 1, released after op 2
    b2             g~~~~~~~~~w====r            gathered one window ahead: where the window of b1 begins

A gather is issued where the window `ahead` windows earlier begins, in its own phase, and not before the release of the
bucket's previous stay. `ahead` 0 gathers right before the wait.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from elixir_compile.search.facts import Facts
from elixir_compile.search.levels import Level


class Stay(NamedTuple):
    """Op indices of one gathered copy. A tuple, because the search makes hundreds of thousands of them."""

    gather: int
    """Gathered before this op."""
    first: int
    """Awaited before this op."""
    last: int
    """Released after this op."""
    bucket: int
    """Index of the bucket."""


def stays(
    facts: Facts, levels: Sequence[Level], default_ahead: int, ahead: Mapping[tuple[int, int], int] | None = None
) -> list[Stay]:
    """Return every stay at these levels, by first op.

    `ahead` overrides `default_ahead` for the stay with key (bucket, first).
    """
    unplaced = sorted(_spans(facts, levels))
    firsts: dict[int, list[int]] = {}
    released: dict[int, int] = {}
    placed: list[Stay] = []
    for first, bucket, last in unplaced:
        start = facts.phase_start(first)
        earlier = firsts.setdefault(start, [])
        distance = default_ahead if ahead is None else ahead.get((bucket, first), default_ahead)
        if distance == 0:
            gather = first
        elif distance > len(earlier):
            gather = start
        else:
            gather = earlier[-distance]
        placed.append(Stay(max(gather, released.get(bucket, 0)), first, last, bucket))
        earlier.append(first)
        released[bucket] = last + 1
    return placed


def _spans(facts: Facts, levels: Sequence[Level]) -> list[tuple[int, int, int]]:
    """(first, bucket, last) of every stay."""
    spans: list[tuple[int, int, int]] = []
    for bucket, level in enumerate(levels):
        windows = facts.windows[bucket]
        if level is Level.STREAMED:
            spans.extend((window.first, bucket, window.last) for window in windows)
        elif level is Level.RESIDENT and windows:
            spans.append((windows[0].first, bucket, windows[-1].last))
    return spans


def gradient_ends(facts: Facts, levels: Sequence[Level]) -> dict[int, int]:
    """Return, per host bucket with gradients, the last op at which they are on the device.

    They leave while the next bucket's are produced: until the op that completes the next host bucket's gradients,
    or the last of the backward. The keys are in the order in which gradients leave.
    """
    order = sorted(
        (gradients.complete, bucket)
        for bucket, gradients in enumerate(facts.gradients)
        if gradients is not None and levels[bucket] >= Level.RESIDENT
    )
    ends = [complete for complete, _ in order] + [facts.num_run - 1]
    return {bucket: end for (_, bucket), end in zip(order, ends[1:], strict=True)}
