"""A phase of the step as a flow shop: what follows what on the lanes, as numbers that are linear in the decisions.

Events of a phase, in order, are the places where a bucket's uses begin and where a bucket's gradients are complete. At
event i stands, on each lane, work that depends on the levels of buckets:

    h2d      h_i   what one rank owns comes from the host       before the ops of event i
    gather   a_i   then from the other ranks                    before the ops of event i
    compute  c_i   the ops from event i to event i + 1
    reduce   r_i   a complete gradient is shared out            after the ops before event i
    d2h      d_i   then goes to the host                        after the ops before event i

Lanes are first in, first out, so a phase takes as long as the longest path that never goes back, neither in events nor
in lanes:

    T = max over i <= j <= k <= l of h_0..h_i + a_i..a_j + c_j..c_k-1 + r_k..r_l + d_l..d_end

Each path is a lower bound on the phase for every plan, whatever its prefetch distances, and linear in the levels. Where
a lane's work is really done by another (a CPU copies for itself), its seconds stand there.

The update is a phase of its own, with one event per bucket: gradient to the host, host update, parameter back; device
updates are compute. Source of the formula: flow shops, Johnson 1954.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from elixir_compile.ir import Lane
from elixir_compile.search.facts import Facts
from elixir_compile.search.levels import Level, is_gathered
from elixir_compile.search.stays import spans
from elixir_compile.simulate import Prices

_BEFORE = (Lane.H2D, Lane.GATHER)
_AFTER = (Lane.REDUCE, Lane.D2H)
_ROUND_TRIP = (Lane.D2H, Lane.HOST, Lane.H2D)
Choice = tuple[int, Level]
"""A bucket, by its index, and a level of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """Lanes and events that follow on one another; its seconds are `constant_s + coefficients_s @ x`."""

    label: str
    constant_s: float
    coefficients_s: NDArray[np.float64]
    seconds: float
    """At the x it was found for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One flow shop: seconds[lane, event] = constants + matrix @ x, flattened lane by lane."""

    name: str
    lanes: tuple[Lane, ...]
    num_events: int
    compute: int
    """Which of `lanes` is compute, whose work stands between events; -1 where no lane does."""
    constants_s: NDArray[np.float64]
    matrix_s: sparse.csr_array

    def longest(self, x: NDArray[np.float64]) -> Path:
        """Return the longest path at x, one number per choice, whole or not."""
        work_s = (self.constants_s + self.matrix_s @ x).reshape(len(self.lanes), self.num_events)
        runs = self._trace(work_s)
        rows = np.concatenate(
            [lane * self.num_events + np.arange(first, last + 1, dtype=np.int64) for lane, first, last in runs]
        )
        coefficients_s = np.asarray(self.matrix_s[rows].sum(axis=0)).ravel()
        constant_s = float(self.constants_s[rows].sum())
        return Path(
            label=self._label(work_s, runs),
            constant_s=constant_s,
            coefficients_s=coefficients_s,
            seconds=constant_s + float(coefficients_s @ x),
        )

    def _trace(self, work_s: NDArray[np.float64]) -> list[tuple[int, int, int]]:
        """(lane, first event, last event) of each stretch of the longest path, latest first.

        On one lane `end[i] = max(end[i - 1], ready[i]) + work[i]`, so with S the running sum of the work,
        `end[i] - S[i]` is the running maximum of `ready[i] - S[i - 1]`.
        """
        num_events = self.num_events
        ready_s = np.zeros(num_events)
        entries: list[NDArray[np.int64]] = []
        ends_s: list[NDArray[np.float64]] = []
        for lane in range(len(self.lanes)):
            if lane:
                ready_s = self._ready_s(lane, ends_s[-1])
            total_s = np.cumsum(work_s[lane])
            slack_s = ready_s - (total_s - work_s[lane])
            highest_s = np.maximum.accumulate(slack_s)
            ends_s.append(highest_s + total_s)
            # Where the path comes onto this lane: the first event that reached the running maximum.
            is_new = np.concatenate([[True], highest_s[1:] > highest_s[:-1]])
            entries.append(np.maximum.accumulate(np.where(is_new, np.arange(num_events), 0)))
        lane = max(range(len(self.lanes)), key=lambda lane: (float(ends_s[lane][-1]), lane))
        at = num_events - 1
        runs: list[tuple[int, int, int]] = []
        while lane >= 0 and at >= 0:
            first = int(entries[lane][at])
            runs.append((lane, first, at))
            at = first - 1 if self._follows_compute(lane) else first
            lane -= 1
        return runs

    def _follows_compute(self, lane: int) -> bool:
        """Whether the work of `lane` stands before the ops of its event."""
        return self.compute >= 0 and lane == self.compute + 1

    def _ready_s(self, lane: int, before_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """When the lane before, which ends at `before_s`, lets the work of each event begin."""
        return np.concatenate([[0.0], before_s[:-1]]) if self._follows_compute(lane) else before_s

    def _label(self, work_s: NDArray[np.float64], runs: Sequence[tuple[int, int, int]]) -> str:
        shares = {self.lanes[lane]: float(work_s[lane, first : last + 1].sum()) for lane, first, last in runs}
        total_s = sum(shares.values())
        busy = [f"{lane} {share_s / total_s:.0%}" for lane, share_s in shares.items() if share_s > 0.005 * total_s]
        return f"{self.name}: {', '.join(busy) or 'nothing to do'}"


class _Table:
    """Seconds by lane and event, being filled in."""

    def __init__(self, name: str, lanes: tuple[Lane, ...], num_events: int, choices: Mapping[Choice, int]) -> None:
        self.name, self.lanes, self.num_events, self._choices = name, lanes, num_events, choices
        self.constants_s = np.zeros((len(lanes), num_events))
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._values: list[float] = []

    def add(self, lane: Lane, event: int, choice: Choice, seconds: float) -> None:
        if seconds:
            self._rows.append(self.lanes.index(lane) * self.num_events + event)
            self._columns.append(self._choices[choice])
            self._values.append(seconds)

    def phase(self) -> Phase:
        shape = (len(self.lanes) * self.num_events, len(self._choices))
        matrix = sparse.csr_array((self._values, (self._rows, self._columns)), shape=shape)
        compute = self.lanes.index(Lane.COMPUTE) if Lane.COMPUTE in self.lanes else -1
        return Phase(
            name=self.name,
            lanes=self.lanes,
            num_events=self.num_events,
            compute=compute,
            constants_s=self.constants_s.ravel(),
            matrix_s=matrix,
        )


def phases(facts: Facts, prices: Prices, choices: Mapping[Choice, int]) -> list[Phase]:
    """Return the phases of a step that follow on one another; `choices` numbers the entries of x."""
    found = [_run_phase("forward", facts, prices, choices, 0, facts.num_forward)]
    if facts.num_run > facts.num_forward:
        found.append(_run_phase("backward", facts, prices, choices, facts.num_forward, facts.num_run))
    return found


def updates(facts: Facts, prices: Prices, choices: Mapping[Choice, int]) -> list[Phase]:
    """Return the flow shops of the update, which run side by side: device updates, and the round trip of the rest."""
    if not facts.is_training:
        return []
    num_events = len(facts.buckets)
    device = _Table("update", (Lane.COMPUTE,), num_events, choices)
    host = _Table("update", _ROUND_TRIP, num_events, choices)
    is_serial = prices.is_one_memory
    for i, level in choices:
        bucket = facts.buckets[i]
        if not bucket.trainable:
            continue
        if not level.has_state_on_host:
            device.add(Lane.COMPUTE, i, (i, level), prices.device_update_s[bucket.id])
            continue
        table = device if is_serial else host
        table.add(Lane.COMPUTE if is_serial else Lane.HOST, i, (i, level), prices.host_update_s[bucket.id])
        if not level.has_param_on_host and not is_serial:
            for lane, seconds in ((Lane.D2H, prices.d2h_s[bucket.id]), (Lane.H2D, prices.h2d_s[bucket.id])):
                overlaps = prices.lane_of[lane] is not Lane.COMPUTE
                (host if overlaps else device).add(lane if overlaps else Lane.COMPUTE, i, (i, level), seconds)
    return [device.phase()] if is_serial else [device.phase(), host.phase()]


def _run_phase(name: str, facts: Facts, prices: Prices, choices: Mapping[Choice, int], first: int, end: int) -> Phase:
    events = _events(facts, first, end)
    table = _Table(name, (*_BEFORE, Lane.COMPUTE, *_AFTER), len(events), choices)
    _fill_compute(table, prices, events, end)
    event_of = {(event.place, event.gathers, event.bucket): number for number, event in enumerate(events)}
    for i, level in choices:
        if not is_gathered(facts.buckets[i], level):
            continue
        for stay_first, _ in spans(facts, i, level):
            if first <= stay_first < end:
                _add_gather(table, prices, facts, (i, level), event_of[stay_first, True, i])
        gradients = facts.gradients[i]
        if gradients is not None and first <= gradients.complete < end:
            _add_leaving(table, prices, facts, (i, level), event_of[gradients.complete + 1, False, i])
    return table.phase()


class _Event(NamedTuple):
    """One bucket at one place; in the order in which the lanes take them."""

    place: int
    """Index of the op before which it stands."""
    gathers: bool
    """Whether its uses begin here; else its gradients are complete, which comes first."""
    bucket: int


def _events(facts: Facts, first: int, end: int) -> list[_Event]:
    """Every place where the uses of a bucket begin or its gradients are complete, and the beginning of the phase.

    Two buckets at one place are two events: the copy of the second may run beside the all-gather of the first.
    """
    found = {_Event(first, False, -1)}
    for i, (windows, gradients) in enumerate(zip(facts.windows, facts.gradients, strict=True)):
        found.update(_Event(window.first, True, i) for window in windows if first <= window.first < end)
        if gradients is not None and first <= gradients.complete < end:
            found.add(_Event(gradients.complete + 1, False, i))
    return sorted(found)


def _fill_compute(table: _Table, prices: Prices, events: Sequence[_Event], end: int) -> None:
    """The ops from one place to the next stand at the last event of the place."""
    row = table.lanes.index(Lane.COMPUTE)
    for number, event in enumerate(events):
        stop = events[number + 1].place if number + 1 < len(events) else end
        if stop > event.place:
            table.constants_s[row, number] = prices.run_s(event.place, stop - 1)


def _add_gather(table: _Table, prices: Prices, facts: Facts, choice: Choice, event: int) -> None:
    bucket = facts.buckets[choice[0]].id
    copies_compute = prices.lane_of[Lane.H2D] is Lane.COMPUTE
    if choice[1].has_param_on_host:
        _add(table, prices, Lane.H2D, event, choice, prices.h2d_s[bucket])
    # A copy that is work for compute can be early, and no path here says that the all-gather comes after it.
    if not (copies_compute and prices.lane_of[Lane.GATHER] is not Lane.COMPUTE):
        _add(table, prices, Lane.GATHER, event, choice, prices.collective_s[bucket])


def _add_leaving(table: _Table, prices: Prices, facts: Facts, choice: Choice, event: int) -> None:
    bucket = facts.buckets[choice[0]].id
    _add(table, prices, Lane.REDUCE, event, choice, prices.collective_s[bucket])
    if choice[1].has_param_on_host:
        _add(table, prices, Lane.D2H, event, choice, prices.d2h_s[bucket])


def _add(table: _Table, prices: Prices, lane: Lane, event: int, choice: Choice, seconds: float) -> None:
    table.add(prices.lane_of[lane], event, choice, seconds)
