"""The default planner, `milp`: search for the fastest plan, and prove a bound on the step time of every plan.

A candidate has one level per bucket, which says whether its parameters and its optimizer state are on the device or
off it (`search.space.buckets`), and one mode per layer, which says how its activations are treated
(`search.space.layers`). `search.reasons` turns the best candidate into a plan.

The search runs these stages in order, until the fastest simulated step is within the tolerance of the bound. In a large
MILP the tolerance grows with the number of simulated candidates (`Tries.is_good`).

    uniform     candidates with the same mode in every layer, as starting points
    counted     how many of like buckets and layers take each option; in large MILPs            `solver`
    bound       the relaxed optimum; columns and constraints are added to the MILP as needed            `solver`
    rounded     the nearest integral candidates, with several amounts of memory free for early copies     `solver`
    streamed    updates of the best candidate, streamed or not, bucket by bucket                   `Tries`
    pool        the best integral candidates over all options used by the relaxed optima
    rules       the candidates of the rule planners, so that the plan is never slower than any of them
    integral    integral optima, best first, each of which raises the bound; not in large MILPs        `solver`
    flips       candidates with one option changed from the best, as the MILP ranks them        `flip`

Each stage ends after a fixed number of simulations and solves, so the same problem gets the same plan on a slow and on
a fast machine, unless the clock ends the search.
"""

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

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
from elixir_compile.search.formulation.solver import (
    CountedMilp,
    Solution,
    decided,
    integral_candidates,
    priced,
    rounded,
)
from elixir_compile.search.outer import lowest
from elixir_compile.search.reasons import binding, decisions
from elixir_compile.search.space.buckets import Level
from elixir_compile.search.space.layers import modes_by_depth
from elixir_compile.search.transfers import best_draft, just_in_time, may_be_streamed

log = logging.getLogger("elixir_compile")

# ----------------------------------------------------------------------------------------------------------------------
# Simulate candidates, keep the draft plans that fit, and change the best of them an option at a time.


_MIN_SWAP_GAIN, _MIN_FLIP_GAIN = 1e-5, 1e-4
"""Swaps and flips with a smaller gain, as a share of the step, do not count."""
_MAX_SWAPS_SIMULATED, _MAX_SWAPS = 8, 64
"""The most swaps of streamed updates simulated in a round, and the most rounds."""
_GOOD_ENOUGH = ((9, 5e-3), (14, 1e-2))
"""(number, share): after so many simulated candidates the search of a large MILP ends if untried candidates can be
shorter by no more than this share of the step. Llama 7B on an RTX 4090 came to 0.3 % with its 7th candidate after 6 CPU
seconds, and to 0.2 % after 11; GPT-2 20B on an A100 to 0.9 % with its 8th after 9, and to 0.4 % with its 100th after
31; Llama 70B on 8 H100s to 1.3 % with its second after 8 and to 1.0 % after 14."""


@dataclass(slots=True, kw_only=True)
class Tries:
    """The draft plans of all candidates that were simulated and fit, and the best of them."""

    evaluator: Evaluator
    milp: Milp
    deadline: Deadline
    best: DraftPlan
    tolerance: float
    found: dict[Candidate, DraftPlan] = field(default_factory=dict)
    _num_streamed: int | None = None
    """The number of streamed updates of the best candidate when it was tried; the next trial starts near it."""

    def try_candidate(self, candidate: Candidate) -> DraftPlan | None:
        """Simulate `candidate` if it fits; return its draft plan, or None if it does not fit.

        The best draft plan is the one with the shortest step, then the one with the fewest host bytes.
        """
        if candidate not in self.found:
            evaluator = self.evaluator.at(candidate.modes)
            if not evaluator.fits(candidate.levels, ahead=0):
                return None

            def good_s(streamed: frozenset[int]) -> float:
                return self.milp.lower_s(self.milp.vector(candidate, streamed)) * (1 + self.tolerance)

            near = self._num_streamed
            draft = best_draft(evaluator, candidate.levels, self.best.step_s, good_s=good_s, near=near)
            if draft.step_s < self.best.step_s:
                self._num_streamed = len(draft.moves.streamed) or None
            self._keep(replace(draft, planner="milp"))
        return self.found[candidate]

    def try_streamed(self, candidate: Candidate, streamed: Collection[int]) -> None:
        """Simulate `candidate` with the updates of the buckets `streamed`, as far as the device has room for them.

        Do nothing if `candidate` was not tried before or does not fit.
        """
        draft = self.found.get(candidate)
        if draft is None:
            return
        evaluator = self.evaluator.at(candidate.modes)
        at_use = evaluator.at_use(candidate.levels)
        possible = at_use.streamed.union(may_be_streamed(evaluator, candidate.levels, at_use))
        chosen = at_use.streamed | possible.intersection(streamed)
        if chosen == draft.moves.streamed:
            return
        moves = just_in_time(evaluator, candidate.levels)._replace(streamed=chosen)
        step_s = evaluator.step_s(candidate.levels, moves)
        if step_s < draft.step_s:
            self._keep(replace(draft, moves=moves, step_s=step_s))

    def swap_streamed(self) -> None:
        """Stream the update of a bucket, or no longer stream it, as long as that shortens the step of the best draft.

        The swaps with the shortest paths by the MILP are simulated first.
        """
        candidate = self.best.candidate
        evaluator = self.evaluator.at(candidate.modes)
        possible = may_be_streamed(evaluator, candidate.levels, evaluator.at_use(candidate.levels))
        seen = {self.best.moves.streamed}
        for _ in range(_MAX_SWAPS if possible else 0):
            before_s = self.best.step_s
            now = self.best.moves.streamed
            swapped = {now ^ {i} for i in possible} - seen
            sets = [tuple(sorted(streamed)) for streamed in swapped]
            lower_s = self.milp.lower_each_s([self.milp.vector(candidate, streamed) for streamed in sets])
            ranked = sorted(zip(lower_s.tolist(), sets, strict=True))
            for least_s, streamed in ranked[:_MAX_SWAPS_SIMULATED]:
                if least_s >= before_s * (1 - _MIN_SWAP_GAIN) or self.deadline.is_over:
                    break
                seen.add(frozenset(streamed))
                moves = self.best.moves._replace(streamed=frozenset(streamed))
                step_s = evaluator.step_s(candidate.levels, moves)
                if step_s < before_s * (1 - _MIN_SWAP_GAIN):
                    self._keep(replace(self.best, moves=moves, step_s=step_s))
                    break
            if self.best.step_s == before_s:
                break

    def _keep(self, draft: DraftPlan) -> None:
        self.found[draft.candidate] = draft
        if (draft.step_s, self.host_bytes(draft)) < (self.best.step_s, self.host_bytes(self.best)):
            self.best = draft

    def host_bytes(self, draft: DraftPlan) -> int:
        """Return the host bytes of `draft`."""
        return self.evaluator.at(draft.modes).host_bytes(draft.levels)

    def is_good(self, bound_s: float) -> bool:
        """Return whether the step of the best draft plan is within the tolerance of `bound_s`.

        In a large MILP the tolerance grows with the number of simulated candidates.
        """
        enough = [share for number, share in _GOOD_ENOUGH if self.milp.is_large and len(self.found) >= number]
        return self.best.step_s <= bound_s * (1 + max([self.tolerance, *enough]))

    def with_fewest_host_bytes(self, limit_s: float) -> DraftPlan:
        """Return the draft plan with the fewest host bytes, of those with a step of at most `limit_s`.

        Their step is also within the tolerance of the best, so that no bucket moves for a smaller gain.
        """
        limit_s = min(limit_s, self.best.step_s * (1 + self.tolerance))
        equals = [draft for draft in self.found.values() if draft.step_s <= limit_s]
        return min(equals, key=lambda draft: (self.host_bytes(draft), draft.step_s))


_ROUNDING = 1e-9
"""Sums of seconds in another order differ by less than this share."""
_MAX_FLIPS, _MAX_FLIPS_LARGE, _MAX_ROUNDS = 20, 8, 16
"""The most flips in a round of a small and of a large MILP, and the most rounds. A round without a better draft plan
is the last. 1,600 simulated steps of GPT-2 20B on an A100 of 40 GB took 11 s and gained nothing."""
_MAX_BROUGHT_BACK, _MAX_BROUGHT_BACK_LARGE = 20, 8
"""The most candidates simulated by `bring_back` in a small and in a large MILP: 20 of Llama 7B took 1.4 of 9 s."""


def flip(tries: Tries, milp: Milp, bound_s: float) -> None:
    """Change the best candidate an option at a time, as long as the step gets shorter or the host bytes fewer.

    Stop if the best is good for `bound_s`. Each round simulates the candidates with the shortest paths by `milp`
    first, and begins anew if the step got shorter by `_MIN_FLIP_GAIN`. Candidates that do not fit by `milp` are
    left out.
    """
    seen: set[Candidate] = set()
    max_flips = _MAX_FLIPS_LARGE if milp.is_large else _MAX_FLIPS
    facts = tries.evaluator.facts
    for _ in range(_MAX_ROUNDS):
        before = tries.best
        base = before.candidate
        # The bytes of a changed candidate are those of the best plus the difference of two columns.
        live_bytes = milp.live_bytes(milp.vector(base))
        fitting: list[Candidate] = []
        for i, (chosen, options) in enumerate(zip(base.options, facts.options, strict=True)):
            now = milp.bytes_of[:, milp.choices[i, chosen]]
            for option in options:
                if option == chosen:
                    continue
                if tries.deadline.is_over:
                    return
                if (
                    float((live_bytes - now + milp.bytes_of[:, milp.choices[i, option]]).max())
                    > facts.problem.budget_bytes
                ):
                    continue
                changed = _changed(base, i, option)
                if facts.allows(changed.levels):
                    fitting.append(changed)
        lower_s = milp.lower_each_s([milp.vector(changed, before.moves.streamed) for changed in fitting]).tolist()
        ranked = sorted(zip(lower_s, fitting, strict=True), key=lambda entry: entry[0])
        promising = [changed for own_s, changed in ranked if own_s <= before.step_s * (1 + _ROUNDING)]
        for candidate in [changed for changed in promising if changed not in seen][:max_flips]:
            if tries.deadline.is_over or tries.is_good(bound_s):
                return
            seen.add(candidate)
            tries.try_candidate(candidate)
            if tries.best.step_s < before.step_s * (1 - _MIN_FLIP_GAIN):
                break
        if tries.best is before:
            return


def bring_back(tries: Tries, milp: Milp, draft: DraftPlan, limit_s: float) -> None:
    """Try `draft` with buckets moved back towards the device and layers kept, so that nothing moves without need.

    Each change is tried on top of the changes before it that left the step at `limit_s` or less.
    """
    limit_s = min(limit_s, tries.best.step_s * (1 + tries.tolerance))
    nearer = [
        (i, option)
        for i, (chosen, options) in enumerate(zip(draft.candidate.options, tries.evaluator.facts.options, strict=True))
        for option in options[: options.index(chosen)]
    ]
    max_tried = _MAX_BROUGHT_BACK_LARGE if milp.is_large else _MAX_BROUGHT_BACK
    candidate, num_tried, moved = draft.candidate, 0, set[int]()
    x = milp.vector(candidate, tries.best.moves.streamed)
    live_bytes = milp.live_bytes(x)
    for i, option in nearer:
        if i in moved or num_tried >= max_tried or tries.deadline.is_over:
            continue
        now = milp.choices[i, candidate.options[i]]
        more_bytes = milp.bytes_of[:, milp.choices[i, option]] - milp.bytes_of[:, now]
        tried = _changed(candidate, i, option)
        if float((live_bytes + more_bytes).max()) > tries.evaluator.facts.problem.budget_bytes:
            continue
        if milp.lower_s(milp.vector(tried, tries.best.moves.streamed)) > limit_s * (1 + _ROUNDING):
            continue
        num_tried += tried not in tries.found
        found = tries.try_candidate(tried)
        if found is not None and found.step_s <= limit_s:
            candidate = tried
            live_bytes = live_bytes + more_bytes
            moved.add(i)


def _changed(candidate: Candidate, i: int, option: int) -> Candidate:
    """Return `candidate` with `option` for bucket i, or, if i is at least the number of buckets, for a layer."""
    levels, modes = candidate
    if i < len(levels):
        return Candidate((*levels[:i], Level(option), *levels[i + 1 :]), modes)
    i -= len(levels)
    return Candidate(levels, (*modes[:i], option, *modes[i + 1 :]))


# ----------------------------------------------------------------------------------------------------------------------
# The stages of the search, in order.


TOLERANCE = 1e-3
"""The search ends if no untried candidate can be faster by more than this share of the step."""
_MIN_IDLE, _IDLE_COLUMNS, _IDLE_STREAMED = 12, 20_000, 6_000
"""The stage `integral` ends after `_IDLE_COLUMNS / columns` solutions in a row without a shorter step, but not before
`_MIN_IDLE`. MILPs with streamed updates use `_IDLE_STREAMED`: they have no constraint for a gather that waits because
it is early, so the rest of their gap never closes. GPT-2 124M with 6 GiB on an RTX 3090: half the seconds for the same
plan."""
_MAX_MISSES = 24
"""The stage `integral` also ends after so many solutions in a row that do not fit by the exact count: each of them
forbids a single candidate, and constraints against single candidates make the next solve longer. A small model under
`torch.autocast` at its smallest budget: 73 solves in 5 s, none of which fit."""
_SOLVER_SHARE, _SEARCH_SHARE = 0.5, 0.8
"""Shares of the time after which integral solves and all simulation end. The decisions get the rest."""
_FREE_SHARES, _FREE_SHARES_OF_RANKS = (0.0, 0.5, 1.0, 2.0), (1.0, 0.5, 0.25, 0.0)
"""Memory left free for early copies, in units of the largest bucket, in the order of the rounds. On several ranks every
use of a released bucket is a gather: most candidates without free memory do not fit, or wait for their gathers."""
_SLOWER = 1.2
"""On several ranks, a search that is not good at its end, and for which no y were decided, rounds once more, as if all
lanes but compute took so many times their seconds. Of candidates that are equally short by the paths, those whose lanes
have time left wait less."""
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
    part = milp
    if milp.is_large and not moves_nothing:
        part = decided(milp, tries.deadline, -int(_COUNTED_SHARES[0] * _widest_bytes(evaluator)))
        seeds += _try_counted(tries, CountedMilp(part), _COUNTED_SHARES[:1])
    start = priced(milp, seeds, tries.deadline)
    if start is None:
        _try_rules(tries, milp, () if moves_nothing else others)
        return replace(tries.best, decisions=decisions(milp, tries.best, clock.until(timeout_s)))
    proved = _certificate(milp, start)
    if moves_nothing and not _is_worth_moving(evaluator, first, proved.bound_s):
        return replace(first, certificate=replace(proved, bound_s=min(proved.bound_s, first.step_s)))
    bound_s = _search(tries, milp, part, start, seeds, others, clock.until(timeout_s * _SOLVER_SHARE))
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
                return replace(best_draft(own, levels), planner="milp")
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
        if bounds[-1] is not None and leanest(other).floor_bytes <= other.facts.problem.budget_bytes + GIB:
            bounds.append(relaxed_bound_s(other, made.prediction.step_s, deadline, GIB))
    return replace(made, gib_bound_s=lowest(bounds))


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
    """Return the x of each of `candidates`, after adding the constraints of its longest paths."""
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
    """Try `starts` that fit by the constraints of the MILP, from the shortest by its paths, until one of them fits."""
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
    part: Milp,
    start: Solution,
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
        _try_counted(tries, CountedMilp(part), _COUNTED_SHARES, bound_s)
    if tries.evaluator.facts.problem.cluster.num_ranks > 1 and not tries.is_good(bound_s):
        candidates = milp.with_trips()
        # With all y, also if some were decided: waits that are on no path differ. GPT-2 15B at batch 1 on two A100s of
        # 40 GB takes 2.14 s with all of them, and 2.31 s with those that were decided.
        if milp.is_large:
            _try_counted(tries, CountedMilp(candidates), _COUNTED_SHARES, bound_s)
    if not tries.is_good(bound_s):
        shares = _FREE_SHARES if candidates is milp else _FREE_SHARES_OF_RANKS
        _round(tries, candidates if part is milp else part, start, seeds, bound_s, shares)
    _try_rules(tries, milp, others)
    if not tries.is_good(bound_s) and not milp.is_large:
        bound_s = max(bound_s, _solve(tries, milp, solver_end))
    if not tries.is_good(bound_s):
        flip(tries, candidates, bound_s)
        if milp.has_streams and not tries.is_good(bound_s):
            tries.swap_streamed()
    if candidates is not milp and not tries.is_good(bound_s):
        # If y were decided, candidates with all y were not rounded yet: GPT-2 10B at batch 1 on four A100s of 40 GB
        # takes 0.593 s with them, and 0.607 s with slower lanes.
        last = milp.with_trips(_SLOWER) if part is milp else candidates
        _round(tries, last, start, seeds, bound_s, _FREE_SHARES_OF_RANKS[:1])
        if not tries.is_good(bound_s):
            flip(tries, candidates, bound_s)
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


def _round(
    tries: Tries, milp: Milp, start: Solution, seeds: Sequence[Vector], bound_s: float, shares: Sequence[float]
) -> None:
    """Try integral candidates near relaxed optima, with each of `shares` of the largest bucket left free, until the
    best is good for `bound_s`; then candidates over the options of all of these optima."""
    problem = tries.evaluator.facts.problem
    widest_bytes = _widest_bytes(tries.evaluator)
    pool: list[Vector] = []
    free_bytes = 0
    for share in shares if problem.cluster.h2d.overlaps_compute else (0.0,):
        more_bytes = -int(share * widest_bytes)
        found: Solution | None = start
        if share or milp is not tries.milp:
            found = priced(milp, [start.x, *seeds], tries.deadline, more_bytes, _MAX_STALE)
        if found is None or milp.seconds(found.bound) >= tries.best.step_s:
            continue
        pool.append(found.x)
        before_s = tries.best.step_s
        # The integral candidate nearest to the optimum: the last, which breaks no constraint.
        nearest = list(rounded(milp, found.x, tries.deadline, more_bytes=more_bytes))
        if not nearest:
            also = [milp.vector(tries.best.candidate)]
            nearest = list(rounded(milp, found.x, tries.deadline, more_bytes=more_bytes, also=also))
        if nearest:
            tries.try_candidate(nearest[-1].candidate)
        free_bytes = more_bytes if tries.best.step_s < before_s else free_bytes
        if tries.is_good(bound_s) or tries.deadline.is_over:
            return
    if milp.has_streams:
        tries.swap_streamed()
    # First with the free memory that gave the best candidate so far: copies are early enough with it.
    for more_bytes in dict.fromkeys((free_bytes, 0)) if pool else ():
        if tries.is_good(bound_s) or tries.deadline.is_over:
            break
        _try_pool(tries, milp, pool, more_bytes, bound_s)
    if milp.has_streams and not tries.is_good(bound_s):
        tries.swap_streamed()


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
        # Equal layers give many candidates with equal constraints in the MILP, which leave different memory for
        # prefetch.
        num_idle = num_idle + 1 if tries.best.step_s > since_s * (1 - tries.tolerance) else 0
        since_s = min(since_s, tries.best.step_s) if num_idle == 0 else since_s
        if tries.is_good(rest_s) or num_idle >= max_idle or num_missed >= _MAX_MISSES:
            break
    return bound_s


def _certificate(milp: Milp, start: Solution) -> Certificate:
    """Return the certificate of the relaxed optimum `start`.

    It is made before the search adds constraints to the MILP: they would raise the bound with one more GiB, not
    `start`'s.
    """
    more = priced(milp, [start.x], deadline_in(1.0), GIB, _MAX_STALE)
    return Certificate(
        bound_s=milp.seconds(start.bound),
        binding=binding(milp, start.x),
        gib_bound_s=None if more is None else milp.seconds(more.bound),
    )
