"""Use windows: the stretches of ops for which a bucket is worth gathering.

```text
  op              0  1  2  3  4  5  6
  embed (tied)    u                 u     two windows: layers are used in between
  layer 0            u     u              one window: nothing but its own ops in between
  layer 1                     u  u        one window
```

Two uses of a bucket belong to one window unless an op strictly between them uses another bucket. A bucket of less than
a sixteenth of the bytes does not end a window: gathering the large one twice costs more than keeping it for the small
one's sake.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elixir_compile.ir import Bucket, BucketId, Phase, StepGraph

SMALL_SHARE = 16
"""A bucket with less than one part in this many of another's bytes does not end that bucket's windows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Ops `first` to `last`, indices into the graph's ops and both included, between which one phase uses a bucket."""

    bucket: BucketId
    phase: Phase
    first: int
    last: int


def use_windows(graph: StepGraph, buckets: Sequence[Bucket]) -> Mapping[BucketId, tuple[Window, ...]]:
    """Return the windows of every bucket in op order, those of the forward first; the update is not a use."""
    uses = _uses(graph, buckets)
    # Bytes of the largest bucket that each op uses: an op between two uses of a bucket uses others only.
    largest_bytes = np.full(len(graph.ops), -1, dtype=np.int64)
    for bucket in buckets:
        indices = uses[bucket.id]
        largest_bytes[indices] = np.maximum(largest_bytes[indices], bucket.nbytes)
    return {bucket.id: _windows(graph, bucket, uses[bucket.id], largest_bytes) for bucket in buckets}


def _uses(graph: StepGraph, buckets: Sequence[Bucket]) -> dict[BucketId, list[int]]:
    """Per bucket, the forward and backward ops that read any of its parameters."""
    owners = {param: bucket.id for bucket in buckets for param in bucket.params}
    uses: dict[BucketId, list[int]] = {bucket.id: [] for bucket in buckets}
    for index, op in enumerate(graph.ops):
        if op.phase is Phase.UPDATE:
            continue
        for owner in {owners[name] for name in op.reads if name in owners}:
            uses[owner].append(index)
    return uses


def _windows(
    graph: StepGraph, bucket: Bucket, indices: Sequence[int], largest_bytes: NDArray[np.int64]
) -> tuple[Window, ...]:
    found: list[Window] = []
    first = last = -1
    for index in indices:
        if first >= 0 and _are_apart(graph, bucket, last, index, largest_bytes):
            found.append(Window(bucket=bucket.id, phase=graph.ops[first].phase, first=first, last=last))
            first = index
        first = index if first < 0 else first
        last = index
    if first >= 0:
        found.append(Window(bucket=bucket.id, phase=graph.ops[first].phase, first=first, last=last))
    return tuple(found)


def _are_apart(graph: StepGraph, bucket: Bucket, last: int, index: int, largest_bytes: NDArray[np.int64]) -> bool:
    """Whether two consecutive uses of `bucket`, at `last` and `index`, belong to two windows."""
    if graph.ops[last].phase is not graph.ops[index].phase:
        return True
    between = largest_bytes[last + 1 : index]
    largest = int(between.max()) if len(between) else -1
    return largest >= 0 and largest * SMALL_SHARE >= bucket.nbytes
