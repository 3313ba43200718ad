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

from collections.abc import Iterator

from elixir_compile.search.clock import Deadline
from elixir_compile.search.draft import Candidate
from elixir_compile.search.program import Program
from elixir_compile.search.solving import solve_whole


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
