"""Whether a plan is legal for a graph: buckets and regions live as they must, and memory is what the plan claims.

`verify` walks the actions of each rank in order and moves the parameters and the gradient of each bucket through the
tables of `lives`. The first move that no table has is the fault:

```text
IllegalSchedule: bwd.0 reads b1, which was released before.
schedule rank 0
  ...
  run       fwd.1              @0
  release   b1
  run       bwd.0              @0  <-- here
```
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from elixir_compile.analysis import lives
from elixir_compile.analysis.excerpt import illegal_action
from elixir_compile.analysis.lives import Event, Lifecycle, State
from elixir_compile.analysis.structure import check_buckets, check_peak, check_ranks, check_regions
from elixir_compile.errors import PlanMismatch
from elixir_compile.ir import (
    Action,
    Bucket,
    BucketId,
    Phase,
    Placement,
    Plan,
    RegionId,
    StepGraph,
    Tier,
    Verb,
    fingerprint,
    grad_of,
)

_PARAM_EVENTS = {Verb.GATHER: Event.GATHER, Verb.RELEASE: Event.RELEASE}
_GRAD_EVENTS = {Verb.REDUCE: Event.REDUCE, Verb.UPDATE: Event.UPDATE}


def verify(graph: StepGraph, plan: Plan) -> None:
    """Check that `plan` is legal for `graph`.

    Raises PlanMismatch for a plan of another graph, else IllegalSchedule, which shows the line at fault.
    """
    here = fingerprint(graph)
    if plan.graph != here:
        raise PlanMismatch("graph", plan.graph, here)
    check_ranks(plan)
    check_buckets(graph, plan)
    check_regions(graph, plan)
    touches = _region_touches(graph, plan)
    for rank_index in range(len(plan.schedules)):
        _Walk(graph, plan, rank_index, touches).check()
    check_peak(graph, plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Touch:
    """What one region does to the gradients of buckets."""

    event: Event
    bucket: BucketId


def _region_touches(graph: StepGraph, plan: Plan) -> Mapping[RegionId, tuple[_Touch, ...]]:
    """Per region, the gradients that its ops touch and whether it writes them for the last time."""
    owners = {param: bucket.id for bucket in plan.buckets for param in bucket.params}
    grads = {
        storage.id: owners[storage.of] for storage in graph.storages if storage.of is not None and storage.of in owners
    }
    index = {op.id: number for number, op in enumerate(graph.ops)}
    touched: dict[RegionId, list[BucketId]] = {}
    last_writes: dict[BucketId, RegionId] = {}
    for region in plan.regions:
        ops = graph.ops[index[region.first] : index[region.last] + 1]
        names = [name for op in ops for name in (*op.reads, *op.writes) if name in grads]
        touched[region.id] = list(dict.fromkeys(grads[name] for name in names))
        last_writes |= {grads[name]: region.id for op in ops for name in op.writes if name in grads}
    return {
        region: tuple(
            _Touch(event=Event.COMPLETE if last_writes.get(bucket) == region else Event.RUN, bucket=bucket)
            for bucket in buckets
        )
        for region, buckets in touched.items()
    }


def _param_life(bucket: Bucket, placement: Placement) -> Lifecycle:
    if placement.param is Tier.DEVICE and not bucket.is_sharded:
        return lives.DEVICE_PARAMS
    return lives.RESIDENT_PARAMS if placement.resident else lives.GATHERED_PARAMS


def _grad_life(bucket: Bucket, placement: Placement, is_written: bool, is_training: bool) -> Lifecycle:
    if not bucket.trainable or not is_training:
        return lives.FROZEN_GRAD
    if not is_written:
        return lives.ABSENT_GRAD
    if placement.param is not Tier.DEVICE:
        return lives.HOST_GRAD
    return lives.SHARDED_GRAD if bucket.is_sharded else lives.DEVICE_GRAD


class _Life:
    """One life on its way through its table."""

    def __init__(self, bucket: BucketId, table: Lifecycle) -> None:
        self.bucket = bucket
        self.table = table
        self.state = table.start
        self.moved_at = 0
        """The action that brought it into its state."""


class _Walk:
    """The actions of one rank, applied one after another."""

    def __init__(
        self, graph: StepGraph, plan: Plan, rank_index: int, touches: Mapping[RegionId, tuple[_Touch, ...]]
    ) -> None:
        self._plan = plan
        self._rank_index = rank_index
        self._actions = plan.schedules[rank_index].actions
        self._touches = touches
        self._regions = {region.id: region for region in plan.regions}
        self._num_run = 0
        self._last_forward_at = -1
        self._at = 0
        complete = {touch.bucket for found in touches.values() for touch in found if touch.event is Event.COMPLETE}
        is_training = any(op.phase is Phase.UPDATE for op in graph.ops)
        self._params: dict[str, _Life] = {}
        self._grads: dict[str, _Life] = {}
        self._grad_owners = {grad_of(bucket.id): bucket.id for bucket in plan.buckets}
        for bucket, placement in zip(plan.buckets, plan.placements, strict=True):
            self._params[bucket.id] = _Life(bucket.id, _param_life(bucket, placement))
            table = _grad_life(bucket, placement, bucket.id in complete, is_training)
            self._grads[bucket.id] = _Life(bucket.id, table)

    def check(self) -> None:
        """Raise IllegalSchedule at the first action that is not legal, or at the first life that does not end."""
        for at, action in enumerate(self._actions):
            self._at = at
            self._act(action)
        if self._num_run < len(self._plan.regions):
            self._fail(f"{self._plan.regions[self._num_run].id} is never run.")
        for life in (*self._params.values(), *self._grads.values()):
            if life.state in life.table.unfinished:
                self._at = life.moved_at
                self._fail(life.table.unfinished[life.state].format(bucket=life.bucket))

    def _act(self, action: Action) -> None:
        if action.verb is Verb.RUN:
            self._run(action.what)
        elif action.verb in _PARAM_EVENTS:
            self._move(self._named(self._params, action.what), _PARAM_EVENTS[action.verb])
        elif action.verb in _GRAD_EVENTS:
            life = self._named(self._grads, action.what)
            self._check_turn(action)
            self._move(life, _GRAD_EVENTS[action.verb])
        elif action.verb is Verb.WAIT and action.what in self._params:
            self._move(self._params[action.what], Event.WAIT)
        elif action.verb in (Verb.WAIT, Verb.OFFLOAD):
            life = self._gradient(action)
            self._check_turn(action)
            self._move(life, Event.WAIT if action.verb is Verb.WAIT else Event.OFFLOAD)
        else:
            self._fail(f"`{action.verb}` is not part of a step on these placements.")

    def _run(self, what: str) -> None:
        region = self._regions.get(RegionId(what))
        if region is None:
            self._fail(f"No region is called {what}.")
        expected = self._plan.regions[self._num_run].id if self._num_run < len(self._plan.regions) else None
        if region.id != expected:
            done = [earlier.id for earlier in self._plan.regions[: self._num_run]]
            is_repeated = region.id in done
            self._fail(f"{what} is run twice." if is_repeated else f"{what} is run out of order; expected {expected}.")
        self._check_residents(region.phase)
        self._num_run += 1
        for bucket in region.buckets:
            self._move(self._params[bucket], Event.RUN, region.id)
        for touch in self._touches[region.id]:
            self._move(self._grads[touch.bucket], touch.event, region.id)

    def _check_residents(self, phase: Phase) -> None:
        """A copy gathered before the last forward run stays for the backward only if its bucket is resident."""
        if phase is Phase.FORWARD:
            self._last_forward_at = self._at
            return
        for life in self._params.values():
            is_copied = life.table is lives.GATHERED_PARAMS and life.state in (State.GATHERING, State.GATHERED)
            if is_copied and self._gathered_at(life) < self._last_forward_at:
                self._fail(f"{life.bucket} is not resident, but its copy from the forward is kept for the backward.")

    def _gathered_at(self, life: _Life) -> int:
        gathers = (
            at for at in range(self._at, -1, -1) if self._actions[at] == Action(verb=Verb.GATHER, what=life.bucket)
        )
        return next(gathers)

    def _check_turn(self, action: Action) -> None:
        """Updates come after the last run."""
        if action.verb is Verb.UPDATE and self._num_run < len(self._plan.regions):
            self._fail(f"{action.what} is updated before {self._plan.regions[self._num_run].id} is run.")

    def _named(self, found: Mapping[str, _Life], what: str) -> _Life:
        if what not in found:
            self._fail(f"No bucket is called {what}.")
        return found[what]

    def _gradient(self, action: Action) -> _Life:
        owner = self._grad_owners.get(action.what)
        if owner is None:
            self._fail(f"{action.what} is neither a bucket nor the gradient of one.")
        return self._grads[owner]

    def _move(self, life: _Life, event: Event, region: str = "") -> None:
        target = life.table.moves.get((life.state, event))
        if target is None:
            self._fail(life.table.fault(life.state, event).format(bucket=life.bucket, region=region))
        if target is not life.state:
            life.moved_at = self._at
        life.state = target

    def _fail(self, sentence: str) -> NoReturn:
        raise illegal_action(sentence, self._plan, self._rank_index, self._at)
