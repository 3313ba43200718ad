"""Check that a plan is legal for a graph: its parts, the order of its actions, and its claims of memory.

`verify` walks through the actions of each rank in order. It moves the parameters and the gradient of each bucket, and
each group of activations, through the tables in `lifecycles`. The first move without an entry in its table is the
fault:

```text
IllegalSchedule: bwd.0 reads b1, which was released before.
schedule rank 0
  ...
  run       fwd.1              @0
  release   b1
  run       bwd.0              @0  <-- here
```

Then `lane_order` looks at the order in time: two accesses to the same memory that no wait orders are a fault of both.
"""

from collections.abc import Mapping
from typing import NoReturn

from elixir_compile.ir import (
    Action,
    Bucket,
    BucketRef,
    GradientRef,
    GroupRef,
    Phase,
    Placement,
    Plan,
    RegionId,
    RegionRef,
    Saving,
    StepGraph,
    Target,
    Tier,
    Verb,
)
from elixir_compile.step import lifecycles
from elixir_compile.step.excerpt import illegal_action
from elixir_compile.step.lane_order import check_order
from elixir_compile.step.laps import laps_of
from elixir_compile.step.lean_moves import check_lean_moves
from elixir_compile.step.lifecycles import Event, Lifecycle, State
from elixir_compile.step.mismatch import require_same_graph
from elixir_compile.step.recompute import as_run
from elixir_compile.step.structure import (
    check_activations,
    check_buckets,
    check_claims,
    check_peak,
    check_ranks,
    check_regions,
    check_schedules,
)
from elixir_compile.step.touches import Touch, region_touches

_PARAM_EVENTS = {Verb.GATHER: Event.GATHER, Verb.RELEASE: Event.RELEASE}
_GRAD_EVENTS = {Verb.REDUCE: Event.REDUCE, Verb.UPDATE: Event.UPDATE}
_TRANSFER_EVENTS = {Verb.OFFLOAD: Event.OFFLOAD, Verb.PREFETCH: Event.PREFETCH, Verb.WAIT: Event.WAIT}
_ACTIVATION_LIVES = {
    Saving.KEEP: lifecycles.KEPT_ACTIVATIONS,
    Saving.RECOMPUTE: lifecycles.RECOMPUTED_ACTIVATIONS,
    Saving.OFFLOAD: lifecycles.OFFLOADED_ACTIVATIONS,
}


def verify(graph: StepGraph, plan: Plan) -> None:
    """Check that `plan` is legal for `graph`.

    Raises PlanMismatch if the plan is for another graph, and IllegalSchedule, which shows the wrong line, if it is not
    legal.
    """
    require_same_graph(plan, graph)
    check_ranks(plan)
    check_buckets(graph, plan)
    _verify_calls(graph, plan)
    if plan.lean is not None:
        _verify_calls(graph, plan.of_lean_calls())
        check_lean_moves(plan)
    check_peak(graph, plan)
    check_claims(plan)


def _verify_calls(graph: StepGraph, plan: Plan) -> None:
    """Check the activations, the regions and the schedules of calls that run alike."""
    check_activations(graph, plan)
    step = as_run(graph, plan.activations, laps_of(plan))
    check_regions(step, plan)
    touches = region_touches(step, plan)
    for rank_index in range(len(plan.schedules)):
        _Walk(step, plan, rank_index, touches).check()
    check_schedules(plan)
    check_order(plan, touches)


def _param_life(bucket: Bucket, placement: Placement) -> Lifecycle:
    if placement.param is Tier.DEVICE and not bucket.is_sharded:
        return lifecycles.DEVICE_PARAMS
    return lifecycles.RESIDENT_PARAMS if placement.resident else lifecycles.GATHERED_PARAMS


def _grad_life(bucket: Bucket, placement: Placement, is_written: bool, is_training: bool) -> Lifecycle:
    if not bucket.trainable or not is_training:
        return lifecycles.FROZEN_GRAD
    if not is_written:
        return lifecycles.ABSENT_GRAD
    if placement.param is not Tier.DEVICE:
        return lifecycles.HOST_GRAD
    return lifecycles.SHARDED_GRAD if bucket.is_sharded else lifecycles.DEVICE_GRAD


class _Life:
    """The current state of a bucket's parameters, its gradient, or a group of activations."""

    def __init__(self, target: Target, table: Lifecycle) -> None:
        self.target = target
        self.subject = target.bucket if isinstance(target, GradientRef) else str(target)
        """The name of the bucket or the group of activations."""
        self.table = table
        self.state = table.start
        self.moved_at = 0
        """Index of the action before the current state."""


class _Walk:
    """Applies the actions of a rank in order, and checks each."""

    def __init__(
        self, step: StepGraph, plan: Plan, rank_index: int, touches: Mapping[RegionId, tuple[Touch, ...]]
    ) -> None:
        self._plan = plan
        self._rank_index = rank_index
        self._actions = plan.schedules[rank_index].actions
        self._touches = touches
        self._regions = {region.id: region for region in plan.regions}
        self._num_run = 0
        self._last_forward_at = -1
        self._at = 0
        self._num_forward = sum(region.phase is Phase.FORWARD for region in plan.regions)
        complete = {touch.target for found in touches.values() for touch in found if touch.event is Event.COMPLETE}
        is_training = any(op.phase is Phase.UPDATE for op in step.ops)
        placed = list(zip(plan.buckets, plan.placements, strict=True))
        lives: list[tuple[Target, Lifecycle]] = [
            (BucketRef(b.id), _param_life(b, placement)) for b, placement in placed
        ]
        for bucket, placement in placed:
            gradient = GradientRef(bucket.id)
            lives.append((gradient, _grad_life(bucket, placement, gradient in complete, is_training)))
        lives += [(GroupRef(group.id), _ACTIVATION_LIVES[group.saving]) for group in plan.activations]
        self._lives = {target: _Life(target, table) for target, table in lives}

    def check(self) -> None:
        """Raise IllegalSchedule for the first illegal action, or for a state in which the step may not end."""
        for at, action in enumerate(self._actions):
            self._at = at
            self._act(action)
        if self._num_run < len(self._plan.regions):
            self._fail(f"{self._plan.regions[self._num_run].id} is never run.")
        for life in self._lives.values():
            if life.state in life.table.unfinished:
                self._at = life.moved_at
                self._fail(life.table.unfinished[life.state].format(bucket=life.subject, group=life.subject))

    def _act(self, action: Action) -> None:
        if action.micro_batch:
            batch = action.micro_batch
            self._fail(f"`{action.verb} {action.target}` is of micro-batch {batch}; a step has one micro-batch, @0.")
        verb, target = action.verb, action.target
        if verb is Verb.RUN:
            self._run(target)
        elif verb in _PARAM_EVENTS:
            self._move(self._lives[self._bucket(target)], _PARAM_EVENTS[verb])
        elif verb in _GRAD_EVENTS:
            gradient = GradientRef(self._bucket(target).bucket)
            self._check_turn(action)
            self._move(self._lives[gradient], _GRAD_EVENTS[verb])
        elif verb in _TRANSFER_EVENTS:
            self._move(self._transferred(action), _TRANSFER_EVENTS[verb])
            if isinstance(target, GroupRef):
                self._check_half(action)
        else:
            self._fail_as_unknown(verb)

    def _run(self, target: Target) -> None:
        region = self._regions.get(target.region) if isinstance(target, RegionRef) else None
        if region is None:
            self._fail(f"No region is called {target}.")
        expected = self._plan.regions[self._num_run].id if self._num_run < len(self._plan.regions) else None
        if region.id != expected:
            done = [earlier.id for earlier in self._plan.regions[: self._num_run]]
            is_repeated = region.id in done
            self._fail(
                f"{target} is run twice." if is_repeated else f"{target} is run out of order; expected {expected}."
            )
        self._check_residents(region.phase)
        self._num_run += 1
        for bucket in region.buckets:
            self._move(self._lives[BucketRef(bucket)], Event.RUN, region.id)
        for touch in self._touches[region.id]:
            self._move(self._lives[touch.target], touch.event, region.id)

    def _check_residents(self, phase: Phase) -> None:
        """Check that a copy gathered before the last forward region stays for the backward only if its bucket is
        resident."""
        if phase is Phase.FORWARD:
            self._last_forward_at = self._at
            return
        for life in self._lives.values():
            is_copied = life.table is lifecycles.GATHERED_PARAMS and life.state in (State.GATHERING, State.GATHERED)
            if is_copied and self._gathered_at(life) < self._last_forward_at:
                self._fail(f"{life.subject} is not resident, but its copy from the forward is kept for the backward.")

    def _gathered_at(self, life: _Life) -> int:
        gather = Action(verb=Verb.GATHER, target=life.target)
        return next(at for at in range(self._at, -1, -1) if self._actions[at] == gather)

    def _check_turn(self, action: Action) -> None:
        """Check that updates come after the last region."""
        if action.verb is Verb.UPDATE and self._num_run < len(self._plan.regions):
            self._fail(f"{action.target} is updated before {self._plan.regions[self._num_run].id} is run.")

    def _check_half(self, action: Action) -> None:
        """Check that activations are offloaded in the forward and prefetched in the backward."""
        regions = self._plan.regions
        if action.verb is Verb.OFFLOAD and self._num_run > self._num_forward:
            self._fail(f"{action.target} is offloaded in the backward, after {regions[self._num_run - 1].id}.")
        if action.verb is Verb.PREFETCH and self._num_run < self._num_forward:
            self._fail(f"{action.target} is prefetched in the forward, before {regions[self._num_run].id} is run.")

    def _bucket(self, target: Target) -> BucketRef:
        """Return `target`, which must be a bucket of the plan."""
        if not isinstance(target, BucketRef) or target not in self._lives:
            self._fail(f"No bucket is called {target}.")
        return target

    def _transferred(self, action: Action) -> _Life:
        """Return the state of the target of a wait, an offload or a prefetch. Only a wait may have a bucket, and only
        activations are prefetched."""
        verb, target = action.verb, action.target
        is_known = target in self._lives
        if verb is Verb.PREFETCH and not (is_known and isinstance(target, GroupRef)):
            self._fail_as_unknown(verb)
        if not is_known or (verb is Verb.OFFLOAD and isinstance(target, BucketRef)):
            self._fail(f"{target} is neither a bucket nor the gradient of one, nor a group of activations.")
        return self._lives[target]

    def _move(self, life: _Life, event: Event, region: str = "") -> None:
        target = life.table.moves.get((life.state, event))
        if target is None:
            sentence = life.table.fault(life.state, event)
            self._fail(sentence.format(bucket=life.subject, group=life.subject, region=region))
        if target is not life.state:
            life.moved_at = self._at
        life.state = target

    def _fail_as_unknown(self, verb: Verb) -> NoReturn:
        self._fail(f"`{verb}` is not part of a step on these placements.")

    def _fail(self, sentence: str) -> NoReturn:
        raise illegal_action(sentence, self._plan, self._rank_index, self._at)
