"""The phases of a step as flow shops: what follows what on the lanes, as numbers that are linear in the decisions.

Events of a phase, in order, are the places where a bucket's uses begin, where a bucket's gradients are complete, and
where activations leave or are needed again. At event i stands, on each lane, work that depends on the levels of buckets
and on the modes of layers:

    h2d      h_i   what one rank owns comes from the host       before the ops of event i
    gather   a_i   then from the other ranks                    before the ops of event i
    compute  c_i   the ops from event i to event i + 1, with those that a layer's mode repeats
    reduce   r_i   a complete gradient is shared out            after the ops before event i
    d2h      d_i   then goes to the host                        after the ops before event i

The longest path (see `flow`) is a lower bound on the phase for every plan, whatever its prefetch distances, and linear
in the decisions. Where a lane's work is really done by another (a CPU copies for itself), its seconds stand there.

What updates add is in `crossing`.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from elixir_compile.cost import copy_s
from elixir_compile.ir import GroupId, Lane
from elixir_compile.search.formulation.flow_shop import Choice, Phase, Table
from elixir_compile.search.space.facts import Facts
from elixir_compile.search.space.levels import Level, is_gathered
from elixir_compile.search.space.profiles import Profile, Trip
from elixir_compile.search.space.residency import spans
from elixir_compile.simulate import Prices

_BEFORE = (Lane.H2D, Lane.GATHER)
_AFTER = (Lane.REDUCE, Lane.D2H)


def phases(
    facts: Facts,
    prices: Prices,
    choices: Mapping[Choice, int],
    profiles: Sequence[Sequence[Profile]] = (),
    *,
    counts_trips: bool = False,
) -> list[Phase]:
    """Return the phases of a step that follow on one another; `choices` numbers the entries of x, `profiles` are of
    each layer's modes."""
    tables = [run_table(span, facts, prices, choices, profiles, counts_trips=counts_trips) for span in _spans(facts)]
    return [own.table.phase() for own in tables]


def copies(
    facts: Facts, prices: Prices, choices: Mapping[Choice, int], profiles: Sequence[Sequence[Profile]]
) -> list[Phase]:
    """Return the phases of a step on several ranks without collectives, but with the copies of activations.

    An op waits for every copy to the device that is needed up to it, of buckets and of activations, in whatever order
    the link carries them; and all that leaves behind an op is on one link too. A collective waits for neither. Only for
    machines on which all transfers run beside compute.
    """
    lanes = (Lane.H2D, Lane.COMPUTE, Lane.D2H)
    found: list[Phase] = []
    for span in _spans(facts):
        run = run_table(span, facts, prices, choices, profiles, counts_trips=True).table
        table = Table(span.name, lanes, run.num_events, choices)
        for lane in lanes:
            run.copy_lane(lane, table)
        found.append(table.phase())
    return found


class Span(NamedTuple):
    """A phase as op indices: from `first` to before `end`."""

    name: str
    first: int
    end: int

    def holds(self, op: int) -> bool:
        return self.first <= op < self.end


def forward_of(facts: Facts) -> Span:
    """Return the forward as a span."""
    return Span("forward", 0, facts.num_forward)


def _spans(facts: Facts) -> list[Span]:
    backward = [Span("backward", facts.num_forward, facts.num_run)] if facts.num_run > facts.num_forward else []
    return [forward_of(facts), *backward]


def of_buckets(facts: Facts, choices: Mapping[Choice, int]) -> Iterator[tuple[int, Level]]:
    """Yield the choices that are levels of buckets."""
    return ((i, Level(level)) for i, level in choices if i < len(facts.buckets))


class RunTable(NamedTuple):
    """The work of a phase, and which of its events is what."""

    table: Table
    event_of: Mapping[tuple[int, bool, int], int]
    """By place, whether uses begin there, and bucket."""


def run_table(
    span: Span,
    facts: Facts,
    prices: Prices,
    choices: Mapping[Choice, int],
    profiles: Sequence[Sequence[Profile]],
    *,
    counts_trips: bool = False,
) -> RunTable:
    """Return the work of the phase `span`; on several ranks with the copies of activations if it `counts_trips`."""
    first, end = span.first, span.end
    has_trips = counts_trips or facts.problem.cluster.num_ranks == 1
    numbers = _trip_numbers(facts, profiles)
    events = _events(facts, span, profiles, numbers)
    table = Table(span.name, (*_BEFORE, Lane.COMPUTE, *_AFTER), len(events), choices)
    _fill_compute(table, prices, events, end)
    event_of = {(event.place, event.gathers, event.bucket): number for number, event in enumerate(events)}
    places = [(event.place, event.gathers) for event in events]
    for number, own in enumerate(profiles, start=len(facts.buckets)):
        for mode, profile in enumerate(own):
            for slot, seconds in profile.added_s:
                if span.holds(slot):
                    # Behind what leaves after the op before, ahead of what the slot's own op waits for.
                    table.add(Lane.COMPUTE, bisect_right(places, (slot, False)) - 1, (number, mode), seconds)
            for trip in profile.trips if has_trips else ():
                _add_trip(table, prices, facts, trip, (number, mode), event_of, numbers[trip.group])
    for i, level in of_buckets(facts, choices):
        if not is_gathered(facts.buckets[i], level):
            continue
        for stay_first, _ in spans(facts, i, level):
            if first <= stay_first < end:
                _add_gather(table, prices, facts, (i, level), event_of[stay_first, True, i])
        gradients = facts.gradients[i]
        if gradients is not None and first <= gradients.complete < end:
            _add_leaving(table, prices, facts, (i, level), event_of[gradients.complete + 1, False, i])
    return RunTable(table, event_of)


class _Event(NamedTuple):
    """One bucket at one place; in the order in which the lanes take them."""

    place: int
    """Index of the op before which it stands."""
    gathers: bool
    """Whether its uses begin here; else its gradients are complete, which comes first."""
    bucket: int
    """A bucket's index, or, from the number of buckets on, the number of a group of activations."""


def _trip_numbers(facts: Facts, profiles: Sequence[Sequence[Profile]]) -> Mapping[GroupId, int]:
    """A number for each group that can leave, behind those of the buckets."""
    groups = dict.fromkeys(trip.group for own in profiles for profile in own for trip in profile.trips)
    return {group: number for number, group in enumerate(groups, start=len(facts.buckets))}


def _events(
    facts: Facts, span: Span, profiles: Sequence[Sequence[Profile]], numbers: Mapping[GroupId, int]
) -> list[_Event]:
    """Every place where the uses of a bucket begin or its gradients are complete, where activations leave or are
    needed again, and the beginning of the phase.

    Two buckets at one place are two events: the copy of the second may run beside the all-gather of the first.
    """
    first, end = span.first, span.end
    found = {_Event(first, False, -1)}
    for trip in (trip for own in profiles for profile in own for trip in profile.trips):
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
    """The ops from one place to the next stand at the last event of the place."""
    row = table.lanes.index(Lane.COMPUTE)
    for number, event in enumerate(events):
        stop = events[number + 1].place if number + 1 < len(events) else end
        if stop > event.place:
            table.constants_s[row, number] = prices.run_s(event.place, stop - 1)


def _add_gather(table: Table, prices: Prices, facts: Facts, choice: tuple[int, Level], event: int) -> None:
    bucket = facts.buckets[choice[0]].id
    if choice[1].has_param_on_host and _is_copy_on_a_path(prices):
        _add(table, prices, Lane.H2D, event, choice, prices.h2d_s[bucket])
    # No path here says that an all-gather comes after a copy that is work for compute.
    if not choice[1].has_param_on_host or _is_copy_on_a_path(prices):
        _add(table, prices, Lane.GATHER, event, choice, prices.gather_s[bucket])


def _is_copy_on_a_path(prices: Prices) -> bool:
    """Whether a copy to the device has a place on every path: one that is work for compute can be early, before a path
    that begins with all-gathers comes to compute."""
    return prices.lane_of[Lane.H2D] is not Lane.COMPUTE or prices.lane_of[Lane.GATHER] is Lane.COMPUTE


def _add_leaving(table: Table, prices: Prices, facts: Facts, choice: tuple[int, Level], event: int) -> None:
    bucket = facts.buckets[choice[0]].id
    shared_s = prices.reduce_s[bucket] + prices.average_s.get(bucket, 0.0)
    _add(table, prices, Lane.REDUCE, event, choice, shared_s)
    if choice[1].has_param_on_host:
        _add(table, prices, Lane.D2H, event, choice, prices.d2h_s[bucket])


def _add_trip(
    table: Table,
    prices: Prices,
    facts: Facts,
    trip: Trip,
    choice: Choice,
    event_of: Mapping[tuple[int, bool, int], int],
    number: int,
) -> None:
    """Activations go to the host behind the ops that need them, and are back before the backward does.

    On several ranks collectives of buckets need not wait for these copies, as a path would have them.
    """
    cluster = facts.problem.cluster
    leave, back = event_of.get((trip.leave + 1, False, number)), event_of.get((trip.first, True, number))
    if leave is not None:
        _add(table, prices, Lane.D2H, leave, choice, copy_s(trip.nbytes, cluster.d2h, trip.num_copies))
    if back is not None:
        _add(table, prices, Lane.H2D, back, choice, copy_s(trip.nbytes, cluster.h2d, trip.num_copies))


def _add(table: Table, prices: Prices, lane: Lane, event: int, choice: Choice, seconds: float) -> None:
    table.add(prices.lane_of[lane], event, choice, seconds)
