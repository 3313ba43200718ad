"""Simulate candidates, keep the draft plans that fit, and change the best of them an option at a time."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from elixir_compile.search.evaluator import Candidate, Deadline, DraftPlan, Evaluator
from elixir_compile.search.formulation.milp import Milp
from elixir_compile.search.space.buckets import Level
from elixir_compile.search.transfers import best_moves, just_in_time, may_be_streamed

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
            good_s, near = self._good_s(candidate), self._num_streamed
            moves, step_s = best_moves(evaluator, candidate.levels, self.best.step_s, good_s=good_s, near=near)
            if step_s < self.best.step_s:
                self._num_streamed = len(moves.streamed) or None
            self._keep(
                DraftPlan(
                    levels=candidate.levels,
                    modes=candidate.modes,
                    moves=moves,
                    step_s=step_s,
                    decisions=(),
                    planner="milp",
                )
            )
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
                if least_s >= before_s * (1 - _MIN_SWAP_GAIN) or self.is_over():
                    break
                seen.add(frozenset(streamed))
                moves = self.best.moves._replace(streamed=frozenset(streamed))
                step_s = evaluator.step_s(candidate.levels, moves)
                if step_s < before_s * (1 - _MIN_SWAP_GAIN):
                    self._keep(replace(self.best, moves=moves, step_s=step_s))
                    break
            if self.best.step_s == before_s:
                break

    def _lower_s(self, candidate: Candidate, streamed: Collection[int]) -> float:
        return self.milp.lower_s(self.milp.vector(candidate, streamed))

    def _good_s(self, candidate: Candidate) -> Callable[[frozenset[int]], float]:
        return lambda streamed: self._lower_s(candidate, streamed) * (1 + self.tolerance)

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

    def is_over(self) -> bool:
        """Return whether the time is up."""
        return self.deadline.is_over

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
    for _ in range(_MAX_ROUNDS):
        before = tries.best
        ranked = sorted(_promising(tries, milp, before, before.step_s), key=lambda entry: entry[0])
        for candidate in [candidate for _, candidate in ranked if candidate not in seen][:max_flips]:
            if tries.is_over() or tries.is_good(bound_s):
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
        for i, options in enumerate(_options(tries))
        for option in options[: options.index(_option(draft.candidate, i))]
    ]
    max_tried = _MAX_BROUGHT_BACK_LARGE if milp.is_large else _MAX_BROUGHT_BACK
    candidate, num_tried, moved = draft.candidate, 0, set[int]()
    x = milp.vector(candidate, tries.best.moves.streamed)
    live_bytes = milp.live_bytes(x)
    for i, option in nearer:
        if i in moved or num_tried >= max_tried or tries.is_over():
            continue
        now = milp.choices[i, _option(candidate, i)]
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


def _promising(tries: Tries, milp: Milp, base: DraftPlan, limit_s: float) -> list[tuple[float, Candidate]]:
    """Return each candidate with one option changed from `base` that may fit with a step of at most `limit_s`.

    Each comes after its lower bound in seconds. Its bytes are the bytes of `base` plus the difference of two columns.
    """
    candidate, streamed = base.candidate, base.moves.streamed
    budget_bytes = tries.evaluator.facts.problem.budget_bytes
    live_bytes = milp.live_bytes(milp.vector(candidate))
    fitting: list[Candidate] = []
    for i, options in enumerate(_options(tries)):
        now = milp.bytes_of[:, milp.choices[i, _option(candidate, i)]]
        for option in options:
            if option == _option(candidate, i):
                continue
            if tries.is_over():
                return []
            if float((live_bytes - now + milp.bytes_of[:, milp.choices[i, option]]).max()) > budget_bytes:
                continue
            changed = _changed(candidate, i, option)
            if tries.evaluator.facts.allows(changed.levels):
                fitting.append(changed)
    lower_s = milp.lower_each_s([milp.vector(changed, streamed) for changed in fitting])
    pairs = zip(lower_s.tolist(), fitting, strict=True)
    return [(own_s, changed) for own_s, changed in pairs if own_s <= limit_s * (1 + _ROUNDING)]


def _options(tries: Tries) -> list[Sequence[int]]:
    """Return the levels of each bucket, then the modes of each layer, from the option that moves nothing on."""
    facts = tries.evaluator.facts
    return [*facts.choices, *(range(len(layer.modes)) for layer in facts.layers)]


def _option(candidate: Candidate, i: int) -> int:
    return (*candidate.levels, *candidate.modes)[i]


def _changed(candidate: Candidate, i: int, option: int) -> Candidate:
    """Return `candidate` with `option` for bucket i, or, if i is at least the number of buckets, for a layer."""
    levels, modes = candidate
    if i < len(levels):
        return Candidate((*levels[:i], Level(option), *levels[i + 1 :]), modes)
    i -= len(levels)
    return Candidate(levels, (*modes[:i], option, *modes[i + 1 :]))
