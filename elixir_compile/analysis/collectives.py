"""The collectives of one step, under the labels by which a ledger counts them.

```text
  all-gather b1    into the flat buffer              reduce b1      the reduce-scatter of its gradient, from such a one
  all-reduce b0    gradients that each rank has whole, over the ranks of one copy
  average b1       of the part, or of what each rank has whole, over the copies
```

Bytes are those of the whole buffer that a collective fills, reads or both.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from elixir_compile.ir import Bucket, Kind, Plan, StepGraph, Verb


class Traffic(NamedTuple):
    """How often a collective runs, and its bytes in all."""

    times: int
    nbytes: int


def collectives(graph: StepGraph, plan: Plan, rank: int = 0) -> Mapping[str, Traffic]:
    """Return what `rank` of each copy runs in one step of `plan`, by label; nothing on one rank."""
    buckets: dict[str, Bucket] = {bucket.id: bucket for bucket in plan.buckets}
    schedule = next((schedule for schedule in plan.schedules if schedule.rank == rank), plan.schedules[0])
    times, nbytes = Counter[str](), Counter[str]()
    for action in schedule.actions:
        if action.verb in (Verb.GATHER, Verb.REDUCE) and action.what in buckets:
            for label, own_bytes in _of(graph, plan, buckets[action.what], action.verb):
                times[label] += 1
                nbytes[label] += own_bytes
    return {label: Traffic(count, nbytes[label]) for label, count in sorted(times.items())}


def _of(graph: StepGraph, plan: Plan, bucket: Bucket, verb: Verb) -> Iterator[tuple[str, int]]:
    """Yield the label and the bytes of each collective that `verb` means for `bucket`."""
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
    """Bytes of the parameters that the graph has a gradient of."""
    trained = {storage.of for storage in graph.storages if storage.kind is Kind.GRAD}
    return sum(storage.nbytes for storage in graph.storages if storage.id in trained.intersection(bucket.params))
