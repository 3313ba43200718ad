"""Count the device bytes of a step in segments, for any levels and moves.

No plan for a problem changes the bytes of a bucket except at a fixed set of ops, at which phases, windows and gradients
begin and end. The ops between two neighbours of the set form a segment. Of all other bytes only the highest count of
each segment matters, so a step of 5,000 ops becomes a few hundred numbers.

    peak = max over segments s of (rest_bytes[s] + sum over buckets of bytes[bucket][level][s])
"""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from elixir_compile.analysis.bucket_bytes import (
    Held,
    Sizes,
    gather_buffers,
    last_with_gradients,
    reduce_buffers,
    resting,
)
from elixir_compile.cost import streamed_bytes
from elixir_compile.ir import Kind, Tier, averaged_bytes
from elixir_compile.search.space.facts import Facts
from elixir_compile.search.space.levels import Level, is_gathered, placement_of
from elixir_compile.search.space.residency import Moves, Residency, moves_at_use, spans


class MemoryModel:
    """The segments of a step, and its device bytes in each of them at any levels, with any moves."""

    def __init__(self, facts: Facts, more_starts: Iterable[int] = ()) -> None:
        """Cut the step of `facts` into segments; `more_starts` are op indices at which more segments begin."""
        self._facts = facts
        self._sizes = [Sizes.of(bucket) for bucket in facts.buckets]
        self._resting_bytes = [
            [sum(nbytes for _, nbytes in resting(bucket, placement_of(bucket, level))) for level in Level]
            for bucket in facts.buckets
        ]
        """Bytes of each bucket that are on the device during the whole step, by level."""
        self._is_any_reduced = any(sizes.is_sharded or sizes.is_packed for sizes in self._sizes)
        self.rest_bytes_per_op = _rest(facts)
        starts = _segment_starts(facts, more_starts)
        self._starts = starts
        num_ops = len(facts.graph.ops)
        self._segment_of = np.searchsorted(starts, np.arange(num_ops + 1), side="right").astype(np.int64) - 1
        # One past the last op is one past the last segment.
        self._segment_of[num_ops] = len(starts)
        self.rest_bytes = self.highest(self.rest_bytes_per_op)
        """Highest bytes of each segment without buckets and offloaded activations."""

    def highest(self, bytes_per_op: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the highest of `bytes_per_op` in each segment, along the last axis."""
        return np.maximum.reduceat(bytes_per_op, self._starts, axis=-1)

    def live_bytes(self, levels: Sequence[Level], moves: Moves) -> NDArray[np.int64]:
        """Return the highest bytes of each segment at these levels with these moves."""
        facts, segment = self._facts, self._segment_of
        changes = np.zeros(len(self._starts) + 1, dtype=np.int64)
        for residency in moves.residencies:
            if residency.bucket >= len(facts.buckets):
                self._add_offloaded(changes, residency.bucket - len(facts.buckets), residency.gather, moves)
                continue
            sizes = self._sizes[residency.bucket]
            changes[segment[residency.gather]] += sizes.flat_bytes
            changes[segment[residency.last + 1]] -= sizes.flat_bytes
            if sizes.is_sharded:
                self._add(changes, self._gather_buffers(residency, levels[residency.bucket]))
        ends = moves.grad_ends
        lasts: set[tuple[int, int]] = set()
        if self._is_any_reduced:
            lasts = {(residency.bucket, residency.last) for residency in moves.residencies}
        for bucket, level in enumerate(levels):
            changes[0] += self._resting_bytes[bucket][level]
            gradients = facts.gradients[bucket]
            if gradients is None:
                continue
            own_end = self._last_with_gradients(bucket)
            unreduced_end = gradients.complete if self._sizes[bucket].is_packed else ends.get(bucket, own_end)
            for birth, nbytes in gradients.births:
                changes[segment[birth]] += nbytes
                changes[segment[unreduced_end + 1]] -= nbytes
            if self._sizes[bucket].is_sharded or self._sizes[bucket].is_packed:
                is_replaced = (bucket, gradients.complete) in lasts
                end = ends.get(bucket, facts.num_run - 1)
                self._add(changes, self._reduce_buffers(bucket, level, end, is_replaced=is_replaced))
        if moves.streamed:
            changes[segment[facts.num_run]] += max(self.streamed_bytes(i, levels[i].home) for i in moves.streamed)
        return self.rest_bytes + np.cumsum(changes[:-1])

    def streamed_bytes(self, bucket: int, home: Tier) -> int:
        """Return the device bytes that a streamed update of a bucket adds, if its parameters live in `home`."""
        return streamed_bytes(self._facts.buckets[bucket], home)

    def _add(self, changes: NDArray[np.int64], buffers: Iterable[Held]) -> None:
        for held in buffers:
            changes[self._segment_of[held.first]] += held.nbytes
            changes[self._segment_of[held.last + 1]] -= held.nbytes

    def _gather_buffers(self, residency: Residency, level: Level) -> Iterable[Held]:
        sizes = self._sizes[residency.bucket]
        return gather_buffers(sizes, residency.gather, residency.first, is_sent=level.has_param_on_host)

    def _reduce_buffers(self, bucket: int, level: Level, wait: int, *, is_replaced: bool) -> Iterable[Held]:
        """Return the buffers of the reduce of a bucket, whose wait is after op `wait`."""
        gradients = self._facts.gradients[bucket]
        assert gradients is not None
        end = wait if level.has_param_on_host else self._last_with_gradients(bucket)
        unreduced_bytes = sum(nbytes for _, nbytes in gradients.births)
        sizes = self._sizes[bucket]
        return reduce_buffers(sizes, gradients.complete, wait, end, unreduced_bytes, is_replaced=is_replaced)

    def _last_with_gradients(self, bucket: int) -> int:
        facts = self._facts
        return last_with_gradients(facts.buckets[bucket], facts.num_run, len(facts.graph.ops))

    def _add_offloaded(self, changes: NDArray[np.int64], number: int, prefetch: int, moves: Moves) -> None:
        """Add the bytes of offloaded activations: until they have left, and from op `prefetch` to their last use."""
        interval, segment = self._facts.offload_intervals[number], self._segment_of
        for birth, nbytes in interval.births:
            changes[segment[birth]] += nbytes
        changes[segment[moves.leave_ends[number] + 1]] -= interval.nbytes
        changes[segment[prefetch]] += interval.nbytes
        for last, nbytes in interval.lasts:
            changes[segment[last + 1]] -= nbytes

    def peak_bytes(self, levels: Sequence[Level], ahead: int) -> int:
        """Return the peak at these levels with every gather `ahead` windows early."""
        return int(self.live_bytes(levels, moves_at_use(self._facts, levels, ahead)).max())

    def own_bytes(self) -> NDArray[np.int64]:
        """Return bytes[bucket, level, segment] of each bucket alone, gathered at use.

        On several ranks their sum is exact. On one rank, gradients that go to the host count until the gradients of the
        next bucket are complete, even if those stay on the device: the sum is at most `live_bytes`, and less if the
        gradients of several buckets in a row stay.
        """
        facts = self._facts
        changes = np.zeros((len(facts.buckets), len(Level), len(self._starts) + 1), dtype=np.int64)
        for i, next_complete in enumerate(_next_completes(facts)):
            for level in Level:
                self._add_copies(changes[i, level], i, level)
                self._add_gradients(changes[i, level], i, level, next_complete)
        return np.cumsum(changes[:, :, :-1], axis=2)

    def _add_copies(self, changes: NDArray[np.int64], i: int, level: Level) -> None:
        sizes, segment = self._sizes[i], self._segment_of
        changes[0] += self._resting_bytes[i][level]
        for first, last in spans(self._facts, i, level):
            changes[segment[first]] += sizes.flat_bytes
            changes[segment[last + 1]] -= sizes.flat_bytes
            if sizes.is_sharded:
                self._add(changes, self._gather_buffers(Residency(first, first, last, i), level))

    def _add_gradients(self, changes: NDArray[np.int64], i: int, level: Level, next_complete: int) -> None:
        bucket, gradients, segment = self._facts.buckets[i], self._facts.gradients[i], self._segment_of
        if gradients is None:
            return
        leaves = is_gathered(bucket, level)
        unreduced_end = next_complete if leaves else self._last_with_gradients(i)
        unreduced_end = gradients.complete if bucket.is_packed else unreduced_end
        for birth, nbytes in gradients.births:
            changes[segment[birth]] += nbytes
            changes[segment[unreduced_end + 1]] -= nbytes
        if bucket.is_sharded or bucket.is_packed:
            is_replaced = any(last == gradients.complete for _, last in spans(self._facts, i, level))
            self._add(changes, self._reduce_buffers(i, level, next_complete, is_replaced=is_replaced))

    def segment_of(self, op: int) -> int:
        """Return the segment of the op with index `op`; the number of segments if `op` is the number of ops."""
        return int(self._segment_of[op])

    def completed_before(self, segment: int) -> list[int]:
        """Return the buckets whose gradients are complete before `segment` begins, in that order."""
        start = int(self._starts[segment])
        order = sorted((grads.complete, i) for i, grads in enumerate(self._facts.gradients) if grads is not None)
        return [i for complete, i in order if complete < start]

    def highest_op(self, segment: int) -> int:
        """Return the index of the op in `segment` with the most bytes outside of buckets, the first of several."""
        ends = [*self._starts[1:].tolist(), len(self.rest_bytes_per_op)]
        start = int(self._starts[segment])
        return start + int(self.rest_bytes_per_op[start : ends[segment]].argmax())


def _next_completes(facts: Facts) -> list[int]:
    """Return per bucket the op that completes the gradients of the next bucket, or the last op of the backward."""
    order = sorted((grads.complete, i) for i, grads in enumerate(facts.gradients) if grads is not None)
    found = [facts.num_run - 1] * len(facts.buckets)
    for (_, i), (complete, _) in itertools.pairwise(order):
        found[i] = complete
    return found


def _rest(facts: Facts) -> NDArray[np.int64]:
    """Return the bytes per op without buckets and offloaded activations."""
    graph = facts.graph
    bucketed = {param for bucket in facts.buckets for param in bucket.params}
    trained = {
        param
        for bucket, gradients in zip(facts.buckets, facts.gradients, strict=True)
        if gradients is not None
        for param in bucket.params
    }
    names = {interval.group for interval in facts.offload_intervals}
    offloaded = {name for group in facts.activations if group.id in names for name in group.storages}
    changes = np.zeros(len(graph.ops) + 1, dtype=np.int64)
    changes[0] = facts.problem.base_bytes
    ends: list[tuple[int, int]] = []
    for storage in graph.storages:
        owned = (
            storage.id in offloaded
            or (storage.kind is Kind.PARAM and storage.id in bucketed)
            or (storage.kind is Kind.GRAD and storage.of in trained)
        )
        life = facts.lives.lives.get(storage.id)
        if not owned and life is not None:
            changes[life.first] += storage.nbytes
            changes[life.last + 1] -= storage.nbytes
            ends.append((life.last, storage.nbytes))
    rest = np.cumsum(changes[:-1])
    # While other graphs run, this graph holds the storages that outlive its last forward op, or those of its update.
    last = facts.num_forward - 1
    dying_bytes = sum(nbytes for end, nbytes in ends if end == last)
    rest[last] += max(0, facts.problem.between_bytes - dying_bytes)
    rest[facts.num_forward : facts.num_run] += averaged_bytes(facts.buckets, facts.problem.num_copies)
    inputs_bytes = sum(storage.nbytes for storage in graph.storages if storage.kind is Kind.INPUT)
    rest[facts.num_run :] += max(0, facts.problem.after_bytes - inputs_bytes)
    return rest


def _segment_starts(facts: Facts, more_starts: Iterable[int]) -> NDArray[np.int64]:
    num_ops = len(facts.graph.ops)
    starts = {0, facts.num_forward, facts.num_run, *more_starts}
    for bucket, windows, gradients in zip(facts.buckets, facts.windows, facts.gradients, strict=True):
        for window in windows:
            starts |= {window.first, window.last + 1}
        if gradients is not None:
            starts.add(gradients.complete + 1)
            starts.update(birth for birth, _ in gradients.births)
        # The buffers of a gather and of a reduce that live between two ops count at one op.
        if bucket.is_sharded:
            starts.update(window.first + 1 for window in windows)
        if (bucket.is_sharded or bucket.is_packed) and gradients is not None:
            starts.add(gradients.complete)
    for interval in facts.offload_intervals:
        starts |= {interval.leave + 1, interval.first, *(birth for birth, _ in interval.births)}
        starts.update(last + 1 for last, _ in interval.lasts)
    return np.array(sorted(start for start in starts if start < num_ops), dtype=np.int64)
