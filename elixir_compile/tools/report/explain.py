"""Explain a plan, or a part of it by name: homes of buckets, treatment of activations, decisions and rejected choices,
as values and as text.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elixir_compile.base.units import format_bytes, format_s
from elixir_compile.ir.bucket import Activations, Bucket, Placement, WholeUpdate
from elixir_compile.ir.graph import StepGraph
from elixir_compile.ir.kinds import Kind, RegionId, Saving, StorageId, Tier, Update, Verb
from elixir_compile.ir.plan import (
    SAID,
    Decision,
    Plan,
    Prediction,
    RankClass,
    RingTraffic,
    SavingAnswer,
    layer_of_group,
    lean_text,
    saving_answers,
    spans_text,
)
from elixir_compile.ir.schedule import Action, BucketRef, Calls, GradientRef, GroupRef, Region, RegionRef
from elixir_compile.step.bucket_bytes import resting
from elixir_compile.step.legality import require_same_graph
from elixir_compile.tools.report.tables import Again, Move, Subject, Survey, actions_of, entry_text, find_subject

# ----------------------------------------------------------------------------------------------------------------------
# Collect facts about the activations of a plan as values: by layer and group, by region, and in sum.
#
# Seconds belong to the planner's decision about a whole layer. Only with the graph it is known which ops run again, and
# which groups the forward saves only for them.


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAnswer:
    """The treatment of a group of activations."""

    group: Activations
    moves: tuple[Move, ...]
    """The offload and the prefetch of the group, if it is offloaded."""
    again: tuple[Again, ...] | None
    """The regions in which the group is recomputed, in order; None if the graph was not given."""
    is_saved: bool | None
    """True if the capture saves the group, False if it is saved only for ops that run again; None without the graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAnswer:
    """The treatment of the activations of a layer, and the decisions about it."""

    layer: str
    groups: tuple[GroupAnswer, ...]
    """The groups in question."""
    num_groups: int
    """Number of all groups of the layer."""
    decisions: tuple[Decision, ...]
    """Decisions about the layer."""
    is_lean: bool = False
    """Whether this is the treatment in lean calls."""


def layers_of_plan(plan: Plan) -> frozenset[str]:
    """Return the layers whose activations the plan lists, as its decisions name them."""
    lean = () if plan.lean is None else plan.lean.activations
    return frozenset(layer_of_group(group.id) for group in (*plan.activations, *lean))


def layer_answers(survey: Survey, groups: Sequence[Activations], *, is_lean: bool = False) -> tuple[LayerAnswer, ...]:
    """Return the facts about `groups` by layer; with the graph of the plan also the regions that recompute them.

    `is_lean` if `survey` is that of the lean calls of a plan.
    """
    plan, held = survey.plan, survey.held
    by_layer: dict[str, list[GroupAnswer]] = {}
    for group in groups:
        found = GroupAnswer(
            group=group,
            moves=survey.moves.of(GroupRef(group.id)),
            again=None if held is None else tuple(part for part in held.again if part.group == group.id),
            is_saved=None if held is None else held.saved.issuperset(group.storages),
        )
        by_layer.setdefault(layer_of_group(group.id), []).append(found)
    return tuple(
        LayerAnswer(
            layer=layer,
            groups=tuple(own),
            num_groups=sum(layer_of_group(group.id) == layer for group in plan.activations),
            decisions=tuple(decision for decision in plan.decisions if decision.subject == layer),
            is_lean=is_lean,
        )
        for layer, own in by_layer.items()
    )


def moving_at(survey: Survey, region: RegionId, verb: Verb) -> tuple[Activations, ...]:
    """Return the groups whose offload is issued after `region`, or whose prefetch is waited for before it."""
    moving = survey.moves.groups_at(region, verb)
    return tuple(group for group in survey.plan.activations if group.id in moving)


# ----------------------------------------------------------------------------------------------------------------------
# Collect facts of a plan, of a bucket or of a region as values, from which `explain` makes text or JSON.


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
    on_disk: int
    """Number of buckets that it reads with parameters on the disk."""
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
    on_share: str
    """The share of the data sheet on which seconds and bounds are, after a comma; empty if rates were measured."""
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
    disk_param_bytes: Mapping[str, int]
    """Bytes of frozen and of trained parameters on disk, as far as there are any."""
    read_bytes: int
    """Bytes of them that the gathers of a step read."""
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
    tensor: RingTraffic | None
    """What the step sends along the tensor axis; None if there is none."""
    own_collectives: RingTraffic | None
    """What collectives in the model itself send along the data axes; None if it has none."""
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


def plan_answer(plan: Plan) -> PlanAnswer:
    """Return the figures of `plan`."""
    ids = {bucket.id for bucket in plan.buckets}
    layers = layers_of_plan(plan)
    decided = {decision.subject for decision in plan.decisions}
    homes = zip(plan.buckets, plan.placements, strict=True)
    chunks = f", with the loss in {plan.loss_chunks} chunks" if plan.loss_chunks > 1 else ""
    gib_saves = "" if plan.gib_saves_s is None else f"saves at most {format_s(plan.gib_saves_s)} per step{chunks}"
    staying_bytes = {home.value: plan.staying_gradient_bytes(home) for home in (Tier.DEVICE, Tier.HOST)}
    there = {bucket.id: bucket for bucket in plan.buckets if plan.placement(bucket.id).param is Tier.DISK}
    disk_param_bytes: Counter[str] = Counter()
    for bucket in there.values():
        disk_param_bytes["trained" if bucket.trainable else "frozen"] += bucket.shard_nbytes()
    targets = (action.target for action in actions_of(plan) if action.verb is Verb.GATHER)
    gathered = [target for target in targets if isinstance(target, BucketRef)]
    return PlanAnswer(
        name=plan.name,
        cluster=plan.cluster,
        planner=plan.planner,
        budget_bytes=plan.budget_bytes,
        base_bytes=plan.base_bytes,
        prediction=plan.prediction,
        bound_s=plan.bound_s,
        gap=plan.gap,
        on_share=plan.on_share,
        binding=plan.binding,
        gib_saves=gib_saves,
        formula=plan.formula,
        rank=plan.rank,
        classes=plan.classes,
        update=plan.update,
        num_streamed=sum(placement.streamed for placement in plan.placements),
        disk_bytes=sum(
            bucket.shard_state_nbytes() for bucket in plan.buckets if plan.placement(bucket.id).optim is Tier.DISK
        ),
        disk_param_bytes=dict(disk_param_bytes),
        read_bytes=sum(there[target.bucket].shard_nbytes() for target in gathered if target.bucket in there),
        calls=plan.calls,
        lean=lean_text(plan),
        staying_gradient_bytes={home: nbytes for home, nbytes in staying_bytes.items() if nbytes},
        num_buckets=dict(Counter(home_text(bucket, placement) for bucket, placement in homes)),
        tensor=plan.tensor,
        own_collectives=plan.own_collectives,
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
        on_disk=sum(plan.placement(bucket).param is Tier.DISK for bucket in region.buckets),
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
    if placement.param is Tier.DISK:
        return "parameters and optimizer state on the disk, gradients on the host"
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


# ----------------------------------------------------------------------------------------------------------------------
# Explain a plan, or a part of it by name: homes of buckets, treatment of activations, decisions, rejected choices.
#
# b3  11 parameters, 7087872 elements of float32
#   size      27.0 MiB of parameters, 54.1 MiB of optimizer state
#   lives     parameters, gradients and optimizer state on the host
#   copy      gathered for each use, then released
#   why       param host  optim host: device short by 3.1 GiB at bwd.mm_2; costs 0 s, saves 81.1 MiB
#   rejected  b2 param host  optim host (saves 81.1 MiB, costs 1.2 ms)
#   schedule  gather for fwd.3, 2 regions ahead
#             release after fwd.3
#
# h.3  activations of 3 groups, 54.0 MiB
#   pointwise  36.0 MiB recomputed: 14 ops in bwd.2
#   matmul     12.0 MiB offloaded: offload after fwd.3, waited for 1 region later; prefetch for bwd.2, 1 region ahead
#   fixed      6.0 MiB kept
#   why        recompute pointwise, offload matmul, keep fixed: the peak would be 40.0 MiB higher with keep pointwise
#              and matmul and fixed; costs 1.2 ms, saves 40.0 MiB


_MOST_NAMES = 6


def explain(plan: Plan, subject: str = "", graph: StepGraph | None = None) -> str:
    """Return a text with the homes, moves and bytes of `subject`, the decisions about it, and rejected choices.

    `subject` is a bucket (`b3`), a region (`fwd.2`), a parameter, a group of activations (`layers.3.matmul`), or a part
    of module paths (`layers.3`); without it the text is about the whole plan. With the `graph` of the plan the text
    also has the bytes at the peak, and the regions in which activations are recomputed. Raises UnknownSubject with the
    nearest names if nothing is found, and PlanMismatch if `graph` is another graph.

    Example:
        plan = elixir.compilations(compiled)[-1].plan
        print(elixir.explain(plan))
        print(elixir.explain(plan, "layers.1"))
    """
    return answer_text(answer(plan, subject, graph), plan.prediction.device_peak_at)


def answer(plan: Plan, subject: str = "", graph: StepGraph | None = None) -> Answer:
    """Return the result of `explain` as a value."""
    if graph is not None:
        require_same_graph(plan, graph)
    if not subject:
        return Answer(subject=subject, plan=plan_answer(plan))
    return answer_of(Survey(plan, graph), subject)


def answer_of(survey: Survey, subject: str) -> Answer:
    """Return the answer about a part of a plan; `survey` serves all answers about the plan."""
    found = find_subject(survey.plan, subject)
    if found.region is not None:
        return Answer(subject=subject, region=region_answer(survey, found.region))
    buckets = tuple(bucket_answer(survey, bucket, found) for bucket in found.buckets)
    layers = layer_answers(survey, found.groups)
    if found.lean_groups:
        layers += layer_answers(survey.of_lean_calls(), found.lean_groups, is_lean=True)
    return Answer(subject=subject, buckets=buckets, layers=layers)


def answer_text(found: Answer, peak_at: str) -> str:
    """Return the answer as text; `peak_at` is the op at the peak of the step."""
    entries = [] if found.plan is None else [_plan_text(found.plan)]
    entries += [] if found.region is None else [_region_text(found.region, peak_at)]
    entries += [_bucket_text(bucket, peak_at) for bucket in found.buckets]
    entries += [_layer_text(layer) for layer in found.layers]
    return "\n\n".join(entries)


def _plan_text(found: PlanAnswer) -> str:
    made = found.prediction
    share = f" ({made.device_peak_bytes / found.budget_bytes:.0%})" if found.budget_bytes else ""
    base = f", of which {format_bytes(found.base_bytes)} are external usage" if found.base_bytes else ""
    bound = "not proved" if found.bound_s is None else f"{format_s(found.bound_s)} for every plan"
    gap = "" if found.gap is None else f", so another plan saves {found.gap:.2%} at most"
    subjects = [_count_text(found.num_moved, "bucket")] if found.num_moved else []
    subjects += [_count_text(found.num_layers, "layer")] if found.num_layers else []
    moved = f"{' and '.join(subjects)} have decisions of their own; ask for any by its name"
    kept = " and ".join(f"{format_bytes(n)} on the {home}" for home, n in found.staying_gradient_bytes.items())
    streamed = found.num_streamed
    through = f", {_count_text(streamed, 'bucket')} streamed through the device" if streamed else ""
    return entry_text(
        f"plan {found.name} on {found.cluster}, chosen by {found.planner}",
        [
            ("budget", [format_bytes(found.budget_bytes) + base]),
            ("peak", [f"{format_bytes(made.device_peak_bytes)}{share} at {made.device_peak_at}"]),
            ("host", [format_bytes(made.host_peak_bytes)]),
            ("disk", _disk_texts(found)),
            ("calls", [str(found.calls)] if found.calls.num > 1 else []),
            ("lean calls", [found.lean] if found.lean else []),
            ("accumulates", [f"gradients of earlier backward passes stay: {kept}"] if kept else []),
            ("step", [f"{format_s(made.step_s)}, {format_s(made.exposed_s)} of it exposed transfers"]),
            ("ranks", [_class_text(line, found.rank) for line in found.classes]),
            ("tensor axis", _traffic_texts(found.tensor)),
            ("own collectives", _traffic_texts(found.own_collectives)),
            ("update", [f"{found.update}{through}"] if Verb.UPDATE in found.counts else []),
            ("bound", [bound + gap + found.on_share]),
            ("binding", found.binding),
            ("one more GiB", [found.gib_saves] if found.gib_saves else []),
            ("peak formula", [found.formula] if found.formula else []),
            ("buckets", [f"{count}: {home}" for home, count in sorted(found.num_buckets.items())]),
            (
                "activations",
                [
                    f"{format_bytes(kind.nbytes)} {SAID[kind.saving]}, in {_count_text(kind.num_layers, 'layer')}"
                    for kind in found.activations
                    if kind.num_layers
                ],
            ),
            ("schedule", [", ".join(f"{verb} {count}" for verb, count in sorted(found.counts.items()))]),
            ("why", [_decision_text(decision, decision.subject) for decision in found.decisions]),
            ("moved", [moved] if subjects else []),
        ],
    )


def _class_text(line: RankClass, rank: int) -> str:
    """Return the figures of a class of ranks, as a line of the plan of `rank`."""
    who = f"{spans_text(line.ranks)}, this plan" if rank in line.ranks else spans_text(line.ranks)
    parts = [] if line.num_rows is None else [_count_text(line.num_rows, "row")]
    parts += [f"{line.micro_batches} micro-batches"] if line.micro_batches > 1 else []
    parts += [] if line.state is None else [f"{line.state:.1%} of the state"]
    parts.append(f"peak {format_bytes(line.device_peak_bytes)} of {format_bytes(line.budget_bytes)}")
    parts += [f"host {format_bytes(line.host_peak_bytes)}", f"busy {line.busy_share:.0%}"]
    return f"{who} on {line.device}: {', '.join(parts)}"


def _traffic_texts(sent: RingTraffic | None) -> list[str]:
    if sent is None:
        return []
    count = _count_text(sent.num_collectives, "collective")
    return [f"{sent.num_ranks} ranks: {count} of {format_bytes(sent.nbytes)} in all, {format_s(sent.run_s)} of compute"]


def _disk_texts(found: PlanAnswer) -> list[str]:
    texts = [f"{format_bytes(found.disk_bytes)} of optimizer state"] if found.disk_bytes else []
    if found.disk_param_bytes:
        read = f"{format_bytes(found.read_bytes)} read per step for gathers"
        kinds = (f"{format_bytes(nbytes)} of {kind} parameters" for kind, nbytes in found.disk_param_bytes.items())
        texts.append(f"{' and '.join(kinds)}, {read}")
    return texts


def _region_text(found: RegionAnswer, peak_at: str) -> str:
    region = found.region
    num_ops = "" if found.num_ops is None else f", {found.num_ops} ops"
    from_disk = f", {found.on_disk} from the disk" if found.on_disk else ""
    live = f"the step's peak is at {peak_at}"
    if found.peak_bytes is not None:
        live = f"{format_bytes(found.peak_bytes)} live at most; {live}"
    return entry_text(
        f"{region.id}  region of the {region.phase}, {region.first} to {region.last}{num_ops}",
        [
            (
                "reads",
                [f"{_names_text(region.buckets)}; {found.on_host} of them from the host{from_disk}"]
                if region.buckets
                else [],
            ),
            ("before", [", ".join(found.before)] if found.before else []),
            ("after", [", ".join(found.after)] if found.after else []),
            ("offloads", [_groups_text(found.leaving)] if found.leaving else []),
            ("prefetched", [_groups_text(found.returning)] if found.returning else []),
            ("recomputes", [f"{part.group}: {_count_text(part.num_ops, 'op')}" for part in found.again or ()]),
            ("memory", [live]),
        ],
    )


def _groups_text(groups: Sequence[Activations]) -> str:
    return _names_text([f"{group.id} ({format_bytes(group.nbytes)})" for group in groups])


def _bucket_text(found: BucketAnswer, peak_at: str) -> str:
    bucket = found.bucket
    state = f", {format_bytes(bucket.state_nbytes)} of optimizer state" if bucket.state_nbytes else ""
    state += f" with moments in {bucket.state_dtype}" if bucket.state_dtype else ""
    state += f", param group {bucket.group}" if bucket.group else ""
    each = (
        f"; each of {len(bucket.shard_numels)} ranks owns {format_bytes(bucket.shard_nbytes())}"
        if bucket.is_sharded
        else ""
    )
    placement = found.placement
    stays = placement.param is Tier.DEVICE
    if stays and not bucket.is_sharded:
        copy = "none is needed: the parameters are on the device"
    elif not found.copy_bytes:
        copy = "never gathered: no region reads it"
    else:
        copy = (
            "gathered once, kept until the backward" if placement.resident else "gathered for each use, then released"
        )
    why = [
        _decision_text(decision, "" if decision.subject == bucket.id else decision.subject)
        for decision in found.decisions
    ]
    undecided = "no decision of this plan: its home is that of an earlier plan"
    if stays and placement.optim is Tier.DEVICE:
        undecided = "it fits on the device: no decision moved it"
    more = f", {format_bytes(found.copy_bytes)} more while it is gathered" if found.copy_bytes else ""
    held = f"{format_bytes(found.always_bytes)} on the device at every op{more}"
    if found.peak_bytes is not None:
        kinds = ", ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in found.peak_bytes.items())
        held = f"{kinds or 'nothing'} on the device"
    return entry_text(
        f"{bucket.id}  {_count_text(len(bucket.params), 'parameter')}, {bucket.numel} elements of {bucket.dtype}",
        [
            ("asked for", [_names_text(found.asked)] if found.asked else []),
            ("holds", [] if len(found.asked) == len(bucket.params) else [_names_text(bucket.params)]),
            ("size", [f"{format_bytes(bucket.nbytes)} of parameters{state}{each}"]),
            ("updated", [] if bucket.own_update is None else [_whole_text(bucket.own_update)]),
            ("lives", [home_text(bucket, placement)]),
            ("copy", [copy]),
            ("why", why or [undecided]),
            ("rejected", [other for decision in found.decisions for other in decision.rejected]),
            ("passed over", found.passed_over),
            ("schedule", [_move_text(move, found) for move in found.moves] or ["nothing moves"]),
            ("at the peak", [f"{peak_at}: it holds {held}"]),
        ],
    )


def _whole_text(whole: WholeUpdate) -> str:
    flops = " and ".join(f"{flops / 1e12:.3g} TFLOP in {dtype}" for dtype, flops in whole.flops)
    parts = [flops] if flops else []
    parts += [f"{format_bytes(whole.moved_bytes)} read and written", f"{format_bytes(whole.work_nbytes)} of work space"]
    return f"by whole tensors: {', '.join(parts)}"


def _layer_text(found: LayerAnswer) -> str:
    groups = [answer.group for answer in found.groups]
    nbytes = format_bytes(sum(group.nbytes for group in groups))
    num_groups = _count_text(found.num_groups, "group")
    asked = num_groups if len(groups) == found.num_groups else f"{len(groups)} of {num_groups}"
    treated: list[tuple[str, list[str]]] = []
    for part in found.groups:
        group = part.group
        how = f"{format_bytes(group.nbytes)} {SAID[group.saving]}"
        if group.saving is Saving.RECOMPUTE:
            again = [f"{_count_text(each.num_ops, 'op')} in {each.region}" for each in part.again or ()]
            how += f": {', '.join(again)}" if again else ""
        elif part.moves:
            how += f": {'; '.join(map(_trip_text, part.moves))}"
        how += "" if part.is_saved in (True, None) else "; saved for the ops that run again"
        treated.append((group.id.removeprefix(f"{found.layer}."), [how]))
    why = [_decision_text(decision) for decision in found.decisions]
    is_kept = all(group.saving is Saving.KEEP for group in groups)
    undecided = "they fit on the device: no decision moved them" if is_kept else "no decision of this plan names them"
    return entry_text(
        f"{found.layer}  activations of {asked}, {nbytes}{', in lean calls' if found.is_lean else ''}",
        [
            *treated,
            ("why", why or [undecided]),
            ("rejected", [other for decision in found.decisions for other in decision.rejected]),
        ],
    )


def _trip_text(move: Move) -> str:
    regions = _count_text(move.num_ahead, "region")
    if move.verb is Verb.OFFLOAD:
        return f"offload after {move.region}, " + (f"waited for {regions} later" if move.num_ahead else "waited for")
    where = f"for {move.region}" if move.region else "after the last region"
    return f"prefetch {where}, " + (f"{regions} ahead" if move.num_ahead else "right before it")


def _count_text(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _names_text(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _decision_text(decision: Decision, subject: str = "") -> str:
    effect = []
    if decision.cost_s or decision.saves_bytes:
        effect = [f"; costs {format_s(decision.cost_s)}, saves {format_bytes(decision.saves_bytes)}"]
    return "".join([f"{subject}: " if subject else "", f"{decision.choice}: {decision.because}", *effect])


def _move_text(move: Move, found: BucketAnswer) -> str:
    regions = _count_text(move.num_ahead, "region")
    if move.verb is Verb.GATHER:
        return f"gather for {move.region}, " + (f"{regions} ahead" if move.num_ahead else "right before it")
    if move.verb is Verb.OFFLOAD:
        return f"offload the gradient after {move.region}, waited for {regions} later"
    if move.verb is Verb.UPDATE:
        how = ", with its state streamed both ways" if found.placement.streamed else ""
        return f"update on the {found.placement.update}{how}"
    return f"{move.verb} after {move.region}"
