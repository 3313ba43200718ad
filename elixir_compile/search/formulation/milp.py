"""A problem as a mixed-integer program: columns x[bucket, level] and x[layer, mode], and constraints for memory and
seconds.

The objective is the sum of T, the seconds of each phase. Constraints are added during the search: `solver` adds
the memory constraints and paths that a solution breaks, then solve again. Times and bytes are scaled, so that the best
known step and both budgets equal `SCALE`, because the solver's tolerances are absolute.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from elixir_compile.ir import Tier
from elixir_compile.search.evaluator import Candidate, Evaluator
from elixir_compile.search.formulation.cross_step_updates import RunTables, Shops, flow_shops, stream_choices
from elixir_compile.search.formulation.flow_shop import Choice, Gate, Path, Shop
from elixir_compile.search.space.buckets import Level, is_gathered, meets
from elixir_compile.search.space.memory import MemoryModel

SCALE = 1000.0
TOLERANCE = 1e-7
"""A constraint counts as satisfied if it is exceeded by less than this share of the step or the budget."""
_NUM_STRETCHES = 32
_MANY_CHOICES = 600
_WHOLE = 1e-3
"""A y counts as whole if it is this near to 0 or 1, or if whole y make the step longer by no more than this share."""
_AT_ONCE = 256
"""So many x are looked at together: their work on every lane and event takes a few MB."""
Vector = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(slots=True)
class Constraint:
    """A constraint `values @ (x, T, y, z)[columns] <= limit`, in scaled units; sparse, because later constraints add
    columns z."""

    columns: Indices
    values: Vector
    limit: float
    is_memory: bool = False


class Milp:
    """The mixed-integer program of a problem, with the constraints added so far.

    It has more than 20 methods and 15 attributes, because what an x means (its candidate, bytes and seconds) and the
    constraints that an x breaks are read from the same columns; apart, each half would need most attributes of the
    other.

    `reference_s`, the seconds of the best known step, is the unit of time.
    """

    def __init__(self, evaluator: Evaluator, reference_s: float) -> None:
        self.evaluator = evaluator
        self.reference_s = reference_s
        self._constraints: list[Constraint] = []
        self._decided: list[Constraint] = []
        """Constraints of a part of a divided MILP, see `divided`."""
        facts = evaluator.facts
        profiles = evaluator.profiles
        pairs = [(i, level) for i, levels in enumerate(facts.choices) for level in levels]
        layer_modes = [(number, mode) for number, layer in enumerate(profiles) for mode in range(len(layer))]
        self.choices: dict[Choice, int] = {pair: column for column, pair in enumerate(pairs)}
        self.choices |= {(len(facts.buckets) + i, mode): len(pairs) + j for j, (i, mode) in enumerate(layer_modes)}
        self.num_options = len(self.choices)
        """Number of columns of levels and modes. Columns of updates that may be streamed come behind them."""
        self.owners = np.array([i for i, _ in self.choices], dtype=np.int64)
        """By column of a level or mode: the index of its bucket, or the number of buckets + the index of its layer."""
        self.streams = {(i, home): choice for i, home, choice in stream_choices(facts)}
        """By bucket and home of its parameters: the choice to stream its update."""
        self.choices |= {choice: self.num_options + j for j, choice in enumerate(self.streams.values())}
        self._runs = RunTables(facts, evaluator.prices, self.choices, profiles)
        self.phases, self.across, self.spanned, self.whole_step, self.gates = flow_shops(self._runs)
        self._num_counts = sum(len(gate.takers) for gate in self.gates)
        """Number of columns y of gates, which come behind x and T: whether some work of a shop counts."""
        self.num_extra = self._num_counts
        """Number of columns behind x and T: y, and then z. A column z is 1 if the gradients of one bucket are still on
        the device at one segment, because no later bucket's gradients have left; see `add_leaving`."""
        # `rest_bytes` counts all activations as kept, so a mode's column holds its difference from mode 0 (keep all).
        more_bytes = [profiles[i][mode].nbytes - profiles[i][0].nbytes for i, mode in layer_modes]
        changes = np.zeros(len(facts.graph.ops), dtype=np.bool_)
        for row, _ in more_bytes:
            changes[1:] |= row[1:] != row[:-1]
        self.memory = MemoryModel(facts, np.flatnonzero(changes).tolist(), like=evaluator.memory)
        own_bytes = self.memory.own_bytes()
        columns = [own_bytes[i, level] for i, level in pairs] + [self.memory.highest(row) for row in more_bytes]
        # Updates run in turn, so only the largest rooms and work space count. A sum cannot express a maximum: these
        # columns are 0 here, and `add_memory` adds a constraint for each bucket on its own.
        columns += [np.zeros_like(self.memory.rest_bytes)] * len(self.streams)
        self.bytes_of = np.array(columns, dtype=np.float64).T
        self.rest_bytes = self.memory.rest_bytes.astype(np.float64)
        turns = defaultdict[int, Vector](lambda: np.zeros(self.num_choices))
        for i, level in pairs:
            if self.memory.work_bytes[i] and not level.has_state_on_host:
                turns[i][self.choices[i, level]] = self.memory.work_bytes[i]
        for (i, home), choice in self.streams.items():
            turns[i][self.choices[choice]] = self.memory.streamed_bytes(i, home)
        self._turns = dict(turns)
        """By bucket, by column: the device bytes that its update adds while it runs, rooms and work space."""
        self._slower = 1.0
        """The seconds of all lanes but compute, over those of the prices."""
        self._seen: set[tuple[object, ...]] = set()
        host_nbytes = [self.evaluator.host_bytes_of(i, level) for i, level in pairs]
        host_nbytes += [profiles[i][mode].host_bytes for i, mode in layer_modes] + [0] * len(self.streams)
        self._host_bytes = host_bytes = np.array(host_nbytes, dtype=np.float64)
        limit_bytes = max(facts.problem.host_budget_bytes, 1)
        hosted = np.flatnonzero(host_bytes)
        self.host_constraint = Constraint(hosted, host_bytes[hosted] / limit_bytes * SCALE, SCALE)
        self._constraints += [self.host_constraint, *self._constraints_of_choices()]

    def with_trips(self, slower: float = 1.0) -> "Milp":
        """Return the same MILP with the copies of offloaded activations (trips) on its paths, also on several ranks,
        and with all work but that of compute `slower` times as long.

        Copies of activations share links with the copies of buckets, so this MILP finds better candidates. Its
        optimum proves no bound, because a collective need not wait for a copy of activations. Memory constraints are
        reused.
        """
        other = copy.copy(self)
        # The constraints of `add_leaving` use columns z. The new MILP starts without columns z, so it starts without
        # them.
        reused = [own for own in self.constraints if own.is_memory and own.columns.max(initial=0) < self.num_choices]
        shops = flow_shops(self._runs, counts_trips=True)
        other.gates = shops.gates
        other._constraints = [self.host_constraint, *other._constraints_of_choices(), *reused]
        other._seen = {key for key in self._seen if key[0] in ("segment", "in turn")}
        other.num_extra = self._num_counts
        other._take_shops(shops, lambda shop: shop.slower(slower))
        other._slower = slower
        return other

    def _take_shops(self, shops: Shops, changed: Callable[[Shop], Shop]) -> None:
        """Take `shops`, each `changed`."""
        self.phases = [[changed(shop) for shop in phase] for phase in shops.phases]
        self.across = [changed(shop) for shop in shops.across]
        self.whole_step = [changed(shop) for shop in shops.whole_step]

    def undecided(self, x: Vector) -> tuple[int, int] | None:
        """Return the number of the gate whose y are too far from whole at x, and how many of them are 1 on average.

        None if x takes hardly longer with whole y, those of all takers of which x has a share.
        """
        counts = [gate.counts(x) for gate in self.gates]
        most_s, found = self.lower_s(x) * (1 + _WHOLE), None
        for number, (gate, y) in enumerate(zip(self.gates, counts, strict=True)):
            between = np.flatnonzero((y > _WHOLE) & (y < 1 - _WHOLE))
            whole_s = self._with_gate(number, replace(gate, least=int((y > _WHOLE).sum()))).lower_s(x)
            if len(between) and whole_s > most_s:
                most_s, found = whole_s, (number, int(np.clip(np.floor(y.sum()), between[0], between[-1])))
        return found

    def divided(self, number: int, at: int) -> tuple["Milp", "Milp"]:
        """Return this MILP for the x at which at most `at` of the y of gate `number` are 1, and for all other x.

        They share their other constraints with this MILP, those added later too. The work behind a gate counts whole in
        the one up to the first taker that may be the last chosen; in the other, later takers are closed.
        """
        column = np.array([self.num_choices + len(self.phases) + self.gates[number].first + at])
        fewer = self._with_gate(number, replace(self.gates[number], most=at))
        more = self._with_gate(number, replace(self.gates[number], least=at + 1))
        for part, sign in ((fewer, 1.0), (more, -1.0)):
            part._decided = [*self._decided, Constraint(column, np.array([sign]), min(sign, 0.0))]
        return fewer, more

    def _with_gate(self, number: int, gate: Gate) -> "Milp":
        other = copy.copy(self)
        other.gates = [*self.gates[:number], gate, *self.gates[number + 1 :]]
        shops = Shops(self.phases, self.across, self.spanned, self.whole_step)
        other._take_shops(shops, lambda shop: shop.with_gates(other.gates))
        return other

    @property
    def closed(self) -> frozenset[int]:
        """The columns of takers that are not chosen in this part of a divided MILP: of levels, unless they stream their
        update, of modes, and of streams."""
        gates = [gate for gate in self.gates if gate.most is not None]
        takers = [taker for gate in gates for number, taker in gate.all_takers() if number >= (gate.most or 0)]
        return frozenset(column for taker in takers for column in taker)

    @property
    def constraints(self) -> list[Constraint]:
        """The constraints so far."""
        return [*self._constraints, *self._decided]

    @property
    def num_choices(self) -> int:
        return len(self.choices)

    @property
    def is_large(self) -> bool:
        """Whether the MILP has too many columns for integral solves and for as many simulations as a small one gets.

        GPT-2 20B takes 2 s for an integral solve, and seven solves raise its bound by 0.04 %.
        """
        return self.num_choices > _MANY_CHOICES

    @property
    def has_streams(self) -> bool:
        """Whether any update may be streamed. If so, x has more than a candidate, which says nothing of streams."""
        return bool(self.streams)

    def _constraints_of_choices(self) -> Iterator[Constraint]:
        """Yield the constraints for what may be chosen together: streams, quotas and gates."""
        facts = self.evaluator.facts
        # A bucket streams only if its level has its state on the host and its parameters at the home of the stream.
        for (i, home), choice in self.streams.items():
            levels = [self.choices[i, level] for level in self.levels_at(i, home)]
            columns = np.array([self.choices[choice], *levels], dtype=np.int64)
            yield Constraint(columns, np.array([1.0, *[-1.0] * len(levels)]), 0.0)
        # The elements of buckets that meet the option of a quota are within its limits.
        pairs = [(i, level) for i, levels in enumerate(facts.choices) for level in levels]
        for quota in facts.quotas:
            counted = [(i, level) for i, level in pairs if quota.numels[i] and meets(quota.option, level)]
            columns = np.array([self.choices[pair] for pair in counted], dtype=np.int64)
            shares = np.array([quota.numels[i] for i, _ in counted], dtype=np.float64) / max(quota.most, 1) * SCALE
            yield Constraint(columns, shares, SCALE)
            yield Constraint(columns, -shares, -quota.least / max(quota.most, 1) * SCALE)
        # y of each taker of a gate is at least the share of the taker, and y of the next one.
        for gate in self.gates:
            behind = self.num_choices + len(self.phases) + gate.first
            for i, taker in gate.all_takers():
                yield Constraint(np.array([*taker, behind + i], dtype=np.int64), np.array([*taker.values(), -1.0]), 0.0)
            for y in range(behind + 1, behind + len(gate.takers)):
                yield Constraint(np.array([y, y - 1], dtype=np.int64), np.array([1.0, -1.0]), 0.0)

    def levels_at(self, i: int, home: Tier) -> list[Level]:
        """Return the levels of bucket i with parameters at `home` at which its update may be streamed."""
        return [level for level in self.evaluator.facts.choices[i] if level.has_state_on_host and level.home is home]

    def vector(self, candidate: Candidate, streamed: Collection[int] = ()) -> Vector:
        """Return the integral x of `candidate`, with the updates of the buckets `streamed` if their levels allow it."""
        x = np.zeros(self.num_choices)
        x[self._columns(candidate)] = 1.0
        for (i, home), choice in self.streams.items():
            if i in streamed and candidate.levels[i] in self.levels_at(i, home):
                x[self.choices[choice]] = 1.0
        return x

    def candidate(self, x: Vector) -> Candidate:
        """Return the candidate of an integral x: the option of each bucket and layer with the largest entry."""
        facts = self.evaluator.facts

        def largest(i: int, options: Sequence[int]) -> int:
            return max(options, key=lambda option: (x[self.choices[i, option]], -option))

        chosen = [largest(i, options) for i, options in enumerate(facts.options)]
        num_buckets = len(facts.buckets)
        return Candidate(tuple(map(Level, chosen[:num_buckets])), tuple(chosen[num_buckets:]))

    def _columns(self, candidate: Candidate) -> list[int]:
        return [self.choices[i, option] for i, option in enumerate(candidate.options)]

    def peak_bytes(self, x: Vector) -> int:
        """Return the device bytes of the fullest segment at x, with each transfer right before its use."""
        return int(self.live_bytes(x).max())

    def live_bytes(self, x: Vector) -> Vector:
        """Return the device bytes of each segment at x."""
        chosen = np.flatnonzero(x)  # most entries are 0
        return self.rest_bytes + self.bytes_of[:, chosen] @ x[chosen]

    def host_bytes(self, x: Vector) -> int:
        """Return the bytes on the host at x."""
        return int(self._host_bytes @ x)

    def streamed(self, x: Vector, candidate: Candidate) -> frozenset[int]:
        """Return the buckets whose updates an integral x streams and may stream at the levels of `candidate`."""
        return frozenset(
            i
            for (i, home), choice in self.streams.items()
            if x[self.choices[choice]] > 0.5 and candidate.levels[i] in self.levels_at(i, home)
        )

    def lower_s(self, x: Vector) -> float:
        """Return a lower limit on the seconds of a step at x, from the longest paths of all flow shops.

        The longest paths of the phases are added up. A flow shop through several phases, or through the whole step,
        raises the sum if its own longest path takes longer.
        """
        return float(self.lower_each_s([x])[0])

    def lower_each_s(self, xs: Sequence[Vector]) -> Vector:
        """Return `lower_s` of each of `xs`. Hundreds of them take the time of ten."""

        def longest_s(shops: Sequence[Shop], part: Vector) -> Vector:
            return np.max([np.zeros(part.shape[1]), *(shop.longest_each_s(part) for shop in shops)], axis=0)

        found = [np.zeros(0)]
        for at in range(0, len(xs), _AT_ONCE):
            part = np.array(xs[at : at + _AT_ONCE]).T
            nothing = np.zeros(part.shape[1])
            phases_s = [longest_s(shops, part) for shops in self.phases]
            spanned_s = sum((phases_s[number] for number in self.spanned), nothing)
            across_s = np.maximum(0.0, longest_s(self.across, part) - spanned_s)
            found.append(np.maximum(sum(phases_s, nothing) + across_s, longest_s(self.whole_step, part)))
        return np.concatenate(found)

    # Constraints.

    def add_paths(self, x: Vector) -> bool:
        """Add a constraint for the longest path of each flow shop at x; return whether any constraint is new."""
        added = False
        for number, shops in enumerate(self.phases):
            for shop in shops:
                added |= self._add_path((number,), shop.longest(x))
        for shop in self.across:
            added |= self._add_path(self.spanned, shop.longest(x))
        for shop in self.whole_step:
            added |= self._add_path(tuple(range(len(self.phases))), shop.longest(x))
        return added

    def _add_path(self, numbers: tuple[int, ...], path: Path) -> bool:
        """Add the constraint: T of the phases with these `numbers` add up to at least the seconds of `path`."""
        key = ("path", numbers, path.constant_s, path.coefficients_s.tobytes())
        if key in self._seen:
            return False
        self._seen.add(key)
        unit = SCALE / self.reference_s
        columns = np.flatnonzero(path.coefficients_s)
        values = path.coefficients_s[columns] * unit
        columns[columns >= self.num_choices] += len(self.phases)  # columns y
        columns = np.append(columns, [self.num_choices + number for number in numbers])
        self._constraints.append(Constraint(columns, np.append(values, [-1.0] * len(numbers)), -path.constant_s * unit))
        return True

    def add_memory(self, x: Vector, more_bytes: int = 0) -> bool:
        """Add memory constraints for the fullest segments that x breaks; return whether any constraint is new.

        `more_bytes` is added to the budget.
        """
        budget_bytes = self.evaluator.facts.problem.budget_bytes + more_bytes
        live_bytes = self.live_bytes(x)
        # Only the fullest segment of each stretch gets a constraint, because neighbouring segments have nearly equal
        # constraints.
        stretches = np.array_split(np.arange(len(live_bytes)), min(_NUM_STRETCHES, len(live_bytes)))
        fullest = [int(segments[live_bytes[segments].argmax()]) for segments in stretches]
        over = [segment for segment in fullest if live_bytes[segment] > budget_bytes * (1 + TOLERANCE)]
        new = [segment for segment in over if ("segment", segment) not in self._seen]
        for segment in new:
            self._seen.add(("segment", segment))
            columns = np.flatnonzero(self.bytes_of[segment])
            self._append_memory(segment, columns, self.bytes_of[segment][columns])
        has_new = bool(new)
        # A streamed update fits beside all buckets and activations, and so does the work space of one on the device.
        # Others pass through the device at other times.
        in_update = self.memory.segment_of(self.evaluator.facts.num_run)
        for i, turn in self._turns.items() if in_update < len(live_bytes) else ():
            is_over = live_bytes[in_update] + turn @ x > budget_bytes * (1 + TOLERANCE)
            if is_over and ("in turn", i) not in self._seen:
                self._seen.add(("in turn", i))
                own = self.bytes_of[in_update] + turn
                columns = np.flatnonzero(own)
                self._append_memory(in_update, columns, own[columns])
                has_new = True
        return has_new

    def _append_memory(self, segment: int, columns: Indices, nbytes: Vector) -> None:
        budget_bytes = max(self.evaluator.facts.problem.budget_bytes, 1)
        limit = (budget_bytes - self.rest_bytes[segment]) / budget_bytes * SCALE
        self._constraints.append(Constraint(columns, nbytes / budget_bytes * SCALE, limit, is_memory=True))

    def add_leaving(self, candidate: Candidate) -> bool:
        """Add exact constraints for at most four segments that `candidate` overfills; return whether any constraint is
        new.

        A bucket's gradients leave the device only when the gradients of the next leaving bucket are complete. So the
        gradients of bucket i are live in segment s if bucket i leaves and no bucket completed between i and s leaves.
        A column `z >= leaves[i] - sum of leaves in between` expresses it.
        """
        evaluator, facts, memory = self.evaluator, self.evaluator.facts, self.memory
        levels = candidate.levels
        kept = self.vector(Candidate(levels, facts.modes))
        exact_bytes = memory.live_bytes(levels, evaluator.at_use(levels)) - self.bytes_of @ kept
        live_bytes = exact_bytes - self.rest_bytes + self.live_bytes(self.vector(candidate))
        over = np.flatnonzero(live_bytes > facts.problem.budget_bytes)
        fullest = [int(segment) for segment in over[np.argsort(-live_bytes[over], kind="stable")][:4]]
        new = [segment for segment in fullest if ("leaving", segment) not in self._seen]
        for segment in new:
            self._seen.add(("leaving", segment))
            # All leaving gradients have left when the backward ends.
            is_update = segment >= memory.segment_of(facts.num_run)
            before = [] if is_update else memory.completed_before(segment)
            columns, nbytes = [np.flatnonzero(self.bytes_of[segment])], [self.bytes_of[segment]]
            nbytes[0] = nbytes[0][columns[0]]
            # `bytes_of` already counts the last bucket completed before the segment: no bucket comes in between.
            for place, i in enumerate(before[:-1]):
                z = self.num_choices + len(self.phases) + self.num_extra
                self.num_extra += 1
                columns.append(np.array([z]))
                # The fewest of all levels: a constraint with more would exclude levels that fit.
                leaving = self._leaving(i)
                nbytes.append(np.array([float(min((memory.late_bytes(i, level) for level in leaving), default=0))]))
                own = [self.choices[i, level] for level in leaving]
                between = [self.choices[j, level] for j in before[place + 1 :] for level in self._leaving(j)]
                values = np.concatenate([np.ones(len(own)), -np.ones(len(between)), [-1.0]])
                self._constraints.append(Constraint(np.array([*own, *between, z], dtype=np.int64), values, 0.0))
            self._append_memory(segment, np.concatenate(columns), np.concatenate(nbytes))
        return bool(new)

    def _leaving(self, i: int) -> list[Level]:
        """Return the levels of bucket i at which its gradients leave the device."""
        facts = self.evaluator.facts
        return [level for level in facts.choices[i] if is_gathered(facts.buckets[i], level)]

    def limits(self, more_bytes: int = 0) -> Vector:
        """Return the limit of each constraint, with `more_bytes` added to the device budget."""
        budget_bytes = max(self.evaluator.facts.problem.budget_bytes, 1)
        return np.array([own.limit + more_bytes / budget_bytes * SCALE * own.is_memory for own in self.constraints])

    def is_short(self, x: Vector, bound: float) -> bool:
        """Return whether the scaled objective `bound` is below `lower_s` at x: constraints for paths are missing."""
        return self.lower_s(x) * SCALE / self.reference_s > bound * (1 + TOLERANCE)

    def seconds(self, bound: float) -> float:
        """Return the scaled objective `bound` in seconds, rounded down by more than the solver's tolerances.

        No path is longer than at the prices by more than the factor `_slower`.
        """
        return bound * self.reference_s / SCALE * (1 - 1e-6) / self._slower

    def forbid(self, candidate: Candidate) -> None:
        """Add a constraint that excludes `candidate`, whatever it streams, and no other candidate."""
        columns = np.array(self._columns(candidate), dtype=np.int64)
        self._constraints.append(Constraint(columns, np.ones(len(columns)), len(columns) - 1.0))
