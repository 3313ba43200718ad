"""List the device bytes of a plan as rows of bytes between two ops, by the bucket or storage that holds them, and scale
a captured step to another number of rows of the batch.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from copy import copy as shallow_copy
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elixir_compile.ir import (
    Action,
    Bucket,
    BucketId,
    BucketRef,
    GradientRef,
    GroupId,
    GroupRef,
    Kind,
    OpId,
    Plan,
    RegionRef,
    StepGraph,
    StorageId,
    Tier,
    Verb,
)
from elixir_compile.ir.bucket import streamed, streamed_bytes
from elixir_compile.step.as_run import as_run
from elixir_compile.step.bucket_bytes import Births, Held, Sizes, last_unreduced, last_with_gradients, resting
from elixir_compile.step.call_bytes import (
    ONLY,
    BucketGradients,
    CallKind,
    Ops,
    copy_of_call,
    gradients_of_call,
    storages_of_calls,
    sum_nbytes,
    waiting_bytes,
)
from elixir_compile.step.divide import arrived_name, laps_of, leaving_name
from elixir_compile.step.liveness import Life, liveness

# ----------------------------------------------------------------------------------------------------------------------
# The axis of rows of bytes: the ops of a step, and its reduces with buffers, which stand between two ops.
#
#   op         0    1    2         3    4      a reduce holds gradients and a flat buffer, and nothing that only
#   position   0    1    2    3    4    5      op 2 reads last
#   reduce                    ^


@dataclass(frozen=True, slots=True)
class Axis:
    """The ops of a step and its reduces with buffers in one order."""

    ops: Ops
    """How many positions there are in all, and before the backward and the update."""
    of: Mapping[OpId, int]
    """The position of each op."""
    op_of: tuple[int, ...]
    """By position: the index of its op, or of the op before a reduce."""
    with_moment: frozenset[BucketId]
    """The buckets whose reduce has a position."""

    @property
    def starts(self) -> tuple[int, ...]:
        """The positions of the ops, in order."""
        return tuple(self.of.values())

    def op_from(self, position: int) -> int:
        """Return the index of the first op that is not before `position`; the number of ops if there is none."""
        if position >= len(self.op_of):
            return self.op_of[-1] + 1
        is_reduce = position > 0 and self.op_of[position] == self.op_of[position - 1]
        return self.op_of[position] + is_reduce

    def op_to(self, position: int) -> int:
        """Return the index of the last op that is not behind `position`; -1 if there is none."""
        return -1 if position < 0 else self.op_of[position]


def axis_of(step: StepGraph, plan: Plan, rank: int) -> Axis:
    """Return the axis of `step`, the ops that `plan` runs, with the reduces of the schedule of `rank`."""
    buckets = [(bucket.id, Sizes.of(bucket, plan.num_copies)) for bucket in plan.buckets]
    with_moment = frozenset(name for name, sizes in buckets if sizes.has_moment)
    index = {op.id: number for number, op in enumerate(step.ops)}
    lasts = {region.id: index[region.last] for region in plan.regions}
    moments: Counter[int] = Counter()
    done = 0  # a reduce before the first op, if a plan has one, counts behind it
    for action in actions_of(plan, rank):
        match action.verb, action.target:
            case Verb.RUN, RegionRef(region):
                done = lasts[region]
            case Verb.REDUCE, BucketRef(bucket) if bucket in with_moment:
                moments[done] += 1
    op_of = tuple(number for number in range(len(step.ops)) for _ in range(1 + moments[number]))
    starts = [0, *accumulate(1 + moments[number] for number in range(len(step.ops)))]
    counted = Ops.of(step)
    ops = Ops(starts[counted.num_forward], starts[counted.num_run], starts[counted.num])
    return Axis(ops, {op.id: starts[number] for number, op in enumerate(step.ops)}, op_of, with_moment)


def actions_of(plan: Plan, rank: int) -> tuple[Action, ...]:
    """Return the actions of `rank`, or of the first rank if all have the same."""
    return next((schedule for schedule in plan.schedules if schedule.rank == rank), plan.schedules[0]).actions


# ----------------------------------------------------------------------------------------------------------------------
# List the device bytes of a plan as rows of bytes between two ops, by the bucket or storage that holds them.
#
#   bucket b3     param     86.0 MiB   op 0 to 4378          its home is the device
#   bucket b4     gathered  86.0 MiB   op 210 to 261         from its gather to its release
#   storage s17   saved     64.0 MiB   op 31 to 4120         an activation that is kept
#   joint         moment   516.0 MiB   op 4378 to 4378       the largest of the streamed updates, which take turns
#
# The rows of all owners add up to the timeline of the plan, and the rows of an owner to its own bytes. Buckets that
# take turns have one joint row, with the bytes of the largest of them.
#
# Rows are on an axis with a position for each op, and one for each reduce with buffers, which stands between two ops
# where the schedule has it. A row that a release or a wait ends before the reduce is not there at the position of the
# reduce, nor is a row that only the op before it reads.


class PlanRows:
    """The rows of `rank` in `call` under `plan`, which must be a plan of `graph`.

    The ops include recomputed ops; fused storages have no rows.
    """

    def __init__(self, graph: StepGraph, plan: Plan, rank: int = 0, call: CallKind = ONLY) -> None:
        self.step = as_run(graph, plan.activations, laps_of(plan))
        """The ops as the plan runs them."""
        self.axis = axis_of(self.step, plan, rank)
        """The positions of rows."""
        self.call, self._ops = call, self.axis.ops
        self._others_bytes: Mapping[Kind, int] = {}
        self.plan, self.rank = plan, rank
        self._placements = {placement.bucket: placement for placement in plan.placements}
        self._moves = _moves(self.axis, plan, rank)
        self.lives = _lives(self.step, plan, self._moves)
        """The stretches of positions in which each storage is on the device. Parameters of buckets are listed as if
        they never moved."""
        owners = {param: bucket.id for bucket in plan.buckets for param in bucket.params}
        self._births: dict[BucketId, list[tuple[int, int]]] = {bucket.id: [] for bucket in plan.buckets}
        self.storages: dict[StorageId, tuple[Held, ...]] = {}
        """The rows of each storage that is neither a parameter nor a gradient of a bucket."""
        storages = {storage.id: storage for storage in self.step.storages}
        for name, lives in self.lives.items():
            storage = storages[name]
            if storage.of is not None and storage.of in owners:
                self._births[owners[storage.of]].append((lives[0].first, storage.nbytes))
            elif not (storage.kind is Kind.PARAM and name in owners):
                self.storages[name] = tuple(Held(storage.kind, storage.nbytes, *life) for life in map(_ends, lives))

    @cached_property
    def waiting_bytes(self) -> Mapping[Kind, int]:
        """The bytes by kind that a forward leaves for its backward, without outputs."""
        return waiting_bytes(self.step, self._ops, self.lives)

    def in_call(self, call: CallKind, others_bytes: Mapping[Kind, int]) -> "PlanRows":
        """Return these rows in `call`, with `others_bytes` for each forward beside it that runs the other program of a
        plan with lean calls."""
        rows = shallow_copy(self)
        rows.call, rows._others_bytes = call, others_bytes
        return rows

    def all(self) -> Iterator[Held]:
        """Yield all rows. They add up to the timeline."""
        for bucket in self.plan.buckets:
            yield from self.of_bucket(bucket)
        for rows in self.storages.values():
            yield from rows
        if self.call is not ONLY:
            for _, held in storages_of_calls(self.step, self._ops, self.lives, self.call, self.plan.calls):
                yield held
        num_forward, num_run = self._ops.num_forward, self._ops.num_run
        for kind, nbytes in self._others_bytes.items():
            yield Held(kind, self.call.others_beside_forward * nbytes, 0, num_forward - 1)
            yield Held(kind, self.call.others_beside_backward * nbytes, num_forward, num_run - 1)
        yield from self.joint(self.plan.buckets)
        # External usage counts like buffers of modules: live at every op, never moved.
        yield Held(Kind.BUFFER, self.plan.base_bytes, 0, self._ops.num - 1)

    @property
    def nbytes(self) -> NDArray[np.int64]:
        """The bytes to which the rows add up, by position."""
        changes = np.zeros(self._ops.num + 1, dtype=np.int64)
        for held in self.all():
            if held.first <= held.last:
                changes[held.first] += held.nbytes
                changes[held.last + 1] -= held.nbytes
        return np.cumsum(changes[:-1])

    def births(self, bucket: BucketId) -> Births:
        """Return the unreduced gradients of `bucket`."""
        return self._births[bucket]

    def of_bucket(self, bucket: Bucket, births: Births | None = None) -> Iterator[Held]:
        """Yield the rows of `bucket`, with `births` instead of its own unreduced gradients if given."""
        placement, end = self._placements[bucket.id], self._ops.num - 1
        for kind, nbytes in resting(bucket, placement):
            yield Held(kind, nbytes, 0, end)
        moves, sizes = self._moves, Sizes.of(bucket, self.plan.num_copies)
        is_away = placement.param is not Tier.DEVICE
        births = self._births[bucket.id] if births is None else births
        moving: list[Held] = []
        for copy in moves.gathered.get(bucket.id, ()):
            moving += copy_of_call(self.call, self._ops, sizes, copy.gather, copy.wait, copy.last, is_sent=is_away)
        grads = BucketGradients(
            sizes=sizes,
            births=births,
            sum_bytes=sum_nbytes(bucket, births, self.plan.calls, is_away=is_away),
            complete=moves.completes.get(bucket.id, end),
            wait=moves.grad_ends.get(bucket.id, end),
            stays=moves.last_with_gradients(bucket),
            is_away=is_away,
        )
        moving += gradients_of_call(self.call, self._ops, grads)
        for held in moving:
            yield held._replace(last=min(held.last, end))

    def joint(self, buckets: Iterable[Bucket]) -> Iterator[Held]:
        """Yield the rows that `buckets` hold in turns: streamed updates."""
        homes = [(b, self._placements[b.id].param) for b in buckets if self._placements[b.id].streamed and b.trainable]
        if homes:
            # Buckets pass one after another, so the largest counts.
            bucket, param = max(homes, key=lambda home: streamed_bytes(*home))
            for kind, nbytes in streamed(bucket, param):
                yield Held(kind, nbytes, self._ops.num_run, self._ops.num - 1)


def _ends(life: Life) -> tuple[int, int]:
    return life.first, life.last


class _Copy(NamedTuple):
    """A gathered copy: the first position after its gather, the first after its wait, and the last before its release.

    If it is never awaited, `wait` is after `last`.
    """

    gather: int
    wait: int
    last: int


@dataclass(slots=True)
class _Moves:
    """The moves of a schedule as positions, both ends included."""

    axis: Axis

    gathered: dict[BucketId, list[_Copy]]
    grad_ends: dict[BucketId, int]
    """Last position before the wait for the gradients, if they are offloaded or sharded."""
    completes: dict[BucketId, int]
    """Last position before the reduce."""
    left_at: dict[GroupId, int]
    """By group: last position at which offloaded activations are on the device for the first time."""
    back_at: dict[GroupId, int]
    """By group: first position at which prefetched activations are on the device again."""

    def last_with_gradients(self, bucket: Bucket) -> int:
        """Return the last position with the gradients of `bucket` on the device if they never leave it."""
        return last_with_gradients(bucket, self.axis.ops.num_run, self.axis.ops.num)


def _lives(step: StepGraph, plan: Plan, moves: _Moves) -> Mapping[StorageId, tuple[Life, ...]]:
    starts = moves.axis.starts
    unmoved = {
        name: Life(first=starts[life.first], last=starts[life.last]) for name, life in liveness(step).lives.items()
    }
    lives: dict[StorageId, tuple[Life, ...]] = {name: (life,) for name, life in unmoved.items()}
    owners = {param: bucket.id for bucket in plan.buckets for param in bucket.params}
    end = moves.axis.ops.num - 1
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
            back_at = moves.back_at.get(group.id, end + 1)
            out, back = leaving_name(name), arrived_name(name)
            out, back = out if out in unmoved else name, back if back in unmoved else name
            if out in unmoved:
                lives[out] = (Life(first=unmoved[out].first, last=moves.left_at[group.id]),)
                lives[back] = (*(lives[out] if out == back else ()), Life(first=back_at, last=unmoved[back].last))
    return lives


def _moves(axis: Axis, plan: Plan, rank: int) -> _Moves:
    """Return the moves of the schedule of `rank`.

    A gather, a prefetch and the result of a reduce count from the next position on. A release and a wait count to the
    position before.
    """
    lasts = {region.id: axis.of[region.last] for region in plan.regions}
    moves = _Moves(axis, {}, {}, {}, {}, {})
    starts: dict[BucketId, _Copy] = {}
    done, num = -1, axis.ops.num
    for action in actions_of(plan, rank):
        match action.verb, action.target:
            case Verb.RUN, RegionRef(region):
                done = lasts[region]
            case Verb.GATHER, BucketRef(bucket):
                starts[bucket] = _Copy(done + 1, num, num - 1)
            case Verb.WAIT, BucketRef(bucket) if bucket in starts:
                starts[bucket] = starts[bucket]._replace(wait=done + 1)
            case Verb.RELEASE, BucketRef(bucket):
                moves.gathered.setdefault(bucket, []).append(starts.pop(bucket)._replace(last=done))
            case Verb.REDUCE, BucketRef(bucket):
                if bucket in axis.with_moment:
                    done = max(done, 0) + 1
                moves.completes[bucket] = done - (bucket in axis.with_moment)
            case Verb.WAIT, GradientRef(bucket):
                moves.grad_ends[bucket] = done
            case Verb.WAIT, GroupRef(group):
                moves.left_at.setdefault(group, done)
            case Verb.PREFETCH, GroupRef(group):
                moves.back_at[group] = done + 1
    for bucket, copy in starts.items():
        moves.gathered.setdefault(bucket, []).append(copy)
    return moves
