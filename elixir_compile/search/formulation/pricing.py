"""The relaxed optimum by columns and rows that are added as they are asked for, and the bound that it proves.

A master program has a part of the columns. Its multipliers price all of them: those cheaper than what their bucket or
layer has come in, as do rows that the optimum breaks, until there are none.

    minimise  sum of T   over the columns so far          multipliers l >= 0 of the rows  a x - T <= b
    price     l a of every column, in the master or not   the cheapest ones come in
    bound     -l b + sum over phases of min(0, 1 - l of its paths) T_most
                   + sum over buckets and layers of the least l a of their options
                   + sum over streams and other columns of min(0, l a)

The bound holds for every whole x whatever the multipliers are (weak duality: Geoffrion 1974), so neither a master that
is not solved to the end nor the solver's own tolerance weakens the proof. T_most is the step that is known already:
longer ones need no bound.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import linprog

from elixir_compile.search.clock import Deadline
from elixir_compile.search.formulation.program import SCALE, Program, Vector
from elixir_compile.search.formulation.solver import matrix_of, num_columns_of, one_each

_MOST_ROUNDS = 60
_MOST_NEW = 2
"""Columns of one bucket or layer that come in at once."""
_CHEAPER = 1e-4
"""A column that is cheaper by less, in units of `SCALE`, is not."""
_CLOSE = 1e-4
_LARGE, _PATIENCE, _MOST_STALE = 3000, 12, 3
"""Master and bound that agree within `_CLOSE` are good enough once the bound has risen by less in so many solves: more
where there are few columns, for the more options an optimum divides, the better it can be rounded."""
_LEAST_S, _WORTH, _MOST_LATE = 2.0, 0.9, 8
"""A solve may take so long even if the time is up, and so many are made until the bound is worth that share of the
master: the first few have too few columns to say anything, and a plan without a bound proves nothing."""
_OVER = 1e3
"""Price of a share of the budget above it, in steps: the master always has an optimum, which fits where any does."""


@dataclass(frozen=True, slots=True)
class Priced:
    """A relaxed optimum and what it proves."""

    bound: float
    """No whole x takes less: scaled, for `Program.seconds`."""
    x: Vector
    columns: NDArray[np.bool_]
    """Those that came in."""


@dataclass(slots=True)
class _Master:
    """The optimum over some of the columns, and the price of all."""

    x: Vector
    value: float
    bound: float
    prices: Vector
    """Of every choice."""
    is_over: bool


def priced(
    program: Program, seeds: Iterable[Vector], deadline: Deadline, more_bytes: int = 0, patience: int = _PATIENCE
) -> Priced | None:
    """Return the relaxed optimum with `more_bytes` of device memory, or so much less where they are below 0; None where
    nothing fits, or where the time is up long before there is one.

    The columns of `seeds`, of which one fits the budget, are the first ones.
    """
    columns = np.zeros(program.num_choices, dtype=np.bool_)
    for seed in seeds:
        columns |= seed > 0.0
    columns[program.num_options :] = False
    best, last, num_stale, found = -np.inf, -np.inf, 0, None
    patience = min(patience, _MOST_STALE) if program.num_choices > _LARGE else patience
    for number in range(_MOST_ROUNDS):
        master = _solved(program, columns, deadline, more_bytes)
        if master is None:
            break
        best = max(best, master.bound)
        found = None if master.is_over else Priced(best, master.x, columns.copy())
        new_columns = _cheaper(program, master.prices, columns)
        has_new = program.add_memory(master.x, more_bytes)
        has_new |= program.is_short(master.x, master.value) and program.add_paths(master.x)
        columns[new_columns] = True
        if not (has_new or len(new_columns)):
            break
        # The first masters have too few rows as well: their value is below what their own x takes.
        claimed = max(master.value, program.lower_s(master.x) * SCALE / program.reference_s)
        is_worthless = best < _WORTH * claimed and number < _MOST_LATE
        if deadline.is_over and not is_worthless:
            break
        num_stale = num_stale + 1 if best < last + _CLOSE * abs(last) else 0
        if best > master.value * (1 - _CLOSE) and (not has_new or num_stale >= patience):
            break
        last = best
    return found


def _solved(program: Program, columns: NDArray[np.bool_], deadline: Deadline, more_bytes: int) -> _Master | None:
    num_choices, num_columns = program.num_choices, num_columns_of(program)
    kept = np.concatenate([np.flatnonzero(columns), np.arange(num_choices, num_columns)])
    own = int(columns.sum())
    matrix, limits = matrix_of(program).tocsc(), program.limits(more_bytes)
    objective = np.zeros(len(kept) + 1)
    objective[own : own + len(program.phases)] = 1.0
    objective[-1] = _OVER
    over = np.array([-float(row.is_memory or row is program.host_row) for row in program.rows])
    most = np.full(len(kept) + 1, np.inf)
    most[:own] = 1.0
    chosen = one_each(program).tocsc()[:, kept]
    result = linprog(
        objective,
        A_ub=sparse.hstack([matrix[:, kept], over[:, None]], format="csc"),
        b_ub=limits,
        A_eq=sparse.hstack([chosen, np.zeros((chosen.shape[0], 1))], format="csc"),
        b_eq=np.ones(chosen.shape[0]),
        bounds=np.stack([np.zeros(len(most)), most], axis=1),
        method="highs",
        options={"time_limit": max(deadline.wall_s, _LEAST_S * deadline.clock.times)},
    )
    if result.x is None or result.status != 0:
        return None
    multipliers = np.maximum(-np.asarray(result.ineqlin.marginals), 0.0)
    x = np.zeros(num_choices)
    x[columns] = result.x[:own]
    prices = matrix.T @ multipliers
    bound = bound_of(program, prices, float(multipliers @ limits))
    return _Master(x, float(result.fun), bound, prices[:num_choices], is_over=float(result.x[-1]) > 1e-6 * SCALE)


def bound_of(program: Program, prices: Vector, limits: float) -> float:
    """Return what every whole x takes at least, scaled, at multipliers under which the columns have these `prices` and
    the limits of the rows add up to `limits`."""
    num_choices, num_options = program.num_choices, program.num_options
    behind = num_choices + len(program.phases)
    least = np.full(int(program.owners.max()) + 1, np.inf)
    np.minimum.at(least, program.owners, prices[:num_options])
    bound = float(least.sum()) - limits
    # `SCALE` is the known step: no phase of a shorter one takes longer.
    bound += float(np.minimum(1.0 + prices[num_choices:behind], 0.0).sum()) * SCALE
    bound += float(np.minimum(prices[num_options:num_choices], 0.0).sum())
    return bound + float(np.minimum(prices[behind:], 0.0).sum())


def _cheaper(program: Program, prices: Vector, columns: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The columns outside of the master that are cheaper than what it has, the cheapest few of a bucket or a layer."""
    owners, num_options = program.owners, program.num_options
    inside = np.flatnonzero(columns[:num_options])
    now = np.full(int(owners.max()) + 1, np.inf)
    np.minimum.at(now, owners[inside], prices[inside])
    options = prices[:num_options]
    wanted = np.flatnonzero((options < now[owners] - _CHEAPER) & ~columns[:num_options])
    wanted = wanted[np.lexsort((options[wanted], owners[wanted]))]
    is_first = np.ones(len(wanted), dtype=np.bool_)
    is_first[_MOST_NEW:] = owners[wanted[_MOST_NEW:]] != owners[wanted[:-_MOST_NEW]]
    streams = np.arange(num_options, program.num_choices)
    streams = streams[(prices[streams] < -_CHEAPER) & ~columns[streams]]
    return np.concatenate([wanted[is_first], streams])
