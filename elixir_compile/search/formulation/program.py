"""The program of one problem as rows of numbers: x[bucket, level] and x[layer, mode], the seconds of each phase, and
what limits them.

Rows are added as the search goes on; `pricing`, `rounding` and `milp` say which they ask for, and `solving` asks the
solver. Everything is scaled, so that the best known step and the budgets are `SCALE`: the solver's tolerances are
absolute.
"""

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elixir_compile.ir import Tier
from elixir_compile.search.candidate import Candidate
from elixir_compile.search.evaluator import Evaluator
from elixir_compile.search.formulation.cross_step_updates import Options, flow_shops, stream_choices
from elixir_compile.search.formulation.flow_shop import Choice, Path
from elixir_compile.search.space.levels import Level, is_gathered
from elixir_compile.search.space.memory import MemoryModel

SCALE = 1000.0
TOLERANCE = 1e-7
"""Below this share of the step or the budget, a row counts as kept."""
_NUM_STRETCHES = 32
_MANY_CHOICES = 600
Vector = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(slots=True)
class Row:
    """coefficients @ (x, T, z) <= limit, in scaled units; sparse, because later rows bring new columns."""

    columns: Indices
    values: Vector
    limit: float
    is_memory: bool = False


class Program:
    """The program of one problem, and the rows it has so far; `reference_s`, the seconds of a known step, is the unit
    of time."""

    def __init__(self, evaluator: Evaluator, reference_s: float) -> None:
        self.evaluator = evaluator
        self.reference_s = reference_s
        self.rows: list[Row] = []
        self.num_extra = 0
        """Columns beyond x and T: gradients that stay because no later bucket's leave."""
        facts = evaluator.facts
        own_profiles = evaluator.profiles
        pairs = [(i, level) for i, levels in enumerate(facts.choices) for level in levels]
        moded = [(number, mode) for number, own in enumerate(own_profiles) for mode in range(len(own))]
        self.choices: dict[Choice, int] = {pair: column for column, pair in enumerate(pairs)}
        self.choices |= {(len(facts.buckets) + i, mode): len(pairs) + j for j, (i, mode) in enumerate(moded)}
        self.num_options = len(self.choices)
        """Columns of levels and modes; behind them are those of updates that may be streamed."""
        self.owners = np.array([i for i, _ in self.choices], dtype=np.int64)
        """By column: the bucket, or, from the number of buckets on, the layer, that it is an option of."""
        self._streams = {(i, home): choice for i, home, choice in stream_choices(facts)}
        self.choices |= {choice: self.num_options + j for j, choice in enumerate(self._streams.values())}
        shops = flow_shops(facts, evaluator.prices, Options(self.choices, own_profiles))
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
        host_nbytes = [self.evaluator.host_bytes_of(i, level) for i, level in pairs]
        host_nbytes += [own_profiles[i][mode].host_bytes for i, mode in moded] + [0] * len(self._streams)
        self._host_bytes = host_bytes = np.array(host_nbytes, dtype=np.float64)
        limit_bytes = max(facts.problem.host_budget_bytes, 1)
        hosted = np.flatnonzero(host_bytes)
        self.host_row = Row(hosted, host_bytes[hosted] / limit_bytes * SCALE, SCALE)
        self.rows.append(self.host_row)
        self.rows += [self._stream_row(i, home) for i, home in self._streams]

    def with_trips(self) -> "Program":
        """Return the same program with the copies of activations on its paths on several ranks too.

        They share links with the copies of buckets, so its answers are better; but no collective need wait for them, so
        what it bounds is no bound. Rows of memory are taken over.
        """
        other = copy.copy(self)
        # Exact rows of what leaves have columns of their own, which are not taken over.
        counts = [row for row in self.rows if row.is_memory and row.columns.max(initial=0) < self.num_choices]
        other.rows = [self.host_row, *counts]
        other.rows += [self._stream_row(i, home) for i, home in self._streams]
        other._seen = {key for key in self._seen if key[0] in ("segment", "streamed")}
        other.num_extra = 0
        options = Options(self.choices, self.evaluator.profiles, counts_trips=True)
        shops = flow_shops(self.evaluator.facts, self.evaluator.prices, options)
        other.phases, other.across, other.spanned, other.whole = shops
        return other

    @property
    def num_choices(self) -> int:
        return len(self.choices)

    @property
    def is_large(self) -> bool:
        """Whether there is so much to choose that a solve for a whole x, or as many plays as in a small program, take
        longer than they are worth: GPT-2 20B takes 2 s for a solve, seven of which raise the bound by 0.04 %."""
        return self.num_choices > _MANY_CHOICES

    @property
    def has_streams(self) -> bool:
        """Whether an answer says less than x does: updates may be streamed."""
        return bool(self._streams)

    def _stream_row(self, i: int, home: Tier) -> Row:
        """What is streamed of bucket i is at a level with its state on the host and its parameters at `home`."""
        own = [self.choices[i, level] for level in self._levels_at(i, home)]
        columns = np.array([self.choices[self._streams[i, home]], *own], dtype=np.int64)
        return Row(columns, np.array([1.0, *[-1.0] * len(own)]), 0.0)

    def _levels_at(self, i: int, home: Tier) -> list[Level]:
        return [level for level in self.evaluator.facts.choices[i] if level.has_state_on_host and level.home is home]

    def vector(self, candidate: Candidate, streamed: Collection[int] = ()) -> Vector:
        """Return x for a whole answer that streams the updates of these buckets."""
        x = np.zeros(self.num_choices)
        x[self._columns(candidate)] = 1.0
        for (i, home), choice in self._streams.items():
            if i in streamed and candidate.levels[i] in self._levels_at(i, home):
                x[self.choices[choice]] = 1.0
        return x

    def candidate(self, x: Vector) -> Candidate:
        """Return the answer that a whole x is."""
        return self._answer(lambda i, own: max(own, key=lambda option: (x[self.choices[i, option]], -option)))

    def _answer(self, choose: Callable[[int, Sequence[int]], int]) -> Candidate:
        """Return the answer with what `choose` says for each bucket or layer and its options."""
        facts = self.evaluator.facts
        levels = tuple(Level(choose(i, own)) for i, own in enumerate(facts.choices))
        layers = enumerate(facts.layers, start=len(facts.buckets))
        return Candidate(levels, tuple(choose(i, range(len(layer.modes))) for i, layer in layers))

    def _columns(self, candidate: Candidate) -> list[int]:
        options = (*candidate.levels, *candidate.modes)
        return [self.choices[i, option] for i, option in enumerate(options)]

    def peak_bytes(self, x: Vector) -> int:
        """Return the bytes of the fullest segment at x, transfers at their use."""
        return int(self.live_bytes(x).max())

    def live_bytes(self, x: Vector) -> Vector:
        """Return the bytes of every segment at x, most of which is 0."""
        chosen = np.flatnonzero(x)
        return self.rest_bytes + self.bytes_of[:, chosen] @ x[chosen]

    def host_bytes(self, x: Vector) -> int:
        """Return the bytes on the host at x."""
        return int(self._host_bytes @ x)

    def streamed(self, x: Vector, candidate: Candidate) -> frozenset[int]:
        """Return the buckets whose update a whole x streams, at the levels of `answer`."""
        return frozenset(
            i
            for (i, home), choice in self._streams.items()
            if x[self.choices[choice]] > 0.5 and candidate.levels[i] in self._levels_at(i, home)
        )

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
        unit = SCALE / self.reference_s
        columns = np.flatnonzero(path.coefficients_s)
        values = path.coefficients_s[columns] * unit
        columns = np.append(columns, [self.num_choices + number for number in numbers])
        self.rows.append(Row(columns, np.append(values, [-1.0] * len(numbers)), -path.constant_s * unit))
        return True

    def add_memory(self, x: Vector, more_bytes: int = 0) -> bool:
        """Add the rows of the fullest segments at x that are over the budget and `more_bytes`; say whether any was."""
        budget_bytes = self.evaluator.facts.problem.budget_bytes + more_bytes
        live_bytes = self.live_bytes(x)
        # The fullest of each stretch: those next to one another are nearly the same.
        stretches = np.array_split(np.arange(len(live_bytes)), min(_NUM_STRETCHES, len(live_bytes)))
        fullest = [int(own[live_bytes[own].argmax()]) for own in stretches]
        over = [segment for segment in fullest if live_bytes[segment] > budget_bytes * (1 + TOLERANCE)]
        has_new = sum([self._add_segment(segment) for segment in over]) > 0
        in_update = self.memory.segment_of(self.evaluator.facts.num_run)
        for (i, home), choice in self._streams.items() if in_update < len(live_bytes) else ():
            column, nbytes = self.choices[choice], self.evaluator.memory.streamed_bytes(i, home)
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
        budget_bytes = max(self.evaluator.facts.problem.budget_bytes, 1)
        limit = (budget_bytes - self.rest_bytes[segment]) / budget_bytes * SCALE
        self.rows.append(Row(columns, nbytes / budget_bytes * SCALE, limit, is_memory=True))

    def add_leaving(self, candidate: Candidate) -> bool:
        """Add exact rows for the segments that `answer` breaks in truth; return whether any is new.

        A gradient that leaves is on the device until the next bucket whose gradients leave completes them: bucket i's
        is there in segment s when i leaves and nothing between i and s does. A column z >= leaves[i] - sum of leaves
        in between says so.
        """
        evaluator = self.evaluator
        levels = candidate.levels
        kept = self.vector(Candidate(levels, evaluator.facts.modes))
        exact_bytes = self.memory.live_bytes(levels, evaluator.at_use(levels)) - self.bytes_of @ kept
        live_bytes = exact_bytes - self.rest_bytes + self.live_bytes(self.vector(candidate))
        over = np.flatnonzero(live_bytes > evaluator.facts.problem.budget_bytes)
        added = False
        for segment in over[np.argsort(-live_bytes[over], kind="stable")][:4]:
            if ("leaving", int(segment)) not in self._seen:
                self._seen.add(("leaving", int(segment)))
                self._add_exact_segment(int(segment))
                added = True
        return added

    def _add_exact_segment(self, segment: int) -> None:
        facts = self.evaluator.facts
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
                Row(
                    np.concatenate([own, between, [z]]).astype(np.int64),
                    np.concatenate([np.ones(len(own)), -np.ones(len(between)), [-1.0]]),
                    0.0,
                )
            )
        self._append_memory(segment, np.concatenate(columns), np.concatenate(nbytes))

    def _leaving_columns(self, i: int) -> list[int]:
        facts = self.evaluator.facts
        return [self.choices[i, level] for level in facts.choices[i] if is_gathered(facts.buckets[i], level)]

    def limits(self, more_bytes: int = 0) -> Vector:
        """Return the limits of all rows, with `more_bytes` of device memory on top of the budget."""
        budget_bytes = max(self.evaluator.facts.problem.budget_bytes, 1)
        return np.array([row.limit + more_bytes / budget_bytes * SCALE * row.is_memory for row in self.rows])

    def is_short(self, x: Vector, bound: float) -> bool:
        """Return whether a scaled objective at x is below what its longest paths add up to."""
        return self.lower_s(x) * SCALE / self.reference_s > bound * (1 + TOLERANCE)

    def seconds(self, bound: float) -> float:
        """Return a scaled objective in seconds, rounded down by more than the solver's tolerances."""
        return bound * self.reference_s / SCALE * (1 - 1e-6)

    def forbid(self, candidate: Candidate) -> None:
        """Add a row that no solution at exactly `answer` satisfies."""
        columns = np.array(self._columns(candidate), dtype=np.int64)
        self.rows.append(Row(columns, np.ones(len(columns)), len(columns) - 1.0))
