"""Collect facts of a plan, of a bucket or of a region as values, from which `explain` makes text or JSON."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elixir_compile.base.units import format_s
from elixir_compile.ir.bucket import Activations, Bucket, Placement
from elixir_compile.ir.calls import Calls
from elixir_compile.ir.kinds import Kind, StorageId, Tier, Update, Verb
from elixir_compile.ir.plan import Decision, Plan, Prediction, TensorTraffic
from elixir_compile.ir.rank_class import RankClass
from elixir_compile.ir.schedule import Action, BucketRef, GradientRef, Region, RegionRef
from elixir_compile.session.line import SavingAnswer, lean_text, saving_answers
from elixir_compile.step.bucket_bytes import resting
from elixir_compile.tools.report.activations import LayerAnswer, layers_of_plan, moving_at
from elixir_compile.tools.report.held import Survey
from elixir_compile.tools.report.recomputed import Again
from elixir_compile.tools.report.subject import Move, Subject, actions_of


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketAnswer:
    """The home, moves and bytes of a bucket, and the decisions about it."""

    bucket: Bucket
    placement: Placement
    asked: tuple[StorageId, ...]
    """The parameters of the bucket that were asked about; empty if the bucket itself was."""
    decisions: tuple[Decision, ...]
    passed_over: tuple[str, ...]
    """Choices for this bucket that were rejected for choices of other buckets."""
    moves: tuple[Move, ...]
    always_bytes: int
    """Bytes on the device during the whole step."""
    copy_bytes: int
    """Further bytes on the device while the parameters are gathered."""
    peak_bytes: Mapping[Kind, int] | None
    """Bytes at the peak of the step by kind; None if the graph was not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionAnswer:
    """The ops of a region, the actions just before and after it, and its peak."""

    region: Region
    on_host: int
    """Number of buckets that it reads with parameters on the host."""
    before: tuple[str, ...]
    after: tuple[str, ...]
    leaving: tuple[Activations, ...]
    """Activations whose offload is issued right after the region."""
    returning: tuple[Activations, ...]
    """Activations whose prefetch is waited for right before the region."""
    num_ops: int | None
    """None, like the next two fields, if the graph was not given."""
    peak_bytes: int | None
    """The most live bytes on the device while the region runs."""
    again: tuple[Again, ...] | None
    """Forward ops that run again in the region."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """The figures of a whole plan. It has more than 15 fields, because each is a line of `explain`."""

    name: str
    cluster: str
    planner: str
    budget_bytes: int
    base_bytes: int
    prediction: Prediction
    bound_s: float | None
    gap: float | None
    binding: tuple[str, ...]
    gib_saves: str
    """What one more GiB of device memory saves at most, in words; empty if no bound on it is proved."""
    formula: str
    rank: int
    classes: tuple[RankClass, ...]
    """The classes of ranks with plans of their own; empty if all ranks follow this plan."""
    update: Update
    """The time at which buckets are updated."""
    disk_bytes: int
    """Bytes of optimizer state on disk."""
    calls: Calls
    """How often a step calls the graph."""
    lean: str
    """How many outstanding forwards are lean, and their bytes of activations by treatment; empty if none is."""
    staying_gradient_bytes: Mapping[str, int]
    """Bytes of gradients of earlier backward passes that stay through the step, by home; empty if none stay."""
    num_streamed: int
    """Number of buckets with streamed updates."""
    num_buckets: Mapping[str, int]
    """Number of buckets by their homes, in words."""
    tensor: TensorTraffic | None
    """What the step sends along the tensor axis; None if there is none."""
    activations: tuple[SavingAnswer, ...]
    """Bytes and layers of activations by treatment; empty if all are kept."""
    num_regions: int
    counts: Mapping[Verb, int]
    """Number of actions of a rank by verb."""
    decisions: tuple[Decision, ...]
    """Decisions about more than a single bucket or layer."""
    num_moved: int
    """Number of buckets with a decision of their own."""
    num_layers: int
    """Number of layers with a decision about their activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to a question about `subject`: the plan, or a region, or buckets and activations of layers."""

    subject: str
    plan: PlanAnswer | None = None
    region: RegionAnswer | None = None
    buckets: tuple[BucketAnswer, ...] = ()
    layers: tuple[LayerAnswer, ...] = ()


def _gib_text(plan: Plan) -> str:
    if plan.gib_saves_s is None:
        return ""
    form = f", with the loss in {plan.loss_chunks} chunks" if plan.loss_chunks > 1 else ""
    return f"saves at most {format_s(plan.gib_saves_s)} per step{form}"


def plan_answer(plan: Plan) -> PlanAnswer:
    """Return the figures of `plan`."""
    ids = {bucket.id for bucket in plan.buckets}
    layers = layers_of_plan(plan)
    decided = {decision.subject for decision in plan.decisions}
    homes = zip(plan.buckets, plan.placements, strict=True)
    staying_bytes = {home.value: plan.staying_gradient_bytes(home) for home in (Tier.DEVICE, Tier.HOST)}
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
        gib_saves=_gib_text(plan),
        formula=plan.formula,
        rank=plan.rank,
        classes=plan.classes,
        update=plan.update,
        num_streamed=sum(placement.streamed for placement in plan.placements),
        disk_bytes=sum(
            bucket.shard_state_nbytes() for bucket in plan.buckets if plan.placement(bucket.id).optim is Tier.DISK
        ),
        calls=plan.calls,
        lean=lean_text(plan),
        staying_gradient_bytes={home: nbytes for home, nbytes in staying_bytes.items() if nbytes},
        num_buckets=dict(Counter(home_text(bucket, placement) for bucket, placement in homes)),
        tensor=plan.tensor,
        activations=saving_answers(plan),
        num_regions=len(plan.regions),
        counts=dict(Counter(action.verb for action in actions_of(plan))),
        decisions=_shared(plan),
        num_moved=len(ids & decided),
        num_layers=len(layers & decided),
    )


def bucket_answer(survey: Survey, bucket: Bucket, subject: Subject) -> BucketAnswer:
    """Return the facts about `bucket`; with the graph of the plan also its bytes at the peak."""
    plan, held = survey.plan, survey.held
    placement = plan.placement(bucket.id)
    is_kept = placement.param is Tier.DEVICE and placement.optim is Tier.DEVICE
    own = tuple(decision for decision in plan.decisions if decision.subject == bucket.id)
    moves = survey.moves.of(BucketRef(bucket.id), GradientRef(bucket.id))
    return BucketAnswer(
        bucket=bucket,
        placement=placement,
        asked=tuple(param for param in bucket.params if param in subject.params),
        decisions=own or (() if is_kept else _shared(plan)),
        passed_over=tuple(
            f"{other}, when {decision.subject} got {decision.choice}"
            for decision in plan.decisions
            if decision.subject != bucket.id
            for other in decision.rejected
            if other.partition(" ")[0] == bucket.id
        ),
        moves=moves,
        always_bytes=sum(nbytes for _, nbytes in resting(bucket, placement)),
        copy_bytes=bucket.flat_nbytes if any(move.verb is Verb.GATHER for move in moves) else 0,
        peak_bytes=None if held is None else held.of_bucket(bucket, plan.prediction.device_peak_at),
    )


def region_answer(survey: Survey, region: Region) -> RegionAnswer:
    """Return the facts about `region`; with the graph of the plan also its ops and its peak."""
    plan, held = survey.plan, survey.held
    actions = actions_of(plan)
    at = next((i for i, action in enumerate(actions) if action.target == RegionRef(region.id)), None)
    return RegionAnswer(
        region=region,
        on_host=sum(plan.placement(bucket).param is Tier.HOST for bucket in region.buckets),
        before=() if at is None else tuple(reversed(_until_run(actions[:at][::-1]))),
        after=() if at is None else tuple(_until_run(actions[at + 1 :])),
        leaving=moving_at(survey, region.id, Verb.OFFLOAD),
        returning=moving_at(survey, region.id, Verb.PREFETCH),
        num_ops=None if held is None else len(held.ops_of(region)),
        peak_bytes=None if held is None else held.most_bytes(region),
        again=None if held is None else tuple(found for found in held.again if found.region == region.id),
    )


def home_text(bucket: Bucket, placement: Placement) -> str:
    """Return the homes of a bucket in words: `parameters and gradients on the device, optimizer state on the host`."""
    if not bucket.trainable:
        return f"frozen parameters on the {placement.param}"
    if placement.param is placement.optim:
        return f"parameters, gradients and optimizer state on the {placement.param}"
    return f"parameters and gradients on the {placement.param}, optimizer state on the {placement.optim}"


def _shared(plan: Plan) -> tuple[Decision, ...]:
    """Return the decisions about more than a single bucket or layer."""
    single = {*layers_of_plan(plan), *(bucket.id for bucket in plan.buckets)}
    return tuple(decision for decision in plan.decisions if decision.subject not in single)


def _until_run(actions: Sequence[Action]) -> list[str]:
    end = next((i for i, action in enumerate(actions) if action.verb is Verb.RUN), len(actions))
    return [f"{action.verb} {action.target}" for action in actions[:end]]
