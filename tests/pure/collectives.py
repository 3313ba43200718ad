"""Count the collectives of a plan's step and their bytes, under the labels of a ledger, to compare with a run.

```text
  gather b1        fill the flat buffer with the shards of all ranks
  reduce b1        reduce-scatter the gradients in the flat buffer
  reduce b0        sum gradients of an unsharded bucket over the ranks of a copy
  average b1       average the reduced gradients over the copies
```

The bytes of a collective are the bytes of its whole buffer.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from elixir_compile.ir import Bucket, BucketRef, Kind, Lane, Plan, StepGraph, Verb


class Traffic(NamedTuple):
    """The number of runs of a collective in a step, and their total bytes."""

    times: int
    nbytes: int


def collectives(graph: StepGraph, plan: Plan, rank: int = 0) -> Mapping[tuple[Lane, str], Traffic]:
    """Return the collectives of `rank` of each copy in a step of `plan`, by lane and label.

    There are none if there is a single rank.
    """
    buckets = {bucket.id: bucket for bucket in plan.buckets}
    schedule = next((schedule for schedule in plan.schedules if schedule.rank == rank), plan.schedules[0])
    times, nbytes = Counter[tuple[Lane, str]](), Counter[tuple[Lane, str]]()
    for action in schedule.actions:
        if action.verb in (Verb.GATHER, Verb.REDUCE) and isinstance(action.target, BucketRef):
            for lane, label, own_bytes in _of(graph, plan, buckets[action.target.bucket], action.verb):
                times[lane, label] += 1
                nbytes[lane, label] += own_bytes
    return {work: Traffic(count, nbytes[work]) for work, count in sorted(times.items())}


def _of(graph: StepGraph, plan: Plan, bucket: Bucket, verb: Verb) -> Iterator[tuple[Lane, str, int]]:
    """Yield the lane, the label and the bytes of each collective of the action `verb` on `bucket`."""
    if verb is Verb.GATHER:
        if bucket.is_sharded:
            yield Lane.GATHER, f"gather {bucket.id}", bucket.flat_nbytes
        return
    own_bytes = bucket.reduced_nbytes if bucket.is_sharded else bucket.grad_ratio * _trained_bytes(graph, bucket)
    if bucket.is_sharded:
        yield Lane.REDUCE, f"reduce {bucket.id}", bucket.flat_grad_nbytes
    elif plan.num_ranks > 1:
        yield Lane.REDUCE, f"reduce {bucket.id}", own_bytes
    if plan.num_copies > 1:
        yield Lane.REDUCE, f"average {bucket.id}", own_bytes


def _trained_bytes(graph: StepGraph, bucket: Bucket) -> int:
    """Return the bytes of the parameters of `bucket` for which `graph` has gradients."""
    trained = {storage.of for storage in graph.storages if storage.kind is Kind.GRAD}
    return sum(storage.nbytes for storage in graph.storages if storage.id in trained.intersection(bucket.params))
