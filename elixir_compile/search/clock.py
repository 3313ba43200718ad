"""Seconds of a search: those that its own thread computes, so that processes beside it cut nothing off.

A search is limited by counted work; its clock is for problems so large that the work takes too long. Were it the
wall's, a machine that does other work would give another plan than a quiet one. A quarter of the wall's seconds count
in any case, so that a search on a machine that is busier than that ends too.
"""

import time
from dataclasses import dataclass, field

_MOST_TIMES = 4.0
"""A search takes at most so many times its seconds by the wall."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Counts from when it is made, in the thread that makes it."""

    _began_own_s: float = field(default_factory=lambda: time.thread_time())
    _began_wall_s: float = field(default_factory=lambda: time.monotonic())

    @property
    def spent_s(self) -> float:
        """Seconds since the clock was made."""
        return max(self._own_s, self._wall_s / _MOST_TIMES)

    @property
    def times(self) -> float:
        """How many times as long as a second of this clock a second by the wall was so far, at most 4."""
        return min(_MOST_TIMES, max(1.0, self._wall_s / max(self._own_s, 1e-3)))

    def until(self, seconds: float) -> "Deadline":
        """Return the deadline that is over once the clock shows `seconds`."""
        return Deadline(self, seconds)

    @property
    def _own_s(self) -> float:
        return time.thread_time() - self._began_own_s

    @property
    def _wall_s(self) -> float:
        return time.monotonic() - self._began_wall_s


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a part of a search has to end."""

    clock: Clock
    at_s: float

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return self.clock.spent_s > self.at_s

    @property
    def wall_s(self) -> float:
        """Seconds left by the wall, if the machine stays as busy as it was: what a solver is told."""
        return max(0.0, self.at_s - self.clock.spent_s) * self.clock.times


def deadline_in(seconds: float) -> Deadline:
    """Return the deadline that is over in `seconds`."""
    return Clock().until(seconds)
