"""What a plan says about one of its buckets or regions, or about itself, as values that a text or JSON is made of."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elixir_compile.analysis.timeline import plan_timeline
from elixir_compile.ir.bucket import Bucket, Placement
from elixir_compile.ir.graph import StepGraph
from elixir_compile.ir.kinds import Kind, StorageId, Tier, Verb
from elixir_compile.ir.plan import Decision, Plan, Prediction
from elixir_compile.ir.schedule import Action, Region, grad_of
from elixir_compile.report.subject import Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One action on a bucket or its gradient, and where in the step it is."""

    verb: Verb
    region: str
    """The region that a gather is for, else the last one run before; empty where there is none."""
    num_ahead: int = 0
    """Regions run between the start of a copy and the wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketAnswer:
    """What happens to one bucket, and why."""

    bucket: Bucket
    placement: Placement
    asked: tuple[StorageId, ...]
    """Its parameters that were asked about; empty where the bucket itself was."""
    decisions: tuple[Decision, ...]
    passed_over: tuple[str, ...]
    """Moves of this bucket that were rejected for those of others."""
    moves: tuple[Move, ...]
    always_bytes: int
    """What it holds on the device all through the step."""
    copy_bytes: int
    """What it holds there besides while its parameters are gathered."""
    peak_bytes: Mapping[Kind, int] | None
    """What it holds at the step's peak, by kind; None where the graph was not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionAnswer:
    """What one region runs, what comes right before and after it, and how full the device is meanwhile."""

    region: Region
    on_host: int
    """Buckets it reads whose parameters live on the host."""
    before: tuple[str, ...]
    after: tuple[str, ...]
    num_ops: int | None
    """None, as the next, where the graph was not given."""
    peak_bytes: int | None
    """Most bytes live on the device while it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """The whole plan in figures."""

    name: str
    cluster: str
    planner: str
    budget_bytes: int
    base_bytes: int
    prediction: Prediction
    bound_s: float | None
    gap: float | None
    binding: tuple[str, ...]
    gib_saves_s: float | None
    formula: str
    num_buckets: Mapping[str, int]
    """Buckets by where they live, in words."""
    num_regions: int
    counts: Mapping[Verb, int]
    """Actions of one rank by verb."""
    decisions: tuple[Decision, ...]
    """Those about no single bucket."""
    num_moved: int
    """Buckets with a decision of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All that was asked: either the plan, or a region, or buckets."""

    subject: str
    plan: PlanAnswer | None = None
    region: RegionAnswer | None = None
    buckets: tuple[BucketAnswer, ...] = ()


def plan_answer(plan: Plan) -> PlanAnswer:
    """Return what there is to say about the whole plan."""
    ids = {bucket.id for bucket in plan.buckets}
    homes = zip(plan.buckets, plan.placements, strict=True)
    return PlanAnswer(
        name=plan.name,
        cluster=plan.cluster,
        planner=plan.planner,
        budget_bytes=plan.budget_bytes,
        base_bytes=plan.base_bytes,
        prediction=plan.prediction,
        bound_s=plan.bound_s,
        gap=plan.gap,
        binding=plan.binding,
        gib_saves_s=plan.gib_saves_s,
        formula=plan.formula,
        num_buckets=dict(Counter(home_text(bucket, placement) for bucket, placement in homes)),
        num_regions=len(plan.regions),
        counts=dict(Counter(action.verb for action in _actions(plan))),
        decisions=tuple(decision for decision in plan.decisions if decision.subject not in ids),
        num_moved=len(ids & {decision.subject for decision in plan.decisions}),
    )


def bucket_answer(plan: Plan, bucket: Bucket, subject: Subject, graph: StepGraph | None) -> BucketAnswer:
    """Return what there is to say about `bucket`; with the graph of the plan also what it holds at the peak."""
    placement = plan.placement(bucket.id)
    is_kept = placement.param is Tier.DEVICE and placement.optim is Tier.DEVICE
    ids = {other.id for other in plan.buckets}
    own = tuple(decision for decision in plan.decisions if decision.subject == bucket.id)
    shared = tuple(decision for decision in plan.decisions if decision.subject not in ids)
    moves = _moves(plan, bucket)
    always_bytes = bucket.shard_nbytes() if placement.param is Tier.DEVICE else 0
    always_bytes += bucket.shard_state_nbytes() if placement.optim is Tier.DEVICE else 0
    return BucketAnswer(
        bucket=bucket,
        placement=placement,
        asked=tuple(param for param in bucket.params if param in subject.params),
        decisions=own or (() if is_kept else shared),
        passed_over=tuple(
            f"{other}, when {decision.subject} got {decision.choice}"
            for decision in plan.decisions
            if decision.subject != bucket.id
            for other in decision.rejected
            if other.partition(" ")[0] == bucket.id
        ),
        moves=moves,
        always_bytes=always_bytes,
        copy_bytes=bucket.nbytes if any(move.verb is Verb.GATHER for move in moves) else 0,
        peak_bytes=None if graph is None else _peak_bytes(plan, bucket, graph),
    )


def region_answer(plan: Plan, region: Region, graph: StepGraph | None) -> RegionAnswer:
    """Return what there is to say about `region`; with the graph of the plan also how much is live in it."""
    actions = _actions(plan)
    at = next((i for i, action in enumerate(actions) if action.verb is Verb.RUN and action.what == region.id), None)
    num_ops = peak_bytes = None
    if graph is not None:
        timeline = plan_timeline(graph, plan)
        first, last = timeline.ops.index(region.first), timeline.ops.index(region.last)
        num_ops, peak_bytes = last + 1 - first, max(timeline.live_bytes[first : last + 1])
    return RegionAnswer(
        region=region,
        on_host=sum(plan.placement(bucket).param is Tier.HOST for bucket in region.buckets),
        before=() if at is None else tuple(reversed(_until_run(actions[:at][::-1]))),
        after=() if at is None else tuple(_until_run(actions[at + 1 :])),
        num_ops=num_ops,
        peak_bytes=peak_bytes,
    )


def home_text(bucket: Bucket, placement: Placement) -> str:
    """Return where a bucket lives: `parameters on the device, optimizer state on the host`."""
    if not bucket.trainable:
        return f"frozen parameters on the {placement.param}"
    if placement.param is placement.optim:
        return f"parameters, gradients and optimizer state on the {placement.param}"
    return f"parameters and gradients on the {placement.param}, optimizer state on the {placement.optim}"


def _actions(plan: Plan) -> tuple[Action, ...]:
    """Those of the first rank: all ranks do the same."""
    return plan.schedules[0].actions if plan.schedules else ()


def _until_run(actions: Sequence[Action]) -> list[str]:
    end = next((i for i, action in enumerate(actions) if action.verb is Verb.RUN), len(actions))
    return [f"{action.verb} {action.what}" for action in actions[:end]]


def _moves(plan: Plan, bucket: Bucket) -> tuple[Move, ...]:
    """The actions on the bucket and its gradient, in order; a wait is told with the copy that it ends."""
    actions = _actions(plan)
    gradient = grad_of(bucket.id)
    moves: list[Move] = []
    last = ""
    for at, action in enumerate(actions):
        if action.verb is Verb.RUN:
            last = action.what
        elif action.what in (bucket.id, gradient) and action.verb is not Verb.WAIT:
            is_copy = action.verb in (Verb.GATHER, Verb.OFFLOAD)
            end = _wait_index(actions, at) if is_copy else at
            num_ahead = sum(between.verb is Verb.RUN for between in actions[at:end])
            region = _next_run(actions[end:]) if action.verb is Verb.GATHER else last
            moves.append(Move(verb=action.verb, region=region, num_ahead=num_ahead))
    return tuple(moves)


def _wait_index(actions: Sequence[Action], start: int) -> int:
    what = actions[start].what
    waits = (at for at in range(start, len(actions)) if actions[at].verb is Verb.WAIT and actions[at].what == what)
    return next(waits, start)


def _next_run(actions: Sequence[Action]) -> str:
    return next((action.what for action in actions if action.verb is Verb.RUN), "")


def _peak_bytes(plan: Plan, bucket: Bucket, graph: StepGraph) -> Mapping[Kind, int]:
    """Bytes by kind at the peak less those with the bucket and its gradients weighing nothing."""
    empty = replace(bucket, nbytes=0, state_nbytes=0)
    without = replace(plan, buckets=tuple(empty if other.id == bucket.id else other for other in plan.buckets))
    storages = tuple(replace(s, nbytes=0) if s.of in bucket.params else s for s in graph.storages)
    timeline, lighter = plan_timeline(graph, plan), plan_timeline(replace(graph, storages=storages), without)
    at = timeline.ops.index(plan.prediction.device_peak_at)
    held = {
        kind: live[at] - lighter.live_bytes_by_kind[kind][at] if kind in lighter.live_bytes_by_kind else live[at]
        for kind, live in timeline.live_bytes_by_kind.items()
    }
    return {kind: nbytes for kind, nbytes in held.items() if nbytes}
