"""Measure the seconds of a search by the CPU time of its thread, so that other processes do not change its plan.

Counted work limits a search; the clock ends it only if the problem is so large that the counted work takes too long.
With wall time, a busy machine would find another plan than an idle machine. But at least a quarter of the wall time
counts, so that a search ends on a very busy machine too.
"""

import time
from dataclasses import dataclass, field

_MAX_WALL_FACTOR = 4.0
"""The wall time of a search is at most so many times its seconds."""


@dataclass(frozen=True, slots=True)
class Clock:
    """Seconds since the clock was made, in the thread that made it."""

    _began_cpu_s: float = field(default_factory=lambda: time.thread_time())
    _began_wall_s: float = field(default_factory=lambda: time.monotonic())

    @property
    def spent_s(self) -> float:
        """Seconds since the clock was made: CPU time of the thread, or a quarter of the wall time if longer."""
        return max(self._cpu_s, self._wall_s / _MAX_WALL_FACTOR)

    @property
    def times(self) -> float:
        """Wall time per second of CPU time so far, between 1 and 4."""
        return min(_MAX_WALL_FACTOR, max(1.0, self._wall_s / max(self._cpu_s, 1e-3)))

    def until(self, seconds: float) -> "Deadline":
        """Return the deadline at `seconds` on this clock."""
        return Deadline(self, seconds)

    @property
    def _cpu_s(self) -> float:
        return time.thread_time() - self._began_cpu_s

    @property
    def _wall_s(self) -> float:
        return time.monotonic() - self._began_wall_s


@dataclass(frozen=True, slots=True)
class Deadline:
    """The number of seconds on a clock after which a part of a search has to end."""

    clock: Clock
    at_s: float

    @property
    def is_over(self) -> bool:
        """Whether the clock has counted more seconds than `at_s`."""
        return self.clock.spent_s > self.at_s

    @property
    def wall_s(self) -> float:
        """Wall time left if the machine stays as busy as it was; solvers take their time limit in wall time."""
        return max(0.0, self.at_s - self.clock.spent_s) * self.clock.times


def deadline_in(seconds: float) -> Deadline:
    """Return the deadline `seconds` from now, on a new clock."""
    return Clock().until(seconds)
