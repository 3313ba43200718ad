"""What updates add to the phases of a step, as flow shops that are linear in the decisions.

After the backward, the update is a phase of its own, with one event per bucket: gradient to the host, host update,
parameter back; device updates are compute.

Across steps, a step is: device updates and what is streamed, forward, backward. The host updates beside all of that,
one bucket after another. The copy of a bucket waits for its update, whenever its gather was issued, and compute waits
where the bucket is first read. So paths that begin with updates of the host go through update and forward together:

    host     u_b0 | u_b1 | u_b2 | ...               the update of b1 ends, then its gather begins (or its way back to
    h2d                  | b1 | b2 | ...            the device), then the ops from its first use on
    compute                   | h.1 | h.2 | ...     T_update + T_forward >= u_0..u_i + h_i..h_j + c_j..c_end

with copies of what the host updates only: what it does not update need not wait for it.

In the backward, what is certain is that compute, and the host, do all their work in one step.

Whatever the mode, a step is no shorter than the host's memory takes for all copies and updates of the host.

Streaming is a column per bucket and home of its parameters, from 0 to 1, and at most what of the bucket is at such a
level: it takes the host's update away and adds two copies and the device's update to compute.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from scipy import sparse

from elixir_compile.ir import Lane, Tier, Update
from elixir_compile.search.formulation.flow_shop import Choice, Phase, Table
from elixir_compile.search.formulation.phases import RunTable, copies, forward_of, of_buckets, phases, run_table
from elixir_compile.search.problem import asked_time
from elixir_compile.search.space.facts import Facts
from elixir_compile.search.space.profiles import Profile
from elixir_compile.simulate import Prices

_ROUND_TRIP = (Lane.D2H, Lane.HOST, Lane.H2D)


class Shops(NamedTuple):
    """The flow shops of a step."""

    following: list[list[Phase]]
    """Phases that follow on one another; each takes as long as the longest of its flow shops."""
    across: list[Phase]
    """Flow shops that go through several phases."""
    spanned: tuple[int, ...]
    """Which of `following` those go through."""
    whole: list[Phase]
    """Flow shops of the whole step: what the host's memory carries."""


class Options(NamedTuple):
    """Everything that there is to decide, each a column."""

    columns: Mapping[Choice, int]
    profiles: Sequence[Sequence[Profile]]
    counts_trips: bool = False
    """Whether copies of activations are on the paths of several ranks too, which no bound can be made of."""


def stream_choices(facts: Facts) -> list[tuple[int, Tier, Choice]]:
    """Return (bucket, home of its parameters, choice) of every update that may be streamed."""
    start = len(facts.buckets) + len(facts.layers)
    return [
        (i, home, (start + i, home is Tier.HOST))
        for i in sorted(facts.streamable)
        for home in (Tier.DEVICE, Tier.HOST)
        if any(level.home is home for level in facts.choices[i] if level.has_state_on_host)
    ]


def flow_shops(facts: Facts, prices: Prices, options: Options) -> Shops:
    """Return the flow shops of a step."""
    run = phases(facts, prices, options.columns, options.profiles, counts_trips=options.counts_trips)
    following = [[phase] for phase in run]
    # A collective that is work for compute may be early, ahead of an op that waits for activations.
    is_beside = all(prices.lane_of[lane] is lane for lane in (Lane.H2D, Lane.GATHER, Lane.REDUCE, Lane.D2H))
    if facts.problem.cluster.num_ranks > 1 and is_beside and not options.counts_trips:
        without = copies(facts, prices, options.columns, options.profiles)
        following = [[phase, copied] for phase, copied in zip(run, without, strict=True)]
    if not facts.is_training:
        return Shops(following, [], (), [])
    whole = [_host_memory(facts, prices, options.columns)] if prices.memory.update_s else []
    update = asked_time(facts.problem)
    if update is Update.IN_BACKWARD and set(prices.lane_of.values()) != {Lane.COMPUTE}:
        return Shops(following, _totals(facts, prices, options), tuple(range(len(following))), whole)
    if update is not Update.ACROSS_STEPS or prices.is_one_memory:
        return Shops([*following, _updates(facts, prices, options.columns)], [], (), whole)
    own = _Work(facts, prices, options)
    # A copy that is work for compute may be early, ahead of what compute waits for: it has no place on these paths.
    is_sent_beside = prices.lane_of[Lane.H2D] is Lane.H2D
    across = [own.behind_the_host(), own.round_trips(), own.all_copies()] if is_sent_beside else []
    return Shops([own.before_forward(), *following], across, (0, 1), whole)


def _stream_s(facts: Facts, prices: Prices, i: int, home: Tier) -> float:
    name = facts.buckets[i].id
    return sum(prices.stream_s[name, home]) + prices.device_update_s[name]


def _updates(facts: Facts, prices: Prices, columns: Mapping[Choice, int]) -> list[Phase]:
    """The flow shops of the update behind the backward, which run side by side: device updates, and the round trip of
    the rest."""
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
        table.add(Lane.COMPUTE if is_serial else Lane.HOST, i, (i, level), prices.host_update_s[bucket.id])
        if not level.has_param_on_host and not is_serial:
            for lane, seconds in ((Lane.D2H, prices.d2h_s[bucket.id]), (Lane.H2D, prices.h2d_s[bucket.id])):
                overlaps = prices.lane_of[lane] is not Lane.COMPUTE
                (host if overlaps else device).add(lane if overlaps else Lane.COMPUTE, i, (i, level), seconds)
    return [device.phase()] if is_serial else [device.phase(), host.phase()]


def _totals(facts: Facts, prices: Prices, options: Options) -> list[Phase]:
    """All ops and device updates on one lane, all host updates on another."""
    compute = Table("step", (Lane.COMPUTE,), 1, options.columns)
    host = Table("step", (Lane.HOST,), 1, options.columns)
    compute.constants_s[0, 0] = prices.run_s(0, facts.num_run - 1)
    for number, own in enumerate(options.profiles, start=len(facts.buckets)):
        for mode, profile in enumerate(own):
            compute.add(Lane.COMPUTE, 0, (number, mode), sum(seconds for _, seconds in profile.added_s))
    for i, level in of_buckets(facts, options.columns):
        name = facts.buckets[i].id
        if not level.has_state_on_host:
            compute.add(Lane.COMPUTE, 0, (i, level), prices.device_update_s[name])
        elif i not in facts.streamed:
            lane = prices.lane_of[Lane.HOST]
            (compute if lane is Lane.COMPUTE else host).add(lane, 0, (i, level), prices.host_update_s[name])
    return [compute.phase(), host.phase()]


def _host_memory(facts: Facts, prices: Prices, columns: Mapping[Choice, int]) -> Phase:
    """Seconds of the host's memory at its full rate, in the forward, the backward and the updates, as one event."""
    memory = prices.memory
    table = Table("step", (Lane.HOST,), 1, columns)

    def host_s(i: int, home: Tier) -> float:
        name = facts.buckets[i].id
        return memory.update_s[name] + (2 * memory.copy_s[name] if home is Tier.DEVICE else 0.0)

    for i, level in of_buckets(facts, columns):
        if level.has_state_on_host and facts.buckets[i].trainable:
            is_streamed, own = i in facts.streamed, (facts.buckets[i].id, level.home)
            table.add(Lane.HOST, 0, (i, level), memory.stream_s[own] if is_streamed else host_s(i, level.home))
    for i, home, choice in stream_choices(facts):
        table.add(Lane.HOST, 0, choice, memory.stream_s[facts.buckets[i].id, home] - host_s(i, home))
    updates = table.phase()
    # The copies of buckets in forward and backward, in seconds of the memory; those of activations are left out.
    run = phases(facts, replace(prices, h2d_s=memory.copy_s, d2h_s=memory.copy_s), columns)
    is_copy = [np.repeat([lane in (Lane.H2D, Lane.D2H) for lane in phase.lanes], phase.num_events) for phase in run]
    copies_s = sum(own @ phase.matrix_s for own, phase in zip(is_copy, run, strict=True))
    return replace(updates, matrix_s=sparse.csr_array(updates.matrix_s.toarray() + copies_s))


class _Work:
    """What updates across steps do, by lane."""

    def __init__(self, facts: Facts, prices: Prices, options: Options) -> None:
        self._facts, self._prices, self._options = facts, prices, options
        self._streams = stream_choices(facts)
        self._by_bucket: dict[int, list[tuple[Tier, Choice, float]]] = {i: [] for i in range(len(facts.buckets))}
        """By bucket, (home of its parameters, choice, sign) of what adds an update of the host, or takes it away."""
        for i, level in of_buckets(facts, options.columns):
            if level.has_state_on_host and i not in facts.streamed and facts.buckets[i].trainable:
                self._by_bucket[i].append((level.home, (i, level), 1.0))
        for i, home, choice in self._streams:
            self._by_bucket[i].append((home, choice, -1.0))

    def before_forward(self) -> list[Phase]:
        """Device updates, behind which gradients of parameters on the device leave; or else what is streamed."""
        facts, prices, columns = self._facts, self._prices, self._options.columns
        leaving = Table("update", (Lane.COMPUTE, Lane.D2H), 2, columns)
        streaming = Table("update", (Lane.COMPUTE,), 1, columns)
        for i, level in of_buckets(facts, columns):
            name = facts.buckets[i].id
            if not level.has_state_on_host:
                leaving.add(Lane.COMPUTE, 0, (i, level), prices.device_update_s[name])
                streaming.add(Lane.COMPUTE, 0, (i, level), prices.device_update_s[name])
            elif i in facts.streamed:
                streaming.add(Lane.COMPUTE, 0, (i, level), _stream_s(facts, prices, i, level.home))
        for i, home, choice in self._streams:
            streaming.add(Lane.COMPUTE, 0, choice, _stream_s(facts, prices, i, home))
        lane = prices.lane_of[Lane.D2H]
        for i, own in self._by_bucket.items():
            for home, choice, sign in own:
                if home is Tier.DEVICE:
                    leaving.add(lane, int(lane is Lane.D2H), choice, sign * prices.d2h_s[facts.buckets[i].id])
        return [leaving.phase(), streaming.phase()]

    def behind_the_host(self) -> Phase:
        """All updates of the host, and then what follows them to the end of the forward.

        Copies of buckets that the host does not update are left out, and second copies: they may be early. Not so on
        several ranks, where a gather that waits holds up all that are issued behind it.
        """
        is_dtensor = self._facts.problem.cluster.num_ranks > 1
        lanes = (Lane.HOST, Lane.H2D, Lane.GATHER, Lane.COMPUTE, Lane.REDUCE, Lane.D2H)
        table, events = self._table(lanes, lanes[1 if is_dtensor else 3 :])
        for i, event in events:
            for home, choice, sign in self._by_bucket[i]:
                is_copied = home is Tier.DEVICE or not is_dtensor
                self._add_update(table, event, i, (choice, sign), is_copied=is_copied)
        return table.phase()

    def round_trips(self) -> Phase:
        """Gradients of parameters on the device, then all updates of the host, then the ops of the forward."""
        prices = self._prices
        table, events = self._table((*_ROUND_TRIP, Lane.COMPUTE), (Lane.COMPUTE,))
        for i, event in events:
            for home, choice, sign in self._by_bucket[i]:
                self._add_update(table, event, i, (choice, sign))
                if home is Tier.DEVICE and prices.lane_of[Lane.D2H] is Lane.D2H:
                    table.add(Lane.D2H, event, choice, sign * prices.d2h_s[self._facts.buckets[i].id])
        return table.phase()

    def _table(self, lanes: tuple[Lane, ...], filled: tuple[Lane, ...]) -> tuple[Table, list[tuple[int, int]]]:
        """Return a table of `lanes` with what the forward does on those that are to be `filled`, and `_events`."""
        run = self._run_table()
        table = Table("forward", lanes, run.table.num_events, self._options.columns)
        for lane in filled:
            run.table.copy_lane(lane, table)
        return table, self._events(run)

    def _add_update(
        self, table: Table, event: int, i: int, counted: tuple[Choice, float], *, is_copied: bool = True
    ) -> None:
        """The update of a bucket, and its copy to the device: gathered, or on its way back."""
        choice, sign = counted
        name = self._facts.buckets[i].id
        table.add(Lane.HOST, event, choice, sign * self._prices.host_update_s[name])
        if is_copied:
            table.add(Lane.H2D, event, choice, sign * self._prices.h2d_s[name])

    def all_copies(self) -> Phase:
        """All copies to the device, of what is gathered and of what the host has updated, and then the ops of the
        forward: which copy is first is not known, but one op needs all up to its place."""
        lanes = (Lane.H2D, Lane.COMPUTE)
        table, events = self._table(lanes, lanes)
        for i, event in events:
            for home, choice, sign in self._by_bucket[i]:
                if home is Tier.DEVICE:
                    table.add(Lane.H2D, event, choice, sign * self._prices.h2d_s[self._facts.buckets[i].id])
        return table.phase()

    def _run_table(self) -> RunTable:
        facts, options = self._facts, self._options
        forward, counts_trips = forward_of(facts), options.counts_trips
        return run_table(forward, facts, self._prices, options.columns, options.profiles, counts_trips=counts_trips)

    def _events(self, run: RunTable) -> list[tuple[int, int]]:
        """(bucket, event of the forward) in the order in which the host updates, each event behind the one before: a
        copy that stands at an event waits for all updates up to there.

        A later bucket that is read earlier only counts later. Buckets that the forward does not read are left out.
        """
        found: list[tuple[int, int]] = []
        latest = -1
        for i, windows in enumerate(self._facts.windows):
            if windows and windows[0].first < self._facts.num_forward:
                own = run.event_of[windows[0].first, True, i]
                latest = max(latest + 1, own)
                if latest < run.table.num_events:
                    found.append((i, latest))
        return found
