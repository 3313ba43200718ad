"""Why each bucket is where it is, and what happens to the activations of each layer: what other options would cost, in
seconds or in bytes over a budget.

Seconds are by the longest paths (`flow`), bytes by the segments (`memory`), one bucket or layer changed and all others
as they are. Both are lower bounds, and quick: a plan has a thousand of such alternatives.
"""

from collections.abc import Mapping
from typing import NamedTuple

from elixir_compile.ir import Decision
from elixir_compile.search.draft import Draft
from elixir_compile.search.levels import level_text
from elixir_compile.search.modes import mode_text
from elixir_compile.search.program import Program, Vector
from elixir_compile.units import format_bytes, format_s

_NUM_REJECTED = 6
"""Alternatives that a decision names, the nearest ones; a bucket has no more."""


def decisions(program: Program, draft: Draft) -> tuple[Decision, ...]:
    """Return a decision on every bucket of `draft` that is not where it was, and on every layer that is not kept."""
    facts = program.judge.facts
    x = program.vector(draft.answer, draft.moves.streamed)
    chosen = _Chosen(x, program.lower_s(x), program.peak_bytes(x))
    found: list[Decision] = []
    for i, (bucket, level, start) in enumerate(zip(facts.buckets, draft.levels, facts.start_levels, strict=True)):
        if level is not start:
            texts = {int(other): level_text(other) for other in facts.choices[i]}
            found.append(_decision(program, chosen, bucket.id, _Change(i, level, start, texts)))
    for i, (layer, mode) in enumerate(zip(facts.layers, draft.modes, strict=True), start=len(facts.buckets)):
        if mode:
            texts = {other: mode_text(layer, layer.modes[other]) for other in range(len(layer.modes))}
            found.append(_decision(program, chosen, layer.name or "step", _Change(i, mode, 0, texts)))
    return tuple(found)


class _Chosen(NamedTuple):
    """The answer that the decisions are about, with the bounds on it."""

    x: Vector
    step_s: float
    peak_bytes: int


class _Change(NamedTuple):
    """Bucket or layer number i went from option `before` to `now`; `texts` are of all its options."""

    i: int
    now: int
    before: int
    texts: Mapping[int, str]


def _decision(program: Program, chosen: _Chosen, subject: str, change: _Change) -> Decision:
    at_start = _moved(program, chosen.x, change, change.before)
    saves_bytes = program.peak_bytes(at_start) - chosen.peak_bytes
    before = change.texts[change.before]
    because = f"the peak would be {format_bytes(saves_bytes)} higher with {before}"
    if saves_bytes <= 0:
        more = format_bytes(program.most_more_bytes(at_start, chosen.x))
        because = f"the peak would be no higher with {before}, but elsewhere up to {more} less would be free"
    others = sorted(_alternatives(program, chosen, change), key=lambda other: other.rank)
    return Decision(
        subject=subject,
        choice=change.texts[change.now],
        because=because,
        cost_s=max(0.0, chosen.step_s - program.lower_s(at_start)),
        saves_bytes=saves_bytes,
        rejected=tuple(other.text for other in others[:_NUM_REJECTED]),
    )


def _moved(program: Program, x: Vector, change: _Change, after: int) -> Vector:
    moved = x.copy()
    moved[program.choices[change.i, change.now]] = 0.0
    moved[program.choices[change.i, after]] = 1.0
    return moved


class _Alternative(NamedTuple):
    rank: tuple[int, float]
    """Those that would fit first, the least loss first."""
    text: str


def _alternatives(program: Program, chosen: _Chosen, change: _Change) -> list[_Alternative]:
    """What every other option would do; of those that fit, seconds of the ones with the most bytes, which are the
    nearest to what is there."""
    problem, found = program.judge.facts.problem, []
    fitting: list[tuple[int, Vector, str]] = []
    for other, text in change.texts.items():
        if other == change.now:
            continue
        moved = _moved(program, chosen.x, change, other)
        peak_bytes = program.peak_bytes(moved)
        over_bytes = peak_bytes - problem.budget_bytes
        host_over_bytes = program.host_bytes(moved) - problem.host_budget_bytes
        if over_bytes > 0:
            found.append(_Alternative((1, over_bytes), f"{text}: {format_bytes(over_bytes)} over the budget"))
        elif host_over_bytes > 0:
            over = format_bytes(host_over_bytes)
            found.append(_Alternative((2, host_over_bytes), f"{text}: {over} over the host's memory"))
        else:
            fitting.append((peak_bytes, moved, text))
    for _, moved, text in sorted(fitting, key=lambda one: -one[0])[:_NUM_REJECTED]:
        added_s = max(0.0, program.lower_s(moved) - chosen.step_s)
        longer = f"{format_s(added_s)} longer" if added_s else "no shorter, once what is early and late is played"
        found.append(_Alternative((0, added_s), f"{text}: {longer}"))
    return found
