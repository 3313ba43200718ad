"""Answers that differ from one that was played in a single bucket or layer, as the program ranks them."""

from collections.abc import Iterator, Sequence

from elixir_compile.search.draft import Answer, Draft
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
    seen: set[Answer] = set()
    for _ in range(_MOST_ROUNDS):
        before = tries.best
        hopeful = sorted(_hopeful(tries, program, before, before.step_s), key=lambda one: one[0])
        for _, answer in [one for one in hopeful if one[1] not in seen][:_MOST_FLIPS]:
            if tries.is_over():
                return
            seen.add(answer)
            tries.try_answer(answer)
            if tries.best.step_s < before.step_s * (1 - _LEAST_GAIN):
                break
        if tries.best is before:
            return


def bring_back(tries: Tries, program: Program, draft: Draft, longest_s: float) -> None:
    """Try to move single buckets of `draft` back towards the device, and to keep single layers: what need not move
    stays."""
    limit_s = min(longest_s, tries.best.step_s * (1 + tries.tolerance))
    nearer = [
        (draft_i, option)
        for draft_i, options in enumerate(_options(tries))
        for option in options[: options.index(_option(draft.answer, draft_i))]
    ]
    answer, num_tried, moved = draft.answer, 0, set[int]()
    x = program.vector(answer, tries.best.moves.streamed)
    live_bytes = program.live_bytes(x)
    for i, option in nearer:
        if i in moved or num_tried >= _MOST_BROUGHT_BACK or tries.is_over():
            continue
        now = program.choices[i, _option(answer, i)]
        more_bytes = program.bytes_of[:, program.choices[i, option]] - program.bytes_of[:, now]
        tried = _changed(answer, i, option)
        if float((live_bytes + more_bytes).max()) > tries.judge.facts.problem.budget_bytes:
            continue
        if program.lower_s(program.vector(tried, tries.best.moves.streamed)) > limit_s * (1 + _ROUNDING):
            continue
        num_tried += tried not in tries.found
        found = tries.try_answer(tried)
        if found is not None and found.step_s <= limit_s:
            answer = tried
            live_bytes = live_bytes + more_bytes
            moved.add(i)


def _hopeful(tries: Tries, program: Program, base: Draft, limit_s: float) -> Iterator[tuple[float, Answer]]:
    """Yield (seconds at least, answer) of every neighbour of `base` that may fit and be no longer than `limit_s`.

    Bytes are those of `base` and the difference of two columns.
    """
    answer, streamed = base.answer, base.moves.streamed
    budget_bytes = tries.judge.facts.problem.budget_bytes
    live_bytes = program.live_bytes(program.vector(answer))
    for i, options in enumerate(_options(tries)):
        now = program.bytes_of[:, program.choices[i, _option(answer, i)]]
        for option in options:
            if option == _option(answer, i):
                continue
            if tries.is_over():
                return
            if float((live_bytes - now + program.bytes_of[:, program.choices[i, option]]).max()) > budget_bytes:
                continue
            changed = _changed(answer, i, option)
            lower_s = program.lower_s(program.vector(changed, streamed))
            if lower_s <= limit_s * (1 + _ROUNDING):
                yield lower_s, changed


def _options(tries: Tries) -> list[Sequence[int]]:
    """The options of every bucket, then of every layer, from the one that changes the least on."""
    facts = tries.judge.facts
    return [*facts.choices, *(range(len(layer.modes)) for layer in facts.layers)]


def _option(answer: Answer, i: int) -> int:
    return (*answer.levels, *answer.modes)[i]


def _changed(answer: Answer, i: int, option: int) -> Answer:
    """Return `answer` with another option for bucket i, or, from the number of buckets on, for a layer."""
    levels, modes = answer
    if i < len(levels):
        return Answer((*levels[:i], Level(option), *levels[i + 1 :]), modes)
    i -= len(levels)
    return Answer(levels, (*modes[:i], option, *modes[i + 1 :]))
