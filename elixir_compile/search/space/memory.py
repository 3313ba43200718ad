"""Count the device bytes of a step in segments, for any levels and moves.

No plan for a problem changes the bytes of a bucket except at a fixed set of ops, at which phases, windows and gradients
begin and end. The ops between two neighbours of the set form a segment. Of all other bytes only the highest count of
each segment matters, so a step of 5,000 ops becomes a few hundred numbers.

    peak = max over segments s of (rest_bytes[s] + sum over buckets of bytes[bucket][level][s])

If a step has several calls, they are counted as one that holds at least as much as any of them, so a candidate that
fits here may hold less under `plan_timeline`, which counts each call.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from elixir_compile.analysis.bucket_bytes import (
    Held,
    Sizes,
    averaged_bytes,
    bytes_at,
    gathered_copy,
    last_with_gradients,
    resting,
    step_gradients,
    streamed_bytes,
)
from elixir_compile.analysis.call_bytes import (
    ONLY,
    BucketGradients,
    Ops,
    call_at_most,
    copy_at_most,
    gradients_at_most,
    storages_of_calls,
    sum_nbytes,
)
from elixir_compile.analysis.slices import offloaded_names
from elixir_compile.ir import Kind, Tier
from elixir_compile.search.space.facts import Facts
from elixir_compile.search.space.levels import Level, is_gathered, placement_of
from elixir_compile.search.space.residency import Moves, Residency, moves_at_use, spans

_Changes = tuple[tuple[int, int], ...]
"""Pairs of a segment and of the bytes by which it, and all later segments, have more than the segments before."""


class MemoryModel:
    """The segments of a step, and its device bytes in each of them at any levels, with any moves."""

    def __init__(self, facts: Facts, more_starts: Iterable[int] = (), *, like: "MemoryModel | None" = None) -> None:
        """Cut the step of `facts` into segments; `more_starts` are op indices at which more segments begin. `like` is
        the model of the same buckets at any modes."""
        self._facts = facts
        self._sizes = [Sizes.of(bucket) for bucket in facts.buckets] if like is None else like._sizes
        self._resting_bytes = _resting_bytes(facts) if like is None else like._resting_bytes
        """Bytes of each bucket that are on the device during the whole step, by level."""
        self._call = call_at_most(facts.problem.calls)
        self._ops = Ops(facts.num_forward, facts.num_run, len(facts.graph.ops))
        self._copies: dict[tuple[Residency, bool], _Changes] = {}
        self._gradients: dict[tuple[int, bool, int, bool], _Changes] = {}
        self._late_bytes: dict[tuple[int, bool], int] = {}
        self._is_any_reduced = any(sizes.is_sharded or sizes.is_packed for sizes in self._sizes)
        self.rest_bytes_per_op = _rest(facts)
        starts = _segment_starts(facts, more_starts)
        self._starts = starts
        num_ops = len(facts.graph.ops)
        segments = np.searchsorted(starts, np.arange(num_ops), side="right") - 1
        # One past the last op is one past the last segment.
        self._segment_of: list[int] = [*segments.tolist(), len(starts)]
        self.rest_bytes = self.highest(self.rest_bytes_per_op)
        """Highest bytes of each segment without buckets and offloaded activations."""

    def highest(self, bytes_per_op: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the highest of `bytes_per_op` in each segment, along the last axis."""
        return np.maximum.reduceat(bytes_per_op, self._starts, axis=-1)

    def live_bytes(self, levels: Sequence[Level], moves: Moves) -> NDArray[np.int64]:
        """Return the highest bytes of each segment at these levels with these moves."""
        facts, segment = self._facts, self._segment_of
        changes = [0] * (len(self._starts) + 1)
        for residency in moves.residencies:
            if residency.bucket >= len(facts.buckets):
                self._add_offloaded(changes, residency.bucket - len(facts.buckets), residency.gather, moves)
                continue
            for start, nbytes in self._copy_changes(residency, levels[residency.bucket].has_param_on_host):
                changes[start] += nbytes
        lasts: set[tuple[int, int]] = set()
        if self._is_any_reduced:
            lasts = {(residency.bucket, residency.last) for residency in moves.residencies}
        ends, end = moves.grad_ends, len(facts.graph.ops) - 1
        for bucket, level in enumerate(levels):
            changes[0] += self._resting_bytes[bucket][level]
            grads = facts.gradients[bucket]
            if grads is None:
                continue
            wait, is_replaced = ends.get(bucket, end), (bucket, grads.complete) in lasts
            for start, nbytes in self._gradient_changes(bucket, level.has_param_on_host, wait, is_replaced):
                changes[start] += nbytes
        if moves.streamed:
            changes[segment[facts.num_run]] += max(self.streamed_bytes(i, levels[i].home) for i in moves.streamed)
        return self.rest_bytes + np.cumsum(np.array(changes[:-1], dtype=np.int64))

    def streamed_bytes(self, bucket: int, home: Tier) -> int:
        """Return the device bytes that a streamed update of a bucket adds, if its parameters live in `home`."""
        return streamed_bytes(self._facts.buckets[bucket], home)

    def early_bytes(self, residency: Residency, levels: Sequence[Level]) -> int:
        """Return the device bytes that `residency` adds to each op by which its gather is before its wait."""
        facts = self._facts
        if residency.bucket >= len(facts.buckets):
            return facts.offload_intervals[residency.bucket - len(facts.buckets)].arriving_bytes
        is_sent = levels[residency.bucket].has_param_on_host
        return bytes_at(0, gathered_copy(self._sizes[residency.bucket], gather=0, wait=1, last=1, is_sent=is_sent))

    def late_bytes(self, bucket: int, level: Level) -> int:
        """Return the device bytes that the gradients of `bucket` add to each op by which the wait for them is later.

        A wait after the op that completes the gradients may free bytes at that op, which are not subtracted here.
        """
        key = bucket, level.has_param_on_host
        if key not in self._late_bytes:
            grads, sizes, is_away = self._facts.gradients[bucket], self._sizes[bucket], level.has_param_on_host
            births = [(0, sum(nbytes for _, nbytes in grads.births))] if grads else []
            late, early = (
                bytes_at(2, step_gradients(sizes, births, complete=0, wait=wait, end=3, is_away=is_away))
                for wait in (2, 1)
            )
            self._late_bytes[key] = late - early
        return self._late_bytes[key]

    def _copy_changes(self, residency: Residency, is_on_host: bool) -> _Changes:
        """Return the changes of a gathered copy, of a bucket whose parameters are on the host or the device."""
        found = self._copies.get((residency, is_on_host))
        if found is None:
            gather, wait, last, bucket = residency
            sizes, residence = self._sizes[bucket], (gather, wait, last)
            rows = copy_at_most(self._call, self._ops, sizes, residence, is_sent=is_on_host)
            found = self._copies[residency, is_on_host] = self._changes(rows)
        return found

    def _gradient_changes(self, bucket: int, is_on_host: bool, wait: int, is_replaced: bool) -> _Changes:
        """Return the changes of the gradients of `bucket`; `wait` and `is_replaced` are those of `step_gradients`."""
        key = bucket, is_on_host, wait, is_replaced
        found = self._gradients.get(key)
        if found is None:
            facts, spec, made = self._facts, self._facts.buckets[bucket], self._facts.gradients[bucket]
            assert made is not None
            grads = BucketGradients(
                sizes=self._sizes[bucket],
                births=made.births,
                sum_bytes=sum_nbytes(spec, made.births, facts.problem.calls, is_away=is_on_host),
                complete=made.complete,
                wait=wait,
                stays=last_with_gradients(spec, facts.num_run, len(facts.graph.ops)),
                is_away=is_on_host,
                is_replaced=is_replaced,
            )
            found = self._gradients[key] = self._changes(gradients_at_most(self._call, self._ops, grads))
        return found

    def _changes(self, rows: Iterable[Held]) -> _Changes:
        changes: Counter[int] = Counter()
        for held in rows:
            changes[self._segment_of[held.first]] += held.nbytes
            changes[self._segment_of[held.last + 1]] -= held.nbytes
        return tuple((start, nbytes) for start, nbytes in changes.items() if nbytes)

    def _add_offloaded(self, changes: list[int], number: int, prefetch: int, moves: Moves) -> None:
        """Add the bytes of offloaded activations: until they have left, and from op `prefetch` to their last use."""
        interval, segment = self._facts.offload_intervals[number], self._segment_of
        for birth, nbytes in interval.births:
            changes[segment[birth]] += nbytes
        changes[segment[moves.leave_ends[number] + 1]] -= interval.leaving_bytes
        changes[segment[prefetch]] += interval.arriving_bytes
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
        changes[0] += self._resting_bytes[i][level]
        for first, last in spans(self._facts, i, level):
            for start, nbytes in self._copy_changes(Residency(first, first, last, i), level.has_param_on_host):
                changes[start] += nbytes

    def _add_gradients(self, changes: NDArray[np.int64], i: int, level: Level, next_complete: int) -> None:
        facts, grads = self._facts, self._facts.gradients[i]
        if grads is None:
            return
        wait = next_complete if is_gathered(facts.buckets[i], level) else len(facts.graph.ops) - 1
        is_replaced = any(last == grads.complete for _, last in spans(facts, i, level))
        for start, nbytes in self._gradient_changes(i, level.has_param_on_host, wait, is_replaced):
            changes[start] += nbytes

    def segment_of(self, op: int) -> int:
        """Return the segment of the op with index `op`; the number of segments if `op` is the number of ops."""
        return self._segment_of[op]

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


def _resting_bytes(facts: Facts) -> list[list[int]]:
    """Return the bytes of each bucket on the device during the whole step, by level."""
    return [
        [sum(nbytes for _, nbytes in resting(bucket, placement_of(bucket, level))) for level in Level]
        for bucket in facts.buckets
    ]


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
    offloaded = {name for name, group in offloaded_names(facts.activations).items() if group in names}
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
    call = call_at_most(facts.problem.calls)
    if call is not ONLY:
        lives = {name: (life,) for name, life in facts.lives.lives.items() if name not in offloaded}
        for _, held in storages_of_calls(graph, lives, call, facts.problem.calls):
            if held.first <= held.last:
                changes[held.first] += held.nbytes
                changes[held.last + 1] -= held.nbytes
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
