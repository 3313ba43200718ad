"""Choose the shares of all ranks of a fleet for one captured step: rows, micro-batches, and parts of the state."""

from collections.abc import Sequence
from dataclasses import dataclass

from elixir_compile.base.collector import collector_off
from elixir_compile.base.errors import InvalidOption, NoFeasibleShares
from elixir_compile.base.units import format_bytes
from elixir_compile.ir import Saving, StepGraph
from elixir_compile.ir.hardware import Fleet
from elixir_compile.ir.share import Share
from elixir_compile.search.joint.balance import fixed_share
from elixir_compile.search.shares import rules
from elixir_compile.search.shares.assign import Assignment, Offers, assign, assign_fixed, most_room
from elixir_compile.search.shares.costs import LEAST_ROWS, treatments_of, ways_of
from elixir_compile.search.shares.offers import Budget, MixedWay, State, mixed_ways, offers_of
from elixir_compile.step.rows import graph_of_rows

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
        self.offers = [self._with_zero_apart(offers) for offers in self._offers(self._rows())]

    def best(self) -> Choice:
        """Return the shares with the shortest step: equal parts of the state if they fit, else parts of any size.

        Raises NoFeasibleShares with the room of all classes if nothing fits.
        """
        found: Assignment | None = None
        for equal_parts in (True, False):
            if found is None:
                found = assign(self.offers, self.class_of, self.ask.state.nbytes, equal_parts=equal_parts)
        made = None
        if found is not None:
            made = self._choice(found, self.offers, [self.quantum * count for count in found.quanta])
        # Equal rows need not be whole quanta.
        choices = [choice for choice in (made, self.even()) if choice is not None]
        if not choices:
            raise self.no_room()
        return min(choices, key=lambda choice: choice.step_s)

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
        """Return the fastest way for each rank to run its `rows`, beside an equal part of the state if that fits each
        rank, else beside parts of any size; None if nothing fits, or a rank has a single row."""
        kinds = sorted(set(rows))
        if 1 in kinds:
            return None
        offers = self._offers(kinds)
        counts = [kinds.index(count) for count in rows]
        own = [offers[number] for number in self.class_of]
        found = assign_fixed(own, counts, self.ask.state.nbytes, equal_parts=True)
        found = found or assign_fixed(own, counts, self.ask.state.nbytes, equal_parts=False)
        return None if found is None else self._choice(found, offers, rows)

    def fixed_shares(self, choice: Choice) -> tuple[float, ...]:
        """Return the share of the seconds of each rank that does not depend on its rows."""
        fleet, graph = self.ask.fleet, self.ask.graph
        return tuple(
            fixed_share(graph_of_rows(graph, max(rows, LEAST_ROWS)), fleet.seen_by(rank).device)
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

    def _rows(self) -> list[int]:
        return list(range(0, self.ask.batch + 1, self.quantum))

    def _offers(self, rows: Sequence[int]) -> list[Offers]:
        """Return the offers of each class of ranks for each number of `rows`."""
        ask = self.ask
        return [
            offers_of(self.ways, rows, ask.fleet.seen_by(rank), ask.budgets[rank], ask.state, ask.fleet.num_ranks)
            for rank in self._firsts
        ]

    def _with_zero_apart(self, offers: Offers) -> Offers:
        """Return `offers` without those of no rows, if every rank can have some.

        A rank without rows takes as long as one with the fewest rows, and its work is lost.
        """
        if self.quantum <= LEAST_ROWS <= self.ask.batch // len(self.class_of):
            offers.room_bytes[0] = -1
        return offers

    def _choice(self, found: Assignment, offers: Sequence[Offers], rows: Sequence[int]) -> Choice:
        shares: list[Share] = []
        ranks: list[RankOutlook] = []
        for rank, (number, count, place) in enumerate(zip(self.class_of, found.quanta, found.ways, strict=True)):
            way = self.ways[place]
            shares.append(
                Share(rank=rank, num_rows=rows[rank], micro_batches=way.micro_batches, state=found.parts[rank])
            )
            ranks.append(self._outlook(rank, way, rows[rank], found.parts[rank], offers[number].busy_s[count, place]))
        return Choice(shares=tuple(shares), step_s=found.step_s, ranks=tuple(ranks))

    def _outlook(self, rank: int, way: MixedWay, rows: int, part: float, busy_s: float) -> RankOutlook:
        count = max(rows, LEAST_ROWS)
        budget = self.ask.budgets[rank]
        working_bytes = int(way.peak_bytes([count])[0] + way.in_flight_bytes)
        state_bytes = round(part * self.ask.state.nbytes)
        on_device = max(0, min(state_bytes, budget.device_bytes - working_bytes))
        return RankOutlook(
            treatment=way.text,
            busy_s=float(busy_s),
            peak_bytes=working_bytes + on_device,
            host_bytes=state_bytes - on_device + round(count * way.away_each),
        )

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
