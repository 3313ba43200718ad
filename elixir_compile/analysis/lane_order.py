"""Find two accesses to the same memory that the waits of a schedule leave unordered, before anything runs.

```text
  gather b1     h2d writes the copy
  run fwd.1     compute reads it; `wait b1` must let compute wait for h2d before
```

Of two accesses to one cell, one of which writes or frees it, one must be behind the other by the works of two
consecutive steps (see `lane_rules`). Every access must be before the free, and every read behind a write, unless the
memory keeps its values from step to step. The check of a run compares accesses by the same rule: see
`tests/races/happens_before.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from elixir_compile.analysis.excerpt import illegal_actions
from elixir_compile.analysis.lane_rules import issue_steps
from elixir_compile.analysis.lane_works import KEPT, Cell, Work, Works
from elixir_compile.analysis.touches import Touch
from elixir_compile.collector import collector_off
from elixir_compile.ir import Plan, RegionId


class Fault(StrEnum):
    """Why two accesses to the same memory are illegal."""

    UNORDERED = "no wait orders the two"
    FREED = "the memory is free by then"
    UNWRITTEN = "it is read before anything is in it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Two works, `first` issued before `second`, with accesses to `cell` that are not ordered as they must be."""

    cell: Cell
    first: Work
    second: Work
    fault: Fault


def check_order(plan: Plan, touches: Mapping[RegionId, Sequence[Touch]], rank_index: int = 0) -> None:
    """Raise IllegalSchedule if schedule number `rank_index` leaves two accesses to the same memory unordered.

    `touches` are the gradients and the offloaded activations that the regions touch. A plan with sums of gradients is
    checked twice, because it also runs steps that find no earlier gradient, and their updates may come earlier: behind
    `zero_grad()`, or if a remembered accumulation does not come.
    """
    conflict = _first_conflict_of(plan, touches, rank_index)
    if conflict is None and any(bucket.sum_nbytes for bucket in plan.buckets):
        without_sums = tuple(replace(bucket, sum_nbytes=0) for bucket in plan.buckets)
        conflict = _first_conflict_of(replace(plan, buckets=without_sums), touches, rank_index)
    if conflict is None:
        return
    one, other = (_clause(plan, rank_index, work, conflict.cell) for work in (conflict.first, conflict.second))
    if conflict.second.place.step > conflict.first.place.step:
        other = f"in the next step {other}"
    sentence = f"{one} {conflict.cell}, and {other} it: {conflict.fault}."
    places = (conflict.first.place.at, conflict.second.place.at)
    raise illegal_actions(sentence, plan, rank_index, places)


def _first_conflict_of(plan: Plan, touches: Mapping[RegionId, Sequence[Touch]], rank_index: int) -> Conflict | None:
    with collector_off():
        works = Works()
        issue_steps(works, plan, touches, rank_index)
        return first_conflict(works.found)


def _clause(plan: Plan, rank_index: int, work: Work, cell: Cell) -> str:
    action = plan.schedules[rank_index].actions[work.place.at]
    verb = "frees" if cell in work.frees else "writes" if cell in work.writes else "reads"
    return f"`{action.verb} {action.target}`, on {work.actor}, {verb}"


def first_conflict(works: Sequence[Work]) -> Conflict | None:
    """Return the first work, in the order of issue, with an access that is not ordered with an earlier one; None if all
    are ordered."""
    last_write: dict[Cell, int] = {}
    reads: dict[Cell, list[int]] = {}
    """By cell, the reads since the last write: what is behind all of them is behind the write too."""
    freed: set[Cell] = set()
    for number, work in enumerate(works):
        before = work.before
        for cell in work.reads:
            other = last_write.get(cell)
            if other is not None and (not before >> other & 1 or cell in freed):
                return _conflict(works, cell, other, number)
            reads.setdefault(cell, []).append(number)
        for cell in (*work.writes, *work.frees):
            other = last_write.get(cell)
            if other is not None and other != number and (not before >> other & 1 or cell in freed):
                return _conflict(works, cell, other, number)
            for earlier in reads.pop(cell, ()):
                is_early = other is None and cell.memory not in KEPT
                if earlier != number and (is_early or not before >> earlier & 1):
                    return _conflict(works, cell, earlier, number)
            last_write[cell] = number
        freed.update(work.frees)
    return None


def _conflict(works: Sequence[Work], cell: Cell, first: int, second: int) -> Conflict:
    is_ordered = works[second].before >> first & 1
    fault = Fault.UNORDERED if not is_ordered else Fault.FREED if cell in works[first].frees else Fault.UNWRITTEN
    return Conflict(cell=cell, first=works[first], second=works[second], fault=fault)
