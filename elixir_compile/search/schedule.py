"""Turn levels and moves into regions and the actions between them, and bring the collectives of the plans of ranks that
differ into one order.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from elixir_compile.base.errors import InvalidPlan
from elixir_compile.ir import (
    Action,
    Bucket,
    BucketId,
    BucketRef,
    GradientRef,
    Phase,
    Plan,
    Region,
    RegionId,
    RegionRef,
    Schedule,
    Target,
    Update,
    Verb,
)
from elixir_compile.ir.bucket import sharded_buckets
from elixir_compile.ir.share import Share
from elixir_compile.search.space.buckets import Level, is_gathered
from elixir_compile.search.space.facts import Facts
from elixir_compile.search.space.profiles import Moves
from elixir_compile.step.structure import Collective, collective_of, collectives_of

# ----------------------------------------------------------------------------------------------------------------------
# The skeleton: the equal part of the plans of ranks that differ, so that their collectives come in one order.
#
#   equal on all ranks    buckets and their shards, the sequence of gathers and reduces, the time of updates, loss
#                         chunks, shares
#   each rank's own       homes, activations, micro-batches, offloads, and where in its compute a collective is issued
#
# A sequence for all is made of the plans of all classes of ranks:
#
#   gathers     in the order of the plan with the most of them; gathers that only other plans have are put in where
#               those plans have them
#   reduces     each after the gathers that some plan needs before it, and after those that every plan issues before it.
#               So no rank gathers further ahead than the rank with the least room
#
# A plan follows the sequence if each collective moves to its place: a gather is issued later, or earlier with more
# memory; a reduce is issued later; a gather that the rank has no use for is released at once, or takes the place of the
# copy that is there.


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """The part that must be equal in the plans of all ranks."""

    buckets: tuple[Bucket, ...]
    sequence: tuple[Collective, ...]
    update: Update
    loss_chunks: int
    num_copies: int
    shares: tuple[Share, ...]


def skeleton_of(plan: Plan) -> Skeleton:
    """Return the skeleton of `plan`."""
    return Skeleton(
        buckets=plan.buckets,
        sequence=collectives_of(plan),
        update=plan.update,
        loss_chunks=plan.loss_chunks,
        num_copies=plan.num_copies,
        shares=plan.shares,
    )


def released_by(plan: Plan) -> frozenset[BucketId]:
    """Return the sharded buckets that `plan` gathers for each window and releases after it."""
    placed = zip(plan.buckets, plan.placements, strict=True)
    return frozenset(bucket.id for bucket, placement in placed if bucket.is_sharded and not placement.resident)


class Use(NamedTuple):
    """A gather, told apart from the others of its bucket, the same in the plans of all ranks."""

    phase: Phase
    bucket: BucketId
    number: int
    """How many gathers of the bucket come before it in the phase."""


class _Issued(NamedTuple):
    """The places of a gather in the actions of a plan."""

    use: Use
    gather: int
    wait: int


class _Walked:
    """The places of the collectives of a plan in its actions."""

    def __init__(self, plan: Plan) -> None:
        phases = {region.id: region.phase for region in plan.regions}
        sharded = sharded_buckets(plan.buckets)
        self.gathers: list[_Issued] = []
        self.reduces: dict[BucketId, int] = {}
        """The place of the reduce of each bucket, in order."""
        open_: dict[BucketId, int] = {}
        counts: dict[tuple[Phase, BucketId], int] = {}
        waits: list[tuple[int, int, BucketId, Phase]] = []
        # A gather belongs to the phase of the region that it is awaited for.
        runs = [
            (at, phases[action.target.region])
            for at, action in enumerate(plan.schedules[0].actions)
            if isinstance(action.target, RegionRef)
        ]
        upcoming = iter(runs)
        run = next(upcoming, None)
        phase = Phase.FORWARD
        for at, action in enumerate(plan.schedules[0].actions):
            while run is not None and run[0] < at:
                run = next(upcoming, None)
            phase = run[1] if run is not None else phase
            found = collective_of(action, sharded)
            if found is not None and found.verb is Verb.GATHER:
                open_[found.bucket] = at
            elif found is not None:
                self.reduces[found.bucket] = at
            elif action.verb is Verb.WAIT and isinstance(action.target, BucketRef) and action.target.bucket in open_:
                bucket = action.target.bucket
                waits.append((open_.pop(bucket), at, bucket, phase))
        for gather, wait, bucket, phase in sorted(waits):
            number = counts[phase, bucket] = counts.get((phase, bucket), -1) + 1
            self.gathers.append(_Issued(Use(phase, bucket, number), gather, wait))


def common_sequence(plans: Sequence[Plan]) -> tuple[Collective | Use, ...]:
    """Return the sequence of collectives for the ranks of all `plans`: a `Use` for each gather, a reduce for each
    bucket.

    Raises InvalidPlan if the plans reduce the gradients of other buckets.
    """
    walks = [_Walked(plan) for plan in plans]
    base = max(walks, key=lambda walk: len(walk.gathers))
    if any(walk.reduces.keys() != base.reduces.keys() for walk in walks):
        raise InvalidPlan("the plans of the ranks reduce the gradients of other buckets.")
    # The gathers of `base`, and those that only others have, each behind the gather that comes before it there.
    uses = [issued.use for issued in base.gathers]
    for walk in walks:
        known, behind = set(uses), -1
        for issued in walk.gathers:
            if issued.use not in known:
                first_backward = next((i for i, use in enumerate(uses) if use.phase is Phase.BACKWARD), len(uses))
                behind = behind if issued.use.phase is Phase.FORWARD else max(behind, first_backward - 1)
                uses.insert(behind + 1, issued.use)
            behind = uses.index(issued.use)
    places = {use: place for place, use in enumerate(uses)}

    def num_before(walk: _Walked, at: int, by: str) -> int:
        """Return how many gathers come before the action `at`: issued before it ("gather"), or needed ("wait")."""
        return max((places[issued.use] + 1 for issued in walk.gathers if getattr(issued, by) < at), default=0)

    reduced_at = [list(accumulate((walk.reduces[bucket] for bucket in base.reduces), max)) for walk in walks]
    sequence: list[Collective | Use] = []
    done = 0
    for bucket, *places_at in zip(base.reduces, *reduced_at, strict=True):
        least = max(num_before(walk, at, "wait") for walk, at in zip(walks, places_at, strict=True))
        wanted = min(num_before(walk, at, "gather") for walk, at in zip(walks, places_at, strict=True))
        before = max(done, least, wanted)
        sequence += [*uses[done:before], Collective(Verb.REDUCE, bucket)]
        done = before
    return (*sequence, *uses[done:])


def following(plan: Plan, sequence: Sequence[Collective | Use], released: frozenset[BucketId]) -> Iterator[Plan]:
    """Yield `plan` with its collectives in the order of `sequence`, from the earliest gathers to the latest.

    Buckets in `released` count as released after each window, all others as resident. The prediction is that of `plan`.
    Nothing is yielded if the plan cannot follow.
    """
    sharded = sharded_buckets(plan.buckets)
    placements = tuple(
        replace(placement, resident=placement.bucket not in released) if placement.bucket in sharded else placement
        for placement in plan.placements
    )
    for is_early in (True, False):
        try:
            actions = _Follower(plan, sequence, is_early=is_early).actions()
        except _OutOfOrderError:
            continue
        rank = plan.schedules[0].rank
        yield replace(plan, placements=placements, schedules=(Schedule(rank=rank, actions=actions),))


class _OutOfOrderError(Exception):
    """A collective is needed before one that cannot be issued yet."""


class _Follower:
    """Writes the actions of a plan again, with its collectives in the order of a sequence."""

    def __init__(self, plan: Plan, sequence: Sequence[Collective | Use], *, is_early: bool) -> None:
        self._plan, self._sequence, self._is_early = plan, sequence, is_early
        walk = _Walked(plan)
        self._gathers = {issued.gather: issued.use for issued in walk.gathers}
        self._waits = {issued.wait: issued.use for issued in walk.gathers}
        self._own = frozenset(self._gathers.values())
        self._written: list[Action] = []
        self._next = 0
        self._wanted: set[Use] = set()
        self._ready: dict[BucketId, list[Action]] = {}
        """Reduces that are not issued yet, each with the actions on its gradient that follow."""
        self._held: dict[BucketId, bool] = {}
        """Buckets that are gathered now, each with whether compute has waited for the gather."""

    def actions(self) -> tuple[Action, ...]:
        """Return the actions. Raises _OutOfOrderError if a collective would be issued too late."""
        for at, action in enumerate(self._plan.schedules[0].actions):
            target = action.target
            if at in self._gathers:
                self._wanted.add(self._gathers[at])
                if self._is_early and self._gathers[at] in self._sequence[self._next :]:
                    ahead = self._sequence.index(self._gathers[at], self._next) + 1
                    while self._next < ahead and self._is_next_free():
                        self._issue_next()
                self._issue_ready()
            elif at in self._waits:
                if self._waits[at] not in self._sequence[: self._next]:
                    self._issue_up_to(self._waits[at])
                self._held[self._waits[at].bucket] = True
                self._written.append(action)
            elif action.verb is Verb.REDUCE and isinstance(target, BucketRef):
                self._ready[target.bucket] = [action]
                self._issue_ready()
            elif isinstance(target, GradientRef) and target.bucket in self._ready:
                self._ready[target.bucket].append(action)
            else:
                if action.verb is Verb.UPDATE:
                    self._issue_up_to(None)
                self._written.append(action)
                if action.verb is Verb.RELEASE and isinstance(target, BucketRef):
                    self._held.pop(target.bucket, None)
                    self._issue_ready()
        self._issue_up_to(None)
        return tuple(self._written)

    def _issue_ready(self) -> None:
        """Issue the next collectives of the sequence as long as the plan is past their place."""
        while self._next < len(self._sequence):
            reduces = (entry.bucket for entry in self._sequence[self._next :] if isinstance(entry, Collective))
            is_due = self._sequence[self._next] in self._wanted or next(reduces, None) in self._ready
            if not (is_due and self._is_next_free()):
                return
            self._issue_next()

    def _is_next_free(self) -> bool:
        """Return whether the next collective may be issued now."""
        entry = self._sequence[self._next]
        if isinstance(entry, Collective):
            return entry.bucket in self._ready
        # A second copy that this rank has no use for takes the place of the first.
        return entry.bucket not in self._held or entry not in self._own

    def _issue_up_to(self, last: Use | None) -> None:
        """Issue the sequence up to `last`, which is awaited now, or all of it if that is None."""
        while self._next < len(self._sequence):
            entry = self._sequence[self._next]
            if not self._is_next_free():
                raise _OutOfOrderError
            self._issue_next()
            if entry == last:
                return
        if last is not None:
            raise _OutOfOrderError

    def _issue_next(self) -> None:
        entry = self._sequence[self._next]
        self._next += 1
        if isinstance(entry, Collective):
            self._written += self._ready.pop(entry.bucket)
            return
        verbs = [Verb.GATHER]
        if entry in self._own:
            self._held[entry.bucket] = False
        elif entry.bucket not in self._held:
            verbs = [Verb.GATHER, Verb.WAIT, Verb.RELEASE]
        elif self._held[entry.bucket]:
            verbs = [Verb.RELEASE, Verb.GATHER, Verb.WAIT]
        else:  # the rank waits for the second copy where it would have waited for the first
            verbs = [Verb.WAIT, Verb.RELEASE, Verb.GATHER]
        self._written += [Action(verb=verb, target=BucketRef(entry.bucket)) for verb in verbs]


# ----------------------------------------------------------------------------------------------------------------------
# Turn levels and moves into regions and the actions between them.
#
#     gather (this window's and prefetches)   wait   run   release   offload activations   wait (activations are gone)
#     reduce   wait (previous gradient)   offload
#
# A region begins at each op before which the schedule acts: at the first use and after the last use of a gathered copy,
# after the op that completes the gradients of a bucket, after activations begin to leave or have left, at their first
# use in the backward, and at the first op of the backward. A region also begins with each equal layer, unless the
# schedule acts near its start in any case.


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
        has_position = facts.has_position(bucket)
        leaves = is_gathered(spec, levels[bucket]) or has_position or facts.problem.calls.num > 1
        if gradients is not None and leaves:
            starts.add(gradients.complete + 1)
    if facts.laps:
        starts |= {start for span in facts.spans for start in (span.first, span.last + 1)}
    else:
        # A layer gets no start of its own if the plan acts between its first op and its first matrix product. If the
        # plan acts nowhere but at the start of a phase, regions begin at the product, so that the ops between two
        # layers stay in one kernel.
        acting = sorted(starts)
        acts = not starts <= {0, facts.num_forward}
        starts |= {
            span.first if acts else span.product
            for span in facts.spans
            if bisect_left(acting, span.first) == bisect_left(acting, span.product + 1)
        }
    ordered = sorted(start for start in starts if start < facts.num_run)
    cuts: list[Cut] = []
    num_forward = bisect_left(ordered, facts.num_forward)
    for i, first in enumerate(ordered):
        name = f"fwd.{i}" if i < num_forward else f"bwd.{i - num_forward}"
        last = ordered[i + 1] - 1 if i + 1 < len(ordered) else facts.num_run - 1
        cuts.append(Cut(RegionId(name), first, last))
    return cuts


def step_actions(facts: Facts, levels: Sequence[Level], moves: Moves, cuts: Sequence[Cut]) -> list[tuple[Verb, Target]]:
    """Return the actions of a step as pairs of a verb and its target."""
    buckets, grads, groups = facts.targets.buckets, facts.targets.gradients, facts.targets.groups
    moving = (*buckets, *groups)
    # Per op the offloads started after it, then the waits for offloads due by then.
    leaving: defaultdict[int, list[tuple[Verb, Target]]] = defaultdict(list)
    for interval, group in zip(facts.offload_intervals, groups, strict=True):
        leaving[interval.leave].append((Verb.OFFLOAD, group))
    for number, end in moves.leave_ends.items():
        leaving[end].append((Verb.WAIT, groups[number]))
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
            if not (leaves or facts.has_position(bucket)):
                actions.append((Verb.REDUCE, buckets[bucket]))
            else:
                # Earlier gradients make room for the buffers of the reduce. On one rank it comes before the waits for
                # them: there it has no buffers and is no transfer.
                ending = [(Verb.WAIT, grads[other]) for other, end in under_way.items() if end <= op]
                reduce = (Verb.REDUCE, buckets[bucket])
                actions += [*ending, reduce] if facts.has_position(bucket) else [reduce, *ending]
                if leaves and levels[bucket].has_param_on_host:
                    actions.append((Verb.OFFLOAD, grads[bucket]))
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


def regions(facts: Facts, cuts: Sequence[Cut]) -> tuple[Region, ...]:
    """Return `cuts` as regions of a plan, each with the buckets read by its ops."""
    ops = facts.graph.ops
    owner = {param: bucket.id for bucket in facts.buckets for param in bucket.params}
    reads: dict[BucketId, list[int]] = {bucket.id: [] for bucket in facts.buckets}
    for i, op in enumerate(ops[: facts.num_run]):
        for bucket in {owner[name] for name in op.reads if name in owner}:
            reads[bucket].append(i)
    micro_batches = {lap.first: lap.micro_batches for lap in facts.laps}
    return tuple(
        Region(
            id=cut.id,
            phase=Phase.FORWARD if cut.first < facts.num_forward else Phase.BACKWARD,
            first=ops[cut.first].id,
            last=ops[cut.last].id,
            buckets=tuple(
                name
                for name, indices in reads.items()
                if (at := bisect_left(indices, cut.first)) < len(indices) and indices[at] <= cut.last
            ),
            micro_batches=micro_batches.get(ops[cut.first].id, 1),
        )
        for cut in cuts
    )


def schedule(actions: Sequence[tuple[Verb, Target]]) -> Schedule:
    """Return the pairs of `step_actions` as the schedule of rank 0."""
    return Schedule(rank=0, actions=tuple(Action(verb=verb, target=target) for verb, target in actions))
