"""Compute the bytes and the simulated seconds of candidates for the planners, enumerate the modes from which a search
starts, and measure its CPU time.
"""

import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from elixir_compile.ir import (
    Activations,
    Bucket,
    BucketId,
    Decision,
    Kind,
    Placement,
    Plan,
    RegionId,
    Saving,
    StepGraph,
    Target,
    Update,
    Verb,
)
from elixir_compile.ir.cost import gather_staging_bytes, rings_bytes
from elixir_compile.search.problem import Problem, asked_time
from elixir_compile.search.schedule import Cut, cut_regions, regions, step_actions
from elixir_compile.search.space.buckets import Level, host_bytes_of, placement_of
from elixir_compile.search.space.facts import Facts, gather_facts
from elixir_compile.search.space.layers import modes_by_depth
from elixir_compile.search.space.memory import MemoryModel, lowered_modes, min_memory_levels
from elixir_compile.search.space.profiles import Moves, Profile, moves_at_use, profiles
from elixir_compile.step.as_run import as_run, given_bytes
from elixir_compile.step.bucket_bytes import kept_copy_bytes, kept_grad_bytes, resting
from elixir_compile.step.divide import laps_of
from elixir_compile.step.liveness import closing_of
from elixir_compile.step.prices import OpSeconds, prices
from elixir_compile.step.seconds import Cycle, Played, play

# ----------------------------------------------------------------------------------------------------------------------
# Compute the bytes and the simulated seconds of candidates, for the planners.
#
# The values that planners compare are here too: candidates, draft plans and their certificates.


MAX_AHEAD = 2
"""More windows ahead gain nothing if layers are alike and a transfer is shorter than a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The bound of a problem, and the limits that hold it up."""

    bound_s: float
    """Every plan for the problem takes at least so many seconds."""
    binding: tuple[str, ...]
    """The full lanes and memories at the relaxed optimum, in words."""
    gib_bound_s: float | None
    """The bound with one more GiB of device memory; None if the time was too short to tell."""


class Candidate(NamedTuple):
    """A level for every bucket and a mode for every layer."""

    levels: tuple[Level, ...]
    modes: tuple[int, ...]
    """Indices into the `modes` of each layer."""

    @property
    def options(self) -> tuple[int, ...]:
        """The option of each bucket, then of each layer, as `Facts.options` has them."""
        return (*self.levels, *self.modes)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """A candidate with the times of its transfers, its simulated seconds, and the reasons for its choices."""

    levels: tuple[Level, ...]
    modes: tuple[int, ...]
    moves: Moves
    step_s: float = 0.0
    """0 if it was not simulated."""
    decisions: tuple[Decision, ...] = ()
    planner: str = "greedy"
    certificate: Certificate | None = None

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.levels, self.modes)


def draft_at_use(facts: Facts, levels: Sequence[Level]) -> DraftPlan:
    """Return the draft plan of `levels` at the modes of `facts`, with every gather at its use: the fewest bytes."""
    return DraftPlan(levels=tuple(levels), modes=facts.modes, moves=moves_at_use(facts, levels))


class Evaluator:
    """Bytes and seconds of any levels, at one choice of modes; `at` returns the evaluator at other modes."""

    def __init__(self, facts: Facts, others: "dict[tuple[int, ...], Evaluator] | None" = None) -> None:
        problem = facts.problem
        self._others: dict[tuple[int, ...], Evaluator] = {} if others is None else others
        like = next(iter(self._others.values()), None)
        self._others[facts.modes] = self
        self.facts = facts
        self.memory = MemoryModel(facts, like=None if like is None else like.memory)
        self._ops = OpSeconds(problem.graph, problem.cluster, problem.measured) if like is None else like._ops
        self.prices = prices(
            problem.graph,
            facts.buckets,
            problem.cluster,
            problem.measured,
            facts.activations,
            problem.num_copies,
            facts.laps,
            self._ops,
        )
        there = (bucket for bucket in facts.buckets if bucket.id in problem.on_disk)
        staging_bytes = rings_bytes(there, problem.params_on_disk)
        away_bytes = sum(interval.nbytes for interval in facts.offload_intervals)
        self.away_bytes = problem.calls.outstanding * away_bytes + staging_bytes
        """Host bytes independent of levels: offloaded activations, and the staging buffers of the disk."""
        self.update = asked_time(problem)
        """When the host updates its buckets."""
        self._placements = _placements(facts) if like is None else like._placements
        self._host_bytes = _host_bytes(facts) if like is None else like._host_bytes
        self._step_s: dict[tuple[Level, ...], float] = {}
        self._profiles: tuple[tuple[Profile, ...], ...] | None = None
        self._min_memory_levels: tuple[Level, ...] = ()
        self._floor_bytes: int | None = None
        self._lowered_modes: tuple[int, ...] | None = None

    def at(self, modes: Sequence[int]) -> "Evaluator":
        """Return the evaluator of the same problem at `modes`, one per layer."""
        key = tuple(modes)
        if key not in self._others:
            Evaluator(gather_facts(self.facts.problem, self.facts, key), self._others)  # adds itself to `_others`
        return self._others[key]

    @property
    def profiles(self) -> tuple[tuple[Profile, ...], ...]:
        """The profile of every mode of every layer, the same for the evaluators of all modes."""
        first = next(iter(self._others.values()))
        if first._profiles is None:
            first._profiles = profiles(self.facts.problem, self.facts.layers, self._ops)
        return first._profiles

    @property
    def min_memory_levels(self) -> tuple[Level, ...]:
        """The levels with the smallest peak found, with every gather at its use."""
        self._min_memory_levels = self._min_memory_levels or min_memory_levels(self.facts, self.memory)
        return self._min_memory_levels

    @property
    def lowered_modes(self) -> tuple[int, ...]:
        """Modes with fewer bytes at `min_memory_levels`, reached from the modes of this evaluator layer by layer."""
        if self._lowered_modes is None:
            kept = self.at([0] * len(self.facts.modes)).facts
            self._lowered_modes = lowered_modes(kept, self.profiles, self.facts.modes, self.min_memory_levels)
        return self._lowered_modes

    @property
    def floor_bytes(self) -> int:
        """The peak in device bytes at `min_memory_levels`, with every gather at its use."""
        if self._floor_bytes is None:
            self._floor_bytes = self.memory.peak_bytes(self.min_memory_levels, ahead=0)
        return self._floor_bytes

    def fits(self, levels: Sequence[Level], ahead: int) -> bool:
        """Return whether the levels meet all quotas and fit both budgets, with every gather `ahead` windows early."""
        problem = self.facts.problem
        return (
            self.facts.allows(levels)
            and self.host_bytes(levels) <= problem.host_budget_bytes
            and self.memory.peak_bytes(levels, ahead) <= problem.budget_bytes
        )

    def host_bytes(self, levels: Sequence[Level]) -> int:
        """Return the host bytes of the whole step."""
        held_bytes = sum(nbytes[level] for nbytes, level in zip(self._host_bytes, levels, strict=True))
        # Whether an update is streamed is not known here.
        works = zip(self.memory.work_bytes, levels, strict=True)
        return (
            self.away_bytes
            + held_bytes
            + max((own for own, level in works if own and level.has_state_on_host), default=0)
        )

    def host_bytes_of(self, bucket: int, level: Level) -> int:
        """Return the host bytes of the bucket with index `bucket` at `level`."""
        return self._host_bytes[bucket][level]

    def at_use(self, levels: Sequence[Level]) -> Moves:
        """Return the moves with every gather right before its use."""
        return moves_at_use(self.facts, levels)

    def added_host_bytes(self, bucket: int, before: Level, after: Level) -> int:
        """Return the bytes by which host memory grows if a bucket moves from level `before` to level `after`."""
        return self._host_bytes[bucket][after] - self._host_bytes[bucket][before]

    def step_s(self, levels: Sequence[Level], moves: Moves | None = None) -> float:
        """Return the simulated seconds of a step with `moves`.

        Without `moves`, gathers are `MAX_AHEAD` windows early, even if memory does not allow it.
        """
        if moves is not None:
            return self.played(levels, moves).step_s
        key = tuple(levels)
        if key not in self._step_s:
            self._step_s[key] = self.played(levels, moves_at_use(self.facts, levels, MAX_AHEAD)).step_s
        return self._step_s[key]

    def stream_s(self, bucket: int, level: Level) -> float:
        """Return the seconds of a streamed update of a bucket at `level`: copies both ways and the device's update."""
        placement = self._placements[bucket][level]
        return (
            self.prices.streams[placement.bucket, placement.param].alone_s
            + self.prices.device_update_s[placement.bucket]
        )

    def played(self, levels: Sequence[Level], moves: Moves) -> Played:
        """Return the simulation of a step at these levels with these moves."""
        cuts = cut_regions(self.facts, levels, moves)
        run_s = {cut.id: self.prices.run_s(cut.first, cut.last) for cut in cuts}
        chosen = (of_level[level] for of_level, level in zip(self._placements, levels, strict=True))
        placements = {placement.bucket: placement for placement in chosen}
        for i in moves.streamed:
            streamed = placement_of(self.facts.buckets[i], levels[i], streamed=True)
            placements[streamed.bucket] = streamed
        actions = step_actions(self.facts, levels, moves, cuts)
        cycle = self._cycle(levels, moves, cuts, actions, placements)
        lap_copies = self.prices.lap_copies
        copies = {cut.id: lap_copies[cut.first] for cut in cuts if cut.first in lap_copies}
        return play(actions, run_s, placements, self.prices, cycle=cycle, copies=copies)

    def _cycle(
        self,
        levels: Sequence[Level],
        moves: Moves,
        cuts: Sequence[Cut],
        actions: Sequence[tuple[Verb, Target]],
        placements: Mapping[BucketId, Placement],
    ) -> Cycle:
        """Return when updates run, and which regions of the next step wait for them."""
        firsts = [cut.first for cut in cuts]
        num_forward = bisect_left(firsts, self.facts.num_forward)
        last_forward = cuts[num_forward - 1].id if num_forward else None
        if self.update is Update.IN_BACKWARD:
            read = {region.id: region.buckets for region in regions(self.facts, cuts)}
            closing = closing_of(actions, read, placements.values())
            return Cycle(update=self.update, reads=read, closing=closing, last_forward=last_forward)
        if self.update is Update.AFTER_BACKWARD or not any(level.has_state_on_host for level in levels):
            return Cycle(last_forward=last_forward)
        # The gather of a bucket waits for its update. A bucket without a gather is waited for by its first reader.
        reads: dict[RegionId, list[BucketId]] = {}
        for i, level in enumerate(levels):
            windows = self.facts.windows[i]
            if level.has_state_on_host and not level.has_param_on_host and windows:
                region = cuts[bisect_right(firsts, windows[0].first) - 1]
                reads.setdefault(region.id, []).append(self.facts.buckets[i].id)
        return Cycle(update=self.update, reads=reads, last_forward=last_forward)


def _placements(facts: Facts) -> list[dict[Level, Placement]]:
    """Return the placement of each bucket at each level."""
    return [{level: placement_of(bucket, level) for level in Level} for bucket in facts.buckets]


def may_go_to_disk(problem: Problem, buckets: Sequence[Bucket]) -> frozenset[BucketId]:
    """Return those of `buckets`, which are all of a plan, whose state or frozen parameters may go to disk: frozen ones
    only if all of them take more than the buffers that their gathers would need."""
    found = [bucket for bucket in buckets if problem.may_go_to_disk(bucket)]
    frozen = [bucket for bucket in found if not bucket.trainable]
    are_some_there = any(bucket.id in problem.on_disk for bucket in buckets if not bucket.trainable)
    are_more = sum(bucket.home_nbytes for bucket in frozen) > gather_staging_bytes(frozen)
    return frozenset(bucket.id for bucket in found if bucket.trainable or are_some_there or are_more)


def _host_bytes(facts: Facts) -> list[dict[Level, int]]:
    """Return the host bytes of each bucket at each level."""
    problem, there, params_there = facts.problem, facts.problem.on_disk, facts.problem.params_on_disk

    def bytes_of(bucket: Bucket, *, may_go: bool) -> dict[Level, int]:
        is_there = may_go or bucket.id in there
        goes_too = bucket.id in params_there or (may_go and problem.may_take_params(bucket))
        return {level: host_bytes_of(bucket, level, on_disk=is_there, with_params=goes_too) for level in Level}

    held = [bytes_of(bucket, may_go=False) for bucket in facts.buckets]
    # What may go to disk counts as no host memory: a relaxation, which `planner.plan_with_disk` corrects. Frozen
    # parameters do not if the host has room for everything in any case: their plans are those without a disk.
    values_bytes = sum(storage.nbytes for storage in facts.graph.storages if storage.kind is not Kind.PARAM)
    most_bytes = problem.calls.outstanding * values_bytes + sum(max(own.values()) for own in held)
    has_room = most_bytes + max((own.work_nbytes for own in facts.buckets), default=0) <= problem.host_budget_bytes
    may_go = may_go_to_disk(problem, facts.buckets)
    return [
        bytes_of(bucket, may_go=bucket.id in may_go and (bucket.trainable or not has_room)) for bucket in facts.buckets
    ]


# ----------------------------------------------------------------------------------------------------------------------
# Enumerate the modes from which a search starts, and count the limits between which its device bytes lie.
#
# kept, pointwise, matmul, attention, fixed        recompute up to this class, keep the rest on the device
# kept, pointwise, matmul, attention, fixed        recompute up to this class, offload the rest
# layer by layer                                   from the first and from the leanest of these, as long as bytes fall
#
# The limits are the fewest device bytes of a graph, and its device bytes if nothing moves, both without a search.


def uniform_modes(evaluator: Evaluator) -> Iterator[Evaluator]:
    """Yield the evaluator of each choice of modes for the start of a search, each once.

    The first keeps all activations.
    """
    layers = evaluator.facts.layers
    seen: set[tuple[int, ...]] = set()
    for modes in modes_by_depth(layers):
        if modes not in seen:
            seen.add(modes)
            yield evaluator.at(modes)
    if not layers:
        yield evaluator
        return
    for start in (evaluator.at([0] * len(layers)), min(map(evaluator.at, seen), key=lambda at: at.floor_bytes)):
        if start.lowered_modes not in seen:
            seen.add(start.lowered_modes)
            yield evaluator.at(start.lowered_modes)


def leanest(evaluator: Evaluator) -> Evaluator:
    """Return the evaluator of the uniform modes with the fewest device bytes if all buckets are at minimum memory."""
    return min(uniform_modes(evaluator), key=lambda at: at.floor_bytes)


def too_large(evaluator: Evaluator) -> Evaluator | None:
    """Return the `leanest` of the uniform modes if none of them fits the device budget at minimum memory, else None."""
    budget_bytes = evaluator.facts.problem.budget_bytes
    is_any = any(uniform.floor_bytes <= budget_bytes for uniform in uniform_modes(evaluator))
    return None if is_any else leanest(evaluator)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Device bytes of a graph, without external usage."""

    peak_bytes: int
    """The peak of a step, `resident_bytes` included."""
    left_bytes: int
    """Activations, inputs and gathered copies live between its forward and its backward."""
    resident: Mapping[BucketId, int]
    """By bucket: parameters, optimizer state and sums of gradients on the device, during the whole step."""
    grads: Mapping[BucketId, int]
    """By bucket: gradients on the device between its backward and the update."""

    @property
    def resident_bytes(self) -> int:
        """The bytes of `resident`."""
        return sum(self.resident.values())

    @property
    def grad_bytes(self) -> int:
        """The bytes of `grads`."""
        return sum(self.grads.values())

    def towards(self, other: "Extent", share: float) -> "Extent":
        """Return the extent at `share` of the way to `other`: this extent at 0, the other at 1."""
        return Extent(
            peak_bytes=_between(self.peak_bytes, other.peak_bytes, share),
            left_bytes=_between(self.left_bytes, other.left_bytes, share),
            resident=_each_between(self.resident, other.resident, share),
            grads=_each_between(self.grads, other.grads, share),
        )


def extents(problem: Problem) -> tuple[Extent, Extent]:
    """Return the smallest extent over the uniform modes for the graph of `problem`, and its extent if nothing moves."""
    evaluator = Evaluator(gather_facts(replace(problem, base_bytes=0, between_bytes=0, after_bytes=0)))
    smallest = min(
        uniform_modes(evaluator),
        key=lambda uniform: (uniform.floor_bytes, _kept_bytes(uniform.facts.graph, uniform.facts.activations)),
    )
    return _extent(smallest, smallest.min_memory_levels), _extent(evaluator, evaluator.facts.start_levels)


def extent_of(graph: StepGraph, plan: Plan) -> Extent:
    """Return the extent of `graph` under `plan`."""
    return _of_homes(
        zip(plan.buckets, plan.placements, strict=True),
        peak_bytes=plan.prediction.device_peak_bytes - plan.base_bytes,
        kept_bytes=_kept_bytes(as_run(graph, plan.activations, laps_of(plan)), plan.activations),
    )


def _extent(evaluator: Evaluator, levels: Sequence[Level]) -> Extent:
    facts = evaluator.facts
    homes = (placement_of(bucket, level) for bucket, level in zip(facts.buckets, levels, strict=True))
    return _of_homes(
        zip(facts.buckets, homes, strict=True),
        peak_bytes=evaluator.memory.peak_bytes(levels, ahead=0),
        kept_bytes=_kept_bytes(facts.graph, facts.activations),
    )


def _of_homes(homes: Iterable[tuple[Bucket, Placement]], *, peak_bytes: int, kept_bytes: int) -> Extent:
    resident: dict[BucketId, int] = {}
    grads: dict[BucketId, int] = {}
    copies_bytes = 0
    for bucket, home in homes:
        resident[bucket.id] = sum(nbytes for _, nbytes in resting(bucket, home))
        # Each parameter counts as having a gradient. The graph may have fewer, so the bytes are an upper limit.
        grads[bucket.id] = kept_grad_bytes(bucket, home) if bucket.trainable else 0
        copies_bytes += kept_copy_bytes(bucket, home)
    return Extent(peak_bytes=peak_bytes, left_bytes=kept_bytes + copies_bytes, resident=resident, grads=grads)


def _kept_bytes(step: StepGraph, activations: Sequence[Activations]) -> int:
    """Return the bytes of saved activations and inputs on the device between forward and backward.

    `step` is the graph as it runs with `activations`, recomputed ops included.
    """
    offloaded = {name for group in activations if group.saving is Saving.OFFLOAD for name in group.storages}
    return given_bytes(step) + sum(s.nbytes for s in step.storages if s.kind is Kind.SAVED and s.id not in offloaded)


def _each_between(low: Mapping[BucketId, int], high: Mapping[BucketId, int], share: float) -> dict[BucketId, int]:
    return {bucket: _between(low.get(bucket, 0), high.get(bucket, 0), share) for bucket in {**low, **high}}


def _between(low: int, high: int, share: float) -> int:
    return round(low + share * (high - low))


# ----------------------------------------------------------------------------------------------------------------------
# Measure the seconds of a search by the CPU time of its thread, so that other processes do not change its plan.
#
# Counted work limits a search; the clock ends it only if the problem is so large that the counted work takes too long.
# With wall time, a busy machine would find another plan than an idle machine. But at least a quarter of the wall time
# counts, so that a search ends on a very busy machine too.


_MAX_WALL_FACTOR = 4.0
"""The wall time of a search is at most so many times its seconds."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds since the clock was made, in the thread that made it."""

    _began_cpu_s: float = field(default_factory=lambda: time.thread_time())
    _began_wall_s: float = field(default_factory=lambda: time.monotonic())

    @property
    def spent_s(self) -> float:
        """Seconds since the clock was made: CPU time of the thread, or a quarter of the wall time if longer."""
        return max(self._cpu_s, self._wall_s / _MAX_WALL_FACTOR)

    @property
    def times(self) -> float:
        """Wall time per second of CPU time so far, between 1 and 4."""
        return min(_MAX_WALL_FACTOR, max(1.0, self._wall_s / max(self._cpu_s, 1e-3)))

    def until(self, seconds: float) -> "Deadline":
        """Return the deadline at `seconds` on this clock."""
        return Deadline(self, seconds)

    @property
    def _cpu_s(self) -> float:
        return time.thread_time() - self._began_cpu_s

    @property
    def _wall_s(self) -> float:
        return time.monotonic() - self._began_wall_s


@dataclass(frozen=True, slots=True)
class Deadline:
    """The number of seconds on a clock after which a part of a search has to end."""

    clock: Clock
    at_s: float

    @property
    def is_over(self) -> bool:
        """Whether the clock has counted more seconds than `at_s`."""
        return self.clock.spent_s > self.at_s

    @property
    def wall_s(self) -> float:
        """Wall time left if the machine stays as busy as it was; solvers take their time limit in wall time."""
        return max(0.0, self.at_s - self.clock.spent_s) * self.clock.times


def deadline_in(seconds: float) -> Deadline:
    """Return the deadline `seconds` from now, on a new clock."""
    return Clock().until(seconds)
