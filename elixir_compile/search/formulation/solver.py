"""The solver: a program with the rows it has so far to the best x, whole, relaxed or rounded. HiGHS, through scipy."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from elixir_compile.search.candidate import Candidate
from elixir_compile.search.clock import Deadline
from elixir_compile.search.formulation.program import Program, Vector

_MOST_NODES = 20_000
"""Of a search for a whole solution, unless another number is asked for: it ends alike on a slow and a fast machine."""


@dataclass(frozen=True, slots=True)
class Solution:
    x: Vector
    bound: float
    """Of the objective, scaled."""


def solve_whole(
    program: Program,
    *,
    limit_s: float,
    gap: float,
    more_bytes: int = 0,
    is_open: NDArray[np.bool_] | None = None,
    streams_whole: bool = True,
    most_nodes: int = _MOST_NODES,
) -> Solution | None:
    """Return the best whole x under the rows so far, None when there is none or the time is up before one is found.

    `more_bytes` is device memory on top of the budget. Only options that are open, by their column, may be chosen; the
    bound then holds for these alone, and where streams need not be whole, for such x.
    """
    num_columns = num_columns_of(program)
    most = np.full(num_columns, np.inf)
    most[: program.num_choices] = 1.0
    if is_open is not None:
        most[: program.num_options] = is_open[: program.num_options]
    objective = np.zeros(num_columns)
    objective[program.num_choices : program.num_choices + len(program.phases)] = 1.0
    whole = np.arange(num_columns) < (program.num_choices if streams_whole else program.num_options)
    result = milp(
        objective,
        constraints=[
            LinearConstraint(matrix_of(program), ub=program.limits(more_bytes)),  # pyright: ignore[reportArgumentType]
            LinearConstraint(one_each(program), 1.0, 1.0),  # pyright: ignore[reportArgumentType] (stubs)
        ],
        bounds=Bounds(0.0, most),  # pyright: ignore[reportArgumentType] (stubs)
        integrality=whole.astype(np.int64),
        options={"time_limit": max(limit_s, 0.01), "mip_rel_gap": gap, "node_limit": most_nodes},
    )
    if result.x is None:
        return None
    found = result.mip_dual_bound
    bound = 0.0 if found is None or not np.isfinite(found) else float(found)
    x = np.asarray(result.x[: program.num_choices])
    x[whole[: program.num_choices]] = np.round(x[whole[: program.num_choices]])
    return Solution(x=x, bound=bound)


def num_columns_of(program: Program) -> int:
    """Return the number of columns: choices, seconds of phases, and what rows brought."""
    return program.num_choices + len(program.phases) + program.num_extra


def matrix_of(program: Program) -> sparse.csr_array:
    """Return the coefficients of the rows."""
    lengths = [len(row.columns) for row in program.rows]
    columns = np.concatenate([row.columns for row in program.rows])
    values = np.concatenate([row.values for row in program.rows])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return sparse.csr_array((values, columns, starts), shape=(len(program.rows), num_columns_of(program)))


def one_each(program: Program) -> sparse.csr_array:
    """Return ones for the options of each bucket and layer, one row each."""
    owners = program.owners
    shape = (int(owners.max()) + 1, num_columns_of(program))
    return sparse.csr_array((np.ones(len(owners)), (owners, np.arange(len(owners)))), shape=shape)


def whole(program: Program, deadline: Deadline, gap: float) -> Iterator[tuple[Candidate, float]]:
    """Yield candidates, best first as far as the program can tell; end when there is none left or the time is up.

    Each comes with the bound in seconds of every plan that was not yielded before.
    """
    while not deadline.is_over:
        solution = solve_whole(program, limit_s=deadline.wall_s, gap=gap)
        if solution is None:
            return
        candidate = program.candidate(solution.x)
        has_new = program.add_memory(solution.x)
        has_new |= program.is_short(solution.x, solution.bound) and program.add_paths(solution.x)
        has_new |= program.add_leaving(candidate)
        if not has_new:
            program.forbid(candidate)
        yield candidate, program.seconds(solution.bound)


USED = 1e-6
"""A share of an option below this is none."""
_GAP = 2e-4
_MOST_ROUNDS, _MOST_NODES = 8, 10
"""Solves, and nodes of each, of which most answers take fewer. GPT-2 20B on an A100 had its first answer within 1 % of
the bound from the third solve over all options, with 10 nodes after 4.4 s of solves and with 150 after 7 s."""
_LEAST_S = 2.0
"""Each solve may take so long even if the time is up: an answer that is far from the optimum is no candidate."""


@dataclass(frozen=True, slots=True)
class Rounded:
    candidate: Candidate
    streamed: frozenset[int]
    """Buckets whose updates the program streams; none where streams need not be whole."""


def rounded(
    program: Program,
    x: Vector,
    deadline: Deadline,
    *,
    more_bytes: int = 0,
    also: Iterable[Vector] = (),
    streams_whole: bool = False,
) -> Iterator[Rounded]:
    """Yield whole answers over the options that x and the optima in `also` use, after each of which rows come in that
    it breaks: the last one is the best by all rows, unless the deadline was over. Yield nothing if none fits.

    `more_bytes` is device memory on top of the budget, or, below 0, kept free. Streamed updates are whole only if
    `streams_whole` says so: which ones are is then found by playing.
    """
    used = x > USED
    for other in also:
        used |= other > USED
    for _ in range(_MOST_ROUNDS):
        solution = solve_whole(
            program,
            limit_s=max(deadline.wall_s, _LEAST_S * deadline.clock.times),
            gap=_GAP,
            more_bytes=more_bytes,
            is_open=used,
            streams_whole=streams_whole,
            most_nodes=_MOST_NODES,
        )
        if solution is None:
            return
        candidate = program.candidate(solution.x)
        streamed = program.streamed(solution.x, candidate) if streams_whole else frozenset[int]()
        has_new = program.add_memory(solution.x, more_bytes)
        has_new |= program.is_short(solution.x, solution.bound) and program.add_paths(solution.x)
        has_new |= program.add_leaving(candidate)
        yield Rounded(candidate, streamed)
        if not has_new or deadline.is_over:
            return
