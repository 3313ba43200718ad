"""What a search has played so far, and the neighbours of its best candidate."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from elixir_compile.search.candidate import Candidate, DraftPlan
from elixir_compile.search.clock import Deadline
from elixir_compile.search.evaluator import Evaluator
from elixir_compile.search.formulation.program import Program
from elixir_compile.search.heuristics.streaming import best_moves, may_be_streamed
from elixir_compile.search.heuristics.transfers import just_in_time
from elixir_compile.search.space.levels import Level

_LEAST_GAIN = 1e-5
"""A swap of streams that shortens the step by less is none."""
_MOST_SWAPS_PLAYED, _MOST_SWAPS = 8, 64
"""So many swaps are played for each that is made, and so many are made."""
_GOOD_ENOUGH = ((6, 5e-3), (8, 1e-2))
"""A large program is searched until untried answers can be shorter by no more than such a share of the step, once so
many answers were played. Llama 7B on an RTX 4090 came to 0.3 % with its 7th answer after 6 CPU seconds, and to 0.2 %
after 11; GPT-2 20B on an A100 to 0.9 % with its 8th after 9, and to 0.4 % with its 100th after 31; Llama 70B on 8 H100s
to 1.3 % with its second after 8 and to 1.0 % after 14."""


@dataclass(slots=True, kw_only=True)
class Tries:
    """The answers of one problem that were played and fit."""

    evaluator: Evaluator
    program: Program
    deadline: Deadline
    best: DraftPlan
    tolerance: float
    found: dict[Candidate, DraftPlan] = field(default_factory=dict)
    _num_streamed: int | None = None
    """How many of the updates that are needed first the best answer streamed when it was tried."""

    def try_candidate(self, candidate: Candidate) -> DraftPlan | None:
        """Play `answer`, if it fits, and keep it if it is the best so far: the shortest, then the fewest bytes on the
        host. Return its draft, None if it does not fit."""
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

    def try_streams(self, candidate: Candidate, streamed: Collection[int]) -> None:
        """Play `answer`, which was tried, with these updates streamed, as far as the device has room for them."""
        draft = self.found.get(candidate)
        if draft is None:
            return
        evaluator = self.evaluator.at(candidate.modes)
        at_use = evaluator.at_use(candidate.levels)
        room = at_use.streamed.union(may_be_streamed(evaluator, candidate.levels, at_use))
        chosen = at_use.streamed | room.intersection(streamed)
        if chosen == draft.moves.streamed:
            return
        moves = just_in_time(evaluator, candidate.levels)._replace(streamed=chosen)
        step_s = evaluator.step_s(candidate.levels, moves)
        if step_s < draft.step_s:
            self._keep(replace(draft, moves=moves, step_s=step_s))

    def swap_streams(self) -> None:
        """Stream the update of one bucket more or less of the best draft as long as that makes its step shorter: those
        tried first are those that the program says are the shortest."""
        candidate = self.best.candidate
        evaluator = self.evaluator.at(candidate.modes)
        room = may_be_streamed(evaluator, candidate.levels, evaluator.at_use(candidate.levels))
        seen = {self.best.moves.streamed}
        for _ in range(_MOST_SWAPS if room else 0):
            before_s = self.best.step_s
            now = self.best.moves.streamed
            swapped = {now ^ {i} for i in room} - seen
            ranked = sorted((self._lower_s(candidate, one), tuple(sorted(one))) for one in swapped)
            for lower_s, one in ranked[:_MOST_SWAPS_PLAYED]:
                if lower_s >= before_s * (1 - _LEAST_GAIN) or self.is_over():
                    break
                seen.add(frozenset(one))
                moves = self.best.moves._replace(streamed=frozenset(one))
                step_s = evaluator.step_s(candidate.levels, moves)
                if step_s < before_s * (1 - _LEAST_GAIN):
                    self._keep(replace(self.best, moves=moves, step_s=step_s))
                    break
            if self.best.step_s == before_s:
                break

    def _lower_s(self, candidate: Candidate, streamed: Collection[int]) -> float:
        return self.program.lower_s(self.program.vector(candidate, streamed))

    def _good_s(self, candidate: Candidate) -> Callable[[frozenset[int]], float]:
        return lambda streamed: self._lower_s(candidate, streamed) * (1 + self.tolerance)

    def _keep(self, draft: DraftPlan) -> None:
        self.found[draft.candidate] = draft
        if (draft.step_s, self.host_bytes(draft)) < (self.best.step_s, self.host_bytes(self.best)):
            self.best = draft

    def host_bytes(self, draft: DraftPlan) -> int:
        """Return the bytes that the host holds under `draft`."""
        return self.evaluator.at(draft.modes).host_bytes(draft.levels)

    def is_good(self, bound_s: float) -> bool:
        """Return whether steps of `bound_s` or more are no better than the best, but for the tolerance: in a large
        program it grows with the answers that were played."""
        enough = [share for played, share in _GOOD_ENOUGH if self.program.is_large and len(self.found) >= played]
        return self.best.step_s <= bound_s * (1 + max([self.tolerance, *enough]))

    def is_over(self) -> bool:
        """Return whether the time is up."""
        return self.deadline.is_over

    def leanest(self, longest_s: float) -> DraftPlan:
        """Return the draft with the fewest bytes on the host among those that are as good as the best, and no longer
        than `longest_s`: a move for less than the tolerance is none."""
        limit_s = min(longest_s, self.best.step_s * (1 + self.tolerance))
        equals = [draft for draft in self.found.values() if draft.step_s <= limit_s]
        return min(equals, key=lambda draft: (self.host_bytes(draft), draft.step_s))


_ROUNDING = 1e-9
"""Sums of seconds in another order differ by less than this share."""
_MOST_FLIPS, _MOST_ROUNDS, _LEAST_GAIN = 20, 16, 1e-4
"""Flips played in a round; another round follows one that made the step shorter by this share, or, where an answer has
no more neighbours than that, by any."""
_MOST_BROUGHT_BACK, _MOST_OF_LARGE = 20, 8
"""Answers tried, of a small and of a large program: 20 of Llama 7B took 1.4 of 9 s."""


def flip(tries: Tries, program: Program, bound_s: float) -> None:
    """Give single buckets and layers other options as long as that makes the step shorter, or the host emptier, until
    the step is good for `bound_s`.

    `program` ranks them: by the paths of the best draft with one option changed, and only if its bytes fit.
    """
    seen: set[Candidate] = set()
    for _ in range(_MOST_ROUNDS):
        before = tries.best
        hopeful = sorted(_hopeful(tries, program, before, before.step_s), key=lambda one: one[0])
        for _, candidate in [one for one in hopeful if one[1] not in seen][:_MOST_FLIPS]:
            if tries.is_over() or tries.is_good(bound_s):
                return
            seen.add(candidate)
            tries.try_candidate(candidate)
            if tries.best.step_s < before.step_s * (1 - _LEAST_GAIN):
                break
        if tries.best is before:
            return


def bring_back(tries: Tries, program: Program, draft: DraftPlan, longest_s: float) -> None:
    """Try to move single buckets of `draft` back towards the device, and to keep single layers: what need not move
    stays."""
    limit_s = min(longest_s, tries.best.step_s * (1 + tries.tolerance))
    nearer = [
        (draft_i, option)
        for draft_i, options in enumerate(_options(tries))
        for option in options[: options.index(_option(draft.candidate, draft_i))]
    ]
    most = _MOST_OF_LARGE if program.is_large else _MOST_BROUGHT_BACK
    candidate, num_tried, moved = draft.candidate, 0, set[int]()
    x = program.vector(candidate, tries.best.moves.streamed)
    live_bytes = program.live_bytes(x)
    for i, option in nearer:
        if i in moved or num_tried >= most or tries.is_over():
            continue
        now = program.choices[i, _option(candidate, i)]
        more_bytes = program.bytes_of[:, program.choices[i, option]] - program.bytes_of[:, now]
        tried = _changed(candidate, i, option)
        if float((live_bytes + more_bytes).max()) > tries.evaluator.facts.problem.budget_bytes:
            continue
        if program.lower_s(program.vector(tried, tries.best.moves.streamed)) > limit_s * (1 + _ROUNDING):
            continue
        num_tried += tried not in tries.found
        found = tries.try_candidate(tried)
        if found is not None and found.step_s <= limit_s:
            candidate = tried
            live_bytes = live_bytes + more_bytes
            moved.add(i)


def _hopeful(tries: Tries, program: Program, base: DraftPlan, limit_s: float) -> Iterator[tuple[float, Candidate]]:
    """Yield (seconds at least, candidate) of every neighbour of `base` that may fit and be no longer than `limit_s`.

    Bytes are those of `base` and the difference of two columns.
    """
    candidate, streamed = base.candidate, base.moves.streamed
    budget_bytes = tries.evaluator.facts.problem.budget_bytes
    live_bytes = program.live_bytes(program.vector(candidate))
    for i, options in enumerate(_options(tries)):
        now = program.bytes_of[:, program.choices[i, _option(candidate, i)]]
        for option in options:
            if option == _option(candidate, i):
                continue
            if tries.is_over():
                return
            if float((live_bytes - now + program.bytes_of[:, program.choices[i, option]]).max()) > budget_bytes:
                continue
            changed = _changed(candidate, i, option)
            lower_s = program.lower_s(program.vector(changed, streamed))
            if lower_s <= limit_s * (1 + _ROUNDING):
                yield lower_s, changed


def _options(tries: Tries) -> list[Sequence[int]]:
    """The options of every bucket, then of every layer, from the one that changes the least on."""
    facts = tries.evaluator.facts
    return [*facts.choices, *(range(len(layer.modes)) for layer in facts.layers)]


def _option(candidate: Candidate, i: int) -> int:
    return (*candidate.levels, *candidate.modes)[i]


def _changed(candidate: Candidate, i: int, option: int) -> Candidate:
    """Return `answer` with another option for bucket i, or, from the number of buckets on, for a layer."""
    levels, modes = candidate
    if i < len(levels):
        return Candidate((*levels[:i], Level(option), *levels[i + 1 :]), modes)
    i -= len(levels)
    return Candidate(levels, (*modes[:i], option, *modes[i + 1 :]))
