"""The phases of a step by moments of the host's clock, and of the device's clock if it has one.

```text
  begin FORWARD   end FORWARD   begin UPDATE   begin FORWARD   end FORWARD   end UPDATE
       |  forward     |  caller     |  update       |  forward     |  update     |
```

Where phases are nested, the innermost counts. Lightning runs the forward and the backward within `optimizer.step()`.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from elixir_compile.ir.kinds import Phase
from elixir_compile.runtime.lanes import Lanes, TimedEvent
from elixir_compile.tools.study.observed import Interval


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment on the clock of the host, and of the device if it has one."""

    host_s: float
    """On the clock of `time.perf_counter`."""
    event: TimedEvent | None = None
    """The same moment in the order of the device's work; None if the host computes."""

    def seconds_to(self, later: "Moment") -> float:
        """Return the seconds to `later`, on the clock of the device if both moments have an event that is past."""
        if self.event is None or later.event is None:
            return later.host_s - self.host_s
        return self.event.elapsed_time(later.event) / 1e3


def moment_now(lanes: Lanes | None) -> Moment:
    """Return the present moment, with an event if `lanes` have a clock."""
    is_timed = lanes is not None and lanes.has_clock
    return Moment(time.perf_counter(), lanes.timed_event() if lanes is not None and is_timed else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The phases of a step that has ended, on the clock of the device if it has one, and on that of the host."""

    began_s: float
    """When the step began, on the clock of `time.perf_counter`."""
    intervals: tuple[Interval, ...]
    """The phases, in seconds since the step began."""
    asked: tuple[Interval, ...]
    """The same phases by the moments at which the host asked for them; equal to `intervals` if the host computes."""
    moments: tuple[tuple[float, float], ...]
    """For each change of phases, seconds since the step began on the clock of the host, and of `intervals`."""


class PhaseChanges:
    """The changes of the innermost phase since a step began."""

    def __init__(self, began: Moment, phase: Phase | None) -> None:
        """`phase` is the innermost phase at the moment `began`."""
        self.changes: list[tuple[Moment, Phase | None]] = [(began, phase)]

    @property
    def began(self) -> Moment:
        """The moment at which the step began."""
        return self.changes[0][0]

    def change(self, at: Moment, phase: Phase | None) -> None:
        """Note that `phase` is the innermost phase from the moment `at` on."""
        self.changes.append((at, phase))

    def intervals(self, ended: Moment) -> tuple[Interval, ...]:
        """Return the parts of the step, which ended at the moment `ended`. They leave no gap, and none is empty."""
        return intervals_between(self._times_s(ended), [phase for _, phase in self.changes])

    def times(self, ended: Moment) -> StepTimes:
        """Return the phases of the step, which ended at the moment `ended`, on both clocks."""
        moments = (*(at for at, _ in self.changes), ended)
        asked_s = [at.host_s - self.began.host_s for at in moments]
        return StepTimes(
            began_s=self.began.host_s,
            intervals=self.intervals(ended),
            asked=intervals_between(asked_s, [phase for _, phase in self.changes]),
            moments=tuple(zip(asked_s, self._times_s(ended), strict=True)),
        )

    def _times_s(self, ended: Moment) -> list[float]:
        began = self.began
        return [began.seconds_to(at) for at, _ in self.changes] + [began.seconds_to(ended)]


def intervals_between(times_s: Sequence[float], phases: Sequence[Phase | None]) -> tuple[Interval, ...]:
    """Return the intervals between `times_s`, one time more than `phases`; neighbours of one phase are joined.

    A time before its predecessor counts as equal to it: events of two streams may be out of order by microseconds.
    """
    found: list[Interval] = []
    latest_s, ordered_s = 0.0, list[float]()
    for time_s in times_s:
        latest_s = max(latest_s, time_s)
        ordered_s.append(latest_s)
    for (start_s, end_s), phase in zip(pairwise(ordered_s), phases, strict=True):
        if start_s == end_s:
            continue
        if found and found[-1].phase is phase:
            start_s = found.pop().start_s
        found.append(Interval(phase=phase, start_s=start_s, end_s=end_s))
    return tuple(found)
