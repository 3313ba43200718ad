"""Choose the shares of all ranks of a fleet for one captured step, from the seconds and bytes of the step for any
number of rows on any machine, and refine them by the simulation of all ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from elixir_compile.base.errors import InvalidOption, NoFeasibleShares
from elixir_compile.base.process import collector_off
from elixir_compile.base.units import format_bytes
from elixir_compile.ir import Saving, StepGraph
from elixir_compile.ir.cost import collective_s
from elixir_compile.ir.hardware import Cluster, Fleet
from elixir_compile.ir.schedule import LEAST_ROWS
from elixir_compile.ir.share import Outcome, Share, Shares
from elixir_compile.search.evaluator import Deadline
from elixir_compile.search.outer import GAIN
from elixir_compile.search.outline import MixedWay, Numbers, Way, mixed_ways, treatments_of, ways_of
from elixir_compile.search.shares import assign as rules
from elixir_compile.search.shares.assign import (
    Assignment,
    Offers,
    assign,
    assign_fixed,
    balanced_rows,
    fixed_share,
    most_room,
)
from elixir_compile.step.as_run import graph_of_rows

# ----------------------------------------------------------------------------------------------------------------------
# The seconds of a step and the room for state of each rank, for any number of rows in any way to run them.
#
#   step    sum_k max(AG_k, F_k, offloads_k) + sum_k max(AG_k + RS_k, B_k, prefetches_k) + update
#   room    device - activations - gathered parameters + host
#
#           F_k, B_k     seconds of lap k of the forward and of the backward
#           AG_k, RS_k   seconds of the collectives of its parameters and gradients
#
# The maximum over ranks of these sums is a lower bound of the step in which ranks wait for each other lap by lap. A
# plan treats some layers in one way and others in another: between two ways, seconds and bytes are interpolated.


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The memory of one rank for the step."""

    device_bytes: int
    """Bytes of the device, less what is used outside of the step."""
    host_bytes: int
    """Bytes of the host that this rank may use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The training state of all ranks together."""

    num_elements: int
    """Elements of the trained parameters."""
    nbytes: int
    """Bytes of parameters, gradients and optimizer state."""


def offers_of(
    ways: Sequence[MixedWay], rows: Sequence[int], cluster: Cluster, budget: Budget, state: State, num_ranks: int
) -> Offers:
    """Return the offers of a rank that sees `cluster`, for each number of `rows` in each of `ways`.

    The update is priced for an equal shard of the state: the shard on the device as far as there is room, the rest on
    the host.
    """
    counts = [count or LEAST_ROWS for count in rows]
    shape = (len(rows), len(ways))
    step_s, busy_s = np.full(shape, np.inf), np.full(shape, np.inf)
    room_bytes = np.full(shape, -1, dtype=np.int64)
    pure = {id(way): way for mixed in ways for way in (mixed.kept, mixed.treated)}
    figures = {name: _figures(way, counts, cluster) for name, way in pure.items()}
    shard_bytes, elements = state.nbytes / num_ranks, state.num_elements / num_ranks
    host_per_s = cluster.host.update_elements_per_s / cluster.num_local_ranks
    for column, way in enumerate(ways):
        kept, treated = figures[id(way.kept)], figures[id(way.treated)]
        lap_s, laps_s, peak_bytes = (way.mixed(*pair) for pair in zip(kept, treated, strict=True))
        on_device = budget.device_bytes - way.in_flight_bytes - peak_bytes
        on_host = budget.host_bytes - np.asarray(counts, dtype=float) * way.away_each
        share = np.clip(on_device / shard_bytes, 0.0, 1.0) if shard_bytes else np.ones_like(on_device)
        update = elements * (share / cluster.device.update_elements_per_s + (1 - share) / host_per_s)
        is_offered = np.array([count % way.micro_batches == 0 and count >= LEAST_ROWS for count in counts])
        fits = (on_device >= 0) & (on_host >= 0)
        room = np.where(fits, on_device + on_host, np.minimum(on_device, on_host).clip(max=-1))
        step_s[:, column] = np.where(is_offered, laps_s + update, np.inf)
        busy_s[:, column] = np.where(is_offered, lap_s + update, np.inf)
        room_bytes[:, column] = np.where(is_offered, room, -1).astype(np.int64)
    return Offers(step_s=step_s, busy_s=busy_s, room_bytes=room_bytes)


def _figures(way: Way, counts: Sequence[int], cluster: Cluster) -> tuple[Numbers, Numbers, Numbers]:
    """Return for each number of rows the seconds of compute of all laps, the same with the transfers that a lap waits
    for, and the most bytes of activations."""
    lap_s = way.lap_s(counts, cluster)
    gather_s = np.array([collective_s(int(nbytes), cluster) for nbytes in way.gathered_bytes])
    reduce_s = np.array([collective_s(int(nbytes), cluster) for nbytes in way.reduced_bytes])
    moves = np.asarray(counts, dtype=float)[:, None] * way.moves_each
    link_s = moves / np.where(way.is_backward, cluster.h2d.bytes_per_s, cluster.d2h.bytes_per_s)
    others_s = np.maximum(np.where(way.is_backward, gather_s + reduce_s, gather_s), link_s)
    return lap_s.sum(axis=1), np.maximum(lap_s, others_s).sum(axis=1), way.peak_bytes(counts)


# ----------------------------------------------------------------------------------------------------------------------
# Choose the shares of all ranks of a fleet for one captured step: rows, micro-batches, and shards of the state.


_MOST_QUANTA = 256
"""Rows are shared out in so many pieces at most, so that the search of 64 ranks takes less than a second."""

RULES = ("even", "by_speed", "cephalo")
"""The rules to compare with, by the names that the command line takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutlook:
    """The expected seconds and bytes of one rank under the choice."""

    treatment: str
    """The treatment of its activations: `kept`, `recomputed`, `recomputed, offloaded`, or in a share of the layers
    alone, `recomputed in 3/8`."""
    busy_s: float
    """Seconds of its own compute and update."""
    peak_bytes: int
    """Most bytes on the device, state included."""
    host_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The shares of all ranks with the seconds of a step by the formula of the search."""

    shares: tuple[Share, ...]
    step_s: float
    ranks: tuple[RankOutlook, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(share.num_rows for share in self.shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """The question: who of `fleet` trains how many of `batch` rows of `graph`."""

    graph: StepGraph
    """The captured step, with any number of rows from 2 on."""
    fleet: Fleet
    budgets: tuple[Budget, ...]
    """The memory of each rank."""
    state: State
    batch: int
    savings: frozenset[Saving] = frozenset(Saving)


class ShareSearch:
    """The search for the shares of one question, and for the shares of other rules."""

    def __init__(self, ask: Ask) -> None:
        """Price the step in all ways for all classes of ranks. Raises InvalidOption for a batch of less than 2 rows,
        and InvalidPlan if the graph does not say which storages and ops belong to the rows of its batch."""
        self.ask = ask
        self.quantum = quantum_of(ask.batch)
        classes = ask.fleet.classes(ask.budgets)
        self.class_of = [0] * ask.fleet.num_ranks
        for number, ranks in enumerate(classes):
            for rank in ranks:
                self.class_of[rank] = number
        self._firsts = [ranks[0] for ranks in classes]
        with collector_off():
            self.ways = mixed_ways(ways_of(ask.graph, treatments_of(ask.graph, ask.savings), ask.batch))
        self.offers = self._offers(range(0, ask.batch + 1, self.quantum))
        if self.quantum <= LEAST_ROWS <= ask.batch // len(self.class_of):
            # A rank without rows takes as long as one with the fewest rows, and its work is lost.
            for offers in self.offers:
                offers.room_bytes[0] = -1

    def best(self) -> Choice:
        """Return the shares with the shortest step: equal shards of the state if they fit, else shards of any size.

        Raises NoFeasibleShares with the room of all classes if nothing fits.
        """
        found = assign(self.offers, self.class_of, self.ask.state.nbytes, equal_shards=True)
        found = found or assign(self.offers, self.class_of, self.ask.state.nbytes, equal_shards=False)
        choices: list[Choice | None] = [self.even()]  # equal rows need not be whole quanta
        if found is not None:
            choices.insert(0, self._choice(found, self.offers, [self.quantum * count for count in found.quanta]))
        fitting = [choice for choice in choices if choice is not None]
        if not fitting:
            raise self.no_room()
        return min(fitting, key=lambda choice: choice.step_s)

    def even(self) -> Choice | None:
        """Return equal shares; None if they do not fit some rank."""
        return self.of_rows(rules.even(len(self.class_of), self.ask.batch))

    def greedy(self) -> Choice | None:
        """Return shares in proportion to the speed of each rank; None if they do not fit."""
        return self.of_rows([self.quantum * count for count in rules.greedy(self.offers, self.class_of)])

    def cephalo(self) -> Choice | None:
        """Return the shares that Cephalo's dynamic program chooses; None if it finds none, or they do not fit."""
        number_of = [way.micro_batches for way in self.ways]
        found = rules.cephalo(self.offers, self.class_of, number_of, self.ask.state.nbytes)
        return None if found is None else self.of_rows([self.quantum * count for count in found])

    def of_rule(self, name: str) -> Choice | None:
        """Return the shares of the rule called `name`, one of `RULES`; None if they do not fit."""
        return {"even": self.even, "by_speed": self.greedy, "cephalo": self.cephalo}[name]()

    def of_rows(self, rows: Sequence[int]) -> Choice | None:
        """Return the fastest way for each rank to run its `rows`, beside an equal shard of the state if that fits each
        rank, else beside shards of any size; None if nothing fits, or a rank has a single row."""
        kinds = sorted(set(rows))
        if 1 in kinds:
            return None
        offers = self._offers(kinds)
        counts = [kinds.index(count) for count in rows]
        own = [offers[number] for number in self.class_of]
        found = assign_fixed(own, counts, self.ask.state.nbytes, equal_shards=True)
        found = found or assign_fixed(own, counts, self.ask.state.nbytes, equal_shards=False)
        return None if found is None else self._choice(found, offers, rows)

    def fixed_shares(self, choice: Choice) -> tuple[float, ...]:
        """Return the share of the seconds of each rank that does not depend on its rows."""
        fleet, graph = self.ask.fleet, self.ask.graph
        return tuple(
            fixed_share(graph_of_rows(graph, max(rows, LEAST_ROWS)), fleet.seen_by(rank))
            for rank, rows in enumerate(choice.rows)
        )

    def least_s(self, rows: Sequence[int]) -> float:
        """Return the seconds in which the slowest rank computes its `rows` on the whole batch, in the fastest of the
        ways that treat all layers alike, with memory for any of them."""
        ways = {id(way.treated): way.treated for way in self.ways if way.micro_batches == 1}.values()
        return max(
            min(
                float(way.lap_s([count or LEAST_ROWS], self.ask.fleet.seen_by(self._firsts[number])).sum())
                for way in ways
            )
            for number, count in set(zip(self.class_of, rows, strict=True))
        )

    def _offers(self, rows: Sequence[int]) -> list[Offers]:
        """Return the offers of each class of ranks for each number of `rows`."""
        ask = self.ask
        return [
            offers_of(self.ways, rows, ask.fleet.seen_by(rank), ask.budgets[rank], ask.state, ask.fleet.num_ranks)
            for rank in self._firsts
        ]

    def _choice(self, found: Assignment, offers: Sequence[Offers], rows: Sequence[int]) -> Choice:
        shares: list[Share] = []
        ranks: list[RankOutlook] = []
        for rank, (number, count, place) in enumerate(zip(self.class_of, found.quanta, found.ways, strict=True)):
            way, shard, own_rows = self.ways[place], found.shards[rank], max(rows[rank], LEAST_ROWS)
            shares.append(Share(rank=rank, num_rows=rows[rank], micro_batches=way.micro_batches, state=shard))
            working_bytes = int(way.peak_bytes([own_rows])[0] + way.in_flight_bytes)
            state_bytes = round(shard * self.ask.state.nbytes)
            on_device = max(0, min(state_bytes, self.ask.budgets[rank].device_bytes - working_bytes))
            ranks.append(
                RankOutlook(
                    treatment=way.text,
                    busy_s=float(offers[number].busy_s[count, place]),
                    peak_bytes=working_bytes + on_device,
                    host_bytes=state_bytes - on_device + round(own_rows * way.away_each),
                )
            )
        return Choice(shares=tuple(shares), step_s=found.step_s, ranks=tuple(ranks))

    def no_room(self) -> NoFeasibleShares:
        """Return the error with the room of each class, each with the rows that leave the most room in all."""
        batch, state_bytes = self.ask.batch, self.ask.state.nbytes
        rooms = most_room(self.offers, self.class_of)
        if rooms is None:
            return NoFeasibleShares(batch, state_bytes, 0, "")
        names = [seat.cluster.device.name for seat in self.ask.fleet.seats]
        texts = [
            f"{names[ranks[0]]} {len(ranks)} x {format_bytes(min(rooms[rank] for rank in ranks))}"
            for ranks in self.ask.fleet.classes(self.ask.budgets)
        ]
        return NoFeasibleShares(batch, state_bytes, sum(rooms), ", ".join(texts))


def quantum_of(batch: int) -> int:
    """Return the rows in which a batch is shared out: the smallest power of two that gives at most 256 quanta, or the
    smallest divisor of the batch that does; so a row for a batch of at most 256.

    Raises InvalidOption if `batch` is no whole number, less than 2, or has no such divisor.
    """
    if not isinstance(batch, int) or batch < LEAST_ROWS:
        raise InvalidOption("batch", batch, f"a whole number of rows, {LEAST_ROWS} or more")
    quantum = 1
    while batch > quantum * _MOST_QUANTA:
        quantum *= 2
    if batch % quantum == 0:
        return quantum
    found = next(number for number in range(1, batch + 1) if batch % number == 0 and batch // number <= _MOST_QUANTA)
    if batch // found < 2:
        raise InvalidOption("batch", batch, "a multiple of a number of rows that ranks can share out, such as of 8")
    return found


# ----------------------------------------------------------------------------------------------------------------------
# From the shares of the formula to shares that are better in the simulation of all ranks.
#
# The formula of the search treats activations in eighths of the layers, and lets no rank wait for another. The plans of
# the ranks do better on some ranks than on others, so rows move once more, by the seconds in which each rank computes:
#
#   shares of the formula --plans of all ranks--> busy seconds of each rank --even out--> other rows --plans--> ...
#
# The shares of the rules are simulated too, unless the compute of a rank alone takes as long as the best step so far.
# So the result is never worse in the simulation than theirs. Moved rows have to gain a percent: where ranks wait for
# collectives, rows hardly matter. The search ends early when its time is over; its outcome says so.


_MOST_ROUNDS = 3
"""Times that rows move: the plans of a model of 1.5 billion parameters take half a minute."""
_SURELY = 1.05
"""The shares of a rule are not simulated if its slowest rank computes for this times the best step so far, with memory
for everything. Layers that recompute a part of their activations may take a little less than the formula knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """A step in the simulation of all ranks together."""

    step_s: float
    busy_s: tuple[float, ...]
    """Seconds in which each rank computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundChoice:
    """Shares with how they were found."""

    choice: Choice
    outcome: Outcome

    @property
    def shares(self) -> Shares:
        """The shares of all ranks."""
        return Shares(self.choice.shares, self.outcome)


Simulate = Callable[[Choice], SimulatedStep | None]
"""Returns the step of all ranks with a choice, or None if they have no plans for it."""


def refined(search: ShareSearch, simulate: Simulate, deadline: Deadline | None = None) -> FoundChoice:
    """Return the shares with the shortest step in the simulation: of those of `search`, of those that even out the busy
    seconds of ranks, and of those of the rules. Those of the formula if no plans exist for any of them.

    After the `deadline` no simulation begins; one that has begun is completed. Raises NoFeasibleShares if nothing fits.
    """
    tried: dict[tuple[int, ...], SimulatedStep | None] = {}
    shortest: list[tuple[Choice, SimulatedStep]] = []
    """Each shorter than those before it."""
    is_complete = True

    def simulated(choice: Choice, least_gain: float = 0.0) -> SimulatedStep | None:
        """Return the step of `choice`, and keep it if it is shorter than all before by the share `least_gain` of
        theirs; None if it has no plans, or if there is no time."""
        nonlocal is_complete
        if choice.rows not in tried:
            if deadline is not None and deadline.is_over:
                is_complete = False
                return None
            step = tried[choice.rows] = simulate(choice)
            if step is not None and (not shortest or step.step_s < (1 - least_gain) * shortest[-1][1].step_s):
                shortest.append((choice, step))
        return tried[choice.rows]

    best = search.best()
    simulated(best)
    for rule in RULES:
        other = search.of_rule(rule)
        if other is not None and not (shortest and search.least_s(other.rows) > _SURELY * shortest[-1][1].step_s):
            simulated(other)
    # Even out the busy seconds of the shortest choice so far, and again those of the result.
    own = shortest[-1] if shortest else None
    for _ in range(_MOST_ROUNDS):
        if own is None:
            break
        rows = balanced_rows(own[0].rows, own[1].busy_s, search.fixed_shares(own[0]))
        choice = None if rows in tried else search.of_rows(rows)
        step = None if choice is None else simulated(choice, GAIN)
        own = None if choice is None or step is None else (choice, step)
    if not shortest:
        return by_formula(best, is_complete=is_complete)
    choice, step = shortest[-1]
    number = sum(step is not None for step in tried.values())
    outcome = Outcome(step_s=step.step_s, num_simulated=number, is_complete=is_complete)
    return FoundChoice(choice=choice, outcome=outcome)


def by_formula(choice: Choice, *, is_complete: bool = False) -> FoundChoice:
    """Return `choice` as the shares with the shortest step by the formula; the search `is_complete` if no ranks had
    plans to simulate."""
    return FoundChoice(choice=choice, outcome=Outcome(step_s=choice.step_s, is_complete=is_complete))
