"""Explain a draft plan: decisions with their reasons, and the limits that the relaxed optimum reaches."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from elixir_compile.base.units import format_bytes, format_s
from elixir_compile.ir import Decision
from elixir_compile.search.clock import Deadline
from elixir_compile.search.evaluator import DraftPlan
from elixir_compile.search.formulation.cross_step_updates import HOST_MEMORY
from elixir_compile.search.formulation.flow_shop import longest_s
from elixir_compile.search.formulation.milp import Milp, Vector
from elixir_compile.search.space.levels import level_text
from elixir_compile.search.space.modes import mode_text

_FULL = 1 - 1e-3


def binding(milp: Milp, x: Vector) -> tuple[str, ...]:
    """Return the limits reached at the relaxed optimum x: lanes of the longest paths, and full memories."""
    facts, live_bytes = milp.evaluator.facts, milp.live_bytes(x)
    labels = _longest_labels(milp, x)
    fullest = int(live_bytes.argmax())
    if live_bytes[fullest] >= facts.problem.budget_bytes * _FULL:
        op = facts.graph.ops[milp.memory.highest_op(fullest)]
        labels.append(f"device memory is full at {op.id}")
    host = milp.host_row
    if host.values @ x[host.columns] >= host.limit * _FULL:
        labels.append("host memory is full")
    return tuple(dict.fromkeys(labels))


def _longest_labels(milp: Milp, x: Vector) -> list[str]:
    """Return for each phase how its longest path divides over lanes.

    If a longer path crosses several phases, its label replaces the labels of these phases.
    """
    sides = [max((phase.longest(x) for phase in side), key=lambda path: path.seconds) for side in milp.phases]
    for shop in milp.whole_step:
        if longest_s(shop, x) >= milp.lower_s(x):
            return ["step: host memory is busy" if shop.name == HOST_MEMORY else shop.longest(x).label]
    across = max((phase.longest(x) for phase in milp.across), key=lambda path: path.seconds, default=None)
    if across is None or across.seconds <= sum(sides[number].seconds for number in milp.spanned):
        return [side.label for side in sides]
    names = " and ".join(side[0].name for number, side in enumerate(milp.phases) if number in milp.spanned)
    rest = [side.label for number, side in enumerate(sides) if number not in milp.spanned]
    return [f"{names}: {across.label.partition(': ')[2]}", *rest]


_NUM_REJECTED = 6
"""Rejected options that a decision names: those that add the fewest seconds, then those least over a budget. A bucket
has no more options."""
_MAX_PRICED = 600
"""Rejected options of all decisions together whose seconds are computed; computing one takes a millisecond or more."""


def decisions(milp: Milp, draft: DraftPlan, deadline: Deadline | None = None) -> tuple[Decision, ...]:
    """Return a decision on every bucket of `draft` that moves, and on every layer that recomputes or offloads.

    Decisions made after the `deadline` have no cost and no rejected options.
    """
    facts = milp.evaluator.facts
    changes: list[tuple[str, _Change]] = []
    for i, (bucket, level, start) in enumerate(zip(facts.buckets, draft.levels, facts.start_levels, strict=True)):
        if level is not start:
            texts = {int(other): level_text(other) for other in facts.choices[i]}
            changes.append((bucket.id, _Change(i, level, start, texts)))
    for i, (layer, mode) in enumerate(zip(facts.layers, draft.modes, strict=True), start=len(facts.buckets)):
        if mode:
            texts = {other: mode_text(layer, layer.modes[other]) for other in range(len(layer.modes))}
            changes.append((layer.name or "step", _Change(i, mode, 0, texts)))
    if not changes:
        return ()
    x = milp.vector(draft.candidate, draft.moves.streamed)
    num_priced = max(1, min(_NUM_REJECTED, _MAX_PRICED // len(changes)))
    chosen = _Chosen(milp, x, milp.live_bytes(x), milp.host_bytes(x), milp.lower_s(x), num_priced)
    return tuple(_decision(chosen, subject, change, deadline) for subject, change in changes)


class _Chosen(NamedTuple):
    """The candidate to explain, as a vector of the MILP, with its bytes and its lower bound in seconds."""

    milp: Milp
    x: Vector
    live_bytes: Vector
    host_bytes: int
    step_s: float
    num_priced: int

    @property
    def peak_bytes(self) -> int:
        return int(self.live_bytes.max())


class _Change(NamedTuple):
    """Bucket or layer number i has option `now` instead of option `before`; `texts` describe all its options."""

    i: int
    now: int
    before: int
    texts: Mapping[int, str]


class _Other(NamedTuple):
    """The chosen candidate with another option for a bucket or layer: column `column` of the MILP for `now`."""

    chosen: _Chosen
    now: int
    column: int

    @property
    def more_bytes(self) -> Vector:
        bytes_of = self.chosen.milp.bytes_of
        return bytes_of[:, self.column] - bytes_of[:, self.now]

    @property
    def peak_bytes(self) -> int:
        return int((self.chosen.live_bytes + self.more_bytes).max())

    @property
    def host_bytes(self) -> int:
        x = np.zeros(len(self.chosen.x))
        x[self.column], x[self.now] = 1.0, -1.0
        return self.chosen.host_bytes + self.chosen.milp.host_bytes(x)

    @property
    def step_s(self) -> float:
        x = self.chosen.x.copy()
        x[self.now], x[self.column] = 0.0, 1.0
        return self.chosen.milp.lower_s(x)


def _decision(chosen: _Chosen, subject: str, change: _Change, deadline: Deadline | None) -> Decision:
    at_start = _moved(chosen, change, change.before)
    saves_bytes = at_start.peak_bytes - chosen.peak_bytes
    before = change.texts[change.before]
    because = f"the peak would be {format_bytes(saves_bytes)} higher with {before}"
    if saves_bytes <= 0:
        more = format_bytes(int(at_start.more_bytes.max()))
        because = f"the peak would be no higher with {before}, but elsewhere up to {more} less would be free"
    if deadline is not None and deadline.is_over:
        return Decision(
            subject=subject, choice=change.texts[change.now], because=because, cost_s=0.0, saves_bytes=saves_bytes
        )
    others = sorted(_alternatives(chosen, change), key=lambda other: other.rank)
    return Decision(
        subject=subject,
        choice=change.texts[change.now],
        because=because,
        cost_s=max(0.0, chosen.step_s - at_start.step_s),
        saves_bytes=saves_bytes,
        rejected=tuple(other.text for other in others[:_NUM_REJECTED]),
    )


def _moved(chosen: _Chosen, change: _Change, after: int) -> _Other:
    choices = chosen.milp.choices
    return _Other(chosen, choices[change.i, change.now], choices[change.i, after])


class _Alternative(NamedTuple):
    rank: tuple[int, float]
    """Fitting options first, by added seconds; then options over a budget, by bytes over it."""
    text: str


def _alternatives(chosen: _Chosen, change: _Change) -> list[_Alternative]:
    """Return every other option of `change` with its effect.

    Of the options that fit, only the `num_priced` with the highest peak get seconds; the rest are left out.
    """
    problem, found = chosen.milp.evaluator.facts.problem, []
    fitting: list[tuple[int, _Other, str]] = []
    for option, text in change.texts.items():
        if option == change.now:
            continue
        other = _moved(chosen, change, option)
        peak_bytes = other.peak_bytes
        over_bytes = peak_bytes - problem.budget_bytes
        host_over_bytes = other.host_bytes - problem.host_budget_bytes
        if over_bytes > 0:
            found.append(_Alternative((1, over_bytes), f"{text}: {format_bytes(over_bytes)} over the budget"))
        elif host_over_bytes > 0:
            over = format_bytes(host_over_bytes)
            found.append(_Alternative((2, host_over_bytes), f"{text}: {over} over the host's memory"))
        else:
            fitting.append((peak_bytes, other, text))
    for _, other, text in sorted(fitting, key=lambda entry: -entry[0])[: chosen.num_priced]:
        added_s = max(0.0, other.step_s - chosen.step_s)
        longer = f"{format_s(added_s)} longer" if added_s else "no shorter once the times of transfers are simulated"
        found.append(_Alternative((0, added_s), f"{text}: {longer}"))
    return found
