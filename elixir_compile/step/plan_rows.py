"""List the device bytes of a plan as rows of bytes between two ops, by the bucket or storage that holds them.

The works of the plan say between which ops a bucket holds which memory (`step.works`), and `step.bucket_bytes` how many
bytes that are.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy as shallow_copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product, zip_longest
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elixir_compile.ir import (
    BackwardOrder,
    Bucket,
    BucketId,
    Calls,
    Kind,
    Plan,
    StepGraph,
    StorageId,
    Tier,
    Update,
)
from elixir_compile.ir.bucket import in_turns, takes_device
from elixir_compile.ir.plan import next_is_lean
from elixir_compile.step.as_run import as_run
from elixir_compile.step.bucket_bytes import (
    ACTIVATIONS,
    ONLY,
    Births,
    BucketGradients,
    CallKind,
    Held,
    Ops,
    Sizes,
    copy_of_call,
    crosses,
    gradients_of_call,
    input_bytes,
    last_unreduced,
    last_with_gradients,
    output_bytes,
    outputs_held,
    resting,
    storages_of_calls,
    sum_nbytes,
)
from elixir_compile.step.divide import arrived_name, laps_of, leaving_name
from elixir_compile.step.liveness import Life, liveness
from elixir_compile.step.works import Do, Memory, Walk, Work, plan_on_lanes

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

    def __init__(self, step: StepGraph, plan: Plan) -> None:
        """Read the works of the schedule of `plan`; `step` has the ops that run."""
        index = {op.id: number for number, op in enumerate(step.ops)}
        ends: dict[str, int] = {region.id: index[region.last] + 1 for region in plan.regions}
        with_position = {bucket.id for bucket in plan.buckets if Sizes.of(bucket, plan.num_copies).has_position}
        self.reduced: dict[str, int] = {}
        """By bucket: the last position before its reduce."""
        self.allocated: dict[tuple[str, str], list[int]] = defaultdict(list)
        """By `Memory` and name of its bucket or group: the positions from which on it is there."""
        self.freed: dict[tuple[str, str], list[int]] = defaultdict(list)
        """By `Memory` and name of its bucket or group: the last positions at which it is there."""
        self.op_of: list[int] = []
        """By position: the index of its op, or of the op before a reduce."""
        op_of, num_done = self.op_of, 0
        for work in _works(plan):
            do, name = work.do, work.name
            if do is Do.RUN:
                op_of += range(num_done, ends[name])
                num_done = max(num_done, ends[name])
            elif do is Do.REDUCE or do is Do.ADD_UP:
                if name in with_position and not num_done:  # before the first op, it counts behind it
                    op_of.append(0)
                    num_done = 1
                self.reduced[name] = len(op_of) - 1
                if name in with_position:
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


def _works(plan: Plan) -> Sequence[Work]:
    """Return the works of `plan`, of any rank, without what regions touch."""
    # When an update runs changes no bytes: streamed updates take turns in one row, and gradients stay until the end.
    mode = Update.AFTER_BACKWARD
    buckets, groups = plan_on_lanes(plan, mode)
    for group in groups.values():
        group.leaves_whole = group.returns_whole = True
    walk = Walk(buckets, groups, {}, mode, has_backward=False)
    return walk.step(plan.schedules[0].pairs)


# ----------------------------------------------------------------------------------------------------------------------
# List the device bytes of a plan as rows of bytes between two ops, by the bucket or storage that holds them.
#
#   bucket b3     param     86.0 MiB   op 0 to 4378          its home is the device
#   bucket b4     gathered  86.0 MiB   op 210 to 261         from its gather to its release
#   storage s17   saved     64.0 MiB   op 31 to 4120         an activation that is kept
#   joint         moment   516.0 MiB   op 4378 to 4378       the largest of the streamed updates, which take turns
#   joint         workspace 48.0 MiB   op 4378 to 4378       what the update of a whole tensor holds besides
#
# The rows of all owners add up to the timeline of the plan, and the rows of an owner to its own bytes. Buckets that
# take turns have one joint row, with the bytes of the largest of them.


_NOTHING: Mapping[Kind, int] = MappingProxyType({})


class PlanRows:
    """The rows of a rank in a step of one call under `plan`, which must be a plan of `graph`.

    The ops include recomputed ops; fused storages have no rows.
    """

    def __init__(self, graph: StepGraph, plan: Plan) -> None:
        self.step = as_run(graph, plan.activations, laps_of(plan))
        """The ops as the plan runs them."""
        self.axis = Axis(self.step, plan)
        """The positions of rows."""
        self.call, self._ops, self.plan = ONLY, self.axis.ops, plan
        self._others_bytes = _NOTHING
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
        """The bytes by kind that a forward leaves for its backward, without outputs, which every call has alike."""
        num_forward, outputs = self._ops.num_forward, frozenset(self.step.outputs)
        found: dict[Kind, int] = dict.fromkeys(ACTIVATIONS, 0)
        for storage in self.step.storages:
            lives = self.lives.get(storage.id, ())
            if storage.kind in found and storage.id not in outputs and any(crosses(own, num_forward) for own in lives):
                found[storage.kind] += storage.nbytes
        return found

    def in_call(self, call: CallKind, others_bytes: Mapping[Kind, int] = _NOTHING) -> "PlanRows":
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
        for kind, nbytes in self._others_bytes.items():
            yield Held(kind, self.call.others_beside * nbytes, 0, self._ops.num_run - 1)
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
        """Yield the rows that `buckets` hold in turns, in their updates: rooms of streamed ones, and work space."""
        placed = [(bucket, self._placements[bucket.id]) for bucket in buckets if bucket.trainable]
        first, end = self._ops.num_run, self._ops.num - 1
        if self.plan.update is Update.IN_BACKWARD:
            working = [own.id for own, home in placed if own.work_nbytes and takes_device(own, home)]
            first = min([first, *(self.axis.reduced.get(name, end) + 1 for name in working)])
        for kind, nbytes in in_turns(placed):
            yield Held(kind, nbytes, first, end)


# ----------------------------------------------------------------------------------------------------------------------
# The halves of a step of several calls, its forwards and backward passes, and which outstanding forwards are beside
# each.
#
#                       F1 F2 f3 f4 B1 B2 b3 b4     4 calls, 4 outstanding, at most 2 full: a small letter is a lean one
#   full beside         0  1  2  2  1  0  0  0
#   lean beside         0  0  0  1  2  2  1  0
#
# The program of a half and its place in the step decide the bytes that it holds itself; beside it, so many full and
# lean forwards hold the bytes of each. So of all halves of one kind only the one with the most beside it counts. If
# the order of the backward passes is not known, these are the most in any order. A step without lean calls is one in
# which as many full forwards may wait as are outstanding.


class Half(NamedTuple):
    """A kind of forwards or of backward passes: their program, and their place among those of the step."""

    is_lean: bool
    is_backward: bool
    is_first: bool
    is_last: bool
    is_after_backward: bool
    """Whether a backward has run before, which leaves sums of gradients."""

    def call(self, calls: Calls) -> CallKind:
        """Return the kind of calls of this half, alone in a step of `calls`."""
        # Before the first backward, a forward holds no more than if all forwards came first.
        alternate = calls.alternate and (self.is_backward or self.is_after_backward)
        return CallKind(is_first=self.is_first, is_last=self.is_last, alternate=alternate)


class Beside(NamedTuple):
    """The outstanding forwards beside a half, and the backward passes before it."""

    num_full: int
    num_lean: int
    num_done: int


Steps = Iterator[tuple[Half, Beside]]


def halves(calls: Calls, num_full: int) -> Steps:
    """Yield the forwards that can be beside each half of a step of `calls`, if at most `num_full` full ones wait."""
    if calls.backward_order is not BackwardOrder.ANY:
        yield from walked(calls, num_full)
        return
    kinds = (False, True) if num_full < calls.outstanding else (False,)
    if calls.alternate:
        # The most beside each half, whenever it runs: the last forward may come behind all other backward passes.
        for is_lean, number in product(kinds, sorted({0, 1, calls.num - 1})):
            is_first, is_last = number == 0, number == calls.num - 1
            num_done = 0 if is_first else calls.num - 1 if is_last else calls.num - 2
            most = Beside(num_full - (not is_lean), calls.outstanding - num_full - is_lean, num_done)
            for is_backward in (True,) if is_first and is_lean else (False, True):
                is_alone = is_last if is_backward else is_first
                half = Half(is_lean, is_backward, is_first, is_last, not is_first)
                yield half, Beside(0, 0, num_done) if is_alone else most
        return
    yield from (found for found in walked(calls, num_full) if not found[0].is_backward)
    # The fewest and the most full forwards that may be beside each backward, if all forwards come first.
    for num_done, is_lean in product(range(calls.num), kinds):
        num_beside, most_lean = calls.num - 1 - num_done, calls.num - num_full - is_lean
        half = Half(is_lean, True, num_done == 0, num_done == calls.num - 1, num_done > 0)
        for full in {max(0, num_beside - most_lean), min(num_full - (not is_lean), num_beside)}:
            yield half, Beside(full, num_beside - full, num_done)


class Course:
    """How far a step of several calls is: the halves that have run, and the forwards that wait."""

    def __init__(self, calls: Calls, most_full: int) -> None:
        """No half has run. At most `most_full` full forwards wait."""
        self._calls, self._most_full = calls, most_full
        self.started = self.ended = self.num_lean = 0
        """Forwards and backward passes that have run, and lean calls among the forwards that wait."""
        self._waiting: dict[int, bool] = {}
        """By call: whether its forward, which waits, is lean."""

    def run(self, call: int, *, is_backward: bool) -> tuple[Half, Beside]:
        """Run the forward or the backward of `call`, and return it with what is beside it."""
        num_full = len(self._waiting) - self.num_lean
        is_lean = self._waiting.pop(call) if is_backward else next_is_lean(num_full, self._most_full)
        self.num_lean -= is_backward and is_lean
        number = self.ended if is_backward else self.started
        half = Half(is_lean, is_backward, number == 0, number >= self._calls.num - 1, self.ended > 0)
        beside = Beside(len(self._waiting) - self.num_lean, self.num_lean, self.ended)
        if is_backward:
            self.ended += 1
        else:
            self._waiting[call] = is_lean
            self.num_lean += is_lean
            self.started += 1
        return half, beside


def walked(calls: Calls, num_full: int) -> Steps:
    """Yield the halves of a step one after another: `calls.outstanding` forwards, then a backward and a forward in
    turn, then the other backward passes. A step in any order is taken to be first-first."""
    course, waiting = Course(calls, num_full), deque[int]()
    take = waiting.pop if calls.backward_order is BackwardOrder.LAST_FIRST else waiting.popleft
    while course.ended < calls.num:
        if len(waiting) == calls.outstanding or course.started == calls.num:
            yield course.run(take(), is_backward=True)
        else:
            waiting.append(course.started)
            yield course.run(course.started, is_backward=False)


def num_full_calls(calls: Calls, num_full: int) -> int:
    """Return how many calls of a step are full."""
    return sum(not half.is_lean and not half.is_backward for half, _ in walked(calls, num_full))


def calls_by_program(plan: Plan) -> Sequence[tuple[int, Plan]]:
    """Return how many calls of a step run `plan`, and how many its lean calls as a plan, if there are any."""
    num_full = num_full_calls(plan.calls, plan.most_full)
    return [(num_full, plan)] + ([] if plan.lean is None else [(plan.calls.num - num_full, plan.of_lean_calls())])


class Halves:
    """The forwards that may be beside each half of a step of `calls`, if at most `num_full` full forwards wait."""

    def __init__(self, calls: Calls, num_full: int) -> None:
        self.calls = calls
        found: dict[Half, dict[Beside, None]] = {}
        for half, beside in halves(calls, num_full):
            found.setdefault(half, {})[beside] = None
        self._beside = {half: np.array(list(own), dtype=np.int64) for half, own in found.items()}

    def most(self, own: "BesideBytes") -> Mapping[Half, tuple[Beside, int]]:
        """Return for each half the forwards that hold the most bytes beside it, and how many more bytes these are than
        with no other outstanding forward."""
        found: dict[Half, tuple[Beside, int]] = {}
        calls = self.calls
        for half, beside in self._beside.items():
            num_full, num_lean, num_done = beside.T
            nbytes = own.full * num_full + own.lean * num_lean
            nbytes += own.outputs * outputs_held(num_full + num_lean, num_done, calls.num - 1, calls)
            nbytes += own.inputs * np.minimum(num_done, calls.input_grads - 1)
            at = int(nbytes.argmax())
            found[half] = Beside(*beside[at].tolist()), int(nbytes[at])
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideBytes:
    """The bytes of one outstanding forward beside a half, and of the tensors that the caller holds for it."""

    full: int
    lean: int
    outputs: int
    inputs: int


class CallBytes:
    """The bytes of the calls that run the same program: all full calls do, and all lean calls."""

    def __init__(self, rows: PlanRows) -> None:
        self.rows = rows
        """The rows of a call; those beside it are added for a kind of calls."""
        self.waiting_bytes = sum(rows.waiting_bytes.values())
        """Bytes that a forward leaves for its backward, without outputs."""
        self._alone: dict[CallKind, NDArray[np.int64]] = {}

    def alone(self, half: Half) -> tuple[int, int]:
        """Return the most bytes at any op of `half` if no other forward waits, and at any op of the update."""
        call, ops = half.call(self.rows.plan.calls), self.rows.axis.ops
        if call not in self._alone:
            self._alone[call] = self.rows.in_call(call).nbytes
        live_bytes = self._alone[call]
        span = slice(ops.num_forward, ops.num_run) if half.is_backward else slice(0, ops.num_forward)
        return int(live_bytes[span].max(initial=0)), int(live_bytes[ops.num_run :].max(initial=0))


class TwoPrograms:
    """The bytes of steps whose calls run one of two programs with the same buckets: full calls run one, lean calls the
    other. Both are one if there are no lean calls."""

    def __init__(self, full: CallBytes, lean: CallBytes) -> None:
        self.full, self.lean = full, lean
        self._calls = full.rows.plan.calls
        self._beside = BesideBytes(
            full=full.waiting_bytes,
            lean=lean.waiting_bytes,
            outputs=output_bytes(full.rows.step),
            inputs=input_bytes(full.rows.step, self._calls),
        )

    @classmethod
    def of(cls, graph: StepGraph, plan: Plan) -> "TwoPrograms":
        """Return the programs of `plan`, a plan of `graph`."""
        full = CallBytes(PlanRows(graph, plan))
        return cls(full, full if plan.lean is None else CallBytes(PlanRows(graph, plan.of_lean_calls())))

    def fullest(self, beside: Halves) -> Iterator[tuple[Half, PlanRows]]:
        """Yield each half with the rows of a call that has the most bytes beside it. Only the ops of the half count."""
        for half, (most, _) in beside.most(self._beside).items():
            call = replace(
                half.call(self._calls),
                beside=most.num_full + most.num_lean,
                others_beside=most.num_full if half.is_lean else most.num_lean,
                num_done=most.num_done,
            )
            own, other = (self.lean, self.full) if half.is_lean else (self.full, self.lean)
            yield half, own.rows.in_call(call, other.rows.waiting_bytes)

    def peak_bytes(self, beside: Halves) -> int:
        """Return the most bytes at any op, as `plan_timeline` counts them."""
        peak_bytes = 0
        for half, (_, more_bytes) in beside.most(self._beside).items():
            alone_bytes, update_bytes = (self.lean if half.is_lean else self.full).alone(half)
            peak_bytes = max(peak_bytes, alone_bytes + more_bytes, update_bytes if half.is_backward else 0)
        return peak_bytes
