"""The search: which level each bucket gets, as a mixed-integer program with a bound on what any plan can do.

    minimise    T_forward + T_backward + T_update
    over        x[bucket, level] and x[layer, mode] in {0, 1}, one each per bucket and per layer
    subject to  T_phase >= c + C x         for paths of the phase's flow shop (see `flow`)
                rest[s] + B[s] x <= budget for segments of the step (see `memory`)
                H x <= host budget

Rows are generated: solve, find the longest path of every phase and the fullest segment at the solution, add those that
are violated, and solve again; first without integrality, which is quick, then with. Every whole solution is played in
the simulator with as much prefetch as its memory allows. A solution that is tried and does not close the gap is
forbidden, and the next best is found: the loop ends when the bound, which only rises, comes within the tolerance of the
best step played, or at the time limit. What it proves holds for every plan that this package can write out.

The solver is HiGHS through scipy. Two counts are exact where the program is not: the bytes of gradients that leave
while later buckets stay, on one rank, get rows of their own where a solution breaks them; and prefetch, which the
program grants for free, is what remains of the gap.
"""

import time
from collections.abc import Iterator

import numpy as np

from elixir_compile.search.draft import Answer
from elixir_compile.search.program import Program, Solution
from elixir_compile.units import GIB

_MAX_ROUNDS = 200


def relaxed(program: Program, deadline_s: float, more_bytes: int = 0) -> Solution | None:
    """Return the solution without integrality once no row is missing; None when there is none.

    `more_bytes` is device memory on top of the budget, or, below 0, kept free for gathers that are early.
    """
    solution: Solution | None = None
    for _ in range(_MAX_ROUNDS):
        limit_s = deadline_s - time.monotonic()
        solution = program.solve(is_whole=False, limit_s=limit_s, gap=0.0, more_bytes=more_bytes)
        if solution is None or time.monotonic() > deadline_s:
            break
        has_new = program.add_memory(solution.x, more_bytes)
        has_new |= program.is_short(solution) and program.add_paths(solution.x)
        if not has_new:
            break
    return solution


def whole(program: Program, deadline_s: float, gap: float) -> Iterator[tuple[Answer, float]]:
    """Yield answers, best first as far as the program can tell; end when there is none left or the time is up.

    Each comes with the bound in seconds of every plan that was not yielded before.
    """
    while time.monotonic() < deadline_s:
        solution = program.solve(is_whole=True, limit_s=deadline_s - time.monotonic(), gap=gap)
        if solution is None:
            return
        x = np.round(solution.x)
        answer = program.answer(x)
        has_new = program.add_memory(x)
        has_new |= program.is_short(solution) and program.add_paths(x)
        has_new |= program.add_leaving(answer)
        if not has_new:
            program.forbid(answer)
        yield answer, program.seconds(solution.bound)


def gib_saves_s(program: Program, solution: Solution, deadline_s: float) -> float | None:
    """Return by how many seconds the relaxed optimum falls with one more GiB on the device; None when time is up."""
    more = relaxed(program, deadline_s, GIB)
    if more is None:
        return None
    return max(0.0, program.seconds(solution.bound) - program.seconds(more.bound))
