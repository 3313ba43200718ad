"""Turn levels and moves into regions and the actions between them.

    gather (this window's and prefetches)   wait   run   release   offload activations   wait (activations are gone)
    reduce   wait (previous gradient)   offload

A region begins at each op before which the schedule acts: at the first use and after the last use of a gathered copy,
after the op that completes the gradients of a bucket, after activations begin to leave or have left, at their first use
in the backward, and at the first op of the backward. A region also begins with each equal layer, unless the schedule
acts near its start in any case.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from elixir_compile.ir import Action, BucketId, GradientRef, Phase, Region, RegionId, RegionRef, Schedule, Target, Verb
from elixir_compile.search.space.facts import Facts
from elixir_compile.search.space.levels import Level, is_gathered
from elixir_compile.search.space.residency import Moves


class Cut(NamedTuple):
    """One region as op indices, both included."""

    id: RegionId
    first: int
    last: int


def cut_regions(facts: Facts, levels: Sequence[Level], moves: Moves) -> list[Cut]:
    """Return the regions in order; each op of the forward and the backward is in exactly one region."""
    starts = {0, facts.num_forward}
    for residency in moves.residencies:
        starts.add(residency.first)
        if residency.bucket < len(facts.buckets):
            starts.add(residency.last + 1)
    for number, end in moves.leave_ends.items():
        starts |= {facts.offload_intervals[number].leave + 1, end + 1}
    for bucket, gradients in enumerate(facts.gradients):
        spec = facts.buckets[bucket]
        # Gradients of each of several calls are added to their sums, and freed, as soon as they are complete.
        has_moment = facts.has_moment(bucket)
        leaves = is_gathered(spec, levels[bucket]) or has_moment or facts.problem.calls.num > 1
        if gradients is not None and leaves:
            starts.add(gradients.complete + 1)
    if facts.laps:
        starts |= {start for span in facts.spans for start in (span.first, span.last + 1)}
    else:
        starts |= _layer_starts(facts, sorted(starts))
    ordered = sorted(start for start in starts if start < facts.num_run)
    cuts: list[Cut] = []
    num_forward = bisect_left(ordered, facts.num_forward)
    for i, first in enumerate(ordered):
        name = f"fwd.{i}" if i < num_forward else f"bwd.{i - num_forward}"
        last = ordered[i + 1] - 1 if i + 1 < len(ordered) else facts.num_run - 1
        cuts.append(Cut(RegionId(name), first, last))
    return cuts


def _layer_starts(facts: Facts, acting: Sequence[int]) -> set[int]:
    """Return the first ops of the regions of equal layers, given the starts of regions at which the plan acts.

    A layer gets no start of its own if a start in `acting` lies between its first op and its first matrix product. If
    the plan acts nowhere but at the start of a phase, regions begin at the product, so that the ops between two layers
    stay in one kernel.
    """
    acts = any(start not in (0, facts.num_forward) for start in acting)
    return {
        span.first if acts else span.product
        for span in facts.spans
        if bisect_left(acting, span.first) == bisect_left(acting, span.product + 1)
    }


def step_actions(facts: Facts, levels: Sequence[Level], moves: Moves, cuts: Sequence[Cut]) -> list[tuple[Verb, Target]]:
    """Return the actions of a step as pairs of a verb and its target."""
    buckets, grads, groups = facts.targets.buckets, facts.targets.gradients, facts.targets.groups
    moving = (*buckets, *groups)
    leaving = _leaving_activations(facts, moves)
    gathers: defaultdict[int, list[tuple[Verb, Target]]] = defaultdict(list)
    waits: defaultdict[int, list[tuple[Verb, Target]]] = defaultdict(list)
    releases: defaultdict[int, list[tuple[Verb, Target]]] = defaultdict(list)
    for residency in moves.residencies:
        is_bucket, target = residency.bucket < len(buckets), moving[residency.bucket]
        gathers[residency.gather].append((Verb.GATHER if is_bucket else Verb.PREFETCH, target))
        waits[residency.first].append((Verb.WAIT, target))
        if is_bucket:
            releases[residency.last].append((Verb.RELEASE, target))
    complete = sorted((own.complete, bucket) for bucket, own in enumerate(facts.gradients) if own is not None)
    under_way: dict[int, int] = {}
    actions: list[tuple[Verb, Target]] = []
    done = 0
    for cut in cuts:
        actions += gathers[cut.first]
        actions += waits[cut.first]
        actions.append((Verb.RUN, RegionRef(cut.id)))
        actions += releases[cut.last]
        actions += leaving[cut.last]
        while done < len(complete) and complete[done][0] <= cut.last:
            op, bucket = complete[done]
            leaves = bucket in moves.grad_ends
            if not (leaves or facts.has_moment(bucket)):
                actions.append((Verb.REDUCE, buckets[bucket]))
            else:
                ending = [grads[other] for other, end in under_way.items() if end <= op]
                actions += _reduce(facts, bucket, ending, goes=leaves and levels[bucket].has_param_on_host)
                under_way = {other: end for other, end in under_way.items() if end > op}
            if leaves:
                under_way[bucket] = moves.grad_ends[bucket]
            done += 1
    actions += [(Verb.WAIT, grads[bucket]) for bucket in under_way]
    if facts.is_training:
        actions += [
            (Verb.UPDATE, target) for target, bucket in zip(buckets, facts.buckets, strict=True) if bucket.trainable
        ]
    return actions


def _leaving_activations(facts: Facts, moves: Moves) -> Mapping[int, list[tuple[Verb, Target]]]:
    """Return per op the offloads started after it, then the waits for offloads due by then."""
    found: defaultdict[int, list[tuple[Verb, Target]]] = defaultdict(list)
    for interval, group in zip(facts.offload_intervals, facts.targets.groups, strict=True):
        found[interval.leave].append((Verb.OFFLOAD, group))
    for number, end in moves.leave_ends.items():
        found[end].append((Verb.WAIT, facts.targets.groups[number]))
    return found


def _reduce(facts: Facts, bucket: int, ending: Sequence[GradientRef], *, goes: bool) -> list[tuple[Verb, Target]]:
    """Return the reduce of a bucket's gradients, their offload if that `goes` to the host, and the waits for the
    earlier gradients in `ending`, which make room for the buffers of the reduce.

    On one rank the reduce comes before the waits: there it has no buffers and is no transfer.
    """
    waits = [(Verb.WAIT, grad) for grad in ending]
    reduces = [(Verb.REDUCE, facts.targets.buckets[bucket])]
    offloads = [(Verb.OFFLOAD, facts.targets.gradients[bucket])] if goes else []
    return [*waits, *reduces, *offloads] if facts.has_moment(bucket) else [*reduces, *waits, *offloads]


def regions(facts: Facts, cuts: Sequence[Cut]) -> tuple[Region, ...]:
    """Return `cuts` as regions of a plan, each with the buckets read by its ops."""
    ops = facts.graph.ops
    used = _uses(facts)
    micro_batches = {lap.first: lap.micro_batches for lap in facts.laps}
    return tuple(
        Region(
            id=cut.id,
            phase=Phase.FORWARD if cut.first < facts.num_forward else Phase.BACKWARD,
            first=ops[cut.first].id,
            last=ops[cut.last].id,
            buckets=tuple(
                name
                for name, indices in used
                if (at := bisect_left(indices, cut.first)) < len(indices) and indices[at] <= cut.last
            ),
            micro_batches=micro_batches.get(ops[cut.first].id, 1),
        )
        for cut in cuts
    )


def schedule(actions: Sequence[tuple[Verb, Target]]) -> Schedule:
    """Return the pairs of `step_actions` as the schedule of rank 0."""
    return Schedule(rank=0, actions=tuple(Action(verb=verb, target=target) for verb, target in actions))


def _uses(facts: Facts) -> list[tuple[BucketId, list[int]]]:
    """Return per bucket the sorted indices of the forward and backward ops reading it."""
    owner = {param: i for i, bucket in enumerate(facts.buckets) for param in bucket.params}
    indices: list[list[int]] = [[] for _ in facts.buckets]
    for i, op in enumerate(facts.graph.ops[: facts.num_run]):
        for bucket in {owner[name] for name in op.reads if name in owner}:
            indices[bucket].append(i)
    return [(bucket.id, reads) for bucket, reads in zip(facts.buckets, indices, strict=True)]
