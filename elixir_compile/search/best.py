"""The default planner, `milp`: search for the fastest plan, and prove a bound on the step time of every plan.

A candidate has one level per bucket and one mode per layer. The search runs these stages in order, until the fastest
simulated step is within the tolerance of the bound. In a large MILP the tolerance grows with the number of
simulated candidates (`Tries.is_good`).

    uniform     candidates with the same mode in every layer, as starting points
    counted     how many of like buckets and layers take each option; in large MILPs            `solver`
    bound       the relaxed optimum; columns and rows are added to the MILP as needed            `solver`
    rounded     the nearest integral candidates, with several amounts of memory free for early copies     `solver`
    streamed    updates of the best candidate, streamed or not, bucket by bucket                   `Tries`
    pool        the best integral candidates over all options used by the relaxed optima
    rules       the candidates of the rule planners, so that the plan is never slower than any of them
    integral    integral optima, best first, each of which raises the bound; not in large MILPs        `solver`
    flips       candidates with one option changed from the best, as the MILP ranks them        `tries.flip`

Each stage ends after a fixed number of simulations and solves, so the same problem gets the same plan on a slow and on
a fast machine, unless the clock ends the search.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from elixir_compile.base.units import GIB, format_s
from elixir_compile.ir import Plan
from elixir_compile.search.evaluator import (
    Candidate,
    Certificate,
    Clock,
    Deadline,
    DraftPlan,
    Evaluator,
    deadline_in,
    leanest,
)
from elixir_compile.search.formulation.milp import Milp, Vector
from elixir_compile.search.formulation.solver import CountedMilp, Priced, integral_candidates, priced, rounded
from elixir_compile.search.reasons import binding, decisions
from elixir_compile.search.space.layers import modes_by_depth
from elixir_compile.search.transfers import best_moves
from elixir_compile.search.tries import Tries, bring_back, flip

log = logging.getLogger("elixir_compile")

TOLERANCE = 1e-3
"""The search ends if no untried candidate can be faster by more than this share of the step."""
_MIN_IDLE, _IDLE_COLUMNS, _IDLE_STREAMED = 12, 20_000, 6_000
"""The stage `integral` ends after `_IDLE_COLUMNS / columns` solutions in a row without a shorter step, but not before
`_MIN_IDLE`. MILPs with streamed updates use `_IDLE_STREAMED`: they have no row for a gather that waits because it is
early, so the rest of their gap never closes. GPT-2 124M with 6 GiB on an RTX 3090: half the seconds for the same
plan."""
_MAX_MISSES = 24
"""The stage `integral` also ends after so many solutions in a row that do not fit by the exact count: each of them
forbids a single candidate, and rows against single candidates make the next solve longer. A small model under
`torch.autocast` at its smallest budget: 73 solves in 5 s, none of which fit."""
_SOLVER_SHARE, _SEARCH_SHARE = 0.5, 0.8
"""Shares of the time after which integral solves and all simulation end. The decisions get the rest."""
_FREE_SHARES, _FREE_SHARES_OF_RANKS = (0.0, 0.5, 1.0, 2.0), (1.0, 0.5, 0.25, 0.0)
"""Memory left free for early copies, in units of the largest bucket, in the order of the rounds. On several ranks every
use of a released bucket is a gather: most candidates without free memory do not fit, or wait for their gathers."""
_COUNTED_SHARES = (1.0, 2.0, 0.5, 0.0, 3.0)
"""The same for candidates from counts: with the first, most candidates fit and wait for few copies."""
_COUNTED_S = 5.0
"""Limit in seconds of each attempt to find a first draft plan from counts; 0.5 s is usual."""
_MAX_POOL_ROUNDS, _MAX_POOL_ROUNDS_LARGE = 8, 2
"""Solves over the pool, of a small and of a large MILP, with each amount of free memory. A solve takes 3 s for GPT-2
10B on an H100, and 14 more of them shortened its step by 0.2 %."""
_MAX_STALE = 2
"""Solves in a row without a higher bound after which a relaxed optimum is good enough to be rounded."""
_WORTH_MOVING = 0.01
"""If everything fits where it is, a plan with moves must be shorter by more than this share of the step."""


def place_best(
    evaluator: Evaluator,
    first: DraftPlan,
    others: Iterable[Candidate],
    timeout_s: float,
    tolerance: float = TOLERANCE,
    clock: Clock | None = None,
) -> DraftPlan:
    """Return the best draft plan found within `timeout_s` seconds of `clock`, or of a new clock, with its certificate.

    `first` is a draft plan that fits. `others` are candidates of other planners, which need not fit. They are computed
    as they are read, and not at all if `first` moves nothing and no plan can be shorter by enough to move anything.
    """
    if not evaluator.facts.buckets:
        certificate = Certificate(bound_s=first.step_s, binding=(), gib_bound_s=first.step_s)
        return replace(first, certificate=certificate)
    # The profile of a machine is not so exact that a slightly faster update elsewhere is a reason to move a bucket.
    # The start levels meet a quota by the first buckets, and others may meet it in a shorter step.
    is_start = first.levels == evaluator.facts.start_levels and first.modes == evaluator.facts.modes
    moves_nothing = is_start and not evaluator.facts.quotas
    clock = Clock() if clock is None else clock
    milp = Milp(evaluator, max(first.step_s, 1e-12))
    first = replace(first, planner="milp")
    tries = Tries(
        evaluator=evaluator,
        milp=milp,
        deadline=clock.until(timeout_s * _SEARCH_SHARE),
        best=first,
        tolerance=tolerance,
        found={first.candidate: first},
    )
    starts = _uniform_candidates(evaluator)
    if not moves_nothing:
        _try_shortest(tries, milp, starts)
    seeds = _seeds(milp, dict.fromkeys((first.candidate, tries.best.candidate, *starts)))
    if milp.is_large and not moves_nothing:
        seeds += _try_counted(tries, CountedMilp(milp), _COUNTED_SHARES[:1])
    start = priced(milp, seeds, tries.deadline)
    if start is None:
        _try_rules(tries, milp, () if moves_nothing else others)
        return replace(tries.best, decisions=decisions(milp, tries.best, clock.until(timeout_s)))
    proved = _certificate(milp, start)
    if moves_nothing and not _is_worth_moving(evaluator, first, proved.bound_s):
        return replace(first, certificate=replace(proved, bound_s=min(proved.bound_s, first.step_s)))
    bound_s = _search(tries, milp, start, seeds, others, clock.until(timeout_s * _SOLVER_SHARE))
    log.debug("searched %s in %s", evaluator.facts.problem.name, format_s(clock.spent_s))
    if moves_nothing and not _is_worth_moving(evaluator, first, tries.best.step_s, bound_s):
        return replace(first, certificate=replace(proved, bound_s=min(bound_s, first.step_s)))
    limit_s = min(first.step_s, tries.best.step_s * (1 + tolerance))
    bring_back(tries, milp, tries.with_fewest_host_bytes(limit_s), limit_s)
    best = tries.with_fewest_host_bytes(limit_s)
    certificate = replace(proved, bound_s=min(bound_s, best.step_s))
    return replace(best, certificate=certificate, decisions=decisions(milp, best, clock.until(timeout_s)))


def counted_draft(evaluator: Evaluator) -> DraftPlan | None:
    """Return a draft plan from counts of options, or None if no counts give a candidate that fits."""
    milp = Milp(evaluator, max(evaluator.step_s(evaluator.facts.furthest_levels), 1e-12))
    counted, widest_bytes = CountedMilp(milp), _widest_bytes(evaluator)
    for share in _COUNTED_SHARES[:2]:
        for spread in counted.optima(deadline_in(_COUNTED_S), -int(share * widest_bytes)):
            levels, modes = spread.candidate
            own = evaluator.at(modes)
            if own.fits(levels, ahead=0):
                moves, step_s = best_moves(own, levels)
                return DraftPlan(levels=levels, modes=modes, moves=moves, step_s=step_s, decisions=(), planner="milp")
    return None


def relaxed_bound_s(evaluator: Evaluator, step_s: float, deadline: Deadline, more_bytes: int = 0) -> float | None:
    """Return the bound of the relaxed optimum with `more_bytes` of device memory, without a search; None if the
    deadline came first.

    `step_s` are the seconds of a known step, as a scale.
    """
    if not evaluator.facts.buckets:
        return evaluator.step_s(evaluator.facts.start_levels)
    milp = Milp(evaluator, max(step_s, 1e-12))
    start = priced(milp, _seeds(milp, _uniform_candidates(evaluator)), deadline, more_bytes)
    return None if start is None else milp.seconds(start.bound)


def with_gib_bound_of(made: Plan, others: Iterable[Evaluator], deadline: Deadline) -> Plan:
    """Return `made` with a bound with one more GiB of device memory that holds for the problems of `others` too.

    It is None if the bound of one of them is not known at the deadline. Problems whose smallest peak does not fit with
    one more GiB have no plan.
    """
    bounds = [made.gib_bound_s]
    for other in others:
        if bounds[-1] is None:
            break
        if leanest(other).floor_bytes <= other.facts.problem.budget_bytes + GIB:
            bounds.append(relaxed_bound_s(other, made.prediction.step_s, deadline, GIB))
    known = [bound_s for bound_s in bounds if bound_s is not None]
    return replace(made, gib_bound_s=min(known) if len(known) == len(bounds) else None)


def _is_worth_moving(evaluator: Evaluator, first: DraftPlan, shorter_s: float, bound_s: float | None = None) -> bool:
    """Return whether a step of `shorter_s` is a reason not to take `first`, which moves nothing and fits.

    It is one if it is shorter by enough, or if it is that close to the bound `bound_s` and `first` is not: what is
    kept in place is proved to be as near to the best plan as what is moved.
    """
    if not evaluator.facts.problem.moves_what_fits:
        return False
    is_proved = bound_s is not None and shorter_s * (1 - _WORTH_MOVING) <= bound_s < first.step_s * (1 - _WORTH_MOVING)
    return is_proved or first.step_s > shorter_s * (1 + _WORTH_MOVING)


def _seeds(milp: Milp, candidates: Iterable[Candidate]) -> list[Vector]:
    """Return the x of each of `candidates`, after adding the rows of its longest paths."""
    seeds = [milp.vector(candidate) for candidate in candidates]
    for seed in seeds:
        milp.add_paths(seed)
    return seeds


def _uniform_candidates(evaluator: Evaluator) -> list[Candidate]:
    """Return each of the uniform modes, with all buckets at their start level, their furthest level, or the level with
    the smallest peak."""
    modes = list(modes_by_depth(evaluator.facts.layers)) or [()]
    levels = (evaluator.facts.start_levels, evaluator.facts.furthest_levels, evaluator.min_memory_levels)
    return list(dict.fromkeys(Candidate(tuple(level), mode) for level in levels for mode in modes))


def _try_shortest(tries: Tries, milp: Milp, starts: Sequence[Candidate]) -> None:
    """Try `starts` that fit by the rows of the MILP, from the shortest by its paths, until one of them fits."""
    problem = tries.evaluator.facts.problem
    vectors = [(candidate, milp.vector(candidate)) for candidate in starts]
    fitting = [
        (milp.lower_s(x), candidate)
        for candidate, x in vectors
        if milp.peak_bytes(x) <= problem.budget_bytes and milp.host_bytes(x) <= problem.host_budget_bytes
    ]
    for lower_s, candidate in sorted(fitting):
        if lower_s >= tries.best.step_s or tries.try_candidate(candidate) is not None:
            return


def _search(
    tries: Tries,
    milp: Milp,
    start: Priced,
    seeds: Sequence[Vector],
    others: Iterable[Candidate],
    solver_end: Deadline,
) -> float:
    """Try candidates until the best is good for the bound, or all stages have ended; return the bound in seconds.

    Integral solves end at `solver_end`.
    """
    bound_s = milp.seconds(start.bound)
    candidates = milp
    if milp.is_large and not tries.is_good(bound_s):
        _try_counted(tries, CountedMilp(milp), _COUNTED_SHARES, bound_s)
    if tries.evaluator.facts.problem.cluster.num_ranks > 1 and not tries.is_good(bound_s):
        candidates = milp.with_trips()
        if milp.is_large:
            _try_counted(tries, CountedMilp(candidates), _COUNTED_SHARES, bound_s)
    if not tries.is_good(bound_s):
        _round(tries, candidates, start, seeds, bound_s)
    _try_rules(tries, milp, others)
    if not tries.is_good(bound_s) and not milp.is_large:
        bound_s = max(bound_s, _solve(tries, milp, solver_end))
    if not tries.is_good(bound_s):
        flip(tries, candidates, bound_s)
        if milp.has_streams and not tries.is_good(bound_s):
            tries.swap_streamed()
    return bound_s


def _try_counted(
    tries: Tries, counted: CountedMilp, free_shares: Sequence[float], bound_s: float = 0.0
) -> list[Vector]:
    """Try the candidates of `counted` with each of `free_shares` of the largest bucket left free, until the best is
    good for `bound_s`; then with other streamed updates. Return the optima over counts."""
    widest_bytes = _widest_bytes(tries.evaluator)
    found: list[Vector] = []
    for share in free_shares:
        for spread in counted.optima(tries.deadline, -int(share * widest_bytes)):
            found.append(spread.x)
            if tries.try_candidate(spread.candidate) is not None:
                tries.try_streamed(spread.candidate, spread.streamed)
            if tries.is_good(bound_s):
                return found
    tries.swap_streamed()
    return found


def _round(tries: Tries, milp: Milp, start: Priced, seeds: Sequence[Vector], bound_s: float) -> None:
    """Try integral candidates near relaxed optima, each with another amount of memory left free, until the best is good
    for `bound_s`; then candidates over the options of all of these optima."""
    problem = tries.evaluator.facts.problem
    widest_bytes = _widest_bytes(tries.evaluator)
    pool: list[Vector] = []
    free_bytes = 0
    shares = _FREE_SHARES if problem.cluster.num_ranks == 1 else _FREE_SHARES_OF_RANKS
    for share in shares if problem.cluster.h2d.overlaps_compute else (0.0,):
        more_bytes = -int(share * widest_bytes)
        found: Priced | None = start
        if share or milp is not tries.milp:
            found = priced(milp, [start.x, *seeds], tries.deadline, more_bytes, _MAX_STALE)
        if found is None or milp.seconds(found.bound) >= tries.best.step_s:
            continue
        pool.append(found.x)
        before_s = tries.best.step_s
        _try_nearest(tries, milp, found.x, more_bytes)
        free_bytes = more_bytes if tries.best.step_s < before_s else free_bytes
        if tries.is_good(bound_s) or tries.is_over():
            return
    if milp.has_streams:
        tries.swap_streamed()
    # First with the free memory that gave the best candidate so far: copies are early enough with it.
    for more_bytes in dict.fromkeys((free_bytes, 0)) if pool else ():
        if tries.is_good(bound_s) or tries.is_over():
            break
        _try_pool(tries, milp, pool, more_bytes, bound_s)
    if milp.has_streams and not tries.is_good(bound_s):
        tries.swap_streamed()


def _try_nearest(tries: Tries, milp: Milp, x: Vector, more_bytes: int) -> None:
    """Try the integral candidate nearest to the optimum x: the last from `rounded`, which breaks no row."""
    candidates = list(rounded(milp, x, tries.deadline, more_bytes=more_bytes))
    if not candidates:
        also = [milp.vector(tries.best.candidate)]
        candidates = list(rounded(milp, x, tries.deadline, more_bytes=more_bytes, also=also))
    if candidates:
        tries.try_candidate(candidates[-1].candidate)


def _try_pool(tries: Tries, milp: Milp, pool: Sequence[Vector], more_bytes: int, bound_s: float) -> None:
    """Try each integral candidate over the options used by the optima in `pool` and by the best candidate, until the
    best is good for `bound_s`. Each is also tried with the streamed updates of the MILP.

    All of them are tried because the last is hardly better than the first: GPT-2 20B on an A100 had a gap of 0.7 %
    after the second of eight solves of 1 to 2 s each, and of 0.8 % with the eighth alone.
    """
    x = np.max([*pool, milp.vector(tries.best.candidate)], axis=0)
    max_rounds = _MAX_POOL_ROUNDS_LARGE if milp.is_large else _MAX_POOL_ROUNDS
    for found in rounded(milp, x, tries.deadline, more_bytes=more_bytes, integral_streams=True, max_rounds=max_rounds):
        if tries.try_candidate(found.candidate) is not None:
            tries.try_streamed(found.candidate, found.streamed)
        if tries.is_good(bound_s):
            return


def _widest_bytes(evaluator: Evaluator) -> int:
    """Return the bytes of the largest bucket."""
    return max(bucket.flat_nbytes for bucket in evaluator.facts.buckets)


def _try_rules(tries: Tries, milp: Milp, others: Iterable[Candidate]) -> None:
    """Try the candidates in `others` that may be shorter than the best with some updates streamed.

    It runs even if the time is up, so that the result is never slower than a rule planner.
    """
    all_buckets = range(len(tries.evaluator.facts.buckets))
    for candidate in others:
        lower_s = min(milp.lower_s(milp.vector(candidate, streamed)) for streamed in ((), all_buckets))
        if lower_s < tries.best.step_s:
            tries.try_candidate(candidate)


def _solve(tries: Tries, milp: Milp, deadline: Deadline) -> float:
    """Try integral solutions, best first, until no untried candidate can be better; return the bound in seconds."""
    bound_s, since_s = 0.0, tries.best.step_s
    proved: dict[Candidate, float] = {}
    columns = _IDLE_STREAMED if milp.has_streams else _IDLE_COLUMNS
    num_idle, max_idle, num_missed = 0, max(_MIN_IDLE, columns // milp.num_choices), 0
    for candidate, rest_s in integral_candidates(milp, deadline, tries.tolerance / 2):
        # A candidate not yielded before takes at least `rest_s`; a candidate yielded before, its own longest paths.
        bound_s = max(bound_s, min((rest_s, *(own_s for other, own_s in proved.items() if other != candidate))))
        num_missed = num_missed + 1 if tries.try_candidate(candidate) is None else 0
        # `lower_s` holds for a single choice of streamed updates; `rest_s` holds for this candidate with any choice.
        own_s = rest_s if milp.has_streams else milp.lower_s(milp.vector(candidate))
        proved[candidate] = max(proved.get(candidate, 0.0), own_s)
        # Equal layers give many candidates with equal rows in the MILP, which leave different memory for prefetch.
        num_idle = num_idle + 1 if tries.best.step_s > since_s * (1 - tries.tolerance) else 0
        since_s = min(since_s, tries.best.step_s) if num_idle == 0 else since_s
        if tries.is_good(rest_s) or num_idle >= max_idle or num_missed >= _MAX_MISSES:
            break
    return bound_s


def _certificate(milp: Milp, start: Priced) -> Certificate:
    """Return the certificate of the relaxed optimum `start`.

    It is made before the search adds rows to the MILP: they would raise the bound with one more GiB, not `start`'s.
    """
    more = priced(milp, [start.x], deadline_in(1.0), GIB, _MAX_STALE)
    return Certificate(
        bound_s=milp.seconds(start.bound),
        binding=binding(milp, start.x),
        gib_bound_s=None if more is None else milp.seconds(more.bound),
    )
