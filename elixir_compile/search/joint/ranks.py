"""A plan for ranks whose graphs differ: whatever a rank computes, its collectives come in one order.

```text
  gather b0   gather b1   wait b0   wait b1   run fwd.0                          every bucket of any rank
  run bwd.0   release b0  release b1   reduce b0   wait b0.grad   reduce b1   wait b1.grad
```

Ranks of such plans never wait for each other in vain, because what comes between two collectives does not matter to
them. A bucket that is not resident is released behind the forward and gathered again before the backward.

Activations are a rank's own: all are kept, or, where that does not fit, all that can be are made again. Nothing is
searched, and no transfer hides: that is the price of another graph on each rank.
"""

from collections.abc import Sequence
from dataclasses import replace

from elixir_compile.analysis.activations import Depth
from elixir_compile.analysis.formula import peak_formula
from elixir_compile.analysis.recompute import as_run
from elixir_compile.analysis.timeline import host_bytes, plan_timeline
from elixir_compile.analysis.verify import verify
from elixir_compile.errors import NoFeasiblePlan
from elixir_compile.ir import (
    Action,
    Activations,
    Bucket,
    Decision,
    Kind,
    OpId,
    Phase,
    Placement,
    Plan,
    Prediction,
    Region,
    RegionId,
    Saving,
    Schedule,
    StepGraph,
    Tier,
    Verb,
    fingerprint,
    grad_of,
)
from elixir_compile.search.problem import Problem, update_time
from elixir_compile.search.space.modes import activations_of, deepest, layers_of
from elixir_compile.simulate import prediction_of, simulate
from elixir_compile.units import format_bytes

IN_STEP = "in-step"
"""The planner that such a plan names."""

Homes = tuple[Placement, ...]


def homes_in_step(problem: Problem, buckets: Sequence[Bucket]) -> tuple[Homes, ...]:
    """Return the placements of `buckets` to try, from the one that takes the most of the device on.

    Those in force stay; new buckets come onto the device, resident, then released after each half; then everything is
    released; then everything goes to the host.
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
    """Return the plan of this rank for `problem` with `buckets`, which all ranks have, at `homes`, verified.

    `because` says why it is needed. Raises NoFeasiblePlan where that does not fit the budgets of `problem`.
    """
    graph = problem.graph
    unpredicted = _with_room(problem, buckets, homes, because)
    peak = plan_timeline(graph, unpredicted).peak
    record = simulate(graph, unpredicted, problem.cluster, problem.measured)
    prediction = prediction_of(record, peak.nbytes, peak.op)
    decision = Decision(
        subject="every bucket", choice="moves in step on all ranks", because=because, cost_s=prediction.exposed_s
    )
    made = replace(
        unpredicted,
        prediction=prediction,
        decisions=(decision, *unpredicted.decisions),
        formula=peak_formula(graph, unpredicted),
        symbols=graph.symbols,
    )
    verify(graph, made)
    return made


def _with_room(problem: Problem, buckets: Sequence[Bucket], homes: Homes, because: str) -> Plan:
    """Return the plan, not predicted yet, that keeps all activations, or else makes all of them again that it can."""
    kept = _drafted(problem, buckets, homes, ())
    try:
        _require_room(problem, kept, because)
    except NoFeasiblePlan as error:
        again = _recomputed(problem)
        if error.memory != "device" or not again:
            raise
        made = _drafted(problem, buckets, homes, again)
        try:
            _require_room(problem, made, because)
        except NoFeasiblePlan as other:
            is_host_short = other.memory != "device"
            raise (other if is_host_short or other.needed_bytes < error.needed_bytes else error) from None
        reason = f"with all kept the step needs {format_bytes(error.needed_bytes)}"
        chosen = Decision(subject="activations", choice="are recomputed where they can be", because=reason)
        return replace(made, decisions=(chosen,))
    return kept


def _recomputed(problem: Problem) -> tuple[Activations, ...]:
    """What a plan says of activations that are all made again, where `problem` lets them; nothing where none can be."""
    layers = layers_of(problem.graph, problem.savings & {Saving.KEEP, Saving.RECOMPUTE})
    return activations_of(layers, [deepest(layer, Depth.FIXED, leaves=False) for layer in layers])


def _drafted(problem: Problem, buckets: Sequence[Bucket], homes: Homes, activations: tuple[Activations, ...]) -> Plan:
    """Return the plan before anything is predicted."""
    step = as_run(problem.graph, activations)
    regions = _regions(step, buckets)
    return Plan(
        name=problem.name,
        graph=fingerprint(problem.graph),
        cluster=problem.cluster.name,
        num_copies=problem.num_copies,
        budget_bytes=problem.budget_bytes,
        base_bytes=problem.base_bytes,
        buckets=tuple(buckets),
        placements=homes,
        activations=activations,
        update=update_time(problem, homes),
        regions=regions,
        schedules=(Schedule(rank=0, actions=tuple(_actions(step, regions, buckets, homes))),),
        decisions=(),
        prediction=_NOTHING,
        planner=IN_STEP,
    )


_NOTHING = Prediction(
    step_s=0.0, exposed_s=0.0, hidden_share=1.0, device_peak_bytes=0, device_peak_at=OpId(""), host_peak_bytes=0
)


def _on_device(bucket: Bucket, *, resident: bool) -> Placement:
    return Placement(bucket=bucket.id, param=Tier.DEVICE, optim=Tier.DEVICE, resident=resident)


def _released(bucket: Bucket, home: Placement) -> Placement:
    """A bucket of one rank on the device has nothing to release."""
    is_gathered = bucket.is_sharded or home.param is not Tier.DEVICE
    return replace(home, resident=home.resident and not is_gathered)


def _regions(graph: StepGraph, buckets: Sequence[Bucket]) -> tuple[Region, ...]:
    """One region for each half."""
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
    placed = list(zip(buckets, homes, strict=True))
    moving = [(bucket, home) for bucket, home in placed if bucket.is_sharded or home.param is not Tier.DEVICE]
    there: list[str] = []
    actions: list[tuple[Verb, str]] = []
    for number, region in enumerate(regions):
        missing = [bucket.id for bucket, _ in moving if bucket.id not in there]
        actions += [(Verb.GATHER, name) for name in missing]
        actions += [(Verb.WAIT, name) for name in missing]
        actions.append((Verb.RUN, region.id))
        is_last = number == len(regions) - 1
        there = [] if is_last else [bucket.id for bucket, home in moving if home.resident]
        actions += [(Verb.RELEASE, bucket.id) for bucket, _ in moving if bucket.id not in there]
    if any(op.phase is Phase.UPDATE for op in graph.ops):
        trained = {storage.of for storage in graph.storages if storage.kind is Kind.GRAD}
        for bucket, home in placed:
            if bucket.trainable and not trained.isdisjoint(bucket.params):
                actions += _reduced(bucket, home)
        actions += [(Verb.UPDATE, bucket.id) for bucket in buckets if bucket.trainable]
    return [Action(verb=verb, what=what) for verb, what in actions]


def _reduced(bucket: Bucket, home: Placement) -> list[tuple[Verb, str]]:
    """What becomes of a bucket's gradients before the next bucket's begin."""
    actions = [(Verb.REDUCE, str(bucket.id))]
    is_away = home.param is not Tier.DEVICE
    actions += [(Verb.OFFLOAD, grad_of(bucket.id))] if is_away else []
    return actions + ([(Verb.WAIT, grad_of(bucket.id))] if is_away or bucket.is_sharded else [])


def _require_room(problem: Problem, made: Plan, because: str) -> None:
    """Raise NoFeasiblePlan, with `because`, where `made` does not fit the budgets of `problem`."""
    peak = plan_timeline(problem.graph, made).peak
    if peak.nbytes > problem.budget_bytes:
        # An op that runs again has the name of none of the graph's.
        op = next(op for op in as_run(problem.graph, made.activations).ops if op.id == peak.op)
        by_kind = {kind.value: nbytes for kind, nbytes in peak.by_kind.items()}
        where = op.source or op.module
        raise NoFeasiblePlan(op.id, where, problem.budget_bytes, peak.nbytes, by_kind, because=because)
    needed_bytes = host_bytes(made)
    if needed_bytes > problem.host_budget_bytes:
        base_bytes = problem.host_base_bytes
        budget_bytes = problem.host_budget_bytes + base_bytes
        raise NoFeasiblePlan("", "", budget_bytes, needed_bytes + base_bytes, {}, "host", because=because)
