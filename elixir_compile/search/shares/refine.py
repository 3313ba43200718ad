"""From the shares of the formula to shares that are better in the simulation of all ranks.

The formula of the search treats activations in eighths of the layers, and lets no rank wait for another. The plans of
the ranks do better on some ranks than on others, so rows move once more, by the seconds in which each rank computes:

```text
  shares of the formula --plans of all ranks--> busy seconds of each rank --even out--> other rows --plans--> ...
```

The shares of the rules are simulated too, unless the compute of a rank alone takes as long as the best step so far. So
the result is never worse in the simulation than theirs. Moved rows have to gain a percent: where ranks wait for
collectives, rows hardly matter. The search ends early when its time is over; its outcome says so.
"""

from collections.abc import Callable
from dataclasses import dataclass

from elixir_compile.ir.share import Outcome, Shares
from elixir_compile.search.evaluator import Deadline
from elixir_compile.search.shares.assign import balanced_rows
from elixir_compile.search.shares.choose import RULES, Choice, ShareSearch

_MOST_ROUNDS = 3
"""Times that rows move: the plans of a model of 1.5 billion parameters take half a minute."""
_GAIN = 0.01
"""Moved rows must shorten the step by this share."""
_SURELY = 1.05
"""The shares of a rule are not simulated if its slowest rank computes for this times the best step so far, with memory
for everything. Layers that recompute a part of their activations may take a little less than the formula knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """A step in the simulation of all ranks together."""

    step_s: float
    busy_s: tuple[float, ...]
    """Seconds in which each rank computes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundChoice:
    """Shares with how they were found."""

    choice: Choice
    outcome: Outcome

    @property
    def shares(self) -> Shares:
        """The shares of all ranks."""
        return Shares(self.choice.shares, self.outcome)


Simulate = Callable[[Choice], SimulatedStep | None]
"""Returns the step of all ranks with a choice, or None if they have no plans for it."""


def refined(search: ShareSearch, simulate: Simulate, deadline: Deadline | None = None) -> FoundChoice:
    """Return the shares with the shortest step in the simulation: of those of `search`, of those that even out the busy
    seconds of ranks, and of those of the rules. Those of the formula if no plans exist for any of them.

    After the `deadline` no simulation begins; one that has begun is completed. Raises NoFeasibleShares if nothing fits.
    """
    return _Trials(search, simulate, deadline).refined()


def by_formula(choice: Choice, *, is_complete: bool = False) -> FoundChoice:
    """Return `choice` as the shares with the shortest step by the formula; the search `is_complete` if no ranks had
    plans to simulate."""
    return FoundChoice(choice=choice, outcome=Outcome(step_s=choice.step_s, is_complete=is_complete))


class _Trials:
    """The choices of one question that were simulated."""

    def __init__(self, search: ShareSearch, simulate: Simulate, deadline: Deadline | None) -> None:
        self._search, self._simulate, self._deadline = search, simulate, deadline
        self._tried: dict[tuple[int, ...], SimulatedStep | None] = {}
        self._shortest: tuple[Choice, SimulatedStep] | None = None
        self._is_complete = True

    def refined(self) -> FoundChoice:
        best = self._search.best()
        self._try(best)
        for rule in RULES:
            other = self._search.of_rule(rule)
            if other is not None and not self._is_surely_longer(other):
                self._try(other)
        self._move_rows()
        if self._shortest is None:
            return by_formula(best, is_complete=self._is_complete)
        choice, step = self._shortest
        number = sum(step is not None for step in self._tried.values())
        outcome = Outcome(step_s=step.step_s, num_simulated=number, is_complete=self._is_complete)
        return FoundChoice(choice=choice, outcome=outcome)

    def _move_rows(self) -> None:
        """Try to even out the busy seconds of the shortest choice so far, and again those of the result."""
        own = self._shortest
        for _ in range(_MOST_ROUNDS):
            if own is None:
                return
            rows = balanced_rows(own[0].rows, own[1].busy_s, self._search.fixed_shares(own[0]))
            if rows in self._tried:
                return
            choice = self._search.of_rows(rows)
            step = None if choice is None else self._try(choice, least_gain=_GAIN)
            own = None if choice is None or step is None else (choice, step)

    def _try(self, choice: Choice, least_gain: float = 0.0) -> SimulatedStep | None:
        """Return the simulated step of `choice`, and keep it if it is shorter than all before by the share `least_gain`
        of theirs; None if it has no plans, or if there is no time."""
        if choice.rows not in self._tried:
            if self._deadline is not None and self._deadline.is_over:
                self._is_complete = False
                return None
            step = self._simulate(choice)
            self._tried[choice.rows] = step
            if step is not None and (
                self._shortest is None or step.step_s < (1 - least_gain) * self._shortest[1].step_s
            ):
                self._shortest = choice, step
        return self._tried[choice.rows]

    def _is_surely_longer(self, choice: Choice) -> bool:
        if self._shortest is None:
            return False
        return self._search.least_s(choice.rows) > _SURELY * self._shortest[1].step_s
