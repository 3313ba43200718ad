"""Solve a mixed-integer program by HiGHS: its integral solutions, its relaxed optimum, and candidates from counts of
equal buckets or layers.
"""

import ctypes
import functools
import heapq
import os
import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, linprog
from scipy.optimize import milp as solve_milp

from elixir_compile.ir import Tier
from elixir_compile.search.evaluator import Candidate, Deadline
from elixir_compile.search.formulation.milp import SCALE, Milp, Vector
from elixir_compile.search.space.buckets import Level

# ----------------------------------------------------------------------------------------------------------------------
# Drop what HiGHS prints from C while it solves, and nothing that Python prints.
#
# HiGHS prints lines such as `HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();` though its
# output is switched off, in the middle of the output of a training script. `stdout` of C is a variable, which a program
# may set (glibc manual, 12.2 Standard Streams). During a solve it is a stream to nowhere. Python writes to file
# descriptor 1 and does not use it, so what other threads print by Python appears as always; what they print by `printf`
# is dropped too.


class _Streams(NamedTuple):
    """The variable `stdout` of C, and a stream that drops all that is written to it."""

    stdout: ctypes.c_void_p
    nowhere: int


@functools.cache
def _streams() -> _Streams | None:
    """Return the streams of this process; None if its C library is not glibc: in others the variable is a constant."""
    try:
        is_glibc = "glibc" in (os.confstr("CS_GNU_LIBC_VERSION") or "")
    except (AttributeError, ValueError):
        is_glibc = False
    if not is_glibc:
        return None
    library = ctypes.CDLL(None)
    library.fopen.restype = ctypes.c_void_p
    nowhere = library.fopen(os.devnull.encode(), b"w")
    # Never closed: a thread may be printing to it when a solve ends.
    return None if nowhere is None else _Streams(ctypes.c_void_p.in_dll(library, "stdout"), nowhere)


class _Silence:
    """Sets `stdout` of C while at least one thread solves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_solves = 0
        self._usual: int | None = None

    def begin(self, streams: _Streams) -> None:
        with self._lock:
            if self._num_solves == 0:
                self._usual, streams.stdout.value = streams.stdout.value, streams.nowhere
            self._num_solves += 1

    def end(self, streams: _Streams) -> None:
        with self._lock:
            self._num_solves -= 1
            if self._num_solves == 0:
                streams.stdout.value = self._usual


_silence = _Silence()


@contextmanager
def without_notes() -> Iterator[None]:
    """Drop what C code prints to its `stdout` during the block. Any number of threads may be in such a block."""
    streams = _streams()
    if streams is None:
        yield
        return
    _silence.begin(streams)
    try:
        yield
    finally:
        _silence.end(streams)


# ----------------------------------------------------------------------------------------------------------------------
# Solve a MILP under its constraints so far by HiGHS through scipy: integral solutions, and the relaxed optimum.
#
# The relaxed optimum and its bound come by column and constraint generation.
#
# A master problem has some of the columns. Its multipliers price every column. Columns enter the master if they are
# cheaper than the columns of their bucket or layer there; constraints enter if the optimum breaks them. The rounds end
# if neither columns nor constraints enter.
#
#     minimise  sum of T   over the columns so far          multipliers l >= 0 of the constraints  a x - T <= b
#     price     l a of every column, in the master or not   the cheapest columns enter
#     bound     -l b + sum over phases of min(0, 1 - l of its paths) T_max
#                    + sum over buckets and layers of min over their options of l a
#                    + sum over streams and other columns of min(0, l a)
#
# The bound holds for every integral x, whatever the multipliers are (weak duality: Geoffrion 1974). An unfinished solve
# of the master, or the solver's tolerance, makes the bound lower and never wrong. T_max is the best known step: longer
# steps need no bound.


_MAX_NODES = 20_000
"""Nodes of a branch-and-bound search. Counted nodes, unlike seconds, give equal results on slow and fast machines."""


@dataclass(frozen=True, slots=True)
class Solution:
    """An optimum, integral or relaxed, and what it proves."""

    x: Vector
    bound: float
    """A lower limit on the objective of every integral x, scaled; `Milp.seconds` turns it into seconds."""


@without_notes()
def solve_integral(
    milp: Milp,
    *,
    limit_s: float,
    gap: float,
    more_bytes: int = 0,
    is_open: NDArray[np.bool_] | None = None,
    integral_streams: bool = True,
    max_nodes: int = _MAX_NODES,
) -> Solution | None:
    """Return the best integral x under the MILP's constraints; None if no x fits or the time ends before any is found.

    `gap` is the relative gap between objective and bound at which the solver stops. `more_bytes` is added to the device
    budget. `is_open`, by column, limits the options to choose from; the bound then holds for these options only. If
    `integral_streams` is False, the columns of streamed updates may be fractions, and the bound allows fractions too.
    """
    num_columns = num_columns_of(milp)
    upper = np.full(num_columns, np.inf)
    upper[: milp.num_choices] = 1.0
    if is_open is not None:
        upper[: milp.num_options] = is_open[: milp.num_options]
    objective = np.zeros(num_columns)
    objective[milp.num_choices : milp.num_choices + len(milp.phases)] = 1.0
    is_integral = np.arange(num_columns) < (milp.num_choices if integral_streams else milp.num_options)
    result = solve_milp(
        objective,
        constraints=[
            LinearConstraint(matrix_of(milp), ub=milp.limits(more_bytes)),  # pyright: ignore[reportArgumentType]
            LinearConstraint(option_counts(milp), 1.0, 1.0),  # pyright: ignore[reportArgumentType] (stubs)
        ],
        bounds=Bounds(0.0, upper),  # pyright: ignore[reportArgumentType] (stubs)
        integrality=is_integral.astype(np.int64),
        options={"time_limit": max(limit_s, 0.01), "mip_rel_gap": gap, "node_limit": max_nodes},
    )
    if result.x is None:
        return None
    found = result.mip_dual_bound
    bound = 0.0 if found is None or not np.isfinite(found) else float(found)
    x = np.asarray(result.x[: milp.num_choices])
    x[is_integral[: milp.num_choices]] = np.round(x[is_integral[: milp.num_choices]])
    return Solution(x=x, bound=bound)


def num_columns_of(milp: Milp) -> int:
    """Return the number of columns: x of choices, T of phases, and z of constraints."""
    return milp.num_choices + len(milp.phases) + milp.num_extra


def matrix_of(milp: Milp) -> sparse.csr_array:
    """Return the coefficients of the MILP's constraints as a matrix, constraints x columns."""
    lengths = [len(constraint.columns) for constraint in milp.constraints]
    columns = np.concatenate([constraint.columns for constraint in milp.constraints])
    values = np.concatenate([constraint.values for constraint in milp.constraints])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return sparse.csr_array((values, columns, starts), shape=(len(milp.constraints), num_columns_of(milp)))


def option_counts(milp: Milp) -> sparse.csr_array:
    """Return the matrix that counts the chosen options of each bucket and layer in x; each count must be 1."""
    owners = milp.owners
    shape = (int(owners.max()) + 1, num_columns_of(milp))
    return sparse.csr_array((np.ones(len(owners)), (owners, np.arange(len(owners)))), shape=shape)


def integral_candidates(milp: Milp, deadline: Deadline, gap: float) -> Iterator[tuple[Candidate, float]]:
    """Yield candidates, best first by the MILP's constraints, until none is left or the time is up.

    Each candidate comes with a lower limit in seconds on the step of every candidate not yielded before it. Before it
    is yielded, the MILP gets the constraints broken by it, or, if it breaks none, a constraint to forbid it.
    """
    while not deadline.is_over:
        solution = solve_integral(milp, limit_s=deadline.wall_s, gap=gap)
        if solution is None:
            return
        candidate = milp.candidate(solution.x)
        has_new = milp.add_memory(solution.x)
        has_new |= milp.is_short(solution.x, solution.bound) and milp.add_paths(solution.x)
        has_new |= milp.add_leaving(candidate)
        if not has_new:
            milp.forbid(candidate)
        yield candidate, milp.seconds(solution.bound)


USED = 1e-6
"""An option counts as used if its entry of x is larger."""
_GAP = 2e-4
_MAX_ROUNDINGS, _MAX_ROUNDING_NODES = 8, 10
"""Solves of a rounding, and nodes of each solve; most roundings take fewer. GPT-2 20B on an A100 had its first
candidate within 1 % of the bound from the third solve over all options, with 10 nodes after 4.4 s of solves and with
150 nodes after 7 s."""
_MIN_S = 2.0
"""Seconds that each solve of a rounding may take even if the time is up: a solve cut short rounds badly."""


class Rounded(NamedTuple):
    """A candidate made of an optimum of the MILP."""

    x: Vector
    """The optimum: columns of the MILP. From counts, each member of a class has the same share of each option."""
    candidate: Candidate
    streamed: frozenset[int]
    """Buckets whose updates the optimum streams; empty if streams were not asked to be integral."""


def rounded(
    milp: Milp,
    x: Vector,
    deadline: Deadline,
    *,
    more_bytes: int = 0,
    also: Iterable[Vector] = (),
    integral_streams: bool = False,
    max_rounds: int = _MAX_ROUNDINGS,
) -> Iterator[Rounded]:
    """Yield candidates made of the options used by x and by the optima in `also`; yield none if none fits.

    The MILP gets the constraints that a candidate breaks before the next solve. The last candidate is the best by all
    constraints, unless the deadline ended the search. `more_bytes` is added to the device budget; below 0, it is left
    free. If `integral_streams` is False, streams may be fractions; `transfers.best_draft` then finds a candidate's
    streams.
    """
    used = x > USED
    for other in also:
        used |= other > USED
    for _ in range(max_rounds):
        solution = solve_integral(
            milp,
            limit_s=max(deadline.wall_s, _MIN_S * deadline.clock.times),
            gap=_GAP,
            more_bytes=more_bytes,
            is_open=used,
            integral_streams=integral_streams,
            max_nodes=_MAX_ROUNDING_NODES,
        )
        if solution is None:
            return
        candidate = milp.candidate(solution.x)
        streamed = milp.streamed(solution.x, candidate) if integral_streams else frozenset[int]()
        has_new = milp.add_memory(solution.x, more_bytes)
        has_new |= milp.is_short(solution.x, solution.bound) and milp.add_paths(solution.x)
        has_new |= milp.add_leaving(candidate)
        yield Rounded(solution.x, candidate, streamed)
        if not has_new or deadline.is_over:
            return


_MAX_PRICED = 60
_MAX_NEW = 2
"""Columns of each bucket or layer that enter the master in one round."""
_CHEAPER = 1e-4
"""A column enters the master if it is cheaper by at least this much, in units of `SCALE`."""
_CLOSE = 1e-4
_PATIENCE, _MAX_STALE = 12, 3
"""The rounds end if bound and master agree within the share `_CLOSE`, and either no constraint is new or the bound has
risen by less than this share in each of the last `_PATIENCE` solves, `_MAX_STALE` in a large MILP.
Small MILPs get more solves, because an optimum that mixes more options can be rounded better."""
_MIN_PRICED_S, _WORTH, _MAX_LATE = 2.0, 0.9, 8
"""A solve may take `_MIN_PRICED_S` seconds even if the time is up, and up to `_MAX_LATE` solves follow until the bound
is `_WORTH` of the master. The first masters have too few columns for a useful bound."""
_OVER = 1e3
"""Price, in steps, of exceeding the budget by its own size. With it the master always has an optimum, and the optimum
fits the budget if any mix of its columns does."""


@dataclass(slots=True)
class _Master:
    """The optimum over some of the columns, and the prices of all columns."""

    x: Vector
    value: float
    bound: float
    prices: Vector
    """Price of each choice, scaled."""
    is_over: bool
    """Whether x exceeds a budget."""


def priced(
    milp: Milp, seeds: Iterable[Vector], deadline: Deadline, more_bytes: int = 0, patience: int = _PATIENCE
) -> Solution | None:
    """Return the relaxed optimum, with `more_bytes` added to the device budget (below 0: left free).

    The master starts with the columns of `seeds`; at least one seed should fit the budget. `patience` is the number of
    solves that may raise the bound by next to nothing. Returns None if no optimum within the budget was found.
    """
    columns = np.zeros(milp.num_choices, dtype=np.bool_)
    for seed in seeds:
        columns |= seed > 0.0
    columns[milp.num_options :] = False
    best, last, num_stale, found = -np.inf, -np.inf, 0, None
    patience = min(patience, _MAX_STALE) if milp.is_large else patience
    for number in range(_MAX_PRICED):
        master = _solved(milp, columns, deadline, more_bytes)
        if master is None:
            break
        best = max(best, master.bound)
        found = None if master.is_over else Solution(x=master.x, bound=best)
        new_columns = _cheaper(milp, master.prices, columns)
        has_new = milp.add_memory(master.x, more_bytes)
        has_new |= milp.is_short(master.x, master.value) and milp.add_paths(master.x)
        columns[new_columns] = True
        if not (has_new or len(new_columns)):
            break
        # The first masters also have too few constraints, so their value is below the longest paths of their own x.
        claimed = max(master.value, milp.lower_s(master.x) * SCALE / milp.reference_s)
        is_worthless = best < _WORTH * claimed and number < _MAX_LATE
        if deadline.is_over and not is_worthless:
            break
        num_stale = num_stale + 1 if best < last + _CLOSE * abs(last) else 0
        if best > master.value * (1 - _CLOSE) and (not has_new or num_stale >= patience):
            break
        last = best
    return found


@without_notes()
def _solved(milp: Milp, columns: NDArray[np.bool_], deadline: Deadline, more_bytes: int) -> _Master | None:
    num_choices, num_columns = milp.num_choices, num_columns_of(milp)
    in_master = np.concatenate([np.flatnonzero(columns), np.arange(num_choices, num_columns)])
    num_chosen = int(columns.sum())
    matrix, limits = matrix_of(milp).tocsc(), milp.limits(more_bytes)
    objective = np.zeros(len(in_master) + 1)
    objective[num_chosen : num_chosen + len(milp.phases)] = 1.0
    objective[-1] = _OVER
    over = np.array([-float(own.is_memory or own is milp.host_constraint) for own in milp.constraints])
    upper = np.full(len(in_master) + 1, np.inf)
    upper[:num_chosen] = 1.0
    counts = option_counts(milp).tocsc()[:, in_master]
    result = linprog(
        objective,
        A_ub=sparse.hstack([matrix[:, in_master], over[:, None]], format="csc"),
        b_ub=limits,
        A_eq=sparse.hstack([counts, np.zeros((counts.shape[0], 1))], format="csc"),
        b_eq=np.ones(counts.shape[0]),
        bounds=np.stack([np.zeros(len(upper)), upper], axis=1),
        method="highs",
        options={"time_limit": max(deadline.wall_s, _MIN_PRICED_S * deadline.clock.times)},
    )
    if result.x is None or result.status != 0:
        return None
    multipliers = np.maximum(-np.asarray(result.ineqlin.marginals), 0.0)
    x = np.zeros(num_choices)
    x[columns] = result.x[:num_chosen]
    prices = matrix.T @ multipliers
    bound = bound_of(milp, prices, float(multipliers @ limits))
    return _Master(x, float(result.fun), bound, prices[:num_choices], is_over=float(result.x[-1]) > 1e-6 * SCALE)


def bound_of(milp: Milp, prices: Vector, limits: float) -> float:
    """Return the lower limit on the objective of every integral x, scaled, proved by multipliers of the constraints.

    `prices` are the columns' coefficients times the multipliers, `limits` is the sum of the constraints' limits times
    them.
    """
    num_choices, num_options = milp.num_choices, milp.num_options
    behind = num_choices + len(milp.phases)
    cheapest = np.full(int(milp.owners.max()) + 1, np.inf)
    np.minimum.at(cheapest, milp.owners, prices[:num_options])
    bound = float(cheapest.sum()) - limits
    # `SCALE` is the best known step, so no phase of a shorter step takes longer than `SCALE`.
    bound += float(np.minimum(1.0 + prices[num_choices:behind], 0.0).sum()) * SCALE
    bound += float(np.minimum(prices[num_options:num_choices], 0.0).sum())
    return bound + float(np.minimum(prices[behind:], 0.0).sum())


def _cheaper(milp: Milp, prices: Vector, columns: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return columns outside the master, cheaper than those in it: the cheapest few of each bucket or layer.

    Also returns streams with a negative price.
    """
    owners, num_options = milp.owners, milp.num_options
    inside = np.flatnonzero(columns[:num_options])
    now = np.full(int(owners.max()) + 1, np.inf)
    np.minimum.at(now, owners[inside], prices[inside])
    options = prices[:num_options]
    wanted = np.flatnonzero((options < now[owners] - _CHEAPER) & ~columns[:num_options])
    wanted = wanted[np.lexsort((options[wanted], owners[wanted]))]
    is_first = np.ones(len(wanted), dtype=np.bool_)
    is_first[_MAX_NEW:] = owners[wanted[_MAX_NEW:]] != owners[wanted[:-_MAX_NEW]]
    streams = np.arange(num_options, milp.num_choices)
    streams = streams[(prices[streams] < -_CHEAPER) & ~columns[streams]]
    return np.concatenate([wanted[is_first], streams])


# ----------------------------------------------------------------------------------------------------------------------
# Candidates from counts: how many of the buckets, or layers, of a class take each option.
#
# A model of equal layers has as many equal columns in its MILP as it has layers. Here the members of a class, buckets
# or layers with equal options, share the columns: a column is the number of members that take an option.
#
#     class                        columns                                  a candidate
#     32 buckets of 218 MiB        device 12, host 20                       host, device, host, host, device, ...
#     32 layers, 6 modes each      keep 5, recompute the MLP 0, all 27      all, all, all, all, all, keep, all, ...
#
# A count has the mean of its members' coefficients in each constraint. So 100 columns replace the 1,900 of Llama 13B,
# and HiGHS finds the relaxed optimum in 10 ms. Its counts are not whole; the options of a class are spread over its
# members all the same, as evenly as whole options can be, so that each stretch of the step has about the mean of every
# constraint. The candidate may exceed the budget by less than a bucket, because the members of a class are live at
# different times; the optimum is then found again with less memory. Whole counts gain nothing, because candidates are
# judged by simulation, and take 1 to 2 s: under them a Llama of 1.1 B parameters in half of its bytes on an H200 had
# one candidate that fits after 8 s.
#
# Llama 7B at batch 16 on 4 RTX 4090s came to a gap of 0.2 % with its first candidate, after 1.2 s; candidates rounded
# from the relaxed optimum over all columns came to 2.0 % after 8.5 s.


_MAX_ROUNDS = 12
"""Solves of an optimum, each with the constraints broken by the optimum before it."""
_MAX_REPAIRS = 4
"""How often less memory is tried for a candidate over the budget: the 2nd or the 3rd time it fits, if at all. Each time
four times as many of its bytes over the budget are taken, because the next optimum may have the same whole options."""
_SHORT = 1e-3
"""An optimum of counts is near enough if its own paths are longer by no more than this share."""


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
        evaluator, facts = milp.evaluator, milp.evaluator.facts
        classes: dict[Hashable, list[int]] = {}
        closed_columns = milp.closed
        for i, bucket in enumerate(facts.buckets):
            closed = tuple(milp.choices[i, level] in closed_columns for level in facts.choices[i])
            sizes = (bucket.flat_nbytes, bucket.state_nbytes)
            key = (facts.choices[i], closed, sizes, bucket.trainable, len(facts.windows[i]))
            classes.setdefault(key, []).append(i)
        # Layers are not told apart by what is closed: GPT-2 10B on an H100 takes 0.841 s if none of its layers has a
        # treatment that comes back late, and 0.850 s if those that come back early may have it.
        for i, (layer, profiles) in enumerate(zip(facts.layers, evaluator.profiles, strict=True)):
            depths = tuple((mode.depth, len(mode.away)) for mode in layer.modes)
            trips = tuple(trip.nbytes for profile in profiles for trip in profile.trips)
            classes.setdefault((depths, trips), []).append(len(facts.buckets) + i)
        self.classes = list(classes.values())
        """Indices of buckets, and of layers behind the number of buckets, with equal options."""
        options = facts.options
        self._options = [
            _Count(number, option, tuple(milp.choices[i, option] for i in members))
            for number, members in enumerate(self.classes)
            for option in options[members[0]]
        ]
        homes = dict.fromkeys(home for _, home in milp.streams)
        streams = [
            _Count(number, home, tuple(milp.choices[milp.streams[i, home]] for i in members))
            for number, class_members in enumerate(self.classes)
            for home in homes
            if (members := [i for i in class_members if (i, home) in milp.streams])
        ]
        self._counts = [*self._options, *streams]
        columns = [count.columns for count in self._counts]
        values = np.concatenate([np.full(len(own), 1.0 / len(own)) for own in columns])
        counts = np.repeat(np.arange(len(columns)), [len(own) for own in columns])
        shape = (milp.num_choices, len(columns))
        self._mean = sparse.csr_array((values, (np.concatenate(columns), counts)), shape=shape)
        """The MILP's columns as means of counts: choices x counts, with 1 / n for each of the n columns of a count."""

    def optima(self, deadline: Deadline, more_bytes: int) -> Iterator[Rounded]:
        """Yield the optimum with `more_bytes` added to the device budget, then, as long as its candidate exceeds the
        budget, the optimum with less memory. The MILP gets the constraints broken by each."""
        milp = self._milp
        budget_bytes = milp.evaluator.facts.problem.budget_bytes
        for repair in range(_MAX_REPAIRS):
            found = self._optimum(deadline, more_bytes)
            if found is None:
                return
            spread = self._spread(found)
            yield spread
            evaluator = milp.evaluator.at(spread.candidate.modes)
            over_bytes = evaluator.memory.peak_bytes(spread.candidate.levels, ahead=0) - budget_bytes
            if over_bytes <= 0:
                return
            more_bytes -= over_bytes << 2 * repair

    def mean(self, deadline: Deadline, more_bytes: int) -> Solution | None:
        """Return the relaxed optimum with `more_bytes` added to the device budget, in which each member of a class has
        the same share of each option; None if none fits. Its bound holds for such x alone."""
        found = self._optimum(deadline, more_bytes)
        if found is None:
            return None
        x = self._mean @ found
        return Solution(x=x, bound=self._milp.lower_s(x) * SCALE / self._milp.reference_s)

    def _optimum(self, deadline: Deadline, more_bytes: int) -> Vector | None:
        """Return the counts at the relaxed optimum, under constraints that are added until it breaks none."""
        milp, found = self._milp, None
        for _ in range(_MAX_ROUNDS):
            if deadline.is_over:
                break
            result = self._solved(deadline, more_bytes)
            if result.x is None:
                return None
            found = np.asarray(result.x[: len(self._counts)])
            x = self._mean @ found
            has_new = milp.add_memory(x, more_bytes)
            is_short = milp.lower_s(x) * SCALE / milp.reference_s > result.fun * (1 + _SHORT)
            has_new |= is_short and milp.add_paths(x)
            if not has_new:
                break
        return found

    @without_notes()
    def _solved(self, deadline: Deadline, more_bytes: int) -> OptimizeResult:
        """Return the counts, not all of them whole, with the shortest step by the MILP's constraints so far."""
        milp, num_counts = self._milp, len(self._counts)
        matrix = matrix_of(milp).tocsc()
        matrix = sparse.hstack([matrix[:, : milp.num_choices] @ self._mean, matrix[:, milp.num_choices :]])
        columns = np.arange(num_counts + num_columns_of(milp) - milp.num_choices)
        is_time = (columns >= num_counts) & (columns < num_counts + len(milp.phases))
        upper = np.full(len(columns), np.inf)
        upper[:num_counts] = [len(count.columns) for count in self._counts]
        owners = ([count.number for count in self._options], columns[: len(self._options)])
        members = sparse.coo_array((np.ones(len(self._options)), owners), shape=(len(self.classes), len(columns)))
        sizes = np.array([len(members) for members in self.classes], dtype=np.float64)
        return linprog(
            is_time.astype(np.float64),
            A_ub=matrix.tocsc(),
            b_ub=milp.limits(more_bytes),
            A_eq=members.tocsc(),
            b_eq=sizes,
            bounds=np.stack([np.zeros(len(upper)), upper], axis=1),
            method="highs",
            options={"time_limit": max(deadline.wall_s, 0.01)},
        )

    def _spread(self, counts: Vector) -> Rounded:
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
        return Rounded(self._mean @ counts, candidate, frozenset(streamed))


def evenly(wanted: Mapping[int, float], num_members: int) -> Iterator[int]:
    """Yield an option for each member, so that the first n members have n / num_members of each count, rounded."""
    done = dict.fromkeys(wanted, 0)
    for number in range(1, num_members + 1):
        option = max(wanted, key=lambda option: wanted[option] * number / num_members - done[option])
        done[option] += 1
        yield option


_MAX_DIVIDED = 24
"""How often a MILP is divided."""


def decided(milp: Milp, deadline: Deadline, more_bytes: int) -> Milp:
    """Return the part of `milp` with the shortest optimum of counts if the y of its gates are decided; `milp` itself if
    they are whole at its own optimum.

    If 60 % of the members of a class are on the host, each has a share of 0.6 there and all y are 0.6, so the host
    waits for 60 % of the work behind the gate. No spread of whole members over the class takes as few seconds. So the
    MILP is divided at the number of y that are 1 on average, and the part with the shortest optimum is divided again
    until its y are whole. Source: branch and bound, Land and Doig 1960. The parts have copies of activations on their
    paths, as in `Milp.with_trips`.
    """
    start = CountedMilp(milp).mean(deadline, more_bytes)
    if start is None or milp.undecided(start.x) is None:
        return milp
    own = milp.with_trips()
    start = CountedMilp(own).mean(deadline, more_bytes)
    if start is None:
        return milp
    parts = [(start.bound, 0, own, start.x)]
    for number in range(1, _MAX_DIVIDED + 1):
        _, _, part, x = parts[0]
        at = part.undecided(x)
        if at is None or deadline.is_over:
            break
        heapq.heappop(parts)
        for side, half in enumerate(part.divided(*at)):
            found = CountedMilp(half).mean(deadline, more_bytes)
            if found is not None:
                heapq.heappush(parts, (found.bound, 2 * number + side, half, found.x))
        if not parts:
            return milp
    return parts[0][2]
