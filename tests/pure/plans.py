"""Plans for the graphs of `strategies` and `mixes`, built action by action, so that tests need no planner."""

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

from hypothesis import strategies as st

from elixir_compile.ir import (
    Action,
    Activations,
    Bucket,
    BucketId,
    Decision,
    GroupId,
    Kind,
    Phase,
    Placement,
    Plan,
    Prediction,
    Region,
    RegionId,
    Saving,
    Schedule,
    Shards,
    StepGraph,
    Storage,
    Tier,
    Verb,
    fingerprint,
)
from elixir_compile.ir.schedule import BucketRef, GradientRef, GroupRef, RegionRef, Target
from elixir_compile.step import Window, as_run, use_windows, with_peaks
from tests.pure.mixes import activations_of, layers_of, mixed_graphs
from tests.pure.strategies import ITEM_BYTES, step_graphs


def bucket_of(graph: StepGraph, name: str, params: Sequence[Storage]) -> Bucket:
    """Return the bucket of `params`, trainable if the graph writes a gradient of any; Adam doubles the bytes."""
    nbytes = sum(param.nbytes for param in params)
    numel = nbytes // ITEM_BYTES[params[0].dtype]
    trainable = any(storage.of in [param.id for param in params] for storage in graph.storages if storage.of)
    return Bucket(
        id=BucketId(name),
        params=tuple(param.id for param in params),
        numel=numel,
        nbytes=nbytes,
        state_nbytes=2 * nbytes if trainable else 0,
        dtype=params[0].dtype,
        trainable=trainable,
        shard_numels=Shards.of((numel,)),
    )


def place(bucket: Bucket, homes: str) -> Placement:
    """Return a placement from a word: `device`, `split` (state on the host), `host` or `resident` (host, kept)."""
    param = Tier.DEVICE if homes in ("device", "split") else Tier.HOST
    on_device = homes == "device" or (homes == "split" and not bucket.trainable)
    optim = Tier.DEVICE if on_device else Tier.HOST
    return Placement(bucket=bucket.id, param=param, optim=optim, resident=homes != "host")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trip:
    """Where offloaded activations leave, are gone, come back and are needed: the number of ops before each action."""

    leave: int
    gone: int
    back: int
    need: int


def make_plan(
    graph: StepGraph,
    buckets: Sequence[Bucket],
    homes: Sequence[str],
    activations: tuple[Activations, ...] = (),
    trips: Mapping[GroupId, Trip] | None = None,
) -> Plan:
    """Return a legal plan that gathers each bucket right before each window; its budget is its peak.

    Offloaded groups without a trip leave and are gone as soon, and come back as late, as they can.
    """
    placements = tuple(place(bucket, home) for bucket, home in zip(buckets, homes, strict=True))
    step = as_run(graph, activations)
    away = [group for group in activations if group.saving is Saving.OFFLOAD]
    trips = {group.id: shortest_stay(step, group) for group in away} | dict(trips or {})
    regions, actions = _regions_and_actions(step, buckets, placements, trips)
    plan = Plan(
        name="chain",
        graph=fingerprint(graph),
        cluster="1 x cpu",
        budget_bytes=0,
        buckets=tuple(buckets),
        placements=placements,
        activations=activations,
        regions=regions,
        schedules=(Schedule(rank=0, actions=tuple(actions)),),
        decisions=(Decision(subject="b0", choice="param host", because="short by 3 bytes", rejected=("keep it",)),),
        prediction=Prediction(
            step_s=0.2,
            exposed_s=0.1,
            hidden_share=0.5,
            device_peak_bytes=0,
            device_peak_at=graph.ops[0].id,
            host_peak_bytes=0,
        ),
    )
    return claim_peak(graph, plan)


def claim_peak(graph: StepGraph, plan: Plan) -> Plan:
    """Return `plan` with the peak that its timeline has, and that as the budget."""
    plan = with_peaks(graph, plan)
    return dataclasses.replace(plan, budget_bytes=plan.prediction.device_peak_bytes)


def _held(graph: StepGraph, buckets: Sequence[Bucket], placements: Sequence[Placement]) -> list[Window]:
    """Windows in which host buckets hold a copy; a resident bucket has one, from its first use to its last."""
    windows = use_windows(graph, buckets)
    found: list[Window] = []
    for placement in placements:
        own = windows[placement.bucket] if placement.param is Tier.HOST else ()
        if own and placement.resident:
            own = (dataclasses.replace(own[0], last=own[-1].last),)
        found += own
    return found


def shortest_stay(step: StepGraph, group: Activations) -> Trip:
    """Return the trip that leaves and is gone as soon as possible, and comes back when it is needed."""
    names = set(group.storages)
    touches = [at for at, op in enumerate(step.ops) if not names.isdisjoint((*op.reads, *op.writes))]
    leave = max(at for at in touches if step.ops[at].phase is Phase.FORWARD) + 1
    num_ops = sum(op.phase is not Phase.UPDATE for op in step.ops)
    need = min((at for at in touches if step.ops[at].phase is Phase.BACKWARD), default=num_ops)
    return Trip(leave=leave, gone=leave, back=need, need=need)


def with_actions(plan: Plan, actions: Iterable[Action]) -> Plan:
    """Return `plan` with `actions` on its only rank."""
    return dataclasses.replace(plan, schedules=(Schedule(rank=0, actions=tuple(actions)),))


def action_of(line: str, groups: Collection[str] = ()) -> Action:
    """Return the action of `line`, a verb and the name of a target; `groups` are the names of activations."""
    verb, name = line.split()
    return Action(verb=Verb(verb), target=target_of(Verb(verb), name, groups))


def target_of(verb: Verb, name: str, groups: Collection[str] = ()) -> Target:
    """Return the target called `name` of an action with `verb`; `groups` are the names of activations."""
    if verb is Verb.RUN:
        return RegionRef(RegionId(name))
    if verb is Verb.PREFETCH or name in groups:
        return GroupRef(GroupId(name))
    if name.endswith(".grad"):
        return GradientRef(BucketId(name.removesuffix(".grad")))
    return BucketRef(BucketId(name))


def typed(actions: Iterable[tuple[Verb, str]], groups: Collection[str] = ()) -> list[tuple[Verb, Target]]:
    """Return `actions` with targets for their names; `groups` are the names of activations."""
    return [(verb, target_of(verb, name, groups)) for verb, name in actions]


def _carries(trips: Mapping[GroupId, Trip], at: int) -> list[Action]:
    """What happens to activations before op number `at`."""
    found = [(Verb.OFFLOAD, name) for name, trip in trips.items() if trip.leave == at]
    found += [(Verb.WAIT, name) for name, trip in trips.items() if trip.gone == at]
    found += [(Verb.PREFETCH, name) for name, trip in trips.items() if trip.back == at]
    found += [(Verb.WAIT, name) for name, trip in trips.items() if trip.need == at]
    return [Action(verb=verb, target=GroupRef(name)) for verb, name in found]


def _regions_and_actions(
    graph: StepGraph, buckets: Sequence[Bucket], placements: Sequence[Placement], trips: Mapping[GroupId, Trip]
) -> tuple[tuple[Region, ...], list[Action]]:
    held = _held(graph, buckets, placements)
    num_ops = sum(op.phase is not Phase.UPDATE for op in graph.ops)
    last_writes = _last_writes(graph, buckets)
    on_host = {placement.bucket for placement in placements if placement.param is Tier.HOST}
    cuts = {0, num_ops, sum(op.phase is Phase.FORWARD for op in graph.ops)}
    cuts |= {window.first for window in held} | {window.last + 1 for window in held}
    cuts |= {at + 1 for bucket, at in last_writes.items() if bucket in on_host}
    for window in use_windows(graph, buckets).values():
        cuts |= {at for one in window if one.bucket in on_host for at in (one.first, one.last + 1)}
    cuts |= {at for trip in trips.values() for at in (trip.leave, trip.gone, trip.back, trip.need)}
    bounds = sorted(cuts)
    regions: list[Region] = []
    actions: list[Action] = []
    leaving: list[BucketId] = []
    for first, after in itertools.pairwise(bounds):
        regions.append(_region(graph, buckets, first, after - 1, regions))
        actions += _carries(trips, first)
        here = [window.bucket for window in held if window.first == first]
        actions += [Action(verb=verb, target=BucketRef(bucket)) for bucket in here for verb in (Verb.GATHER, Verb.WAIT)]
        actions.append(Action(verb=Verb.RUN, target=RegionRef(regions[-1].id)))
        actions += [
            Action(verb=Verb.RELEASE, target=BucketRef(window.bucket)) for window in held if window.last == after - 1
        ]
        for bucket, at in last_writes.items():
            if first <= at < after:
                actions.append(Action(verb=Verb.REDUCE, target=BucketRef(bucket)))
                if bucket in on_host:
                    actions += [Action(verb=Verb.WAIT, target=GradientRef(leaving.pop()))] if leaving else []
                    actions.append(Action(verb=Verb.OFFLOAD, target=GradientRef(bucket)))
                    leaving.append(bucket)
    actions += _carries(trips, num_ops)
    actions += [Action(verb=Verb.WAIT, target=GradientRef(bucket)) for bucket in leaving]
    if any(op.phase is Phase.UPDATE for op in graph.ops):
        actions += [Action(verb=Verb.UPDATE, target=BucketRef(bucket.id)) for bucket in buckets if bucket.trainable]
    return tuple(regions), actions


def _last_writes(graph: StepGraph, buckets: Sequence[Bucket]) -> dict[BucketId, int]:
    owners = {param: bucket.id for bucket in buckets for param in bucket.params}
    grads = {storage.id: owners[storage.of] for storage in graph.storages if storage.of is not None}
    return {grads[name]: at for at, op in enumerate(graph.ops) for name in op.writes if name in grads}


def _region(graph: StepGraph, buckets: Sequence[Bucket], first: int, last: int, before: Sequence[Region]) -> Region:
    ops = graph.ops[first : last + 1]
    reads = {name for op in ops for name in op.reads}
    phase = ops[0].phase
    number = sum(region.phase is phase for region in before)
    return Region(
        id=RegionId(f"{'fwd' if phase is Phase.FORWARD else 'bwd'}.{number}"),
        phase=phase,
        first=ops[0].id,
        last=ops[-1].id,
        buckets=tuple(bucket.id for bucket in buckets if reads.intersection(bucket.params)),
    )


@st.composite
def planned_graphs(draw: st.DrawFn, training: bool | None = None) -> tuple[StepGraph, Plan]:
    """Random graphs with a legal plan: buckets of one to three parameters, each anywhere it may live."""
    return draw(plans_of(draw(step_graphs(training=training))))


@st.composite
def mixed_plans(draw: st.DrawFn) -> tuple[StepGraph, Plan]:
    """Random steps with every kind of op, with a legal plan that keeps, recomputes and offloads."""
    graph = draw(mixed_graphs())
    groups = draw(activations_of(graph) if draw(st.booleans()) else layers_of(graph))
    return draw(plans_of(graph, groups))


@st.composite
def plans_of(draw: st.DrawFn, graph: StepGraph, activations: tuple[Activations, ...] = ()) -> tuple[StepGraph, Plan]:
    """`graph` with a random legal plan that treats `activations` as they say."""
    grads = {storage.of for storage in graph.storages}
    buckets: list[Bucket] = []
    for is_trained in (True, False):
        params = [s for s in graph.storages if s.kind is Kind.PARAM and (s.id in grads) == is_trained]
        while params:
            size = draw(st.integers(1, 3))
            buckets.append(bucket_of(graph, f"b{len(buckets)}", params[:size]))
            params = params[size:]
    homes = [draw(st.sampled_from(["device", "split", "host", "resident"])) for _ in buckets]
    step = as_run(graph, activations)
    num_forward = sum(op.phase is Phase.FORWARD for op in step.ops)
    trips: dict[GroupId, Trip] = {}
    for group in activations:
        if group.saving is Saving.OFFLOAD:
            most = shortest_stay(step, group)
            leave = draw(st.integers(most.leave, num_forward))
            back = draw(st.integers(num_forward, most.need))
            need, gone = draw(st.integers(back, most.need)), draw(st.integers(leave, back))
            trips[group.id] = Trip(leave=leave, gone=gone, back=back, need=need)
    return graph, make_plan(graph, buckets, homes, activations, trips)
