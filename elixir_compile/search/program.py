"""The program of one problem as rows of numbers: x[bucket, level] and x[layer, mode], the seconds of each phase, and
what limits them.

Rows come and go as the search goes on; `milp` says which it asks for. Everything is scaled, so that the best known step
and the budgets are `_SCALE`: the solver's tolerances are absolute.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from elixir_compile.ir import Tier
from elixir_compile.search.crossing import Options, flow_shops, stream_choices
from elixir_compile.search.draft import Answer
from elixir_compile.search.flow import Choice, Path
from elixir_compile.search.judge import Judge
from elixir_compile.search.levels import Level, is_gathered
from elixir_compile.search.memory import MemoryModel
from elixir_compile.search.profiles import profiles

_SCALE = 1000.0
TOLERANCE = 1e-7
"""Below this share of the step or the budget, a row counts as kept."""
_NUM_STRETCHES = 32
_DIVIDED = 1e-3
"""A share of a bucket, or of a layer, below this is none."""
Vector = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(slots=True)
class _Row:
    """coefficients @ (x, T, z) <= limit, in scaled units; sparse, because later rows bring new columns."""

    columns: Indices
    values: Vector
    limit: float
    is_memory: bool = False


@dataclass(slots=True)
class Solution:
    x: Vector
    bound: float
    """Of the objective, scaled."""


class Program:
    """The program of one problem, and the rows it has so far; `reference_s`, the seconds of a known step, is the unit
    of time."""

    def __init__(self, judge: Judge, reference_s: float) -> None:
        self.judge = judge
        self.reference_s = reference_s
        self.rows: list[_Row] = []
        self.num_extra = 0
        """Columns beyond x and T: gradients that stay because no later bucket's leave."""
        facts = judge.facts
        own_profiles = profiles(facts.problem, facts.layers)
        pairs = [(i, level) for i, levels in enumerate(facts.choices) for level in levels]
        moded = [(number, mode) for number, own in enumerate(own_profiles) for mode in range(len(own))]
        self.choices: dict[Choice, int] = {pair: column for column, pair in enumerate(pairs)}
        self.choices |= {(len(facts.buckets) + i, mode): len(pairs) + j for j, (i, mode) in enumerate(moded)}
        self.num_options = len(self.choices)
        """Columns of levels and modes; behind them are those of updates that may be streamed."""
        self.may_stream = True
        """False asks for solutions that stream nothing; what they take bounds no others."""
        self._streams = {(i, home): choice for i, home, choice in stream_choices(facts)}
        self.choices |= {choice: self.num_options + j for j, choice in enumerate(self._streams.values())}
        shops = flow_shops(facts, judge.prices, Options(self.choices, own_profiles))
        self.phases, self.across, self.spanned, self.whole = shops
        # Bytes on top of those with everything kept, which are in `rest_bytes`: few segments see any difference.
        more_bytes = [own_profiles[i][mode].nbytes - own_profiles[i][0].nbytes for i, mode in moded]
        self.memory = MemoryModel(facts, {int(slot) + 1 for row in more_bytes for slot in np.flatnonzero(np.diff(row))})
        own_bytes = self.memory.own_bytes()
        columns = [own_bytes[i, level] for i, level in pairs] + [self.memory.highest(row) for row in more_bytes]
        # Room for what is streamed is one bucket's, which no row can say: left out.
        columns += [np.zeros_like(self.memory.rest_bytes)] * len(self._streams)
        self.bytes_of = np.asfortranarray(np.stack(columns, axis=1), dtype=np.float64)
        self.rest_bytes = self.memory.rest_bytes.astype(np.float64)
        self._seen: set[tuple[object, ...]] = set()
        host_nbytes = [self.judge.host_bytes_of(i, level) for i, level in pairs]
        host_nbytes += [own_profiles[i][mode].host_bytes for i, mode in moded] + [0] * len(self._streams)
        self._host_bytes = host_bytes = np.array(host_nbytes, dtype=np.float64)
        limit_bytes = max(facts.problem.host_budget_bytes, 1)
        hosted = np.flatnonzero(host_bytes)
        scaled = host_bytes[hosted] / limit_bytes * _SCALE
        self._host = _Row(hosted, scaled, _SCALE)
        self.rows.append(self._host)
        self.rows += [self._stream_row(i, home) for i, home in self._streams]

    @property
    def num_choices(self) -> int:
        return len(self.choices)

    @property
    def has_streams(self) -> bool:
        """Whether an answer says less than x does: updates may be streamed."""
        return bool(self._streams)

    def _stream_row(self, i: int, home: Tier) -> _Row:
        """What is streamed of bucket i is at a level with its state on the host and its parameters at `home`."""
        own = [self.choices[i, level] for level in self._levels_at(i, home)]
        columns = np.array([self.choices[self._streams[i, home]], *own], dtype=np.int64)
        return _Row(columns, np.array([1.0, *[-1.0] * len(own)]), 0.0)

    def _levels_at(self, i: int, home: Tier) -> list[Level]:
        return [level for level in self.judge.facts.choices[i] if level.has_state_on_host and level.home is home]

    def vector(self, answer: Answer, streamed: Collection[int] = ()) -> Vector:
        """Return x for a whole answer that streams the updates of these buckets."""
        x = np.zeros(self.num_choices)
        x[self._columns(answer)] = 1.0
        for (i, home), choice in self._streams.items():
            if i in streamed and answer.levels[i] in self._levels_at(i, home):
                x[self.choices[choice]] = 1.0
        return x

    def answer(self, x: Vector) -> Answer:
        """Return the answer that a whole x is."""
        return self._answer(lambda i, own: max(own, key=lambda option: (x[self.choices[i, option]], -option)))

    def rounded(self, x: Vector) -> Answer:
        """Return a whole answer near x: where a bucket or a layer is divided between several options, the one with the
        fewest bytes where memory is fullest."""
        fullest = int(self._live_bytes(x).argmax())
        nbytes = self.bytes_of[fullest]
        return self._answer(
            lambda i, own: min(
                (option for option in own if x[self.choices[i, option]] > _DIVIDED),
                key=lambda option: (nbytes[self.choices[i, option]], -option),
            )
        )

    def _answer(self, choose: Callable[[int, Sequence[int]], int]) -> Answer:
        """Return the answer with what `choose` says for each bucket or layer and its options."""
        facts = self.judge.facts
        levels = tuple(Level(choose(i, own)) for i, own in enumerate(facts.choices))
        layers = enumerate(facts.layers, start=len(facts.buckets))
        return Answer(levels, tuple(choose(i, range(len(layer.modes))) for i, layer in layers))

    def _columns(self, answer: Answer) -> list[int]:
        options = (*answer.levels, *answer.modes)
        return [self.choices[i, option] for i, option in enumerate(options)]

    def peak_bytes(self, x: Vector) -> int:
        """Return the bytes of the fullest segment at x, transfers at their use."""
        return int(self._live_bytes(x).max())

    def most_more_bytes(self, x: Vector, than: Vector) -> int:
        """Return by how many bytes a segment holds more at x than at `than`, at most."""
        return int((self._live_bytes(x) - self._live_bytes(than)).max())

    def _live_bytes(self, x: Vector) -> Vector:
        """Bytes of every segment at x, most of which is 0."""
        chosen = np.flatnonzero(x)
        return self.rest_bytes + self.bytes_of[:, chosen] @ x[chosen]

    def host_bytes(self, x: Vector) -> int:
        """Return the bytes on the host at x."""
        return int(self._host_bytes @ x)

    def lower_s(self, x: Vector) -> float:
        """Return the seconds below which no step at x can be: the longest path of every phase, and through several."""
        sides_s = [max(phase.longest_s(x) for phase in side) for side in self.phases]
        across_s = max((phase.longest_s(x) for phase in self.across), default=0.0)
        whole_s = max((phase.longest_s(x) for phase in self.whole), default=0.0)
        return max(sum(sides_s) + max(0.0, across_s - sum(sides_s[number] for number in self.spanned)), whole_s)

    # Rows.

    def add_paths(self, x: Vector) -> bool:
        """Add the longest path of each phase at x; return whether any was new."""
        added = False
        for number, side in enumerate(self.phases):
            for phase in side:
                added |= self._add_path((number,), phase.longest(x))
        for phase in self.across:
            added |= self._add_path(self.spanned, phase.longest(x))
        for phase in self.whole:
            added |= self._add_path(tuple(range(len(self.phases))), phase.longest(x))
        return added

    def _add_path(self, numbers: tuple[int, ...], path: Path) -> bool:
        """Say that the phases with these `numbers` together take no less than `path`."""
        key = ("path", numbers, path.constant_s, path.coefficients_s.tobytes())
        if key in self._seen:
            return False
        self._seen.add(key)
        unit = _SCALE / self.reference_s
        columns = np.flatnonzero(path.coefficients_s)
        values = path.coefficients_s[columns] * unit
        columns = np.append(columns, [self.num_choices + number for number in numbers])
        self.rows.append(_Row(columns, np.append(values, [-1.0] * len(numbers)), -path.constant_s * unit))
        return True

    def add_memory(self, x: Vector, more_bytes: int = 0) -> bool:
        """Add the rows of the fullest segments at x that are over the budget and `more_bytes`; say whether any was."""
        budget_bytes = self.judge.facts.problem.budget_bytes + more_bytes
        live_bytes = self._live_bytes(x)
        # The fullest of each stretch: those next to one another are nearly the same.
        stretches = np.array_split(np.arange(len(live_bytes)), min(_NUM_STRETCHES, len(live_bytes)))
        fullest = [int(own[live_bytes[own].argmax()]) for own in stretches]
        over = [segment for segment in fullest if live_bytes[segment] > budget_bytes * (1 + TOLERANCE)]
        has_new = sum([self._add_segment(segment) for segment in over]) > 0
        in_update = self.memory.segment_of(self.judge.facts.num_run)
        for (i, home), choice in self._streams.items() if in_update < len(live_bytes) else ():
            column, nbytes = self.choices[choice], self.judge.memory.streamed_bytes(i, home)
            if live_bytes[in_update] + nbytes * x[column] > budget_bytes * (1 + TOLERANCE):
                has_new |= self._add_streamed(in_update, column, nbytes)
        return has_new

    def _add_streamed(self, segment: int, column: int, nbytes: int) -> bool:
        """Say that there is room for what is streamed in `column`; what passes at another time does not count."""
        if ("streamed", column) in self._seen:
            return False
        self._seen.add(("streamed", column))
        columns = np.flatnonzero(self.bytes_of[segment])
        self._append_memory(
            segment, np.append(columns, column), np.append(self.bytes_of[segment][columns], float(nbytes))
        )
        return True

    def _add_segment(self, segment: int) -> bool:
        if ("segment", segment) in self._seen:
            return False
        self._seen.add(("segment", segment))
        columns = np.flatnonzero(self.bytes_of[segment])
        self._append_memory(segment, columns, self.bytes_of[segment][columns])
        return True

    def _append_memory(self, segment: int, columns: Indices, nbytes: Vector) -> None:
        budget_bytes = max(self.judge.facts.problem.budget_bytes, 1)
        limit = (budget_bytes - self.rest_bytes[segment]) / budget_bytes * _SCALE
        self.rows.append(_Row(columns, nbytes / budget_bytes * _SCALE, limit, is_memory=True))

    def add_leaving(self, answer: Answer) -> bool:
        """Add exact rows for the segments that `answer` breaks in truth; return whether any is new.

        A gradient that leaves is on the device until the next bucket whose gradients leave completes them: bucket i's
        is there in segment s when i leaves and nothing between i and s does. A column z >= leaves[i] - sum of leaves
        in between says so.
        """
        judge = self.judge
        levels = answer.levels
        kept = self.vector(Answer(levels, judge.facts.modes))
        exact_bytes = self.memory.live_bytes(levels, judge.at_use(levels)) - self.bytes_of @ kept
        live_bytes = exact_bytes - self.rest_bytes + self._live_bytes(self.vector(answer))
        over = np.flatnonzero(live_bytes > judge.facts.problem.budget_bytes)
        added = False
        for segment in over[np.argsort(-live_bytes[over], kind="stable")][:4]:
            if ("leaving", int(segment)) not in self._seen:
                self._seen.add(("leaving", int(segment)))
                self._add_exact_segment(int(segment))
                added = True
        return added

    def _add_exact_segment(self, segment: int) -> None:
        facts = self.judge.facts
        before = self.memory.completed_before(segment)
        columns, nbytes = [np.flatnonzero(self.bytes_of[segment])], [self.bytes_of[segment]]
        nbytes[0] = nbytes[0][columns[0]]
        # The one right before is in `bytes_of` already: nothing is between it and the segment.
        for place, i in enumerate(before[:-1]):
            gradients = facts.gradients[i]
            assert gradients is not None
            z = self.num_choices + len(self.phases) + self.num_extra
            self.num_extra += 1
            columns.append(np.array([z]))
            bucket, whole_bytes = facts.buckets[i], sum(size for _, size in gradients.births)
            nbytes.append(np.array([float(bucket.reduced_nbytes if bucket.is_packed else whole_bytes)]))
            own = self._leaving_columns(i)
            between = np.array([c for j in before[place + 1 :] for c in self._leaving_columns(j)], dtype=np.int64)
            self.rows.append(
                _Row(
                    np.concatenate([own, between, [z]]).astype(np.int64),
                    np.concatenate([np.ones(len(own)), -np.ones(len(between)), [-1.0]]),
                    0.0,
                )
            )
        self._append_memory(segment, np.concatenate(columns), np.concatenate(nbytes))

    def _leaving_columns(self, i: int) -> list[int]:
        facts = self.judge.facts
        return [self.choices[i, level] for level in facts.choices[i] if is_gathered(facts.buckets[i], level)]

    def forbid(self, answer: Answer) -> None:
        """Add a row that no solution at exactly `answer` satisfies."""
        columns = np.array(self._columns(answer), dtype=np.int64)
        self.rows.append(_Row(columns, np.ones(len(columns)), len(columns) - 1.0))

    # Solving.

    def solve(self, *, is_whole: bool, limit_s: float, gap: float, more_bytes: int = 0) -> Solution | None:
        """Return the best x under the rows so far, None when there is none or the time is up before one is found.

        `more_bytes` is device memory on top of the budget.
        """
        num_columns = self.num_choices + len(self.phases) + self.num_extra
        budget_bytes = max(self.judge.facts.problem.budget_bytes, 1)
        objective = np.zeros(num_columns)
        objective[self.num_choices : self.num_choices + len(self.phases)] = 1.0
        limits = np.array([row.limit + more_bytes / budget_bytes * _SCALE * row.is_memory for row in self.rows])
        whole = np.arange(num_columns) < self.num_choices
        result = milp(
            objective,
            constraints=[
                LinearConstraint(self._matrix(num_columns), ub=limits),  # pyright: ignore[reportArgumentType] (stubs)
                LinearConstraint(self._one_each(num_columns), 1.0, 1.0),
            ],
            bounds=Bounds(0.0, self._most(num_columns)),  # pyright: ignore[reportArgumentType] (stubs)
            integrality=whole.astype(np.int64) if is_whole else None,
            options={"time_limit": max(limit_s, 0.01), "mip_rel_gap": gap, "presolve": True},
        )
        if result.x is None:
            return None
        found = result.mip_dual_bound if is_whole else result.fun
        bound = 0.0 if found is None or not np.isfinite(found) else float(found)
        return Solution(x=np.asarray(result.x[: self.num_choices]), bound=bound)

    def _most(self, num_columns: int) -> Vector:
        most = np.full(num_columns, np.inf)
        most[: self.num_choices] = 1.0
        most[self.num_options : self.num_choices] = float(self.may_stream)
        return most

    def is_short(self, solution: Solution) -> bool:
        """Return whether the objective at `solution` is below what its longest paths add up to."""
        return self.lower_s(solution.x) * _SCALE / self.reference_s > solution.bound * (1 + TOLERANCE)

    def seconds(self, bound: float) -> float:
        """Return a scaled objective in seconds, rounded down by more than the solver's tolerances."""
        return bound * self.reference_s / _SCALE * (1 - 1e-6)

    def binding(self, solution: Solution) -> tuple[str, ...]:
        """Return the rows that are full at `solution`, in words, each once."""
        live_bytes = self._live_bytes(solution.x)
        budget_bytes = self.judge.facts.problem.budget_bytes
        labels = self._longest_labels(solution.x)
        fullest = int(live_bytes.argmax())
        if live_bytes[fullest] >= budget_bytes * (1 - 1e-3):
            op = self.judge.facts.graph.ops[self.memory.highest_op(fullest)]
            labels.append(f"device memory is full at {op.id}")
        if self._host.values @ solution.x[self._host.columns] >= self._host.limit * (1 - 1e-3):
            labels.append("host memory is full")
        return tuple(dict.fromkeys(labels))

    def _longest_labels(self, x: Vector) -> list[str]:
        """How the longest path of each phase divides over its lanes; one through several stands for them."""
        sides = [max((phase.longest(x) for phase in side), key=lambda path: path.seconds) for side in self.phases]
        if any(phase.longest_s(x) >= self.lower_s(x) for phase in self.whole):
            return ["step: host memory is busy"]
        across = max((phase.longest(x) for phase in self.across), key=lambda path: path.seconds, default=None)
        if across is None or across.seconds <= sum(sides[number].seconds for number in self.spanned):
            return [side.label for side in sides]
        names = " and ".join(side[0].name for number, side in enumerate(self.phases) if number in self.spanned)
        rest = [side.label for number, side in enumerate(sides) if number not in self.spanned]
        return [f"{names}: {across.label.partition(': ')[2]}", *rest]

    def _matrix(self, num_columns: int) -> sparse.csr_array:
        lengths = [len(row.columns) for row in self.rows]
        columns = np.concatenate([row.columns for row in self.rows])
        values = np.concatenate([row.values for row in self.rows])
        starts = np.concatenate([[0], np.cumsum(lengths)])
        return sparse.csr_array((values, columns, starts), shape=(len(self.rows), num_columns))

    def _one_each(self, num_columns: int) -> sparse.csr_array:
        """Ones for the options of each bucket and layer, one row each."""
        num_rows = len(self.judge.facts.buckets) + len(self.judge.facts.layers)
        buckets = [i for i, _ in self.choices if i < num_rows]
        shape = (num_rows, num_columns)
        return sparse.csr_array((np.ones(len(buckets)), (buckets, np.arange(len(buckets)))), shape=shape)
