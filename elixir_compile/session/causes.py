"""Why a graph gets another plan, what its next problem counts then, and where the plan comes from.

A plan counts what was known of its graph when it was made. Each fact that is known before a later forward, and that the
plan in use does not count, is a cause of another plan. The next problem counts all that is known, not only the fact
that caused it.

```text
  cause      the fact that is not counted so far           what it changes in the problem      the next plan is
  -- `NextPlans.causes`, before a forward: one graph
  FIRST      the step: the graph was captured              all: there was none                 moving, reused, searched
  GROWN      an input is larger than planned               sizes; no seconds of regions, if    reused, searched
                                                           measured at the smaller sizes
  CROWDED    what other outstanding forwards hold          more base bytes                     reused, searched
  PRESSED    what other models hold, in turn with this     more base bytes                     reused, searched
  UNPLACED   state of optimizers that no plan can place    more base bytes, less state         reused, searched
  SHORTAGE   what the device lacked in an early step       more base bytes                     searched
  STAYING    gradients of earlier backward passes          sums of gradients in buckets        reused, moving
  OUTDATED   the user came back to the options of this     options                             moving
             capture, from another of the same step
  REDUCED    a wrapper that reduces the gradients          parameters that stay on the device  reused, searched
  MOVED      homes of buckets, which another plan moved    homes in force                      reused, searched
  PEERS      a cause that another rank has                 what that rank found                searched by all ranks
  -- `PlannedGraph.learn_from_steps`, before a forward while none is outstanding: one graph
  (learned)  the measured seconds of the first steps       prices                              moving, if it is better
  -- `Together.begin`, before a forward while none is outstanding: all graphs of the last steps, of models in turn too
  (tried)    a measured step that exceeds its budget       what took more; a budget to try     moving, jointly
  (crowded)  what the graphs need beside each other        one budget for all                  moving, jointly
  (gaps)     bytes of the allocator between tensors        more base bytes                     moving, jointly

  reused        the plan of an earlier capture of the same step with the same options, if it is in force and has room
  searched      the answer to the problem; buckets in force keep their homes
  moving        the same with open homes: buckets move if their state can follow. FIRST: only if the newest capture of
                the step has other options, whose place the graph takes
```

SHORTAGE is noted by `session.over_budget`, which says what runs again after an OutOfMemoryError, and which steps are
early. Causes in parentheses are found elsewhere, and no members of `Cause`. Where several plans are named, the first
that is possible is taken. After each, the log has the line of the new plan, and its first steps are watched for
overruns and shortages. After GROWN, SHORTAGE and STAYING the seconds of steps are measured from the start again,
because those before are of another step.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple

import torch

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.base.options import plans_alike
from elixir_compile.graph.capture.captured import Captured
from elixir_compile.ir import Plan, StepGraph
from elixir_compile.runtime.executor import Executor
from elixir_compile.search import Problem
from elixir_compile.search.joint.replan import with_buckets_free
from elixir_compile.search.joint.variants import LossAttempt, is_pressed
from elixir_compile.session.agreement import (
    RollCall,
    Step,
    any_of_all,
    asked_by_all,
    call_the_roll,
    meet_in_backward,
    plan_for_all,
    planned_in_step,
)
from elixir_compile.session.graph_planner import ActivePlan, GraphPlanner, JointGraph, active_plan
from elixir_compile.session.neighbours import unplanned_bytes, unread_bytes
from elixir_compile.session.over_budget import EarlyShortage
from elixir_compile.session.plan_files import require_disk
from elixir_compile.session.planning import ExternalUsage, may_move_back, param_names_of
from elixir_compile.session.programs import Programs
from elixir_compile.session.step_profiler import Progress, StepProfiler
from elixir_compile.session.together import Together


class Cause(Enum):
    """Why a graph gets another plan before its next forward; the table above says what follows."""

    FIRST = auto()
    GROWN = auto()
    CROWDED = auto()
    PRESSED = auto()
    UNPLACED = auto()
    SHORTAGE = auto()
    STAYING = auto()
    OUTDATED = auto()
    REDUCED = auto()
    MOVED = auto()
    PEERS = auto()


_MOST_RETURNS = 4
"""So many times a graph takes the homes of buckets back from the same step under other options. Without a limit, two
compilations of a step that run in turn would move the parameters before each of their steps."""


class NextPlans:
    """Finds the causes of new plans of one graph, and makes these plans."""

    def __init__(
        self,
        executor: Executor,
        planner: GraphPlanner,
        graphs: Sequence[JointGraph],
        together: Together,
        shortage: EarlyShortage,
        graph_sets: "PlansOfGraphSets",
    ) -> None:
        """`planner`, `shortage` and `graph_sets` are those of the graph, `graphs` and `together` those of its model."""
        self._executor, self._planner, self._graphs, self._together = executor, planner, graphs, together
        self._shortage, self._graph_sets = shortage, graph_sets
        self.captured: Captured | None = None
        """The graph's own capture."""
        self._num_returns = 0
        """Times that the graph was superseded and took the homes of buckets back."""

    @property
    def _own(self) -> Captured:
        assert self.captured is not None, "the graph is planned once it is captured"
        return self.captured

    def causes(self, graph: JointGraph, args: Sequence[Any]) -> tuple[Cause, ...]:
        """Return the causes of a new plan before a forward of `graph` with the inputs `args`."""
        executor, planner, together, active = self._executor, self._planner, self._together, graph.active
        trains, plan, generation = not graph.is_inference, active.plan, executor.buckets.generation
        beside_bytes = active.beside_bytes + planner.excess_bytes  # by which the plan has more room
        is_tried = together.first_steps.trial.measures(graph)
        is_crowded = trains and executor.saved.held_bytes() > beside_bytes and not is_tried
        if is_crowded and graph.runs.offloads_first:
            is_crowded = not together.offload()
        may_stay = generation in (active.generation, active.moves_at)
        may_stay = may_stay or executor.buckets.agree(plan.buckets, plan.placements, may_adopt=active.generation < 0)
        may_count = trains and not planner.is_plan_given
        found = (
            (Cause.GROWN, planner.has_grown(active, args)),
            (Cause.CROWDED, is_crowded),
            (Cause.PRESSED, together.is_pressed(graph)),
            (Cause.UNPLACED, may_count and unplanned_bytes(executor) > active.unplanned_bytes),
            (Cause.SHORTAGE, self._shortage.wants_plan),
            (Cause.STAYING, trains and planner.staying.is_missing_in(plan)),
            (Cause.OUTDATED, self._outdated(graph, active.graph) is not None),
            (Cause.REDUCED, bool(executor.reducers) and not active.problem.params_stay),
            (Cause.MOVED, not may_stay),
        )
        return tuple([cause for cause, is_so in found if is_so])

    def plan(
        self, graph: JointGraph, causes: Sequence[Cause], attempt: LossAttempt
    ) -> tuple[ActivePlan, JointGraph | None]:
        """Return the next plan of `graph` because of `causes`, with the loss of `attempt`, and the earlier capture of
        the same step whose place it takes; None if there is none.

        If nothing fits, the batch is divided under the option micro_batches="fit"; else lean steps get a larger budget;
        else, if the whole step has to be known first, the first steps do. Raises NoFeasiblePlan if that does not help.
        """
        planner, first_steps = self._planner, self._together.first_steps
        trial = first_steps.trial
        # The step is known already if only its inputs have grown.
        is_known = Cause.GROWN in causes and not trial.given_bytes
        planner.divides_to_fit = False
        while True:
            may_divide = planner.options.micro_batches == "fit" and not (attempt.keeps_whole or trial.is_lean)
            try:
                return self._plan_once(graph, causes)
            except NoFeasiblePlan as error:
                is_of_device, is_final = error.memory == "device", bool(error.because)
                if may_divide and is_of_device and not (is_final or planner.divides_to_fit):
                    planner.divides_to_fit = True
                    continue
                if not trial.ease(error.needed_bytes if is_of_device else trial.given_bytes):
                    may_wait = is_of_device and not (is_final or is_known)
                    rest = first_steps.rest_of_step(graph, self._own) if may_wait else ""
                    if not rest:
                        raise
                    if not (attempt.is_last and first_steps.put_off(graph, error.needed_bytes, rest)):
                        raise error.without(rest) from None
                planner.divides_to_fit = False

    def _plan_once(self, graph: JointGraph, causes: Sequence[Cause]) -> tuple[ActivePlan, JointGraph | None]:
        """Return what `plan` does, for the device bytes of outstanding forwards and of models in turn.

        Bytes for parameters that no graph has read yet are left free if a plan fits without them. If none fits,
        activations of outstanding forwards are offloaded, and it is planned again; at last beside as many bytes of
        models in turn as leave room for it. Raises NoFeasiblePlan if the model does not fit alone.
        """
        executor, own, together, neighbours = self._executor, self._own, self._together, self._together.neighbours
        executor.gradients.stay = any_of_all(executor, executor.gradients.stay, "gradients that stay")
        if self._graph_sets.graph_set_digest:
            answer, beside_bytes = self._planner.answer_for(own), executor.saved.held_bytes()
            sizes = self._planner.sizes.values
            joined, problem, plan = planned_in_step(executor, own, self._planner.options, sizes, answer)
            require_disk(plan, executor.buckets.disk)
            external = ExternalUsage(outstanding_bytes=beside_bytes, neighbour_bytes=together.bytes_in_turn(graph))
            return active_plan(executor, joined, problem, plan, external), None
        step = self._planner.graph(own)

        def beside(in_turn_bytes: int, reserved_bytes: int = 0) -> tuple[ActivePlan, JointGraph | None]:
            usage = ExternalUsage(
                outstanding_bytes=executor.saved.held_bytes(),
                reserved_bytes=reserved_bytes,
                neighbour_bytes=in_turn_bytes,
                neighbour_host_bytes=neighbours.host_bytes_in_turn() if in_turn_bytes else 0,
                gap_bytes=together.gaps.nbytes,
            )
            return self._plan_beside(graph, causes, step, usage)

        reserved_bytes = unread_bytes(own, executor, param_names_of(own, executor))
        in_turn_bytes = neighbours.bytes_in_turn()
        # The last ranks have no rows of a small parameter, and outstanding forwards may hold less on some ranks. All
        # ranks must take the same branch.
        if any_of_all(executor, reserved_bytes > 0, "room to be left"):
            try:
                return beside(in_turn_bytes, reserved_bytes)
            except NoFeasiblePlan:
                together.is_crowded = True
        try:
            return beside(in_turn_bytes)
        except NoFeasiblePlan:
            if not any_of_all(executor, together.offload(), "room that was made") and not in_turn_bytes:
                raise
        together.is_crowded, in_turn_bytes = True, neighbours.bytes_in_turn()
        try:
            return beside(in_turn_bytes)
        except NoFeasiblePlan as error:
            if not in_turn_bytes:
                raise
            in_turn_bytes -= error.needed_bytes - error.budget_bytes if error.memory == "device" else in_turn_bytes
        if in_turn_bytes > 0:
            with suppress(NoFeasiblePlan):
                return beside(in_turn_bytes)
        return beside(0)

    def _plan_beside(
        self, graph: JointGraph, causes: Sequence[Cause], step: StepGraph, external: ExternalUsage
    ) -> tuple[ActivePlan, JointGraph | None]:
        """Return what `plan` does for `step`, beside the `external` usage."""
        executor, own, planner, together = self._executor, self._own, self._planner, self._together
        outdated = self._outdated(graph, step)
        is_new = outdated is not None or Cause.SHORTAGE in causes
        before = None if is_new else self._in_force(graph, step, external)
        if before is not None:
            planner.take_over(before.planner)
            if before.planner.correction is not None:
                graph.profiler.stop()
        is_short = graph.is_planned and planner.staying.is_missing_in(graph.active.plan)
        freed = graph.active if is_short else None if outdated is None else outdated.active

        def ask() -> Problem:
            problem = planner.problem(own, step, external, is_new=before is None)
            # Buckets move if no outstanding forward reads them; homes that leave room for models in turn stay.
            may_move = executor.peers is None and not executor.saved.outstanding_owners()
            if freed is None or together.neighbours.in_turn() or not may_move or not may_move_back(problem, executor):
                return problem
            return with_buckets_free(problem, freed.plan)

        search, options, stages = planner.answer_for(own), planner.options, together.stages

        def answer(problem: Problem) -> Plan:
            make = partial(plan_for_all, executor, search=search, options=options)
            if stages is None or not problem.graph.has_backward:
                return make(problem)
            return stages.answered(together, problem, make, options)

        problem = asked_by_all(executor, ask)
        plan = None if before is None else before.active.plan
        if plan is None:
            problem, plan = planner.staying.answered(problem, ask, answer)
        require_disk(plan, executor.buckets.disk)
        active = active_plan(executor, own, problem, plan, external)
        # Models in turn may hold more than leaves room for a plan: its peak says so.
        active = active.beside_neighbours(max(external.neighbour_bytes, together.bytes_in_turn(graph)))
        if outdated is not None:
            active = replace(active, moves_at=executor.buckets.generation)
            self._num_returns += graph.is_superseded
            graph.is_superseded = False
        # Other graphs may need more than the reserved bytes; their needs are known once they have run.
        has_others = bool(external.reserved_bytes) or bool(together.neighbours.in_turn())
        together.is_crowded |= has_others and is_pressed(plan)
        return active, before or outdated

    def _in_force(self, graph: JointGraph, step: StepGraph, external: ExternalUsage) -> JointGraph | None:
        """Return the first other capture of `step`, the step of `graph`, whose plan is in force and serves `graph`
        beside the outstanding forwards and the models in turn of `external`; None if there is none."""
        for other in self._other_captures(graph, step):
            active = other.active
            if (
                plans_alike(self._planner.options, other.planner.options)
                and active.beside_bytes >= external.outstanding_bytes
                and active.neighbour_bytes >= external.neighbour_bytes
                and not self._planner.staying.is_missing_in(active.plan)
                and self._executor.buckets.agree(active.plan.buckets, active.plan.placements, may_adopt=False)
            ):
                return other
        return None

    def _outdated(self, graph: JointGraph, step: StepGraph) -> JointGraph | None:
        """Return the newest other capture of `step`, the step of `graph`, if it has other options and `graph` takes its
        place; else None.

        That is so if `graph` has no plan yet, or if it was replaced itself and the user came back to its options, at
        most `_MOST_RETURNS` times. The plan of `graph` may then move the buckets.
        """
        is_back = graph.is_superseded and self._num_returns < _MOST_RETURNS
        if graph.is_inference or not (is_back or not graph.is_planned):
            return None
        captures = self._other_captures(graph, step)
        newest = next((other for other in reversed(captures) if not other.is_superseded), None)
        return None if newest is None or plans_alike(self._planner.options, newest.planner.options) else newest

    def _other_captures(self, graph: JointGraph, step: StepGraph) -> list[JointGraph]:
        if self._executor.peers is not None:  # another rank may have no such capture, and would wait for this rank
            return []
        return [other for other in self._graphs if other is not graph and other.is_planned and other.active.is_of(step)]


# ----------------------------------------------------------------------------------------------------------------------
# What other ranks find: the roll call before each forward, and a plan for each set of graphs that ranks run beside each
# other.


_MOST_GRAPH_SETS = 32
"""Sets of graphs for which one graph keeps its plan: each has programs of its own."""


class PlanOfGraphSet(NamedTuple):
    """The plan, programs and sizes of a graph while all ranks run the same set of graphs."""

    active: ActivePlan
    programs: Programs
    sizes: Mapping[str, int]
    """Planned values of the symbols, by name."""


class PlansOfGraphSets:
    """The plans of a graph, each for a set of graphs run by all ranks at the same time.

    A set of graphs is named by its digest, which is empty if the graphs of all ranks are equal.
    """

    def __init__(
        self,
        executor: Executor,
        name: str,
        outstanding: Callable[[], Sequence[str]],
        profiler: StepProfiler,
        progress: Progress,
    ) -> None:
        """`name` is the name of the graph. `outstanding` describes each graph of its model with an outstanding
        forward. `profiler` has the seconds of this rank, and `progress` logs what follows from those of all."""
        self._balance, self._progress = profiler.balance, progress
        self._name = name
        self._outstanding = outstanding
        self.key = ""
        """The digest of the graph in a roll call; empty on one rank, which calls no roll."""
        self.graph_set_digest = ""
        self.is_planned = False
        """Whether there is a plan for `graph_set_digest`."""
        self._executor = executor
        self._written_for = ""
        self._others: dict[str, PlanOfGraphSet] = {}

    def call(self, counted: object | None, *, wants_plan: bool) -> RollCall:
        """Return the next step of all ranks before the graph can run; see `roll_call`.

        The calls of a step are counted for `counted`; None if the graph does not train.
        """
        executor = self._executor
        number = executor.calls.number_of_forward(counted, executor.saved.numbers)
        before = self._outstanding()
        behind = f" behind {', '.join(before)}, whose backward is still to come" if before else ""
        found = call_the_roll(
            executor,
            self.key,
            self.graph_set_digest,
            wants_plan=wants_plan or not self.is_planned,
            is_measured=self._balance.is_known,
            number=number,
            doing=f"is about to run {self._name}{executor.calls.words(number)}{behind}",
        )
        if found.is_measured and executor.ranks is not None:
            line = self._balance.suggested_line(executor.ranks)
            if line is not None:
                self._progress.say(line)
        return found

    def begin_backward(self, counted: object, ticket: torch.Tensor) -> None:
        """Wait until every rank begins the backward of the forward of `ticket`; `counted` is as in `call`.

        Raises RanksDiffer if another rank begins something else.
        """
        meet_in_backward(self._executor, counted, self._name, ticket)

    def find_graph_set(self, key_of_graph: Callable[[], str], counted: object | None) -> None:
        """Find out which graphs the other ranks run beside this graph, before its first plan.

        `key_of_graph` computes `key`; it is called only if there are several ranks. `counted` is as in `call`.
        """
        peers = self._executor.peers
        if peers is not None:
            self.key = key_of_graph()
            _ = peers.num_local  # a collective: later, planning may have failed on one rank alone
        while (call := self.call(counted, wants_plan=True)).step is Step.JOIN:
            self.graph_set_digest = call.graph_set_digest

    def join(self, graph_set_digest: str, now: PlanOfGraphSet) -> PlanOfGraphSet | None:
        """Change to the graphs of `graph_set_digest`, and keep `now`, the plan beside the graphs before, if it was
        planned beside them.

        Returns the plan of earlier runs beside these graphs, or None if the graph has to be planned.
        """
        if self.is_planned:
            self._others[self.graph_set_digest] = now
        self.graph_set_digest = graph_set_digest
        found = self._others.pop(graph_set_digest, None)
        self.is_planned = found is not None
        if len(self._others) > _MOST_GRAPH_SETS:
            self._others.pop(next(iter(self._others)))
        return found

    def record_written(self) -> bool:
        """Record that `graph_set_digest` has programs; return whether the programs before were for other graphs."""
        before, self._written_for, self.is_planned = self._written_for, self.graph_set_digest, True
        return before != self.graph_set_digest
