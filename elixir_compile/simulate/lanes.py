"""Track when each lane is free and when each transfer ends, while the actions of a step are simulated.

The thread that trains issues all actions, in no time, far ahead of the lanes. It waits for updates by the host, for all
copies at the end of the backward, and in `optimizer.step()`: what it issues then begins no earlier.

Each reader of a bucket waits for its update by the host: the copy of a gather, and the thread that trains only when a
region reads the copy; or when a region reads parameters on the device. The thread of the updates issues such copies,
and those of updated parameters back to the device, when the updates end. A link takes its copies in the order of issue:
a copy that waits for compute holds up those that are issued after it.
"""

import math
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from elixir_compile.ir.bucket import Placement
from elixir_compile.ir.kinds import BucketId, GroupId, InnerVerb, Lane, RegionId, Tier, Verb
from elixir_compile.ir.schedule import BucketRef, GradientRef, GroupRef, RegionRef, StateRef, Target, label
from elixir_compile.simulate.drawing import Drawing
from elixir_compile.simulate.prices import LapCopies, Prices

_ROUNDING_S = 1e-12

AT_ONCE_S = -math.inf
"""Before all work: what begins then begins when it is issued."""

Ref = Callable[[Any], Target | StateRef]
"""The class of a target, which makes it of the name of a region, bucket or group."""


class Arrival(NamedTuple):
    """Updated parameters of a bucket that are to be copied to the device from `since_s` on. Sorts by time."""

    since_s: float
    bucket: BucketId
    is_gathered: bool
    """True if the copy is part of a gather; False if it ends an update of parameters on the device."""
    allocated_s: float = 0.0
    """When compute has made room for the copy."""


@dataclass(slots=True, kw_only=True)
class Lanes:
    """The state of all lanes, in seconds since the step began.

    It has more than 20 methods: one for each action of a schedule, and for each way to update a bucket.
    """

    price: Prices
    drawing: Drawing | None = None
    """Takes the spans of all lanes; None if nobody needs them."""
    free_s: dict[Lane, float] = field(default_factory=lambda: dict.fromkeys(Lane, 0.0))
    """When each lane is free."""
    gathered_s: dict[BucketId, float] = field(default_factory=dict)
    """When each gather ends for which compute has not waited."""
    gradient_s: dict[BucketId, float] = field(default_factory=dict)
    """When the last transfer of each gradient ends, its reduce or its offload, for which compute has not waited."""
    group_s: dict[GroupId, float] = field(default_factory=dict)
    """When the last transfer of each group of activations ends for which compute has not waited."""
    issued_s: float = 0.0
    """When the thread that trains issues the next action."""
    updating_s: dict[BucketId, float] = field(default_factory=dict)
    """When the update of each bucket ends that the host runs beside the step."""
    returned_s: dict[BucketId, float] = field(default_factory=dict)
    """When updated parameters are back on the device for which compute has not waited."""
    arriving: list[Arrival] = field(default_factory=list)
    """Copies to the device that the thread of the updates has not issued, in the order of time."""
    memory_s: float = 0.0
    """Seconds of host memory, at its full rate, for all copies and updates of the step so far."""
    stalled_s: float = 0.0
    """Seconds in which compute waited for updates by the host."""

    def occupy(
        self,
        lane: Lane,
        verb: Verb | InnerVerb,
        of: Ref,
        name: str,
        after_s: float,
        seconds: float,
        *,
        in_update: bool = False,
        by_updates: bool = False,
        piece: int = 0,
    ) -> float:
        """Occupy `lane` for `seconds`, from `after_s` or later, and return the end.

        The work is `verb` on the target `name` of class `of`; it belongs to no graph if it is `in_update`. The thread
        that trains issues it, or that of the updates if it is issued `by_updates`.
        """
        resource = self.price.lane_of[lane]
        start_s = max(self.free_s[resource], after_s, AT_ONCE_S if by_updates else self.issued_s)
        end_s = start_s + seconds
        self.free_s[resource] = end_s
        if self.drawing is not None:
            self.drawing.add(lane, label(verb, of(name)), start_s, end_s, in_update=in_update, piece=piece)
        return end_s

    def mark(self, verb: Verb, bucket: BucketId) -> None:
        """Note an action of compute on `bucket` that takes no time."""
        if self.drawing is not None:
            at_s = self.free_s[Lane.COMPUTE]
            self.drawing.add(Lane.COMPUTE, label(verb, BucketRef(bucket)), at_s, at_s)

    def _draw_disk(self, bucket: BucketId, ends_s: float) -> None:
        """Draw the read and the write of the state of `bucket` beside its update, which ends at `ends_s`."""
        if self.drawing is not None:
            half_s = self.price.disk_s[bucket] / 2
            read, write = (label(verb, StateRef(bucket)) for verb in (InnerVerb.READ, InnerVerb.WRITE))
            self.drawing.add(Lane.DISK, read, ends_s - 2 * half_s, ends_s - half_s, in_update=True)
            self.drawing.add(Lane.DISK, write, ends_s - half_s, ends_s, in_update=True)

    def run(self, region: RegionId, seconds: float, copies: LapCopies | None) -> None:
        """Run a region of `seconds`, beside the `copies` of the lap that it is."""
        if copies is None:
            self.occupy(Lane.COMPUTE, Verb.RUN, RegionRef, region, 0.0, seconds)
        else:
            self._run_lap(region, seconds, copies)

    def gather(self, bucket: BucketId, placement: Placement) -> None:
        """Issue a gather: a copy from the host after the update, if the bucket is there, and an all-gather if it is
        sharded."""
        is_copied = placement.param is not Tier.DEVICE
        if is_copied and self.updating_s.get(bucket, AT_ONCE_S) > self.issued_s and self._may_be_late(bucket):
            allocated_s = self.free_s[Lane.COMPUTE]
            insort(self.arriving, Arrival(self.updating_s.pop(bucket), bucket, True, allocated_s))
            return
        if self.updating_s or self.arriving:
            self.await_update(bucket)
        ready_s = self.free_s[Lane.COMPUTE]
        if is_copied:
            self._copy(bucket)
            ready_s = self._to_device(Verb.GATHER, BucketRef, bucket, ready_s, self.price.h2d_s[bucket])
        if self.price.gather_s[bucket]:
            gather_s = self.price.gather_s[bucket]
            ready_s = self.occupy(Lane.GATHER, Verb.GATHER, BucketRef, bucket, ready_s, gather_s)
        self.gathered_s[bucket] = ready_s

    def reduce(self, bucket: BucketId) -> None:
        """Issue a reduce over the ranks of a copy, then an average over copies.

        Compute waits for both at once if the bucket is not sharded. A single rank has nothing to do.
        """
        price, ends_s = self.price, self.free_s[Lane.COMPUTE]
        if price.reduce_s[bucket]:
            ends_s = self.occupy(Lane.REDUCE, Verb.REDUCE, BucketRef, bucket, ends_s, price.reduce_s[bucket])
        if price.average_s.get(bucket):
            average_s = price.average_s[bucket]
            ends_s = self.occupy(Lane.REDUCE, InnerVerb.AVERAGE, BucketRef, bucket, ends_s, average_s)
        if price.gather_s[bucket]:
            self.gradient_s[bucket] = ends_s
        else:
            self._hold_compute(ends_s)
            self.mark(Verb.REDUCE, bucket)

    def delay(self, verb: Verb, bucket: BucketId, until_s: float) -> None:
        """Let the gather or the reduce of `bucket` that was issued last end at `until_s`, with those of other ranks."""
        lane = self.price.lane_of[Lane.GATHER if verb is Verb.GATHER else Lane.REDUCE]
        self.free_s[lane] = max(self.free_s[lane], until_s)
        if verb is Verb.GATHER:
            self.gathered_s[bucket] = until_s
        elif self.price.gather_s[bucket]:
            self.gradient_s[bucket] = until_s
        else:
            self._hold_compute(until_s)

    def offload_gradient(self, bucket: BucketId) -> None:
        """Issue the copy of a gradient to the host, after its reduce."""
        self.gradient_s[bucket] = self._to_host(GradientRef, bucket, self.gradient_s.get(bucket, 0.0))

    def offload_group(self, group: GroupId) -> None:
        """Issue the copy of activations to the host."""
        self.group_s[group] = self._to_host(GroupRef, group, self.group_s.get(group, 0.0))

    def add_gradient(self, bucket: BucketId, placement: Placement) -> None:
        """Add the gradients of a bucket to their sums at the end of the backward: compute does it on the device, the
        thread that trains on the host."""
        seconds = self.price.add_s.get((bucket, placement.param), 0.0)
        if placement.param is Tier.DEVICE:
            self.occupy(Lane.COMPUTE, InnerVerb.ADD, GradientRef, bucket, AT_ONCE_S, seconds)
        else:
            self.memory_s += self.price.memory.add_s.get(bucket, 0.0)
            self.issued_s = self.occupy(Lane.HOST, InnerVerb.ADD, GradientRef, bucket, AT_ONCE_S, seconds)

    def prefetch(self, group: GroupId) -> None:
        """Issue the copy of activations to the device, after their offload."""
        after_s = max(self.free_s[Lane.COMPUTE], self.group_s.get(group, 0.0))
        self._copy(group)
        self.group_s[group] = self._to_device(Verb.PREFETCH, GroupRef, group, after_s, self.price.h2d_s[group])

    def _run_lap(self, region: RegionId, seconds: float, copies: LapCopies) -> None:
        """Run a lap of `seconds` beside `copies`, the slices of activations that it reads and makes.

        Its last micro-batch waits for the last slice to arrive. The first slice leaves when the first micro-batch is
        done, and the last micro-batch is done when the slice before its own has left.
        """
        start_s = self.free_s[Lane.COMPUTE]
        part_s, until_s = seconds / copies.micro_batches, 0.0
        for group, copied_s in copies.arriving:
            ends_s = self._to_device(Verb.PREFETCH, GroupRef, group, start_s, copied_s, piece=1)
            until_s = max(until_s, ends_s + part_s)
        self.occupy(Lane.COMPUTE, Verb.RUN, RegionRef, region, 0.0, seconds)
        for group, copied_s in copies.leaving:
            ends_s = self.occupy(Lane.D2H, Verb.OFFLOAD, GroupRef, group, start_s + part_s, copied_s, piece=1)
            until_s = max(until_s, ends_s)
        self._hold_compute(until_s)

    def wait(self, target: Target) -> None:
        """Let compute wait for the transfer of `target`."""
        ready_s = 0.0
        if isinstance(target, BucketRef):
            if self.arriving:
                self._stall(self._land_up_to(target.bucket))
            ready_s = self.gathered_s.pop(target.bucket, 0.0)
        elif isinstance(target, GradientRef):
            ready_s = self.gradient_s.pop(target.bucket, 0.0)
        elif isinstance(target, GroupRef):
            ready_s = self.group_s.pop(target.group, 0.0)
        self._hold_compute(ready_s)

    # Updates.

    def update_on_device(self, bucket: BucketId) -> None:
        """Update a bucket with its state on the device."""
        self._update(Lane.COMPUTE, bucket, 0.0, self.price.device_update_s[bucket])

    def stream(self, bucket: BucketId, placement: Placement) -> None:
        """Update a bucket on the device with state from the host, and copy the state back.

        Parameters and gradients are copied too if they are on the host. The first piece leaves when it is updated, so
        the copies back take their lane beside those to the device. Compute waits for the last copy.
        """
        copies, update_s = self.price.streams[bucket, placement.param], self.price.device_update_s[bucket]
        self.memory_s += self.price.memory.stream_s.get((bucket, placement.param), 0.0)
        begin_s = self.free_s[Lane.COMPUTE]
        there_s = self.occupy(Lane.H2D, Verb.GATHER, StateRef, bucket, begin_s, copies.there_s, in_update=True)
        updated_s = self._update(Lane.COMPUTE, bucket, there_s, update_s)
        first_s = there_s - copies.there_s + copies.first_s + update_s / copies.num_pieces
        since_s = max(first_s, self.free_s[self.price.lane_of[Lane.D2H]])
        back_s = max(copies.back_s, updated_s + copies.last_s - since_s)
        self._hold_compute(self.occupy(Lane.D2H, Verb.OFFLOAD, StateRef, bucket, since_s, back_s, in_update=True))

    def update_on_host(self, bucket: BucketId, placement: Placement, after_s: float) -> None:
        """Update a bucket on the host from `after_s` on, after the copies of its parameters and of its gradient if
        parameters are on the device."""
        if self.is_staged(placement):
            for of, leave_s in ((BucketRef, self.price.leave_s[bucket]), (GradientRef, self.price.d2h_s[bucket])):
                self._copy(bucket)
                after_s = self.occupy(Lane.D2H, Verb.OFFLOAD, of, bucket, after_s, leave_s, in_update=True)
        update_s = self.price.off_device_update_s(bucket, placement.optim)
        self.memory_s += self.price.memory.update_s.get(bucket, 0.0)
        ends_s = self._update(Lane.HOST, bucket, after_s, update_s)
        if placement.optim is Tier.DISK:
            self._draw_disk(bucket, ends_s)
        if self.is_staged(placement):
            insort(self.arriving, Arrival(ends_s, bucket, False))
        else:
            self.updating_s[bucket] = ends_s

    def end_backward(self) -> None:
        """Let the thread that trains wait for all copies to the host, and for those to the device issued until then; it
        does not wait for compute."""
        self.leave()
        while self.arriving and self.arriving[0].since_s <= self.issued_s:
            self._land()
        self.issued_s = max(self.issued_s, self.free_s[self.price.lane_of[Lane.H2D]])

    def leave(self) -> None:
        """Let the thread that trains wait for all copies to the host."""
        self.issued_s = max(self.issued_s, self.free_s[self.price.lane_of[Lane.D2H]])

    def _update(self, lane: Lane, bucket: BucketId, after_s: float, seconds: float) -> float:
        return self.occupy(lane, Verb.UPDATE, BucketRef, bucket, after_s, seconds, in_update=True)

    def is_staged(self, placement: Placement) -> bool:
        """Return whether an update by the host copies the gradient to the host and the parameters back."""
        return placement.param is Tier.DEVICE and not self.price.is_one_memory

    def await_update(self, bucket: BucketId) -> None:
        """Let the thread that trains wait for the update of `bucket`, and compute for its way back to the device."""
        self._stall(self._land_up_to(bucket))
        self._stall(self.updating_s.pop(bucket, AT_ONCE_S))
        returned_s = self.returned_s.pop(bucket, AT_ONCE_S)
        self.stalled_s += max(0.0, returned_s - self.free_s[Lane.COMPUTE])
        self._hold_compute(returned_s)

    def await_all_updates(self) -> None:
        """Let compute wait for every update."""
        while self.arriving:
            self._land()
        for bucket in (*self.updating_s, *self.returned_s):
            self.await_update(bucket)

    def rounded(self) -> tuple[object, ...]:
        """Return the state at the start of a step, rounded for comparison."""

        def rounded(seconds: float) -> int:
            return round(seconds / _ROUNDING_S)

        return (
            rounded(self.issued_s),
            tuple(rounded(free_s) for free_s in self.free_s.values()),
            tuple((name, rounded(end_s)) for name, end_s in self.updating_s.items()),
            tuple((name, rounded(end_s)) for name, end_s in self.returned_s.items()),
            tuple((arrival.bucket, rounded(arrival.since_s)) for arrival in self.arriving),
        )

    @property
    def over_s(self) -> float:
        """When all that was issued is over."""
        return max(self.issued_s, *self.free_s.values())

    def begin_again(self, passed_s: float | None = None) -> float:
        """Start the next step after `passed_s`, or when it is issued and compute is free; return the seconds of the
        step that ends.

        The thread that trains may issue the next step before, by at most a step: nothing may ever let it wait.
        """
        passed_s = max(self.issued_s, self.free_s[Lane.COMPUTE]) if passed_s is None else passed_s
        self.memory_s = 0.0
        self.issued_s = max(self.issued_s - passed_s, -passed_s)
        self.free_s = {lane: max(free_s - passed_s, self.issued_s) for lane, free_s in self.free_s.items()}
        self.gathered_s.clear()
        self.gradient_s.clear()
        self.group_s.clear()
        since_s = passed_s + self.issued_s
        self.updating_s = {name: end_s - passed_s for name, end_s in self.updating_s.items() if end_s > since_s}
        self.returned_s = {name: end_s - passed_s for name, end_s in self.returned_s.items() if end_s > since_s}
        self.arriving = [
            each._replace(since_s=each.since_s - passed_s, allocated_s=each.allocated_s - passed_s)
            for each in self.arriving
        ]
        return passed_s

    def _copy(self, owner: BucketId | GroupId) -> None:
        """Count the host memory traffic of a copy."""
        self.memory_s += self.price.memory.copy_s.get(owner, 0.0)

    def _hold_compute(self, until_s: float) -> None:
        self.free_s[Lane.COMPUTE] = max(self.free_s[Lane.COMPUTE], until_s)

    def _stall(self, until_s: float) -> None:
        """Let the thread that trains, and so all that it issues from now on, wait for an update until `until_s`."""
        self.stalled_s += max(0.0, until_s - max(self.free_s[Lane.COMPUTE], self.issued_s))
        self.issued_s = max(self.issued_s, until_s)
        self._hold_compute(until_s)

    def _to_host(self, of: Ref, owner: BucketId | GroupId, after_s: float) -> float:
        self._copy(owner)
        after_s = max(self.free_s[Lane.COMPUTE], after_s)
        return self.occupy(Lane.D2H, Verb.OFFLOAD, of, owner, after_s, self.price.d2h_s[owner])

    def _to_device(self, verb: Verb, of: Ref, owner: str, after_s: float, seconds: float, piece: int = 0) -> float:
        while self.arriving and self.arriving[0].since_s <= self.issued_s:
            self._land()
        return self.occupy(Lane.H2D, verb, of, owner, after_s, seconds, piece=piece)

    def _land_up_to(self, bucket: BucketId) -> float:
        """Run the waiting copies up to that of `bucket`. Return the end of its update, or `AT_ONCE_S` if it has no
        waiting copy."""
        since_s = AT_ONCE_S
        while any(arrival.bucket == bucket for arrival in self.arriving):
            since_s = self._land()
        return since_s

    def _land(self) -> float:
        since_s, bucket, is_gathered, allocated_s = self.arriving.pop(0)
        self._copy(bucket)
        after_s, copied_s = max(since_s, allocated_s), self.price.h2d_s[bucket]
        ends_s = self.occupy(
            Lane.H2D, Verb.GATHER, BucketRef, bucket, after_s, copied_s, in_update=not is_gathered, by_updates=True
        )
        (self.gathered_s if is_gathered else self.returned_s)[bucket] = ends_s
        return since_s

    def _may_be_late(self, bucket: BucketId) -> bool:
        """Return whether a gather of a bucket in update can be issued without letting compute wait.

        It cannot if copies run on the compute lane, or if the bucket is sharded: all ranks gather in the same order.
        """
        return self.price.lane_of[Lane.H2D] is not Lane.COMPUTE and not self.price.gather_s[bucket]
