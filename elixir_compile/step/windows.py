"""Find the windows of ops for which a bucket is gathered, and the action after which it may be updated early."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from elixir_compile.ir import (
    Bucket,
    BucketId,
    BucketRef,
    GradientRef,
    Phase,
    Placement,
    Plan,
    RegionId,
    RegionRef,
    StepGraph,
    Target,
    Tier,
    Verb,
)

SMALL_SHARE = 16
"""A window of a bucket does not end at uses of another bucket with less than a sixteenth of its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A stretch of ops, from index `first` to `last` (included), for which a bucket is gathered once in a phase."""

    bucket: BucketId
    phase: Phase
    first: int
    last: int


def use_windows(graph: StepGraph, buckets: Sequence[Bucket]) -> Mapping[BucketId, tuple[Window, ...]]:
    """Return the windows of every bucket in the order of ops. The update op is not a use."""
    uses = _uses(graph, buckets)
    # Bytes of the largest bucket used by each op. Ops between consecutive uses of a bucket use only other buckets.
    largest_bytes = np.full(len(graph.ops), -1, dtype=np.int64)
    for bucket in buckets:
        indices = uses[bucket.id]
        largest_bytes[indices] = np.maximum(largest_bytes[indices], bucket.nbytes)
    return {bucket.id: _windows(graph, bucket, uses[bucket.id], largest_bytes) for bucket in buckets}


def one_in_each_phase(windows: Sequence[Window]) -> tuple[Window, ...]:
    """Return `windows` of a bucket, in order, with all of a phase joined into one."""
    joined: dict[Phase, Window] = {}
    for window in windows:
        first = joined.get(window.phase, window).first
        joined[window.phase] = replace(window, first=first)
    return tuple(joined.values())


def _uses(graph: StepGraph, buckets: Sequence[Bucket]) -> dict[BucketId, list[int]]:
    """Return the indices of the forward and backward ops reading parameters of each bucket."""
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
    """Return whether consecutive uses of `bucket`, at the ops `last` and `index`, are in different windows."""
    if graph.ops[last].phase is not graph.ops[index].phase:
        return True
    between = largest_bytes[last + 1 : index]
    largest = int(between.max()) if len(between) else -1
    return largest >= 0 and largest * SMALL_SHARE >= bucket.nbytes


def closing_verbs(plan: Plan, rank: int = 0) -> Mapping[BucketId, Verb]:
    """Return the verb of the last action on each bucket, after which it may be updated in the backward.

    It is REDUCE if the parameters are on the device, else OFFLOAD of the gradient or the RELEASE after it. Buckets that
    are read later are left out, and those with another last action in lean calls: either kind may be the last call.
    """
    actions = ((action.verb, action.target) for action in plan.schedules[rank].actions)
    found = closing_of(actions, {region.id: region.buckets for region in plan.regions}, plan.placements)
    lean = found if plan.lean is None else closing_verbs(plan.of_lean_calls(), rank)
    return {bucket: verb for bucket, verb in found.items() if lean.get(bucket) is verb}


def closing_of(
    actions: Iterable[tuple[Verb, Target]],
    regions: Mapping[RegionId, Sequence[BucketId]],
    placements: Iterable[Placement],
) -> Mapping[BucketId, Verb]:
    """Return `closing_verbs` of `actions`, pairs of verb and target; `regions` lists the buckets that each region
    reads."""
    on_device = {placed.bucket for placed in placements if placed.param is Tier.DEVICE}
    closing: dict[BucketId, Verb] = {}
    reduced: set[BucketId] = set()
    reread: set[BucketId] = set()
    banned: set[BucketId] = set()
    for verb, target in actions:
        if isinstance(target, RegionRef):
            reread.update(read for read in regions[target.region] if read in reduced)
        elif isinstance(target, GradientRef):
            if verb is Verb.OFFLOAD and target.bucket not in on_device:
                closing[target.bucket] = verb
        elif isinstance(target, BucketRef) and verb is Verb.REDUCE:
            reduced.add(target.bucket)
            if target.bucket in on_device:
                closing[target.bucket] = verb
        elif isinstance(target, BucketRef) and verb is Verb.RELEASE and target.bucket in reduced:
            if closing.pop(target.bucket, None) is Verb.OFFLOAD:
                closing[target.bucket] = verb
                reread.discard(target.bucket)
            else:
                banned.add(target.bucket)
    return {bucket: verb for bucket, verb in closing.items() if bucket not in reread | banned}
