"""Levels and prefetch distances into regions and the actions around them.

    gather (this window's and prefetches)   wait   run   release   offload activations   wait (activations are gone)
    reduce   wait (previous gradient)   offload

Regions are cut where the schedule acts: before a host bucket's gathered copy is used, after its last use, and where its
gradients are complete; where activations leave, are gone, and are needed again; and between forward and backward.
Besides they are cut where equal layers begin, unless the schedule acts there in any case.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from elixir_compile.ir import Action, Bucket, BucketId, Phase, Region, RegionId, Schedule, Verb, grad_of
from elixir_compile.search.space.facts import Facts
from elixir_compile.search.space.levels import Level, is_gathered
from elixir_compile.search.space.residency import Moves


class Cut(NamedTuple):
    """One region as op indices, both included."""

    id: RegionId
    first: int
    last: int


def cut_regions(facts: Facts, levels: Sequence[Level], moves: Moves) -> list[Cut]:
    """Return the regions, covering every op of the forward and the backward once, in order."""
    starts = {0, facts.num_forward}
    for stay in moves.residencies:
        starts.add(stay.first)
        if stay.bucket < len(facts.buckets):
            starts.add(stay.last + 1)
    for number, end in moves.leave_ends.items():
        starts |= {facts.offload_intervals[number].leave + 1, end + 1}
    for bucket, gradients in enumerate(facts.gradients):
        spec = facts.buckets[bucket]
        if gradients is not None and (is_gathered(spec, levels[bucket]) or spec.is_packed):
            starts.add(gradients.complete + 1)
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
    """Return where the regions of layers begin, of those with none of the starts `acting` on the way to their product.

    A phase begins in any case; a plan that acts nowhere else leaves the kernels between two layers whole.
    """
    acts = any(start not in (0, facts.num_forward) for start in acting)
    return {
        span.first if acts else span.product
        for span in facts.spans
        if bisect_left(acting, span.first) == bisect_left(acting, span.product + 1)
    }


def program(facts: Facts, levels: Sequence[Level], moves: Moves, cuts: Sequence[Cut]) -> list[tuple[Verb, str]]:
    """Return the actions of one step as (verb, what) pairs."""
    num_buckets = len(facts.buckets)
    names = [
        *(str(bucket.id) for bucket in facts.buckets),
        *(str(absence.group) for absence in facts.offload_intervals),
    ]
    leaving = _leaving_activations(facts, moves)
    gathers: defaultdict[int, list[tuple[Verb, str]]] = defaultdict(list)
    waits: defaultdict[int, list[str]] = defaultdict(list)
    releases: defaultdict[int, list[str]] = defaultdict(list)
    for stay in moves.residencies:
        is_bucket = stay.bucket < num_buckets
        gathers[stay.gather].append((Verb.GATHER if is_bucket else Verb.PREFETCH, names[stay.bucket]))
        waits[stay.first].append(names[stay.bucket])
        if is_bucket:
            releases[stay.last].append(names[stay.bucket])
    complete = sorted((grads.complete, bucket) for bucket, grads in enumerate(facts.gradients) if grads is not None)
    under_way: dict[str, int] = {}
    actions: list[tuple[Verb, str]] = []
    done = 0
    for cut in cuts:
        actions += gathers[cut.first]
        actions += [(Verb.WAIT, name) for name in waits[cut.first]]
        actions.append((Verb.RUN, cut.id))
        actions += [(Verb.RELEASE, name) for name in releases[cut.last]]
        actions += leaving[cut.last]
        while done < len(complete) and complete[done][0] <= cut.last:
            op, bucket = complete[done]
            if bucket not in moves.grad_ends:
                actions.append((Verb.REDUCE, names[bucket]))
            else:
                ending = [grad for grad, end in under_way.items() if end <= op]
                actions += _leave(facts.buckets[bucket], levels[bucket], ending)
                under_way = {grad: end for grad, end in under_way.items() if end > op}
                under_way[grad_of(facts.buckets[bucket].id)] = moves.grad_ends[bucket]
            done += 1
    actions += [(Verb.WAIT, grad) for grad in under_way]
    if facts.is_training:
        actions += [(Verb.UPDATE, bucket.id) for bucket in facts.buckets if bucket.trainable]
    return actions


def _leaving_activations(facts: Facts, moves: Moves) -> Mapping[int, list[tuple[Verb, str]]]:
    """Per op, what begins to leave behind it, and then what is gone."""
    found: defaultdict[int, list[tuple[Verb, str]]] = defaultdict(list)
    for absence in facts.offload_intervals:
        found[absence.leave].append((Verb.OFFLOAD, str(absence.group)))
    for number, end in moves.leave_ends.items():
        found[end].append((Verb.WAIT, str(facts.offload_intervals[number].group)))
    return found


def _leave(bucket: Bucket, level: Level, ending: Sequence[str]) -> list[tuple[Verb, str]]:
    """The actions by which a bucket's gradients leave once those in `ending` are gone.

    On one rank a reduce is no transfer, and the host is told of it first.
    """
    waits = [(Verb.WAIT, grad) for grad in ending]
    reduces = [(Verb.REDUCE, str(bucket.id))]
    offloads = [(Verb.OFFLOAD, grad_of(bucket.id))] if level.has_param_on_host else []
    return [*waits, *reduces, *offloads] if bucket.is_sharded else [*reduces, *waits, *offloads]


def regions(facts: Facts, cuts: Sequence[Cut]) -> tuple[Region, ...]:
    """Return `cuts` as regions of the graph."""
    ops = facts.graph.ops
    used = _uses(facts)
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
        )
        for cut in cuts
    )


def schedule(actions: Sequence[tuple[Verb, str]]) -> Schedule:
    """Return (verb, what) pairs as the schedule of rank 0."""
    return Schedule(rank=0, actions=tuple(Action(verb=verb, what=what) for verb, what in actions))


def _uses(facts: Facts) -> list[tuple[BucketId, list[int]]]:
    """Per bucket, the indices of forward and backward ops that read it."""
    owner = {param: i for i, bucket in enumerate(facts.buckets) for param in bucket.params}
    indices: list[list[int]] = [[] for _ in facts.buckets]
    for i, op in enumerate(facts.graph.ops[: facts.num_run]):
        for bucket in {owner[name] for name in op.reads if name in owner}:
            indices[bucket].append(i)
    return [(bucket.id, own) for bucket, own in zip(facts.buckets, indices, strict=True)]
