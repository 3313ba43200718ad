"""Turn the schedule of a plan into the works of its lanes and threads, in two consecutive steps.

The second step shows what the first leaves under way: updates beside the next forward, and memory that is used again.
The program waits for lanes where the runtime does:

```text
  begin of a forward     d2h, if an update on the thread of the updates reads gradients of the device
  end of a forward       h2d
  end of a backward      d2h and h2d; then gradients are added to their sums, if there are any
  updates                behind the backward: on the device, by the host, streamed; or where a bucket closes
```

What an offload reads is free at the next action if nothing waits for the
offload: only the wait keeps it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from elixir_compile.analysis.lane_buckets import BucketLanes
from elixir_compile.analysis.lane_groups import GroupLanes, groups_of
from elixir_compile.analysis.lane_updates import update
from elixir_compile.analysis.lane_works import Cell, Place, Works
from elixir_compile.analysis.touches import Touch
from elixir_compile.analysis.windows import closing_verbs
from elixir_compile.ir import (
    Action,
    BucketId,
    BucketRef,
    GradientRef,
    GroupRef,
    Phase,
    Plan,
    Region,
    RegionId,
    RegionRef,
    Target,
    Update,
    Verb,
)

NUM_STEPS = 2
"""The steps that are checked: one without queued updates, as the first of a run, and one behind queued updates."""
_NUM_LAPS = 2
"""The micro-batches of a region that are looked at: what holds between the first two holds between any two."""
_Call = Callable[[], object]


def issue_steps(
    works: Works,
    plan: Plan,
    touches: Mapping[RegionId, Sequence[Touch]],
    rank_index: int = 0,
    num_steps: int = NUM_STEPS,
) -> None:
    """Issue the works of `num_steps` consecutive steps of schedule number `rank_index` on `works`.

    `touches` are the gradients and the offloaded activations that the regions touch. No update is queued when the first
    step begins.
    """
    walk = _Walk(works, plan, touches, plan.schedules[rank_index].actions)
    calls = walk.calls(plan, touches)  # not an attribute, because they refer to `walk`
    for step in range(num_steps):
        walk.run_step(step, calls)


class _Walk:
    """Issues the works of the actions of a schedule."""

    def __init__(
        self, works: Works, plan: Plan, touches: Mapping[RegionId, Sequence[Touch]], actions: Sequence[Action]
    ) -> None:
        self.works = works
        self._is_in_backward = plan.update is Update.IN_BACKWARD
        closing = closing_verbs(plan) if self._is_in_backward else {}
        self._buckets = {
            bucket.id: BucketLanes(works, bucket, home, plan.update, closing.get(bucket.id))
            for bucket, home in zip(plan.buckets, plan.placements, strict=True)
        }
        self._groups = groups_of(works, plan, touches)
        self._updates = {action.target: at for at, action in enumerate(actions) if action.verb is Verb.UPDATE}
        self._dropped: list[BucketLanes | GroupLanes] = []
        """The targets of offloads without a wait, until the next action."""
        for target, at in self._updates.items():
            self._bucket(target).place = at
        self._actions = actions
        self._regions = {region.id: region for region in plan.regions}
        self._has_backward = any(region.phase is Phase.BACKWARD for region in plan.regions)
        self._forward_end = forward_end(self._regions, actions)

    def calls(self, plan: Plan, touches: Mapping[RegionId, Sequence[Touch]]) -> Sequence[_Call]:
        """Return for each action the function that issues its works, without the updates at the end."""
        unwaited = _unwaited(self._actions)
        last = _last(self._actions, lambda action: action.verb is not Verb.UPDATE)
        runs = {
            region.id: _Run(self.works, region, self._buckets, self._groups, touches[region.id]).issue
            for region in plan.regions
        }
        return [
            runs[action.target.region]
            if isinstance(action.target, RegionRef)
            else self._call(action.verb, action.target, is_kept=at not in unwaited)
            for at, action in enumerate(self._actions[: last + 1])
        ]

    # The step.

    def run_step(self, step: int, calls: Sequence[_Call]) -> None:
        """Issue the works of one step; `calls` issue those of each action."""
        self._begin(step)
        works = self.works
        for at, call in enumerate(calls):
            works.place = Place(at, step)
            if self._dropped:
                self._free_dropped()
            call()
            if at == self._forward_end:
                works.synchronize(works.h2d)
                self._begin_half()
        if self._dropped:
            works.place = Place(min(len(calls), len(self._actions) - 1), step)
            self._free_dropped()
        if self._has_backward:
            self._end_backward()
        self._update_left()

    def _begin(self, step: int) -> None:
        works = self.works
        works.place = Place(0, step)
        if any(bucket.is_departing for bucket in self._buckets.values()):
            works.synchronize(works.d2h)
        for bucket in self._buckets.values():
            bucket.begin_step()
        for group in self._groups.values():
            group.begin_step()
        self._begin_half()

    def _begin_half(self) -> None:
        for bucket in self._buckets.values():
            bucket.is_read = False

    def _end_backward(self) -> None:
        works = self.works
        works.synchronize(works.d2h)
        works.synchronize(works.h2d)
        for target, at in self._updates.items():
            bucket = self._bucket(target)
            if bucket.is_summed and bucket.is_made and not bucket.is_updated:
                with works.at(at):
                    bucket.add_to_sum()

    def _update_left(self) -> None:
        """Do the updates that the backward left; in the backward, each bucket is updated by itself."""
        left = [self._bucket(target) for target in self._updates]
        for buckets in [[bucket] for bucket in left] if self._is_in_backward else [left]:
            update(self.works, buckets)
        for bucket in left:
            with self.works.at(bucket.place):
                bucket.drop_gradient()

    # The actions.

    def _call(self, verb: Verb, target: BucketRef | GradientRef | GroupRef, *, is_kept: bool) -> _Call:
        """Return the function that issues the works of `verb` on `target`.

        `is_kept` is whether an action waits for it, if it is an offload.
        """
        if isinstance(target, GroupRef):
            group = self._groups[target]
            if verb is Verb.OFFLOAD:
                return group.offload if is_kept else partial(self._offload_unkept, group)
            return group.wait if verb is Verb.WAIT else group.prefetch
        bucket = self._buckets[target.bucket]
        call, closes = self._call_for_bucket(bucket, verb, target, is_kept=is_kept)
        if bucket.closes is None or bucket.closes is not closes:
            return call
        return partial(self._act_and_close, call, bucket)

    def _call_for_bucket(
        self, bucket: BucketLanes, verb: Verb, target: BucketRef | GradientRef, *, is_kept: bool
    ) -> tuple[_Call, Verb | None]:
        """Return the function that issues the works of an action, and the verb of `RunningBucket.closes` for which the
        runtime would update `bucket` behind the action."""
        if isinstance(target, GradientRef):
            if verb is Verb.OFFLOAD:
                return bucket.offload if is_kept else partial(self._offload_unkept, bucket), verb
            return bucket.wait_for_gradient, Verb.REDUCE if bucket.is_sharded else None
        if verb is Verb.WAIT:
            return bucket.wait, None
        if verb is Verb.GATHER:
            return bucket.gather, None
        if verb is Verb.RELEASE:
            return bucket.release, verb
        if verb is Verb.REDUCE:
            return bucket.reduce, None if bucket.is_sharded else verb
        return partial(update, self.works, (bucket,)), None

    def _offload_unkept(self, offloaded: BucketLanes | GroupLanes) -> None:
        offloaded.offload()
        self._dropped.append(offloaded)

    def _act_and_close(self, call: _Call, bucket: BucketLanes) -> None:
        """Issue an action, and update `bucket` in the backward if its gradient is final behind it."""
        call()
        if not bucket.is_made or bucket.is_updated or bucket.is_away is not bucket.is_on_host:
            return
        if bucket.is_summed:
            if bucket.closes is Verb.OFFLOAD:
                return  # the sum is made at the end of the backward, when the gradient has arrived
            if bucket.is_on_host:
                self.works.synchronize(self.works.d2h)
            bucket.add_to_sum()
        if bucket.target in self._updates:
            update(self.works, (bucket,), self.works.d2h.over)

    def _free_dropped(self) -> None:
        for offloaded in self._dropped:
            offloaded.free_offloaded()
        self._dropped.clear()

    def _bucket(self, target: Target) -> BucketLanes:
        assert isinstance(target, BucketRef | GradientRef), "only regions and groups are no buckets"
        return self._buckets[target.bucket]


class _Run:
    """The works of a region: of each of its micro-batches, up to `_NUM_LAPS` of them."""

    def __init__(
        self,
        works: Works,
        region: Region,
        buckets: Mapping[BucketId, BucketLanes],
        groups: Mapping[GroupRef, GroupLanes],
        touches: Sequence[Touch],
    ) -> None:
        """`touches` are the gradients and the offloaded activations that the region touches."""
        self._works = works
        self._num_laps = min(region.micro_batches, _NUM_LAPS)
        own = [buckets[name] for name in region.buckets]
        self._gathered = [bucket for bucket in own if bucket.is_gathered]
        self._at_home = [bucket for bucket in own if not bucket.is_gathered]
        self._homes = tuple(bucket.home for bucket in self._at_home)
        self._gradients = [
            (buckets[touch.target.bucket], touch.is_written)
            for touch in touches
            if isinstance(touch.target, GradientRef)
        ]
        for bucket, _ in self._gradients:
            bucket.is_trained = True
        touched = [(touch, groups[touch.target]) for touch in touches if isinstance(touch.target, GroupRef)]
        self._wholes = [(group, touch.is_written) for touch, group in touched if touch.is_whole]
        self._leaving = [group for touch, group in touched if touch.leaves]
        self._arriving = [group for touch, group in touched if touch.arrives]
        self._last_read = [group for group, _ in self._wholes if group.last_reader == region.id]

    def issue(self) -> None:
        """Issue the works of the region."""
        works = self._works
        for bucket in self._at_home:
            bucket.read_home()
        reads = [*self._homes, *(bucket.copy for bucket in self._gathered if bucket.copy is not None)]
        writes: list[Cell] = []
        for bucket, is_written in self._gradients:
            bucket.is_made = True
            (writes if is_written else reads).append(bucket.gradient)
        for group, is_written in self._wholes:
            (writes if is_written else reads).append(group.whole)
        for lap in range(self._num_laps):
            slices = [cell for group in self._arriving for cell in group.begin_lap(lap, self._num_laps)]
            works.issue(works.compute, (*reads, *slices), writes, slices)
            for group in self._leaving:
                group.send_slice()
        if self._last_read:
            works.issue(works.compute, frees=[group.whole for group in self._last_read])


def _last(actions: Sequence[Action], holds: Callable[[Action], bool]) -> int:
    """Return the index of the last action for which `holds`; -1 if there is none."""
    return next((at for at in range(len(actions) - 1, -1, -1) if holds(actions[at])), -1)


def forward_end(regions: Mapping[RegionId, Region], actions: Sequence[Action]) -> int:
    """Return the index of the last action of the program of the forward; -1 if no region of the forward runs."""

    def is_run(action: Action) -> bool:
        return isinstance(action.target, RegionRef) and regions[action.target.region].phase is Phase.FORWARD

    at = _last(actions, is_run)
    while 0 <= at < len(actions) - 1 and _may_end_forward(actions[at + 1]):
        at += 1
    return at


def _may_end_forward(action: Action) -> bool:
    is_leaving = action.verb in (Verb.OFFLOAD, Verb.WAIT) and isinstance(action.target, GroupRef)
    return is_leaving or action.verb is Verb.RELEASE


def _unwaited(actions: Sequence[Action]) -> frozenset[int]:
    """Return the indices of the offloads for which no action waits before the target comes back."""
    found: set[int] = set()
    leaving: dict[Target, int] = {}
    for at, action in enumerate(actions):
        if isinstance(action.target, BucketRef):
            continue
        if action.verb is Verb.OFFLOAD:
            leaving[action.target] = at
        elif action.verb is Verb.WAIT:
            leaving.pop(action.target, None)
        elif action.verb is Verb.PREFETCH and action.target in leaving:
            found.add(leaving.pop(action.target))
    return frozenset(found.union(leaving.values()))
