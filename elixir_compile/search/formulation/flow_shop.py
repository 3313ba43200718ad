"""A flow shop: seconds of work by lane and event, and the longest path through them.

A job of the shop is an event, such as the first use of a bucket; it passes the lanes in order. Lanes are first in,
first out, so the shop takes as long as the longest path that goes back neither in events nor in lanes:

    T = max over i <= j <= k <= l of h_0..h_i + a_i..a_j + c_j..c_k-1 + r_k..r_l + d_l..d_end

with h, a, c, r, d the work on the lanes h2d, gather, compute, reduce and d2h. Each path is linear in the decisions.
`cross_step_updates` makes the flow shops of a step. Source: flow shops, Johnson 1954.

Some work counts only if a decision is taken: the host waits for the ops of a backward up to the last gradient that
comes to it, so ops count if a bucket whose gradient is complete behind them has it on the host. `Gated` is such a shop,
and `Chain` is shops one behind the other.
"""

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from elixir_compile.ir import Lane


class Queue(StrEnum):
    """A queue of the collectives of one process group, a lane of a flow shop. In records, the lanes of collectives are
    their kinds."""

    COLLECTIVES = "collectives"
    """Gathers and reduces, in the order of issue."""
    AVERAGES = "averages"
    """Averages over copies of shards."""


Choice = tuple[int, int]
"""(index of a bucket, one of its levels), or (number of buckets + index of a layer, one of its modes)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The work along one path through lanes and events; it takes `constant_s + coefficients_s @ (x, y)`, with the y of
    gates, if it has any."""

    name: str
    """The name of the shop."""
    lanes_s: Mapping[Lane | Queue, float]
    """The seconds of the path on each lane, at the x for which it is the longest."""
    constant_s: float
    coefficients_s: NDArray[np.float64]
    seconds: float
    """Seconds of the path at the x for which it is the longest."""

    @property
    def label(self) -> str:
        """The name of the shop, and the shares of the lanes."""
        total_s = sum(self.lanes_s.values())
        shares = {lane: lane_s / total_s for lane, lane_s in self.lanes_s.items() if lane_s > 0.005 * total_s}
        busy = [f"{lane} {share:.0%}" for lane, share in shares.items()]
        return f"{self.name}: {', '.join(busy) or 'nothing to do'}"


class Shop(Protocol):
    """Work whose longest path is a lower limit on the seconds of a part of the step."""

    @property
    def name(self) -> str:
        """The name of the part."""
        ...

    def longest(self, x: NDArray[np.float64]) -> Path:
        """Return the longest path at x, one number per choice, integral or not."""
        ...

    def longest_each_s(self, xs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the seconds of the longest path at each column of `xs`: choices x numbers of x, to as many seconds."""
        ...

    def slower(self, factor: float) -> "Shop":
        """Return this shop with the seconds of all lanes but compute times `factor`."""
        ...

    def with_gates(self, gates: Sequence["Gate"]) -> "Shop":
        """Return this shop with the gate that is its own among `gates`, if it has one."""
        ...


def longest_s(shop: Shop, x: NDArray[np.float64]) -> float:
    """Return the seconds of the longest path of `shop` at x."""
    return float(shop.longest_each_s(x[:, None])[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A flow shop with seconds[lane, event] = constants_s + matrix_s @ x, flattened lane by lane."""

    name: str
    lanes: tuple[Lane | Queue, ...]
    num_events: int
    compute: int
    """Index of the compute lane in `lanes`, -1 if there is none. Its work at an event lasts to the next event."""
    constants_s: NDArray[np.float64]
    matrix_s: sparse.csr_array

    def longest(self, x: NDArray[np.float64]) -> Path:
        """Return the longest path at x, one number per choice, integral or not."""
        work_s, matrix_s = self._work_s(x), self.matrix_s
        runs = self._trace(work_s)
        rows = [slice(lane * self.num_events + first, lane * self.num_events + last + 1) for lane, first, last in runs]
        # A sum of the matrix's rows, without scipy's selection of rows, which takes most of the time.
        starts = np.asarray(matrix_s.indptr)
        entries = [slice(starts[own.start], starts[own.stop]) for own in rows]
        columns = np.concatenate([matrix_s.indices[own] for own in entries])
        seconds = np.concatenate([matrix_s.data[own] for own in entries])
        coefficients_s = np.asarray(np.bincount(columns, seconds, minlength=len(x)), dtype=np.float64)
        constant_s = float(np.concatenate([self.constants_s[own] for own in rows]).sum())
        return Path(
            name=self.name,
            lanes_s={self.lanes[lane]: float(work_s[lane, first : last + 1].sum()) for lane, first, last in runs},
            constant_s=constant_s,
            coefficients_s=coefficients_s,
            seconds=constant_s + float(coefficients_s @ x),
        )

    def longest_each_s(self, xs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the seconds of the longest path at each column of `xs`."""
        return self.longest_of_s(self.constants_s[:, None] + self.matrix_s @ xs)

    def slower(self, factor: float) -> "Phase":
        """Return this shop with the seconds of all lanes but compute times `factor`."""
        factors = np.repeat([1.0 if lane is Lane.COMPUTE else factor for lane in self.lanes], self.num_events)
        matrix_s = self.matrix_s.copy()
        matrix_s.data *= np.repeat(factors, np.diff(matrix_s.indptr))
        return replace(self, constants_s=self.constants_s * factors, matrix_s=matrix_s)

    def with_gates(self, gates: Sequence["Gate"]) -> "Phase":
        """Return this shop: all of its work counts always."""
        return self

    def longest_of_s(self, work_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the seconds of the longest path for each column of `work_s`, seconds by row of the matrix."""
        lanes_s = work_s.reshape(len(self.lanes), self.num_events, -1)
        return np.max([ends_s[-1] for _, ends_s in self._lanes_s(lanes_s)], axis=0)

    def _work_s(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        return (self.constants_s + self.matrix_s @ x).reshape(len(self.lanes), self.num_events)

    def _lanes_s(self, work_s: NDArray[np.float64]) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
        """Return, per lane, the idle seconds up to each event, and the second at which the work of each event ends.

        `work_s` is lanes x events, or lanes x events x as many choices as are looked at.
        On a lane `end[i] = max(end[i - 1], ready[i]) + work[i]`, so with S the running sum of the work,
        `end[i] - S[i]` is the running maximum of `ready[i] - S[i - 1]`.
        """
        ready_s = np.zeros(work_s.shape[1:])
        found: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []
        for lane in range(len(self.lanes)):
            if lane:
                # Work may begin when the lane before ends its own, behind compute that of the event before.
                before_s = found[-1][1]
                follows = self._follows_compute(lane)
                ready_s = np.concatenate([np.zeros_like(before_s[:1]), before_s[:-1]]) if follows else before_s
            total_s = np.cumsum(work_s[lane], axis=0)
            late_s = np.maximum.accumulate(ready_s - (total_s - work_s[lane]), axis=0)
            found.append((late_s, late_s + total_s))
        return found

    def _trace(self, work_s: NDArray[np.float64]) -> list[tuple[int, int, int]]:
        """Return (lane, first event, last event) of each stretch of the longest path, the latest stretch first."""
        num_events = self.num_events
        lanes_s = self._lanes_s(work_s)
        entries: list[NDArray[np.int64]] = []
        for late_s, _ in lanes_s:
            # The path enters this lane at the first event that reached the running maximum.
            is_new = np.concatenate([[True], late_s[1:] > late_s[:-1]])
            entries.append(np.maximum.accumulate(np.where(is_new, np.arange(num_events), 0)))
        lane = max(range(len(self.lanes)), key=lambda lane: (float(lanes_s[lane][1][-1]), lane))
        at = num_events - 1
        runs: list[tuple[int, int, int]] = []
        while lane >= 0 and at >= 0:
            first = int(entries[lane][at])
            runs.append((lane, first, at))
            at = first - 1 if self._follows_compute(lane) else first
            lane -= 1
        return runs

    def _follows_compute(self, lane: int) -> bool:
        """Whether `lane` comes right after compute: its work at an event follows the ops before the event."""
        return self.compute >= 0 and lane == self.compute + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Takers of work that counts only if one of some of them is chosen.

    A taker is a set of choices of which at most one is taken, perhaps with others that take it away. The takers are in
    an order, and y of a taker is 1 if it or a later one is chosen, else 0. The MILP has a column for each y.
    """

    takers: Sequence[Mapping[int, float]]
    """The entries of x of each taker, with a sign: they add up to 1 if it is chosen, else to 0."""
    others: Sequence[tuple[int, Mapping[int, float]]] = ()
    """(number of a taker, choices as of a taker): its y is 1 for these too."""
    first: int = 0
    """The place of the y of the first taker among those of all gates of the MILP."""
    least: int = 0
    """So many of the first y are 1, whatever is chosen."""
    most: int | None = None
    """Takers from this number on are not chosen: so many y may be 1. All of them if it is None."""
    _signs: sparse.csr_array = field(init=False, repr=False, compare=False)
    """The entries of x of each of `all_takers`, by row: a search asks for the y at thousands of x, of hundreds of
    takers."""
    _numbers: NDArray[np.int64] = field(init=False, repr=False, compare=False)
    """The number of the taker of each row."""
    _width: int = field(init=False, repr=False, compare=False)
    """The columns of `_signs`: later entries of x belong to no taker."""

    def __post_init__(self) -> None:
        rows = [taker for _, taker in self.all_takers()]
        columns = [column for taker in rows for column in taker]
        signs = [sign for taker in rows for sign in taker.values()]
        ends = np.cumsum([0, *map(len, rows)])
        width = max(columns, default=-1) + 1
        matrix = sparse.csr_array((signs, columns, ends), shape=(len(rows), width), dtype=float)
        object.__setattr__(self, "_signs", matrix)
        object.__setattr__(self, "_numbers", np.array([number for number, _ in self.all_takers()], np.int64))
        object.__setattr__(self, "_width", width)

    def all_takers(self) -> Iterator[tuple[int, Mapping[int, float]]]:
        """Yield each taker and each of `others`, with the number of the taker."""
        yield from enumerate(self.takers)
        yield from self.others

    def counts(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the y of each taker at x, the least that the constraints of the MILP allow if x is not integral.

        If x is a matrix, choices x numbers of x, so is y.
        """
        chosen = np.zeros((len(self.takers), *x.shape[1:]))
        shares = self._signs @ x[: self._width]
        np.maximum.at(chosen, self._numbers, shares)
        chosen[: self.least] = 1.0
        return np.maximum.accumulate(chosen[::-1], axis=0)[::-1]


class _Products(NamedTuple):
    """Work that counts as a product of an entry of x and a y: each column of `matrix_s` is such a pair.

    Pairs are few: the work of a choice at many events counts from the same taker on.
    """

    matrix_s: sparse.csr_array
    """Seconds by row of the shop and by pair."""
    columns: NDArray[np.int64]
    """By pair: the entry of x."""
    starts: NDArray[np.int64]
    """By pair: the number of the taker whose y it is."""
    is_taken_away: NDArray[np.bool_]
    """By pair: whether its seconds are below 0. They count as the lesser of x and y, so that no more is taken away than
    was there."""

    def of(self, x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return what each pair counts at x and y; both may be matrices, as in `Gate.counts`."""
        own_x, own_y = x[self.columns], y[self.starts]
        is_taken_away = self.is_taken_away.reshape(-1, *[1] * (x.ndim - 1))
        return np.where(is_taken_away, np.minimum(own_x, own_y), np.maximum(own_x + own_y - 1.0, 0.0))

    def linear_at(
        self, x: NDArray[np.float64], y: NDArray[np.float64], behind: int
    ) -> tuple[NDArray[np.float64], sparse.csr_array]:
        """Return `of` near x and y as constants and a matrix of pairs x (x, y), the y from column `behind` on."""
        own_x, own_y = x[self.columns], y[self.starts]
        is_both = ~self.is_taken_away & (own_x + own_y > 1)
        is_x = is_both | self.is_taken_away & (own_x <= own_y)
        is_y = is_both | self.is_taken_away & (own_x > own_y)
        pairs = np.concatenate([np.flatnonzero(is_x), np.flatnonzero(is_y)])
        columns = np.concatenate([self.columns[is_x], behind + self.starts[is_y]])
        shape = (len(self.columns), behind + len(y))
        return np.where(is_both, -1.0, 0.0), sparse.csr_array((np.ones(len(pairs)), (pairs, columns)), shape=shape)


class Gated:
    """A flow shop of which some work counts only if a taker is chosen: `phase` is the shop with all its work.

    Constant work c is c y. Work s x of a choice is s x if the choice is of the takers themselves, else s (x + y - 1) or
    0, the larger at the given x: linear lower limits of the work that counts, exact if x is integral. Source: McCormick
    1976.

    By row of the shop's matrix, `starts` has the number of the first taker for which its work counts: -1 if it always
    counts, the number of takers if it never does.
    """

    def __init__(self, *, phase: Phase, gate: Gate, starts: NDArray[np.int64]) -> None:
        self.phase, self.gate, self._starts = phase, gate, starts
        work, num_takers = phase.matrix_s.tocoo(), len(gate.takers)
        taker_of = np.full(phase.matrix_s.shape[1], -1)  # pyright: ignore[reportOptionalSubscript] (stubs)
        for number, taker in enumerate(gate.takers):
            taker_of[list(taker)] = number
        own_starts = starts[work.row]
        is_whole = (own_starts < 0) | (own_starts < num_takers) & (taker_of[work.col] >= own_starts)
        is_product = ~is_whole & (own_starts < num_takers)
        self._whole_s = sparse.csr_array(
            (work.data[is_whole], (work.row[is_whole], work.col[is_whole])), shape=phase.matrix_s.shape
        )
        seconds = work.data[is_product]
        keys = np.stack([work.col[is_product], own_starts[is_product], seconds < 0])
        pairs, pair_of = np.unique(keys, axis=1, return_inverse=True)
        matrix_s = sparse.csr_array(
            (seconds, (work.row[is_product], pair_of.ravel())), shape=(len(starts), pairs.shape[1])
        )
        self._products = _Products(matrix_s, pairs[0], pairs[1], pairs[2].astype(np.bool_))
        self._always_s = np.where(starts < 0, phase.constants_s, 0.0)
        rows = np.flatnonzero((starts >= 0) & (starts < num_takers) & (phase.constants_s != 0))
        self._constants_of_y_s = sparse.csr_array(
            (phase.constants_s[rows], (rows, starts[rows])), shape=(len(starts), num_takers)
        )

    @property
    def name(self) -> str:
        return self.phase.name

    def longest(self, x: NDArray[np.float64]) -> Path:
        """Return the longest path of the work that counts at x; its coefficients are those of x and of all y up to the
        last of this gate."""
        y = self.gate.counts(x)
        return self._counted(x, y).longest(np.concatenate([x, np.zeros(self.gate.first), y]))

    def longest_each_s(self, xs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the seconds of the longest path of the work that counts, at each column of `xs`."""
        y, products = self.gate.counts(xs), self._products
        work_s = self._whole_s @ xs + products.matrix_s @ products.of(xs, y) + self._constants_of_y_s @ y
        return self.phase.longest_of_s(self._always_s[:, None] + work_s)

    def slower(self, factor: float) -> "Gated":
        """Return this shop with the seconds of all lanes but compute times `factor`."""
        return Gated(phase=self.phase.slower(factor), gate=self.gate, starts=self._starts)

    def with_gates(self, gates: Sequence[Gate]) -> "Gated":
        """Return this shop with the gate among `gates` that has its place."""
        other = copy.copy(self)
        other.gate = next(gate for gate in gates if gate.first == self.gate.first)
        return other

    def _counted(self, x: NDArray[np.float64], y: NDArray[np.float64]) -> Phase:
        """Return the shop of the work that counts, linear in x and y, a lower limit that is exact here."""
        behind, products = len(x) + self.gate.first, self._products
        constants, shares = products.linear_at(x, y, behind)
        of_y = sparse.hstack([sparse.csr_array((len(self._always_s), behind)), self._constants_of_y_s])
        whole_s = self._whole_s.copy()
        whole_s.resize(len(self._always_s), behind + len(y))
        matrix_s = sparse.csr_array(whole_s + products.matrix_s @ shares + of_y)
        return replace(self.phase, constants_s=self._always_s + products.matrix_s @ constants, matrix_s=matrix_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Shops of which each begins when the one before is over."""

    name: str
    shops: Sequence[Shop]

    def longest(self, x: NDArray[np.float64]) -> Path:
        """Return the longest paths of the shops at x, one behind the other."""
        paths = [shop.longest(x) for shop in self.shops]
        lanes_s: Counter[Lane | Queue] = Counter()
        coefficients_s = np.zeros(max(len(path.coefficients_s) for path in paths))  # what a shorter one lacks is 0
        for path in paths:
            lanes_s.update(path.lanes_s)
            coefficients_s[: len(path.coefficients_s)] += path.coefficients_s
        return Path(
            name=self.name,
            lanes_s=lanes_s,
            constant_s=sum(path.constant_s for path in paths),
            coefficients_s=coefficients_s,
            seconds=sum(path.seconds for path in paths),
        )

    def longest_each_s(self, xs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the seconds of the longest paths of the shops, one behind the other, at each column of `xs`."""
        return np.sum([shop.longest_each_s(xs) for shop in self.shops], axis=0)

    def slower(self, factor: float) -> "Chain":
        """Return these shops with the seconds of all lanes but compute times `factor`."""
        return replace(self, shops=[shop.slower(factor) for shop in self.shops])

    def with_gates(self, gates: Sequence[Gate]) -> "Chain":
        """Return these shops, each with its gate among `gates`."""
        return replace(self, shops=[shop.with_gates(gates) for shop in self.shops])


class _Work(NamedTuple):
    """Seconds of work that an entry of x adds; the same row and column may come several times."""

    rows: NDArray[np.int64]
    """The number of the lane times the number of events, plus the event."""
    columns: NDArray[np.int64]
    """Entries of x."""
    seconds: NDArray[np.float64]


class Table:
    """Seconds by lane and event, filled in step by step and then turned into a `Phase`."""

    def __init__(
        self, name: str, lanes: tuple[Lane | Queue, ...], num_events: int, choices: Mapping[Choice, int]
    ) -> None:
        self.name, self.lanes, self.num_events, self._choices = name, lanes, num_events, choices
        self.constants_s = np.zeros((len(lanes), num_events))
        self._done: list[_Work] = []
        """The work added first; the lists below hold the work added since then."""
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._seconds: list[float] = []

    def add(self, lane: Lane | Queue, event: int, choice: Choice, seconds: float) -> None:
        """Add `seconds` of work on `lane` at `event`, times the entry of `choice` in x."""
        if seconds:
            self._rows.append(self.lanes.index(lane) * self.num_events + event)
            self._columns.append(self._choices[choice])
            self._seconds.append(seconds)

    def add_each(self, lane: Lane, events: Sequence[int], choice: Choice, seconds: Sequence[float]) -> None:
        """Add each of `seconds`, none of which is 0, on `lane` at its event, times the entry of `choice` in x."""
        start = self.lanes.index(lane) * self.num_events
        self._rows += [start + event for event in events]
        self._columns += [self._choices[choice]] * len(events)
        self._seconds += seconds

    def copy_lane(self, lane: Lane | Queue, other: "Table", to: Lane | Queue | None = None) -> None:
        """Add the work on `lane` to the lane `to` of the table `other`, which has the same number of events; to its
        lane of the same name if that is None."""
        row, row_there = self.lanes.index(lane), other.lanes.index(to or lane)
        start, there = row * self.num_events, row_there * self.num_events
        other.constants_s[row_there] += self.constants_s[row]
        rows, columns, seconds = self._work()
        is_on_lane = (rows >= start) & (rows < start + self.num_events)
        other._work()
        other._done.append(_Work(rows[is_on_lane] - start + there, columns[is_on_lane], seconds[is_on_lane]))

    def _work(self) -> _Work:
        """Return all work so far, in the order in which it was added."""
        new = _Work(
            np.array(self._rows, dtype=np.int64), np.array(self._columns, dtype=np.int64), np.array(self._seconds)
        )
        self._rows, self._columns, self._seconds = [], [], []
        self._done = [_Work(*map(np.concatenate, zip(*self._done, new, strict=True)))]
        return self._done[0]

    def phase(self) -> Phase:
        shape = (len(self.lanes) * self.num_events, len(self._choices))
        rows, columns, seconds = self._work()
        matrix = sparse.csr_array((seconds, (rows, columns)), shape=shape)
        compute = self.lanes.index(Lane.COMPUTE) if Lane.COMPUTE in self.lanes else -1
        return Phase(
            name=self.name,
            lanes=self.lanes,
            num_events=self.num_events,
            compute=compute,
            constants_s=self.constants_s.ravel(),
            matrix_s=matrix,
        )
