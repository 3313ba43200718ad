"""The bytes of all stages of a pipeline that one rank runs, in the order in which its schedule runs them.

```text
  stage 0   F F . . B . B .     while a stage runs, the others hold what outlasts their calls: training state,
  stage 2   . . F F . B . B     outstanding activations, gathered copies, sums of gradients, and what the caller holds
```

A run of a stage has the bytes of its call, as `timeline` counts them, beside as many other calls as there are then.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from elixir_compile.analysis.bucket_bytes import bytes_at, resting
from elixir_compile.analysis.call_bytes import CallKind, crosses, sum_nbytes, tangents_of
from elixir_compile.analysis.plan_rows import PlanRows
from elixir_compile.analysis.timeline import bytes_by_position
from elixir_compile.ir import Kind, Phase, Plan, StepGraph, Tier

Run = tuple[int, Phase]
"""A forward or a backward of a stage, or its update, by the place of the stage among those of the rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePeak:
    """What the stages of a rank hold when one of them runs and they hold the most."""

    own_bytes: int
    """The running stage."""
    beside_bytes: int
    """The others."""

    @property
    def nbytes(self) -> int:
        """All of them."""
        return self.own_bytes + self.beside_bytes


def stage_peaks(stages: "Sequence[Sequence[StageBytes]]", runs: Iterable[Run]) -> tuple[StagePeak, ...]:
    """Return for each of the `stages` of a rank the run in which all of them together hold the most.

    A stage has the bytes of its graphs, which are counted as if they ran at once. `runs` are the forwards and backward
    passes of a step in order; the updates follow, one after another.
    """
    most = [StagePeak(own_bytes=0, beside_bytes=0)] * len(stages)
    done = [(0, 0)] * len(stages)

    def note(number: int, phase: Phase) -> None:
        is_over = phase is Phase.UPDATE
        found = StagePeak(
            own_bytes=sum(graph.run_bytes(phase, *done[number]) for graph in stages[number]),
            beside_bytes=sum(
                graph.idle_bytes(*done[place], is_over=is_over)
                for place, graphs in enumerate(stages)
                for graph in graphs
                if place != number
            ),
        )
        most[number] = max(most[number], found, key=lambda peak: peak.nbytes)

    for number, phase in runs:
        note(number, phase)
        done[number] = _after(done[number], phase)
    for number in range(len(stages)):
        note(number, Phase.UPDATE)
    return tuple(most)


def most_beside(stage: "Sequence[StageBytes]", number: int, other: int, runs: Iterable[Run]) -> int:
    """Return the most bytes that `stage`, at place `number` of the rank, holds while the stage at place `other` runs or
    is updated."""
    done, most = (0, 0), 0
    for running, phase in runs:
        if running == other:
            most = max(most, sum(graph.idle_bytes(*done) for graph in stage))
        elif running == number:
            done = _after(done, phase)
    return max(most, sum(graph.idle_bytes(*done, is_over=True) for graph in stage))


def _after(done: tuple[int, int], phase: Phase) -> tuple[int, int]:
    """Return how many forwards and backward passes there were, if one more, of `phase`, follows those of `done`."""
    started, ended = done
    return started + (phase is Phase.FORWARD), ended + (phase is Phase.BACKWARD)


class StageBytes:
    """The bytes of one stage under its plan, while it runs and between its runs."""

    def __init__(self, graph: StepGraph, plan: Plan) -> None:
        self.calls = calls = plan.calls
        # Outputs that are held after their backward are counted by how many backward passes have ended.
        self._graph, self._plan = graph, replace(plan, calls=replace(calls, more_outputs=0))
        self._by_place: dict[tuple[bool, bool], NDArray[np.int64]] = {}
        rows = self._rows(is_first=False, is_last=False)
        step, self._ops = rows.step, rows.axis.ops
        held = [storage for storage in step.storages if storage.kind in (Kind.SAVED, Kind.TEMP)]
        self._output_bytes = sum(storage.nbytes for storage in held if storage.id in step.outputs)
        """Of one call, as `_saved_bytes` and `_input_bytes`."""
        self._saved_bytes = sum(
            storage.nbytes
            for storage in held
            if storage.id not in step.outputs
            and any(crosses(life, self._ops.num_forward) for life in rows.lives.get(storage.id, ()))
        )
        inputs = [storage for storage in step.storages if storage.kind is Kind.INPUT]
        self._input_bytes = sum(storage.nbytes for storage in inputs if storage.id not in calls.shared)
        tangents = tangents_of(step) if calls.output_grads > 1 else ()
        self._buffer_bytes = calls.output_grads * sum(s.nbytes for s in step.storages if s.id in tangents)
        self._resting_bytes = plan.base_bytes + (calls.num - 1) * self._input_bytes
        self._resting_bytes += sum(storage.nbytes for storage in inputs)
        self._outside_grad_bytes = 0
        for row, *_ in rows.storages.values():
            if row.kind in (Kind.PARAM, Kind.BUFFER):
                self._resting_bytes += row.nbytes
            elif row.kind is Kind.GRAD:
                self._outside_grad_bytes += row.nbytes
        self._buckets = _BucketBytes.of(rows, self._rows(is_first=False, is_last=True))

    def _rows(self, *, is_first: bool, is_last: bool) -> PlanRows:
        call = CallKind(is_first=is_first, is_last=is_last, alternate=self.calls.alternate)
        return PlanRows(self._graph, self._plan, call=call)

    def run_bytes(self, phase: Phase, started: int, ended: int) -> int:
        """Return the most bytes during the next forward, backward or update, after `started` forwards and `ended`
        backward passes."""
        number, ops = started if phase is Phase.FORWARD else ended, self._ops
        place = number == 0, number >= self.calls.num - 1
        if place not in self._by_place:
            self._by_place[place] = bytes_by_position(self._rows(is_first=place[0], is_last=place[1]))
        own = self._by_place[place]
        if phase is Phase.UPDATE:
            return int(own[ops.num_run :].max()) if ops.num_run < ops.num else self.idle_bytes(started, ended)
        is_backward = phase is Phase.BACKWARD
        own = own[ops.num_forward : ops.num_run] if is_backward else own[: ops.num_forward]
        return int(own.max()) + self._beside_bytes(started - ended - is_backward, ended, self.calls.input_grads - 1)

    def _beside_bytes(self, num_waiting: int, ended: int, most_input_grads: int) -> int:
        """Return the bytes of `num_waiting` outstanding forwards and of what is held after `ended` backward passes."""
        num_outputs = min(num_waiting + min(ended, self.calls.more_outputs), self.calls.num)
        num_outputs += num_waiting * self.calls.has_loss
        nbytes = num_waiting * self._saved_bytes + num_outputs * self._output_bytes
        return nbytes + min(ended, most_input_grads) * self._input_bytes

    def idle_bytes(self, started: int, ended: int, *, is_over: bool = False) -> int:
        """Return the bytes between two runs, after `started` forwards and `ended` backward passes; `is_over` if the
        caller holds no gradients and no outputs of the step any more."""
        calls, buckets = self.calls, self._buckets
        nbytes = self._resting_bytes + self._outside_grad_bytes * (ended > 0)
        if not is_over:
            given = calls.input_grads if calls.input_grads > 1 else 0
            nbytes += self._buffer_bytes + self._beside_bytes(started - ended, ended, given)
        if ended == calls.num:
            return nbytes + buckets.updated
        if calls.alternate:
            copies_bytes = buckets.copies_backward if started else 0
        elif ended:
            copies_bytes = buckets.copies_backward
        else:
            copies_bytes = buckets.copies_between if started == calls.num else buckets.copies_forward * (started > 0)
        return nbytes + buckets.resting + copies_bytes + buckets.sums * (ended > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _BucketBytes:
    """The bytes of all buckets of a stage between two runs."""

    resting: int
    sums: int
    """Of the gradients of several calls."""
    copies_forward: int
    """Gathered copies between two forwards."""
    copies_between: int
    """Between the last forward and the first backward, if all forwards come first."""
    copies_backward: int
    """Between two backward passes, and if they alternate with forwards, between any two calls."""
    updated: int
    """Between the last backward and the update."""

    @classmethod
    def of(cls, between: PlanRows, last: PlanRows) -> "_BucketBytes":
        """Count the rows of a call that is neither first nor last, and those of the last call."""
        plan, ops = between.plan, between.axis.ops
        homes = {placement.bucket: placement for placement in plan.placements}
        copies = [row for bucket in plan.buckets for row in between.of_bucket(bucket) if row.kind is Kind.GATHERED]
        ending = [row for bucket in plan.buckets for row in last.of_bucket(bucket)]
        is_away = {name: home.param is not Tier.DEVICE for name, home in homes.items()}
        return cls(
            resting=sum(nbytes for bucket in plan.buckets for _, nbytes in resting(bucket, homes[bucket.id])),
            sums=sum(
                sum_nbytes(bucket, between.births(bucket.id), plan.calls, is_away=is_away[bucket.id])
                for bucket in plan.buckets
            ),
            copies_forward=bytes_at(ops.num_forward - 1, copies),
            copies_between=sum(
                row.nbytes for row in ending if row.kind is Kind.GATHERED and row.first < ops.num_forward <= row.last
            ),
            copies_backward=bytes_at(ops.num_run - 1, copies),
            updated=bytes_at(min(ops.num_run, ops.num - 1), ending),
        )
