"""Forward and backward as flow shops: seconds of work by lane and event that are linear in the decisions.

The events of a phase, in order, are the ops at which a bucket's uses begin, a bucket's gradients are complete, or
activations leave the device or are needed again. The work on each lane at event i depends on the levels of buckets and
the modes of layers:

    h2d      h_i   the shard of one rank comes from the host    before the ops of event i
    gather   a_i   then the shards of the other ranks           before the ops of event i
    compute  c_i   the ops from event i to event i + 1, with the ops that a layer's mode recomputes
    reduce   r_i   complete gradients are reduced over ranks    after the ops before event i
    d2h      d_i   then the reduced shard goes to the host      after the ops before event i

The longest path (see `flow_shop`) is a lower limit on the seconds of the phase for every plan, whatever its prefetch
distances. If another lane does the work of a lane (a CPU copies for itself), the seconds are added to that other lane.

When the last gradient has come to the host, the thread that trains goes on there, while compute may still be in the
backward: `RunTables.arrival` is the flow shop up to then. Only ops before the last such gradient count in it.

`cross_step_updates` adds the updates.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from elixir_compile.ir import GroupId, Lane, Tier
from elixir_compile.search.formulation.flow_shop import Chain, Choice, Gate, Gated, Phase, Shop, Table
from elixir_compile.search.space.facts import Facts
from elixir_compile.search.space.levels import Level, is_gathered
from elixir_compile.search.space.profiles import Profile
from elixir_compile.search.space.residency import spans
from elixir_compile.search.space.trips import Trip
from elixir_compile.step.prices import Prices, crossing_s

_BEFORE = (Lane.H2D, Lane.GATHER)
_AFTER = (Lane.REDUCE, Lane.D2H)


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

    def arrival(self, *, counts_trips: bool = False) -> Gated | None:
        """Return the flow shop of the backward up to the last gradient that comes to the host; None if the step does
        not train. `counts_trips` as in `phases`."""
        spans_of_step = _spans(self.facts)
        if len(spans_of_step) < 2:
            return None
        run = self._of(spans_of_step[1], counts_trips=counts_trips)
        by_event: dict[int, dict[int, float]] = {}
        for i, level in of_buckets(self.facts, self.columns):
            gradients = self.facts.gradients[i]
            if level.has_param_on_host and gradients is not None and spans_of_step[1].holds(gradients.complete):
                event = run.event_of[gradients.complete + 1, False, i]
                by_event.setdefault(event, {})[self.columns[i, level]] = 1.0
        events, num_events = sorted(by_event), run.table.num_events
        starts = np.full((len(run.table.lanes), num_events), -1)
        for lane, ahead in ((Lane.GATHER, 1), (Lane.COMPUTE, 1), (Lane.REDUCE, 0)):
            # Gathers and ops count if a gradient leaves behind them, reduces if one leaves behind them or with them.
            row = run.table.lanes.index(lane)
            starts[row] = np.searchsorted(events, np.arange(num_events) + ahead)
        takers = [by_event[event] for event in events]
        return Gated(phase=run.table.phase(), gate=Gate(takers=takers), starts=starts.ravel())

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
        arrival, sums = self.arrival(counts_trips=counts_trips), self.host_sums()
        if arrival is not None and sums is not None:
            found[1].append(Chain(name="backward", shops=(arrival, sums)))
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
        lanes = (Lane.H2D, Lane.COMPUTE, Lane.D2H)
        found: list[Phase] = []
        for span in _spans(self.facts):
            run = self._of(span, counts_trips=True).table
            table = Table(span.name, lanes, run.num_events, self.columns)
            for lane in lanes:
                run.copy_lane(lane, table)
            found.append(table.phase())
        return found

    def _of(self, span: Span, *, counts_trips: bool) -> RunTable:
        key = span, counts_trips or self.facts.problem.cluster.num_ranks == 1
        if key not in self._made:
            self._made[key] = self._table(*key)
        return self._made[key]

    def _table(self, span: Span, has_trips: bool) -> RunTable:
        facts, prices = self.facts, self.prices
        events = _events(facts, span, self._trips, self._numbers)
        table = Table(span.name, (*_BEFORE, Lane.COMPUTE, *_AFTER), len(events), self.columns)
        _fill_compute(table, prices, events, span.end)
        event_of = {(event.place, event.gathers, event.bucket): number for number, event in enumerate(events)}
        self._add_modes(table, span, events, event_of, has_trips)
        for i, level in of_buckets(facts, self.columns):
            if not is_gathered(facts.buckets[i], level):
                continue
            for first_use, _ in spans(facts, i, level):
                if span.holds(first_use):
                    _add_gather(table, prices, facts, (i, level), event_of[first_use, True, i])
            gradients = facts.gradients[i]
            if gradients is not None and span.holds(gradients.complete):
                _add_leaving(table, prices, facts, (i, level), event_of[gradients.complete + 1, False, i])
        _add_sums(table, prices, facts, span, of_buckets(facts, self.columns), len(events) - 1)
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


def _fill_compute(table: Table, prices: Prices, events: Sequence[_Event], end: int) -> None:
    """Add the seconds of all ops; ops up to the next place belong to the last event at their place."""
    row = table.lanes.index(Lane.COMPUTE)
    for number, event in enumerate(events):
        stop = events[number + 1].place if number + 1 < len(events) else end
        if stop > event.place:
            table.constants_s[row, number] = prices.run_s(event.place, stop - 1)


def _add_gather(table: Table, prices: Prices, facts: Facts, choice: tuple[int, Level], event: int) -> None:
    bucket = facts.buckets[choice[0]].id
    if choice[1].has_param_on_host and _is_copy_on_a_path(prices):
        _add(table, prices, Lane.H2D, event, choice, prices.h2d_s[bucket])
    # If the copy is work for compute, no path has it before the all-gather, so the all-gather is left out as well.
    if not choice[1].has_param_on_host or _is_copy_on_a_path(prices):
        _add(table, prices, Lane.GATHER, event, choice, prices.gather_s[bucket])


def _is_copy_on_a_path(prices: Prices) -> bool:
    """Whether copies to the device may be counted on every path.

    A copy that is work for compute can run early, before a path that begins with all-gathers reaches compute.
    """
    return prices.lane_of[Lane.H2D] is not Lane.COMPUTE or prices.lane_of[Lane.GATHER] is Lane.COMPUTE


def _add_leaving(table: Table, prices: Prices, facts: Facts, choice: tuple[int, Level], event: int) -> None:
    bucket = facts.buckets[choice[0]].id
    shared_s = prices.reduce_s[bucket] + prices.average_s.get(bucket, 0.0)
    _add(table, prices, Lane.REDUCE, event, choice, shared_s)
    if choice[1].has_param_on_host:
        _add(table, prices, Lane.D2H, event, choice, prices.d2h_s[bucket])


def _add_sums(
    table: Table, prices: Prices, facts: Facts, span: Span, choices: Iterable[tuple[int, Level]], last_event: int
) -> None:
    """Add the seconds of compute at the end of the backward in which gradients are added to their sums."""
    for i, level in choices if prices.add_s else ():
        if level.home is Tier.HOST and not prices.is_one_memory:
            continue
        gradients, seconds = facts.gradients[i], prices.add_s.get((facts.buckets[i].id, level.home), 0.0)
        if gradients is not None and span.holds(gradients.complete) and seconds:
            table.add(Lane.COMPUTE, last_event, (i, level), seconds)


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
