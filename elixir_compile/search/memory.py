"""Device bytes of a step as levels change, counted in segments.

No plan for this problem changes the bytes of any bucket between two neighbours of a fixed set of op indices: where
phases, windows and gradients begin and end. Ops between two of them form a segment, of which only the highest bytes of
everything else matter, so a step of 5,000 ops is a few hundred numbers.

    peak = max over segments s of (rest_bytes[s] + sum over buckets of bytes[bucket][level][s])
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from elixir_compile.ir import Kind
from elixir_compile.search.facts import Facts
from elixir_compile.search.levels import Level
from elixir_compile.search.stays import Stay, gradient_ends, stays


class MemoryModel:
    """Counts the device bytes of a problem, by segment, for any levels and prefetch distances."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._rest_bytes_per_op = _rest(facts)
        starts = _segment_starts(facts)
        self._starts = starts
        num_ops = len(facts.problem.graph.ops)
        self._segment_of = np.searchsorted(starts, np.arange(num_ops + 1), side="right").astype(np.int64) - 1
        # One past the last op is one past the last segment.
        self._segment_of[num_ops] = len(starts)
        self._rest_bytes = np.maximum.reduceat(self._rest_bytes_per_op, starts)

    def live_bytes(self, levels: Sequence[Level], placed: Sequence[Stay]) -> NDArray[np.int64]:
        """Return the highest bytes of each segment at these levels with these stays."""
        facts, segment = self._facts, self._segment_of
        changes = np.zeros(len(self._starts) + 1, dtype=np.int64)
        for stay in placed:
            nbytes = facts.buckets[stay.bucket].nbytes
            changes[segment[stay.gather]] += nbytes
            changes[segment[stay.last + 1]] -= nbytes
        ends = gradient_ends(facts, levels)
        for bucket, level in enumerate(levels):
            if level <= Level.STATE_OFF:
                changes[0] += facts.buckets[bucket].nbytes
            if level is Level.KEPT:
                changes[0] += facts.buckets[bucket].state_nbytes
            gradients = facts.gradients[bucket]
            for birth, nbytes in gradients.births if gradients else ():
                changes[segment[birth]] += nbytes
                if bucket in ends:
                    changes[segment[ends[bucket] + 1]] -= nbytes
        return self._rest_bytes + np.cumsum(changes[:-1])

    def peak_bytes(self, levels: Sequence[Level], ahead: int) -> int:
        """Return the peak at these levels with every gather `ahead` windows early."""
        return int(self.live_bytes(levels, stays(self._facts, levels, ahead)).max())

    def own_bytes(self) -> NDArray[np.int64]:
        """Return bytes[bucket, level, segment] of each bucket alone, gathered at use, gradients leaving when complete.

        Levels that a bucket cannot have hold the bytes of the level before. Exact but for gradients on their way out.
        """
        facts, segment = self._facts, self._segment_of
        changes = np.zeros((len(facts.buckets), len(Level), len(self._starts) + 1), dtype=np.int64)
        for i, bucket in enumerate(facts.buckets):
            changes[i, : Level.RESIDENT, 0] += bucket.nbytes
            changes[i, Level.KEPT, 0] += bucket.state_nbytes
            windows = facts.windows[i]
            for window in windows:
                changes[i, Level.STREAMED, segment[window.first]] += bucket.nbytes
                changes[i, Level.STREAMED, segment[window.last + 1]] -= bucket.nbytes
            if windows:
                changes[i, Level.RESIDENT, segment[windows[0].first]] += bucket.nbytes
                changes[i, Level.RESIDENT, segment[windows[-1].last + 1]] -= bucket.nbytes
            gradients = facts.gradients[i]
            if gradients is None:
                continue
            for birth, nbytes in gradients.births:
                changes[i, :, segment[birth]] += nbytes
                changes[i, Level.RESIDENT :, segment[gradients.complete + 1]] -= nbytes
        return np.cumsum(changes[:, :, :-1], axis=2)

    def segment_of(self, op: int) -> int:
        """Return the segment that holds the op with index `op`; one past the last for one past the last op."""
        return int(self._segment_of[op])

    def highest_op(self, segment: int) -> int:
        """Return the index of the op with the highest bytes in `segment`, the first of several."""
        ends = [*self._starts[1:].tolist(), len(self._rest_bytes_per_op)]
        start = int(self._starts[segment])
        return start + int(self._rest_bytes_per_op[start : ends[segment]].argmax())


def _rest(facts: Facts) -> NDArray[np.int64]:
    """Bytes per op of everything that no bucket holds."""
    graph = facts.problem.graph
    bucketed = {param for bucket in facts.buckets for param in bucket.params}
    trained = {
        param
        for bucket, gradients in zip(facts.buckets, facts.gradients, strict=True)
        if gradients is not None
        for param in bucket.params
    }
    changes = np.zeros(len(graph.ops) + 1, dtype=np.int64)
    changes[0] = facts.problem.base_bytes
    for storage in graph.storages:
        owned = (storage.kind is Kind.PARAM and storage.id in bucketed) or (
            storage.kind is Kind.GRAD and storage.of in trained
        )
        life = facts.lives.lives.get(storage.id)
        if not owned and life is not None:
            changes[life.first] += storage.nbytes
            changes[life.last + 1] -= storage.nbytes
    return np.cumsum(changes[:-1])


def _segment_starts(facts: Facts) -> NDArray[np.int64]:
    num_ops = len(facts.problem.graph.ops)
    starts = {0, facts.num_forward, facts.num_run}
    for windows in facts.windows:
        for window in windows:
            starts |= {window.first, window.last + 1}
    for gradients in facts.gradients:
        if gradients is not None:
            starts.add(gradients.complete + 1)
            starts.update(birth for birth, _ in gradients.births)
    return np.array(sorted(start for start in starts if start < num_ops), dtype=np.int64)
