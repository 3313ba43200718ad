"""The default planner: the best plan that the time allows, with what is proved about all others.

Buckets have levels, layers of activations have modes; an answer has one of each. Greedy and the rules give the first
answers, so that this planner is never slower than any of them; the program of `milp` gives better ones and the bound;
single flips judged by the simulator give the rest.
"""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from elixir_compile.search.because import decisions
from elixir_compile.search.draft import Answer, Certificate, Draft
from elixir_compile.search.judge import Judge
from elixir_compile.search.levels import Level
from elixir_compile.search.milp import gib_saves_s, relaxed, whole
from elixir_compile.search.program import Program, Solution
from elixir_compile.search.streaming import best_moves
from elixir_compile.units import format_s

log = logging.getLogger("elixir_compile")

TOLERANCE = 1e-3
"""The search ends when nothing untried can be faster by more than this share of the step."""
_ROUNDING = 1e-9
"""Sums of seconds in another order differ by less than this share."""
_MAX_FLIPS = 400
_MIN_IDLE, _IDLE_COLUMNS, _IDLE_STREAMED = 12, 20_000, 6_000
"""So many whole solutions in a row that make the step no shorter end the search: small programs may try more, and
those with updates to stream fewer, because no row says that an early gather waits, so that the last of their gap never
closes. GPT-2 124M with 6 GiB on an RTX 3090: half the seconds for the same plan."""
_SOLVER_SHARE, _SEARCH_SHARE = 0.5, 0.7
"""Of the time: when the solver has to stop, and when flips have to; the rest is for the reasons."""
_FREE_SHARES = tuple(quarters / 4 for quarters in range(21))
"""Memory kept free for prefetch, in units of the widest bucket."""


@dataclass(slots=True)
class _Search:
    judge: Judge
    deadline_s: float
    best: Draft
    tolerance: float
    found: dict[Answer, Draft] = field(default_factory=dict)
    """What was played and fits."""

    def try_answer(self, answer: Answer) -> None:
        """Play `answer`, if it fits, and keep it if it is the best so far: the shortest, then the fewest bytes on the
        host."""
        levels, modes = answer
        judge = self.judge.at(modes)
        if answer in self.found or not judge.fits(levels, ahead=0):
            return
        moves, step_s = best_moves(judge, levels, self.best.step_s)
        draft = Draft(levels=levels, modes=modes, moves=moves, step_s=step_s, decisions=(), planner="milp")
        self.found[answer] = draft
        if (step_s, self.host_bytes(draft)) < (self.best.step_s, self.host_bytes(self.best)):
            self.best = draft

    def host_bytes(self, draft: Draft) -> int:
        """Return the bytes that the host holds under `draft`."""
        return self.judge.at(draft.modes).host_bytes(draft.levels)

    def is_good(self, bound_s: float) -> bool:
        """Whether steps of `bound_s` or more are no better than the best, but for the tolerance."""
        return self.best.step_s <= bound_s * (1 + self.tolerance)

    def round(self, program: Program, bound_s: float) -> None:
        """Try the rounded optima with more and more memory kept free, in which gathers can be early, until a step is
        found that is good for `bound_s`."""
        if program.has_streams:
            # Which placements are good is clearer where nothing but they can be chosen.
            program.may_stream = False
            self._round_to(program, bound_s)
            program.may_stream = True
        if not self.is_good(bound_s):
            self._round_to(program, bound_s)

    def _round_to(self, program: Program, bound_s: float) -> None:
        widest_bytes = max(bucket.flat_nbytes for bucket in self.judge.facts.buckets)
        overlaps = self.judge.facts.problem.cluster.h2d.overlaps_compute
        for share in _FREE_SHARES if overlaps else _FREE_SHARES[:1]:
            solution = relaxed(program, self.deadline_s, -int(share * widest_bytes))
            if solution is None:
                break
            self.try_answer(program.rounded(solution.x))
            if self.is_good(bound_s):
                break

    def solve(self, program: Program, deadline_s: float) -> float:
        """Try whole solutions, best first, until nothing untried can be better; return the bound in seconds."""
        bound_s, since_s = 0.0, self.best.step_s
        proved: dict[Answer, float] = {}
        columns = _IDLE_STREAMED if program.has_streams else _IDLE_COLUMNS
        num_idle, max_idle = 0, max(_MIN_IDLE, columns // program.num_choices)
        for answer, rest_s in whole(program, deadline_s, self.tolerance / 2):
            # Whatever is not yielded yet takes at least this; what was yielded, at least its own longest paths.
            bound_s = max(bound_s, min((rest_s, *(own_s for other, own_s in proved.items() if other != answer))))
            self.try_answer(answer)
            # `lower_s` holds for what is streamed in x; what the rest takes holds for the first of it however streamed.
            own_s = rest_s if program.has_streams else program.lower_s(program.vector(answer))
            proved[answer] = max(proved.get(answer, 0.0), own_s)
            # Layers that are alike have many answers that are: the program cannot tell which leaves room for prefetch.
            num_idle = num_idle + 1 if self.best.step_s > since_s * (1 - self.tolerance) else 0
            since_s = min(since_s, self.best.step_s) if num_idle == 0 else since_s
            if self.is_good(rest_s) or num_idle >= max_idle:
                break
        return bound_s

    def leanest(self, longest_s: float) -> Draft:
        """Return the draft with the fewest bytes on the host among those that are as good as the best, and no longer
        than `longest_s`: a move for less than the tolerance is none."""
        limit_s = min(longest_s, self.best.step_s * (1 + self.tolerance))
        equals = [draft for draft in self.found.values() if draft.step_s <= limit_s]
        return min(equals, key=lambda draft: (self.host_bytes(draft), draft.step_s))

    def bring_back(self, program: Program, draft: Draft, longest_s: float) -> None:
        """Try to move single buckets of `draft` back towards the device, and to keep single layers: what need not move
        stays."""
        limit_s = min(longest_s, self.best.step_s * (1 + self.tolerance))
        answer = draft.answer
        for i, options in enumerate(self._options()):
            for nearer in options[: options.index(_option(answer, i))]:
                if time.monotonic() > self.deadline_s:
                    return
                tried = _changed(answer, i, nearer)
                if self._is_hopeful(program, tried, limit_s):
                    self.try_answer(tried)
                if tried in self.found and self.found[tried].step_s <= limit_s:
                    answer = tried
                    break

    def flip(self, program: Program) -> None:
        """Give single buckets and layers other options as long as that makes the step shorter, or the host emptier."""
        num_flips = 0
        is_better = True
        while is_better and num_flips < _MAX_FLIPS and time.monotonic() < self.deadline_s:
            before = self.best
            for i, options in enumerate(self._options()):
                for other in options:
                    if other == _option(before.answer, i):
                        continue
                    if num_flips >= _MAX_FLIPS or time.monotonic() > self.deadline_s:
                        return
                    tried = _changed(self.best.answer, i, other)
                    if self._is_hopeful(program, tried, self.best.step_s):
                        num_flips += 1
                        self.try_answer(tried)
            is_better = self.best is not before

    def _is_hopeful(self, program: Program, answer: Answer, limit_s: float) -> bool:
        """Whether the program, which is quick, does not know already that `answer` is too large, or takes longer than
        `limit_s`."""
        x = program.vector(answer, self.best.moves.streamed)
        fits = program.peak_bytes(x) <= self.judge.facts.problem.budget_bytes
        return fits and program.lower_s(x) <= limit_s * (1 + _ROUNDING)

    def _options(self) -> list[Sequence[int]]:
        """The options of every bucket, then of every layer, from the one that changes the least on."""
        facts = self.judge.facts
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


def place_best(
    judge: Judge,
    first: Draft,
    others: Iterable[Answer],
    timeout_s: float,
    tolerance: float = TOLERANCE,
) -> Draft:
    """Return the best draft found in `timeout_s` seconds, with its certificate; `first` fits, `others` may.

    `others` are not asked for where `first` leaves everything where it starts.
    """
    if not judge.facts.buckets:
        certificate = Certificate(bound_s=first.step_s, binding=(), gib_saves_s=0.0)
        return replace(first, certificate=certificate)
    # What fits stays: a machine's profile is not so exact that a faster update elsewhere is a reason to move.
    stays = first.levels == judge.facts.start_levels and first.modes == judge.facts.modes
    candidates = [first.answer] if stays else [first.answer, *others]
    began_s = time.monotonic()
    search = _Search(judge, began_s + timeout_s * _SEARCH_SHARE, replace(first, planner="milp"), tolerance)
    search.found[first.answer] = search.best
    for answer in candidates[1:]:
        search.try_answer(answer)
    shortest_s = search.best.step_s
    program = Program(judge, max(search.best.step_s, 1e-12))
    for answer in candidates:
        program.add_paths(program.vector(answer))
    start = relaxed(program, search.deadline_s)
    if start is None:
        return replace(search.best, decisions=decisions(program, search.best))
    proved = _certificate(program, start)
    if stays:
        kept = search.found[first.answer]
        return replace(kept, certificate=replace(proved, bound_s=min(proved.bound_s, kept.step_s)))
    bound_s = proved.bound_s
    search.round(program, bound_s)
    if not search.is_good(bound_s):
        bound_s = max(bound_s, search.solve(program, began_s + timeout_s * _SOLVER_SHARE))
    if not search.is_good(bound_s):
        search.flip(program)
    log.debug("searched %s in %s", judge.facts.problem.name, format_s(time.monotonic() - began_s))
    search.bring_back(program, search.leanest(shortest_s), shortest_s)
    best = search.leanest(shortest_s)
    certificate = replace(proved, bound_s=min(bound_s, best.step_s))
    return replace(best, certificate=certificate, decisions=decisions(program, best))


def _certificate(program: Program, start: Solution) -> Certificate:
    """What the relaxed optimum proves; asked before other rows come in, or one more GiB would not compare."""
    return Certificate(
        bound_s=program.seconds(start.bound),
        binding=program.binding(start),
        gib_saves_s=gib_saves_s(program, start, time.monotonic() + 1.0),
    )
