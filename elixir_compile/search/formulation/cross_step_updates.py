"""Describe forward, backward and updates as flow shops: seconds of work by lane and event, linear in the decisions of
the mixed-integer program, for each update mode.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from scipy import sparse

from elixir_compile.ir import GroupId, Lane, Tier, Update
from elixir_compile.ir.cost import StreamedCopies
from elixir_compile.search.formulation.flow_shop import Chain, Choice, Gate, Gated, Phase, Queue, Shop, Table
from elixir_compile.search.problem import asked_time
from elixir_compile.search.space.buckets import Level, is_gathered
from elixir_compile.search.space.facts import Facts, Trip
from elixir_compile.search.space.profiles import Profile
from elixir_compile.step.prices import Prices, crossing_s

# ----------------------------------------------------------------------------------------------------------------------
# Forward and backward as flow shops: seconds of work by lane and event that are linear in the decisions.
#
# The events of a phase, in order, are the ops at which a bucket's uses begin, a bucket's gradients are complete, or
# activations leave the device or are needed again. The work on each lane at event i depends on the levels of buckets
# and the modes of layers:
#
#     h2d      h_i   the shard of one rank comes from the host    before the ops of event i
#     gather   a_i   then the shards of the other ranks           before the ops of event i
#     compute  c_i   the ops from event i to event i + 1, with the ops that a layer's mode recomputes
#     reduce   r_i   complete gradients are reduced over ranks    after the ops before event i
#     averages v_i   then averaged over copies of the shard       after the ops before event i
#     d2h      d_i   then the reduced shard goes to the host      after the ops before event i
#
# The longest path (see `flow_shop`) is a lower limit on the seconds of the phase for every plan, whatever its prefetch
# distances. If another lane does the work of a lane (a CPU copies for itself), the seconds are added to that other
# lane.
#
# Gathers and reduces are one queue, in the order of issue (see the actors in `step.works`). How far a gather is ahead
# of the reduces is a matter of distances, but a reduce is never ahead of the gather of an earlier event: compute has
# waited for that gather before it made the gradient. So in the backward a path through the queue, without compute, is
# a lower limit too. It is the longest if collectives take longer than compute:
#
#     h2d          h[0..i]
#     collectives          a_i + r_i + .. + a_l + r_l
#     averages, d2h                                   v[l..m] + d[m..end]
#
# When the last gradient has come to the host, the thread that trains goes on there, while compute may still be in the
# backward: `RunTables.arrival` is the flow shop up to then. Only ops before the last such gradient count in it.
#
# The second half of this file adds the updates.


class Span(NamedTuple):
    """The ops of a phase, by index: from `first` to before `end`."""

    name: str
    first: int
    end: int

    def holds(self, op: int) -> bool:
        return self.first <= op < self.end


def forward_of(facts: Facts) -> Span:
    """Return the ops of the forward."""
    return Span("forward", 0, facts.num_forward)


def _spans(facts: Facts) -> list[Span]:
    backward = [Span("backward", facts.num_forward, facts.num_run)] if facts.num_run > facts.num_forward else []
    return [forward_of(facts), *backward]


def of_buckets(facts: Facts, choices: Mapping[Choice, int]) -> Iterator[tuple[int, Level]]:
    """Yield the choices of buckets, as (bucket index, level)."""
    return ((i, Level(level)) for i, level in choices if i < len(facts.buckets))


class RunTable(NamedTuple):
    """The work of a phase by lane and event, and the number of each event."""

    table: Table
    event_of: Mapping[tuple[int, bool, int], int]
    """Number of an event by the fields of `_Event`."""


class RunTables:
    """The work of forward and backward, of which several flow shops are made. Each table is made once."""

    def __init__(
        self,
        facts: Facts,
        prices: Prices,
        columns: Mapping[Choice, int],
        profiles: Sequence[Sequence[Profile]] = (),
    ) -> None:
        """`columns` numbers the entries of x; `profiles` has the profile of each mode of each layer."""
        self.facts, self.prices, self.columns, self.profiles = facts, prices, columns, profiles
        # Modes of the same depth have the same trips.
        trips = {id(trip): trip for layer in profiles for profile in layer for trip in profile.trips}
        self._trips = tuple(trips.values())
        groups = dict.fromkeys(trip.group for trip in self._trips)
        self._numbers = {group: number for number, group in enumerate(groups, start=len(facts.buckets))}
        """A number for each group that may be offloaded, counted on from the number of buckets."""
        self._made: dict[tuple[Span, bool], RunTable] = {}

    @property
    def is_host_early(self) -> bool:
        """Whether the host may update before compute is through the backward and its sums.

        It may not if copies are work for compute, for which it waits, and compute has no sums to make behind them.
        """
        is_beside = all(self.prices.lane_of[lane] is lane for lane in (Lane.H2D, Lane.D2H))
        return is_beside or (bool(self.prices.add_s) and not self.prices.is_one_memory)

    def arrivals(self, *, counts_trips: bool = False) -> list[Gated]:
        """Return the flow shops of the backward up to the last gradient that comes to the host, all of one gate; none
        if the step does not train. `counts_trips` as in `phases`."""
        spans_of_step = _spans(self.facts)
        if len(spans_of_step) < 2:
            return []
        run = self._of(spans_of_step[1], counts_trips=counts_trips)
        by_event: dict[int, dict[int, float]] = {}
        for i, level in of_buckets(self.facts, self.columns):
            gradients = self.facts.gradients[i]
            if level.has_param_on_host and gradients is not None and spans_of_step[1].holds(gradients.complete):
                event = run.event_of[gradients.complete + 1, False, i]
                by_event.setdefault(event, {})[self.columns[i, level]] = 1.0
        events = sorted(by_event)
        gate = Gate(
            takers=[by_event[event] for event in events],
            others=list(self._late_copies(spans_of_step[1], run, events)) if counts_trips else (),
        )
        found: list[Gated] = []
        for phase in (run.table.phase(), *self.collectives(counts_trips=counts_trips)):
            starts = np.full((len(phase.lanes), phase.num_events), -1)
            for row, lane in enumerate(phase.lanes):
                if lane not in (Lane.H2D, Lane.D2H):
                    # Gathers and ops count if a gradient leaves behind them, other collectives also if it does with
                    # them. No gradient leaves at the event of a gather.
                    starts[row] = np.searchsorted(events, np.arange(phase.num_events) + (lane is Lane.COMPUTE))
            found.append(Gated(phase=phase, gate=gate, starts=starts.ravel()))
        return found

    def _late_copies(
        self, span: Span, run: RunTable, events: Sequence[int]
    ) -> Iterator[tuple[int, Mapping[int, float]]]:
        """Yield the modes of each layer whose activations come back to the device behind one of the `events`, with the
        number of the last such event.

        The thread that trains waits for these copies at the end of the backward. They come as late as they may, so it
        waits for the ops before them too.
        """
        for i, layer in enumerate(self.profiles, start=len(self.facts.buckets)):
            late: dict[int, dict[int, float]] = {}
            for mode, profile in enumerate(layer):
                places = [
                    (trip.first, True, self._numbers[trip.group]) for trip in profile.trips if span.holds(trip.first)
                ]
                if places:
                    number = bisect_left(events, max(run.event_of[place] for place in places)) - 1
                    late.setdefault(number, {})[self.columns[i, mode]] = 1.0
            yield from ((number, modes) for number, modes in late.items() if number >= 0)

    def host_sums(self) -> Phase | None:
        """Return the seconds in which the thread that trains adds gradients to their sums on the host, as one event;
        None if it adds nothing beside compute."""
        if not self.prices.add_s or self.prices.is_one_memory:
            return None
        table = Table("backward", (Lane.HOST,), 1, self.columns)
        for i, level in of_buckets(self.facts, self.columns):
            if level.home is Tier.HOST and self.facts.gradients[i] is not None:
                table.add(Lane.HOST, 0, (i, level), self.prices.add_s.get((self.facts.buckets[i].id, Tier.HOST), 0.0))
        return table.phase()

    def shops(self, *, counts_trips: bool = False) -> list[list[Shop]]:
        """Return the flow shops of each phase: of the forward and, if the step trains, of the backward.

        Compute works again when the host has added the gradients that came to it.
        """
        found: list[list[Shop]] = [[phase] for phase in self.phases(counts_trips=counts_trips)]
        if len(found) > 1:
            found[1] += self.collectives(counts_trips=counts_trips)
        sums = self.host_sums()
        if sums is not None:
            arrivals = self.arrivals(counts_trips=counts_trips)
            found[-1] += [Chain(name="backward", shops=(arrival, sums)) for arrival in arrivals]
        return found

    def phases(self, *, counts_trips: bool = False) -> list[Phase]:
        """Return the flow shop of the forward and, if the step trains, of the backward, without the host.

        Copies of activations are counted on one rank, and on several ranks if `counts_trips`.
        """
        return [self._of(span, counts_trips=counts_trips).table.phase() for span in _spans(self.facts)]

    def forward(self, *, counts_trips: bool = False) -> RunTable:
        """Return the work of the forward; `counts_trips` as in `phases`."""
        return self._of(forward_of(self.facts), counts_trips=counts_trips)

    def copies(self) -> list[Phase]:
        """Return the phases of a step on several ranks with the copies of activations and without collectives.

        An op waits for the copies to the device of all buckets and activations needed up to it, whatever their order on
        the link. The copies to the host share a link as well. Collectives wait for no copy of activations, so they are
        left out. Only valid for machines on which all transfers run beside compute.
        """
        lanes: dict[Lane | Queue, Lane | Queue] = {lane: lane for lane in (Lane.H2D, Lane.COMPUTE, Lane.D2H)}
        return [self._through(lanes, self._of(span, counts_trips=True).table) for span in _spans(self.facts)]

    def collectives(self, *, counts_trips: bool = False) -> list[Phase]:
        """Return the flow shop of the backward through the one queue of gathers and reduces; none on one rank, or if
        compute itself does the collectives. `counts_trips` as in `phases`."""
        spans_of_step = _spans(self.facts)
        is_queue = self.facts.problem.cluster.num_ranks > 1 and self.prices.lane_of[Lane.GATHER] is Lane.GATHER
        if len(spans_of_step) < 2 or not is_queue:
            return []
        run = self._of(spans_of_step[1], counts_trips=counts_trips).table
        queues: dict[Lane | Queue, Queue] = {Lane.GATHER: Queue.COLLECTIVES, Lane.REDUCE: Queue.COLLECTIVES}
        return [self._through({lane: queues.get(lane, lane) for lane in run.lanes if lane is not Lane.COMPUTE}, run)]

    def _through(self, lanes: Mapping[Lane | Queue, Lane | Queue], run: Table) -> Phase:
        """Return the flow shop of the work that `run` has on some `lanes`, each with the lane that does it here."""
        table = Table(run.name, tuple(dict.fromkeys(lanes.values())), run.num_events, self.columns)
        for lane, own in lanes.items():
            run.copy_lane(lane, table, own)
        return table.phase()

    def _of(self, span: Span, *, counts_trips: bool) -> RunTable:
        key = span, counts_trips or self.facts.problem.cluster.num_ranks == 1
        if key not in self._made:
            self._made[key] = self._table(*key)
        return self._made[key]

    def _table(self, span: Span, has_trips: bool) -> RunTable:
        facts, prices = self.facts, self.prices
        events = _events(facts, span, self._trips, self._numbers)
        averages = (Queue.AVERAGES,) if prices.average_s else ()
        lanes = (Lane.H2D, Lane.GATHER, Lane.COMPUTE, Lane.REDUCE, *averages, Lane.D2H)
        table = Table(span.name, lanes, len(events), self.columns)
        # Ops up to the next place belong to the last event at their place.
        row = table.lanes.index(Lane.COMPUTE)
        for number, (event, stop) in enumerate(
            zip(events, [*(own.place for own in events[1:]), span.end], strict=True)
        ):
            if stop > event.place:
                table.constants_s[row, number] = prices.run_s(event.place, stop - 1)
        event_of = {(event.place, event.gathers, event.bucket): number for number, event in enumerate(events)}
        self._add_modes(table, span, events, event_of, has_trips)
        # Copies to the device may be counted on every path, unless a copy is work for compute: it can run early, before
        # a path that begins with all-gathers reaches compute. Then the all-gather behind it is left out as well.
        counts_copies = prices.lane_of[Lane.H2D] is not Lane.COMPUTE or prices.lane_of[Lane.GATHER] is Lane.COMPUTE
        for i, level in of_buckets(facts, self.columns):
            gradients, name, is_away = facts.gradients[i], facts.buckets[i].id, level.has_param_on_host
            if not is_gathered(facts.buckets[i], level):
                continue
            for first_use, _ in facts.copies[i][level]:
                if span.holds(first_use) and (counts_copies or not is_away):
                    event = event_of[first_use, True, i]
                    _add(table, prices, Lane.H2D, event, (i, level), prices.h2d_s[name] if is_away else 0.0)
                    _add(table, prices, Lane.GATHER, event, (i, level), prices.gather_s[name])
            if gradients is not None and span.holds(gradients.complete):
                event = event_of[gradients.complete + 1, False, i]
                _add(table, prices, Lane.REDUCE, event, (i, level), prices.reduce_s[name])
                for queue in averages:
                    own = queue if prices.lane_of[Lane.REDUCE] is Lane.REDUCE else Lane.COMPUTE
                    table.add(own, event, (i, level), prices.average_s[name])
                _add(table, prices, Lane.D2H, event, (i, level), prices.d2h_s[name] if is_away else 0.0)
        # Gradients are added to their sums at the end of the backward.
        for i, level in of_buckets(facts, self.columns) if prices.add_s else ():
            gradients, add_s = facts.gradients[i], prices.add_s.get((facts.buckets[i].id, level.home), 0.0)
            is_here = level.home is not Tier.HOST or prices.is_one_memory
            if is_here and gradients is not None and span.holds(gradients.complete):
                table.add(Lane.COMPUTE, len(events) - 1, (i, level), add_s)
        return RunTable(table, event_of)

    def _add_modes(
        self,
        table: Table,
        span: Span,
        events: Sequence["_Event"],
        event_of: Mapping[tuple[int, bool, int], int],
        has_trips: bool,
    ) -> None:
        """Add the recomputed ops of each mode of each layer and, if `has_trips`, its copies of activations."""
        places = [(event.place, event.gathers) for event in events]
        for number, layer in enumerate(self.profiles, start=len(self.facts.buckets)):
            added: Sequence[tuple[int, float]] | None = None
            rows: list[int] = []
            seconds: list[float] = []
            for mode, profile in enumerate(layer):
                # Modes of the same depth, which come one after another, have the same seconds.
                if profile.added_s is not added:
                    added = profile.added_s
                    here = [(point, point_s) for point, point_s in added if point_s and span.holds(point)]
                    # Recomputed ops run after transfers out of the op before, and before the op waits for transfers in.
                    rows = [bisect_right(places, (point, False)) - 1 for point, _ in here]
                    seconds = [point_s for _, point_s in here]
                table.add_each(Lane.COMPUTE, rows, (number, mode), seconds)
                for trip in profile.trips if has_trips else ():
                    own = self._numbers[trip.group]
                    _add_trip(table, self.prices, self.facts, trip, (number, mode), event_of, own, places)


class _Event(NamedTuple):
    """A transfer of a bucket or a group of activations before an op; events sort in the order of the lanes."""

    place: int
    """Index of the op before which the event stands."""
    gathers: bool
    """True if uses begin at this op; False if gradients are complete or activations may leave, which sorts first."""
    bucket: int
    """A bucket's index, or a group's number in `RunTables`; -1 for the beginning of the phase."""


def _events(facts: Facts, span: Span, trips: Iterable[Trip], numbers: Mapping[GroupId, int]) -> list[_Event]:
    """Return the events of the phase `span`, in order.

    Two buckets at one op are two events: the copy of the second may run beside the all-gather of the first.
    """
    first, end = span.first, span.end
    found = {_Event(first, False, -1)}
    for trip in trips:
        if span.holds(trip.leave):
            found.add(_Event(trip.leave + 1, False, numbers[trip.group]))
        if span.holds(trip.first):
            found.add(_Event(trip.first, True, numbers[trip.group]))
    for i, (windows, gradients) in enumerate(zip(facts.windows, facts.gradients, strict=True)):
        found.update(_Event(window.first, True, i) for window in windows if first <= window.first < end)
        if gradients is not None and first <= gradients.complete < end:
            found.add(_Event(gradients.complete + 1, False, i))
    return sorted(found)


def _add_trip(
    table: Table,
    prices: Prices,
    facts: Facts,
    trip: Trip,
    choice: Choice,
    event_of: Mapping[tuple[int, bool, int], int],
    number: int,
    places: Sequence[tuple[int, bool]],
) -> None:
    """Add the copies of a group of activations: to the host after its last use in the forward, and back before its
    first use in the backward.

    Slices that are copied while their lap runs leave after the ops before the lap, and arrive before the ops behind it.
    """
    cluster, crosses = facts.problem.cluster, trip.crossings
    leave, back = event_of.get((trip.leave + 1, False, number)), event_of.get((trip.first, True, number))
    if leave is not None:
        at_once_s, beside_s = crossing_s(trip.nbytes, trip.num_copies, crosses.leaving, cluster.d2h)
        _add(table, prices, Lane.D2H, leave, choice, at_once_s)
        if crosses.leaving is not None:
            before = max(bisect_right(places, (crosses.leaving.first, False)) - 1, 0)
            _add(table, prices, Lane.D2H, before, choice, beside_s)
    if back is not None:
        at_once_s, beside_s = crossing_s(trip.nbytes, trip.num_copies, crosses.arriving, cluster.h2d)
        _add(table, prices, Lane.H2D, back, choice, at_once_s)
        behind = len(places) if crosses.arriving is None else bisect_left(places, (crosses.arriving.last + 1, False))
        if behind < len(places):
            _add(table, prices, Lane.H2D, behind, choice, beside_s)


def _add(table: Table, prices: Prices, lane: Lane, event: int, choice: Choice, seconds: float) -> None:
    table.add(prices.lane_of[lane], event, choice, seconds)


# ----------------------------------------------------------------------------------------------------------------------
# The flow shops of a step with its updates, for each update mode; their work is linear in the decisions.
#
# The host works from the moment when the last gradient has come to it (`RunTables.arrival`), while compute may still be
# in the backward; buckets whose parameters are on the device wait for compute, because their copies do.
#
# `after_backward`: the update is a phase with one event per bucket with parameters on the device: its parameters and
# gradients go to the host, the host updates, its parameters come back. Device updates are compute. All updates by the
# host together go through backward and update: T_backward + T_update >= arrival + u_0..u_end.
#
# `across_steps`: a step is device updates and streamed updates, forward, backward. The host updates beside all three
# phases, bucket by bucket. The copy of a bucket to the device waits for its update, even if its gather was issued
# early, and compute waits for the copy at the first use of the bucket. So paths with host updates go through backward,
# update and forward together:
#
#     host     u_b0 | u_b1 | u_b2 | ...               the update of b1 ends, then its gather (or copy back) begins,
#     h2d                  | b1 | b2 | ...            then the ops from its first use on
#     compute                   | h.1 | h.2 | ...     T >= arrival + u_0..u_i + h_i..h_j + c_j..c_end
#
# Only copies of buckets with host updates are on these paths, because other copies need not wait for the host.
#
# `in_backward`: compute does all its work within one step, and so does the host. Nothing else is assumed.
#
# In each mode, a step takes at least as long as the host's memory takes for all copies and host updates.
#
# A streamed update is a column from 0 to 1 for each bucket and home of its parameters. It is at most the sum of the
# bucket's levels with state on the host and this home. It takes away the host's update, and adds two copies and the
# device's update to compute.


_ROUND_TRIP = (Lane.D2H, Lane.HOST, Lane.H2D)
HOST_MEMORY = "host memory"
"""The name of the flow shop of the traffic of the host's memory."""


class Shops(NamedTuple):
    """The flow shops of a step."""

    phases: list[list[Shop]]
    """The flow shops of each phase, in the order of the phases; a phase takes as long as its longest flow shop."""
    across: list[Shop]
    """Flow shops that go through several phases."""
    spanned: tuple[int, ...]
    """The indices in `phases` of the phases that flow shops in `across` go through."""
    whole_step: list[Shop]
    """Flow shops of the entire step: the traffic of the host's memory, and what the host does across steps."""
    gates: Sequence[Gate] = ()
    """The gates of all of these shops."""


def stream_choices(facts: Facts) -> list[tuple[int, Tier, Choice]]:
    """Return (bucket, home of its parameters, choice) of every update that may be streamed."""
    start = len(facts.buckets) + len(facts.layers)
    return [
        (i, home, (start + i, home is Tier.HOST))
        for i in sorted(facts.streamable)
        for home in (Tier.DEVICE, Tier.HOST)
        if any(level.home is home for level in facts.choices[i] if level.has_state_on_host)
    ]


def flow_shops(runs: RunTables, *, counts_trips: bool = False) -> Shops:
    """Return the flow shops of a step in the problem's update mode.

    If `counts_trips`, copies of activations are on the paths of several ranks too; such paths prove no bound.
    """
    facts, prices, columns = runs.facts, runs.prices, runs.columns
    forward_backward = runs.shops(counts_trips=counts_trips)
    # `copies` is only valid if all transfers run beside compute. Otherwise collectives are work for compute and may run
    # early, ahead of an op in wait for activations.
    is_beside = all(prices.lane_of[lane] is lane for lane in (Lane.H2D, Lane.GATHER, Lane.REDUCE, Lane.D2H))
    if facts.problem.cluster.num_ranks > 1 and is_beside and not counts_trips:
        for side, copied in zip(forward_backward, runs.copies(), strict=True):
            side.insert(1, copied)
    if not facts.is_training:
        return Shops(forward_backward, [], (), [])
    whole_step: list[Shop] = [_host_memory(facts, prices, columns)] if prices.memory.update_s else []
    update, arrivals, sums = asked_time(facts.problem), runs.arrivals(counts_trips=counts_trips), runs.host_sums()
    is_early = runs.is_host_early and bool(arrivals)
    before = [(arrival, *(() if sums is None else (sums,))) for arrival in arrivals]
    is_in_backward = update is Update.IN_BACKWARD and set(prices.lane_of.values()) != {Lane.COMPUTE}
    gates = [own.gate for own in arrivals[:1] if sums is not None or (is_early and not is_in_backward)]
    if is_in_backward:
        all_phases = tuple(range(len(forward_backward)))
        return Shops(forward_backward, _totals(runs), all_phases, whole_step, gates)
    if update is not Update.ACROSS_STEPS or prices.is_one_memory:
        phases = [*forward_backward, _updates(facts, prices, columns, is_early=is_early)]
        updates = Table("update", (Lane.HOST,), 1, columns)  # all of them as one event
        for i, level in of_buckets(facts, columns):
            if facts.buckets[i].trainable and level.has_state_on_host and i not in facts.streamed:
                updates.add(Lane.HOST, 0, (i, level), prices.host_update_s[facts.buckets[i].id])
        phase = updates.phase()
        chains: list[Shop] = [Chain(name="backward and update", shops=(*shops, phase)) for shops in before]
        return Shops(phases, chains if is_early else [], (1, 2), whole_step, gates)
    cycle = _CrossStepUpdates(runs, counts_trips=counts_trips)
    phases = [cycle.before_forward(), *forward_backward]
    if prices.lane_of[Lane.H2D] is not Lane.H2D:
        # A copy that is work for compute may run early, before compute waits for the host, so no path can contain it.
        return Shops(phases, [], (0, 1), whole_step, gates)
    trips, copies, host_first = cycle.round_trips(), cycle.all_copies(), cycle.host_first()
    if not is_early:
        return Shops(phases, [host_first, trips, *copies], (0, 1), whole_step, gates)
    late_trips = cycle.behind_copies(trips, first=len(gates[0].takers))
    whole_step += [Chain(name="step", shops=(*shops, host_first)) for shops in before]
    return Shops(phases, [late_trips, *copies], (0, 1), whole_step, [*gates, late_trips.gate])


def _stream_s(facts: Facts, prices: Prices, i: int, home: Tier) -> float:
    """Return the seconds of compute that a streamed update of bucket i takes, its parameters at `home`."""
    name = facts.buckets[i].id
    return prices.streams[name, home].alone_s + prices.device_update_s[name]


def _updates(facts: Facts, prices: Prices, columns: Mapping[Choice, int], *, is_early: bool) -> list[Shop]:
    """Return the flow shops of an update after the backward: device updates, and host updates with their copies.

    The two run side by side; if device and host are one memory, all updates are in one flow shop. If the host
    `is_early`, it may have updated buckets whose parameters it has before compute is through the backward; they are
    left out.
    """
    num_events = len(facts.buckets)
    device = Table("update", (Lane.COMPUTE,), num_events, columns)
    host = Table("update", _ROUND_TRIP, num_events, columns)
    is_serial = prices.is_one_memory
    for i, level in of_buckets(facts, columns):
        bucket = facts.buckets[i]
        if not bucket.trainable:
            continue
        if not level.has_state_on_host or i in facts.streamed:
            seconds = _stream_s(facts, prices, i, level.home) if level.has_state_on_host else 0.0
            device.add(Lane.COMPUTE, i, (i, level), seconds or prices.device_update_s[bucket.id])
            continue
        table = device if is_serial else host
        if not (is_early and level.has_param_on_host):
            table.add(Lane.COMPUTE if is_serial else Lane.HOST, i, (i, level), prices.host_update_s[bucket.id])
        if not level.has_param_on_host and not is_serial:
            for lane, seconds in ((Lane.D2H, prices.staged_s(bucket.id)), (Lane.H2D, prices.h2d_s[bucket.id])):
                overlaps = prices.lane_of[lane] is not Lane.COMPUTE
                (host if overlaps else device).add(lane if overlaps else Lane.COMPUTE, i, (i, level), seconds)
    return [device.phase()] if is_serial else [device.phase(), host.phase()]


def _totals(runs: RunTables) -> list[Shop]:
    """Return two flow shops: all ops and device updates of a step on one lane, all host updates on another."""
    facts, prices = runs.facts, runs.prices
    compute = Table("step", (Lane.COMPUTE,), 1, runs.columns)
    host = Table("step", (Lane.HOST,), 1, runs.columns)
    compute.constants_s[0, 0] = prices.run_s(0, facts.num_run - 1)
    for number, layer in enumerate(runs.profiles, start=len(facts.buckets)):
        for mode, profile in enumerate(layer):
            compute.add(Lane.COMPUTE, 0, (number, mode), sum(seconds for _, seconds in profile.added_s))
    for i, level in of_buckets(facts, runs.columns):
        name = facts.buckets[i].id
        if not level.has_state_on_host:
            compute.add(Lane.COMPUTE, 0, (i, level), prices.device_update_s[name])
        elif i not in facts.streamed:
            lane = prices.lane_of[Lane.HOST]
            (compute if lane is Lane.COMPUTE else host).add(lane, 0, (i, level), prices.host_update_s[name])
    return [compute.phase(), host.phase()]


def _host_memory(facts: Facts, prices: Prices, columns: Mapping[Choice, int]) -> Phase:
    """Return the seconds of the host's memory at its full rate in forward, backward and updates, as one event."""
    memory = prices.memory
    table = Table(HOST_MEMORY, (Lane.HOST,), 1, columns)

    def host_s(i: int, home: Tier) -> float:
        name = facts.buckets[i].id
        return memory.update_s[name] + (3 * memory.copy_s[name] if home is Tier.DEVICE else 0.0)

    for i, level in of_buckets(facts, columns):
        if level.has_state_on_host and facts.buckets[i].trainable:
            is_streamed, placed = i in facts.streamed, (facts.buckets[i].id, level.home)
            table.add(Lane.HOST, 0, (i, level), memory.stream_s[placed] if is_streamed else host_s(i, level.home))
    for i, home, choice in stream_choices(facts):
        table.add(Lane.HOST, 0, choice, memory.stream_s[facts.buckets[i].id, home] - host_s(i, home))
    updates = table.phase()
    # Copies of buckets in forward and backward count in seconds of the memory; copies of activations are left out.
    run = RunTables(facts, replace(prices, h2d_s=memory.copy_s, d2h_s=memory.copy_s), columns).phases()
    is_copy = [np.repeat([lane in (Lane.H2D, Lane.D2H) for lane in phase.lanes], phase.num_events) for phase in run]
    copies_s = sum(rows @ phase.matrix_s for rows, phase in zip(is_copy, run, strict=True))
    return replace(updates, matrix_s=sparse.csr_array(updates.matrix_s.toarray() + copies_s))


class _CrossStepUpdates:
    """Makes the flow shops of updates across steps."""

    def __init__(self, runs: RunTables, *, counts_trips: bool) -> None:
        facts, columns = runs.facts, runs.columns
        self._facts, self._prices, self._columns = facts, runs.prices, columns
        self._run = runs.forward(counts_trips=counts_trips)
        self._streams = stream_choices(facts)
        self._by_bucket: dict[int, list[tuple[Tier, Choice, float]]] = {i: [] for i in range(len(facts.buckets))}
        """By bucket, (home of its parameters, choice, sign): sign 1 for a level with a host update, -1 for a streamed
        update, which takes the host's update away."""
        for i, level in of_buckets(facts, columns):
            if level.has_state_on_host and i not in facts.streamed and facts.buckets[i].trainable:
                self._by_bucket[i].append((level.home, (i, level), 1.0))
        for i, home, choice in self._streams:
            self._by_bucket[i].append((home, choice, -1.0))

    def before_forward(self) -> list[Shop]:
        """Return the flow shops of the phase before the forward: device updates and the copies to the host behind
        them, of parameters on the device and their gradients; device updates and streamed updates; and all three.

        The state of the first streamed update leaves behind all of these copies, so only its copy to the device and
        its update may run beside them. The other streamed updates run one after another behind it.
        """
        facts, prices, columns = self._facts, self._prices, self._columns
        leaving = Table("update", (Lane.COMPUTE, Lane.D2H), 2, columns)
        streaming = Table("update", (Lane.COMPUTE,), 1, columns)
        behind = Table("update", (Lane.D2H, Lane.COMPUTE), 1, columns)
        for i, level in of_buckets(facts, columns):
            if not level.has_state_on_host:
                leaving.add(Lane.COMPUTE, 0, (i, level), prices.device_update_s[facts.buckets[i].id])
        for table in (streaming, behind):
            self._add_streams(table, Lane.COMPUTE)
        lane = prices.lane_of[Lane.D2H]
        for i, choices in self._by_bucket.items():
            for home, choice, sign in choices:
                if home is Tier.DEVICE:
                    copy_s = sign * prices.staged_s(facts.buckets[i].id)
                    leaving.add(lane, int(lane is Lane.D2H), choice, copy_s)
                    behind.add(Lane.D2H, 0, choice, copy_s)
        first_s = [
            update_s if copies.are_whole else copies.alone_s + update_s - copies.back_s
            for copies, update_s in self._streamed()
        ]
        behind.constants_s[1, 0] = -max(first_s, default=0.0)
        return [leaving.phase(), streaming.phase(), *([behind.phase()] if first_s else [])]

    def _add_streams(self, table: Table, lane: Lane) -> None:
        """Add all device updates, and the streamed updates one after another, to the first event of `lane`."""
        facts, prices = self._facts, self._prices
        for i, level in of_buckets(facts, self._columns):
            if not level.has_state_on_host:
                table.add(lane, 0, (i, level), prices.device_update_s[facts.buckets[i].id])
            elif i in facts.streamed:
                table.add(lane, 0, (i, level), _stream_s(facts, prices, i, level.home))
        for i, home, choice in self._streams:
            table.add(lane, 0, choice, _stream_s(facts, prices, i, home))

    def _streamed(self) -> list[tuple[StreamedCopies, float]]:
        """Return the copies, and the seconds on the device, of each update that is or may be streamed."""
        facts, prices = self._facts, self._prices
        placed = [(i, home) for i, home, _ in self._streams]
        placed += [(i, home) for i in facts.streamed for home in (Tier.DEVICE, Tier.HOST)]
        names = [(facts.buckets[i].id, home) for i, home in placed]
        return [(prices.streams[name, home], prices.device_update_s[name]) for name, home in names]

    def host_first(self) -> Phase:
        """Return the flow shop of all host updates and the work behind them, to the end of the forward.

        On one rank only first copies of buckets with host updates are counted, because other copies may run early.
        On several ranks all are counted, because a waiting gather holds up all gathers issued after it.
        """
        has_ranks = self._facts.problem.cluster.num_ranks > 1
        lanes = (Lane.HOST, Lane.H2D, Lane.GATHER, Lane.COMPUTE, Lane.REDUCE, Lane.D2H)
        table, events = self._table(lanes, lanes[1 if has_ranks else 3 :])
        for i, event in events:
            for home, choice, sign in self._by_bucket[i]:
                is_copied = home is Tier.DEVICE or not has_ranks
                self._add_update(table, event, i, (choice, sign), is_copied=is_copied)
        return table.phase()

    def round_trips(self) -> Phase:
        """Return the flow shop of parameters and gradients to the host, host updates, copies back, and forward ops."""
        prices = self._prices
        table, events = self._table((*_ROUND_TRIP, Lane.COMPUTE), (Lane.COMPUTE,))
        for i, event in events:
            for home, choice, sign in self._by_bucket[i]:
                self._add_update(table, event, i, (choice, sign))
                if home is Tier.DEVICE and prices.lane_of[Lane.D2H] is Lane.D2H:
                    table.add(Lane.D2H, event, choice, sign * prices.staged_s(self._facts.buckets[i].id))
        return table.phase()

    def behind_copies(self, trips: Phase, first: int) -> Gated:
        """Return the `round_trips` if the host begins before compute is through the backward: an update counts if it or
        an earlier one is of a bucket that must be copied to the host, and waits for compute. `first` is that of the
        gate."""
        copied = {
            event: {self._columns[choice]: sign for home, choice, sign in self._by_bucket[i] if home is Tier.DEVICE}
            for i, event in self._events(self._run)
        }
        latest_first = [event for event in sorted(copied, reverse=True) if copied[event]]
        starts = np.full((len(trips.lanes), trips.num_events), -1)
        num_earlier = np.searchsorted(latest_first[::-1], np.arange(trips.num_events), side="right")
        starts[trips.lanes.index(Lane.HOST)] = len(latest_first) - num_earlier
        gate = Gate(takers=[copied[event] for event in latest_first], first=first)
        return Gated(phase=trips, gate=gate, starts=starts.ravel())

    def _table(self, lanes: tuple[Lane, ...], filled: tuple[Lane, ...]) -> tuple[Table, list[tuple[int, int]]]:
        """Return a table of `lanes` with the forward's work on the lanes `filled`, and the result of `_events`."""
        run = self._run.table
        table = Table("forward", lanes, run.num_events, self._columns)
        for lane in filled:
            run.copy_lane(lane, table)
        return table, self._events(self._run)

    def _add_update(
        self, table: Table, event: int, i: int, counted: tuple[Choice, float], *, is_copied: bool = True
    ) -> None:
        """Add the host's update of bucket i and, if `is_copied`, its copy to the device: its gather or its way back.

        `counted` is the choice behind the work, and its sign.
        """
        choice, sign = counted
        name = self._facts.buckets[i].id
        table.add(Lane.HOST, event, choice, sign * self._prices.host_update_s[name])
        if is_copied:
            table.add(Lane.H2D, event, choice, sign * self._prices.h2d_s[name])

    def all_copies(self) -> list[Shop]:
        """Return the flow shop of all copies to the device, gathered and updated buckets alike, and the forward's ops;
        and the same behind the updates of the device and the streamed updates.

        The order of the copies is not known, but an op needs all copies up to its place. All of them are behind the
        last state to be streamed to the device, whose update and copy back they need not wait for.
        """
        lanes = (Lane.H2D, Lane.COMPUTE)
        last_s = [update_s + copies.last_s for copies, update_s in self._streamed()]
        found: list[Shop] = []
        for is_behind in (False, True) if last_s else (False,):
            table, events = self._table(lanes, lanes)
            for i, event in events:
                for home, choice, sign in self._by_bucket[i]:
                    if home is Tier.DEVICE:
                        table.add(Lane.H2D, event, choice, sign * self._prices.h2d_s[self._facts.buckets[i].id])
            if is_behind:
                self._add_streams(table, Lane.H2D)
                table.constants_s[0, 0] -= max(last_s)
            found.append(table.phase())
        return found

    def _events(self, run: RunTable) -> list[tuple[int, int]]:
        """Return (bucket, event of the forward) in the order of the host's updates, with events in increasing order.

        A copy at an event waits for all updates up to this event, so a bucket with a late update and an early first use
        counts at a later event than its first use. Buckets without a use in the forward are left out.
        """
        found: list[tuple[int, int]] = []
        latest = -1
        for i, windows in enumerate(self._facts.windows):
            if windows and windows[0].first < self._facts.num_forward:
                latest = max(latest + 1, run.event_of[windows[0].first, True, i])
                if latest < run.table.num_events:
                    found.append((i, latest))
        return found
