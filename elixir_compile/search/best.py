"""The default planner: the best plan that the time allows, with what is proved about all others.

Buckets have levels, layers of activations have modes; an answer has one of each. In this order, until the best step
played is within the tolerance of the bound, which in a large program grows with the answers played (`Tries.is_good`):

    starts       all layers at one depth, everything on the device or on the host: where to begin
    bound       the relaxed optimum, by columns and rows that are added as they are asked for      `pricing`
    rounded     the nearest whole candidates, with more and more memory kept free for early copies    `rounding`
    streams     updates of the best candidate, streamed bucket by bucket                              `tries`
    pool        the nearest whole answer over all options that any of these optima used
    rules       the answers of the rule planners: the result is never slower than any of them
    flips       neighbours of the best, as the program ranks them                                  `neighbours`
    whole       whole optima, best first, which raise the bound                                    `milp`

Each has a number of plays and solves after which it ends, so that the same problem gives the same plan on a slow and on
a fast machine; the clock only cuts.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from elixir_compile.search.candidate import Candidate, Certificate, DraftPlan
from elixir_compile.search.clock import Clock, Deadline, deadline_in
from elixir_compile.search.evaluator import Evaluator
from elixir_compile.search.formulation.pricing import Priced, priced
from elixir_compile.search.formulation.program import Program, Vector
from elixir_compile.search.formulation.solver import rounded, whole
from elixir_compile.search.reasons import binding, decisions
from elixir_compile.search.space.modes import deepest
from elixir_compile.search.tries import Tries, bring_back, flip
from elixir_compile.units import GIB, format_s

log = logging.getLogger("elixir_compile")

TOLERANCE = 1e-3
"""The search ends when nothing untried can be faster by more than this share of the step."""
_MIN_IDLE, _IDLE_COLUMNS, _IDLE_STREAMED = 12, 20_000, 6_000
"""So many whole solutions in a row that make the step no shorter end the search: small programs may try more, and
those with updates to stream fewer, because no row says that an early gather waits, so that the last of their gap never
closes. GPT-2 124M with 6 GiB on an RTX 3090: half the seconds for the same plan."""
_MOST_MISSES = 24
"""So many whole solutions in a row that do not fit by the exact count end the search too: each forbids one answer and
not its like, and rows against answers make the next solve longer. A small model under `torch.autocast` at its least
budget: 73 solves in 5 s, none of which fit."""
_SOLVER_SHARE, _SEARCH_SHARE = 0.5, 0.8
"""Of the time: when the solver has to stop, and when all that is played has to; the rest is for the reasons."""
_FREE_SHARES, _FREE_SHARES_OF_RANKS = (0.0, 0.5, 1.0, 2.0), (1.0, 0.5, 0.25, 0.0)
"""Memory kept free for early copies, in units of the widest bucket; on several ranks, where every use of a bucket that
is not kept whole is a gather, most answers without such memory do not fit, or wait."""
_MOST_STALE = 2
"""Solves that do not raise the bound of an optimum that is only rounded."""
_WORTH_MOVING = 0.01
"""Where all fits, a step that is shorter by no more than this share is no reason to move anything."""


def place_best(
    evaluator: Evaluator,
    first: DraftPlan,
    others: Iterable[Candidate],
    timeout_s: float,
    tolerance: float = TOLERANCE,
    clock: Clock | None = None,
) -> DraftPlan:
    """Return the best draft found in `timeout_s` seconds, with its certificate; `first` fits, `others` may.

    They count from when `clock` was made, or from now. `others` are not asked for where `first` leaves everything where
    it starts.
    """
    if not evaluator.facts.buckets:
        certificate = Certificate(bound_s=first.step_s, binding=(), gib_saves_s=0.0)
        return replace(first, certificate=certificate)
    # What fits stays: a machine's profile is not so exact that a slightly faster update elsewhere is a reason to move.
    stays = first.levels == evaluator.facts.start_levels and first.modes == evaluator.facts.modes
    clock = Clock() if clock is None else clock
    program = Program(evaluator, max(first.step_s, 1e-12))
    first = replace(first, planner="milp")
    tries = Tries(
        evaluator=evaluator,
        program=program,
        deadline=clock.until(timeout_s * _SEARCH_SHARE),
        best=first,
        tolerance=tolerance,
        found={first.candidate: first},
    )
    starts = _rungs(evaluator)
    if not stays:
        _try_shortest(tries, program, starts)
    seeds = [program.vector(candidate) for candidate in dict.fromkeys((first.candidate, tries.best.candidate, *starts))]
    for seed in seeds:
        program.add_paths(seed)
    start = priced(program, seeds, tries.deadline)
    if start is None:
        _try_rules(tries, program, () if stays else others)
        return replace(tries.best, decisions=decisions(program, tries.best, clock.until(timeout_s)))
    proved = _certificate(program, start)
    if stays and not _is_worth_moving(evaluator, first, proved.bound_s):
        return replace(first, certificate=replace(proved, bound_s=min(proved.bound_s, first.step_s)))
    bound_s = _searched(tries, program, start, seeds, others, clock.until(timeout_s * _SOLVER_SHARE))
    log.debug("searched %s in %s", evaluator.facts.problem.name, format_s(clock.spent_s))
    if stays and not _is_worth_moving(evaluator, first, tries.best.step_s):
        return replace(first, certificate=replace(proved, bound_s=min(bound_s, first.step_s)))
    shortest_s = min(first.step_s, tries.best.step_s * (1 + tolerance))
    bring_back(tries, program, tries.leanest(shortest_s), shortest_s)
    best = tries.leanest(shortest_s)
    certificate = replace(proved, bound_s=min(bound_s, best.step_s))
    return replace(best, certificate=certificate, decisions=decisions(program, best, clock.until(timeout_s)))


def _is_worth_moving(evaluator: Evaluator, stays: DraftPlan, shorter_s: float) -> bool:
    """Return whether a step of `shorter_s` is a reason to move what fits where it is, in the draft that `stays`."""
    return evaluator.facts.problem.moves_what_fits and stays.step_s > shorter_s * (1 + _WORTH_MOVING)


def _rungs(evaluator: Evaluator) -> list[Candidate]:
    """All layers at one depth, what is stored kept or sent away, all buckets at the level where they start, at the
    furthest, or where they need the fewest bytes."""
    layers = evaluator.facts.layers
    depths = sorted({mode.depth for layer in layers for mode in layer.modes})
    modes = [
        tuple(deepest(layer, depth, leaves=leaves) for layer in layers) for leaves in (False, True) for depth in depths
    ] or [()]
    levels = (evaluator.facts.start_levels, evaluator.facts.furthest_levels, evaluator.min_memory_levels)
    return list(dict.fromkeys(Candidate(tuple(level), mode) for level in levels for mode in modes))


def _try_shortest(tries: Tries, program: Program, starts: Sequence[Candidate]) -> None:
    """Play the rung that the program says is the shortest of those that fit."""
    problem = tries.evaluator.facts.problem
    vectors = [(candidate, program.vector(candidate)) for candidate in starts]
    fitting = [
        (program.lower_s(x), candidate)
        for candidate, x in vectors
        if program.peak_bytes(x) <= problem.budget_bytes and program.host_bytes(x) <= problem.host_budget_bytes
    ]
    for lower_s, candidate in sorted(fitting):
        if lower_s >= tries.best.step_s or tries.try_candidate(candidate) is not None:
            return


def _searched(
    tries: Tries,
    program: Program,
    start: Priced,
    seeds: Sequence[Vector],
    others: Iterable[Candidate],
    solver_end: Deadline,
) -> float:
    """Try answers until one is good for the bound or none is left to try; return the bound in seconds."""
    bound_s = program.seconds(start.bound)
    candidates = program
    if tries.evaluator.facts.problem.cluster.num_ranks > 1 and not tries.is_good(bound_s):
        candidates = program.with_trips()
    if not tries.is_good(bound_s):
        _round(tries, candidates, start, seeds, bound_s)
    _try_rules(tries, program, others)
    if not tries.is_good(bound_s) and not program.is_large:
        bound_s = max(bound_s, _solve(tries, program, solver_end))
    if not tries.is_good(bound_s):
        flip(tries, candidates, bound_s)
        if program.has_streams and not tries.is_good(bound_s):
            tries.swap_streams()
    return bound_s


def _round(tries: Tries, program: Program, start: Priced, seeds: Sequence[Vector], bound_s: float) -> None:
    """Try the nearest whole answers of relaxed optima, until one is good for `bound_s`."""
    problem = tries.evaluator.facts.problem
    widest_bytes = max(bucket.flat_nbytes for bucket in tries.evaluator.facts.buckets)
    pool: list[Vector] = []
    free_bytes = 0
    shares = _FREE_SHARES if problem.cluster.num_ranks == 1 else _FREE_SHARES_OF_RANKS
    for share in shares if problem.cluster.h2d.overlaps_compute else (0.0,):
        more_bytes = -int(share * widest_bytes)
        found: Priced | None = start
        if share or program is not tries.program:
            found = priced(program, [start.x, *seeds], tries.deadline, more_bytes, _MOST_STALE)
        if found is None or program.seconds(found.bound) >= tries.best.step_s:
            continue
        pool.append(found.x)
        before_s = tries.best.step_s
        _try_nearest(tries, program, found.x, more_bytes)
        free_bytes = more_bytes if tries.best.step_s < before_s else free_bytes
        if tries.is_good(bound_s) or tries.is_over():
            return
    if program.has_streams:
        tries.swap_streams()
    # With the memory kept free that did best so far, copies are early enough for these answers too.
    for more_bytes in dict.fromkeys((free_bytes, 0)) if pool else ():
        if tries.is_good(bound_s) or tries.is_over():
            break
        _try_pool(tries, program, pool, more_bytes, bound_s)
    if program.has_streams and not tries.is_good(bound_s):
        tries.swap_streams()


def _try_nearest(tries: Tries, program: Program, x: Vector, more_bytes: int) -> None:
    """Play the nearest whole answer to the optimum x: by all rows, for it takes as few solves as plays."""
    candidates = list(rounded(program, x, tries.deadline, more_bytes=more_bytes))
    if not candidates:
        also = [program.vector(tries.best.candidate)]
        candidates = list(rounded(program, x, tries.deadline, more_bytes=more_bytes, also=also))
    if candidates:
        tries.try_candidate(candidates[-1].candidate)


def _try_pool(tries: Tries, program: Program, pool: Sequence[Vector], more_bytes: int, bound_s: float) -> None:
    """Play the whole answers over all options that the optima in `pool` and the best answer use, as they are found,
    with the streams that the program chooses too, until one is good for `bound_s`.

    Each is a good one, and the last is hardly better: GPT-2 20B on an A100 had a gap of 0.7 % after the second of eight
    solves of 1 to 2 s each, and of 0.8 % with the eighth alone.
    """
    x = np.max([*pool, program.vector(tries.best.candidate)], axis=0)
    for found in rounded(program, x, tries.deadline, more_bytes=more_bytes, streams_whole=True):
        if tries.try_candidate(found.candidate) is not None:
            tries.try_streams(found.candidate, found.streamed)
        if tries.is_good(bound_s):
            return


def _try_rules(tries: Tries, program: Program, others: Iterable[Candidate]) -> None:
    """Play those of `others` that may be shorter than the best, whatever they stream; also once the time is up."""
    all_buckets = range(len(tries.evaluator.facts.buckets))
    for candidate in others:
        lower_s = min(program.lower_s(program.vector(candidate, streamed)) for streamed in ((), all_buckets))
        if lower_s < tries.best.step_s:
            tries.try_candidate(candidate)


def _solve(tries: Tries, program: Program, deadline: Deadline) -> float:
    """Try whole solutions, best first, until nothing untried can be better; return the bound in seconds."""
    bound_s, since_s = 0.0, tries.best.step_s
    proved: dict[Candidate, float] = {}
    columns = _IDLE_STREAMED if program.has_streams else _IDLE_COLUMNS
    num_idle, max_idle, num_missed = 0, max(_MIN_IDLE, columns // program.num_choices), 0
    for candidate, rest_s in whole(program, deadline, tries.tolerance / 2):
        # Whatever is not yielded yet takes at least this; what was yielded, at least its own longest paths.
        bound_s = max(bound_s, min((rest_s, *(own_s for other, own_s in proved.items() if other != candidate))))
        num_missed = num_missed + 1 if tries.try_candidate(candidate) is None else 0
        # `lower_s` holds for what is streamed in x; what the rest takes holds for the first of it however streamed.
        own_s = rest_s if program.has_streams else program.lower_s(program.vector(candidate))
        proved[candidate] = max(proved.get(candidate, 0.0), own_s)
        # Layers that are alike have many answers that are: the program cannot tell which leaves room for prefetch.
        num_idle = num_idle + 1 if tries.best.step_s > since_s * (1 - tries.tolerance) else 0
        since_s = min(since_s, tries.best.step_s) if num_idle == 0 else since_s
        if tries.is_good(rest_s) or num_idle >= max_idle or num_missed >= _MOST_MISSES:
            break
    return bound_s


def _certificate(program: Program, start: Priced) -> Certificate:
    """What the relaxed optimum proves; asked before other rows come in, or one more GiB would not compare."""
    more = priced(program, [start.x], deadline_in(1.0), GIB, _MOST_STALE)
    bound_s = program.seconds(start.bound)
    return Certificate(
        bound_s=bound_s,
        binding=binding(program, start.x),
        gib_saves_s=None if more is None else max(0.0, bound_s - program.seconds(more.bound)),
    )
