"""The bytes that works of a step move, as a ledger counts them in a run.

```text
  gather b1 on h2d            the parameters of the bucket, or the padded shard of a rank
  gather b1 on gather         the flat buffer of all ranks
  offload b1.grad on d2h      the gradients that the step makes
  gather b1.state on h2d      statistics, and parameters and gradients too if their home is the host
```
"""

from collections.abc import Mapping

from elixir_compile.ir.bucket import Bucket, Placement
from elixir_compile.ir.cost import ring_s, stream_bytes
from elixir_compile.ir.graph import StepGraph
from elixir_compile.ir.hardware import Cluster
from elixir_compile.ir.kinds import Kind, Saving
from elixir_compile.ir.plan import Plan, TensorTraffic
from elixir_compile.step.laps import laps_of
from elixir_compile.step.lean_calls import num_full_calls
from elixir_compile.step.recompute import as_run
from elixir_compile.step.slices import WHOLE, crossings
from elixir_compile.step.works import Deed, Do


def traffic(graph: StepGraph, plan: Plan) -> Mapping[tuple[Deed, str], int]:
    """Return the bytes that each work of rank 0 moves, by what it does and its bucket or group, in a step of `plan` for
    `graph`."""
    trained = {storage.of for storage in graph.storages if storage.kind is Kind.GRAD}
    param_bytes = {s.id: s.nbytes for s in graph.storages if s.kind is Kind.PARAM and s.id in trained}
    found: dict[tuple[Deed, str], int] = {}
    for bucket, placement in zip(plan.buckets, plan.placements, strict=True):
        trained_bytes = sum(param_bytes.get(name, 0) for name in bucket.params)
        found |= {(do, bucket.id): nbytes for do, nbytes in _of_bucket(bucket, placement, trained_bytes).items()}
    away = [group for group in plan.activations if group.saving is Saving.OFFLOAD]
    laps = laps_of(plan)
    sliced = crossings(as_run(graph, plan.activations, laps), away) if away and laps else {}
    for group in away:
        crosses = sliced.get(group.id, WHOLE)
        for whole, slices, crossing in (
            (Do.OFFLOAD_GROUP, Do.SLICES_LEAVE, crosses.leaving),
            (Do.PREFETCH, Do.SLICES_ARRIVE, crosses.arriving),
        ):
            beside_bytes = 0 if crossing is None else crossing.beside_bytes
            found[slices, group.id], found[whole, group.id] = beside_bytes, group.nbytes - beside_bytes
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


def _of_bucket(bucket: Bucket, placement: Placement, trained_bytes: int) -> Mapping[Deed, int]:
    """Return the bytes of all that may be done with `bucket`.

    `trained_bytes` are the bytes of its parameters for which the step makes gradients.
    """
    own_grad_bytes = bucket.shard_grad_nbytes() if bucket.is_sharded else bucket.grad_ratio * trained_bytes
    there_bytes, back_bytes = stream_bytes(bucket, placement.param) if bucket.trainable else (0, 0)
    return {
        Do.GATHER: bucket.flat_shard_nbytes,
        Do.RETURN: bucket.flat_shard_nbytes,
        Do.STAGE: bucket.shard_nbytes(),
        Do.ALL_GATHER: bucket.flat_nbytes,
        Do.REDUCE: bucket.flat_grad_nbytes if bucket.is_sharded else own_grad_bytes,
        Do.AVERAGE: bucket.reduced_nbytes if bucket.is_sharded else own_grad_bytes,
        Do.OFFLOAD: own_grad_bytes,
        Do.STAGE_GRADIENT: own_grad_bytes,
        Do.STREAM_THERE: there_bytes,
        Do.STREAM_BACK: back_bytes,
        Do.READ: bucket.shard_state_nbytes(),
        Do.WRITE: bucket.shard_state_nbytes(),
    }
