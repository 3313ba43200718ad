"""Check that a plan is legal for a graph: its parts, the moves and the order of its actions, and its claims of memory.
If it is the plan of another model, say in which the two differ; at other sizes of its graph, count its bytes anew.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from elixir_compile.base.errors import PlanMismatch
from elixir_compile.base.units import format_bytes
from elixir_compile.ir import (
    Action,
    Activations,
    Bucket,
    BucketRef,
    GradientRef,
    GroupRef,
    Kind,
    Phase,
    Plan,
    Region,
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
    kernels_digest,
)
from elixir_compile.step.as_run import as_run, repeated_op
from elixir_compile.step.divide import laps_of
from elixir_compile.step.lane_order import Touch, check_order, region_touches
from elixir_compile.step.structure import (
    check_activations,
    check_buckets,
    check_claims,
    check_lean_moves,
    check_peak,
    check_ranks,
    check_regions,
    check_schedules,
    illegal_action,
)
from elixir_compile.step.timeline import peak_formula, with_peaks

# ----------------------------------------------------------------------------------------------------------------------
# Check what the actions of a schedule say, one after another: each may only come in some states of what it acts on.
#
#   parameters   sharded --gather--> gathering --wait--> gathered --release--> released --gather--> gathering ...
#   gradient     empty --run--> filling --run--> full --reduce--> reduced --update--> updated   parameters on the device
#                ... full --reduce--> reducing --wait--> reduced --update--> updated            the same, in shards
#                ... reduced --offload--> leaving --wait--> on host --update--> updated         parameters on the host
#   activations  empty --run--> filling --run--> full --offload--> leaving --wait--> on host    offloaded
#                ... on host --prefetch--> arriving --wait--> on device --run--> on device
#
# The first action that has no move is the fault, with its own sentence and its line of the schedule:
#
#     IllegalSchedule: bwd.0 reads b1, which was released before.
#     schedule rank 0
#       ...
#       run       fwd.1              @0
#       release   b1
#       run       bwd.0              @0  <-- here
#
# These states are kept beside the works of a schedule (see `works`), whose accesses `lane_order` checks. An access
# without a write before it is a schedule that does too little. A schedule that does too much, as to wait twice, to
# gather what is there, or to end without a release, has no such access; regions that still write a gradient behind its
# reduce have none if it is not sharded; and `update` has no work in its place if the backward updates. Of 80 kinds of
# faults, made by moving, doubling or leaving out one action of good schedules in 14,000 ways, the order of accesses
# alone refuses 34 each time, and 13 of them at the action that is wrong.


_ANY = "any other state"
GATHER, WAIT, RUN, RELEASE = Verb.GATHER, Verb.WAIT, Verb.RUN, Verb.RELEASE
REDUCE, OFFLOAD, PREFETCH, UPDATE = Verb.REDUCE, Verb.OFFLOAD, Verb.PREFETCH, Verb.UPDATE


@dataclass(frozen=True, slots=True)
class Rules:
    """The legal states and moves of a bucket's parameters, of its gradient, or of a group of activations."""

    start: str
    moves: Mapping[Verb, Mapping[str, str]]
    """By verb, the state behind it for each state in which it is legal. `run` is a region that touches it."""
    faults: Mapping[Verb, Mapping[str, str]]
    """By verb, a sentence for each state in which it is illegal. Its fields: the name of the `{bucket}` or `{group}`,
    and the running `{region}`."""
    ends: Mapping[str, str] = field(default_factory=dict)
    """Sentences for the states in which the step may not end."""

    def fault(self, state: str, verb: Verb) -> str:
        """Return the sentence for a verb without a move."""
        found = self.faults[verb]
        return found[state] if state in found else found[_ANY]


def _never(sentence: str, *verbs: Verb) -> dict[Verb, dict[str, str]]:
    """Return `sentence` as the fault of `verbs` in any state."""
    return {verb: {_ANY: sentence} for verb in verbs}


_GATHERED_MOVES = {
    GATHER: {"sharded": "gathering"},
    WAIT: {"gathering": "gathered"},
    RUN: {"gathered": "gathered"},
    RELEASE: {"gathered": "released"},
}
_GATHERED_FAULTS = {
    GATHER: {
        "released": "{bucket} is resident, but gathered a second time.",
        _ANY: "{bucket} is gathered twice without a release in between.",
    },
    WAIT: {
        "gathered": "{bucket} is waited for twice.",
        _ANY: "{bucket} is waited for, but no gather of it is under way.",
    },
    RUN: {
        "sharded": "{region} reads {bucket}, which was not gathered.",
        "gathering": "{region} reads {bucket} before its gather was waited for.",
        "released": "{region} reads {bucket}, which was released before.",
    },
    RELEASE: {
        "sharded": "{bucket} is released, but was not gathered.",
        "gathering": "{bucket} is released before its gather was waited for.",
        "released": "{bucket} is released twice.",
    },
}
_GATHERED_ENDS = {
    "gathering": "The gather of {bucket} is never waited for.",
    "gathered": "{bucket} is gathered and never released.",
}
_RESIDENT_PARAMS = Rules("sharded", _GATHERED_MOVES, _GATHERED_FAULTS, _GATHERED_ENDS)
_GATHERED_PARAMS = Rules(
    "sharded",
    {**_GATHERED_MOVES, GATHER: {"sharded": "gathering", "released": "gathering"}},
    _GATHERED_FAULTS,
    _GATHERED_ENDS,
)
_DEVICE_PARAMS = Rules(
    "on device",
    {RUN: {"on device": "on device"}},
    {
        **_never("{bucket} is gathered, but its parameters live on the device.", GATHER),
        **_never("{bucket} is waited for, but its parameters live on the device.", WAIT),
        **_never("{bucket} is released, but its parameters live on the device.", RELEASE),
    },
)

_EARLY = ("empty", "filling", "full")
"""The states of a gradient, or of saved activations, while regions write it; `full` when the last of them has run."""
_FILL = {"empty": "filling", "filling": "filling"}
_GRADIENT_FAULTS = {
    **_never("{region} touches the gradient of {bucket} after it was reduced.", RUN),
    REDUCE: {
        "empty": "The gradient of {bucket} is reduced before it is complete.",
        "filling": "The gradient of {bucket} is reduced before it is complete.",
        _ANY: "The gradient of {bucket} is reduced twice.",
    },
    **_never("The gradient of {bucket} is offloaded, but it stays on the device with its parameters.", OFFLOAD),
    WAIT: {
        "updated": "The gradient of {bucket} is waited for twice.",
        _ANY: "The gradient of {bucket} is waited for, but no offload of it is under way.",
    },
    UPDATE: {
        **dict.fromkeys(_EARLY, "{bucket} is updated before its gradient is reduced."),
        "reducing": "{bucket} is updated before the reduce of its gradient was waited for.",
        "reduced": "{bucket} is updated before its gradient was offloaded.",
        "leaving": "{bucket} is updated before the offload of its gradient was waited for.",
        "updated": "{bucket} is updated twice.",
    },
}
_GRADIENT_ENDS = {
    **dict.fromkeys(_EARLY, "The gradient of {bucket} is never reduced."),
    "reduced": "{bucket} is never updated.",
}
_GRADIENT_RUNS = {**_FILL, "full": "full"}
_DEVICE_GRADIENT = Rules(
    "empty",
    {RUN: _GRADIENT_RUNS, REDUCE: {"full": "reduced"}, UPDATE: {"reduced": "updated"}},
    _GRADIENT_FAULTS,
    _GRADIENT_ENDS,
)
_SHARDED_GRADIENT = Rules(
    "empty",
    {
        RUN: _GRADIENT_RUNS,
        REDUCE: {"full": "reducing"},
        WAIT: {"reducing": "reduced"},
        UPDATE: {"reduced": "updated"},
    },
    {
        **_GRADIENT_FAULTS,
        WAIT: {
            **dict.fromkeys(("reduced", "updated"), "The gradient of {bucket} is waited for twice."),
            _ANY: "The gradient of {bucket} is waited for, but no reduce of it is under way.",
        },
    },
    {**_GRADIENT_ENDS, "reducing": "The reduce of the gradient of {bucket} is never waited for."},
)
_HOST_GRADIENT = Rules(
    "empty",
    {
        RUN: _GRADIENT_RUNS,
        REDUCE: {"full": "reduced"},
        OFFLOAD: {"reduced": "leaving"},
        WAIT: {"leaving": "on host"},
        UPDATE: {"on host": "updated"},
    },
    {
        **_GRADIENT_FAULTS,
        OFFLOAD: {
            **dict.fromkeys(_EARLY, "The gradient of {bucket} is offloaded before it is reduced."),
            _ANY: "The gradient of {bucket} is offloaded twice.",
        },
        WAIT: {**_GRADIENT_FAULTS[WAIT], "on host": "The gradient of {bucket} is waited for twice."},
    },
    {
        **_GRADIENT_ENDS,
        "reduced": "The gradient of {bucket} is never offloaded.",
        "leaving": "The offload of the gradient of {bucket} is never waited for.",
        "on host": "{bucket} is never updated.",
    },
)
_ABSENT_GRADIENT = Rules(
    "absent",
    {RUN: {"absent": "absent"}, UPDATE: {"absent": "updated"}},
    {
        **_never("The gradient of {bucket} is reduced, but no op writes it.", REDUCE),
        **_never("The gradient of {bucket} is offloaded, but no op writes it.", OFFLOAD),
        **_never("The gradient of {bucket} is waited for, but no op writes it.", WAIT),
        **_never("{bucket} is updated twice.", UPDATE),
    },
    {"absent": "{bucket} is never updated."},
)
_FROZEN_GRADIENT = Rules(
    "frozen",
    {RUN: {"frozen": "frozen"}},
    _never("{bucket} has no gradient: it is frozen, or the graph has no update.", REDUCE, OFFLOAD, WAIT, UPDATE),
)

_OFFLOADED_ACTIVATIONS = Rules(
    "empty",
    {
        RUN: {**_FILL, "on device": "on device"},
        OFFLOAD: {"full": "leaving"},
        WAIT: {"leaving": "on host", "arriving": "on device"},
        PREFETCH: {"on host": "arriving"},
    },
    {
        RUN: {
            "full": "The plan offloads {group}, but {region} reads it before that.",
            "leaving": "{region} reads {group}, which is on its way to the host.",
            "on host": "{region} reads {group}, which is on the host.",
            "arriving": "{region} reads {group} before its prefetch was waited for.",
        },
        OFFLOAD: {
            "empty": "{group} is offloaded before the forward is done with it.",
            "filling": "{group} is offloaded before the forward is done with it.",
            _ANY: "{group} is offloaded twice.",
        },
        WAIT: {
            "on host": "The offload of {group} is waited for twice.",
            "on device": "The prefetch of {group} is waited for twice.",
            _ANY: "{group} is waited for, but neither an offload nor a prefetch of it is under way.",
        },
        PREFETCH: {
            "leaving": "{group} is prefetched before its offload was waited for.",
            "arriving": "{group} is prefetched twice.",
            "on device": "{group} is prefetched twice.",
            _ANY: "{group} is prefetched, but was not offloaded.",
        },
    },
    {
        "full": "The plan offloads {group}, but the schedule never does.",
        "leaving": "The offload of {group} is never waited for.",
        "on host": "{group} is offloaded and never comes back.",
        "arriving": "The prefetch of {group} is never waited for.",
    },
)
_MOVES_OF_ACTIVATIONS = (OFFLOAD, WAIT, PREFETCH)
_ACTIVATIONS = {
    Saving.KEEP: Rules(
        "on device", {}, _never("{group} is not to be moved: the plan keeps it on the device.", *_MOVES_OF_ACTIVATIONS)
    ),
    Saving.RECOMPUTE: Rules(
        "absent", {}, _never("{group} is not to be moved: the plan recomputes it.", *_MOVES_OF_ACTIVATIONS)
    ),
    Saving.OFFLOAD: _OFFLOADED_ACTIVATIONS,
}


class _Subject:
    """The parameters or the gradient of a bucket, or a group of activations, and its present state."""

    def __init__(self, name: str, rules: Rules) -> None:
        self.name = name
        """The name of the bucket or the group."""
        self.rules, self.state = rules, rules.start
        self.moved_at = self.gathered_at = -1
        """The indices of the action before the present state, and of the last gather."""


def check_moves(step: StepGraph, plan: Plan, touches: Mapping[RegionId, Sequence[Touch]], rank_index: int = 0) -> None:
    """Raise IllegalSchedule for the first illegal action of schedule number `rank_index`, or for a state in which a
    step of `plan` may not end.

    `step` is the graph as it runs; `touches` are the gradients and the offloaded activations that the regions touch.
    """
    moves, at = _Moves(step, plan, touches), 0
    for at, action in enumerate(plan.schedules[rank_index].actions):
        fault = moves.fault_of(at, action)
        if fault is not None:
            raise illegal_action(fault, plan, rank_index, at)
    if (region := moves.expected) is not None:
        raise illegal_action(f"{region.id} is never run.", plan, rank_index, at)
    for subject in moves.subjects.values():
        if subject.state in subject.rules.ends:
            fault = subject.rules.ends[subject.state].format(bucket=subject.name, group=subject.name)
            raise illegal_action(fault, plan, rank_index, max(subject.moved_at, 0))


class _Moves:
    """Lets the actions of a schedule act on the states of buckets, gradients and activations."""

    def __init__(self, step: StepGraph, plan: Plan, touches: Mapping[RegionId, Sequence[Touch]]) -> None:
        self._regions, self._touches = plan.regions, touches
        self._num_run, self._last_forward_at = 0, -1
        self._num_forward = sum(region.phase is Phase.FORWARD for region in plan.regions)
        written = {touch.target for found in touches.values() for touch in found if touch.is_last}
        params, gradients = dict[Target, _Subject](), dict[Target, _Subject]()
        for bucket, placement in zip(plan.buckets, plan.placements, strict=True):
            is_at_home, gradient = placement.param is Tier.DEVICE, GradientRef(bucket.id)
            copied = _RESIDENT_PARAMS if placement.resident else _GATHERED_PARAMS
            rules = _DEVICE_PARAMS if is_at_home and not bucket.is_sharded else copied
            params[BucketRef(bucket.id)] = _Subject(bucket.id, rules)
            if not (bucket.trainable and step.is_training):
                rules = _FROZEN_GRADIENT
            elif gradient not in written:
                rules = _ABSENT_GRADIENT
            elif is_at_home:
                rules = _SHARDED_GRADIENT if bucket.is_sharded else _DEVICE_GRADIENT
            else:
                rules = _HOST_GRADIENT
            gradients[gradient] = _Subject(bucket.id, rules)
        self.subjects: dict[Target, _Subject] = {**params, **gradients}
        self.subjects |= {
            GroupRef(group.id): _Subject(group.id, _ACTIVATIONS[group.saving]) for group in plan.activations
        }

    @property
    def expected(self) -> Region | None:
        """The region that must run next; None if all have run."""
        return self._regions[self._num_run] if self._num_run < len(self._regions) else None

    def fault_of(self, at: int, action: Action) -> str | None:
        """Let action number `at` act, and return why it is illegal; None if it is legal."""
        verb, target, is_known = action.verb, action.target, action.target in self.subjects
        if action.micro_batch:
            return f"`{verb} {target}` is of micro-batch {action.micro_batch}; a step has one micro-batch, @0."
        if verb is RUN:
            return self._fault_of_run(at, target)
        if verb in (GATHER, RELEASE, REDUCE, UPDATE):
            if not isinstance(target, BucketRef) or not is_known:
                return f"No bucket is called {target}."
            if verb is UPDATE and self.expected is not None:
                return f"{target} is updated before {self.expected.id} is run."
            return self._move(at, GradientRef(target.bucket) if verb in (REDUCE, UPDATE) else target, verb)
        is_group = isinstance(target, GroupRef)
        if verb not in (WAIT, OFFLOAD, PREFETCH) or (verb is PREFETCH and not (is_group and is_known)):
            return f"`{verb}` is not part of a step on these placements."
        if not is_known or (verb is OFFLOAD and isinstance(target, BucketRef)):
            return f"{target} is neither a bucket nor the gradient of one, nor a group of activations."
        fault = self._move(at, target, verb)
        if fault is None and is_group:  # activations leave in the forward and come back in the backward
            if verb is OFFLOAD and self._num_run > self._num_forward:
                return f"{target} is offloaded in the backward, after {self._regions[self._num_run - 1].id}."
            if verb is PREFETCH and self._num_run < self._num_forward:
                return f"{target} is prefetched in the forward, before {self._regions[self._num_run].id} is run."
        return fault

    def _fault_of_run(self, at: int, target: Target) -> str | None:
        region = self.expected
        if region is None or target != RegionRef(region.id):
            if target not in [RegionRef(each.id) for each in self._regions]:
                return f"No region is called {target}."
            if target in [RegionRef(each.id) for each in self._regions[: self._num_run]]:
                return f"{target} is run twice."
            return f"{target} is run out of order; expected {region.id if region else None}."
        if region.phase is Phase.FORWARD:
            self._last_forward_at = at
        elif self._num_run == self._num_forward:
            for subject in self.subjects.values():
                is_copied = subject.rules is _GATHERED_PARAMS and subject.state in ("gathering", "gathered")
                if is_copied and subject.gathered_at < self._last_forward_at:
                    return f"{subject.name} is not resident, but its copy from the forward is kept for the backward."
        self._num_run += 1
        for bucket in region.buckets:
            if fault := self._move(at, BucketRef(bucket), RUN, region.id):
                return fault
        for touch in self._touches[region.id]:
            if fault := self._move(at, touch.target, RUN, region.id):
                return fault
            subject = self.subjects[touch.target]
            if touch.is_last and subject.state == "filling":
                subject.state, subject.moved_at = "full", at
        return None

    def _move(self, at: int, target: Target, verb: Verb, region: str = "") -> str | None:
        subject = self.subjects[target]
        before, moves = subject.state, subject.rules.moves.get(verb)
        after = None if moves is None else moves.get(before)
        if after is None:
            return subject.rules.fault(before, verb).format(bucket=subject.name, group=subject.name, region=region)
        if after != before:
            subject.state, subject.moved_at = after, at
        if verb is GATHER:
            subject.gathered_at = at
        return None


# ----------------------------------------------------------------------------------------------------------------------
# Compare a plan with the graph of a model, and say in which the model of the plan differs.
#
# A plan has only the fingerprint of its graph, so the differences are told by the names and bytes that it has:
# parameters in buckets, groups of activations, and the first and last ops of regions.


_MOST_NAMES = 3


def require_same_graph(plan: Plan, graph: StepGraph) -> None:
    """Raise PlanMismatch, with the first difference that the plan shows, if `plan` was made for another graph."""
    if plan.graph != fingerprint(graph):
        raise other_graph(plan, graph, next(_differences(plan, graph)))


def require_same_model(plan: Plan, graph: StepGraph) -> None:
    """Raise PlanMismatch, with the first difference, if `plan` was made for other parameters than those of `graph`, or
    trains others; ops and activations may differ."""
    difference = next(_differences_of_params(plan, graph), None)
    if difference is not None:
        raise other_graph(plan, graph, difference)


def other_graph(plan: Plan, graph: StepGraph, difference: str) -> PlanMismatch:
    """Return the error that `plan` is for another graph than `graph`, of which `difference` is a sentence."""
    planned_bytes = sum(bucket.nbytes for bucket in plan.buckets)
    planned = _model_text(plan.name, [name for bucket in plan.buckets for name in bucket.params], planned_bytes)
    params = _params_of(graph)
    inputs_bytes = sum(storage.nbytes for storage in graph.storages if storage.kind is Kind.INPUT)
    present = _model_text(graph.name, list(params), sum(param.nbytes for param in params.values()))
    present += f", inputs with {format_bytes(inputs_bytes)}"
    return PlanMismatch("graph", plan.graph, fingerprint(graph), planned, present, difference)


def _model_text(name: str, params: list[StorageId], nbytes: int) -> str:
    return f"model {name}, {len(params)} parameters with {format_bytes(nbytes)}"


def _params_of(graph: StepGraph) -> Mapping[StorageId, Storage]:
    return {storage.id: storage for storage in graph.storages if storage.kind is Kind.PARAM}


def _differences(plan: Plan, graph: StepGraph) -> Iterator[str]:
    """Yield a sentence for each difference of `graph` from the graph of `plan`, of which only the first is used.

    The last sentence says what may differ without a trace in the plan.
    """
    yield from _differences_of_params(plan, graph)
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


def _differences_of_params(plan: Plan, graph: StepGraph) -> Iterator[str]:
    has_backward = graph.has_backward
    if has_backward is not any(region.phase is Phase.BACKWARD for region in plan.regions):
        both = ("no backward", "a backward")
        yield f"The step of the plan has {both[not has_backward]}, and this step has {both[has_backward]}"
    params = _params_of(graph)
    planned = {name: None for bucket in plan.buckets for name in bucket.params}
    if missing := [name for name in params if name not in planned]:
        yield f"The plan has no parameter {_names_text(missing)}, which this model reads"
    if missing := [name for name in planned if name not in params]:
        yield f"This model reads no parameter {_names_text(missing)}, which the plan has"
    for bucket in plan.buckets:
        yield from _differences_of_bucket(bucket, graph, params)


def _names_text(names: Sequence[str]) -> str:
    """Return the first of `names`, and how many there are more."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _differences_of_bucket(bucket: Bucket, graph: StepGraph, params: Mapping[StorageId, Storage]) -> Iterator[str]:
    for name in bucket.params:
        if not bucket.may_hold(params[name].dtype):
            yield f"Parameter {name} was {bucket.dtype} and is {params[name].dtype} here"
    nbytes = sum(params[name].nbytes for name in bucket.params)
    if nbytes != bucket.nbytes:
        names = _names_text(bucket.params)
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
# `check_moves` checks what the actions of each rank say; then `lane_order` looks at the order in time: two accesses to
# the same memory that no wait orders are a fault of both.


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
        check_moves(step, plan, touches, rank_index)
    check_schedules(plan)
    check_order(plan, touches)


# ----------------------------------------------------------------------------------------------------------------------
# A plan at other sizes of its graph: what it says of bytes is counted anew.


def plan_at(graph: StepGraph, plan: Plan) -> Plan:
    """Return `plan` with bytes at the sizes of `graph`, which has the same fingerprint, and as its kernels allocate.

    The predicted seconds stay those at the planned sizes.
    """
    is_same = plan.symbols == graph.symbols and plan.kernels == kernels_digest(graph)
    return plan if is_same else resized(graph, plan)


def resized(graph: StepGraph, plan: Plan) -> Plan:
    """Return `plan` with its bytes, peaks and formula computed for `graph`; the predicted seconds stay.

    Raises IllegalSchedule if regions or groups of activations do not fit the graph.
    """
    plan = replace(plan, activations=_resized_groups(graph, plan.activations))
    if plan.lean is not None:
        plan = replace(plan, lean=replace(plan.lean, activations=_resized_groups(graph, plan.lean.activations)))
    for own in (plan,) if plan.lean is None else (plan, plan.of_lean_calls()):
        check_activations(graph, own)
        check_regions(as_run(graph, own.activations, laps_of(own)), own)
    plan = with_peaks(graph, plan)
    formula = peak_formula(graph, plan)
    return replace(plan, formula=formula, symbols=graph.symbols, kernels=kernels_digest(graph))


def _resized_groups(graph: StepGraph, groups: Iterable[Activations]) -> tuple[Activations, ...]:
    nbytes = {storage.id: storage.nbytes for storage in graph.storages}
    return tuple(replace(group, nbytes=sum(nbytes.get(name, 0) for name in group.storages)) for group in groups)
