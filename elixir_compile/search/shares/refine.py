"""From the shares of the formula to shares that are better in the simulation of all ranks.

The formula of the search treats activations in eighths of the layers, and lets no rank wait for another. The plans of
the ranks do better on some ranks than on others, so rows move once more, by the seconds in which each rank computes:

```text
  shares of the formula --plans of all ranks--> busy seconds of each rank --even out--> other rows --plans--> ...
```

The shares of the rules that are as good by the formula, or nearly, are simulated too. So the result is never worse in
the simulation than theirs. Moved rows have to gain a percent: where ranks wait for collectives, rows hardly matter.
"""

from collections.abc import Callable
from dataclasses import dataclass

from elixir_compile.search.joint.balance import balanced_rows
from elixir_compile.search.shares.choose import RULES, Choice, ShareSearch

_MOST_ROUNDS = 3
"""Times that rows move: the plans of a model of 1.5 billion parameters take half a minute."""
_GAIN = 0.01
"""Moved rows must shorten the step by this share."""
_NEARLY = 1.15
"""The shares of a rule are simulated if the formula has them within this factor of the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """A step in the simulation of all ranks together."""

    step_s: float
    busy_s: tuple[float, ...]
    """Seconds in which each rank computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedChoice:
    """Shares with their step in the simulation."""

    choice: Choice
    step: SimulatedStep


def refined(search: ShareSearch, simulated: Callable[[Choice], SimulatedStep | None]) -> SimulatedChoice | None:
    """Return the shares with the shortest step in the simulation: of those of `search`, of those that even out the busy
    seconds of ranks, and of those of the rules. None if no plans exist for any of them.

    `simulated` returns None if the ranks have no plans for a choice. Raises NoFeasibleShares if nothing fits.
    """
    best = search.best()
    found: dict[tuple[int, ...], SimulatedChoice] = {}

    def try_out(choice: Choice | None) -> SimulatedChoice | None:
        if choice is None:
            return None
        if choice.rows not in found:
            step = simulated(choice)
            if step is None:
                return None
            found[choice.rows] = SimulatedChoice(choice=choice, step=step)
        return found[choice.rows]

    try_out(best)
    for other in map(search.of_rule, RULES):
        if other is not None and other.step_s <= _NEARLY * best.step_s:
            try_out(other)
    shortest = min(found.values(), key=_step_s, default=None)
    own = shortest
    for _ in range(_MOST_ROUNDS):
        rows = None if own is None else balanced_rows(own.choice.rows, own.step.busy_s, search.fixed_shares(own.choice))
        own = None if rows is None or rows in found else try_out(search.of_rows(rows))
        if own is not None and shortest is not None and _step_s(own) < (1 - _GAIN) * _step_s(shortest):
            shortest = own
    return shortest


def _step_s(made: SimulatedChoice) -> float:
    return made.step.step_s
