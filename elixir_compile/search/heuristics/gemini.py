"""The rule of Colossal-AI's Gemini: equal chunks of parameters, and which of them stay on the device.

    size        of sizes from 32 Mi elements up, the one that leaves the fewest elements of chunks unused
    chunks      parameters in the order of first use, each in the current chunk or, if it has no room, in the next
    static      the first chunks, until the fractions of the user are met
    auto        optimizer state on the host, and every chunk comes from the host. If the device is full, the chunk that
                is used furthest ahead leaves (Belady's rule)

    memory for 2 of 4 chunks      forward  0  1  2  3   backward  3  2  1  0      6 loads, 2 of 4 chunks stay
                                  leaves         0  1                3  2

Chunks are buckets of this size here. There are three differences: a chunk of Gemini takes its whole size, and a bucket
only the elements that are used, so a decision tells how many are unused; a bucket that leaves between two of its uses
is gathered for each of them; and a gradient does not take the memory of its parameter.

Source: `colossalai/zero/gemini` at commit 4f9953b, read for its rules.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from elixir_compile.ir import Decision
from elixir_compile.search.evaluator import Evaluator
from elixir_compile.search.problem import Problem
from elixir_compile.search.space.buckets import new_param_numels
from elixir_compile.search.space.levels import Level
from elixir_compile.search.space.residency import moves_at_use

MIN_NUMEL = SEARCH_SPAN = 32 << 20
"""The smallest chunk, and the span of sizes that are tried, in elements: Gemini's `min_chunk_size_m` and
`search_range_m`. A model with fewer elements is a single chunk that stays on the device."""
_INTERVAL = 1024
"""Elements between sizes that are tried. Gemini takes the hidden size of the model if the user names it."""
_OUTLIER = 3.0
"""Parameters larger than the mean by more than so many standard deviations do not count in the search of a size."""
_STEADY_CAP = 0.9
"""The share of the device that Gemini fills after its first step, `steady_cuda_cap_ratio`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSize:
    """The size of all chunks, in elements."""

    numel: int
    unused: int
    """Elements of all chunks that hold no parameter, as Gemini counts them: without parameters larger than others."""
    first: int
    last: int
    """The smallest and the largest of the sizes tried."""
    num_tried: int


def chunk_size(
    numels: Sequence[int],
    num_ranks: int = 1,
    *,
    min_numel: int = MIN_NUMEL,
    span: int = SEARCH_SPAN,
    interval: int = _INTERVAL,
) -> ChunkSize:
    """Return the size of chunks for parameters of `numels` elements, in the order in which they are used.

    The smallest of several sizes with the fewest unused elements is taken, and rounded up to a multiple of `num_ranks`.
    """
    total = sum(numels)
    if total < min_numel:
        return ChunkSize(numel=max(total, 1), unused=0, first=total, last=total, num_tried=1)
    limit = float(np.mean(numels) + _OUTLIER * np.std(numels))
    usual = [numel for numel in numels if numel <= limit]
    first = -(-max(min_numel, *usual) // interval) * interval
    sizes = np.arange(first, first + span + 1, interval, dtype=np.int64)
    unused = _unused(usual, sizes)
    best = int(unused.argmin())
    numel = -(-int(sizes[best]) // num_ranks) * num_ranks
    return ChunkSize(numel=numel, unused=int(unused[best]), first=first, last=int(sizes[-1]), num_tried=len(sizes))


def _unused(numels: Sequence[int], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return, for each of `sizes`, the unused elements of chunks of this size filled with `numels` in order."""
    unused, left = np.zeros_like(sizes), np.zeros_like(sizes)
    for numel in numels:
        is_full = left < numel
        unused += np.where(is_full, left, 0)
        left = np.where(is_full, sizes, left) - numel
    return unused + left


def with_chunks(problem: Problem) -> Problem:
    """Return `problem` with new buckets of the size of Gemini's chunks."""
    return replace(problem, bucket_numel=chunk_size(new_param_numels(problem), problem.num_shards).numel)


def place_by_gemini(evaluator: Evaluator) -> tuple[Level, ...]:
    """Return the levels by the rule: static if the user fixed fractions, else auto."""
    facts = evaluator.facts
    if facts.problem.fractions is not None or _stays_gathered(evaluator):
        return facts.start_levels
    levels = _with_copies(evaluator, _never_evicted(evaluator))
    while not evaluator.fits(levels, ahead=0):
        copies = [i for i, level in enumerate(levels) if level is Level.ALL_OFF]
        if not copies:
            break
        longest = min(copies, key=lambda i: facts.windows[i][0].first)
        levels = _with_copies(evaluator, [i for i in copies if i != longest])
    return levels


def _stays_gathered(evaluator: Evaluator) -> bool:
    """Return whether Gemini keeps all parameters and their state on the device because they are few."""
    return sum(bucket.numel for bucket in evaluator.facts.buckets) < MIN_NUMEL


def _with_copies(evaluator: Evaluator, kept: Sequence[int]) -> tuple[Level, ...]:
    """Return the levels with all buckets on the host, and the copies of the buckets `kept` kept until the backward."""
    facts = evaluator.facts
    return tuple(
        Level.ALL_OFF if i in kept and Level.ALL_OFF in choices else choices[-1]
        for i, choices in enumerate(facts.choices)
    )


def _never_evicted(evaluator: Evaluator) -> list[int]:
    """Return the buckets whose copies stay from their first use to their last, by Belady's rule."""
    facts, memory = evaluator.facts, evaluator.memory
    levels = _with_copies(evaluator, ())
    free_bytes = int(_STEADY_CAP * facts.problem.budget_bytes) - memory.live_bytes(levels, moves_at_use(facts, levels))
    uses = sorted((window.first, i) for i, windows in enumerate(facts.windows) for window in windows)
    held: set[int] = set()
    evicted: set[int] = set()
    for number, (op, bucket) in enumerate(uses):
        # Gemini makes room before a chunk is used, for this use and the ops up to the next.
        until = uses[number + 1][0] if number + 1 < len(uses) else facts.num_run
        segments = slice(memory.segment_of(op), max(memory.segment_of(until), memory.segment_of(op) + 1))
        room_bytes = int(free_bytes[segments].min())
        ahead = {i: place for place, (_, i) in reversed(list(enumerate(uses[number + 1 :])))}
        held.discard(bucket)
        while held and sum(facts.buckets[i].flat_nbytes for i in held) > room_bytes:
            furthest = max(held, key=lambda i: (ahead.get(i, len(uses)), i))
            held.remove(furthest)
            if furthest in ahead:
                evicted.add(furthest)
        held.add(bucket)
    return [i for i, windows in enumerate(facts.windows) if windows and i not in evicted]


def gemini_decisions(evaluator: Evaluator, levels: Sequence[Level]) -> Iterator[Decision]:
    """Yield the decisions about the size of chunks, and about those that leave the device."""
    facts = evaluator.facts
    problem = facts.problem
    total = sum(bucket.numel for bucket in facts.buckets)
    numels = new_param_numels(problem)
    if numels:
        size = chunk_size(numels, problem.num_shards)
        tried = f"of {size.num_tried} sizes from {size.first} to {size.last} elements it leaves the fewest unused"
        yield Decision(
            subject="chunks",
            choice=f"{len(facts.buckets)} of at most {size.numel} elements",
            because=f"{tried}: {size.unused} beside {total}, which Gemini allocates and this plan does not",
        )
    if problem.fractions is not None:
        return
    if _stays_gathered(evaluator):
        because = f"{total} elements are fewer than {MIN_NUMEL}, the smallest chunk"
        yield Decision(subject="evictions", choice="none: all buckets stay on the device", because=because)
        return
    kept = sum(level is Level.ALL_OFF for level in levels)
    num_loads = sum(
        len(windows) if level.is_released else min(1, len(windows))
        for windows, level in zip(facts.windows, levels, strict=True)
    )
    yield Decision(
        subject="evictions",
        choice=f"{kept} of {len(levels)} buckets stay on the device from their first use to their last",
        because=f"the bucket used furthest ahead leaves if more than {_STEADY_CAP:.0%} of the budget would be full; "
        f"{num_loads} loads per step",
    )
