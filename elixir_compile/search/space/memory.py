"""Count the device bytes of a step in segments, for any levels and moves, and find the levels and modes that need the
fewest.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from elixir_compile.ir import Kind, Tier, Update
from elixir_compile.ir.bucket import streamed_bytes
from elixir_compile.ir.hardware import Cluster
from elixir_compile.search.problem import asked_time
from elixir_compile.search.space.buckets import Level, is_gathered, placement_of
from elixir_compile.search.space.facts import Facts
from elixir_compile.search.space.profiles import Moves, Positions, Profile, Residency, moves_at_use
from elixir_compile.step.bucket_bytes import (
    ONLY,
    BucketGradients,
    Held,
    Ops,
    bytes_at,
    call_at_most,
    copy_at_most,
    gathered_copy,
    gradients_at_most,
    last_with_gradients,
    resting,
    step_gradients,
    storages_of_calls,
    sum_nbytes,
)
from elixir_compile.step.divide import offloaded_names
from elixir_compile.step.liveness import Life

# ----------------------------------------------------------------------------------------------------------------------
# Count the device bytes of a step in segments, for any levels and moves.
#
# No plan for a problem changes the bytes of a bucket except at a fixed set of ops, at which phases, windows and
# gradients begin and end. The ops between two neighbours of the set form a segment. Of all other bytes only the highest
# count of each segment matters, so a step of 5,000 ops becomes a few hundred numbers.
#
#     peak = max over segments s of (rest_bytes[s] + sum over buckets of bytes[bucket][level][s])
#
# A reduce with buffers is a segment of its own, between those of two ops: see `profiles.Positions`.
#
# If a step has several calls, they are counted as one that holds at least as much as any of them, so a candidate that
# fits here may hold less under `plan_timeline`, which counts each call.


_Changes = tuple[tuple[int, int], ...]
"""Pairs of a segment and of the bytes by which it, and all later segments, have more than the segments before."""


class MemoryModel:
    """The segments of a step, and its device bytes in each of them at any levels, with any moves."""

    def __init__(self, facts: Facts, more_starts: Iterable[int] = (), *, like: "MemoryModel | None" = None) -> None:
        """Cut the step of `facts` into segments; `more_starts` are op indices at which more segments begin. `like` is
        the model of the same buckets at any modes."""
        self._facts = facts
        self._sizes = facts.sizes
        self._positions = places = Positions(facts)
        self._resting_bytes: list[list[int]] = [] if like is None else like._resting_bytes
        """Bytes of each bucket that are on the device during the whole step, by level."""
        for bucket in facts.buckets if like is None else ():
            placed = [placement_of(bucket, level) for level in Level]
            self._resting_bytes.append([sum(nbytes for _, nbytes in resting(bucket, home)) for home in placed])
        self.work_bytes: Sequence[int] = [0 if own.works_on_device else own.work_nbytes for own in facts.buckets]
        """By bucket: the work space of its update, in the memory where it runs. What is on the device wherever updates
        run is in `rest_bytes`."""
        self._has_work = any(self.work_bytes)
        self._call = call_at_most(facts.problem.calls)
        self._ops = Ops(places.of(facts.num_forward), places.of(facts.num_run), places.num)
        self._copies: dict[tuple[Residency, bool], _Changes] = {}
        self._gradients: dict[tuple[int, bool, int], _Changes] = {}
        self._late_bytes: dict[tuple[int, bool], int] = {}
        self._rest = _rest(facts, places, self._ops)
        """Bytes by position without buckets and offloaded activations."""
        starts = _segment_starts(facts, places, more_starts)
        self._starts = starts
        segments = np.searchsorted(starts, np.arange(places.num), side="right") - 1
        # One past the last position is one past the last segment.
        self._segments: list[int] = [*segments.tolist(), len(starts)]
        self.rest_bytes = np.maximum.reduceat(self._rest, starts)
        """Highest bytes of each segment without buckets and offloaded activations."""

    def highest(self, nbytes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the highest bytes of each segment. The last two axes of `nbytes` have the bytes at each op, and those
        between each op and the next."""
        return np.maximum.reduceat(self._positions.spread(nbytes), self._starts, axis=-1)

    def live_bytes(self, levels: Sequence[Level], moves: Moves) -> NDArray[np.int64]:
        """Return the highest bytes of each segment at these levels with these moves."""
        facts = self._facts
        changes = [0] * (len(self._starts) + 1)
        for residency in moves.residencies:
            if residency.bucket >= len(facts.buckets):
                # Offloaded activations: until they have left, and from their prefetch to their last use.
                number = residency.bucket - len(facts.buckets)
                interval = facts.offload_intervals[number]
                for birth, nbytes in interval.births:
                    changes[self.segment_of(birth)] += nbytes
                changes[self.segment_behind(moves.leave_ends[number])] -= interval.leaving_bytes
                changes[self.segment_of(residency.gather)] += interval.arriving_bytes
                for last, nbytes in interval.lasts:
                    changes[self.segment_behind(last)] -= nbytes
                continue
            for start, nbytes in self._copy_changes(residency, levels[residency.bucket].has_param_on_host):
                changes[start] += nbytes
        ends, end = moves.grad_ends, len(facts.graph.ops) - 1
        for bucket, level in enumerate(levels):
            changes[0] += self._resting_bytes[bucket][level]
            grads = facts.gradients[bucket]
            if grads is None:
                continue
            for start, nbytes in self._gradient_changes(bucket, level.has_param_on_host, ends.get(bucket, end)):
                changes[start] += nbytes
        if moves.streamed or self._has_work:
            start, nbytes = self._in_turns(levels, moves)
            changes[start] += nbytes
        return self.rest_bytes + np.cumsum(np.array(changes[:-1], dtype=np.int64))

    def _in_turns(self, levels: Sequence[Level], moves: Moves) -> tuple[int, int]:
        """Return the segment at which updates on the device begin, and the bytes that they add, as `ir.bucket.in_turns`
        counts them."""
        facts, work_bytes = self._facts, self.work_bytes
        rooms_bytes = max((streamed_bytes(facts.buckets[i], levels[i].home) for i in moves.streamed), default=0)
        rooms_bytes += max((work_bytes[i] for i in moves.streamed), default=0)
        here = [i for i, level in enumerate(levels) if work_bytes[i] and not level.has_state_on_host]
        start = self._segments[_first_update(facts, self._positions, here)]
        return start, max(rooms_bytes, *(work_bytes[i] for i in here), 0)

    def streamed_bytes(self, bucket: int, home: Tier) -> int:
        """Return the device bytes that a streamed update of a bucket adds, if its parameters live in `home`."""
        return streamed_bytes(self._facts.buckets[bucket], home) + self.work_bytes[bucket]

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
                bytes_at(3, step_gradients(sizes, births, complete=0, wait=wait, end=4, is_away=is_away))
                for wait in (3, 2)
            )
            self._late_bytes[key] = late - early
        return self._late_bytes[key]

    def _copy_changes(self, residency: Residency, is_on_host: bool) -> _Changes:
        """Return the changes of a gathered copy, of a bucket whose parameters are on the host or the device."""
        found = self._copies.get((residency, is_on_host))
        if found is None:
            *ends, bucket = residency
            gather, wait, last = map(self._positions.of, ends)
            sizes, residence = self._sizes[bucket], (gather, wait, last)
            rows = copy_at_most(self._call, self._ops, sizes, residence, is_sent=is_on_host)
            found = self._copies[residency, is_on_host] = self._changes(rows)
        return found

    def _gradient_changes(self, bucket: int, is_on_host: bool, wait: int) -> _Changes:
        """Return the changes of the gradients of `bucket`; `wait` is the last op before the wait for them."""
        key = bucket, is_on_host, wait
        found = self._gradients.get(key)
        if found is None:
            facts, places, ops = self._facts, self._positions, self._ops
            spec, made = facts.buckets[bucket], facts.gradients[bucket]
            assert made is not None
            births = [(places.of(birth), nbytes) for birth, nbytes in made.births]
            grads = BucketGradients(
                sizes=self._sizes[bucket],
                births=births,
                sum_bytes=sum_nbytes(spec, births, facts.problem.calls, is_away=is_on_host),
                complete=places.before_reduce(bucket, made.complete),
                wait=places.wait(bucket, wait),
                stays=last_with_gradients(spec, ops.num_run, ops.num),
                is_away=is_on_host,
            )
            found = self._gradients[key] = self._changes(gradients_at_most(self._call, self._ops, grads))
        return found

    def _changes(self, rows: Iterable[Held]) -> _Changes:
        changes: Counter[int] = Counter()
        for held in rows:
            changes[self._segments[held.first]] += held.nbytes
            changes[self._segments[held.last + 1]] -= held.nbytes
        return tuple((start, nbytes) for start, nbytes in changes.items() if nbytes)

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
        # The op that completes the gradients of the next bucket, or the last op of the backward.
        order = sorted((grads.complete, i) for i, grads in enumerate(facts.gradients) if grads is not None)
        next_completes = {i: complete for (_, i), (complete, _) in itertools.pairwise(order)}
        for i, level in itertools.product(range(len(facts.buckets)), Level):
            own, is_away = changes[i, level], level.has_param_on_host
            own[0] += self._resting_bytes[i][level]
            for first, last in facts.copies[i][level]:
                for start, nbytes in self._copy_changes(Residency(first, first, last, i), is_away):
                    own[start] += nbytes
            if facts.gradients[i] is not None:
                goes = is_gathered(facts.buckets[i], level)
                wait = next_completes.get(i, facts.num_run - 1) if goes else len(facts.graph.ops) - 1
                for start, nbytes in self._gradient_changes(i, is_away, wait):
                    own[start] += nbytes
        return np.cumsum(changes[:, :, :-1], axis=2)

    def segment_of(self, op: int) -> int:
        """Return the segment of the op with index `op`; the number of segments if `op` is the number of ops."""
        return self._segments[self._positions.of(op)]

    def segment_behind(self, op: int) -> int:
        """Return the segment right behind the op with index `op`: that of a reduce, or of the next op."""
        return self._segments[self._positions.of(op) + 1]

    def completed_before(self, segment: int) -> list[int]:
        """Return the buckets whose gradients are complete before `segment` begins, in that order.

        Of two reduces behind the same op, the second is not complete at the first.
        """
        start, moments = int(self._starts[segment]), self._positions.moments
        order = sorted((grads.complete, i) for i, grads in enumerate(self._facts.gradients) if grads is not None)
        return [i for complete, i in order if moments.get(i, self._positions.of(complete) + 1) <= start]

    def highest_op(self, segment: int) -> int:
        """Return the index of the op in `segment` with the most bytes outside of buckets, the first of several."""
        ends = [*self._starts[1:].tolist(), len(self._rest)]
        start = int(self._starts[segment])
        return self._positions.op_of(start + int(self._rest[start : ends[segment]].argmax()))


def _rest(facts: Facts, places: Positions, ops: Ops) -> NDArray[np.int64]:
    """Return the bytes by position without buckets and offloaded activations."""
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
    changes = np.zeros(places.num + 1, dtype=np.int64)
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
            changes[places.of(life.first)] += storage.nbytes
            changes[places.of(life.last) + 1] -= storage.nbytes
            ends.append((life.last, storage.nbytes))
    call = call_at_most(facts.problem.calls)
    if call is not ONLY:
        lives = {
            name: (Life(first=places.of(life.first), last=places.of(life.last)),)
            for name, life in facts.lives.lives.items()
            if name not in offloaded
        }
        for _, held in storages_of_calls(graph, ops, lives, call, facts.problem.calls):
            if held.first <= held.last:
                changes[held.first] += held.nbytes
                changes[held.last + 1] -= held.nbytes
    rest = np.cumsum(changes[:-1])
    # While other graphs run, this graph holds the storages that outlive its last forward op, or those of its update.
    last = facts.num_forward - 1
    dying_bytes = sum(nbytes for end, nbytes in ends if end == last)
    rest[places.of(last)] += max(0, facts.problem.between_bytes - dying_bytes)
    inputs_bytes = sum(storage.nbytes for storage in graph.storages if storage.kind is Kind.INPUT)
    rest[ops.num_run :] += max(0, facts.problem.after_bytes - inputs_bytes)
    here = [i for i, bucket in enumerate(facts.buckets) if bucket.works_on_device and bucket.trainable]
    rest[_first_update(facts, places, here) :] += max((facts.buckets[i].work_nbytes for i in here), default=0)
    return rest


def _first_update(facts: Facts, places: Positions, buckets: Iterable[int]) -> int:
    """Return the first position at which one of `buckets` may be updated: behind the backward, or under `in_backward`
    behind the reduce of its gradients."""
    starts = [places.of(facts.num_run)]
    if asked_time(facts.problem) is Update.IN_BACKWARD:
        grads = ((i, facts.gradients[i]) for i in buckets)
        starts += [places.before_reduce(i, own.complete) + 1 for i, own in grads if own is not None]
    return min(starts)


def _segment_starts(facts: Facts, places: Positions, more_starts: Iterable[int]) -> NDArray[np.int64]:
    begins = {0, facts.num_forward, facts.num_run, *more_starts}
    ends: set[int] = set()
    for bucket, windows, gradients in zip(facts.buckets, facts.windows, facts.gradients, strict=True):
        begins.update(window.first for window in windows)
        ends.update(window.last for window in windows)
        if gradients is not None:
            ends.add(gradients.complete)
            begins.update(birth for birth, _ in gradients.births)
        # The buffers of a gather that live between two ops count at one op.
        if bucket.is_sharded:
            ends.update(window.first for window in windows)
    for interval in facts.offload_intervals:
        ends |= {interval.leave, *(last for last, _ in interval.lasts)}
        begins |= {interval.first, *(birth for birth, _ in interval.births)}
    starts = {*map(places.of, begins), *(places.of(end) + 1 for end in ends)}
    starts.update(at for moment in places.moments.values() for at in (moment, moment + 1))
    return np.array(sorted(start for start in starts if start < places.num), dtype=np.int64)


# ----------------------------------------------------------------------------------------------------------------------
# Find the levels, and the modes, that need the fewest device bytes.
#
# On one rank these are the furthest levels. On several ranks a gather needs more bytes for a moment than a resident
# copy does. If the step peaks at this moment, the bucket needs fewer bytes if it is resident.
#
#     peak = max over segments s of (rest_bytes[s] + sum over buckets of bytes[bucket][level][s])
#
# Two descents change a bucket at a time, the first from all buckets released, the second from all buckets resident. The
# lower of the two peaks is taken. It is not proved to be the minimum, but was on 326 random chains of up to 1500
# candidates on two ranks.
#
# Modes are lowered layer by layer in the same way.


_Levels = tuple[Level, ...]


def min_memory_levels(facts: Facts, memory: MemoryModel) -> _Levels:
    """Return the levels with the lowest peak found, every gather at its use; the furthest levels if peaks are equal."""
    furthest = facts.furthest_levels
    resident = tuple(
        Level.ALL_OFF if bucket.is_sharded and level.is_released and Level.ALL_OFF in choices else level
        for bucket, level, choices in zip(facts.buckets, furthest, facts.choices, strict=True)
    )
    if resident == furthest:
        return furthest
    own_bytes = memory.own_bytes()
    found = [
        _lowered(memory.rest_bytes, own_bytes, start, other)
        for start, other in ((furthest, resident), (resident, furthest))
    ]
    return min(found, key=lambda lowered: lowered[0])[1]


def _lowered(
    rest_bytes: NDArray[np.int64], own_bytes: NDArray[np.int64], levels: _Levels, others: _Levels
) -> tuple[tuple[int, int], _Levels]:
    """Switch buckets between `levels` and `others` as long as that lowers the `fullness`; return it and the levels."""
    now, buckets = list(levels), np.arange(len(levels))
    live_bytes = rest_bytes + own_bytes[buckets, now].sum(axis=0)
    more_bytes = own_bytes[buckets, list(others)] - own_bytes[buckets, now]
    """What each bucket adds if it is switched."""
    key = fullness(live_bytes)
    while True:
        tried = np.flatnonzero(more_bytes[:, int(live_bytes.argmax())] < 0)
        if not len(tried):
            return key, tuple(now)
        switched_bytes = live_bytes + more_bytes[tried]
        peaks_bytes = switched_bytes.max(axis=1)
        lowest = np.flatnonzero(peaks_bytes == peaks_bytes.min())
        place = lowest[(switched_bytes[lowest] == peaks_bytes.min()).sum(axis=1).argmin()]
        best = fullness(switched_bytes[place])
        if best >= key:
            return key, tuple(now)
        i = int(tried[place])
        now[i] = others[i] if now[i] is levels[i] else levels[i]
        live_bytes, key = switched_bytes[place], best
        more_bytes[i] = -more_bytes[i]


def fullness(live_bytes: NDArray[np.int64]) -> tuple[int, int]:
    """Return the peak in bytes, and the number of segments with as many bytes."""
    peak_bytes = int(live_bytes.max())
    return peak_bytes, int((live_bytes == peak_bytes).sum())


_MIN_ADDED_S = 1e-9
"""Seconds of a change that makes the step no longer, so that what it saves for each second is finite."""


def _added_s(cluster: Cluster, profile: Profile) -> float:
    """Return the seconds that a layer takes longer with `profile`, with its copies on no lane of their own."""
    each_s = 1 / cluster.h2d.bytes_per_s + 1 / cluster.d2h.bytes_per_s
    return sum(own_s for _, own_s in profile.added_s) + each_s * sum(trip.nbytes for trip in profile.trips)


def lowered_modes(
    kept: Facts,
    profiles: Sequence[Sequence[Profile]],
    modes: Sequence[int],
    levels: Sequence[Level],
    enough_bytes: int | None = None,
) -> tuple[int, ...]:
    """Return the modes reached from `modes` by changes of single layers, each time the change with the lowest peak.

    `kept` are the facts with every activation kept. Bytes are those of `profiles`, with all buckets at `levels`. At
    equal peaks, fewer segments at the peak count as lower. The changes end if none lowers the peak. With `enough_bytes`
    they end once the peak is no higher, and each is the one that lowers it most, as far as that, for each second that
    the layer takes longer.
    """
    now = list(modes)
    seconds = [[_added_s(kept.problem.cluster, profile) for profile in layer] for layer in profiles]
    more_bytes = [[profile.nbytes - layer[0].nbytes for profile in layer] for layer in profiles]
    changed = {int(point) + 1 for layer in more_bytes for mode in layer for point in np.flatnonzero(np.diff(mode[0]))}
    memory = MemoryModel(kept, changed)
    own_bytes, more_bytes = memory.own_bytes(), [[memory.highest(mode) for mode in layer] for layer in more_bytes]
    live_bytes = memory.rest_bytes + sum(own_bytes[i, level] for i, level in enumerate(levels))
    live_bytes += sum(layer[mode] for layer, mode in zip(more_bytes, now, strict=True))
    while True:
        key, fullest = fullness(live_bytes), int(live_bytes.argmax())
        if enough_bytes is not None and key[0] <= enough_bytes:
            return tuple(now)
        found = [
            (fullness(live_bytes + nbytes - layer[now[i]]), i, mode)
            for i, layer in enumerate(more_bytes)
            for mode, nbytes in enumerate(layer)
            if nbytes[fullest] < layer[now[i]][fullest]
        ]
        lower = sorted(change for change in found if change[0] < key)
        if not lower:
            return tuple(now)
        _, i, mode = lower[0]
        if enough_bytes is not None:
            excess_bytes = key[0] - enough_bytes
            _, i, mode = max(
                lower,
                key=lambda change: (
                    min(key[0] - change[0][0], excess_bytes)
                    / max(seconds[change[1]][change[2]] - seconds[change[1]][now[change[1]]], _MIN_ADDED_S)
                ),
            )
        live_bytes += more_bytes[i][mode] - more_bytes[i][now[i]]
        now[i] = mode
