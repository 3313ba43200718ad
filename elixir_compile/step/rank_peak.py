"""The bytes of all stages of a pipeline that one rank runs, in the order in which its schedule runs them.

```text
  stage 0   F F . . B . B .     while a stage runs, the others hold all that outlasts their calls: training state,
  stage 2   . . F F . B . B     outstanding activations, gathered copies, sums of gradients, and what the caller holds
```

A run of a stage has the bytes of its call, as `timeline` counts them, beside as many other calls as there are then.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elixir_compile.ir import Kind, Phase, Plan, StepGraph, Tier
from elixir_compile.step.bucket_bytes import bytes_at, resting
from elixir_compile.step.call_bytes import CallKind, input_bytes, output_bytes, sum_nbytes, tangents_of
from elixir_compile.step.plan_rows import PlanRows


class Run(NamedTuple):
    """A forward or a backward of a stage."""

    stage: int
    """The place of the stage among those of the rank."""
    phase: Phase
    micro_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePeak:
    """The bytes of the stages of a rank, in the run of one of them with the most bytes together."""

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
    steps = [[_Step(graph) for graph in graphs] for graphs in stages]

    def note(number: int, own_bytes: int, *, is_over: bool = False) -> None:
        others = (step for place, graphs in enumerate(steps) for step in graphs if place != number)
        beside_bytes = sum(step.idle_bytes(is_over=is_over) for step in others)
        found = StagePeak(own_bytes=own_bytes, beside_bytes=beside_bytes)
        most[number] = max(most[number], found, key=lambda peak: peak.nbytes)

    for run in runs:
        note(run.stage, sum(step.run(run) for step in steps[run.stage]))
    for number, graphs in enumerate(stages):
        note(number, sum(graph.update_bytes for graph in graphs), is_over=True)
    return tuple(most)


def most_beside(stage: "Sequence[StageBytes]", number: int, other: int, runs: Iterable[Run]) -> int:
    """Return the most bytes that `stage`, at place `number` of the rank, holds while the stage at place `other` runs or
    is updated."""
    steps, most = [_Step(graph) for graph in stage], 0
    for run in runs:
        if run.stage == other:
            most = max(most, sum(step.idle_bytes() for step in steps))
        elif run.stage == number:
            for step in steps:
                step.run(run)
    return max(most, sum(step.idle_bytes(is_over=True) for step in steps))


class Done(NamedTuple):
    """How far a step of a stage is."""

    started: int = 0
    """Forwards that have run."""
    ended: int = 0
    """Backward passes that have run."""
    num_lean: int = 0
    """Lean calls among the outstanding forwards."""


@dataclass(slots=True)
class _Step:
    """A running step of a stage: a forward is lean if as many full ones wait as the plan has at most."""

    stage: "StageBytes"
    done: Done = field(default_factory=Done)
    waiting: dict[int, bool] = field(default_factory=dict)
    """Whether the forward of each outstanding micro-batch is lean."""

    def run(self, run: Run) -> int:
        """Run one call, and return its most bytes."""
        started, ended, num_lean = self.done
        is_forward = run.phase is Phase.FORWARD
        num_full = started - ended - num_lean
        is_lean = num_full >= self.stage.most_full if is_forward else self.waiting.pop(run.micro_batch)
        nbytes = self.stage.run_bytes(run.phase, self.done, is_lean=is_lean)
        if is_forward:
            self.waiting[run.micro_batch] = is_lean
        self.done = Done(
            started + is_forward, ended + (not is_forward), num_lean + (is_lean if is_forward else -is_lean)
        )
        return nbytes

    def idle_bytes(self, *, is_over: bool = False) -> int:
        """Return the bytes between two runs."""
        return self.stage.idle_bytes(self.done, is_over=is_over)


class StageBytes:
    """The bytes of one stage under its plan, while it runs and between its runs."""

    def __init__(self, graph: StepGraph, plan: Plan) -> None:
        self.calls = calls = plan.calls
        self.most_full = calls.outstanding if plan.lean is None else plan.lean.num_full
        """The most full forwards that wait for their backward."""
        # Outputs that are held after their backward are counted by how many backward passes have ended.
        plan = replace(plan, calls=replace(calls, more_outputs=0))
        full = PlanRows(graph, replace(plan, lean=None))
        lean = full if plan.lean is None else PlanRows(graph, plan.of_lean_calls())
        self._rows = {False: full, True: lean}
        """Of a full and of a lean call."""
        self._by_place: dict[tuple[bool, bool, bool], NDArray[np.int64]] = {}
        self._waiting_bytes, self._lean_bytes = (sum(rows.waiting_bytes.values()) for rows in (full, lean))
        self._held = _Held.of(full)
        self._buckets = _BucketBytes.of(full)

    def run_bytes(self, phase: Phase, done: Done, *, is_lean: bool = False) -> int:
        """Return the most bytes during the next forward or backward, a lean one if `is_lean`."""
        is_backward = phase is Phase.BACKWARD
        number = done.ended if is_backward else done.started
        own, ops = self._alone(number == 0, number >= self.calls.num - 1, is_lean), self._rows[is_lean].axis.ops
        own = own[ops.num_forward : ops.num_run] if is_backward else own[: ops.num_forward]
        num_waiting = done.started - done.ended - is_backward
        num_lean = done.num_lean - (is_backward and is_lean)
        return int(own.max()) + self._beside_bytes(num_waiting, num_lean, done.ended, self.calls.input_grads - 1)

    @property
    def update_bytes(self) -> int:
        """The most bytes during the update."""
        own, num_run = self._alone(self.calls.num == 1, True, False), self._rows[False].axis.ops.num_run
        over = Done(self.calls.num, self.calls.num)
        return int(own[num_run:].max()) if num_run < len(own) else self.idle_bytes(over, is_over=True)

    def _alone(self, is_first: bool, is_last: bool, is_lean: bool) -> NDArray[np.int64]:
        """Return the bytes of a call by position, if no other forward waits and no backward has ended."""
        place = is_first, is_last, is_lean
        if place not in self._by_place:
            self._by_place[place] = _in_call(self._rows[is_lean], is_first=is_first, is_last=is_last).nbytes
        return self._by_place[place]

    def _beside_bytes(self, num_waiting: int, num_lean: int, ended: int, most_input_grads: int) -> int:
        """Return the bytes of `num_waiting` outstanding forwards, `num_lean` of them lean, and of the outputs
        and gradients that the caller holds after `ended` backward passes."""
        calls = self.calls
        num_outputs = min(num_waiting + min(ended, calls.more_outputs), calls.num) + num_waiting * calls.has_loss
        nbytes = (num_waiting - num_lean) * self._waiting_bytes + num_lean * self._lean_bytes
        return nbytes + num_outputs * self._held.outputs + min(ended, most_input_grads) * self._held.inputs

    def idle_bytes(self, done: Done, *, is_over: bool = False) -> int:
        """Return the bytes between two runs; `is_over` if the caller holds no gradients and no outputs of the step any
        more."""
        calls, buckets, (started, ended, num_lean) = self.calls, self._buckets, done
        nbytes = self._held.always + self._held.outside_grads * (ended > 0)
        if not is_over:
            given = calls.input_grads if calls.input_grads > 1 else 0
            nbytes += self._held.buffers + self._beside_bytes(started - ended, num_lean, ended, given)
        if ended == calls.num:
            return nbytes + buckets.updated
        if calls.alternate:
            copies_bytes = buckets.copies_backward if started else 0
        elif ended:
            copies_bytes = buckets.copies_backward
        else:
            copies_bytes = buckets.copies_between if started == calls.num else buckets.copies_forward * (started > 0)
        return nbytes + buckets.resting + copies_bytes + buckets.sums * (ended > 0)


def _in_call(rows: PlanRows, *, is_first: bool, is_last: bool) -> PlanRows:
    return rows.in_call(CallKind(is_first=is_first, is_last=is_last, alternate=rows.plan.calls.alternate), {})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """The bytes outside of buckets that a stage, or the caller for it, holds between two runs."""

    always: int
    """External usage, buffers, parameters outside of buckets, and the inputs of all calls."""
    outside_grads: int
    """Gradients of parameters outside of buckets."""
    buffers: int
    """Buffers that receive the gradients of outputs, of all calls."""
    inputs: int
    """The inputs of one call that are no parts of a larger tensor; a gradient of them has as many bytes."""
    outputs: int
    """The outputs of one call."""

    @classmethod
    def of(cls, rows: PlanRows) -> "_Held":
        step, calls = rows.step, rows.plan.calls
        own_bytes = input_bytes(step, calls)
        tangents = tangents_of(step) if calls.output_grads > 1 else ()
        outside = [own[0] for own in rows.storages.values()]
        kinds = (Kind.PARAM, Kind.BUFFER, Kind.INPUT)
        always_bytes = sum(row.nbytes for row in outside if row.kind in kinds)
        return cls(
            always=rows.plan.base_bytes + always_bytes + (calls.num - 1) * own_bytes,
            outside_grads=sum(row.nbytes for row in outside if row.kind is Kind.GRAD),
            buffers=calls.output_grads * sum(s.nbytes for s in step.storages if s.id in tangents),
            inputs=own_bytes,
            outputs=output_bytes(step),
        )


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
    def of(cls, rows: PlanRows) -> "_BucketBytes":
        """Count the rows of a call that is neither first nor last, and those of the last call."""
        plan, ops = rows.plan, rows.axis.ops
        homes = {placement.bucket: placement for placement in plan.placements}
        between, last = (_in_call(rows, is_first=False, is_last=is_last) for is_last in (False, True))
        copies = [row for bucket in plan.buckets for row in between.of_bucket(bucket) if row.kind is Kind.GATHERED]
        ending = [row for bucket in plan.buckets for row in last.of_bucket(bucket)]
        is_away = {name: home.param is not Tier.DEVICE for name, home in homes.items()}
        staying = (row for row in ending if row.kind is Kind.GATHERED and row.first < ops.num_forward <= row.last)
        return cls(
            resting=sum(nbytes for bucket in plan.buckets for _, nbytes in resting(bucket, homes[bucket.id])),
            sums=sum(
                sum_nbytes(bucket, rows.births(bucket.id), plan.calls, is_away=is_away[bucket.id])
                for bucket in plan.buckets
            ),
            copies_forward=bytes_at(ops.num_forward - 1, copies),
            copies_between=sum(row.nbytes for row in staying),
            copies_backward=bytes_at(ops.num_run - 1, copies),
            updated=bytes_at(min(ops.num_run, ops.num - 1), ending),
        )
