"""The axis of rows of bytes: the ops of a step, and its reduces with buffers, which stand between two ops.

```text
  op         0    1    2         3    4      a reduce holds gradients and a flat buffer, and nothing that only
  position   0    1    2    3    4    5      op 2 reads last
  reduce                    ^
```
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from elixir_compile.ir import Action, BucketId, BucketRef, OpId, Plan, RegionRef, StepGraph, Verb
from elixir_compile.step.bucket_bytes import Sizes
from elixir_compile.step.call_bytes import Ops


@dataclass(frozen=True, slots=True)
class Axis:
    """The ops of a step and its reduces with buffers in one order."""

    ops: Ops
    """How many positions there are in all, and before the backward and the update."""
    of: Mapping[OpId, int]
    """The position of each op."""
    op_of: tuple[int, ...]
    """By position: the index of its op, or of the op before a reduce."""
    with_moment: frozenset[BucketId]
    """The buckets whose reduce has a position."""

    @property
    def starts(self) -> tuple[int, ...]:
        """The positions of the ops, in order."""
        return tuple(self.of.values())

    def op_from(self, position: int) -> int:
        """Return the index of the first op that is not before `position`; the number of ops if there is none."""
        if position >= len(self.op_of):
            return self.op_of[-1] + 1
        is_reduce = position > 0 and self.op_of[position] == self.op_of[position - 1]
        return self.op_of[position] + is_reduce

    def op_to(self, position: int) -> int:
        """Return the index of the last op that is not behind `position`; -1 if there is none."""
        return -1 if position < 0 else self.op_of[position]


def axis_of(step: StepGraph, plan: Plan, rank: int) -> Axis:
    """Return the axis of `step`, the ops that `plan` runs, with the reduces of the schedule of `rank`."""
    buckets = [(bucket.id, Sizes.of(bucket, plan.num_copies)) for bucket in plan.buckets]
    with_moment = frozenset(name for name, sizes in buckets if sizes.has_moment)
    index = {op.id: number for number, op in enumerate(step.ops)}
    lasts = {region.id: index[region.last] for region in plan.regions}
    moments: Counter[int] = Counter()
    done = 0  # a reduce before the first op, if a plan has one, counts behind it
    for action in actions_of(plan, rank):
        match action.verb, action.target:
            case Verb.RUN, RegionRef(region):
                done = lasts[region]
            case Verb.REDUCE, BucketRef(bucket) if bucket in with_moment:
                moments[done] += 1
    op_of = tuple(number for number in range(len(step.ops)) for _ in range(1 + moments[number]))
    starts = [0, *accumulate(1 + moments[number] for number in range(len(step.ops)))]
    counted = Ops.of(step)
    ops = Ops(starts[counted.num_forward], starts[counted.num_run], starts[counted.num])
    return Axis(ops, {op.id: starts[number] for number, op in enumerate(step.ops)}, op_of, with_moment)


def actions_of(plan: Plan, rank: int) -> tuple[Action, ...]:
    """Return the actions of `rank`, or of the first rank if all have the same."""
    return next((schedule for schedule in plan.schedules if schedule.rank == rank), plan.schedules[0]).actions
