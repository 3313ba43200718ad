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
from typing import Protocol, TypeVar

from elixir_compile.errors import NoFeasiblePlan
from elixir_compile.ir import Plan
from elixir_compile.managed.agreement.agreement import any_of_all
from elixir_compile.managed.programs import Programs
from elixir_compile.problem.machine import library_bytes
from elixir_compile.problem.planning import ExternalUsage, outside_bytes
from elixir_compile.runtime.executor import Executor
from elixir_compile.search import Problem
from elixir_compile.search.joint.joint_budget import GraphRequest, Planned, plan_jointly
from elixir_compile.units import format_bytes

log = logging.getLogger("elixir_compile")
Answer = TypeVar("Answer")


class PlannedGraph(Protocol):
    """A graph to plan together with others of the same step: a `Compilation`."""

    name: str
    is_superseded: bool
    """Whether a later capture of the same step took its place."""

    @property
    def outstanding(self) -> "OutstandingForwards": ...

    @property
    def is_inference(self) -> bool: ...

    @property
    def param_names(self) -> Sequence[str]:
        """The parameters read by the graph, and all others in their buckets."""
        ...

    @property
    def may_replan(self) -> bool:
        """Whether the plan may change after the first steps."""
        ...

    def joint_problem(self, base_bytes: int) -> Problem:
        """Return the problem of the graph with `base_bytes` of external usage, its buckets free to move."""
        ...

    def search(self, problem: Problem) -> Plan:
        """Return a plan for `problem`."""
        ...

    def write_programs(self, problem: Problem, plan: Plan) -> Programs:
        """Return the programs of `plan`, which answers `problem`."""
        ...

    def follow(self, problem: Problem, plan: Plan, programs: Programs, beside_bytes: int) -> None:
        """Run `programs` of `plan` from the next forward on."""
        ...

    def mark_in_force(self) -> None:
        """Note the executor's generation under the plan."""
        ...


def plan_beside_outstanding(executor: Executor, reserved_bytes: int, plan: Callable[[ExternalUsage], Answer]) -> Answer:
    """Return the result of `plan` for the device bytes of outstanding forwards now.

    `reserved_bytes` are left free if a plan fits without them. If none fits, activations of outstanding forwards are
    offloaded and `plan` is called again. Raises NoFeasiblePlan if `plan` raises it after that.
    """
    outstanding_bytes = executor.saved.held_bytes()
    # The last ranks have no rows of a small parameter, and outstanding forwards may hold less on some ranks. All ranks
    # must take the same branch.
    if any_of_all(executor, reserved_bytes > 0, "room to be left"):
        try:
            return plan(ExternalUsage(outstanding_bytes=outstanding_bytes, reserved_bytes=reserved_bytes))
        except NoFeasiblePlan:
            executor.is_crowded = True
    try:
        return plan(ExternalUsage(outstanding_bytes=outstanding_bytes))
    except NoFeasiblePlan:
        if not any_of_all(executor, executor.saved.offload_outstanding(), "room that was made"):
            raise
    executor.is_crowded = True
    return plan(ExternalUsage(outstanding_bytes=executor.saved.held_bytes()))


class OutstandingForwards:
    """The outstanding forwards beside the runs of a graph."""

    def __init__(self, graph: PlannedGraph, executor: Executor) -> None:
        self._graph = graph
        self._executor = executor
        self._forwards: tuple[object, ...] = ()
        """The graphs of the most forwards that were outstanding at once, one entry per forward."""
        self._has_run = False
        self.offloads_first = False
        """If True, activations of outstanding forwards are offloaded before each run of this graph."""
        self.ended_at: tuple[str, int, str] | None = None
        """File, line and reason of the graph break at which the graph ends."""

    @property
    def description(self) -> str:
        """The name of the graph, and the graph break at which it ends."""
        if self.ended_at is None:
            return self._graph.name
        file, line, _ = self.ended_at
        return f"{self._graph.name} (up to the graph break at {file}:{line})"

    def begin(self) -> None:
        """Record a forward; first plan all graphs of the last steps together if memory was short and none is
        outstanding."""
        executor = self._executor
        outstanding = executor.saved.outstanding_owners()
        graphs = [other for other in executor.compilations if other.outstanding.has_run]
        if graphs and executor.is_crowded and not outstanding:
            executor.is_crowded = False
            _replan_together(executor, graphs)
        self._has_run = True
        self.note_outstanding(outstanding)

    def note_outstanding(self, graphs: Sequence[object]) -> None:
        """Record the `graphs` of all outstanding forwards, if these are more than at any time before."""
        if len(graphs) > len(self._forwards):
            self._forwards = tuple(graphs)

    @property
    def has_run(self) -> bool:
        """Whether the graph trained since the graphs were last planned together."""
        return self._has_run and not self._graph.is_superseded and not self._graph.is_inference

    @property
    def is_alone(self) -> bool:
        """Whether no other graph trains."""
        others = (other for other in self._executor.compilations if other is not self._graph)
        return all(other.is_superseded or other.is_inference for other in others)

    def take_over(self, before: PlannedGraph | None) -> None:
        """Replace `before`, an earlier capture of the same step, in all records of outstanding forwards."""
        if before is None:
            return
        before.is_superseded = True
        self._has_run |= before.outstanding._has_run
        for graph in (before, *self._executor.compilations):
            record = graph.outstanding
            record._forwards = tuple(self._graph if other is before else other for other in record._forwards)
        self._forwards = before.outstanding._forwards

    def positions_in(self, graphs: Sequence[PlannedGraph]) -> tuple[int, ...]:
        """Return the positions in `graphs` of the outstanding forwards' graphs, one per forward."""
        return tuple(graphs.index(other) for other in self._forwards if other in graphs)

    def restart(self, *, offloads_first: bool) -> None:
        """Forget the forwards recorded so far, after the graphs were planned together.

        If `offloads_first`, no plans fit the budget together: activations of outstanding forwards are then offloaded
        before this graph runs beside them, in every step.
        """
        self._has_run, self._forwards = False, ()
        self.offloads_first = offloads_first


def _replan_together(executor: Executor, graphs: Sequence[PlannedGraph]) -> None:
    """Plan `graphs`, which ran in the last steps, together and let them follow the plans; no forward is outstanding."""
    planned = _planned_together(executor, graphs)
    beside = [graph.outstanding.positions_in(graphs) for graph in graphs]
    for graph in graphs:
        graph.outstanding.restart(offloads_first=not planned)
    programs = [graph.write_programs(*answer) for graph, answer in zip(graphs, planned, strict=False)]
    if not programs:
        return
    for graph, (problem, plan), own, others in zip(graphs, planned, programs, beside, strict=True):
        beside_bytes = sum(programs[other].device_bytes + programs[other].given_bytes for other in others)
        graph.follow(problem, plan, own, beside_bytes)
    buckets = [bucket for _, plan in planned for bucket in plan.buckets]
    executor.move(buckets, [home for _, plan in planned for home in plan.placements])
    for graph in graphs:
        graph.mark_in_force()


def _planned_together(executor: Executor, graphs: Sequence[PlannedGraph]) -> Sequence[Planned]:
    """Return problems of `graphs` and plans within their common budget; empty if there are no such plans."""
    if not all(graph.may_replan for graph in graphs):
        return ()
    read = {name for graph in graphs for name in graph.param_names}
    base_bytes = outside_bytes(executor, read) + library_bytes(executor.device)
    requests = [
        GraphRequest(problem=graph.joint_problem(base_bytes), beside=graph.outstanding.positions_in(graphs))
        for graph in graphs
    ]
    try:
        return plan_jointly(requests, graphs[0].search)
    except NoFeasiblePlan as error:
        log.warning(
            "no plans keep the budget of %s together: outstanding forwards need at least %s of %s memory, so their "
            "activations are offloaded in every step",
            format_bytes(error.budget_bytes),
            format_bytes(error.needed_bytes),
            error.memory,
        )
        return ()
