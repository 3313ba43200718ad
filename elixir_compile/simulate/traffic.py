"""The bytes that a step of a plan moves on each lane, by label, as a ledger counts them in a run.

```text
  gather b1 on h2d            the parameters of the bucket, or the padded shard of a rank
  gather b1 on gather         the flat buffer of all ranks
  offload b1.grad on d2h      the gradients that the step makes
  gather b1.state on h2d      statistics, and parameters and gradients too if their home is the host
```
"""

from collections.abc import Iterator, Mapping

from elixir_compile.analysis.laps import laps_of
from elixir_compile.analysis.lean_calls import num_full_calls
from elixir_compile.analysis.recompute import as_run
from elixir_compile.analysis.slices import WHOLE, Crossing, crossings
from elixir_compile.cost import ring_s, stream_bytes
from elixir_compile.hardware import Cluster
from elixir_compile.ir.bucket import Bucket, Placement
from elixir_compile.ir.graph import StepGraph
from elixir_compile.ir.kinds import InnerVerb, Kind, Lane, Saving, Tier, Verb
from elixir_compile.ir.plan import Plan, TensorTraffic
from elixir_compile.ir.schedule import BucketRef, GradientRef, GroupRef, StateRef, label

Work = tuple[Lane, str, bool]
"""A lane, a label, and whether the bytes pass while a lap runs."""


def traffic(graph: StepGraph, plan: Plan) -> Mapping[Work, int]:
    """Return the bytes that each action of rank 0 moves on a lane each time, in a step of `plan` for `graph`."""
    trained = {storage.of for storage in graph.storages if storage.kind is Kind.GRAD}
    param_bytes = {s.id: s.nbytes for s in graph.storages if s.kind is Kind.PARAM and s.id in trained}
    found: dict[Work, int] = {}
    for bucket, placement in zip(plan.buckets, plan.placements, strict=True):
        trained_bytes = sum(param_bytes.get(name, 0) for name in bucket.params)
        for lane, name, nbytes in _of_bucket(bucket, placement, trained_bytes):
            found[lane, name, False] = nbytes
    away = [group for group in plan.activations if group.saving is Saving.OFFLOAD]
    laps = laps_of(plan)
    sliced = crossings(as_run(graph, plan.activations, laps), away) if away and laps else {}
    for group in away:
        crosses = sliced.get(group.id, WHOLE)
        for lane, verb, crossing in (
            (Lane.D2H, Verb.OFFLOAD, crosses.leaving),
            (Lane.H2D, Verb.PREFETCH, crosses.arriving),
        ):
            name = label(verb, GroupRef(group.id))
            found[lane, name, True] = beside_bytes = _beside_bytes(crossing)
            found[lane, name, False] = group.nbytes - beside_bytes
    return found


def tensor_traffic(graph: StepGraph, plan: Plan, cluster: Cluster) -> TensorTraffic | None:
    """Return the traffic of all calls of a step of `plan` for `graph` along the tensor axis of `cluster`; None if there
    is no such axis."""
    if cluster.tensor is None:
        return None
    num_full = plan.calls.num if plan.lean is None else num_full_calls(plan.calls, plan.lean.num_full)
    programs = [(num_full, plan)] + ([] if plan.lean is None else [(plan.calls.num - num_full, plan.of_lean_calls())])
    runs = [
        (num, op, op.ring)
        for num, own in programs
        for op in as_run(graph, own.activations, laps_of(own)).ops
        if op.ring is not None
    ]
    return TensorTraffic(
        num_ranks=cluster.tensor.num_ranks,
        num_collectives=sum(num * op.times for num, op, _ in runs),
        nbytes=sum(num * ring.nbytes for num, _, ring in runs),
        run_s=sum(num * ring_s(op, cluster.tensor) for num, op, _ in runs),
    )


def _beside_bytes(crossing: Crossing | None) -> int:
    return 0 if crossing is None else crossing.beside_bytes


def _of_bucket(bucket: Bucket, placement: Placement, trained_bytes: int) -> Iterator[tuple[Lane, str, int]]:
    """Yield the lane, the label and the bytes of all that may be done with `bucket`.

    `trained_bytes` are the bytes of its parameters for which the step makes gradients.
    """
    params, grads, state = BucketRef(bucket.id), GradientRef(bucket.id), StateRef(bucket.id)
    own_grad_bytes = bucket.shard_grad_nbytes() if bucket.is_sharded else bucket.grad_ratio * trained_bytes
    reduced_bytes = bucket.reduced_nbytes if bucket.is_sharded else own_grad_bytes
    there_bytes, back_bytes = stream_bytes(bucket, placement.param) if bucket.trainable else (0, 0)
    yield Lane.H2D, label(Verb.GATHER, params), bucket.flat_shard_nbytes
    yield Lane.D2H, label(Verb.OFFLOAD, params), bucket.shard_nbytes()
    yield Lane.GATHER, label(Verb.GATHER, params), bucket.flat_nbytes
    yield Lane.REDUCE, label(Verb.REDUCE, params), bucket.flat_grad_nbytes if bucket.is_sharded else own_grad_bytes
    yield Lane.REDUCE, label(InnerVerb.AVERAGE, params), reduced_bytes
    yield Lane.D2H, label(Verb.OFFLOAD, grads), own_grad_bytes
    yield Lane.H2D, label(Verb.GATHER, state), there_bytes
    yield Lane.D2H, label(Verb.OFFLOAD, state), back_bytes
    if placement.optim is Tier.DISK:
        yield Lane.DISK, label(InnerVerb.READ, state), bucket.shard_state_nbytes()
        yield Lane.DISK, label(InnerVerb.WRITE, state), bucket.shard_state_nbytes()
