"""Answers that differ from one that was played in a single bucket or layer, as the program ranks them."""

from collections.abc import Iterator, Sequence

from elixir_compile.search.draft import Candidate, DraftPlan
from elixir_compile.search.levels import Level
from elixir_compile.search.program import Program
from elixir_compile.search.tries import Tries

_ROUNDING = 1e-9
"""Sums of seconds in another order differ by less than this share."""
_MOST_FLIPS, _MOST_ROUNDS, _LEAST_GAIN = 20, 16, 1e-4
"""Flips played in a round; another round follows one that made the step shorter by this share, or, where an answer has
no more neighbours than that, by any."""
_MOST_BROUGHT_BACK = 20


def flip(tries: Tries, program: Program) -> None:
    """Give single buckets and layers other options as long as that makes the step shorter, or the host emptier.

    `program` ranks them: by the paths of the best draft with one option changed, and only if its bytes fit.
    """
    seen: set[Candidate] = set()
    for _ in range(_MOST_ROUNDS):
        before = tries.best
        hopeful = sorted(_hopeful(tries, program, before, before.step_s), key=lambda one: one[0])
        for _, candidate in [one for one in hopeful if one[1] not in seen][:_MOST_FLIPS]:
            if tries.is_over():
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
    candidate, num_tried, moved = draft.candidate, 0, set[int]()
    x = program.vector(candidate, tries.best.moves.streamed)
    live_bytes = program.live_bytes(x)
    for i, option in nearer:
        if i in moved or num_tried >= _MOST_BROUGHT_BACK or tries.is_over():
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
