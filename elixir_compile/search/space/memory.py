"""Device bytes of a step as levels change, counted in segments.

No plan for this problem changes the bytes of any bucket between two neighbours of a fixed set of op indices: where
phases, windows and gradients begin and end. Ops between two of them form a segment, of which only the highest bytes of
everything else matter, so a step of 5,000 ops is a few hundred numbers.

    peak = max over segments s of (rest_bytes[s] + sum over buckets of bytes[bucket][level][s])
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elixir_compile.cost import streamed_bytes
from elixir_compile.ir import Bucket, Kind, Tier, averaged_bytes
from elixir_compile.search.space.facts import Facts
from elixir_compile.search.space.levels import Level, is_gathered
from elixir_compile.search.space.residency import Moves, Residency, moves_at_use, spans


class MemoryModel:
    """Counts the device bytes of a problem, by segment, for any levels and prefetch distances."""

    def __init__(self, facts: Facts, more_starts: Iterable[int] = ()) -> None:
        """`more_starts` are op indices at which segments begin besides those of `facts`."""
        self._facts = facts
        self._sizes = [_Sizes.of(bucket) for bucket in facts.buckets]
        self._is_shared = any(sizes.is_sharded or sizes.is_packed for sizes in self._sizes)
        self.rest_bytes_per_op = _rest(facts)
        starts = _segment_starts(facts, more_starts)
        self._starts = starts
        num_ops = len(facts.graph.ops)
        self._segment_of = np.searchsorted(starts, np.arange(num_ops + 1), side="right").astype(np.int64) - 1
        # One past the last op is one past the last segment.
        self._segment_of[num_ops] = len(starts)
        self.rest_bytes = self.highest(self.rest_bytes_per_op)
        """Highest bytes of each segment that neither a bucket nor an absence holds."""

    def highest(self, bytes_per_op: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the highest of `bytes_per_op`, along the last axis, in each segment."""
        return np.maximum.reduceat(bytes_per_op, self._starts, axis=-1)

    def live_bytes(self, levels: Sequence[Level], moves: Moves) -> NDArray[np.int64]:
        """Return the highest bytes of each segment at these levels with these moves."""
        facts, segment = self._facts, self._segment_of
        changes = np.zeros(len(self._starts) + 1, dtype=np.int64)
        for stay in moves.residencies:
            if stay.bucket >= len(facts.buckets):
                self._add_absence(changes, stay.bucket - len(facts.buckets), stay.gather, moves)
                continue
            sizes = self._sizes[stay.bucket]
            changes[segment[stay.gather]] += sizes.flat_bytes
            changes[segment[stay.last + 1]] -= sizes.flat_bytes
            if sizes.is_sharded:
                self._add_opening(changes, stay, levels[stay.bucket])
        ends = moves.grad_ends
        lasts = {(stay.bucket, stay.last) for stay in moves.residencies} if self._is_shared else set[tuple[int, int]]()
        for bucket, level in enumerate(levels):
            changes[0] += _resting_bytes(facts.buckets[bucket], level)
            gradients = facts.gradients[bucket]
            if gradients is None:
                continue
            whole_end = gradients.complete if self._sizes[bucket].is_packed else ends.get(bucket)
            for birth, nbytes in gradients.births:
                changes[segment[birth]] += nbytes
                if whole_end is not None:
                    changes[segment[whole_end + 1]] -= nbytes
            if self._sizes[bucket].is_sharded or self._sizes[bucket].is_packed:
                is_replaced = (bucket, gradients.complete) in lasts
                end = ends.get(bucket, facts.num_run - 1)
                self._add_reduced(changes, bucket, level, end, is_replaced=is_replaced)
        if moves.streamed:
            changes[segment[facts.num_run]] += max(self.streamed_bytes(i, levels[i].home) for i in moves.streamed)
        return self.rest_bytes + np.cumsum(changes[:-1])

    def streamed_bytes(self, bucket: int, home: Tier) -> int:
        """Return what a streamed update of one bucket takes beside what is on the device anyway, its parameters at
        `home`."""
        return streamed_bytes(self._facts.buckets[bucket], home)

    def _add_opening(self, changes: NDArray[np.int64], stay: Residency, level: Level) -> None:
        """What a gather on several ranks takes until its copy can be used: the shard that came from the host, and then
        a second copy where parameters are copied out."""
        sizes, segment = self._sizes[stay.bucket], self._segment_of
        if sizes.is_unpacked:
            changes[segment[stay.first]] += sizes.flat_bytes
            changes[segment[stay.first + 1]] -= sizes.flat_bytes
        if level.has_param_on_host:
            # It goes between two ops; the second counts it, unless what is copied out, which is more, counts there.
            changes[segment[stay.gather]] += sizes.shard_bytes
            changes[segment[stay.first if sizes.is_unpacked else stay.first + 1]] -= sizes.shard_bytes

    def _add_reduced(
        self, changes: NDArray[np.int64], bucket: int, level: Level, end: int, *, is_replaced: bool
    ) -> None:
        """What a gradient takes from its reduce on, which is waited for after op `end`, and at the op before it, beyond
        a copy that goes there."""
        gradients, sizes, segment = self._facts.gradients[bucket], self._sizes[bucket], self._segment_of
        assert gradients is not None
        complete = gradients.complete
        changes[segment[complete + 1]] += sizes.reduced_bytes
        if level.has_param_on_host:
            changes[segment[end + 1]] -= sizes.reduced_bytes
        if sizes.is_packed and sizes.is_sharded:
            changes[segment[complete + 1]] += sizes.flat_grad_bytes
            changes[segment[end + 1]] -= sizes.flat_grad_bytes
        new_bytes = at_once_bytes = sizes.reduced_bytes if end == complete else 0
        if sizes.is_packed:
            whole_bytes = sum(nbytes for _, nbytes in gradients.births)
            more_bytes = max(0, at_once_bytes - whole_bytes) if sizes.is_sharded else 0
            new_bytes = sizes.flat_grad_bytes + more_bytes
        before_bytes = max(0, new_bytes - (sizes.flat_bytes if is_replaced else 0))
        changes[segment[complete]] += before_bytes
        changes[segment[complete + 1]] -= before_bytes

    def _add_absence(self, changes: NDArray[np.int64], number: int, back: int, moves: Moves) -> None:
        """Activations that are on the device until they have left, and again from op `back` to their last use."""
        absence, segment = self._facts.offload_intervals[number], self._segment_of
        for birth, nbytes in absence.births:
            changes[segment[birth]] += nbytes
        changes[segment[moves.leave_ends[number] + 1]] -= absence.nbytes
        changes[segment[back]] += absence.nbytes
        for last, nbytes in absence.lasts:
            changes[segment[last + 1]] -= nbytes

    def peak_bytes(self, levels: Sequence[Level], ahead: int) -> int:
        """Return the peak at these levels with every gather `ahead` windows early."""
        return int(self.live_bytes(levels, moves_at_use(self._facts, levels, ahead)).max())

    def own_bytes(self) -> NDArray[np.int64]:
        """Return bytes[bucket, level, segment] of each bucket alone, gathered at use.

        Exact on several ranks. On one, gradients that leave count until the next bucket's are complete, whether that
        one's leave too or not: never more than `live_bytes`, and less where several buckets in a row stay.
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
        changes[0] += _resting_bytes(self._facts.buckets[i], level)
        for first, last in spans(self._facts, i, level):
            changes[segment[first]] += sizes.flat_bytes
            changes[segment[last + 1]] -= sizes.flat_bytes
            if sizes.is_sharded:
                self._add_opening(changes, Residency(first, first, last, i), level)

    def _add_gradients(self, changes: NDArray[np.int64], i: int, level: Level, next_complete: int) -> None:
        bucket, gradients, segment = self._facts.buckets[i], self._facts.gradients[i], self._segment_of
        if gradients is None:
            return
        leaves = is_gathered(bucket, level)
        whole_end = gradients.complete if self._sizes[i].is_packed else next_complete
        for birth, nbytes in gradients.births:
            changes[segment[birth]] += nbytes
            if leaves or bucket.is_packed:
                changes[segment[whole_end + 1]] -= nbytes
        if bucket.is_sharded or bucket.is_packed:
            is_replaced = any(last == gradients.complete for _, last in spans(self._facts, i, level))
            self._add_reduced(changes, i, level, next_complete, is_replaced=is_replaced)

    def segment_of(self, op: int) -> int:
        """Return the segment that holds the op with index `op`; one past the last for one past the last op."""
        return int(self._segment_of[op])

    def completed_before(self, segment: int) -> list[int]:
        """Return the buckets whose gradients are complete before `segment` begins, in that order."""
        start = int(self._starts[segment])
        order = sorted((grads.complete, i) for i, grads in enumerate(self._facts.gradients) if grads is not None)
        return [i for complete, i in order if complete < start]

    def highest_op(self, segment: int) -> int:
        """Return the index of the op with the highest bytes in `segment`, the first of several."""
        ends = [*self._starts[1:].tolist(), len(self.rest_bytes_per_op)]
        start = int(self._starts[segment])
        return start + int(self.rest_bytes_per_op[start : ends[segment]].argmax())


class _Sizes(NamedTuple):
    """What is asked of a bucket again and again: with many ranks it takes long to look up."""

    flat_bytes: int
    shard_bytes: int
    flat_grad_bytes: int
    reduced_bytes: int
    is_sharded: bool
    is_unpacked: bool
    is_packed: bool

    @classmethod
    def of(cls, bucket: Bucket) -> "_Sizes":
        return cls(
            flat_bytes=bucket.flat_nbytes,
            shard_bytes=bucket.flat_shard_nbytes,
            flat_grad_bytes=bucket.flat_grad_nbytes,
            reduced_bytes=bucket.reduced_nbytes,
            is_sharded=bucket.is_sharded,
            is_unpacked=bucket.is_unpacked,
            is_packed=bucket.is_packed,
        )


def _resting_bytes(bucket: Bucket, level: Level) -> int:
    """Bytes that are on the device during the whole step."""
    param_nbytes = 0 if level.has_param_on_host else bucket.shard_nbytes() + bucket.sum_nbytes
    return param_nbytes + (0 if level.has_state_on_host else bucket.shard_state_nbytes())


def _next_completes(facts: Facts) -> list[int]:
    """Per bucket, the op that completes the gradients of the bucket after it; the last of the backward for the last."""
    order = sorted((grads.complete, i) for i, grads in enumerate(facts.gradients) if grads is not None)
    found = [facts.num_run - 1] * len(facts.buckets)
    for (_, i), (complete, _) in itertools.pairwise(order):
        found[i] = complete
    return found


def _rest(facts: Facts) -> NDArray[np.int64]:
    """Bytes per op of everything that neither a bucket nor an absence holds."""
    graph = facts.graph
    bucketed = {param for bucket in facts.buckets for param in bucket.params}
    trained = {
        param
        for bucket, gradients in zip(facts.buckets, facts.gradients, strict=True)
        if gradients is not None
        for param in bucket.params
    }
    names = {absence.group for absence in facts.offload_intervals}
    away = {name for group in facts.activations if group.id in names for name in group.storages}
    changes = np.zeros(len(graph.ops) + 1, dtype=np.int64)
    changes[0] = facts.problem.base_bytes
    ends: list[tuple[int, int]] = []
    for storage in graph.storages:
        owned = (
            storage.id in away
            or (storage.kind is Kind.PARAM and storage.id in bucketed)
            or (storage.kind is Kind.GRAD and storage.of in trained)
        )
        life = facts.lives.lives.get(storage.id)
        if not owned and life is not None:
            changes[life.first] += storage.nbytes
            changes[life.last + 1] -= storage.nbytes
            ends.append((life.last, storage.nbytes))
    rest = np.cumsum(changes[:-1])
    # What this graph holds while others run is what is left of its last forward op, and what is there at the update.
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
        # What a gather and a reduce take for a moment counts at one op.
        if bucket.is_sharded:
            starts.update(window.first + 1 for window in windows)
        if (bucket.is_sharded or bucket.is_packed) and gradients is not None:
            starts.add(gradients.complete)
    for absence in facts.offload_intervals:
        starts |= {absence.leave + 1, absence.first, *(birth for birth, _ in absence.births)}
        starts.update(last + 1 for last, _ in absence.lasts)
    return np.array(sorted(start for start in starts if start < num_ops), dtype=np.int64)
