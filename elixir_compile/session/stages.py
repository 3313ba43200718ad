"""The stages of a pipeline that one rank runs share its device: each is planned beside the bytes of the others.

```text
  budget of the rank    | stage 0 alone: its share | reserved for stage 2, which has no plan yet        first planned
                        | idle bytes of stage 0    | stage 2 ................................ |         then
```

Torch captures the stages one after another, in their first forwards. The share of a stage without a plan is that of its
training state in the state of all stages without one. A stage with a plan counts with the bytes that it holds while
the others run, so the bytes that only its own runs need are free for them. If the plans of all stages together hold
more than the budget at any run of the schedule, the last plan is made again with less.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.base.options import Options
from elixir_compile.ir import Plan, StepGraph
from elixir_compile.runtime.executor import Executor
from elixir_compile.search import Problem
from elixir_compile.session.agreement import any_of_all
from elixir_compile.session.machine import library_bytes
from elixir_compile.session.neighbours import on_device_bytes, present_bytes, training_bytes
from elixir_compile.step.stages import Run, StageBytes, most_beside, stage_peaks

_MOST_TRIES = 6
"""Plans of a stage with less and less memory, until all stages fit together."""


class Stage(Protocol):
    """A stage of this rank: the `Together` of its model."""

    stages: "StagesOfRank | None"

    @property
    def executor(self) -> Executor: ...

    def planned(self) -> Sequence[tuple[StepGraph, Plan]]:
        """Return the graphs that train in the stage, with their plans; empty before the first is planned."""
        ...


class StagesOfRank:
    """The stages that a schedule runs on this rank, and the order in which it runs them."""

    def __init__(self, schedule: object, runs: Sequence[Run]) -> None:
        self._schedule = weakref.ref(schedule)
        self._runs = tuple(runs)
        self._stages: dict[int, weakref.ref[Stage]] = {}
        """By place among the stages of the rank."""
        self._beside_bytes: dict[int, int] = {}
        """By place: how much of the external usage in the plan of a stage are the other stages."""

    def is_of(self, schedule: object) -> bool:
        """Whether these are the stages of `schedule`."""
        return self._schedule() is schedule

    def join(self, place: int, stage: Stage) -> None:
        """Let `stage` be the one at `place`."""
        self._stages[place] = weakref.ref(stage)
        stage.stages = self

    def replace(self, before: Stage, after: Stage) -> None:
        """Let `after` take the place of `before`."""
        self.join(self._place_of(before), after)

    def _place_of(self, stage: Stage) -> int:
        return next(place for place, own in self._alive() if own is stage)

    def _alive(self) -> Iterator[tuple[int, Stage]]:
        for place, reference in sorted(self._stages.items()):
            stage = reference()
            if stage is not None:
                yield place, stage

    def _bytes_of(self, place: int, planned: Sequence[tuple[StepGraph, Plan]]) -> list[StageBytes]:
        """Return the bytes of the graphs of the stage at `place`, without other stages and without libraries."""
        stage = dict(self._alive())[place]
        outside_bytes = self._beside_bytes.get(place, 0) + library_bytes(stage.executor.device)
        return [
            StageBytes(graph, replace(plan, base_bytes=max(0, plan.base_bytes - outside_bytes)))
            for graph, plan in planned
        ]

    def peak_bytes(self, stage: Stage, own: Sequence[tuple[StepGraph, Plan]]) -> int:
        """Return the most bytes that the planned stages of the rank hold together, if `stage` has the plans `own`."""
        place = self._place_of(stage)
        planned = {other: there.planned() for other, there in self._alive()} | {place: own}
        places = [other for other, plans in planned.items() if plans]
        runs = [run._replace(stage=places.index(run.stage)) for run in self._runs if run.stage in places]
        peaks = stage_peaks([self._bytes_of(other, planned[other]) for other in places], runs)
        return max(peak.nbytes for peak in peaks) + library_bytes(stage.executor.device)

    def present_bytes_beside(self, stage: Stage) -> int:
        """Return the device bytes that the other stages of the rank hold now."""
        return sum(present_bytes(there.executor) for _, there in self._alive() if there is not stage)

    def answered(self, stage: Stage, problem: Problem, make: Callable[[Problem], Plan], options: Options) -> Plan:
        """Return the plan of `stage` for `problem`, whose device budget is that of the rank, from `make`.

        A plan that the user gave in `options` is returned as it is. Raises NoFeasiblePlan if the stages do not fit
        together.
        """
        place, budget_bytes = self._place_of(stage), problem.budget_bytes
        beside_bytes = reserved = 0
        for other, there in self._alive():
            planned = there.planned() if other != place else ()
            if planned:
                held = self._bytes_of(other, planned)
                nbytes = most_beside(held, other, place, self._runs)
                # Free memory leaves out the bytes that are on the device now.
                now_bytes = on_device_bytes(there.executor) if options.device_memory is None else 0
                beside_bytes += max(0, nbytes - now_bytes)
            elif other != place:
                reserved += training_bytes(there.executor)
        self._beside_bytes[place] = beside_bytes
        if reserved:
            own = training_bytes(stage.executor)
            reserved = max(0, budget_bytes - beside_bytes) * reserved // (own + reserved)
        asked = replace(problem, base_bytes=problem.base_bytes + beside_bytes, budget_bytes=budget_bytes - reserved)
        try:
            made = make(asked)
        except NoFeasiblePlan as error:
            # Other ranks of the stage may have more room, and must not plan a second time if this one does not.
            is_alone = stage.executor.peers is None
            if not (reserved and is_alone and error.memory == "device" and error.needed_bytes <= budget_bytes):
                raise
            asked = replace(asked, budget_bytes=error.needed_bytes)
            made = make(asked)
        if options.plan is not None:
            return made
        needed_bytes = budget_bytes
        for _ in range(_MOST_TRIES):  # a plan with less memory, until all planned stages fit together
            needed_bytes = self.peak_bytes(stage, [(asked.graph, made)])
            excess_bytes = needed_bytes - budget_bytes
            if not any_of_all(stage.executor, excess_bytes > 0, "stages of a rank that hold too much together"):
                return made if stage.executor.peers is not None else replace(made, budget_bytes=budget_bytes)
            less_bytes = min(asked.budget_bytes, made.prediction.device_peak_bytes) - max(excess_bytes, 1)
            asked = replace(asked, budget_bytes=max(1, less_bytes))
            try:
                made = make(asked)
            except NoFeasiblePlan as error:
                if error.memory != "device":
                    raise
                needed_bytes = budget_bytes + error.needed_bytes - error.budget_bytes
                raise NoFeasiblePlan(error.op, error.source, budget_bytes, needed_bytes, error.by_kind) from error
        raise NoFeasiblePlan("", "", budget_bytes, needed_bytes, {})
