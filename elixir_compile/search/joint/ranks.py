"""Plan for ranks that differ, in memory or in their graphs, with all collectives in one order, and even out the rows of
ranks of which some wait for others.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from elixir_compile.base.errors import InvalidPlan, NoFeasiblePlan
from elixir_compile.base.units import format_bytes
from elixir_compile.ir import (
    Action,
    Activations,
    Bucket,
    BucketId,
    BucketRef,
    Decision,
    GradientRef,
    Kind,
    Phase,
    Placement,
    Plan,
    Prediction,
    RankClass,
    Record,
    Region,
    RegionId,
    RegionRef,
    Saving,
    Schedule,
    StepGraph,
    Target,
    Tier,
    Update,
    Verb,
)
from elixir_compile.search.joint.variants import is_pressed, plans_with_fewest_narrower
from elixir_compile.search.problem import Problem
from elixir_compile.search.reasons import unpredicted_plan
from elixir_compile.search.schedule import Use, common_sequence, following, released_by
from elixir_compile.search.space.buckets import form_buckets, with_larger_buckets
from elixir_compile.search.space.layers import activations_of, deepest, layers_of
from elixir_compile.step.divide import micro_batches_of
from elixir_compile.step.formula import peak_formula
from elixir_compile.step.liveness import Depth
from elixir_compile.step.pipeline import prediction_of
from elixir_compile.step.seconds import RankStep, busy_share, simulate, simulate_ranks
from elixir_compile.step.structure import Collective
from elixir_compile.step.timeline import host_bytes, plan_timeline
from elixir_compile.step.verify import verify

# ----------------------------------------------------------------------------------------------------------------------
# Plans for ranks with different graphs: all ranks issue the same collectives in the same order.
#
#   gather b0   gather b1   wait b0   wait b1   run fwd.0                          every bucket of any rank
#   run bwd.0   release b0  release b1   reduce b0   wait b0.grad   reduce b1   wait b1.grad
#
# Ranks cannot wait for each other forever, because their collectives come in one order whatever ops run in between. A
# bucket that is not resident is released after the forward and gathered again before the backward.
#
# Each rank decides on its own activations: all are kept, or, if they do not fit, all are recomputed that can be.
# Nothing else is searched, and no transfer runs beside compute, so such a step is slower than one of equal graphs.


IN_STEP = "in-step"
"""`Plan.planner` of the plans made here."""

Homes = tuple[Placement, ...]


def homes_in_step(problem: Problem, buckets: Sequence[Bucket]) -> tuple[Homes, ...]:
    """Return placements of `buckets` to try, from the most device bytes to the fewest.

    1. Placements in force are kept; new buckets are on the device and resident.
    2. New buckets are released after the forward and after the backward.
    3. All buckets are released.
    4. All buckets go to the host.
    """
    in_force = {placement.bucket: placement for placement in problem.placements}
    new = [_on_device(bucket, resident=True) for bucket in buckets]
    first = tuple(in_force.get(placement.bucket, placement) for placement in new)
    released = tuple(
        home if bucket.id in in_force else _released(bucket, home) for bucket, home in zip(buckets, first, strict=True)
    )
    all_released = tuple(_released(bucket, home) for bucket, home in zip(buckets, first, strict=True))
    away = tuple(
        replace(home, param=Tier.HOST, optim=Tier.HOST if home.optim is Tier.DEVICE else home.optim)
        for home in all_released
    )
    return tuple(dict.fromkeys((first, released, all_released, away)))


def plan_in_step(problem: Problem, buckets: Sequence[Bucket], homes: Homes, because: str) -> Plan:
    """Return the verified plan of this rank for `problem`, with the buckets of all ranks at `homes`.

    `because` is the reason that the plan's decision states. Raises NoFeasiblePlan if the step does not fit the budgets.
    """
    graph = problem.graph
    undivided: tuple[Decision, ...] = ()
    if problem.micro_batches > 1:
        # Regions are whole phases here, and a phase is more than one lap.
        problem = replace(problem, micro_batches=1)
        undivided = (Decision(subject="micro_batches", choice="the whole batch at once", because=because),)
    unpredicted = _within_budgets(problem, buckets, homes, because)
    peak = plan_timeline(graph, unpredicted).peak
    record = simulate(graph, unpredicted, problem.cluster, problem.measured)
    prediction = prediction_of(record, peak.nbytes, peak.op)
    decision = Decision(
        subject="every bucket", choice="moves in step on all ranks", because=because, cost_s=prediction.exposed_s
    )
    made = replace(
        unpredicted,
        prediction=prediction,
        decisions=(decision, *unpredicted.decisions, *undivided),
        formula=peak_formula(graph, unpredicted),
        symbols=graph.symbols,
    )
    verify(graph, made)
    return made


def _within_budgets(problem: Problem, buckets: Sequence[Bucket], homes: Homes, because: str) -> Plan:
    """Return the unpredicted plan with all activations kept, or, if it does not fit, with all recomputed that can be.

    Raises NoFeasiblePlan if neither fits, with the missing host bytes or the smaller number of device bytes.
    """
    kept = _unpredicted(problem, buckets, homes, ())
    try:
        _require_fit(problem, kept, because)
    except NoFeasiblePlan as error:
        recomputed = _recomputed(problem)
        if error.memory != "device" or not recomputed:
            raise
        made = _unpredicted(problem, buckets, homes, recomputed)
        try:
            _require_fit(problem, made, because)
        except NoFeasiblePlan as other:
            is_host_short = other.memory != "device"
            raise (other if is_host_short or other.needed_bytes < error.needed_bytes else error) from None
        reason = f"with all kept the step needs {format_bytes(error.needed_bytes)}"
        chosen = Decision(subject="activations", choice="are recomputed where they can be", because=reason)
        return replace(made, decisions=(chosen,))
    return kept


def _recomputed(problem: Problem) -> tuple[Activations, ...]:
    """Return the activations of a plan that recomputes all it can, if `problem` allows it; empty if none can be."""
    layers = layers_of(problem.graph, problem.savings & {Saving.KEEP, Saving.RECOMPUTE})
    return activations_of(layers, [deepest(layer, Depth.FIXED, leaves=False) for layer in layers])


def _unpredicted(
    problem: Problem, buckets: Sequence[Bucket], homes: Homes, activations: tuple[Activations, ...]
) -> Plan:
    """Return the plan with an empty prediction."""
    step = problem.as_run(activations)
    regions = _regions(step, buckets)
    schedule = Schedule(rank=0, actions=tuple(_actions(step, regions, buckets, homes)))
    return unpredicted_plan(problem, buckets, homes, activations, regions, schedule, IN_STEP)


def _on_device(bucket: Bucket, *, resident: bool) -> Placement:
    return Placement(bucket=bucket.id, param=Tier.DEVICE, optim=Tier.DEVICE, resident=resident)


def _released(bucket: Bucket, home: Placement) -> Placement:
    """Return `home` with the gathered copy released after each use, if the bucket is gathered at all."""
    is_gathered = bucket.is_sharded or home.param is not Tier.DEVICE
    return replace(home, resident=home.resident and not is_gathered)


def _regions(graph: StepGraph, buckets: Sequence[Bucket]) -> tuple[Region, ...]:
    """Return a region for all ops of the forward and a region for all ops of the backward."""
    owners = {param: bucket.id for bucket in buckets for param in bucket.params}
    found: list[Region] = []
    for phase, name in ((Phase.FORWARD, "fwd.0"), (Phase.BACKWARD, "bwd.0")):
        ops = [op for op in graph.ops if op.phase is phase]
        if ops:
            read = {owners[storage] for op in ops for storage in op.reads if storage in owners}
            used = tuple(bucket.id for bucket in buckets if bucket.id in read)
            found.append(Region(id=RegionId(name), phase=phase, first=ops[0].id, last=ops[-1].id, buckets=used))
    return tuple(found)


def _actions(graph: StepGraph, regions: Sequence[Region], buckets: Sequence[Bucket], homes: Homes) -> list[Action]:
    """Return the actions in the order of the module docstring, then the updates if the graph has them."""
    placed = list(zip(buckets, homes, strict=True))
    moving = [
        (BucketRef(bucket.id), home) for bucket, home in placed if bucket.is_sharded or home.param is not Tier.DEVICE
    ]
    there: list[BucketRef] = []
    actions: list[tuple[Verb, Target]] = []
    for number, region in enumerate(regions):
        missing = [target for target, _ in moving if target not in there]
        actions += [(Verb.GATHER, target) for target in missing]
        actions += [(Verb.WAIT, target) for target in missing]
        actions.append((Verb.RUN, RegionRef(region.id)))
        is_last = number == len(regions) - 1
        there = [] if is_last else [target for target, home in moving if home.resident]
        actions += [(Verb.RELEASE, target) for target, _ in moving if target not in there]
    if any(op.phase is Phase.UPDATE for op in graph.ops):
        trained = {storage.of for storage in graph.storages if storage.kind is Kind.GRAD}
        for bucket, home in placed:
            if bucket.trainable and not trained.isdisjoint(bucket.params):
                actions += _reduced(bucket, home)
        actions += [(Verb.UPDATE, BucketRef(bucket.id)) for bucket in buckets if bucket.trainable]
    return [Action(verb=verb, target=target) for verb, target in actions]


def _reduced(bucket: Bucket, home: Placement) -> list[tuple[Verb, Target]]:
    """Return the actions on a bucket's gradients, from their reduce to their end on the device."""
    gradient = GradientRef(bucket.id)
    is_away = home.param is not Tier.DEVICE
    actions: list[tuple[Verb, Target]] = [(Verb.REDUCE, BucketRef(bucket.id))]
    actions += [(Verb.OFFLOAD, gradient)] if is_away else []
    return actions + ([(Verb.WAIT, gradient)] if is_away or bucket.is_sharded else [])


def _require_fit(problem: Problem, made: Plan, because: str) -> None:
    """Raise NoFeasiblePlan, with `because`, if `made` does not fit the budgets of `problem`."""
    peak = plan_timeline(problem.graph, made).peak
    if peak.nbytes > problem.budget_bytes:
        # The peak may be at a recomputed op, whose name is not in the graph: look it up in the step as it runs.
        op = next(op for op in problem.as_run(made.activations).ops if op.id == peak.op)
        by_kind = {kind.value: nbytes for kind, nbytes in peak.by_kind.items()}
        where = op.source or op.module
        raise NoFeasiblePlan(op.id, where, problem.budget_bytes, peak.nbytes, by_kind, because=because)
    needed_bytes = host_bytes(made)
    if needed_bytes > problem.host_budget_bytes:
        base_bytes = problem.host_base_bytes
        budget_bytes = problem.host_budget_bytes + base_bytes
        raise NoFeasiblePlan("", "", budget_bytes, needed_bytes + base_bytes, {}, "host", because=because)


# ----------------------------------------------------------------------------------------------------------------------
# Plans for classes of ranks that differ in memory, each its own, with all collectives in one order.
#
#   pass 1      each class searches its own problem, all with the same buckets
#   released    what any class wants to release after each window, every class gathers again
#   pass 2      each class that kept such a bucket gathered searches again
#   sequence    every class moves its collectives into one order (see `search.schedule`)


_MOST_PASSES = 4
"""Searches of a class. Buckets that are released once stay released, so passes come to an end; two are usual."""

Each = Callable[[Callable[[int], Plan]], Sequence[Plan]]
"""Calls the function with the number of each class, and returns the plan of each."""


def plan_classes(
    problems: Sequence[Problem],
    members: Sequence[Sequence[int]],
    search: Callable[[Problem], Plan],
    each: Each,
) -> tuple[Plan, ...]:
    """Return the plan of each class of ranks, verified; `problems` has the problem of a rank of each class.

    `members` are the ranks of each class. `each` calls `search`, perhaps on several machines. The predicted seconds are
    those of all ranks simulated together, and the bound is the highest of any class: no rank is faster than the last.

    If a class has no plan, and the problems allow narrower moments, some have them: see
    `variants.plans_with_fewest_narrower`.

    Raises NoFeasiblePlan if a class has no plan, and InvalidPlan if the plans cannot follow one sequence of collectives
    within their budgets.
    """
    return tuple(
        plans_with_fewest_narrower(problems, lambda variants: _plan_in_one_order(variants, members, search, each))
    )


def _plan_in_one_order(
    problems: Sequence[Problem],
    members: Sequence[Sequence[int]],
    search: Callable[[Problem], Plan],
    each: Each,
) -> tuple[Plan, ...]:
    """Return the plans of `plan_classes` with the moments that `problems` have."""
    asked = [with_buckets_formed(problem) for problem in problems]
    plans = list(each(lambda number: search(asked[number])))
    for _ in range(_MOST_PASSES - 1):
        released = frozenset[BucketId]().union(*map(released_by, plans))
        behind = [number for number, plan in enumerate(plans) if released_by(plan) != released]
        if not behind:
            break
        plans = _searched_again(asked, plans, released, behind, search, each)
    return _as_predicted(asked, members, _in_one_order(asked, plans))


def with_buckets_formed(problem: Problem) -> Problem:
    """Return `problem` with all of its buckets in force, the new ones on the device and resident.

    The buckets depend on the parameters alone, so they are equal for all ranks. All calls of a step are treated alike.
    """
    own = problem.buckets
    formed = form_buckets(with_larger_buckets(problem) or problem)
    new = [bucket for bucket in formed if bucket not in own]
    there = [Placement(bucket=bucket.id, param=Tier.DEVICE, optim=Tier.DEVICE, resident=True) for bucket in new]
    placements = (*problem.placements, *there)
    return replace(problem, buckets=(*own, *new), placements=placements, may_have_lean_calls=False)


def _searched_again(
    asked: Sequence[Problem],
    plans: Sequence[Plan],
    released: frozenset[BucketId],
    behind: Sequence[int],
    search: Callable[[Problem], Plan],
    each: Each,
) -> list[Plan]:
    """Return `plans`, those of the classes `behind` searched again with the buckets `released`.

    Their bounds are those of the first search, which hold for any plan.
    """

    def again(number: int) -> Plan:
        if number not in behind:
            return plans[number]
        found = search(replace(asked[number], released=released))
        return replace(found, bound_s=plans[number].bound_s)

    return list(each(again))


def _in_one_order(asked: Sequence[Problem], plans: Sequence[Plan]) -> list[Plan]:
    """Return `plans` with their collectives in one order, and updates at one time."""
    sequence = common_sequence(plans)
    released = frozenset[BucketId]().union(*map(released_by, plans))
    updates = {plan.update for plan in plans}
    update = Update.ACROSS_STEPS if Update.ACROSS_STEPS in updates else plans[0].update
    return [
        _followed(problem, replace(plan, update=update), sequence, released)
        for problem, plan in zip(asked, plans, strict=True)
    ]


def _followed(
    problem: Problem, plan: Plan, sequence: Sequence[Collective | Use], released: frozenset[BucketId]
) -> Plan:
    """Return `plan` with its collectives in the order of `sequence`.

    Raises InvalidPlan if it cannot follow within the budget of `problem`.
    """
    least_bytes: int | None = None
    for made in following(plan, sequence, released):
        nbytes = plan_timeline(problem.graph, made).peak.nbytes
        if nbytes <= plan.budget_bytes:
            return made
        least_bytes = nbytes if least_bytes is None else min(least_bytes, nbytes)
    if least_bytes is None:
        raise InvalidPlan(f"the collectives of rank {plan.rank} cannot come in the order of the other ranks.")
    raise InvalidPlan(
        f"rank {plan.rank} needs {format_bytes(least_bytes)} to issue its collectives in the order of the other ranks, "
        f"and has {format_bytes(plan.budget_bytes)}."
    )


def _class_of(ranks: Sequence[int], problem: Problem, plan: Plan, prediction: Prediction, record: Record) -> RankClass:
    """Return the class of `ranks`, all with the same `plan`; `problem` is the problem of a single rank."""
    share = problem.shares[ranks[0]] if problem.shares else None
    return RankClass(
        ranks=tuple(ranks),
        device=problem.cluster.device.name,
        budget_bytes=plan.budget_bytes,
        device_peak_bytes=prediction.device_peak_bytes,
        host_peak_bytes=prediction.host_peak_bytes,
        busy_share=busy_share(record),
        is_pressed=is_pressed(plan),
        num_rows=problem.graph.batch if share is None else share.num_rows,
        micro_batches=micro_batches_of(plan),
        state=1 / problem.num_shards if share is None else share.state,
    )


def _as_predicted(
    asked: Sequence[Problem], members: Sequence[Sequence[int]], plans: Sequence[Plan]
) -> tuple[Plan, ...]:
    """Return `plans`, verified, with the predictions of all ranks simulated together."""
    records = simulate_ranks(
        [
            RankStep(graph=problem.graph, plan=plan, cluster=problem.cluster, measured=problem.measured)
            for problem, plan in zip(asked, plans, strict=True)
        ]
    )
    peaks = [plan_timeline(problem.graph, plan).peak for problem, plan in zip(asked, plans, strict=True)]
    predictions = [prediction_of(record, peak.nbytes, peak.op) for record, peak in zip(records, peaks, strict=True)]
    lines = zip(members, asked, plans, predictions, records, strict=True)
    classes = tuple(_class_of(*line) for line in lines)
    bounds_s = [plan.bound_s for plan in plans if plan.bound_s is not None]
    found: list[Plan] = []
    for problem, plan, prediction in zip(asked, plans, predictions, strict=True):
        formula = peak_formula(problem.graph, plan)
        bound_s = max(bounds_s, default=None)
        bound_s = None if bound_s is None else min(bound_s, prediction.step_s)
        made = replace(plan, prediction=prediction, formula=formula, bound_s=bound_s, classes=classes)
        verify(problem.graph, made)
        found.append(made)
    return tuple(found)
