"""Forwards that wait for their backward at the same time: noticed as they run, planned together between two steps.

```text
  step 0    A.fwd B.fwd           B does not fit beside what A left: that goes to the host
                        B.bwd A.bwd                                  and comes back
  step 1    nothing waits: A and B are planned again, each with room for the other (`sharing`)
```

Where no two plans keep the budget together, what waits goes to the host in every step.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from elixir_compile.errors import NoFeasiblePlan
from elixir_compile.managed.agreement.agreement import any_of_all
from elixir_compile.problem.machine import library_bytes
from elixir_compile.problem.planning import ExternalUsage, outside_bytes
from elixir_compile.runtime.executor import Executor
from elixir_compile.search.joint.joint_budget import GraphRequest, Planned, plan_jointly
from elixir_compile.units import format_bytes

if TYPE_CHECKING:
    from elixir_compile.managed.compilation import Compilation

log = logging.getLogger("elixir_compile")
Answer = TypeVar("Answer")


def with_room(executor: Executor, reserved_bytes: int, plan: Callable[[ExternalUsage], Answer]) -> Answer:
    """Return what `plan` makes beside what waits, or, where nothing fits there, once that has gone to the host.

    `reserved_bytes` are left alone where that can be. Raises NoFeasiblePlan as `plan` does.
    """
    waiting_bytes = executor.saved.held_bytes()
    # Of a parameter with few rows the last ranks have none, and what waits may be less on some: all take one way.
    if any_of_all(executor, reserved_bytes > 0, "room to be left"):
        try:
            return plan(ExternalUsage(waiting_bytes=waiting_bytes, reserved_bytes=reserved_bytes))
        except NoFeasiblePlan:
            executor.is_crowded = True
    try:
        return plan(ExternalUsage(waiting_bytes=waiting_bytes))
    except NoFeasiblePlan:
        if not any_of_all(executor, executor.saved.offload_outstanding(), "room that was made"):
            raise
    executor.is_crowded = True
    return plan(ExternalUsage(waiting_bytes=executor.saved.held_bytes()))


def earlier_capture(record: "Compilation", executor: Executor) -> "Compilation | None":
    """Return the earlier capture of the step of `record`, whose plan is in force: the first call of a plain model."""
    if executor.ranks is not None:  # others may have none: they would wait for this one to plan with them
        return None
    for other in executor.compilations:
        is_another = other is not record and other.plan is not None
        is_same = is_another and other.graph == replace(record.graph, name=other.graph.name)
        is_same = is_same and other.beside_bytes >= record.beside_bytes
        if is_same and executor.agrees(other.plan.buckets, other.plan.placements, may_adopt=False):
            return other
    return None


class OutstandingForwards:
    """What one record knows of the forwards beside its own."""

    def __init__(self, record: "Compilation", executor: Executor) -> None:
        self._record = record
        self._executor = executor
        self._beside: tuple[Compilation, ...] = ()
        self._has_run = False
        self.takes_turns = False
        """Whether what waits goes to the host whenever this one runs."""
        self.ended_at: tuple[str, int, str] | None = None
        """File, line and reason of the graph break that ended its graph."""

    @property
    def place(self) -> str:
        """Its name, and what ended its graph."""
        if self.ended_at is None:
            return self._record.name
        file, line, _ = self.ended_at
        return f"{self._record.name} (up to the graph break at {file}:{line})"

    def begin(self) -> None:
        """Before a forward: plan anew what was crowded, once nothing waits."""
        executor = self._executor
        waiting = executor.saved.outstanding_owners()
        records: list[Compilation] = [record for record in executor.compilations if record.outstanding.is_part]
        if records and executor.is_crowded and not waiting:
            executor.is_crowded = False
            _settle(executor, records)
        self._has_run = True
        self.note_waiting(waiting)

    def note_waiting(self, waiting: Sequence[object]) -> None:
        """Remember the most forwards that waited while this one ran."""
        if len(waiting) > len(self._beside):
            self._beside = tuple(waiting)

    @property
    def is_part(self) -> bool:
        """Whether the record ran in the steps that are looked at."""
        return self._has_run and not self._record.is_superseded and not self._record.is_inference

    @property
    def is_alone(self) -> bool:
        """Whether no other graph trains."""
        others = (other for other in self._executor.compilations if other is not self._record)
        return all(other.is_superseded or other.is_inference for other in others)

    def take_over(self, before: "Compilation | None") -> None:
        """Stand for `before`, an earlier capture of the same step, from now on."""
        if before is None:
            return
        before.is_superseded = True
        self._has_run |= before.outstanding._has_run
        for record in (before, *self._executor.compilations):
            own = record.outstanding
            own._beside = tuple(self._record if other is before else other for other in own._beside)
        self._beside = before.outstanding._beside

    def beside(self, records: Sequence["Compilation"]) -> tuple[int, ...]:
        """Return which of `records` waited while this one ran, by number."""
        return tuple(records.index(other) for other in self._beside if other in records)

    def forget(self, *, takes_turns: bool) -> None:
        """Look at the steps from now on, in which it runs beside others or takes requests with them."""
        self._has_run, self._beside = False, ()
        self.takes_turns = takes_turns


def _settle(executor: Executor, records: Sequence["Compilation"]) -> None:
    """Plan the graphs of the last steps together; nothing waits."""
    planned = _planned_together(executor, records)
    beside = [record.outstanding.beside(records) for record in records]
    for record in records:
        record.outstanding.forget(takes_turns=not planned)
    programs = [record.written(*answer) for record, answer in zip(records, planned, strict=False)]
    if not programs:
        return
    for record, (problem, plan), own, others in zip(records, planned, programs, beside, strict=True):
        record.follow(problem, plan, own)
        record.beside_bytes = sum(programs[other].device_bytes + programs[other].given_bytes for other in others)
    buckets = [bucket for _, plan in planned for bucket in plan.buckets]
    executor.move(buckets, [home for _, plan in planned for home in plan.placements])
    for record in records:
        record.mark_active()


def _planned_together(executor: Executor, records: Sequence["Compilation"]) -> Sequence[Planned]:
    """Questions and plans of `records` that keep the budget together; none where there are none."""
    if not all(record.may_replan() for record in records):
        return ()
    read = {name for record in records for name in record.reads}
    base_bytes = outside_bytes(executor, read) + library_bytes(executor.device)
    requests = [
        GraphRequest(problem=record.question(base_bytes), beside=record.outstanding.beside(records))
        for record in records
    ]
    try:
        return plan_jointly(requests, records[0].search)
    except NoFeasiblePlan as error:
        log.warning(
            "no plans keep the budget of %s together, where the forwards that wait need at least %s of %s memory: what "
            "waits goes to the host in every step",
            format_bytes(error.budget_bytes),
            format_bytes(error.needed_bytes),
            error.memory,
        )
        return ()
