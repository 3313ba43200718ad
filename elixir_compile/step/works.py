"""The works of a schedule: what the runtime does for each action, on which lane, behind what, and in which memory.

This is the one place that says what an action does. Readers fold the works of a step, once for each step:

```text
  action      work                        on          behind                    memory
  gather b1                               compute     the program               allocates the copy
              gather b1                   h2d         compute until now         reads the home, writes the copy
  wait b1     compute waits for the copy
  run fwd.1   run fwd.1                   compute                               reads the copy

  reader                      an instant is         gives
  step.lane_order             a set of works       two accesses to the same memory that nothing orders
  step.seconds                seconds              the spans and the seconds of a step
  step.plan_rows              a place among ops    from which op to which each memory is on the device
```

A work is behind the work before it on its actor, a lane or a thread, and behind all that the program knows to be over
when it issues the work. The program issues all works, far ahead of the lanes; what the thread of the updates issues is
`late`. Instants have numbers: first the actors, then some for each bucket and each group. The rules are those of
`runtime.gathers`, `runtime.gradients`, `runtime.distributed.sharded`, `runtime.saved` and
`optim.update`. The program waits for lanes where the runtime does:

```text
  begin of a forward     d2h, if an update on the thread of the updates reads gradients of the device
  end of a forward       h2d
  end of a backward      d2h and h2d; then gradients are added to their sums, if there are any
  updates                behind the backward: on the device, by the host, streamed; or in the backward, where a bucket
                         closes: at the action behind which its gradient is final (`step.liveness.closing_verbs`)
```

What an offload reads is free at the next action if nothing waits for the offload: only the wait keeps it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType
from typing import Any, NamedTuple

from elixir_compile.ir.bucket import Placement, sharded_buckets
from elixir_compile.ir.kinds import BucketId, GroupId, InnerVerb, Lane, RegionId, Saving, Tier, Update, Verb
from elixir_compile.ir.plan import Plan
from elixir_compile.ir.schedule import BucketRef, GradientRef, GroupRef, RegionRef, StateRef, Target, label
from elixir_compile.step.liveness import may_end_forward

Instant = int
"""The number of an instant: of an actor, when its next work may begin; of a transfer, when it is over."""
COMPUTE, H2D, D2H, COLLECTIVES, AVERAGES, UPDATES, PROGRAM = range(7)
"""The actors: lanes and threads. `COLLECTIVES` is the queue of gathers and reduces, `AVERAGES` that of averages over
copies, `UPDATES` the thread of the updates, and `PROGRAM` the thread that trains; the thread of autograd goes on where
it stops.

A process group of torch does its collectives in the order of issue: that of NCCL has one stream on each device for all
that do not block (torch 2.11 to 2.13). Gathers and reduces are collectives of one group, the ranks that share a bucket,
and averages those of another, the ranks with the same shard. The ledger and the record have a lane for each kind of
collective nevertheless, gathers and reductions."""
NOWHERE, NEVER, ROOMS, STREAMED, DISK = range(7, 12)
"""What nobody reads; what never comes; when the rooms of streamed updates are allocated, and when the state of one has
arrived on the device; when the disk has done all that it was asked for."""
FIRST_OWN, NUM_OWN = 12, 6
"""The first instant of a bucket or group, and how many each has at most."""


class Memory:
    """The contents of memory, as texts; `{name}` is a bucket, or a group of activations.

    A work allocates it, reads it, writes it, frees it; memory that is allocated again is other memory.
    """

    HOME = "the parameters of {name} in their home"
    COPY = "the gathered copy of {name}"
    SENT = "the shard of {name} on its way to the other ranks"
    STATE = "the optimizer state of {name}"
    ROOM = "the room on the device for the streamed update of {name}"
    STAGED = "the copies of {name} and its gradient for the host"
    GRADIENT = "the gradient of {name} on the device"
    ROWS = "the gradient of {name} on its way to the other ranks"
    REDUCED = "the reduced gradient of {name} on the device"
    ARRIVED = "the gradient of {name} on the host"
    SUM = "the sum of the gradients of {name}"
    SAVED = "{name} on the device"
    AWAY = "{name} on the host"
    BACK = "{name}, back on the device"
    LEAVING_SLICE = "the slice of {name} that leaves the device"
    ARRIVING_SLICE = "a slice of {name} that arrives on the device"


Access = str | tuple[Any, ...]
"""Which memory: of the bucket or group of the work; or (memory, name, ...) if it is another's, or one of several."""


@dataclass(frozen=True, slots=True, eq=False)
class Deed:
    """What a work does: the lane and the label of its span, as the ledger of a run has them."""

    lane: Lane
    verb: Verb | InnerVerb
    of: Any
    """The class of the target."""
    in_update: bool = False
    """Whether it belongs to the optimizer, and to no graph."""
    is_slice: bool = False
    """Whether it passes while a lap runs."""

    def label(self, name: str) -> str:
        """Return the label of the span for the region, bucket or group `name`."""
        return label(self.verb, self.of(name))


class Do:
    """All that works do. Those of the first block move bytes or take time: see `step.timeline.traffic` and
    `Prices.of_deed`."""

    RUN = Deed(Lane.COMPUTE, Verb.RUN, RegionRef)
    BEGIN_LAPS = Deed(Lane.COMPUTE, Verb.RUN, RegionRef)
    """Run a region beside slices that pass: up to its last micro-batch, if slices arrive; else the first."""
    END_LAPS = Deed(Lane.COMPUTE, Verb.RUN, RegionRef)
    GATHER = Deed(Lane.H2D, Verb.GATHER, BucketRef)
    GATHER_FROM_DISK = Deed(Lane.H2D, Verb.GATHER, BucketRef)
    """`GATHER` beside which parameters are read, in pieces: `READ_PARAMS`. The first may be copied when it is there."""
    ALL_GATHER = Deed(Lane.GATHER, Verb.GATHER, BucketRef)
    REDUCE = Deed(Lane.REDUCE, Verb.REDUCE, BucketRef)
    AVERAGE = Deed(Lane.REDUCE, InnerVerb.AVERAGE, BucketRef)
    OFFLOAD = Deed(Lane.D2H, Verb.OFFLOAD, GradientRef)
    OFFLOAD_GROUP = Deed(Lane.D2H, Verb.OFFLOAD, GroupRef)
    PREFETCH = Deed(Lane.H2D, Verb.PREFETCH, GroupRef)
    SLICES_LEAVE = Deed(Lane.D2H, Verb.OFFLOAD, GroupRef, is_slice=True)
    SLICES_ARRIVE = Deed(Lane.H2D, Verb.PREFETCH, GroupRef, is_slice=True)
    ADD = Deed(Lane.COMPUTE, InnerVerb.ADD, GradientRef)
    ADD_ON_HOST = Deed(Lane.HOST, InnerVerb.ADD, GradientRef)
    UPDATE = Deed(Lane.COMPUTE, Verb.UPDATE, BucketRef, in_update=True)
    UPDATE_ON_HOST = Deed(Lane.HOST, Verb.UPDATE, BucketRef, in_update=True)
    UPDATE_ON_DISK = Deed(Lane.HOST, Verb.UPDATE, BucketRef, in_update=True)
    """An update by the host, beside which state on the disk is read and written, and the parameters if they are there:
    `READ` and `WRITE`."""
    STAGE = Deed(Lane.D2H, Verb.OFFLOAD, BucketRef, in_update=True)
    """Copy parameters from their home, the device, to the host, which updates them: `STAGE_GRADIENT`, and `RETURN`."""
    STAGE_GRADIENT = Deed(Lane.D2H, Verb.OFFLOAD, GradientRef, in_update=True)
    RETURN = Deed(Lane.H2D, Verb.GATHER, BucketRef, in_update=True)
    STREAM_THERE = Deed(Lane.H2D, Verb.GATHER, StateRef, in_update=True)
    STREAM_UPDATE = Deed(Lane.COMPUTE, Verb.UPDATE, BucketRef, in_update=True)
    STREAM_BACK = Deed(Lane.D2H, Verb.OFFLOAD, StateRef, in_update=True)
    READ_PARAMS = Deed(Lane.DISK, InnerVerb.READ, BucketRef)
    READ = Deed(Lane.DISK, InnerVerb.READ, StateRef, in_update=True)
    WRITE = Deed(Lane.DISK, InnerVerb.WRITE, StateRef, in_update=True)

    RELEASE = Deed(Lane.COMPUTE, Verb.RELEASE, BucketRef)
    """Free a copy, in no time."""
    ADD_UP = Deed(Lane.COMPUTE, Verb.REDUCE, BucketRef)
    """Add the gradients of a bucket up, which regions have made whole already."""
    AT_ONCE = Deed(Lane.COMPUTE, Verb.RUN, RegionRef)
    """Allocate or free memory, or copy inside of a device, in the order of compute, in no time."""

    WAIT = Deed(Lane.CALLER, Verb.WAIT, BucketRef)
    """Let all further works of the actor be behind `after`."""
    SYNCHRONIZE = Deed(Lane.CALLER, Verb.WAIT, BucketRef)
    """Let the program go on when the lane `after` has done all that was issued there until then."""
    AWAIT = Deed(Lane.CALLER, Verb.WAIT, BucketRef)
    """Let the program go on when an update beside the step is done, `after`[0], and compute when its results are on the
    device, `after`[1]; nobody has to wait for either any more."""
    LATE_GATHER = Deed(Lane.H2D, Verb.GATHER, BucketRef)
    """Gather a bucket that may be in update until `after`[0]; if it is, the thread of the updates issues the copy."""
    WAIT_LATE = Deed(Lane.CALLER, Verb.WAIT, BucketRef)
    """Let compute wait for such a copy, `after`[0], and the program for the update before it, as `AWAIT` does."""
    LATE_RETURN = Deed(Lane.H2D, Verb.GATHER, BucketRef, in_update=True)
    """`RETURN` of an update beside the step, which the thread of the updates issues when it is done, `after`[0]."""
    NEW_STEP = Deed(Lane.CALLER, Verb.RUN, RegionRef)
    """From here on, memory of a step is that of the next step."""


class Work(NamedTuple):
    """What an actor does for an action."""

    actor: Instant
    do: Deed
    name: str
    """The region, bucket or group."""
    after: tuple[Instant, ...]
    """What the work is behind, besides the work before it on its actor and what the program knows to be over."""
    over: Instant
    """The instant when it is over."""
    at: int
    """The index of the action in the schedule."""
    reads: Sequence[Access]
    writes: Sequence[Access]
    frees: Sequence[Access]
    allocates: bool
    """Whether what it writes is other memory than before."""


_new = tuple.__new__
"""Makes a `Work` of a tuple in a third of the time of its own constructor."""


class BucketWorks:
    """A bucket on the lanes. It has more than 15 attributes: facts of the plan, its instants, and what the actions of a
    step have done with it so far."""

    def __init__(
        self, place: Instant, placement: Placement, update: Update, *, is_sharded: bool, is_one_memory: bool
    ) -> None:
        """Let `place` and the instants behind it be those of the bucket; see `on_lanes`."""
        self.name: str = placement.bucket
        self.placement = placement
        self.is_sharded = is_sharded
        self.is_summed = False
        """Whether its gradient is added to the sum of those of earlier backward passes."""
        self.closes: Verb | None = None
        """The verb of the action at which it closes: it is updated there; None if it is updated behind the backward."""
        self.is_trained = self.is_made = False
        """Whether a region makes a gradient of it, and whether one has done so in this step."""
        self.is_on_host = is_on_host = placement.param is not Tier.DEVICE
        self.is_gathered = is_on_host or is_sharded
        by_host = placement.optim is not Tier.DEVICE and not placement.streamed
        self.by_host = by_host
        is_beside = update is not Update.AFTER_BACKWARD
        self.is_queued = by_host and is_beside
        """Whether the thread of the updates does its updates."""
        self.is_landing = is_beside and placement.streamed
        """Whether nobody waits for the results of its streamed updates at once."""
        self.is_staged = by_host and not is_on_host and not is_one_memory
        """Whether an update by the host copies the gradient to the host and the parameters back."""
        self.may_wait = self.is_queued or (self.is_landing and is_on_host)
        """Whether readers may have to wait for an update."""
        self.gathered, self.sent, self.reduced, self.done, self.returned, self.home_read = range(place, place + 6)
        """When its last gather is over, its gradient on the host and reduced, its last update on the host done and its
        results on the device, and its home read."""
        if not is_sharded:
            self.home_read = self.gathered
        self.is_updated = self.is_away = False
        """Whether the bucket was updated in this step, and whether its gradient is on its way to the host, or there."""
        self.place = 0
        """The index of its `update` in the schedule."""

    @property
    def own(self) -> str:
        """The gradient of this step on the device that this rank offloads or updates with."""
        return Memory.REDUCED if self.is_sharded else Memory.GRADIENT

    @property
    def leaving(self) -> tuple[str, ...]:
        """The memory that the copy of the gradient to the host reads."""
        return (self.own, Memory.ROWS) if self.is_sharded else (self.own,)

    @property
    def in_home(self) -> str:
        """The gradient of this step in the memory of the parameters."""
        return Memory.ARRIVED if self.is_on_host else self.own

    @property
    def updated_by(self) -> str:
        """The gradient that the update reads."""
        return Memory.SUM if self.is_summed else self.in_home

    @property
    def is_departing(self) -> bool:
        """Whether a queued update reads the gradient on the device, by a copy to the host."""
        return self.is_queued and self.is_staged and self.is_updated and self.is_trained


class GroupWorks:
    """A group of offloaded activations on the lanes.

    ```text
      whole          run fwd.1 | offload h -> wait h frees it | prefetch h -> wait h | run bwd.0 reads it, and frees it
      in slices      run @0 | slices leave | run @1, behind that copy, into the same memory | the last slice leaves
                     prefetch h: slice 0 arrives | run @0, beside it the others arrive | run @1
    ```
    """

    def __init__(self, place: Instant, name: GroupId) -> None:
        """Let `place` and the instants behind it be those of the group."""
        self.name: str = name
        self.left, self.back, self.slices_left, self.slices_back = range(place, place + 4)
        self.leaves_whole = self.leaves_in_slices = self.returns_whole = self.arrives_in_slices = False
        """What regions touch: whole storages in the forward, slices that leave, whole storages in the backward, and
        slices that arrive."""
        self.last_reader: RegionId | None = None
        """The last region of the backward that touches the group."""
        self.whole = Memory.SAVED
        """The whole storages of the group that a region touches now."""
        self.pending: Instant | None = None
        """The instant for which a `wait` waits."""
        self.is_back = False
        """Whether its first slice is coming back."""

    @property
    def leaving(self) -> tuple[str, ...]:
        """The memory that leaves the device: whole storages, and the last slice of others."""
        return (self.whole,) * self.leaves_whole + (Memory.LEAVING_SLICE,) * self.leaves_in_slices


_NONE_CLOSES: Mapping[BucketId, Verb] = MappingProxyType({})


def on_lanes(
    placements: Mapping[BucketId, Placement],
    groups: Iterable[GroupId],
    update: Update,
    *,
    sharded: Collection[str],
    summed: Collection[str],
    closing: Mapping[BucketId, Verb] = _NONE_CLOSES,
    have_gradients: bool = False,
    is_one_memory: bool = False,
) -> tuple[Mapping[BucketId, BucketWorks], Mapping[GroupId, GroupWorks]]:
    """Return the buckets in `placements`, of a plan that updates at `update`, and the offloaded `groups`, on the lanes.

    `sharded` are the buckets of which each rank owns a shard, `summed` those whose gradients are added to the sums of
    earlier backward passes, and `closing` has the verb of the action that closes a bucket in the backward.
    `have_gradients` is True if regions make the gradients of all buckets; else those that a region touches are noted
    later. `is_one_memory` is whether device and host are the same memory.
    """
    place = FIRST_OWN
    buckets: dict[BucketId, BucketWorks] = {}
    for name, home in placements.items():
        bucket = BucketWorks(place, home, update, is_sharded=name in sharded, is_one_memory=is_one_memory)
        bucket.is_summed, bucket.closes = name in summed, closing.get(name)
        bucket.is_trained = bucket.is_made = have_gradients
        buckets[name] = bucket
        place += NUM_OWN
    return buckets, {name: GroupWorks(own, name) for name, own in zip(groups, count(place, NUM_OWN), strict=False)}


def plan_on_lanes(
    plan: Plan, update: Update, closing: Mapping[BucketId, Verb] = _NONE_CLOSES
) -> tuple[Mapping[BucketId, BucketWorks], Mapping[GroupId, GroupWorks]]:
    """Return `on_lanes` of `plan` with updates at `update`, whose regions make gradients that are noted later."""
    return on_lanes(
        {placement.bucket: placement for placement in plan.placements},
        [group.id for group in plan.activations if group.saving is Saving.OFFLOAD],
        update,
        sharded=sharded_buckets(plan.buckets),
        summed=frozenset(bucket.id for bucket in plan.buckets if bucket.sum_nbytes),
        closing=closing,
    )


@dataclass(slots=True, kw_only=True, eq=False)
class RegionWorks:
    """A region on the lanes."""

    at_home: Sequence[BucketWorks] = ()
    """The buckets that it reads in their home."""
    gathered: Sequence[BucketWorks] = ()
    """The buckets of which it reads a copy."""
    gradients: Sequence[tuple[BucketWorks, bool]] = ()
    """The gradients that it touches, and whether it writes them."""
    wholes: Sequence[tuple[GroupWorks, bool]] = ()
    """The groups whose whole storages it touches, and whether it writes them."""
    leaving: Sequence[GroupWorks] = ()
    """The groups of which it makes slices that leave."""
    arriving: Sequence[GroupWorks] = ()
    """The groups of which it reads slices that arrive."""


class Walk:
    """Walks through the actions of a schedule, and finds their works.

    It has more than 20 methods, one for each action, and more than 15 attributes: the lanes, and what is on them.
    """

    def __init__(
        self,
        buckets: Mapping[BucketId, BucketWorks],
        groups: Mapping[GroupId, GroupWorks],
        regions: Mapping[RegionId, RegionWorks],
        update: Update,
        *,
        lanes: Mapping[Instant, Instant] = MappingProxyType({}),
        last_forward: RegionId | None = None,
        has_backward: bool = True,
        is_reduced: bool = False,
        is_averaged: bool = False,
        in_full: bool = True,
    ) -> None:
        """`lanes` has, by actor, the actor that does its works, if it is another. `last_forward` is the last region of
        the forward.

        `is_reduced` is whether ranks add up gradients that are not sharded, and `is_averaged` whether there are copies
        of shards. Only if `in_full`, there are works that take no time, and the memory that regions touch.
        """
        self._buckets, self._groups, self._regions, self._update_mode = buckets, groups, regions, update
        self._h2d, self._d2h, self._collectives, self._averages, self._updates = (
            lanes.get(lane, lane) for lane in (H2D, D2H, COLLECTIVES, AVERAGES, UPDATES)
        )
        self._last_forward, self._has_backward = last_forward, has_backward
        self._is_reduced, self._is_averaged, self._in_full = is_reduced, is_averaged, in_full
        self._works, self._at = list[Work](), 0
        self._dropped: list[tuple[str, tuple[str, ...]]] = []
        """What offloads without a wait read, until the next action frees it."""
        self._unsent: list[BucketWorks] = []
        """The buckets whose shard comes from the disk, until it is sent."""
        self._reducing: list[BucketWorks] = []
        """The buckets whose gradients are added to their sums when the backward ends, if they have any."""

    def step(self, actions: Sequence[tuple[Verb, Target]], *, from_updates: bool = False) -> list[Work]:
        """Return the works of a step of `actions`, pairs of verb and target, in the order of issue.

        The step begins with the forward, or `from_updates` with the updates that the backward before it left.
        """
        body = self._works = []
        left: list[BucketWorks] = []
        unkept = self._look_ahead(actions) if self._in_full else frozenset[int]()
        ends_forward = False
        for at, (verb, target) in enumerate(actions):
            self._at = at
            if self._dropped:
                self._free_dropped()
            if ends_forward and not may_end_forward(verb, target):
                self._synchronize(self._h2d)
                ends_forward = False
            if left and verb is not Verb.UPDATE:  # their `update` is not at the end of the schedule
                for bucket in left:
                    self._update((bucket,))
                left, self._at = [], at
            if isinstance(target, RegionRef):
                self._run(target.region)
                ends_forward = target.region == self._last_forward
            elif isinstance(target, GroupRef):
                self._act_on_group(verb, self._groups[target.group], is_kept=at not in unkept)
            elif verb is Verb.UPDATE:
                left.append(self._buckets[target.bucket])
            else:
                bucket = self._buckets[target.bucket]
                if isinstance(target, GradientRef):
                    self._act_on_gradient(verb, bucket, is_kept=at not in unkept)
                else:
                    self._act_on_bucket(verb, bucket)
        self._free_dropped()
        if ends_forward:
            self._synchronize(self._h2d)
        if self._has_backward:
            self._end_backward()
        updates = self._works = []
        self._update_left(left)
        begin = self._works = []
        self._at = 0
        departing = [bucket for bucket in self._buckets.values() if bucket.is_departing]
        if departing:
            self._synchronize(self._d2h)
        for bucket in departing:
            self._touch(bucket.name, frees=(bucket.updated_by,))
        self._touch("", do=Do.NEW_STEP)
        return [*updates, *begin, *body] if from_updates else [*begin, *body, *updates]

    def _look_ahead(self, actions: Sequence[tuple[Verb, Target]]) -> frozenset[int]:
        """Note where each bucket is updated; return the indices of the offloads for which no action waits before the
        target comes back."""
        found: set[int] = set()
        leaving: dict[Target, int] = {}
        for at, (verb, target) in enumerate(actions):
            if isinstance(target, BucketRef):
                if verb is Verb.UPDATE:
                    self._buckets[target.bucket].place = at
            elif verb is Verb.OFFLOAD:
                leaving[target] = at
            elif verb is Verb.WAIT:
                leaving.pop(target, None)
            elif verb is Verb.PREFETCH and target in leaving:
                found.add(leaving.pop(target))
        return frozenset(found.union(leaving.values()))

    # Works.

    def _do(
        self,
        actor: Instant,
        do: Deed,
        name: str,
        after: tuple[Instant, ...] = (),
        over: Instant = NOWHERE,
        reads: Sequence[Access] = (),
        writes: Sequence[Access] = (),
        frees: Sequence[Access] = (),
    ) -> None:
        self._works.append(_new(Work, (actor, do, name, after, over, self._at, reads, writes, frees, False)))

    def _touch(
        self,
        name: str,
        reads: Sequence[Access] = (),
        writes: Sequence[Access] = (),
        frees: Sequence[Access] = (),
        *,
        over: Instant = NOWHERE,
        allocates: bool = False,
        do: Deed = Do.AT_ONCE,
    ) -> None:
        """Allocate, read, write or free memory in the order of compute."""
        if self._in_full:
            self._works.append(_new(Work, (COMPUTE, do, name, (), over, self._at, reads, writes, frees, allocates)))

    def _wait(self, actor: Instant, instant: Instant, do: Deed = Do.WAIT) -> None:
        """Let all further works of `actor` be behind `instant`."""
        self._works.append(_new(Work, (actor, do, "", (instant,), NOWHERE, self._at, (), (), (), False)))

    def _synchronize(self, instant: Instant) -> None:
        """Let the program go on behind `instant`: if it is a lane, when all work of that so far is over."""
        self._wait(PROGRAM, instant, Do.SYNCHRONIZE)

    def _await_update(self, bucket: BucketWorks) -> None:
        """Let the program wait until no update of the bucket is queued, and compute for its results on the device."""
        if bucket.may_wait:
            self._do(PROGRAM, Do.AWAIT, bucket.name, (bucket.done, bucket.returned))

    # The step.

    def _end_backward(self) -> None:
        self._synchronize(self._d2h)
        self._synchronize(self._h2d)
        for bucket in self._reducing:
            if bucket.is_summed and bucket.is_made and not bucket.is_updated:
                self._at = bucket.place
                self._add_to_sum(bucket)

    def _free_dropped(self) -> None:
        for name, memory in self._dropped:
            self._touch(name, frees=memory)
        self._dropped.clear()

    def _run(self, name: RegionId) -> None:
        region = self._regions.get(name, _NOTHING)
        for bucket in region.at_home:
            self._await_update(bucket)
        reads, writes, frees = list[Access](), list[Access](), list[Access]()
        if self._in_full:
            reads += [(Memory.HOME, bucket.name) for bucket in region.at_home]
            reads += [(Memory.COPY, bucket.name) for bucket in region.gathered]
            for bucket, is_written in region.gradients:
                bucket.is_made = True
                (writes if is_written else reads).append((Memory.GRADIENT, bucket.name))
            for group, is_written in region.wholes:
                (writes if is_written else reads).append((group.whole, group.name))
                if group.last_reader == name:
                    frees.append((group.whole, group.name))
        if region.leaving or region.arriving:
            self._run_laps(name, region, reads, writes)
        else:
            self._do(COMPUTE, Do.RUN, name, reads=reads, writes=writes)
        if frees:
            self._touch(name, frees=frees)

    def _run_laps(self, name: RegionId, region: RegionWorks, reads: Sequence[Access], writes: Sequence[Access]) -> None:
        """Run a region in micro-batches, beside slices that pass: two works, all slices but one at once.

        The last micro-batch waits for the last slice to arrive. Each slice leaves when its micro-batch is done, and the
        next micro-batch is done when it has left. What holds between two micro-batches holds between any two.
        """
        for lap, do in enumerate((Do.BEGIN_LAPS, Do.END_LAPS)):
            slices: list[Access] = []
            for group in region.arriving:
                if group.is_back:
                    if lap == 0:
                        self._touch(group.name, writes=(_slice(group, 1),), allocates=True)
                        arriving = self._h2d, Do.SLICES_ARRIVE, group.name, (COMPUTE, group.left), group.slices_back
                        self._do(*arriving, reads=(Memory.AWAY,), writes=(_slice(group, 1),))
                    self._wait(COMPUTE, group.slices_back if lap else group.back)
                    slices.append(_slice(group, lap))
            self._do(COMPUTE, do, name, reads=(*reads, *slices), writes=writes, frees=slices)
            for group in region.leaving:
                self._wait(COMPUTE, group.slices_left)
                self._touch(group.name, writes=(Memory.LEAVING_SLICE,))
                if lap == 0:
                    leaving = self._d2h, Do.SLICES_LEAVE, group.name, (COMPUTE,), group.slices_left
                    self._do(*leaving, reads=(Memory.LEAVING_SLICE,), writes=(Memory.AWAY,))

    # Activations.

    def _act_on_group(self, verb: Verb, group: GroupWorks, *, is_kept: bool) -> None:
        if verb is Verb.OFFLOAD:
            group.pending = group.left
            self._do(self._d2h, Do.OFFLOAD_GROUP, group.name, (COMPUTE,), group.left, group.leaving, (Memory.AWAY,))
            if not is_kept:
                self._dropped.append((group.name, group.leaving))
        elif verb is Verb.PREFETCH:
            group.pending, group.is_back = group.back, group.arrives_in_slices
            arriving: list[Access] = []
            if group.returns_whole:
                group.whole = Memory.BACK
                arriving.append(Memory.BACK)
            if group.arrives_in_slices:
                arriving.append(_slice(group, 0))
            self._touch(group.name, writes=arriving, allocates=True)
            self._do(self._h2d, Do.PREFETCH, group.name, (COMPUTE, group.left), group.back, (Memory.AWAY,), arriving)
        elif group.pending is not None:
            self._wait(COMPUTE, group.pending)
            if group.pending == group.left:
                self._touch(group.name, frees=group.leaving)
            group.pending = None

    # Parameters.

    def _act_on_bucket(self, verb: Verb, bucket: BucketWorks) -> None:
        if verb is Verb.WAIT:
            self._send(bucket)
            if bucket.is_queued and not bucket.is_sharded:
                self._do(COMPUTE, Do.WAIT_LATE, bucket.name, (bucket.gathered, bucket.done, bucket.returned))
            else:
                self._wait(COMPUTE, bucket.gathered)
            if bucket.is_sharded:  # the full parameters are copied out of the rows of the ranks
                self._touch(bucket.name, (Memory.COPY,), frees=(Memory.SENT,))
        elif verb is Verb.GATHER:
            if bucket.is_gathered:
                self._gather(bucket)
        elif verb is Verb.RELEASE:
            self._touch(bucket.name, frees=(Memory.COPY,), do=Do.RELEASE)
            self._close(verb, bucket)
        else:
            self._reduce(bucket)
            if not bucket.is_sharded:
                self._close(verb, bucket)

    def _gather(self, bucket: BucketWorks) -> None:
        """Start a gather. The thread of the updates issues the copy of a whole bucket behind its queued update. All
        ranks gather shards in one order, and so wait for the update. Those on disk are sent later, in that order."""
        name, is_read = bucket.name, bucket.placement.param is Tier.DISK
        if not bucket.is_sharded:
            self._touch(name, writes=(Memory.COPY,), allocates=True)
            if not bucket.is_queued:
                self._await_update(bucket)
            do, behind = (Do.LATE_GATHER, (bucket.done, COMPUTE)) if bucket.is_queued else (Do.GATHER, (COMPUTE,))
            do = Do.GATHER_FROM_DISK if is_read else do  # the thread that reads waits for the update
            self._do(self._h2d, do, name, behind, bucket.gathered, (Memory.HOME,), (Memory.COPY,))
            return
        self._await_update(bucket)
        if bucket.is_on_host:
            self._touch(name, writes=(Memory.SENT, Memory.COPY), allocates=True)
            do = Do.GATHER_FROM_DISK if is_read else Do.GATHER
            self._do(self._h2d, do, name, (COMPUTE,), bucket.home_read, (Memory.HOME,), (Memory.SENT,))
        else:
            self._touch(name, writes=(Memory.COPY,), allocates=True)
        self._unsent.append(bucket)
        if not is_read:
            self._send()

    def _send(self, last: BucketWorks | None = None) -> None:
        """Gather what is not sent, in order: until the bucket `last`, or all. Those on disk are read before."""
        while self._unsent and (last is None or last in self._unsent):
            bucket = self._unsent.pop(0)
            if bucket.placement.param is Tier.DISK:
                self._synchronize(bucket.home_read)
            after, own = (bucket.home_read, Memory.SENT) if bucket.is_on_host else (COMPUTE, Memory.HOME)
            self._do(self._collectives, Do.ALL_GATHER, bucket.name, (after,), bucket.gathered, (own,), (Memory.COPY,))

    # The gradient.

    def _reduce(self, bucket: BucketWorks) -> None:
        """Add up the gradients of the bucket; several ranks start a reduce-scatter of a sharded bucket."""
        name, own = bucket.name, bucket.own
        self._reducing.append(bucket)
        if bucket.is_sharded:
            self._touch(name, (Memory.GRADIENT,), (Memory.ROWS, own), (Memory.GRADIENT,))
        if bucket.is_sharded or self._is_reduced:
            self._send()
            reads, writes = ((Memory.ROWS,), (own,)) if bucket.is_sharded else ((), ())
            self._do(self._collectives, Do.REDUCE, name, (COMPUTE,), bucket.reduced, reads, writes)
        if self._is_averaged:
            self._do(self._averages, Do.AVERAGE, name, (COMPUTE, bucket.reduced), bucket.reduced)
        if not bucket.is_sharded:
            self._wait(COMPUTE, bucket.reduced)
            self._touch(name, (own,), (own,), do=Do.ADD_UP)

    def _act_on_gradient(self, verb: Verb, bucket: BucketWorks, *, is_kept: bool) -> None:
        if verb is Verb.OFFLOAD:
            after, own, in_home = (COMPUTE, bucket.reduced), (bucket.own,), (bucket.in_home,)
            self._do(self._d2h, Do.OFFLOAD, bucket.name, after, bucket.sent, own, in_home)
            bucket.is_away = True
            if not is_kept:
                self._dropped.append((bucket.name, bucket.leaving))
            self._close(verb, bucket)
            return
        if bucket.is_away:
            self._wait(COMPUTE, bucket.sent)
            if self._in_full:
                self._touch(bucket.name, frees=bucket.leaving)
        elif bucket.is_sharded:
            self._wait(COMPUTE, bucket.reduced)
            self._touch(bucket.name, frees=(Memory.ROWS,))
        if bucket.is_sharded:
            self._close(Verb.REDUCE, bucket)

    def _add_to_sum(self, bucket: BucketWorks) -> None:
        """Add the gradient to the sum of earlier backward passes, where it is: on the host or on the device."""
        reads, writes = (bucket.in_home, Memory.SUM), (Memory.SUM,)
        if bucket.is_on_host:
            self._do(PROGRAM, Do.ADD_ON_HOST, bucket.name, reads=reads, writes=writes)
        else:
            self._do(COMPUTE, Do.ADD, bucket.name, reads=reads, writes=writes, frees=(bucket.in_home,))

    def _close(self, verb: Verb, bucket: BucketWorks) -> None:
        """Update a bucket in the backward if its gradient is final behind an action with this verb."""
        is_open = bucket.closes is verb and bucket.is_made and not bucket.is_updated
        if not is_open or bucket.is_away is not bucket.is_on_host:
            return
        if bucket.is_summed:
            if verb is Verb.OFFLOAD:
                return  # the sum is made at the end of the backward, when the gradient has arrived
            if bucket.is_on_host:
                self._synchronize(self._d2h)
            self._add_to_sum(bucket)
        self._update((bucket,), (self._d2h,))

    # Updates.

    def _update_left(self, left: Sequence[BucketWorks]) -> None:
        """Do the updates that the backward left; in the backward, each bucket is updated by itself."""
        for buckets in [[bucket] for bucket in left] if self._update_mode is Update.IN_BACKWARD else [left]:
            self._update(buckets)
        if self._in_full:
            for bucket in self._buckets.values():
                if bucket.is_trained and bucket.is_updated and not bucket.is_on_host and not bucket.is_departing:
                    self._at = bucket.place
                    self._touch(bucket.name, frees=(bucket.updated_by,))

    def _update(self, buckets: Sequence[BucketWorks], arrived: tuple[Instant, ...] = ()) -> None:
        """Update `buckets` that are not updated yet, or queue their updates, in the order of `optimizer.step()`.

        `arrived` is when their gradients are in memory.
        """
        left = [bucket for bucket in buckets if not bucket.is_updated]
        for bucket in left:
            bucket.is_updated = True
            self._await_update(bucket)
            if bucket.is_landing:
                self._wait(PROGRAM, bucket.done)
        left = [bucket for bucket in left if bucket.is_trained]
        streamed = [bucket for bucket in left if bucket.placement.streamed]
        by_host = [bucket for bucket in left if bucket.by_host]
        for bucket in left:
            if not bucket.by_host and not bucket.placement.streamed:
                self._at = bucket.place
                updated = (bucket.updated_by,), (Memory.HOME, Memory.STATE)
                self._do(COMPUTE, Do.UPDATE, bucket.name, (), NOWHERE, *updated)
        # All copies to the host start before the program updates anything there.
        for bucket in by_host:
            if bucket.is_staged:
                self._stage(bucket)
        for bucket in by_host:
            self._at = bucket.place
            self._update_on_host(bucket, arrived)
        if streamed:
            self._stream(streamed, arrived)

    def _stage(self, bucket: BucketWorks) -> None:
        """Copy parameters and their gradient to the host."""
        self._at, name, staged = bucket.place, bucket.name, (Memory.STAGED,)
        self._do(self._d2h, Do.STAGE, name, (COMPUTE,), bucket.sent, (Memory.HOME,), staged)
        self._do(self._d2h, Do.STAGE_GRADIENT, name, (COMPUTE,), bucket.sent, (bucket.updated_by,), staged)

    def _update_on_host(self, bucket: BucketWorks, arrived: tuple[Instant, ...]) -> None:
        """Update in the memory of the host; what was copied there is copied back."""
        name, thread = bucket.name, self._updates if bucket.is_queued else PROGRAM
        do = Do.UPDATE_ON_DISK if bucket.placement.optim is Tier.DISK else Do.UPDATE_ON_HOST
        staged, updated = (Memory.STAGED,), ((bucket.updated_by,), (Memory.HOME, Memory.STATE))
        if not bucket.is_staged:
            self._do(thread, do, name, (*arrived, bucket.home_read), bucket.done, *updated)
            return
        self._do(thread, do, name, (bucket.sent,), bucket.done, staged, (Memory.STAGED, Memory.STATE))
        if bucket.is_queued:  # issued between any two works that the program issues on the lane
            self._do(self._h2d, Do.LATE_RETURN, name, (bucket.done,), bucket.returned, staged, (Memory.HOME,))
        else:
            self._do(self._h2d, Do.RETURN, name, (), bucket.returned, staged, (Memory.HOME,))
            self._do(PROGRAM, Do.AWAIT, name, (NEVER, bucket.returned))

    def _stream(self, buckets: Sequence[BucketWorks], arrived: tuple[Instant, ...]) -> None:
        """Pass the state of `buckets` through the device, and parameters and gradients too if their home is the host.

        A real update does so in pieces, which share no memory but the rooms.
        """
        self._at = buckets[0].place
        for bucket in buckets:
            self._touch(bucket.name, writes=(Memory.ROOM,), over=ROOMS, allocates=True)
        for instant in arrived:
            self._wait(self._h2d, instant)
        for bucket in buckets:
            self._at, name, room, state = bucket.place, bucket.name, (Memory.ROOM,), (Memory.STATE,)
            home = (Memory.HOME, *state) if bucket.is_on_host else state
            there, here = ((*home, bucket.updated_by), ()) if bucket.is_on_host else (home, (bucket.updated_by,))
            written = room if bucket.is_on_host else (Memory.HOME, *room)
            self._do(self._h2d, Do.STREAM_THERE, name, (ROOMS,), STREAMED, there, room)
            self._do(COMPUTE, Do.STREAM_UPDATE, name, (STREAMED,), NOWHERE, (*here, *room), written)
            self._do(self._d2h, Do.STREAM_BACK, name, (COMPUTE,), NOWHERE, room, home)
        self._wait(COMPUTE, self._d2h)
        self._at = buckets[-1].place
        for bucket in buckets:
            self._touch(bucket.name, frees=(Memory.ROOM,))
        if self._update_mode is Update.AFTER_BACKWARD:
            self._wait(PROGRAM, self._d2h)
        else:  # before each of them is used again, the results of all must be on the host
            for bucket in buckets:
                self._wait(bucket.done, self._d2h)


_NOTHING = RegionWorks()


def _slice(group: GroupWorks, number: int) -> Access:
    return (Memory.ARRIVING_SLICE, group.name, number)
