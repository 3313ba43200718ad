"""Plan for ranks that differ, in memory or in their graphs, with all collectives in one order, and even out the rows of
ranks of which some wait for others.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

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
    RankClass,
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
from elixir_compile.search.joint.variants import MICRO_BATCHES, is_pressed, plans_with_fewest_narrower
from elixir_compile.search.outer import Refusal, Variants, decision, first_of, leaner
from elixir_compile.search.problem import Problem
from elixir_compile.search.reasons import predicted, unpredicted_plan
from elixir_compile.search.schedule import Use, common_sequence, following, released_by
from elixir_compile.search.space.buckets import (
    Level,
    form_buckets,
    placement_of,
    with_larger_buckets,
    with_smaller_buckets,
)
from elixir_compile.search.space.layers import activations_of, layers_of, modes_at_depth
from elixir_compile.step.divide import micro_batches_of
from elixir_compile.step.legality import verify
from elixir_compile.step.seconds import RankStep, busy_share, prediction_of, simulate_ranks
from elixir_compile.step.structure import Collective
from elixir_compile.step.timeline import host_bytes, peak_formula, plan_timeline

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
    new = [placement_of(bucket, Level.ON_DEVICE) for bucket in buckets]
    first = tuple(in_force.get(placement.bucket, placement) for placement in new)
    # The gathered copy is released after each use, if the bucket is gathered at all.
    all_released = tuple(
        replace(home, resident=home.resident and not bucket.is_gathered_from(home.param))
        for bucket, home in zip(buckets, first, strict=True)
    )
    released = tuple(
        home if home.bucket in in_force else other for home, other in zip(first, all_released, strict=True)
    )
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
        undivided = (decision(MICRO_BATCHES, "the whole batch at once", because),)
    said: tuple[Decision, ...] = ()
    layers = layers_of(graph, problem.savings & {Saving.KEEP, Saving.RECOMPUTE})

    def variants() -> Variants[tuple[Activations, ...], Refusal]:
        """Yield no activations, which keeps all, and if that does not fit the device, all recomputed that can be."""
        nonlocal said
        kept, recomputed = (yield ()), activations_of(layers, modes_at_depth(layers))
        if isinstance(kept, NoFeasiblePlan) and kept.memory == "device" and recomputed:
            reason = f"with all kept the step needs {format_bytes(kept.needed_bytes)}"
            said = (decision("activations", "are recomputed where they can be", reason),)
            found = yield recomputed
            if isinstance(found, NoFeasiblePlan) and found.memory == "device":
                raise leaner(kept, found).renewed()

    unpredicted = first_of(variants(), lambda activations: _fitting(problem, buckets, homes, activations, because))
    prediction, _ = predicted(problem, unpredicted)
    moves = decision("every bucket", "moves in step on all ranks", because, cost_s=prediction.exposed_s)
    made = replace(
        unpredicted,
        prediction=prediction,
        decisions=(moves, *said, *undivided),
        formula=peak_formula(graph, unpredicted),
    )
    verify(graph, made)
    return made


def _fitting(
    problem: Problem, buckets: Sequence[Bucket], homes: Homes, activations: tuple[Activations, ...], because: str
) -> Plan:
    """Return the plan with an empty prediction. Raises NoFeasiblePlan, with `because`, if it does not fit the
    budgets of `problem`."""
    step = problem.as_run(activations)
    owners = {param: bucket.id for bucket in buckets for param in bucket.params}
    found: list[Region] = []
    for phase, name in ((Phase.FORWARD, "fwd.0"), (Phase.BACKWARD, "bwd.0")):
        ops = [op for op in step.ops if op.phase is phase]
        if ops:
            read = {owners[storage] for op in ops for storage in op.reads if storage in owners}
            used = tuple(bucket.id for bucket in buckets if bucket.id in read)
            found.append(Region(id=RegionId(name), phase=phase, first=ops[0].id, last=ops[-1].id, buckets=used))
    schedule = Schedule(rank=0, actions=tuple(_actions(step, found, buckets, homes)))
    made = unpredicted_plan(problem, buckets, homes, activations, tuple(found), schedule, IN_STEP)
    peak = plan_timeline(problem.graph, made).peak
    if peak.nbytes > problem.budget_bytes:
        # The peak may be at a recomputed op, whose name is not in the graph: look it up in the step as it runs.
        op = next(op for op in step.ops if op.id == peak.op)
        by_kind = {kind.value: nbytes for kind, nbytes in peak.by_kind.items()}
        where = op.source or op.module
        raise NoFeasiblePlan(op.id, where, problem.budget_bytes, peak.nbytes, by_kind, because=because)
    needed_bytes = host_bytes(made)
    if needed_bytes > problem.host_budget_bytes:
        base_bytes = problem.host_base_bytes
        budget_bytes = problem.host_budget_bytes + base_bytes
        raise NoFeasiblePlan("", "", budget_bytes, needed_bytes + base_bytes, {}, "host", because=because)
    return made


def _actions(graph: StepGraph, regions: Sequence[Region], buckets: Sequence[Bucket], homes: Homes) -> list[Action]:
    """Return the actions in the order of the module docstring, then the updates if the graph has them."""
    placed = list(zip(buckets, homes, strict=True))
    moving = [(BucketRef(bucket.id), home) for bucket, home in placed if bucket.is_gathered_from(home.param)]
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
    if graph.is_training:
        trained = {storage.of for storage in graph.storages if storage.kind is Kind.GRAD}
        for bucket, home in placed:
            if bucket.trainable and not trained.isdisjoint(bucket.params):
                gradient, is_away = GradientRef(bucket.id), home.param is not Tier.DEVICE
                actions.append((Verb.REDUCE, BucketRef(bucket.id)))
                actions += [(Verb.OFFLOAD, gradient)] * is_away
                actions += [(Verb.WAIT, gradient)] * (is_away or bucket.is_sharded)
        actions += [(Verb.UPDATE, BucketRef(bucket.id)) for bucket in buckets if bucket.trainable]
    return [Action(verb=verb, target=target) for verb, target in actions]


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

    If a class has no plan, the smallest buckets are tried. Then some have narrower moments, if the problems allow them:
    see `variants.plans_with_fewest_narrower`.

    Raises NoFeasiblePlan if a class has no plan, and InvalidPlan if the plans cannot follow one sequence of collectives
    within their budgets.
    """

    def planned(problems: Sequence[Problem]) -> Sequence[Plan]:
        try:
            return in_one_order([with_buckets_formed(problem) for problem in problems])
        except NoFeasiblePlan as error:
            smaller = [found for found in map(with_smaller_buckets, problems) if found is not None]
            if error.memory != "device" or len(smaller) < len(problems):
                raise
        return in_one_order([with_buckets_formed(problem) for problem in smaller])

    def in_one_order(asked: Sequence[Problem]) -> Sequence[Plan]:

        def again(before: Sequence[Plan], released: frozenset[BucketId], number: int) -> Plan:
            """Return the plan of a class that kept a released bucket. Its bound is that of the first search: it
            holds for any plan."""
            if released_by(before[number]) == released:
                return before[number]
            found = search(replace(asked[number], released=released))
            return replace(found, bound_s=before[number].bound_s)

        plans = list(each(lambda number: search(asked[number])))
        for _ in range(_MOST_PASSES - 1):
            released = frozenset[BucketId]().union(*map(released_by, plans))
            if all(released_by(plan) == released for plan in plans):
                break
            plans = list(each(partial(again, plans, released)))
        # Updates are at one time.
        late = any(plan.update is Update.ACROSS_STEPS for plan in plans)
        plans = [replace(plan, update=Update.ACROSS_STEPS if late else plans[0].update) for plan in plans]
        sequence, released = common_sequence(plans), frozenset[BucketId]().union(*map(released_by, plans))
        ordered = [_followed(*own, sequence, released) for own in zip(asked, plans, strict=True)]
        return _as_predicted(asked, members, ordered)

    return tuple(plans_with_fewest_narrower(problems, planned))


def with_buckets_formed(problem: Problem) -> Problem:
    """Return `problem` with all of its buckets in force, the new ones on the device and resident.

    The buckets depend on the parameters alone, so they are equal for all ranks. All calls of a step are treated alike.
    """
    own = problem.buckets
    formed = form_buckets(with_larger_buckets(problem) or problem)
    new = [bucket for bucket in formed if bucket not in own]
    placements = (*problem.placements, *(placement_of(bucket, Level.ON_DEVICE) for bucket in new))
    return replace(problem, buckets=(*own, *new), placements=placements, may_have_lean_calls=False)


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
    classes = tuple(
        RankClass(
            ranks=tuple(ranks),
            device=problem.cluster.device.name,
            budget_bytes=plan.budget_bytes,
            device_peak_bytes=prediction.device_peak_bytes,
            host_peak_bytes=prediction.host_peak_bytes,
            busy_share=busy_share(record),
            is_pressed=is_pressed(plan),
            num_rows=problem.shares[ranks[0]].num_rows if problem.shares else problem.graph.batch,
            micro_batches=micro_batches_of(plan),
            state=problem.shares[ranks[0]].state if problem.shares else 1 / problem.num_shards,
        )
        for ranks, problem, plan, prediction, record in zip(members, asked, plans, predictions, records, strict=True)
    )
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
