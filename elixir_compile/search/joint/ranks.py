"""Plans for ranks with different graphs: all ranks issue the same collectives in the same order.

```text
  gather b0   gather b1   wait b0   wait b1   run fwd.0                          every bucket of any rank
  run bwd.0   release b0  release b1   reduce b0   wait b0.grad   reduce b1   wait b1.grad
```

Ranks cannot wait for each other forever, because their collectives come in one order whatever ops run in between. A
bucket that is not resident is released after the forward and gathered again before the backward.

Each rank decides on its own activations: all are kept, or, if they do not fit, all are recomputed that can be. Nothing
else is searched, and no transfer runs beside compute, so such a step is slower than one of equal graphs.
"""

from collections.abc import Sequence
from dataclasses import replace

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.base.units import format_bytes
from elixir_compile.ir import (
    Action,
    Activations,
    Bucket,
    BucketRef,
    Decision,
    GradientRef,
    Kind,
    Phase,
    Placement,
    Plan,
    Region,
    RegionId,
    RegionRef,
    Saving,
    Schedule,
    StepGraph,
    Target,
    Tier,
    Verb,
)
from elixir_compile.search.problem import Problem
from elixir_compile.search.space.modes import activations_of, deepest, layers_of
from elixir_compile.search.writing import unpredicted_plan
from elixir_compile.step.activations import Depth
from elixir_compile.step.formula import peak_formula
from elixir_compile.step.prediction import prediction_of
from elixir_compile.step.seconds import simulate
from elixir_compile.step.timeline import host_bytes, plan_timeline
from elixir_compile.step.verify import verify

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
