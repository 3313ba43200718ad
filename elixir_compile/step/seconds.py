"""Simulate a step of a plan without tensors: the spans of each lane, and the seconds of the step.

`step.works` says which works a step has, on which lane and behind what, and `step.prices` how many seconds each takes.
Here an instant is a time, and each work ends its seconds after the last of what it is behind (`Player.run`):

    compute   run fwd.0 |    run fwd.1   |  run bwd.0 ...
    h2d       b1 ====| b2 ====|       h.1.matmul ===|        shards of parameters, or activations, from the host
    d2h                  h.1.matmul ===|                     activations or gradients to the host
    gather            b1 ==|   b2 ==|        b2 ==|          sharded buckets: an all-gather, perhaps after a copy
    reduce                                        b1 ==|     their gradients, in one queue with gathers

A lane takes its works in the order of issue. The thread of the updates issues copies when its updates end: they take
their lane then, behind all that the program has issued there until then.

The disk is one lane too: gathers of parameters read there, and updates of state read and write there. It does
them in the order of issue, so a gather waits for all queued updates that are issued before it; a real disk also reads
for a gather between two of them.

If a link does not overlap compute, its copies run on the compute lane. If neither direction overlaps, device and host
are the same cores and the same memory, and updates by the host run there too. A streamed update is priced alone: it
blocks compute during its copies, bucket by bucket. Only where whole tensors are updated, whose products may take longer
than their copies, do copies pass beside the updates of other tensors. Updates run at these times (see `Update`):

    after the backward   every lane is idle when the next step begins, so a single step is simulated
    across steps         the step counts from the end of compute in the backward before: the updates, the forward beside
                         updates by the host, the backward
    in the backward      remaining updates run beside the next forward

In the two latter cases steps are simulated until two leave the lanes in the same state.

Ranks have one order of collectives. If they differ, the i-th collective starts on all when the last of them has issued
it, and ends for all at once.

Updates by the host and copies share host memory: a step takes at least the seconds of their bytes at the memory's full
rate (see `ir.cost`). Not modelled: which of them becomes slower under contention; that averages over copies may share
a link with other collectives (see the actors in `works`); the start of an early update by the device on several ranks,
which is at the wait for the gradient and not, as here, at the issue of its reduce.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, NamedTuple

from elixir_compile.base.errors import InvalidPlan
from elixir_compile.ir.bucket import Placement
from elixir_compile.ir.cost import NUM_GATHER_STAGING, Measured, StreamedCopies
from elixir_compile.ir.graph import StepGraph
from elixir_compile.ir.hardware import Cluster
from elixir_compile.ir.kinds import BucketId, Lane, OpId, RegionId, Tier, Update, Verb
from elixir_compile.ir.plan import Plan, Prediction
from elixir_compile.ir.schedule import BucketRef, GroupRef, Origin, Record, RegionRef, Span, Target
from elixir_compile.step.as_run import as_run
from elixir_compile.step.divide import laps_of
from elixir_compile.step.liveness import closing_verbs, last_forward
from elixir_compile.step.prices import LapCopies, Prices, prices
from elixir_compile.step.timeline import plan_timeline, traffic
from elixir_compile.step.works import (
    AVERAGES,
    COLLECTIVES,
    COMPUTE,
    D2H,
    DISK,
    FIRST_OWN,
    H2D,
    NEVER,
    NUM_OWN,
    PROGRAM,
    UPDATES,
    Deed,
    Do,
    Instant,
    RegionWorks,
    Walk,
    Work,
    on_lanes,
)

_NOT_MEASURED = Measured()
_MOST_CYCLES = 16
_ROUNDING_S = 1e-12
_LONG_AGO_S = -math.inf
_LANES = {
    COMPUTE: Lane.COMPUTE,
    H2D: Lane.H2D,
    D2H: Lane.D2H,
    COLLECTIVES: Lane.GATHER,
    AVERAGES: Lane.REDUCE,
    UPDATES: Lane.HOST,
}
"""By actor, the lane that says whether it works beside compute."""
_COLLECTIVES = frozenset({Do.ALL_GATHER, Do.REDUCE, Do.AVERAGE})

Actions = Sequence[tuple[Verb, Target]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """The updates of a step: when they run, and which regions wait for them."""

    update: Update = Update.AFTER_BACKWARD
    reads: Mapping[RegionId, Sequence[BucketId]] = field(default_factory=dict)
    """The buckets that each region reads; buckets that are gathered may be left out."""
    closing: Mapping[BucketId, Verb] = field(default_factory=dict)
    """The verb of the action after which each bucket may be updated in the backward."""
    last_forward: RegionId | None = None
    """The last region of the forward; None if there is no backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The result for a step in steady state."""

    step_s: float
    stalled_s: float
    """Seconds of the step in which compute waits for updates by the host."""


_ONE_STEP = Cycle()


@dataclass(slots=True, kw_only=True)
class Drawing:
    """The spans of the lanes, in the order in which they were issued, with the labels and bytes that the ledger of a
    run gives to its own."""

    graph: str = ""
    """The name of the graph that is simulated."""
    nbytes: Mapping[tuple[Deed, str], int] = field(default_factory=dict)
    """See `traffic`."""
    spans: list[Span] = field(default_factory=list)

    def add(self, do: Deed, name: str, start_s: float, end_s: float) -> None:
        """Add the span of a work; an update belongs to no graph, since it is the optimizer's."""
        self.spans.append(
            Span(
                lane=do.lane,
                label=do.label(name),
                start_s=start_s,
                end_s=end_s,
                graph="" if do.in_update else self.graph,
                nbytes=self.nbytes.get((do, name), 0),
                piece=int(do.is_slice),
            )
        )


class Arrival(NamedTuple):
    """A copy to the device that the thread of the updates issues at `since_s`. Sorts by time."""

    since_s: float
    bucket: str
    allocated_s: float
    """When compute has made room for the copy."""
    over: Instant
    is_gathered: bool
    """True if the copy is part of a gather; False if it ends an update of parameters on the device."""


class Player:
    """Simulates the works of a schedule: the state of all lanes, in seconds since the step began.

    It has more than 20 methods and more than 15 attributes: what takes how long, when each instant was, and what was
    counted since.
    """

    def __init__(
        self,
        run_s: Mapping[RegionId, float],
        placements: Mapping[BucketId, Placement],
        price: Prices,
        drawing: Drawing | None = None,
        cycle: Cycle = _ONE_STEP,
        copies: Mapping[RegionId, LapCopies | None] = MappingProxyType({}),
    ) -> None:
        self.run_s = run_s
        """The seconds of each region."""
        self.price, self.drawing, self.cycle = price, drawing, cycle
        self._placements, self._copies = placements, copies
        lane_of = price.lane_of
        self._lane_of = {actor: actor if lane_of[lane] is lane else COMPUTE for actor, lane in _LANES.items()}
        self._h2d, self._host = self._lane_of[H2D], self._lane_of[UPDATES]
        self._priced = {do: own for do, own in price.of_deed.items() if do is not Do.UPDATE_ON_DISK}
        self.over_s: list[float] = []
        """When each instant is."""
        self._ring = slice(0, 0)
        """The instants when the buffers of the ring of gathers are free, the earliest first."""
        self.memory_s = 0.0
        """Seconds of host memory, at its full rate, for all copies and updates of the step so far."""
        self.stalled_s = self.short_s = 0.0
        """Seconds in which compute waited for updates by the host, and by which the memory of the host was too slow."""
        self._waiting: list[Arrival] = []
        """Copies that the thread of the updates has not issued: a heap."""
        self._late: set[str] = set()
        """The buckets of these copies."""
        self._streamed_since_s = 0.0
        """When the first piece of the streamed update that is under way may leave."""
        self._room_s = 0.0
        """When a room for the next tensor that is updated whole is free."""
        self._whole_over_s = _LONG_AGO_S
        """When the last of these tensors was updated."""

    # The works of a step.

    def works_of(self, actions: Actions) -> list[Work]:
        """Return the works of `actions`, and begin with all lanes idle."""
        price, cycle = self.price, self.cycle
        buckets, groups = on_lanes(
            self._placements,
            dict.fromkeys(target.group for _, target in actions if isinstance(target, GroupRef)),
            cycle.update,
            sharded=price.sharded,
            summed=price.summed,
            closing=cycle.closing,
            have_gradients=True,
            is_one_memory=price.is_one_memory,
        )
        regions: dict[RegionId, RegionWorks] = {}
        for region, names in cycle.reads.items():
            at_home = [bucket for name in names if (bucket := buckets[name]).may_wait]
            if at_home:
                regions[region] = RegionWorks(at_home=at_home)
        for region, beside in self._copies.items():
            if beside is not None:
                own = regions.setdefault(region, RegionWorks())
                own.arriving = [groups[group] for group, _ in beside.arriving]
                own.leaving = [groups[group] for group, _ in beside.leaving]
                for group in own.arriving:
                    group.arrives_in_slices = True
        first_of_ring = FIRST_OWN + NUM_OWN * (len(buckets) + len(groups))
        num_instants = first_of_ring + NUM_GATHER_STAGING
        self._ring = slice(first_of_ring, num_instants)
        self.over_s = [0.0] * (PROGRAM + 1) + [_LONG_AGO_S] * (num_instants - PROGRAM - 1)
        walk = Walk(
            buckets,
            groups,
            regions,
            cycle.update,
            lanes=self._lane_of,
            last_forward=cycle.last_forward,
            is_reduced=any(price.reduce_s.values()),
            is_averaged=bool(price.average_s),
            in_full=self.drawing is not None,
        )
        return walk.step(actions, from_updates=cycle.update is Update.ACROSS_STEPS)

    def run(self, works: Iterable[Work]) -> None:
        """Simulate `works`."""
        over_s, waiting, draws, h2d = self.over_s, self._waiting, self.drawing is not None, self._h2d
        run_s: Mapping[Any, float] = self.run_s
        priced, run, wait = self._priced, Do.RUN, Do.WAIT
        for work in works:
            actor, do, name, after, over, _, _, _, _, _ = work
            if do is wait:
                until_s = over_s[after[0]]
                if until_s > over_s[actor]:
                    over_s[actor] = until_s
                continue
            if do is run:
                seconds, memory_s = run_s[name], 0.0
            elif do in priced:
                seconds, memory_s = priced[do][name]
            else:
                self._do_other(work)
                continue
            if waiting and actor == h2d:
                self._land_due()
            begin_s, program_s = over_s[actor], over_s[PROGRAM]
            if program_s > begin_s:
                begin_s = program_s
            for instant in after:
                if over_s[instant] > begin_s:
                    begin_s = over_s[instant]
            if actor == PROGRAM:
                self._do_on_host(work, begin_s, seconds)
            else:
                over_s[actor] = over_s[over] = end_s = begin_s + seconds
                if draws:
                    self._draw(do, name, begin_s, end_s)
            self.memory_s += memory_s

    def _do_on_host(self, work: Work, begin_s: float, seconds: float) -> None:
        """Let the program itself work: on the lane of the host, which is compute's if both are the same cores."""
        over_s, host, before_s = self.over_s, self._host, self.over_s[PROGRAM]
        begin_s = max(begin_s, over_s[host])
        over_s[host] = over_s[PROGRAM] = over_s[work.over] = end_s = begin_s + seconds
        self._draw(work.do, work.name, begin_s, end_s)
        if work.do is not Do.ADD_ON_HOST:
            self._stall(end_s, before_s)

    def _do_other(self, work: Work) -> None:
        """Simulate a work that has no seconds of its own."""
        over_s, do, after = self.over_s, work.do, work.after
        if do is Do.WAIT_LATE:
            self._await(work.name, after[1], after[2])
            over_s[COMPUTE] = max(over_s[COMPUTE], over_s[after[0]])
        elif do is Do.AWAIT:
            self._await(work.name, after[0], after[1])
        elif do is Do.LATE_GATHER:
            self._gather_late(work)
        elif do is Do.GATHER_FROM_DISK:
            self._gather_from_disk(work)
        elif do is Do.UPDATE_ON_DISK:
            self._update_on_disk(work)
        elif do is Do.LATE_RETURN:
            heappush(self._waiting, Arrival(over_s[after[0]], work.name, 0.0, work.over, False))
            self._late.add(work.name)
            over_s[after[0]] = _LONG_AGO_S
        elif do is Do.SYNCHRONIZE:
            if after[0] == self._h2d:
                self._land_due()
            over_s[PROGRAM] = max(over_s[PROGRAM], over_s[after[0]])
        elif do is Do.STREAM_THERE:
            copies = self._streams(work.name)
            if copies.are_whole:
                self._stream_whole_there(work, copies)
                return
            begin_s = max(over_s[COMPUTE], over_s[work.actor], over_s[PROGRAM])
            over_s[work.actor] = over_s[work.over] = end_s = begin_s + copies.there_s
            update_s = self.price.device_update_s[work.name]
            self._streamed_since_s = end_s - copies.there_s + copies.first_s + update_s / copies.num_pieces
            self._draw(do, work.name, begin_s, end_s)
        elif do is Do.STREAM_BACK:
            self._stream_back(work)
        elif do is Do.BEGIN_LAPS or do is Do.END_LAPS:
            # A region beside slices that pass is two works, of which one is a single micro-batch.
            seconds, beside = self.run_s[RegionId(work.name)], self._copies[RegionId(work.name)]
            assert beside is not None, "slices pass beside it"
            part_s, is_first = seconds / beside.micro_batches, do is Do.BEGIN_LAPS
            begin_s = max(over_s[COMPUTE], over_s[PROGRAM])
            over_s[COMPUTE] = begin_s + (seconds - part_s if is_first is bool(beside.arriving) else part_s)
            if is_first and self.drawing is not None:
                self._draw(do, work.name, begin_s, begin_s + seconds)
        elif (do is Do.RELEASE or do is Do.ADD_UP) and self.drawing is not None:
            self._draw(do, work.name, over_s[COMPUTE], over_s[COMPUTE])

    # The disk.

    def _gather_from_disk(self, work: Work) -> None:
        """Copy each piece of a bucket to the device when it is read, as far ahead as the ring has buffers.

        ```text
          disk      |-0-|-1-|-2-|-3-|       |-4-|-5-|        four buffers: 4 is read when 0 has left
          h2d                               |0|1|2|3||4| |5| behind the compute that makes room on the device
        ```
        """
        over_s, ring, (read_s, num_pieces) = self.over_s, self._ring, self.price.reads[work.name]
        if self._waiting and work.actor == self._h2d:
            self._land_due()
        copied_s, program_s = self.price.h2d_s[work.name] / num_pieces, over_s[PROGRAM]
        update_s = over_s[work.after[0]] if len(work.after) > 1 else program_s  # its results are read
        end_s = max(over_s[work.actor], program_s, *(over_s[instant] for instant in work.after))
        begins_s: list[tuple[float, float]] = []
        for _ in range(num_pieces):
            free_s, *later_s = over_s[ring]
            since_s = max(over_s[DISK], free_s, program_s, update_s)
            over_s[DISK] = since_s + read_s / num_pieces
            begins_s.append((since_s, max(end_s, over_s[DISK])))
            end_s = begins_s[-1][1] + copied_s
            over_s[ring] = [*later_s, end_s]
        over_s[work.actor] = over_s[work.over] = end_s
        self.memory_s += 2 * self.price.memory.copy_s.get(work.name, 0.0)  # the disk writes what the copy reads
        self._draw(Do.READ_PARAMS, work.name, begins_s[0][0], over_s[DISK])
        self._draw(work.do, work.name, begins_s[0][1], end_s)

    def _update_on_disk(self, work: Work) -> None:
        """Update by the host while the disk, behind all that it does already, reads the state and writes it; and the
        parameters, if they are there."""
        over_s, disk_s, name = self.over_s, self.price.disk_s[work.name], BucketId(work.name)
        disk_s += self.price.param_disk_s[name] if self._placements[name].param is Tier.DISK else 0.0
        seconds, memory_s = self.price.of_deed[work.do][work.name]
        lane = self._host if work.actor == PROGRAM else work.actor
        begin_s = max(over_s[lane], over_s[PROGRAM], *(over_s[instant] for instant in work.after))
        busy_s = max(over_s[DISK] - begin_s, 0.0) + disk_s
        seconds, over_s[DISK] = max(seconds, busy_s), begin_s + busy_s
        if work.actor == PROGRAM:
            self._do_on_host(work, begin_s, seconds)
        else:
            over_s[lane] = over_s[work.over] = end_s = begin_s + seconds
            self._draw(work.do, work.name, begin_s, end_s)
        self.memory_s += memory_s
        half_s = over_s[DISK] - disk_s / 2
        self._draw(Do.READ, work.name, over_s[DISK] - disk_s, half_s)
        self._draw(Do.WRITE, work.name, half_s, over_s[DISK])

    # Streamed updates.

    def _stream_back(self, work: Work) -> None:
        """Copy back from when the first piece is updated, beside the copies to the device; compute waits."""
        copies, over_s = self._streams(work.name), self.over_s
        since_s = max(self._streamed_since_s, over_s[work.actor])
        back_s = max(copies.back_s, over_s[COMPUTE] + copies.last_s - since_s)
        begin_s = max(since_s, over_s[PROGRAM])
        over_s[work.actor] = end_s = begin_s + back_s
        if copies.are_whole:
            self._whole_over_s, begin_s = over_s[COMPUTE], end_s - copies.back_s
        else:
            over_s[COMPUTE] = max(over_s[COMPUTE], end_s)
        placement = self._placements[BucketId(work.name)]
        self.memory_s += self.price.memory.stream_s.get((work.name, placement.param), 0.0)
        self._draw(work.do, work.name, begin_s, end_s)

    def _stream_whole_there(self, work: Work, copies: StreamedCopies) -> None:
        """Copy whole tensors to the device, each into a room that one before it has left, beside the updates.

        ```text
          h2d       |-0-|-1-|      |-2-|      |-3-|          two rooms: 2 arrives when 0 has left
          compute       |----0----|----1----|----2----|
          d2h                     |-0-|     |-1-|
        ```
        """
        over_s, update_s = self.over_s, self.price.device_update_s[work.name]
        if over_s[COMPUTE] != self._whole_over_s:  # compute did something else before: both rooms are free
            self._room_s = over_s[COMPUTE]
        begin_s = max(over_s[work.actor], over_s[PROGRAM], self._room_s)
        each_s, pace_s = update_s / copies.num_pieces, copies.pace_s(update_s)
        first_s = max(over_s[COMPUTE], begin_s + copies.first_s) + each_s
        last_s = first_s + (copies.num_pieces - 1) * pace_s
        over_s[work.over], over_s[work.actor] = last_s - update_s, last_s - each_s
        self._streamed_since_s = first_s
        # The piece before the last one leaves while that is updated; with a single piece, the bucket before does.
        self._room_s = max(over_s[self._lane_of[D2H]], last_s - each_s + copies.last_s)
        self._draw(work.do, work.name, begin_s, begin_s + copies.there_s)

    def _streams(self, name: str) -> StreamedCopies:
        return self.price.streams[name, self._placements[BucketId(name)].param]

    # Updates beside the step.

    def _gather_late(self, work: Work) -> None:
        """Let the thread of the updates issue the copy, if the update is under way then and nobody has to wait for it.

        All wait for it if copies run on the compute lane.
        """
        over_s, done = self.over_s, work.after[0]
        if over_s[done] > over_s[PROGRAM] and self._h2d != COMPUTE:
            heappush(self._waiting, Arrival(over_s[done], work.name, over_s[COMPUTE], work.over, True))
            self._late.add(work.name)
            over_s[done] = _LONG_AGO_S
            return
        self._await(work.name, done, NEVER)
        self.run((work._replace(do=Do.GATHER, after=work.after[1:]),))

    def _await(self, name: str, done: Instant, returned: Instant) -> None:
        """Let the program wait for the update of a bucket, and compute for its way back to the device."""
        over_s = self.over_s
        if name in self._late:  # then the late copies up to it are issued first
            since_s = _LONG_AGO_S
            while name in self._late:
                since_s = self._land()
            self._stall(since_s, over_s[PROGRAM])
        if over_s[done] > _LONG_AGO_S:
            self._stall(over_s[done], over_s[PROGRAM])
            over_s[done] = _LONG_AGO_S
        if over_s[returned] > over_s[COMPUTE]:
            self.stalled_s += over_s[returned] - over_s[COMPUTE]
            over_s[COMPUTE] = over_s[returned]
        over_s[returned] = _LONG_AGO_S

    def _stall(self, until_s: float, since_s: float) -> None:
        """Let the program, and so all that it issues from now on, wait for an update from `since_s` until `until_s`."""
        over_s = self.over_s
        self.stalled_s += max(0.0, until_s - max(over_s[COMPUTE], since_s))
        over_s[PROGRAM] = max(over_s[PROGRAM], until_s)
        over_s[COMPUTE] = max(over_s[COMPUTE], until_s)

    def _land_due(self) -> None:
        """Issue the copies that the thread of the updates has issued before the program goes on."""
        while self._waiting and self._waiting[0].since_s <= self.over_s[PROGRAM]:
            self._land()

    def _land(self) -> float:
        since_s, name, allocated_s, over, is_gathered = heappop(self._waiting)
        self._late.remove(name)
        seconds, memory_s = self.price.of_deed[Do.GATHER][name]
        over_s, h2d = self.over_s, self._h2d
        begin_s = max(over_s[h2d], since_s, allocated_s)
        over_s[h2d] = over_s[over] = end_s = begin_s + seconds
        self.memory_s += memory_s
        self._draw(Do.GATHER if is_gathered else Do.RETURN, name, begin_s, end_s)
        return since_s

    # Steps.

    def begin(self) -> None:
        """Begin a step of several: forget what was counted and drawn in the step before."""
        self.stalled_s = 0.0
        if self.drawing is not None:
            self.drawing.spans = []

    def rounded(self) -> object:
        """Return the state of the lanes at the start of a step, rounded for comparison."""
        over_s = self.over_s
        own = [(number, round(s / _ROUNDING_S)) for number, s in enumerate(over_s) if s > _LONG_AGO_S]
        return own, [(arrival.bucket, round(arrival.since_s / _ROUNDING_S)) for arrival in sorted(self._waiting)]

    def begin_again(self, passed_s: float) -> None:
        """Start the next step after `passed_s`.

        The thread that trains may issue the next step before, by at most a step: nothing may ever let it wait.
        """
        self.memory_s = 0.0
        issued_s = max(self.over_s[PROGRAM] - passed_s, -passed_s)
        since_s = passed_s + issued_s
        lanes = [max(seconds - passed_s, issued_s) for seconds in self.over_s[:PROGRAM]]
        own = [seconds - passed_s if seconds > since_s else _LONG_AGO_S for seconds in self.over_s[PROGRAM + 1 :]]
        self.over_s[:] = [*lanes, issued_s, *own]
        self._waiting[:] = [
            each._replace(since_s=each.since_s - passed_s, allocated_s=each.allocated_s - passed_s)
            for each in self._waiting
        ]

    # Collectives of several ranks.

    def ready_s(self, work: Work) -> float:
        """Return when this rank could begin a collective."""
        return max(self.over_s[work.actor], self.over_s[PROGRAM], *(self.over_s[instant] for instant in work.after))

    def meet(self, work: Work, begin_s: float, seconds: float) -> None:
        """Let the collective begin at `begin_s` and take `seconds`, as on all ranks."""
        self.over_s[work.actor] = self.over_s[work.over] = begin_s + seconds
        self._draw(work.do, work.name, begin_s, begin_s + seconds)

    def _draw(self, do: Deed, name: str, begin_s: float, end_s: float) -> None:
        """Add a span to the drawing, if there is one."""
        if self.drawing is not None:
            self.drawing.add(do, name, begin_s, end_s)


def simulate(graph: StepGraph, plan: Plan, cluster: Cluster, measured: Measured = _NOT_MEASURED) -> Record:
    """Return the record of rank 0 in a step of `plan`: spans, counts, seconds, and the peaks of its timeline.

    All other ranks are taken to be as this one; `simulate_ranks` simulates ranks that differ.
    """
    player = player_of(graph, plan, cluster, measured)
    return _record(graph, plan, player, _play([player], [plan.schedules[0].pairs]))


def play(
    actions: Iterable[tuple[Verb, Target]],
    run_s: Mapping[RegionId, float],
    placements: Mapping[BucketId, Placement],
    price: Prices,
    drawing: Drawing | None = None,
    cycle: Cycle = _ONE_STEP,
    copies: Mapping[RegionId, LapCopies | None] = MappingProxyType({}),
) -> Played:
    """Return the seconds of a step of `actions`, pairs of verb and target, in steady state.

    `run_s` holds the seconds of each region, and `copies` the copies of activations that run beside it. `drawing`
    takes the spans of all lanes.
    """
    player = Player(run_s, placements, price, drawing, cycle, copies)
    step_s = _play([player], [tuple(actions)])
    return Played(step_s=step_s, stalled_s=player.stalled_s + player.short_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """The step of a class of like ranks: what a rank runs, and on what."""

    graph: StepGraph
    plan: Plan
    cluster: Cluster
    measured: Measured


def simulate_ranks(steps: Sequence[RankStep]) -> tuple[Record, ...]:
    """Return the record of a rank of each class; the seconds of all records are those of the slowest.

    Raises InvalidPlan if the plans issue other collectives.
    """
    players = [player_of(step.graph, step.plan, step.cluster, step.measured) for step in steps]
    step_s = _play(players, [step.plan.schedules[0].pairs for step in steps])
    return tuple(_record(step.graph, step.plan, player, step_s) for step, player in zip(steps, players, strict=True))


def busy_share(record: Record) -> float:
    """Return the share of the step in which the device of `record` computes; 0 for a step without seconds."""
    busy_s = sum(span.end_s - span.start_s for span in record.spans if span.lane is Lane.COMPUTE)
    return min(1.0, busy_s / record.step_s) if record.step_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FurtherCall:
    """The seconds of a call that is neither the first nor the last of its step."""

    step_s: float
    exposed_s: float
    """Seconds in which its regions wait for transfers of activations."""


def further_call(graph: StepGraph, plan: Plan, cluster: Cluster, measured: Measured) -> FurtherCall:
    """Return the seconds of a call of `plan` that gathers, reduces and updates nothing."""
    player = player_of(graph, replace(plan, update=Update.AFTER_BACKWARD), cluster, measured)
    own = [action for action in plan.schedules[0].pairs if isinstance(action[1], RegionRef | GroupRef)]
    step_s = _play([player], [own])
    return FurtherCall(step_s=step_s, exposed_s=max(0.0, step_s - sum(player.run_s.values())))


def player_of(graph: StepGraph, plan: Plan, cluster: Cluster, measured: Measured = _NOT_MEASURED) -> Player:
    """Return a player of the actions of `plan`, a plan of `graph`, that draws."""
    index = {op.id: i for i, op in enumerate(as_run(graph, plan.activations, laps_of(plan)).ops)}
    price = prices(graph, plan.buckets, cluster, measured, plan.activations, plan.num_copies, laps_of(plan))
    cycle = Cycle(
        update=plan.update,
        reads={region.id: region.buckets for region in plan.regions},
        closing=closing_verbs(plan) if plan.update is Update.IN_BACKWARD else {},
        last_forward=last_forward(plan.regions, plan.schedules[0].pairs),
    )
    return Player(
        {region.id: price.run_s(index[region.first], index[region.last]) for region in plan.regions},
        {placement.bucket: placement for placement in plan.placements},
        price,
        Drawing(graph=plan.name, nbytes=traffic(graph, plan)),
        cycle,
        {region.id: price.lap_copies.get(index[region.first]) for region in plan.regions},
    )


def _record(graph: StepGraph, plan: Plan, player: Player, step_s: float) -> Record:
    """Return the record of a step of `plan`, a plan of `graph`, that `player` has played and that took `step_s`."""
    timeline = plan_timeline(graph, plan)
    return Record(
        origin=Origin.SIMULATED,
        step_s=step_s,
        device_peak_bytes=timeline.peak.nbytes,
        host_peak_bytes=timeline.host_bytes,
        spans=() if player.drawing is None else tuple(player.drawing.spans),
        counts=dict(sorted(Counter(action.verb.value for action in plan.schedules[0].actions).items())),
    )


def _play(players: Sequence[Player], actions: Sequence[Actions]) -> float:
    """Return the seconds of a step of `players`, one for each rank, with the `actions` of each, in steady state.

    Steps whose updates run on beside the next one are simulated until all lanes are in the same state after a step as
    before it. Raises InvalidPlan if the ranks issue other collectives.
    """
    if len(players) > 1:
        _require_same_collectives(players, actions)
    works = [player.works_of(own) for player, own in zip(players, actions, strict=True)]
    if all(player.cycle.update is Update.AFTER_BACKWARD for player in players):
        _play_jointly(players, works)
        return _end(players, max(max(player.over_s[: PROGRAM + 1]) for player in players))
    states, step_s = [player.rounded() for player in players], 0.0
    for _ in range(_MOST_CYCLES):
        for player in players:
            player.begin()
        _play_jointly(players, works)
        passed_s = max(max(player.over_s[PROGRAM], player.over_s[COMPUTE]) for player in players)
        step_s = _end(players, passed_s)
        for player in players:
            player.begin_again(passed_s)
        before, states = states, [player.rounded() for player in players]
        if before == states:
            break
    for player in players:
        if player.drawing is None:
            continue
        for at, span in enumerate(player.drawing.spans):
            # A span that begins in the step before or in the next one is as its like that begins in this step.
            later_s = step_s if span.start_s < 0 else -step_s if span.start_s >= step_s else 0.0
            if later_s:
                moved = replace(span, start_s=span.start_s + later_s, end_s=span.end_s + later_s)
                player.drawing.spans[at] = moved
    return step_s


def _end(players: Sequence[Player], passed_s: float) -> float:
    """Return the seconds of a step that took `passed_s`, or longer if the memory of a host needs longer."""
    for player in players:
        player.short_s = max(player.memory_s - passed_s, 0.0)
    return passed_s + max(player.short_s for player in players)


def _play_jointly(players: Sequence[Player], works: Sequence[Sequence[Work]]) -> None:
    """Simulate one step; several ranks are simulated from each collective of all to the next."""
    if len(players) == 1:
        players[0].run(works[0])
        return
    meetings = [[at for at, work in enumerate(own) if work.do in _COLLECTIVES] for own in works]
    done = [0] * len(players)
    for places in zip(*meetings, strict=True):
        for number, (player, place) in enumerate(zip(players, places, strict=True)):
            player.run(works[number][done[number] : place])
            done[number] = place + 1
        met = [own[place] for own, place in zip(works, places, strict=True)]
        begin_s = max(player.ready_s(work) for player, work in zip(players, met, strict=True))
        seconds = max(player.price.of_deed[work.do][work.name][0] for player, work in zip(players, met, strict=True))
        for player, work in zip(players, met, strict=True):
            player.meet(work, begin_s, seconds)
    for player, own, place in zip(players, works, done, strict=True):
        player.run(own[place:])


def _require_same_collectives(players: Sequence[Player], actions: Sequence[Actions]) -> None:
    issued = [
        [
            (verb, target.bucket)
            for verb, target in own
            if isinstance(target, BucketRef)
            # A bucket that is not sharded is copied from the host of each rank alone.
            and (verb is Verb.REDUCE or (verb is Verb.GATHER and target.bucket in player.price.sharded))
        ]
        for player, own in zip(players, actions, strict=True)
    ]
    for each in zip_longest(*issued):
        if any(other != each[0] for other in each):
            raise InvalidPlan(f"ranks issue other collectives: {', '.join(map(str, each))}.")


# ----------------------------------------------------------------------------------------------------------------------
# Figures of a simulated step: exposed and hidden transfers, the critical path, and the prediction for a plan.


_TRANSFERS = frozenset({Lane.H2D, Lane.D2H, Lane.GATHER, Lane.REDUCE, Lane.P2P})


def exposed_s(record: Record) -> float:
    """Return the seconds of transfers during which the compute lane is idle; simultaneous transfers count each."""
    compute = sorted(
        (span for span in record.spans if span.lane is Lane.COMPUTE and span.end_s > span.start_s),
        key=lambda span: span.start_s,
    )
    starts_s = [span.start_s for span in compute]
    total_s = 0.0
    for span in record.spans:
        if span.lane in _TRANSFERS:
            total_s += span.end_s - span.start_s - _covered_s(span, compute, starts_s)
            if span.end_s > record.step_s:
                # The end of this span runs in the next step, beside compute as at the beginning of this step.
                start_s, end_s = max(span.start_s - record.step_s, 0.0), span.end_s - record.step_s
                total_s -= _covered_s(replace(span, start_s=start_s, end_s=end_s), compute, starts_s)
    return max(0.0, total_s)  # rounded, what covers a transfer may be longer than it


def critical_path(record: Record) -> tuple[Span, ...]:
    """Return the spans of a simulated step that lead without a gap to its end.

    The step gets shorter only if a span among them gets shorter.
    """
    ends: dict[float, Span] = {}
    for span in record.spans:
        # If a span of compute ends together with another, it is on the path.
        is_first = span.end_s not in ends or span.lane is Lane.COMPUTE
        if span.end_s > span.start_s and is_first:
            ends[span.end_s] = span
    path: list[Span] = []
    at_s = max(ends, default=0.0)
    while at_s in ends:
        path.append(ends[at_s])
        at_s = path[-1].start_s
    return tuple(reversed(path))


def hidden_share(record: Record) -> float:
    """Return the share of transfer seconds beside compute, 0 to 1; 1 if nothing is transferred."""
    total_s = sum(span.end_s - span.start_s for span in record.spans if span.lane in _TRANSFERS)
    return 1.0 if total_s == 0 else min(1.0, max(0.0, 1.0 - exposed_s(record) / total_s))


def hidden_update_share(record: Record) -> float:
    """Return the share of the host's update seconds beside compute, 0 to 1; 1 if the host updates nothing."""
    updates = (replace(span, lane=Lane.H2D) for span in record.spans if span.lane is Lane.HOST)
    compute = (span for span in record.spans if span.lane is Lane.COMPUTE)
    return hidden_share(replace(record, spans=(*compute, *updates)))


def _covered_s(span: Span, compute: list[Span], starts_s: list[float]) -> float:
    """Return the seconds of `span` beside `compute`, which are sorted spans without overlap."""
    covered_s = 0.0
    i = max(bisect_right(starts_s, span.start_s) - 1, 0)
    while i < len(compute) and compute[i].start_s < span.end_s:
        covered_s += max(0.0, min(span.end_s, compute[i].end_s) - max(span.start_s, compute[i].start_s))
        i += 1
    return covered_s


def prediction_of(record: Record, device_peak_bytes: int, device_peak_at: OpId) -> Prediction:
    """Return the prediction of `record`, with the device peak and its op from the timeline."""
    return Prediction(
        step_s=record.step_s,
        exposed_s=exposed_s(record),
        hidden_share=hidden_share(record),
        device_peak_bytes=device_peak_bytes,
        device_peak_at=device_peak_at,
        host_peak_bytes=record.host_peak_bytes,
    )
