"""Count the live bytes on the device at each op of a step, by kind, under a plan or with everything kept there.

```text
  live_bytes[kind][op] = sum of nbytes over the storages of the kind live at op
```

Each storage adds its bytes at its first op and subtracts them after its last, so a running sum per kind counts the
step: O(ops + storages + actions). An offloaded activation does so twice:

```text
  op           fwd.mm  fwd.gelu  fwd.sum  bwd.mm  bwd.gelu
  activation   ----------------                   --------
  schedule             offload^  ^wait    ^prefetch     the first wait ends its first life, the prefetch begins the
  second ```

On several ranks two actions between ops need more bytes than the ops around them. Their bytes count at an op beside:

```text
  gather, wait    the flat buffer and the parameters copied out of it       at the op after the wait
  reduce          gradients and the flat buffer into which they are packed  at the op before the reduce
```

Unsharded gradients are averaged when a region ends. Buffers for the means of the largest bucket count in the
whole backward.

Not modelled: memory allocated inside a kernel, rounding of the allocator, and the moment between two ops in
which a gather before a release in the schedule holds both copies.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elixir_compile.analysis.bucket_bytes import (
    Held,
    Sizes,
    averaged_bytes,
    bucket_host_bytes,
    gathered_copy,
    last_unreduced,
    last_with_gradients,
    resting,
    step_gradients,
    streamed,
    streamed_bytes,
)
from elixir_compile.analysis.laps import laps_of
from elixir_compile.analysis.liveness import Life, liveness
from elixir_compile.analysis.recompute import as_run
from elixir_compile.analysis.slices import arrived_name, leaving_name
from elixir_compile.analysis.staging import disk_staging_bytes
from elixir_compile.ir import (
    Bucket,
    BucketId,
    BucketRef,
    GradientRef,
    GroupId,
    GroupRef,
    Kind,
    OpId,
    Phase,
    Placement,
    Plan,
    RegionRef,
    Saving,
    StepGraph,
    StorageId,
    Tier,
    Verb,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The op with the most live bytes; the first, if several have as many."""

    op: OpId
    nbytes: int
    by_kind: Mapping[Kind, int]
    """Live bytes at the op by kind, in the order of `Kind`, without zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTimeline:
    """Live bytes on the device at each op, and bytes on the host, which are the same during the whole step."""

    ops: tuple[OpId, ...]
    live_bytes_by_kind: Mapping[Kind, tuple[int, ...]]
    """Live bytes at each op by kind, in the order of `Kind`, without kinds of zero bytes."""
    live_bytes: tuple[int, ...]
    """The sum over kinds."""
    host_bytes: int

    @property
    def peak(self) -> Peak:
        """The first op with the most live bytes, with its bytes by kind."""
        at = self.live_bytes.index(max(self.live_bytes))
        by_kind = {kind: live[at] for kind, live in self.live_bytes_by_kind.items() if live[at]}
        return Peak(op=self.ops[at], nbytes=self.live_bytes[at], by_kind=by_kind)


def keep_everything_timeline(graph: StepGraph, state_nbytes: Mapping[StorageId, int]) -> MemoryTimeline:
    """Return the timeline with all parameters, gradients, optimizer state and saved activations on the device.

    `state_nbytes` holds the bytes of optimizer state of each trainable parameter.
    """
    step = as_run(graph)
    tally = _Tally(len(step.ops))
    storages = {storage.id: storage for storage in step.storages}
    for name, life in liveness(step).lives.items():
        tally.add(storages[name].kind, storages[name].nbytes, life.first, life.last)
    tally.add(Kind.MOMENT, sum(state_nbytes.values()), 0, len(step.ops) - 1)
    return tally.timeline(step, host_bytes=0)


def plan_timeline(graph: StepGraph, plan: Plan, rank: int = 0) -> MemoryTimeline:
    """Return the timeline of `rank` under `plan`, which must be a plan of `graph`.

    Its ops include recomputed ops; fused storages are left out.
    """
    step = as_run(graph, plan.activations, laps_of(plan))
    placements = {placement.bucket: placement for placement in plan.placements}
    moves = _moves(step, plan, rank)
    end = len(step.ops) - 1
    tally = _Tally(len(step.ops))
    owners = {param: bucket.id for bucket in plan.buckets for param in bucket.params}
    storages = {storage.id: storage for storage in step.storages}
    births: dict[BucketId, list[tuple[int, int]]] = {bucket.id: [] for bucket in plan.buckets}
    for name, lives in _lives(step, plan, moves).items():
        storage = storages[name]
        if storage.of is not None and storage.of in owners:
            births[owners[storage.of]].append((lives[0].first, storage.nbytes))
        elif not (storage.kind is Kind.PARAM and name in owners):
            for life in lives:
                tally.add(storage.kind, storage.nbytes, life.first, life.last)
    for bucket in plan.buckets:
        placement = placements[bucket.id]
        for kind, nbytes in resting(bucket, placement, rank):
            tally.add(kind, nbytes, 0, end)
        for held in _moving(bucket, placement, moves, births[bucket.id]):
            tally.add(held.kind, held.nbytes, held.first, min(held.last, end))
    _add_streamed(tally, step, plan, rank)
    backward = [number for number, op in enumerate(step.ops) if op.phase is Phase.BACKWARD]
    if backward:
        tally.add(Kind.GRAD, averaged_bytes(plan.buckets, plan.num_copies), backward[0], backward[-1])
    # External usage counts like buffers of modules: live at every op, never moved.
    tally.add(Kind.BUFFER, plan.base_bytes, 0, end)
    return tally.timeline(step, host_bytes(plan, rank))


def with_peaks(graph: StepGraph, plan: Plan) -> Plan:
    """Return `plan` with the peaks of its timeline in its prediction."""
    timeline = plan_timeline(graph, plan)
    prediction = replace(
        plan.prediction,
        device_peak_bytes=timeline.peak.nbytes,
        device_peak_at=timeline.peak.op,
        host_peak_bytes=timeline.host_bytes,
    )
    return replace(plan, prediction=prediction)


def device_lives(graph: StepGraph, plan: Plan, rank: int = 0) -> Mapping[StorageId, tuple[Life, ...]]:
    """Return the stretches of ops in which each storage is on the device of `rank`, for the ops run by `plan`.

    Parameters of buckets are listed as if they never moved.
    """
    step = as_run(graph, plan.activations, laps_of(plan))
    return _lives(step, plan, _moves(step, plan, rank))


def host_bytes(plan: Plan, rank: int = 0) -> int:
    """Return the bytes on the host for `rank`: parameters, gradients, optimizer state, staging, activations."""
    placed = list(zip(plan.buckets, plan.placements, strict=True))
    on_disk = [bucket for bucket, placement in placed if placement.optim is Tier.DISK]
    staging_bytes = away_bytes(plan) + disk_staging_bytes(on_disk)
    return staging_bytes + sum(bucket_host_bytes(bucket, placement, rank) for bucket, placement in placed)


def away_bytes(plan: Plan) -> int:
    """Return the bytes of the offloaded activations of `plan`."""
    return sum(group.nbytes for group in plan.activations if group.saving is Saving.OFFLOAD)


def _moving(bucket: Bucket, placement: Placement, moves: "_Moves", births: Sequence[tuple[int, int]]) -> Iterator[Held]:
    """Yield the bytes of the gathered copies and of the gradients of `bucket`."""
    sizes, is_away, end = Sizes.of(bucket), placement.param is not Tier.DEVICE, moves.num_ops - 1
    for copy in moves.gathered.get(bucket.id, ()):
        yield from gathered_copy(sizes, copy.gather, copy.wait, copy.last, is_sent=is_away)
    is_replaced, stays = bucket.id in moves.replaced, moves.last_with_gradients(bucket)
    complete, wait = moves.completes.get(bucket.id, end), moves.grad_ends.get(bucket.id, end)
    yield from step_gradients(sizes, births, complete, wait, end, stays, is_away=is_away, is_replaced=is_replaced)


def _add_streamed(tally: "_Tally", step: StepGraph, plan: Plan, rank: int) -> None:
    """Add the bytes of streamed updates: buckets pass one after another, so the largest counts."""
    homes = [
        (bucket, placement.param)
        for bucket, placement in zip(plan.buckets, plan.placements, strict=True)
        if placement.streamed and bucket.trainable
    ]
    first = sum(op.phase is not Phase.UPDATE for op in step.ops)
    if homes:
        bucket, param = max(homes, key=lambda home: streamed_bytes(*home, rank))
        for kind, nbytes in streamed(bucket, param, rank):
            tally.add(kind, nbytes, first, len(step.ops) - 1)


class _Copy(NamedTuple):
    """A gathered copy: the first op after its gather, the first op after its wait, and the last op before its release.

    If it is never awaited, `wait` is after `last`.
    """

    gather: int
    wait: int
    last: int


@dataclass(slots=True)
class _Moves:
    """The moves of a schedule as op indices, both ends included."""

    gathered: dict[BucketId, list[_Copy]]
    grad_ends: dict[BucketId, int]
    """Last op before the wait for the gradients, if they are offloaded or sharded."""
    completes: dict[BucketId, int]
    """Last op before the reduce, -1 if there is none."""
    replaced: set[BucketId]
    """Buckets whose gathered copy is released just before their reduce, between the same two ops."""
    left_at: dict[GroupId, int]
    """By group: last op at which offloaded activations are on the device for the first time."""
    back_at: dict[GroupId, int]
    """By group: first op at which prefetched activations are on the device again."""
    num_ops: int
    num_run: int
    """Number of ops before the update."""

    def last_with_gradients(self, bucket: Bucket) -> int:
        """Return the last op with the gradients of `bucket` on the device if they never leave it."""
        return last_with_gradients(bucket, self.num_run, self.num_ops)


def _lives(step: StepGraph, plan: Plan, moves: _Moves) -> Mapping[StorageId, tuple[Life, ...]]:
    unmoved = liveness(step).lives
    lives: dict[StorageId, tuple[Life, ...]] = {name: (life,) for name, life in unmoved.items()}
    owners = {param: bucket.id for bucket in plan.buckets for param in bucket.params}
    end = len(step.ops) - 1
    reduces = [(bucket, moves.completes.get(bucket.id, end)) for bucket in plan.buckets]
    ends = {
        bucket.id: last_unreduced(
            complete,
            moves.grad_ends.get(bucket.id, end),
            moves.last_with_gradients(bucket),
            is_packed=bucket.is_packed,
        )
        for bucket, complete in reduces
    }
    for storage in step.storages:
        owner = None if storage.of is None else owners.get(storage.of)
        last = None if owner is None else ends.get(owner)
        if last is not None and storage.id in unmoved:
            lives[storage.id] = (Life(first=unmoved[storage.id].first, last=last),)
    for group in plan.activations:
        for name in group.storages if group.id in moves.left_at else ():
            back_at = moves.back_at.get(group.id, len(step.ops))
            out, back = leaving_name(name), arrived_name(name)
            out, back = out if out in unmoved else name, back if back in unmoved else name
            if out in unmoved:
                lives[out] = (Life(first=unmoved[out].first, last=moves.left_at[group.id]),)
                lives[back] = (*(lives[out] if out == back else ()), Life(first=back_at, last=unmoved[back].last))
    return lives


def _moves(step: StepGraph, plan: Plan, rank: int) -> _Moves:
    """Return the moves of the schedule of `rank`.

    A gather, a reduce and a prefetch count from the first op of the next `run`. A release and a wait count to the last
    op of the `run` before.
    """
    index = {op.id: number for number, op in enumerate(step.ops)}
    lasts = {region.id: index[region.last] for region in plan.regions}
    num_run = sum(op.phase is not Phase.UPDATE for op in step.ops)
    moves = _Moves({}, {}, {}, set(), {}, {}, len(step.ops), num_run)
    starts: dict[BucketId, _Copy] = {}
    done = -1
    schedule = next((schedule for schedule in plan.schedules if schedule.rank == rank), plan.schedules[0])
    for action in schedule.actions:
        match action.verb, action.target:
            case Verb.RUN, RegionRef(region):
                done = lasts[region]
            case Verb.GATHER, BucketRef(bucket):
                starts[bucket] = _Copy(done + 1, len(step.ops), len(step.ops) - 1)
            case Verb.WAIT, BucketRef(bucket) if bucket in starts:
                starts[bucket] = starts[bucket]._replace(wait=done + 1)
            case Verb.RELEASE, BucketRef(bucket):
                moves.gathered.setdefault(bucket, []).append(starts.pop(bucket)._replace(last=done))
            case Verb.REDUCE, BucketRef(bucket):
                moves.completes[bucket] = done
                if any(copy.gather <= copy.last == done for copy in moves.gathered.get(bucket, ())):
                    moves.replaced.add(bucket)
            case Verb.WAIT, GradientRef(bucket):
                moves.grad_ends[bucket] = done
            case Verb.WAIT, GroupRef(group):
                moves.left_at.setdefault(group, done)
            case Verb.PREFETCH, GroupRef(group):
                moves.back_at[group] = done + 1
    for bucket, copy in starts.items():
        moves.gathered.setdefault(bucket, []).append(copy)
    return moves


class _Tally:
    """Sums intervals of bytes: a row of differences by op for each kind."""

    def __init__(self, num_ops: int) -> None:
        self._changes: dict[Kind, NDArray[np.int64]] = {}
        self.num_ops = num_ops

    def add(self, kind: Kind, nbytes: int, first: int, last: int) -> None:
        """Add `nbytes` from op `first` to op `last`, both included; nothing if `last` is before `first`."""
        if nbytes and first <= last:
            changes = self._changes.get(kind)
            if changes is None:
                changes = self._changes[kind] = np.zeros(self.num_ops + 1, dtype=np.int64)
            changes[first] += nbytes
            changes[last + 1] -= nbytes

    def timeline(self, graph: StepGraph, host_bytes: int) -> MemoryTimeline:
        live = {kind: np.cumsum(self._changes[kind][:-1]) for kind in Kind if kind in self._changes}
        total = functools.reduce(np.add, live.values(), np.zeros(self.num_ops, dtype=np.int64))
        return MemoryTimeline(
            ops=tuple(op.id for op in graph.ops),
            live_bytes_by_kind={kind: tuple(row.tolist()) for kind, row in live.items()},
            live_bytes=tuple(total.tolist()),
            host_bytes=host_bytes,
        )
