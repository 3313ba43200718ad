"""The skeleton: the equal part of the plans of ranks that differ, so that their collectives come in one order.

```text
  equal on all ranks    buckets and their shards, the sequence of gathers and reduces, the time of updates, loss chunks,
                        shares
  each rank's own       homes, activations, micro-batches, offloads, and where in its compute each collective is issued
```

A sequence for all is made of the plans of all classes of ranks:

```text
  gathers     in the order of the plan with the most of them; gathers that only other plans have are put in where those
              plans have them
  reduces     each after the gathers that some plan needs before it, and after those that every plan issues before it.
              So no rank gathers further ahead than the rank with the least room
```

A plan follows the sequence if each collective moves to its place: a gather is issued later, or earlier with more
memory; a reduce is issued later; a gather that the rank has no use for is released at once, or takes the place of the
copy that is there.
"""

from collections.abc import Iterator, Mapping, Sequence
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
    RegionRef,
    Schedule,
    Update,
    Verb,
)
from elixir_compile.ir.share import Share
from elixir_compile.step.collectives import Collective, collective_of, collectives_of, sharded_buckets


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
        sharded = sharded_buckets(plan)
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
    uses = _uses_of_all(base, walks)
    places = {use: place for place, use in enumerate(uses)}
    needed, wanted = ([_num_before(walk, base, places, by) for walk in walks] for by in ("wait", "gather"))
    sequence: list[Collective | Use] = []
    done = 0
    for number, bucket in enumerate(base.reduces):
        least = max(counts[number] for counts in needed)
        before = max(done, least, min(counts[number] for counts in wanted))
        sequence += [*uses[done:before], Collective(Verb.REDUCE, bucket)]
        done = before
    return (*sequence, *uses[done:])


def _uses_of_all(base: _Walked, walks: Sequence[_Walked]) -> list[Use]:
    """Return the gathers of `base` in order, and those that only others of `walks` have, each behind the gather that
    comes before it there."""
    uses = [issued.use for issued in base.gathers]
    for walk in walks:
        known = set(uses)
        behind = -1
        for issued in walk.gathers:
            if issued.use not in known:
                first_backward = next((i for i, use in enumerate(uses) if use.phase is Phase.BACKWARD), len(uses))
                behind = behind if issued.use.phase is Phase.FORWARD else max(behind, first_backward - 1)
                uses.insert(behind + 1, issued.use)
            behind = uses.index(issued.use)
    return uses


def _num_before(walk: _Walked, base: _Walked, places: Mapping[Use, int], by: str) -> list[int]:
    """Return, for each reduce in the order of `base`, how many gathers of the sequence come before it in `walk`.

    By its "gather", a gather comes before a reduce if it is issued before it; by its "wait", if it is needed before.
    """
    reduced_at = accumulate((walk.reduces[bucket] for bucket in base.reduces), max)
    return [
        max((places[issued.use] + 1 for issued in walk.gathers if getattr(issued, by) < at), default=0)
        for at in reduced_at
    ]


def following(plan: Plan, sequence: Sequence[Collective | Use], released: frozenset[BucketId]) -> Iterator[Plan]:
    """Yield `plan` with its collectives in the order of `sequence`, from the earliest gathers to the latest.

    Buckets in `released` count as released after each window, all others as resident. The prediction is that of `plan`.
    Nothing is yielded if the plan cannot follow.
    """
    sharded = sharded_buckets(plan)
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
        self._sharded = sharded_buckets(plan)
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
                self._want(self._gathers[at])
            elif at in self._waits:
                self._reach(self._waits[at])
                self._held[self._waits[at].bucket] = True
                self._written.append(action)
            elif action.verb is Verb.REDUCE and isinstance(target, BucketRef):
                self._ready[target.bucket] = [action]
                self._issue_ready()
            elif isinstance(target, GradientRef) and target.bucket in self._ready:
                self._ready[target.bucket].append(action)
            else:
                if action.verb is Verb.UPDATE:
                    self._issue_all()
                self._written.append(action)
                if action.verb is Verb.RELEASE and isinstance(target, BucketRef):
                    self._held.pop(target.bucket, None)
                    self._issue_ready()
        self._issue_all()
        return tuple(self._written)

    def _want(self, use: Use) -> None:
        """Note that the plan gathers `use` here; issue it, with the gathers before it if gathers are early."""
        self._wanted.add(use)
        if self._is_early and use in self._sequence[self._next :]:
            ahead = self._sequence.index(use, self._next) + 1
            while self._next < ahead and self._is_next_free():
                self._issue_next()
        self._issue_ready()

    def _issue_ready(self) -> None:
        """Issue the next collectives of the sequence as long as the plan is past their place."""
        while self._next < len(self._sequence):
            upcoming = self._upcoming_reduce()
            is_due = self._sequence[self._next] in self._wanted or (upcoming is not None and upcoming in self._ready)
            if not (is_due and self._is_next_free()):
                return
            self._issue_next()

    def _upcoming_reduce(self) -> BucketId | None:
        """Return the bucket of the next reduce of the sequence, if the plan is past the gathers before it or may be."""
        for entry in self._sequence[self._next :]:
            if isinstance(entry, Collective):
                return entry.bucket
        return None

    def _is_next_free(self) -> bool:
        """Return whether the next collective may be issued now."""
        entry = self._sequence[self._next]
        if isinstance(entry, Collective):
            return entry.bucket in self._ready
        # A second copy that this rank has no use for takes the place of the first.
        return entry.bucket not in self._held or entry not in self._own

    def _reach(self, use: Use) -> None:
        """Issue the sequence up to `use`, which is awaited now, if it is not issued."""
        if use in self._sequence[: self._next]:
            return
        while self._next < len(self._sequence):
            entry = self._sequence[self._next]
            if not self._is_next_free():
                raise _OutOfOrderError
            self._issue_next()
            if entry == use:
                return
        raise _OutOfOrderError

    def _issue_all(self) -> None:
        while self._next < len(self._sequence):
            if not self._is_next_free():
                raise _OutOfOrderError
            self._issue_next()

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
