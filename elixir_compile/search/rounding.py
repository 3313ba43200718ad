"""Whole answers near a relaxed optimum.

At an optimum few buckets and layers are divided between options: 13 of 123 and 6 of 26 for GPT-2 20B on one A100. The
best whole answer over the options that it uses is found in a fraction of a second, 0.1 % above the bound or less.
Taking the leanest of the options of all that is divided instead left 10 GiB of 80 unused.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from elixir_compile.search.clock import Deadline
from elixir_compile.search.draft import Candidate
from elixir_compile.search.program import Program, Vector
from elixir_compile.search.solving import solve_whole

USED = 1e-6
"""A share of an option below this is none."""
_GAP = 2e-4
_MOST_ROUNDS, _MOST_NODES = 8, 150
"""Solves, and nodes of each, of which most answers take fewer. Llama 7B on an RTX 4090 came no further in 3840."""
_LEAST_S = 2.0
"""Each solve may take so long even if the time is up: an answer that is far from the optimum is no candidate."""


@dataclass(frozen=True, slots=True)
class Rounded:
    candidate: Candidate
    streamed: frozenset[int]
    """Buckets whose updates the program streams; none where streams need not be whole."""


def nearest(
    program: Program,
    x: Vector,
    deadline: Deadline,
    *,
    more_bytes: int = 0,
    also: Iterable[Vector] = (),
    streams_whole: bool = False,
) -> Rounded | None:
    """Return the best whole answer over the options that x and the optima in `also` use, None where none fits.

    `more_bytes` is device memory on top of the budget, or, below 0, kept free. Streamed updates are whole only if
    `streams_whole` says so: which ones are is then found by playing.
    """
    used = x > USED
    for other in also:
        used |= other > USED
    found: Rounded | None = None
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
            break
        candidate = program.candidate(solution.x)
        streamed = program.streamed(solution.x, candidate) if streams_whole else frozenset[int]()
        found = Rounded(candidate, streamed)
        has_new = program.add_memory(solution.x, more_bytes)
        has_new |= program.is_short(solution.x, solution.bound) and program.add_paths(solution.x)
        has_new |= program.add_leaving(candidate)
        if not has_new or deadline.is_over:
            break
    return found
