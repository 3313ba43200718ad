"""Check that a plan is legal for a graph: its parts, the order of its actions, and its claims of memory. If it is the
plan of another model, say in which the two differ.
"""

from collections.abc import Iterator, Mapping
from typing import NoReturn

from elixir_compile.base.errors import PlanMismatch
from elixir_compile.base.units import format_bytes
from elixir_compile.ir import (
    Action,
    Bucket,
    BucketRef,
    GradientRef,
    GroupRef,
    Kind,
    Phase,
    Placement,
    Plan,
    RegionId,
    RegionRef,
    Saving,
    StepGraph,
    Storage,
    StorageId,
    Target,
    Tier,
    Verb,
    fingerprint,
)
from elixir_compile.step import lifecycles
from elixir_compile.step.as_run import as_run, repeated_op
from elixir_compile.step.divide import laps_of
from elixir_compile.step.lane_order import Touch, check_order, region_touches
from elixir_compile.step.lean_moves import check_lean_moves
from elixir_compile.step.lifecycles import Event, Lifecycle, State
from elixir_compile.step.structure import (
    check_activations,
    check_buckets,
    check_claims,
    check_peak,
    check_ranks,
    check_regions,
    check_schedules,
    illegal_action,
)

# ----------------------------------------------------------------------------------------------------------------------
# Compare a plan with the graph of a model, and say in which the model of the plan differs.
#
# A plan has only the fingerprint of its graph, so the differences are told by the names and bytes that it has:
# parameters in buckets, groups of activations, and the first and last ops of regions.


_MOST_NAMES = 3


_ELSEWHERE = (
    "The plan was made for `{}` by that name, which can be done without the device, and kernels of another device, "
    "above all those of attention, keep other tensors: a plan that `elixir-compile plan` makes on this machine fits"
)


def require_same_graph(plan: Plan, graph: StepGraph, *, may_be_from_elsewhere: bool = False) -> None:
    """Raise PlanMismatch, with the first difference that the plan shows, if `plan` was made for another graph.

    `may_be_from_elsewhere` says whether the step of the plan may have been captured on another device.
    """
    here = fingerprint(graph)
    if plan.graph == here:
        return
    planned_bytes = sum(bucket.nbytes for bucket in plan.buckets)
    planned = _model_text(plan.name, [name for bucket in plan.buckets for name in bucket.params], planned_bytes)
    params = _params_of(graph)
    inputs_bytes = sum(storage.nbytes for storage in graph.storages if storage.kind is Kind.INPUT)
    present = _model_text(graph.name, list(params), sum(param.nbytes for param in params.values()))
    present += f", inputs with {format_bytes(inputs_bytes)}"
    difference = next(_differences(plan, graph))
    if may_be_from_elsewhere:
        difference += ". " + _ELSEWHERE.format(plan.cluster)
    raise PlanMismatch("graph", plan.graph, here, planned, present, difference)


def _model_text(name: str, params: list[StorageId], nbytes: int) -> str:
    return f"model {name}, {len(params)} parameters with {format_bytes(nbytes)}"


def _params_of(graph: StepGraph) -> Mapping[StorageId, Storage]:
    return {storage.id: storage for storage in graph.storages if storage.kind is Kind.PARAM}


def _differences(plan: Plan, graph: StepGraph) -> Iterator[str]:
    """Yield a sentence for each difference of `graph` from the graph of `plan`, of which only the first is used.

    The last sentence says what may differ without a trace in the plan.
    """
    has_backward = any(op.phase is Phase.BACKWARD for op in graph.ops)
    if has_backward is not any(region.phase is Phase.BACKWARD for region in plan.regions):
        both = ("no backward", "a backward")
        yield f"The step of the plan has {both[not has_backward]}, and this step has {both[has_backward]}"
    params = _params_of(graph)
    planned = {name for bucket in plan.buckets for name in bucket.params}
    yield from (f"The plan has no parameter {name}, which this model reads" for name in params if name not in planned)
    yield from (f"This model reads no parameter {name}, which the plan has" for name in sorted(planned - params.keys()))
    for bucket in plan.buckets:
        yield from _differences_of_bucket(bucket, graph, params)
    if dict(plan.symbols).keys() != dict(graph.symbols).keys():
        yield f"The plan has {_symbols_text(plan.symbols)}, and this graph has {_symbols_text(graph.symbols)}"
    yield from _differences_of_activations(plan, graph)
    known = {op.id for op in graph.ops}
    known |= {repeated_op(op) for op in known}
    lean = () if plan.lean is None else plan.lean.regions
    for region in (*plan.regions, *lean):
        for op in (region.first, region.last):
            if op not in known:
                yield f"This model has no op {op}, which the plan has"
    yield "The parameters and ops that the plan names are all here, so the shape of the batch or the code differs"


def _differences_of_bucket(bucket: Bucket, graph: StepGraph, params: Mapping[StorageId, Storage]) -> Iterator[str]:
    for name in bucket.params:
        if params[name].dtype != bucket.dtype:
            yield f"Parameter {name} was {bucket.dtype} and is {params[name].dtype} here"
    nbytes = sum(params[name].nbytes for name in bucket.params)
    if nbytes != bucket.nbytes:
        more = f" and {len(bucket.params) - _MOST_NAMES} more" if len(bucket.params) > _MOST_NAMES else ""
        names = ", ".join(bucket.params[:_MOST_NAMES]) + more
        if len(bucket.params) == 1:
            yield f"Parameter {names} had {format_bytes(bucket.nbytes)} and has {format_bytes(nbytes)} here"
        yield f"The parameters {names} had {format_bytes(bucket.nbytes)} and have {format_bytes(nbytes)} here"
    is_trained = not {storage.of for storage in graph.storages if storage.kind is Kind.GRAD}.isdisjoint(bucket.params)
    if is_trained is not bucket.trainable:
        words = ("frozen", "trained")
        yield f"Parameter {bucket.params[0]} was {words[bucket.trainable]} and is {words[is_trained]} here"


def _differences_of_activations(plan: Plan, graph: StepGraph) -> Iterator[str]:
    sizes = {storage.id: storage.nbytes for storage in graph.storages}
    lean = () if plan.lean is None else plan.lean.activations
    for group in (*plan.activations, *lean):
        missing = next((name for name in group.storages if name not in sizes), None)
        if missing is not None:
            yield f"This model has no activation {missing}, which the plan has in {group.id}"
            continue
        nbytes = sum(sizes[name] for name in group.storages)
        if nbytes != group.nbytes:
            yield (
                f"The activations {group.id} had {format_bytes(group.nbytes)} and have {format_bytes(nbytes)} here, "
                "so the shape or the dtype of the batch differs"
            )


def _symbols_text(symbols: tuple[tuple[str, int], ...]) -> str:
    return "the symbols " + ", ".join(f"{name} = {value}" for name, value in symbols) if symbols else "no symbols"


# ----------------------------------------------------------------------------------------------------------------------
# Check that a plan is legal for a graph: its parts, the order of its actions, and its claims of memory.
#
# `verify` walks through the actions of each rank in order. It moves the parameters and the gradient of each bucket, and
# each group of activations, through the tables in `lifecycles`. The first move without an entry in its table is the
# fault:
#
# IllegalSchedule: bwd.0 reads b1, which was released before.
# schedule rank 0
#   ...
#   run       fwd.1              @0
#   release   b1
#   run       bwd.0              @0  <-- here
#
# Then `lane_order` looks at the order in time: two accesses to the same memory that no wait orders are a fault of both.


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
