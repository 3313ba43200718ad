"""Count the collectives of a plan's step and their bytes, under the labels of a ledger, to compare with a run.

```text
  all-gather b1    fill the flat buffer with the shards of all ranks
  reduce b1        reduce-scatter the gradients in the flat buffer
  all-reduce b0    sum gradients of an unsharded bucket over the ranks of a copy
  average b1       average the reduced gradients over the copies
```

The bytes of a collective are the bytes of its whole buffer.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from elixir_compile.ir import Bucket, BucketRef, Kind, Plan, StepGraph, Verb


class Traffic(NamedTuple):
    """The number of runs of a collective in a step, and their total bytes."""

    times: int
    nbytes: int


def collectives(graph: StepGraph, plan: Plan, rank: int = 0) -> Mapping[str, Traffic]:
    """Return the collectives of `rank` of each copy in a step of `plan`, by label; none if there is a single rank."""
    buckets = {bucket.id: bucket for bucket in plan.buckets}
    schedule = next((schedule for schedule in plan.schedules if schedule.rank == rank), plan.schedules[0])
    times, nbytes = Counter[str](), Counter[str]()
    for action in schedule.actions:
        if action.verb in (Verb.GATHER, Verb.REDUCE) and isinstance(action.target, BucketRef):
            for label, own_bytes in _of(graph, plan, buckets[action.target.bucket], action.verb):
                times[label] += 1
                nbytes[label] += own_bytes
    return {label: Traffic(count, nbytes[label]) for label, count in sorted(times.items())}


def _of(graph: StepGraph, plan: Plan, bucket: Bucket, verb: Verb) -> Iterator[tuple[str, int]]:
    """Yield the label and the bytes of each collective of the action `verb` on `bucket`."""
    if verb is Verb.GATHER:
        if bucket.is_sharded:
            yield f"all-gather {bucket.id}", bucket.flat_nbytes
        return
    own_bytes = bucket.reduced_nbytes if bucket.is_sharded else bucket.grad_ratio * _trained_bytes(graph, bucket)
    if bucket.is_sharded:
        yield f"reduce {bucket.id}", bucket.flat_grad_nbytes
    elif plan.num_ranks > 1:
        yield f"all-reduce {bucket.id}", own_bytes
    if plan.num_copies > 1:
        yield f"average {bucket.id}", own_bytes


def _trained_bytes(graph: StepGraph, bucket: Bucket) -> int:
    """Return the bytes of the parameters of `bucket` for which `graph` has gradients."""
    trained = {storage.of for storage in graph.storages if storage.kind is Kind.GRAD}
    return sum(storage.nbytes for storage in graph.storages if storage.id in trained.intersection(bucket.params))
