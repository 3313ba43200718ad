"""Integral solutions of a program under its rows so far, by HiGHS through scipy."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from elixir_compile.search.clock import Deadline
from elixir_compile.search.evaluator import Candidate
from elixir_compile.search.formulation.program import Program, Vector

_MAX_NODES = 20_000
"""Nodes of a branch-and-bound search. Counted nodes, unlike seconds, give equal results on slow and fast machines."""


@dataclass(frozen=True, slots=True)
class Solution:
    x: Vector
    bound: float
    """A proved lower limit on the scaled objective."""


def solve_integral(
    program: Program,
    *,
    limit_s: float,
    gap: float,
    more_bytes: int = 0,
    is_open: NDArray[np.bool_] | None = None,
    integral_streams: bool = True,
    max_nodes: int = _MAX_NODES,
) -> Solution | None:
    """Return the best integral x under the program's rows; None if no x fits or the time ends before any is found.

    `gap` is the relative gap between objective and bound at which the solver stops. `more_bytes` is added to the device
    budget. `is_open`, by column, limits the options to choose from; the bound then holds for these options only. If
    `integral_streams` is False, the columns of streamed updates may be fractions, and the bound allows fractions too.
    """
    num_columns = num_columns_of(program)
    upper = np.full(num_columns, np.inf)
    upper[: program.num_choices] = 1.0
    if is_open is not None:
        upper[: program.num_options] = is_open[: program.num_options]
    objective = np.zeros(num_columns)
    objective[program.num_choices : program.num_choices + len(program.phases)] = 1.0
    is_integral = np.arange(num_columns) < (program.num_choices if integral_streams else program.num_options)
    result = milp(
        objective,
        constraints=[
            LinearConstraint(matrix_of(program), ub=program.limits(more_bytes)),  # pyright: ignore[reportArgumentType]
            LinearConstraint(option_counts(program), 1.0, 1.0),  # pyright: ignore[reportArgumentType] (stubs)
        ],
        bounds=Bounds(0.0, upper),  # pyright: ignore[reportArgumentType] (stubs)
        integrality=is_integral.astype(np.int64),
        options={"time_limit": max(limit_s, 0.01), "mip_rel_gap": gap, "node_limit": max_nodes},
    )
    if result.x is None:
        return None
    found = result.mip_dual_bound
    bound = 0.0 if found is None or not np.isfinite(found) else float(found)
    x = np.asarray(result.x[: program.num_choices])
    x[is_integral[: program.num_choices]] = np.round(x[is_integral[: program.num_choices]])
    return Solution(x=x, bound=bound)


def num_columns_of(program: Program) -> int:
    """Return the number of columns: x of choices, T of phases, and z of rows."""
    return program.num_choices + len(program.phases) + program.num_extra


def matrix_of(program: Program) -> sparse.csr_array:
    """Return the coefficients of the program's rows as a matrix, rows x columns."""
    lengths = [len(row.columns) for row in program.rows]
    columns = np.concatenate([row.columns for row in program.rows])
    values = np.concatenate([row.values for row in program.rows])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return sparse.csr_array((values, columns, starts), shape=(len(program.rows), num_columns_of(program)))


def option_counts(program: Program) -> sparse.csr_array:
    """Return the matrix that counts the chosen options of each bucket and layer in x; each count must be 1."""
    owners = program.owners
    shape = (int(owners.max()) + 1, num_columns_of(program))
    return sparse.csr_array((np.ones(len(owners)), (owners, np.arange(len(owners)))), shape=shape)


def integral_candidates(program: Program, deadline: Deadline, gap: float) -> Iterator[tuple[Candidate, float]]:
    """Yield candidates, best first by the program's rows, until none is left or the time is up.

    Each candidate comes with a lower limit in seconds on the step of every candidate not yielded before it. Before it
    is yielded, the program gets the rows broken by it, or, if it breaks none, a row to forbid it.
    """
    while not deadline.is_over:
        solution = solve_integral(program, limit_s=deadline.wall_s, gap=gap)
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
"""An option counts as used if its entry of x is larger."""
_GAP = 2e-4
_MAX_ROUNDS, _MAX_ROUNDING_NODES = 8, 10
"""Solves of a rounding, and nodes of each solve; most roundings take fewer. GPT-2 20B on an A100 had its first
candidate within 1 % of the bound from the third solve over all options, with 10 nodes after 4.4 s of solves and with
150 nodes after 7 s."""
_MIN_S = 2.0
"""Seconds that each solve of a rounding may take even if the time is up: a solve cut short rounds badly."""


@dataclass(frozen=True, slots=True)
class Rounded:
    candidate: Candidate
    streamed: frozenset[int]
    """Buckets whose updates the program streams; empty if streams were not asked to be integral."""


def rounded(
    program: Program,
    x: Vector,
    deadline: Deadline,
    *,
    more_bytes: int = 0,
    also: Iterable[Vector] = (),
    integral_streams: bool = False,
) -> Iterator[Rounded]:
    """Yield candidates made of the options used by x and by the optima in `also`; yield none if none fits.

    The program gets the rows that a candidate breaks before the next solve. The last candidate is the best by all
    rows, unless the deadline ended the search. `more_bytes` is added to the device budget; below 0, it is kept free.
    If `integral_streams` is False, streams may be fractions; `streaming.best_moves` then finds a candidate's streams.
    """
    used = x > USED
    for other in also:
        used |= other > USED
    for _ in range(_MAX_ROUNDS):
        solution = solve_integral(
            program,
            limit_s=max(deadline.wall_s, _MIN_S * deadline.clock.times),
            gap=_GAP,
            more_bytes=more_bytes,
            is_open=used,
            integral_streams=integral_streams,
            max_nodes=_MAX_ROUNDING_NODES,
        )
        if solution is None:
            return
        candidate = program.candidate(solution.x)
        streamed = program.streamed(solution.x, candidate) if integral_streams else frozenset[int]()
        has_new = program.add_memory(solution.x, more_bytes)
        has_new |= program.is_short(solution.x, solution.bound) and program.add_paths(solution.x)
        has_new |= program.add_leaving(candidate)
        yield Rounded(candidate, streamed)
        if not has_new or deadline.is_over:
            return
