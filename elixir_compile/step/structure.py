"""Check the parts of a plan besides the order of its actions, list its collectives in the order of issue, and show the
lines of a printed plan around a fault.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from elixir_compile.base.errors import IllegalSchedule, InvalidPlan
from elixir_compile.base.units import format_bytes
from elixir_compile.ir import (
    ITEM_BYTES,
    Action,
    Activations,
    Bucket,
    BucketId,
    BucketRef,
    GradientRef,
    GroupRef,
    Kind,
    Op,
    OpId,
    Phase,
    Placement,
    Region,
    RegionRef,
    Saving,
    StepGraph,
    Storage,
    StorageId,
    Tier,
    Verb,
    sizes,
)
from elixir_compile.ir.bucket import sharded_buckets
from elixir_compile.ir.plan import Plan, bucket_text
from elixir_compile.step.as_run import is_drawn, makers, repeated_op, repeats, saved_storages
from elixir_compile.step.liveness import halves_of
from elixir_compile.step.timeline import host_bytes, plan_timeline

# ----------------------------------------------------------------------------------------------------------------------
# The collectives of a plan, in the order in which its schedule issues them: one order on all ranks, or they wait for
# each other forever.
#
#   gather b1        an all-gather of the shards of b1; a bucket that is not sharded is copied by each rank for itself
#   reduce b1        a reduce-scatter of the gradients of b1; an all-reduce if the bucket is not sharded


class Collective(NamedTuple):
    """A gather or a reduce of a bucket by all ranks."""

    verb: Verb
    bucket: BucketId

    def __str__(self) -> str:
        return f"{self.verb} {self.bucket}"


def collective_of(action: Action, sharded: frozenset[BucketId]) -> Collective | None:
    """Return the collective that `action` issues if the buckets `sharded` are sharded; None if it issues none."""
    if not isinstance(action.target, BucketRef):
        return None
    is_one = action.verb is Verb.REDUCE or (action.verb is Verb.GATHER and action.target.bucket in sharded)
    return Collective(action.verb, action.target.bucket) if is_one else None


def collectives_of(plan: Plan) -> tuple[Collective, ...]:
    """Return the collectives of `plan` in the order of its schedule, if several ranks run it."""
    sharded = sharded_buckets(plan.buckets)
    found = (collective_of(action, sharded) for action in plan.schedules[0].actions)
    return tuple(collective for collective in found if collective is not None)


# ----------------------------------------------------------------------------------------------------------------------
# Make the errors of `verify`, with the lines of the printed plan around the fault.


_NUM_AROUND = 3


def illegal(sentence: str, title: str, lines: Sequence[str], *places: int) -> IllegalSchedule:
    """Return an error with `sentence` and the lines around the numbers `places`, which are marked `<-- here`."""
    lines = lines or ["(none)"]
    shown = [title]
    last = -1
    for at, line in enumerate(lines):
        if all(abs(at - place) > _NUM_AROUND for place in places):
            continue
        if at > last + 1:
            shown.append("  ...")
        shown.append(f"  {line}  <-- here" if at in places else f"  {line}")
        last = at
    if last < len(lines) - 1:
        shown.append("  ...")
    return IllegalSchedule(sentence, "\n".join(shown))


def illegal_bucket(sentence: str, plan: Plan, at: int) -> IllegalSchedule:
    """Return an error about bucket number `at` of the plan, or about its placement."""
    placed = zip(plan.buckets, plan.placements, strict=True)
    return illegal(sentence, "buckets", [bucket_text(bucket, placement) for bucket, placement in placed], at)


def illegal_activations(sentence: str, plan: Plan, at: int) -> IllegalSchedule:
    """Return an error about group number `at` of the plan's activations."""
    return illegal(sentence, "activations", _texts(plan.activations), at)


def illegal_region(sentence: str, plan: Plan, at: int) -> IllegalSchedule:
    """Return an error about region number `at` of the plan."""
    return illegal(sentence, "regions", _texts(plan.regions), at)


def illegal_action(sentence: str, plan: Plan, rank_index: int, *places: int) -> IllegalSchedule:
    """Return an error about the actions number `places` of schedule number `rank_index`: each is marked."""
    schedule = plan.schedules[rank_index]
    return illegal(sentence, f"schedule rank {schedule.rank}", _texts(schedule.actions), *places)


def illegal_claim(sentence: str, plan: Plan, at: int) -> IllegalSchedule:
    """Return an error about line number `at` below the plan's title: 0 for its budget, 2 for its peaks."""
    title, *claims = str(plan).split("\n")[:4]
    return illegal(sentence, title, [claim.strip() for claim in claims], at)


def _texts(values: Iterable[object]) -> list[str]:
    return [str(value) for value in values]


# ----------------------------------------------------------------------------------------------------------------------
# Check the parts of a plan besides the order of its actions: buckets, placements, activations, regions, ranks,
# peaks.


LEGAL_HOMES = frozenset(
    {
        (Tier.DEVICE, Tier.DEVICE),
        (Tier.DEVICE, Tier.HOST),
        (Tier.DEVICE, Tier.DISK),
        (Tier.HOST, Tier.HOST),
        (Tier.HOST, Tier.DISK),
        (Tier.DISK, Tier.DISK),
    }
)
"""The homes of parameters and of optimizer state in legal placements. Of trained parameters only those may be on the
disk whose elements are updated alone."""


def check_buckets(graph: StepGraph, plan: Plan) -> None:
    """Raise IllegalSchedule if a bucket does not fit the graph or its placement is not legal."""
    params = {storage.id: storage for storage in graph.storages if storage.kind is Kind.PARAM}
    owners: dict[StorageId, BucketId] = {}
    seen: set[BucketId] = set()
    grads = {str(GradientRef(bucket.id)) for bucket in plan.buckets}
    num_ranks = len(plan.schedules) if len(plan.schedules) > 1 else plan.num_ranks
    gradients = {storage.of for storage in graph.storages if storage.of is not None}
    for at, (bucket, placement) in enumerate(zip(plan.buckets, plan.placements, strict=True)):
        sentence = _bucket_fault(params, bucket, owners, num_ranks) or _home_fault(bucket, placement)
        if bucket.id in seen:
            sentence = f"{bucket.id} is listed twice."
        elif bucket.id in grads:
            sentence = f"The bucket {bucket.id} has the name of another bucket's gradient in actions."
        elif sentence is None and not bucket.trainable and gradients.intersection(bucket.params):
            sentence = f"{bucket.id} is frozen, but the graph writes a gradient of it."
        if sentence is not None:
            raise illegal_bucket(sentence, plan, at)
        seen.add(bucket.id)
        owners |= dict.fromkeys(bucket.params, bucket.id)
    left = next((param for param in params if param not in owners), None)
    if left is not None:
        raise illegal_bucket(f"{left}, a parameter of the graph, is in no bucket.", plan, len(plan.buckets) - 1)


def _bucket_fault(
    storages: Mapping[StorageId, Storage], bucket: Bucket, owners: Mapping[StorageId, BucketId], num_ranks: int
) -> str | None:
    for param in bucket.params:
        if param not in storages:
            return f"{bucket.id} holds {param}, which is not a parameter of the graph."
        if param in owners:
            return f"{param} is in two buckets, {owners[param]} and {bucket.id}."
        if not bucket.may_hold(storages[param].dtype):
            return f"{bucket.id} mixes dtypes: {param} is {storages[param].dtype}, the bucket {bucket.dtype}."
    nbytes = sum(storages[param].nbytes for param in bucket.params)
    if nbytes != bucket.nbytes:
        return f"{bucket.id} claims {bucket.nbytes} bytes, but its parameters have {nbytes}."
    if bucket.numel * ITEM_BYTES.get(bucket.dtype, 0) not in (0, nbytes):
        return f"{bucket.id} claims {bucket.numel} elements, but {nbytes} bytes of {bucket.dtype} hold another number."
    is_whole = bucket.shard_numels.total >= bucket.numel >= bucket.shard_numels.most
    if len(bucket.shard_numels) != num_ranks or not is_whole:
        return f"{bucket.id} has {bucket.numel} elements in shards of {bucket.shards_text} for {num_ranks} ranks."
    return None


def _home_fault(bucket: Bucket, placement: Placement) -> str | None:
    homes = f"parameters on the {placement.param} and optimizer state on the {placement.optim}"
    if (placement.param, placement.optim) not in LEGAL_HOMES:
        return f"{bucket.id} has its {homes}, which is not supported."
    if placement.param is Tier.DISK and bucket.whole_update is not None:
        which = "which is not supported: they are updated whole, and pass through the disk's buffers in pieces"
        return f"{bucket.id} has its parameters on the disk, {which}."
    if placement.optim is Tier.DISK and placement.streamed:
        return f"{bucket.id} streams its optimizer state from the disk, which is not supported."
    if placement.streamed and not (bucket.trainable and bucket.state_nbytes):
        return f"{bucket.id} streams its optimizer state, but has none."
    if not bucket.trainable and placement.param is not placement.optim:
        return f"{bucket.id} is frozen, but has its {homes}: expected one home."
    if placement.param is Tier.DEVICE and not placement.resident and not bucket.is_sharded:
        return f"{bucket.id} lives on the device, but is not resident."
    return None


def check_activations(graph: StepGraph, plan: Plan) -> None:
    """Raise IllegalSchedule if a group holds storages that cannot be kept, recomputed or offloaded as it says."""
    storages = {storage.id: storage for storage in graph.storages}
    saved, outputs = saved_storages(graph), frozenset(graph.outputs)
    # What the forward computes, saved or not, without the buffers that it overwrites.
    made = frozenset(name for name in makers(graph) if storages[name].kind in (Kind.TEMP, Kind.SAVED))
    owners: dict[StorageId, str] = {}
    names = {name for bucket in plan.buckets for name in (bucket.id, str(GradientRef(bucket.id)))}
    for at, group in enumerate(plan.activations):
        allowed = saved if group.saving is Saving.RECOMPUTE else made
        sentence = _group_fault(group, storages, owners, allowed, outputs)
        if group.id in names:
            sentence = f"The activations {group.id} have the name of another group, of a bucket or of a gradient."
        if sentence is not None:
            raise illegal_activations(sentence, plan, at)
        names.add(group.id)
        owners |= dict.fromkeys(group.storages, group.id)
    if _repeat_fault(graph, plan.activations) is not None:
        # The fault is the first group that cannot be recomputed together with the groups before it.
        for at, group in enumerate(plan.activations):
            later = (replace(other, saving=Saving.KEEP) for other in plan.activations[at + 1 :])
            sentence = _repeat_fault(graph, (*plan.activations[: at + 1], *later))
            if sentence is not None:
                raise illegal_activations(f"{group.id}: {sentence}", plan, at)


def _group_fault(
    group: Activations,
    storages: Mapping[StorageId, Storage],
    owners: Mapping[StorageId, str],
    allowed: frozenset[StorageId],
    outputs: frozenset[StorageId],
) -> str | None:
    for name in group.storages:
        if name not in storages:
            return f"{group.id} holds {name}, which is not a storage of the graph."
        if name in owners:
            return f"{name} is in two groups, {owners[name]} and {group.id}."
    nbytes = sum(storages[name].nbytes for name in group.storages)
    if nbytes != group.nbytes:
        return f"{group.id} claims {group.nbytes} bytes, but its storages have {nbytes}."
    for name in group.storages:
        if name in outputs:
            return f"{group.id} holds {name}, which the forward returns to the caller, so it stays on the device."
        if name not in allowed:
            saved = "the forward does not save" if group.saving is Saving.RECOMPUTE else "the forward does not compute"
            return f"{group.id} holds {name}, which {saved}."
    return None


def _repeat_fault(graph: StepGraph, activations: Sequence[Activations]) -> str | None:
    try:
        repeats(graph, activations)
    except InvalidPlan as error:
        return error.sentence
    return None


def check_regions(step: StepGraph, plan: Plan) -> None:
    """Raise IllegalSchedule unless the regions cover the forward and backward ops, each once and in order."""
    todo = [op for op in step.ops if op.phase is not Phase.UPDATE]
    index = {op.id: number for number, op in enumerate(todo)}
    owners = {param: bucket.id for bucket in plan.buckets for param in bucket.params}
    seen: set[str] = set()
    done = 0
    for at, region in enumerate(plan.regions):
        sentence = f"{region.id} is listed twice." if region.id in seen else _span_fault(region, todo, index, done)
        if sentence is None:
            ops = todo[done : index[region.last] + 1]
            reads = {owners[name] for op in ops for name in op.reads if name in owners}
            if len(set(region.buckets)) == len(region.buckets) and set(region.buckets) == reads:
                sentence = _division_fault(region, ops, step)
            else:
                claimed, found = ", ".join(region.buckets) or "nothing", ", ".join(sorted(reads)) or "nothing"
                sentence = f"{region.id} claims to read {claimed}; its ops read {found}."
        if sentence is not None:
            raise illegal_region(sentence, plan, at)
        seen.add(region.id)
        done = index[region.last] + 1
    _check_draws(plan, todo, index)
    if done < len(todo):
        sentence = f"No region runs {todo[done].id} and the ops after it: the regions cover {done} of {len(todo)} ops."
        raise illegal_region(sentence, plan, max(0, len(plan.regions) - 1))


def _span_fault(region: Region, todo: Sequence[Op], index: Mapping[OpId, int], done: int) -> str | None:
    for name in (region.first, region.last):
        if name not in index:
            return f"{region.id} names the op {name}, which no region of this graph can run."
    first, last = index[region.first], index[region.last]
    if first != done:
        expected = todo[done].id if done < len(todo) else "no op, because all are covered"
        return f"{region.id} begins with {region.first}; expected {expected}."
    if last < first:
        return f"{region.id} ends with {region.last}, before it begins."
    phases = {op.phase for op in todo[first : last + 1]}
    if phases != {region.phase}:
        return (
            f"{region.id} is a region of the {region.phase}, but holds ops of the {' and the '.join(sorted(phases))}."
        )
    return None


def _check_draws(plan: Plan, ops: Sequence[Op], index: Mapping[OpId, int]) -> None:
    """Raise IllegalSchedule if divided regions run in different numbers of micro-batches, or if random numbers are
    drawn again in another number: each number of micro-batches draws others."""
    divided = next((region for region in plan.regions if region.micro_batches > 1), None)
    if divided is None:
        return
    again = {repeated_op(op.id): op.id for op in ops if is_drawn(op)}
    numbers: dict[OpId, int] = {}
    for at, region in enumerate(plan.regions):
        runs = f"{region.id} runs in {region.micro_batches} micro-batches"
        if region.micro_batches not in (1, divided.micro_batches):
            raise illegal_region(f"{runs}, but {divided.id} in {divided.micro_batches}; expected one number.", plan, at)
        for op in ops[index[region.first] : index[region.last] + 1]:
            numbers[op.id] = region.micro_batches
            before = again.get(op.id, op.id)
            if numbers.get(before, region.micro_batches) != region.micro_batches:
                sentence = f"{runs}, but draws the random numbers of {before} again, which ran in {numbers[before]}."
                raise illegal_region(sentence, plan, at)


def _division_fault(region: Region, ops: Sequence[Op], step: StepGraph) -> str | None:
    """Return why `region` cannot run `ops` in its micro-batches; None if it can."""
    if region.micro_batches == 1:
        return None
    runs = f"{region.id} runs in {region.micro_batches} micro-batches"
    if not step.batch_size and step.batch % region.micro_batches:
        return f"{runs}, but the batch of {step.batch} rows is not divided by {region.micro_batches}."
    mixing = next((op for op in ops if op.mixes), None)
    if mixing is None:
        return None
    at = f" ({mixing.source})" if mixing.source else ""
    return f"{runs}, but {mixing.id} mixes them: {mixing.mixes}{at}."


def check_ranks(plan: Plan) -> None:
    """Raise IllegalSchedule unless there is a schedule for each rank from 0 on, or a single one for all ranks."""
    ranks = [schedule.rank for schedule in plan.schedules]
    if not ranks or ranks != list(range(len(ranks))):
        raise IllegalSchedule(f"The plan has schedules for the ranks {ranks}; expected 0, 1, ... and at least one.")


def check_schedules(plan: Plan) -> None:
    """Raise IllegalSchedule if a rank has other actions than rank 0: all ranks run the same schedule."""
    first = plan.schedules[0].actions
    for rank_index, schedule in enumerate(plan.schedules):
        pairs = enumerate(zip(schedule.actions, first, strict=False))
        at = next((at for at, (own, other) in pairs if own != other), min(len(schedule.actions), len(first)))
        if at < max(len(schedule.actions), len(first)):
            sentence = f"Rank {schedule.rank} has another action than rank 0 here, but all ranks run the same schedule."
            raise illegal_action(sentence, plan, rank_index, min(at, max(0, len(schedule.actions) - 1)))


def check_claims(plan: Plan) -> None:
    """Raise IllegalSchedule if the claimed host bytes, or the value of the formula of the device peak, are wrong."""
    claimed_bytes, nbytes = plan.prediction.host_peak_bytes, host_bytes(plan)
    if claimed_bytes != nbytes:
        raise illegal_claim(f"The plan claims {claimed_bytes} bytes on the host; it needs {nbytes}.", plan, 2)
    peak_bytes = plan.prediction.device_peak_bytes
    found_bytes = sizes.evaluate(plan.formula, dict(plan.symbols)) if plan.formula else peak_bytes
    if found_bytes != peak_bytes:
        sentence = f"The plan claims a peak of {peak_bytes} bytes, but its formula has {found_bytes}."
        raise illegal_claim(sentence, plan, 2)


def check_peak(graph: StepGraph, plan: Plan) -> None:
    """Raise IllegalSchedule if the peak is above the budget, or differs from the claim of the plan."""
    timeline = plan_timeline(graph, plan)
    peak, claim = timeline.peak, plan.prediction
    live = ", ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in peak.by_kind.items())
    if peak.nbytes > plan.budget_bytes:
        sentence = (
            f"The peak at {peak.op} is {peak.nbytes} bytes, {format_bytes(peak.nbytes - plan.budget_bytes)} above "
            f"the budget of {plan.budget_bytes}; live: {live}."
        )
        raise illegal_claim(sentence, plan, 0)
    claimed = dict(zip(timeline.ops, timeline.live_bytes, strict=True)).get(claim.device_peak_at)
    if claim.device_peak_bytes != peak.nbytes or claimed != peak.nbytes:
        sentence = (
            f"The plan claims a peak of {claim.device_peak_bytes} bytes at {claim.device_peak_at}; "
            f"it is {peak.nbytes} at {peak.op}; live: {live}."
        )
        raise illegal_claim(sentence, plan, 2)


# ----------------------------------------------------------------------------------------------------------------------
# Check that full and lean calls of a step move the same buckets.
#
# The first call of a step gathers a bucket, and the last releases and reduces it, and either may be a full or a lean
# one. So both programs gather, release, reduce and offload the same buckets in each half. Ranks that share buckets
# gather and reduce them in one order, although a forward may be full on one rank and lean on another, which has not
# freed a forward that was dropped.


def check_lean_moves(plan: Plan) -> None:
    """Raise IllegalSchedule unless the full and the lean calls of `plan` act on the same buckets in each half, and
    gather and reduce in the same order."""
    both = (
        [[own for own in half if not isinstance(own.target, RegionRef | GroupRef)] for half in halves_of(program)]
        for program in (plan, plan.of_lean_calls())
    )
    for phase, (full, other) in zip((Phase.FORWARD, Phase.BACKWARD), zip(*both, strict=True), strict=True):
        missing = Counter(full) - Counter(other) or Counter(other) - Counter(full)
        if missing:
            action = next(iter(missing))
            kinds = ("full", "lean") if action in full else ("lean", "full")
            sentence = f"`{action.verb} {action.target}` is in the {phase} of {kinds[0]} calls, not of {kinds[1]} ones."
            raise illegal(sentence, f"{phase} of lean calls", [str(own) for own in other])
        collectives = ([own for own in half if own.verb in (Verb.GATHER, Verb.REDUCE)] for half in (full, other))
        for at, (expected, own) in enumerate(zip(*collectives, strict=True)):
            if own != expected:
                sentence = f"`{own.verb} {own.target}` comes before `{expected.verb} {expected.target}` in lean calls."
                shown = [str(found) for found in other if found.verb in (Verb.GATHER, Verb.REDUCE)]
                raise illegal(sentence, f"{phase} of lean calls", shown, at)
