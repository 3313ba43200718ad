"""The relaxed optimum of a program and its bound, by column and row generation.

A master program has some of the columns. Its multipliers price every column. Columns enter the master if they are
cheaper than the columns of their bucket or layer there; rows enter if the optimum breaks them. The rounds end if
neither columns nor rows enter.

    minimise  sum of T   over the columns so far          multipliers l >= 0 of the rows  a x - T <= b
    price     l a of every column, in the master or not   the cheapest columns enter
    bound     -l b + sum over phases of min(0, 1 - l of its paths) T_max
                   + sum over buckets and layers of min over their options of l a
                   + sum over streams and other columns of min(0, l a)

The bound holds for every integral x, whatever the multipliers are (weak duality: Geoffrion 1974). An unfinished solve
of the master, or the solver's tolerance, makes the bound lower and never wrong. T_max is the best known step: longer
steps need no bound.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import linprog

from elixir_compile.search.clock import Deadline
from elixir_compile.search.formulation.program import SCALE, Program, Vector
from elixir_compile.search.formulation.solver import matrix_of, num_columns_of, option_counts

_MAX_ROUNDS = 60
_MAX_NEW = 2
"""Columns of each bucket or layer that enter the master in one round."""
_CHEAPER = 1e-4
"""A column enters the master if it is cheaper by at least this much, in units of `SCALE`."""
_CLOSE = 1e-4
_LARGE, _PATIENCE, _MAX_STALE = 3000, 12, 3
"""The rounds end if bound and master agree within the share `_CLOSE`, and either no row is new or the bound has risen
by less than this share in each of the last `_PATIENCE` solves, `_MAX_STALE` in a program of more than `_LARGE` columns.
Small programs get more solves, because an optimum that mixes more options can be rounded better."""
_MIN_S, _WORTH, _MAX_LATE = 2.0, 0.9, 8
"""A solve may take `_MIN_S` seconds even if the time is up, and up to `_MAX_LATE` solves follow until the bound is
`_WORTH` of the master. The first masters have too few columns for a useful bound."""
_OVER = 1e3
"""Price, in steps, of exceeding the budget by its own size. With it the master always has an optimum, and the optimum
fits the budget if any mix of its columns does."""


@dataclass(frozen=True, slots=True)
class Priced:
    """A relaxed optimum and what it proves."""

    bound: float
    """A lower limit on the objective of every integral x, scaled; `Program.seconds` turns it into seconds."""
    x: Vector
    columns: NDArray[np.bool_]
    """Whether each choice is a column of the master."""


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
    program: Program, seeds: Iterable[Vector], deadline: Deadline, more_bytes: int = 0, patience: int = _PATIENCE
) -> Priced | None:
    """Return the relaxed optimum, with `more_bytes` added to the device budget (below 0: kept free).

    The master starts with the columns of `seeds`; at least one seed should fit the budget. `patience` is the number of
    solves that may raise the bound by next to nothing. Returns None if no optimum within the budget was found.
    """
    columns = np.zeros(program.num_choices, dtype=np.bool_)
    for seed in seeds:
        columns |= seed > 0.0
    columns[program.num_options :] = False
    best, last, num_stale, found = -np.inf, -np.inf, 0, None
    patience = min(patience, _MAX_STALE) if program.num_choices > _LARGE else patience
    for number in range(_MAX_ROUNDS):
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
        # The first masters also have too few rows, so their value is below the longest paths of their own x.
        claimed = max(master.value, program.lower_s(master.x) * SCALE / program.reference_s)
        is_worthless = best < _WORTH * claimed and number < _MAX_LATE
        if deadline.is_over and not is_worthless:
            break
        num_stale = num_stale + 1 if best < last + _CLOSE * abs(last) else 0
        if best > master.value * (1 - _CLOSE) and (not has_new or num_stale >= patience):
            break
        last = best
    return found


def _solved(program: Program, columns: NDArray[np.bool_], deadline: Deadline, more_bytes: int) -> _Master | None:
    num_choices, num_columns = program.num_choices, num_columns_of(program)
    in_master = np.concatenate([np.flatnonzero(columns), np.arange(num_choices, num_columns)])
    num_chosen = int(columns.sum())
    matrix, limits = matrix_of(program).tocsc(), program.limits(more_bytes)
    objective = np.zeros(len(in_master) + 1)
    objective[num_chosen : num_chosen + len(program.phases)] = 1.0
    objective[-1] = _OVER
    over = np.array([-float(row.is_memory or row is program.host_row) for row in program.rows])
    upper = np.full(len(in_master) + 1, np.inf)
    upper[:num_chosen] = 1.0
    counts = option_counts(program).tocsc()[:, in_master]
    result = linprog(
        objective,
        A_ub=sparse.hstack([matrix[:, in_master], over[:, None]], format="csc"),
        b_ub=limits,
        A_eq=sparse.hstack([counts, np.zeros((counts.shape[0], 1))], format="csc"),
        b_eq=np.ones(counts.shape[0]),
        bounds=np.stack([np.zeros(len(upper)), upper], axis=1),
        method="highs",
        options={"time_limit": max(deadline.wall_s, _MIN_S * deadline.clock.times)},
    )
    if result.x is None or result.status != 0:
        return None
    multipliers = np.maximum(-np.asarray(result.ineqlin.marginals), 0.0)
    x = np.zeros(num_choices)
    x[columns] = result.x[:num_chosen]
    prices = matrix.T @ multipliers
    bound = bound_of(program, prices, float(multipliers @ limits))
    return _Master(x, float(result.fun), bound, prices[:num_choices], is_over=float(result.x[-1]) > 1e-6 * SCALE)


def bound_of(program: Program, prices: Vector, limits: float) -> float:
    """Return the lower limit on the objective of every integral x, scaled, proved by multipliers of the rows.

    `prices` are the columns' coefficients times the multipliers, `limits` is the sum of the rows' limits times them.
    """
    num_choices, num_options = program.num_choices, program.num_options
    behind = num_choices + len(program.phases)
    cheapest = np.full(int(program.owners.max()) + 1, np.inf)
    np.minimum.at(cheapest, program.owners, prices[:num_options])
    bound = float(cheapest.sum()) - limits
    # `SCALE` is the best known step, so no phase of a shorter step takes longer than `SCALE`.
    bound += float(np.minimum(1.0 + prices[num_choices:behind], 0.0).sum()) * SCALE
    bound += float(np.minimum(prices[num_options:num_choices], 0.0).sum())
    return bound + float(np.minimum(prices[behind:], 0.0).sum())


def _cheaper(program: Program, prices: Vector, columns: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return columns outside the master, cheaper than those in it: the cheapest few of each bucket or layer.

    Also returns streams with a negative price.
    """
    owners, num_options = program.owners, program.num_options
    inside = np.flatnonzero(columns[:num_options])
    now = np.full(int(owners.max()) + 1, np.inf)
    np.minimum.at(now, owners[inside], prices[inside])
    options = prices[:num_options]
    wanted = np.flatnonzero((options < now[owners] - _CHEAPER) & ~columns[:num_options])
    wanted = wanted[np.lexsort((options[wanted], owners[wanted]))]
    is_first = np.ones(len(wanted), dtype=np.bool_)
    is_first[_MAX_NEW:] = owners[wanted[_MAX_NEW:]] != owners[wanted[:-_MAX_NEW]]
    streams = np.arange(num_options, program.num_choices)
    streams = streams[(prices[streams] < -_CHEAPER) & ~columns[streams]]
    return np.concatenate([wanted[is_first], streams])
