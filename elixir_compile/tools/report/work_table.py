"""Compare what a simulated and a measured step do on each lane: how often, how many bytes, for how many seconds.

```text
lane  verb       planned  measured     bytes  measured  seconds  measured
h2d   gather          12        12   1.2 GiB   1.2 GiB   52 ms     61 ms
```
"""

from collections import defaultdict
from dataclasses import dataclass

from elixir_compile.ir.kinds import Lane
from elixir_compile.ir.record import Record, Tally, tallies
from elixir_compile.ir.schedule import verb_of


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkRow:
    """All actions of one verb on one lane."""

    lane: Lane
    verb: str
    planned: Tally
    measured: Tally
    planned_s: float
    measured_s: float

    @property
    def is_off(self) -> bool:
        """Whether the step did this another number of times, or with other bytes, than planned."""
        return self.planned != self.measured


def work_rows(planned: Record, measured: Record) -> tuple[WorkRow, ...]:
    """Return the work of two records of a step by lane and verb, in the order of the lanes.

    What the calling thread waits for is left out: no plan says it.
    """
    sides = [_by_verb(record) for record in (planned, measured)]
    nothing = (Tally(0, 0), 0.0)
    found: list[WorkRow] = []
    for lane, verb in sorted({*sides[0], *sides[1]}, key=lambda work: (list(Lane).index(work[0]), work[1])):
        (own, own_s), (other, other_s) = (side.get((lane, verb), nothing) for side in sides)
        found.append(WorkRow(lane=lane, verb=verb, planned=own, measured=other, planned_s=own_s, measured_s=other_s))
    return tuple(found)


def _by_verb(record: Record) -> dict[tuple[Lane, str], tuple[Tally, float]]:
    seconds: defaultdict[tuple[Lane, str], float] = defaultdict(float)
    for span in record.spans:
        seconds[span.lane, verb_of(span.label)] += span.end_s - span.start_s
    works: dict[tuple[Lane, str], list[Tally]] = {}
    for (lane, name), tally in tallies(record.spans).items():
        works.setdefault((lane, verb_of(name)), []).append(tally)
    return {
        work: (Tally(sum(own.times for own in each), sum(own.nbytes for own in each)), seconds[work])
        for work, each in works.items()
    }
