"""Candidates from counts: how many of the buckets, or layers, of a class take each option.

A model of equal layers has as many equal columns in its MILP as it has layers. Here the members of a class, buckets
or layers with equal options, share the columns: a column is the number of members that take an option.

    class                        columns                                  a candidate
    32 buckets of 218 MiB        device 12, host 20                       host, device, host, host, device, ...
    32 layers, 6 modes each      keep 5, recompute the MLP 0, all 27      all, all, all, all, all, keep, all, ...

A count has the mean of its members' coefficients in each row. So 100 columns replace the 1,900 of Llama 13B, and HiGHS
finds the relaxed optimum in 10 ms. Its counts are not whole; the options of a class are spread over its members all the
same, as evenly as whole options can be, so that each stretch of the step has about the mean of every row. The candidate
may exceed the budget by less than a bucket, because the members of a class are live at different times; the optimum is
then found again with less memory. Whole counts gain nothing, because candidates are judged by simulation, and take 1 to
2 s: under them a Llama of 1.1 B parameters in half of its bytes on an H200 had one candidate that fits after 8 s.

Llama 7B at batch 16 on 4 RTX 4090s came to a gap of 0.2 % with its first candidate, after 1.2 s; candidates rounded
from the relaxed optimum over all columns came to 2.0 % after 8.5 s.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from elixir_compile.ir import Tier
from elixir_compile.search.clock import Deadline
from elixir_compile.search.evaluator import Candidate
from elixir_compile.search.formulation.milp import Milp, Vector
from elixir_compile.search.formulation.quiet import without_notes
from elixir_compile.search.formulation.solver import matrix_of, num_columns_of
from elixir_compile.search.space.levels import Level

_MAX_ROUNDS = 12
"""Solves of an optimum, each with the rows broken by the optimum before it."""
_MAX_REPAIRS = 3
"""How often less memory is tried for a candidate over the budget: the 2nd or the 3rd time it fits, if at all."""


class Spread(NamedTuple):
    """An optimum over counts, spread over the members of each class."""

    x: Vector
    """The columns of the MILP: each member of a class has the same share of each option."""
    candidate: Candidate
    streamed: frozenset[int]
    """Buckets whose updates are streamed."""


class _Count(NamedTuple):
    """A column: the number of members of a class that take an option, or whose update is streamed from a home."""

    number: int
    """Of the class."""
    choice: int | Tier
    columns: tuple[int, ...]
    """The column of each such member in the MILP."""


class CountedMilp:
    """A MILP with a column for each class of buckets or layers and each of their options."""

    def __init__(self, milp: Milp) -> None:
        self._milp = milp
        self.classes = _classes(milp)
        """Indices of buckets, and of layers behind the number of buckets, with equal options."""
        self._options = [
            _Count(number, option, tuple(milp.choices[i, option] for i in members))
            for number, members in enumerate(self.classes)
            for option in _options(milp, members[0])
        ]
        homes = dict.fromkeys(home for _, home in milp.streams)
        streams = [
            _Count(number, home, tuple(milp.choices[milp.streams[i, home]] for i in members))
            for number, class_members in enumerate(self.classes)
            for home in homes
            if (members := [i for i in class_members if (i, home) in milp.streams])
        ]
        self._counts = [*self._options, *streams]
        self._mean = _mean_matrix([count.columns for count in self._counts], milp.num_choices)
        """The MILP's columns as means of counts."""

    def optima(self, deadline: Deadline, more_bytes: int) -> Iterator[Spread]:
        """Yield the optimum with `more_bytes` added to the device budget, then, as long as its candidate exceeds the
        budget, the optimum with less memory. The MILP gets the rows broken by each."""
        milp = self._milp
        budget_bytes = milp.evaluator.facts.problem.budget_bytes
        for _ in range(_MAX_REPAIRS):
            spread = self._optimum(deadline, more_bytes)
            if spread is None:
                return
            yield spread
            evaluator = milp.evaluator.at(spread.candidate.modes)
            over_bytes = evaluator.memory.peak_bytes(spread.candidate.levels, ahead=0) - budget_bytes
            if over_bytes <= 0:
                return
            more_bytes -= over_bytes

    def _optimum(self, deadline: Deadline, more_bytes: int) -> Spread | None:
        """Return the relaxed optimum, under rows that are added until it breaks none or `_MAX_ROUNDS` are over."""
        milp = self._milp
        found: Vector | None = None
        for _ in range(_MAX_ROUNDS):
            if deadline.is_over:
                break
            solved = self._solved(deadline, more_bytes)
            if solved is None:
                return None
            found = solved
            x = self._mean @ found
            has_new = milp.add_memory(x, more_bytes)
            has_new |= milp.add_paths(x)
            if not has_new:
                break
        return None if found is None else self._spread(found)

    @without_notes()
    def _solved(self, deadline: Deadline, more_bytes: int) -> Vector | None:
        """Return the counts, not all of them whole, with the shortest step by the MILP's rows so far; None if none
        fits."""
        milp, num_counts = self._milp, len(self._counts)
        matrix = matrix_of(milp).tocsc()
        rows = sparse.hstack([matrix[:, : milp.num_choices] @ self._mean, matrix[:, milp.num_choices :]])
        columns = np.arange(num_counts + num_columns_of(milp) - milp.num_choices)
        is_time = (columns >= num_counts) & (columns < num_counts + len(milp.phases))
        upper = np.full(len(columns), np.inf)
        upper[:num_counts] = [len(count.columns) for count in self._counts]
        owners = ([count.number for count in self._options], columns[: len(self._options)])
        members = sparse.coo_array((np.ones(len(self._options)), owners), shape=(len(self.classes), len(columns)))
        sizes = np.array([len(members) for members in self.classes], dtype=np.float64)
        result = linprog(
            is_time.astype(np.float64),
            A_ub=rows.tocsc(),
            b_ub=milp.limits(more_bytes),
            A_eq=members.tocsc(),
            b_eq=sizes,
            bounds=np.stack([np.zeros(len(upper)), upper], axis=1),
            method="highs",
            options={"time_limit": max(deadline.wall_s, 0.01)},
        )
        return None if result.x is None else np.asarray(result.x[:num_counts])

    def _spread(self, counts: Vector) -> Spread:
        milp, chosen = self._milp, dict[int, int]()
        for number, members in enumerate(self.classes):
            wanted = {
                int(count.choice): amount
                for count, amount in zip(self._options, counts, strict=False)
                if count.number == number
            }
            chosen |= dict(zip(members, evenly(wanted, len(members)), strict=True))
        owners = range(len(chosen))
        num_buckets = len(milp.evaluator.facts.buckets)
        levels = tuple(Level(chosen[i]) for i in owners[:num_buckets])
        candidate = Candidate(levels, tuple(chosen[i] for i in owners[num_buckets:]))
        streamed: set[int] = set()
        for (number, home, _), amount in zip(
            self._counts[len(self._options) :], counts[len(self._options) :], strict=True
        ):
            members = [i for i in self.classes[number] if (i, home) in milp.streams]
            at_home = [i for i in members if levels[i] in milp.levels_at(i, Tier(home))]
            streamed.update(at_home[: round(amount)])
        return Spread(self._mean @ counts, candidate, frozenset(streamed))


def _options(milp: Milp, owner: int) -> Sequence[int]:
    """Return the levels of a bucket, or, if `owner` is at least the number of buckets, the modes of a layer."""
    facts = milp.evaluator.facts
    if owner < len(facts.buckets):
        return facts.choices[owner]
    return range(len(facts.layers[owner - len(facts.buckets)].modes))


def _classes(milp: Milp) -> list[list[int]]:
    """Return the classes: indices of buckets, and of layers behind the number of buckets, with equal options."""
    evaluator = milp.evaluator
    facts, classes = evaluator.facts, dict[Hashable, list[int]]()
    for i, bucket in enumerate(facts.buckets):
        key = (facts.choices[i], bucket.flat_nbytes, bucket.state_nbytes, bucket.trainable, len(facts.windows[i]))
        classes.setdefault(key, []).append(i)
    for i, (layer, profiles) in enumerate(zip(facts.layers, evaluator.profiles, strict=True)):
        depths = tuple((mode.depth, len(mode.away)) for mode in layer.modes)
        trips = tuple(trip.nbytes for profile in profiles for trip in profile.trips)
        classes.setdefault((depths, trips), []).append(len(facts.buckets) + i)
    return list(classes.values())


def _mean_matrix(columns: Sequence[Sequence[int]], num_choices: int) -> sparse.csr_array:
    """Return the matrix choices x counts with 1 / n for each of the n `columns` of a count."""
    values = np.concatenate([np.full(len(own), 1.0 / len(own)) for own in columns])
    counts = np.repeat(np.arange(len(columns)), [len(own) for own in columns])
    return sparse.csr_array((values, (np.concatenate(columns), counts)), shape=(num_choices, len(columns)))


def evenly(wanted: Mapping[int, float], num_members: int) -> Iterator[int]:
    """Yield an option for each member, so that the first n members have n / num_members of each count, rounded."""
    done = dict.fromkeys(wanted, 0)
    for number in range(1, num_members + 1):
        option = max(wanted, key=lambda option: wanted[option] * number / num_members - done[option])
        done[option] += 1
        yield option
