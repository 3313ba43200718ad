"""List the device bytes of a plan as rows of bytes between two ops, by the bucket or storage that holds them."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy as shallow_copy
from functools import cached_property
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from elixir_compile.ir import Action, Bucket, BucketId, Kind, Plan, Saving, StepGraph, StorageId, Tier, Update
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
from elixir_compile.step.works import FIRST_OWN, BucketWorks, Do, GroupWorks, Memory, Walk, Work

# ----------------------------------------------------------------------------------------------------------------------
# The axis of rows of bytes: the ops of a step, and its reduces with buffers, which stand between two ops.
#
#   op         0    1    2         3    4      a reduce holds gradients and a flat buffer, and nothing that only
#   position   0    1    2    3    4    5      op 2 reads last
#   reduce                    ^
#
# What is allocated or freed when ops 0 to 2 are done, but not the reduce, is there from position 3 on, or up to
# position 2.


class Axis:
    """The ops of a step and its reduces with buffers in one order, and where works allocate and free memory on it."""

    def __init__(self, step: StepGraph, plan: Plan, rank: int) -> None:
        """Read the works of the schedule of `rank` under `plan`; `step` has the ops that run."""
        index = {op.id: number for number, op in enumerate(step.ops)}
        ends: dict[str, int] = {region.id: index[region.last] + 1 for region in plan.regions}
        with_moment = {bucket.id for bucket in plan.buckets if Sizes.of(bucket, plan.num_copies).has_moment}
        self.reduced: dict[str, int] = {}
        """By bucket: the last position before its reduce."""
        self.allocated: dict[tuple[str, str], list[int]] = defaultdict(list)
        """By `Memory` and name of its bucket or group: the positions from which on it is there."""
        self.freed: dict[tuple[str, str], list[int]] = defaultdict(list)
        """By `Memory` and name of its bucket or group: the last positions at which it is there."""
        self.op_of: list[int] = []
        """By position: the index of its op, or of the op before a reduce."""
        op_of, num_done = self.op_of, 0
        for work in _works(plan, rank):
            do, name = work.do, work.name
            if do is Do.RUN:
                op_of += range(num_done, ends[name])
                num_done = max(num_done, ends[name])
            elif do is Do.REDUCE or do is Do.ADD_UP:
                if name in with_moment and not num_done:  # before the first op, it counts behind it
                    op_of.append(0)
                    num_done = 1
                self.reduced[name] = len(op_of) - 1
                if name in with_moment:
                    op_of.append(num_done - 1)
            for memory in work.writes if work.allocates else ():
                self.allocated[str(memory), name].append(len(op_of))
            for memory in work.frees:
                self.freed[str(memory), name].append(len(op_of) - 1)
        op_of += range(num_done, len(step.ops))
        self.starts: list[int] = [len(op_of)] * (len(step.ops) + 1)
        """By index of an op: its position; at last, how many positions there are."""
        for position in reversed(range(len(op_of))):
            self.starts[op_of[position]] = position
        self.ops = Ops(*(self.starts[number] for number in Ops.of(step)))
        """How many positions there are in all, and before the backward and the update."""

    def op_from(self, position: int) -> int:
        """Return the index of the first op that is not before `position`; the number of ops if there is none."""
        if position >= len(self.op_of):
            return self.op_of[-1] + 1
        is_reduce = position > 0 and self.op_of[position] == self.op_of[position - 1]
        return self.op_of[position] + is_reduce

    def op_to(self, position: int) -> int:
        """Return the index of the last op that is not behind `position`; -1 if there is none."""
        return -1 if position < 0 else self.op_of[position]


def _works(plan: Plan, rank: int) -> Sequence[Work]:
    """Return the works of `rank`, or of the first rank if all have the same, without what regions touch."""
    # When an update runs changes no bytes: streamed updates take turns in one row, and gradients stay until the end.
    mode = Update.AFTER_BACKWARD
    placed = zip(plan.buckets, plan.placements, strict=True)
    buckets = {
        bucket.id: BucketWorks(FIRST_OWN, home, mode, is_sharded=bucket.is_sharded, is_trained=False)
        for bucket, home in placed
    }
    groups = {group.id: GroupWorks(FIRST_OWN, group.id) for group in plan.activations if group.saving is Saving.OFFLOAD}
    for group in groups.values():
        group.leaves_whole = group.returns_whole = True
    walk = Walk(buckets, groups, {}, mode, lanes={}, has_backward=False)
    return walk.step([(action.verb, action.target) for action in actions_of(plan, rank)])


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


class PlanRows:
    """The rows of `rank` in `call` under `plan`, which must be a plan of `graph`.

    The ops include recomputed ops; fused storages have no rows.
    """

    def __init__(self, graph: StepGraph, plan: Plan, rank: int = 0, call: CallKind = ONLY) -> None:
        self.step = as_run(graph, plan.activations, laps_of(plan))
        """The ops as the plan runs them."""
        self.axis = Axis(self.step, plan, rank)
        """The positions of rows."""
        self.call, self._ops, self.plan = call, self.axis.ops, plan
        self._others_bytes: Mapping[Kind, int] = {}
        self._placements = {placement.bucket: placement for placement in plan.placements}
        owners = {param: bucket for bucket in plan.buckets for param in bucket.params}
        self.lives = self._lives(owners)
        """The stretches of positions in which each storage is on the device. Parameters of buckets are listed as if
        they never moved."""
        self._births: dict[BucketId, list[tuple[int, int]]] = {bucket.id: [] for bucket in plan.buckets}
        self.storages: dict[StorageId, tuple[Held, ...]] = {}
        """The rows of each storage that is neither a parameter nor a gradient of a bucket."""
        storages = {storage.id: storage for storage in self.step.storages}
        for name, lives in self.lives.items():
            storage = storages[name]
            if storage.of is not None and storage.of in owners:
                self._births[owners[storage.of].id].append((lives[0].first, storage.nbytes))
            elif not (storage.kind is Kind.PARAM and name in owners):
                self.storages[name] = tuple(Held(storage.kind, storage.nbytes, own.first, own.last) for own in lives)

    def _lives(self, owners: Mapping[StorageId, Bucket]) -> Mapping[StorageId, tuple[Life, ...]]:
        """Return the lives of all storages; `owners` has the bucket of each parameter."""
        axis, starts, end = self.axis, self.axis.starts, self._ops.num - 1
        unmoved = {
            name: Life(first=starts[life.first], last=starts[life.last])
            for name, life in liveness(self.step).lives.items()
        }
        lives: dict[StorageId, tuple[Life, ...]] = {name: (life,) for name, life in unmoved.items()}
        for storage in self.step.storages:
            bucket = None if storage.of is None else owners.get(storage.of)
            if bucket is not None and storage.id in unmoved:
                last = last_unreduced(*self._end_of_gradients(bucket), is_packed=bucket.is_packed)
                lives[storage.id] = (Life(first=unmoved[storage.id].first, last=last),)
        for group in self.plan.activations:
            left = axis.freed.get((Memory.SAVED, group.id), [])
            back = axis.allocated.get((Memory.BACK, group.id), [end + 1])[-1]
            for name in group.storages if left else ():
                out, arrived = leaving_name(name), arrived_name(name)
                out, arrived = out if out in unmoved else name, arrived if arrived in unmoved else name
                if out in unmoved:
                    lives[out] = (Life(first=unmoved[out].first, last=left[0]),)
                    lives[arrived] = (
                        *(lives[out] if out == arrived else ()),
                        Life(first=back, last=unmoved[arrived].last),
                    )
        return lives

    def _end_of_gradients(self, bucket: Bucket) -> tuple[int, int, int]:
        """Return the last positions before the reduce of the gradients of `bucket`, before the wait for them if they
        are offloaded or sharded, and with the gradients on the device if they never leave it."""
        unreduced = Memory.ROWS if bucket.is_sharded else Memory.GRADIENT
        end = self._ops.num - 1
        wait = self.axis.freed.get((unreduced, bucket.id), [end])[-1]
        return self.axis.reduced.get(bucket.id, end), wait, last_with_gradients(bucket, self._ops.num_run, end + 1)

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
        placement, end, axis = self._placements[bucket.id], self._ops.num - 1, self.axis
        for kind, nbytes in resting(bucket, placement):
            yield Held(kind, nbytes, 0, end)
        sizes, is_away = Sizes.of(bucket, self.plan.num_copies), placement.param is not Tier.DEVICE
        births = self._births[bucket.id] if births is None else births
        moving: list[Held] = []
        # A gather, the wait for it, which frees what was sent, if it is of several ranks, and its release.
        allocated, *freed = (
            places.get((memory, bucket.id), ())
            for places, memory in ((axis.allocated, Memory.COPY), (axis.freed, Memory.SENT), (axis.freed, Memory.COPY))
        )
        for gather, wait, last in zip_longest(allocated, *freed, fillvalue=end + 1):
            moving += copy_of_call(self.call, self._ops, sizes, gather, wait + 1, last, is_sent=is_away)
        complete, wait, stays = self._end_of_gradients(bucket)
        grads = BucketGradients(
            sizes=sizes,
            births=births,
            sum_bytes=sum_nbytes(bucket, births, self.plan.calls, is_away=is_away),
            complete=complete,
            wait=wait,
            stays=stays,
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
