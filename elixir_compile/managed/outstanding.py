"""Outstanding forwards of several graphs: noticed while the graphs run, then planned together between two steps.

```text
  step 0    A.fwd B.fwd           B does not fit beside the activations of A: they are offloaded
                        B.bwd A.bwd                                         and brought back
  step 1    no forward is outstanding: A and B are planned again, each with room for the other (`joint_budget`)
```

If no two plans keep the budget together, activations of outstanding forwards are offloaded in every step.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch

from elixir_compile.errors import NoFeasiblePlan
from elixir_compile.ir import Phase, Plan, StepGraph
from elixir_compile.managed.agreement.agreement import any_of_all
from elixir_compile.managed.graph_planner import GraphPlanner
from elixir_compile.managed.over_budget import TOLERATED_BYTES, Outside, Overrun, StepWatch, note_overrun
from elixir_compile.managed.programs import Programs
from elixir_compile.managed.stages import StagesOfRank
from elixir_compile.managed.variants import ActivePlan
from elixir_compile.options import Options
from elixir_compile.problem.machine import library_bytes, scalar_bytes
from elixir_compile.problem.outside import outside_bytes
from elixir_compile.problem.planning import ExternalUsage
from elixir_compile.runtime.executor import Executor
from elixir_compile.search import Problem
from elixir_compile.search.joint.joint_budget import GraphRequest, Planned, plan_jointly
from elixir_compile.units import format_bytes

log = logging.getLogger("elixir_compile")
Answer = TypeVar("Answer")


@dataclass(slots=True)
class GraphRuns:
    """What is known of the runs of a graph since the graphs of its model were last planned together."""

    has_trained: bool = False
    beside: tuple[object, ...] = ()
    """The graphs of the most forwards that were outstanding at once, one entry per forward."""
    offloads_first: bool = False
    """If True, activations of outstanding forwards are offloaded before each run of the graph."""

    def positions_in(self, graphs: Sequence[object]) -> tuple[int, ...]:
        """Return the positions in `graphs` of the outstanding forwards' graphs, one per forward."""
        return tuple(graphs.index(other) for other in self.beside if other in graphs)


class JointGraph(Protocol):
    """A graph to plan together with others of the same model: a `PlannedGraph`."""

    name: str
    runs: GraphRuns
    planner: GraphPlanner
    graph_break: tuple[str, int, str] | None
    """File, line and reason of the graph break at which it ends."""
    description: str
    """The name of the graph, and the graph break at which it ends."""
    is_superseded: bool
    """Whether a later capture of the same step took its place."""

    @property
    def is_planned(self) -> bool: ...

    @property
    def active(self) -> ActivePlan: ...

    @property
    def is_inference(self) -> bool: ...

    @property
    def param_names(self) -> Sequence[str]:
        """The parameters read by the graph, and all others in their buckets."""
        ...

    def joint_problem(self, base_bytes: int) -> Problem:
        """Return the problem of the graph with `base_bytes` of external usage, its buckets free to move."""
        ...

    def write_programs(self, problem: Problem, plan: Plan) -> Programs:
        """Return the programs of `plan`, which answers `problem`."""
        ...

    def follow(self, problem: Problem, plan: Plan, programs: Programs, beside_bytes: int) -> None:
        """Run `programs` of `plan` from the next forward on."""
        ...

    def mark_in_force(self) -> None:
        """Note the generation of the buckets under the plan."""
        ...


class OutstandingForwards:
    """The outstanding forwards of a model, whose graphs wait for their backward while other graphs run."""

    def __init__(self, executor: Executor, graphs: Sequence[JointGraph]) -> None:
        """`graphs` are the captured graphs of the model, which adds later ones to the same sequence."""
        self._executor = executor
        self._graphs = graphs
        self.stages: StagesOfRank | None = None
        """The stages of a pipeline on this rank, of which the model is one; None if it is no stage, or the only one."""
        self.has_breaks = False
        """Whether a graph ends at a graph break, so that a call of the model runs several graphs."""
        self.is_crowded = False
        """Whether a forward found too little device memory beside the activations of outstanding forwards."""
        self.watch = StepWatch(executor)
        """The measured bytes of the first steps."""
        self._outside = Outside()

    def plan_beside(self, reserved_bytes: int, plan: Callable[[ExternalUsage], Answer]) -> Answer:
        """Return the result of `plan` for the device bytes of outstanding forwards now.

        `reserved_bytes` are left free if a plan fits without them. If none fits, activations of outstanding forwards
        are offloaded and `plan` is called again. Raises NoFeasiblePlan if `plan` raises it after that.
        """
        executor, saved = self._executor, self._executor.saved
        outstanding_bytes = saved.held_bytes()
        # The last ranks have no rows of a small parameter, and outstanding forwards may hold less on some ranks. All
        # ranks must take the same branch.
        if any_of_all(executor, reserved_bytes > 0, "room to be left"):
            try:
                return plan(ExternalUsage(outstanding_bytes=outstanding_bytes, reserved_bytes=reserved_bytes))
            except NoFeasiblePlan:
                self.is_crowded = True
        try:
            return plan(ExternalUsage(outstanding_bytes=outstanding_bytes))
        except NoFeasiblePlan:
            if not any_of_all(executor, saved.offload_outstanding(), "room that was made"):
                raise
        self.is_crowded = True
        return plan(ExternalUsage(outstanding_bytes=saved.held_bytes()))

    @property
    def executor(self) -> Executor:
        """The executor of the model."""
        return self._executor

    def planned(self) -> Sequence[tuple[StepGraph, Plan]]:
        """Return the graphs that train, with their plans."""
        training = [own for own in self._graphs if own.is_planned and not (own.is_inference or own.is_superseded)]
        return [(own.active.graph, own.active.plan) for own in training]

    def answered(self, problem: Problem, make: Callable[[Problem], Plan], options: Options) -> Plan:
        """Return the plan for `problem` from `make`, beside the other stages of this rank if there are any.

        Raises NoFeasiblePlan if nothing fits.
        """
        trains = any(op.phase is Phase.BACKWARD for op in problem.graph.ops)
        if self.stages is None or not trains:
            return make(problem)
        return self.stages.answered(self, problem, make, options)

    def begin(self, graph: JointGraph) -> None:
        """Record a forward of `graph`; first plan all graphs of the last steps together if memory was short and no
        forward is outstanding."""
        outstanding = self._executor.saved.outstanding_owners()
        if not outstanding:
            graphs = [
                other
                for other in self._graphs
                if other.runs.has_trained and not other.is_superseded and not other.is_inference
            ]
            overrun = self._overrun(graphs) if graphs else None
            if graphs and (self.is_crowded or overrun is not None):
                self.is_crowded = False
                self._replan_together(graphs, overrun)
        graph.runs.has_trained = True
        self._note(graph, outstanding)

    def _overrun(self, graphs: Sequence[JointGraph]) -> Overrun | None:
        """Return how the measured step exceeded the budget, and note by what; None if it did not, or if no plan may be
        changed."""
        peaks, self.watch.peaks = self.watch.peaks, {}
        budget_bytes = graphs[0].planner.given_budget_bytes
        peak_bytes = max(peaks.values(), default=0)
        if budget_bytes is None or peak_bytes <= budget_bytes + TOLERATED_BYTES:
            return None
        causes = note_overrun(peaks, graphs, self._requests(graphs), self._base_bytes(graphs), self._outside)
        if not causes:
            return None  # the plans themselves say so
        found = Overrun(peak_bytes=peak_bytes, budget_bytes=budget_bytes, causes=causes)
        if not (self.watch.may_plan and all(graph.planner.may_replan for graph in graphs)):
            log.warning("%s. It is not planned again", found.words(self._executor.name))
            return None
        log.warning("%s. It is planned again with room for them", found.words(self._executor.name))
        self.watch.num_plans += 1
        return found

    def begin_backward(self, graph: JointGraph, ticket: torch.Tensor) -> None:
        """Record the outstanding forwards beside the backward of `graph` for the forward of `ticket`."""
        self._note(graph, self._executor.saved.outstanding_owners(leaving_out=ticket))

    def _note(self, graph: JointGraph, outstanding: Sequence[object]) -> None:
        """Record the graphs of all `outstanding` forwards, if these are more than ever beside `graph`."""
        if self._executor.calls.spec.num > 1:  # the plan of the graph counts its own
            outstanding = [other for other in outstanding if other is not graph]
        if len(outstanding) > len(graph.runs.beside):
            graph.runs.beside = tuple(outstanding)

    def is_alone(self, graph: JointGraph) -> bool:
        """Whether no graph but `graph` trains."""
        return all(other is graph or other.is_superseded or other.is_inference for other in self._graphs)

    def share_step(self, graph: JointGraph, other: JointGraph) -> bool:
        """Return whether `graph`, whose forward begins, runs in the same steps as `other`, beside its forward.

        Graphs for inputs of other sizes run in different steps.
        """
        return (
            other in self._executor.saved.outstanding_owners()
            or other in graph.runs.beside
            or graph in other.runs.beside
        )

    def counted_as(self, graph: JointGraph) -> object:
        """Return the object for which the calls of `graph` in a step are counted: the graph, if a call runs several
        graphs one after another, else the executor."""
        return graph if self.has_breaks else self._executor

    def names(self) -> list[str]:
        """Return the name of the graph of each outstanding forward, in order."""
        owners = self._executor.saved.outstanding_owners()
        return [graph.name for owner in owners for graph in self._graphs if graph is owner]

    def descriptions(self) -> list[str]:
        """Return the description of each graph with an outstanding forward, in order of capture."""
        outstanding = self._executor.saved.outstanding_owners()
        return [graph.description for graph in self._graphs if graph in outstanding]

    def supersede(self, before: JointGraph, graph: JointGraph) -> None:
        """Replace `before`, an earlier capture of the same step, by `graph` in all records."""
        self._outside.replace(before, graph)
        before.is_superseded = True
        graph.runs.has_trained |= before.runs.has_trained
        for other in (before, *self._graphs):
            other.runs.beside = tuple(graph if entry is before else entry for entry in other.runs.beside)
        graph.runs.beside = before.runs.beside

    def _replan_together(self, graphs: Sequence[JointGraph], overrun: Overrun | None) -> None:
        """Plan `graphs`, which ran in the last steps, together and let them follow the plans; no forward is
        outstanding.

        Raises NoFeasiblePlan after an `overrun` if nothing fits.
        """
        planned = self._planned_together(graphs, overrun)
        beside = [graph.runs.positions_in(graphs) for graph in graphs]
        for graph in graphs:
            graph.runs = GraphRuns(offloads_first=not planned)
        programs = [graph.write_programs(*answer) for graph, answer in zip(graphs, planned, strict=False)]
        if not programs:
            return
        for graph, (problem, plan), own, others in zip(graphs, planned, programs, beside, strict=True):
            beside_bytes = sum(programs[other].device_bytes + programs[other].given_bytes for other in others)
            graph.follow(problem, plan, own, beside_bytes)
        buckets = [bucket for _, plan in planned for bucket in plan.buckets]
        self._executor.buckets.move(buckets, [home for _, plan in planned for home in plan.placements])
        for graph in graphs:
            graph.mark_in_force()

    def _base_bytes(self, graphs: Sequence[JointGraph]) -> int:
        """Return the device bytes held outside all of `graphs`, without what their steps took beyond their plans."""
        read = {name for graph in graphs for name in graph.param_names}
        executor = self._executor
        fixed_bytes = library_bytes(executor.device) + scalar_bytes(executor.slots.values(), executor.device)
        return outside_bytes(executor, read) + fixed_bytes

    def _requests(self, graphs: Sequence[JointGraph]) -> list[GraphRequest]:
        """Return the requests of `graphs` beside each other, without the code between them."""
        base_bytes = self._base_bytes(graphs)
        return [
            GraphRequest(problem=graph.joint_problem(base_bytes), beside=graph.runs.positions_in(graphs))
            for graph in graphs
        ]

    def _planned_together(self, graphs: Sequence[JointGraph], overrun: Overrun | None) -> Sequence[Planned]:
        """Return problems of `graphs` and plans within their common budget; empty if there are no such plans.

        Raises NoFeasiblePlan after an `overrun` if there are none.
        """
        if not all(graph.planner.may_replan for graph in graphs):
            return ()
        requests = self._requests(graphs)
        requests += self._outside.requests(graphs, replace(requests[0].problem, base_bytes=self._base_bytes(graphs)))
        try:
            planner = next((graph.planner for graph in graphs if graph.planner.may_divide), graphs[0].planner)
            return plan_jointly(requests, planner.search, may_divide=planner.may_divide)
        except NoFeasiblePlan as error:
            if overrun is not None:
                raise
            log.warning(
                "no plans keep the budget of %s together: outstanding forwards need at least %s of %s memory, so their "
                "activations are offloaded in every step",
                format_bytes(error.budget_bytes),
                format_bytes(error.needed_bytes),
                error.memory,
            )
            return ()
