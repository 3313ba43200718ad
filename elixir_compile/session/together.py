"""Outstanding forwards of several graphs, and other models on the device: planned together between two steps.

```text
  step 0    A.fwd B.fwd           B does not fit beside the activations of A: they are offloaded
                        B.bwd A.bwd                                         and brought back
  step 1    no forward is outstanding: A and B are planned again, each with room for the other (`joint_budget`)
```

A and B may belong to different models that run in turn (see `neighbours`); then each also counts what the other keeps
on the device. If no two plans keep the budget together, activations of outstanding forwards are offloaded in every
step.
"""

import gc
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.base.options import Options
from elixir_compile.base.units import format_bytes
from elixir_compile.ir import Plan, StepGraph, Tier
from elixir_compile.runtime.executor import Executor
from elixir_compile.search import Problem
from elixir_compile.search.joint.joint_budget import GraphRequest, Planned, plan_jointly, rebased
from elixir_compile.search.outer import answer
from elixir_compile.session.agreement import any_of_all
from elixir_compile.session.allocator_gaps import AllocatorGaps
from elixir_compile.session.graph_planner import GraphRuns, JointGraph, fixed_bytes, ran_beside, searching
from elixir_compile.session.machine import library_bytes
from elixir_compile.session.neighbours import Neighbours, on_device_bytes, present_bytes, training_bytes
from elixir_compile.session.over_budget import TOLERATED_BYTES
from elixir_compile.session.planning import ExternalUsage, may_move_back
from elixir_compile.session.step_profiler import foreign_bytes
from elixir_compile.session.trial import FirstSteps
from elixir_compile.step.stages import Run, StageBytes, most_beside, stage_peaks

log = logging.getLogger("elixir_compile")


class Together:
    """The graphs of a model, whose forwards may be outstanding beside each other, and beside those of other models on
    the device: what they hold, and when they are planned together."""

    def __init__(
        self,
        executor: Executor,
        graphs: Sequence[JointGraph],
        unplaced: Callable[[], Iterable[torch.Tensor]] = tuple,
    ) -> None:
        """`graphs` are the captured graphs of the model, which adds later ones to the same sequence. `unplaced` returns
        the tensors of the model that no plan places."""
        self.executor = executor
        self._graphs = graphs
        self.stages: StagesOfRank | None = None
        """The stages of a pipeline on this rank, of which the model is one; None if it is no stage, or the only one."""
        self.has_breaks = False
        """Whether a graph ends at a graph break, so that a call of the model runs several graphs."""
        self.is_crowded = False
        """Whether a forward found too little device memory beside outstanding forwards or models in turn."""
        self.gaps = AllocatorGaps(executor)
        """The bytes between tensors for which plans leave room."""
        self.neighbours: Neighbours[Together] = Neighbours(self, unplaced)
        self.first_steps = FirstSteps(executor, graphs, self.neighbours)
        """What is measured of the first steps, and the plans that are tried in them."""
        self._warned_of: tuple[Sequence[str], int] = ([], 0)
        """The names of the other models beside which a plan exceeded its budget last, and by how much."""

    def offload(self) -> bool:
        """Copy the activations of outstanding forwards of this model and of models in turn to the host; return whether
        any memory was freed."""
        executors = [self.executor, *(model.executor for model in self.neighbours.in_turn())]
        return sum(executor.saved.offload_outstanding() for executor in executors) > 0

    def make_room(self, graph: JointGraph) -> None:
        """Let other models move to the host if the plan of `graph` exceeds the budget of the user beside them; warn of
        what stays."""
        plan, neighbours = graph.active.plan, self.neighbours
        if not graph.planner.is_budget_given or not neighbours.are_news_for(plan):
            return
        excess_bytes, (names, said_bytes) = self._excess_bytes(plan), self._warned_of
        if excess_bytes <= TOLERATED_BYTES or (excess_bytes <= said_bytes and names == [*neighbours.holders()]):
            return
        gc.collect()  # a deleted model is there until then
        excess_bytes, holders = min(excess_bytes, self._excess_bytes(plan)), neighbours.holders()
        self._warned_of = [*holders], excess_bytes
        if excess_bytes > TOLERATED_BYTES and holders:
            log.warning(
                "a step of %s exceeds its budget of %s by up to %s beside other models, which cannot move to the host "
                "now: %s. Models that run in turn are planned together from their second step on; delete those that "
                "are not needed, and tensors that share their memory, or raise the budget",
                graph.name,
                format_bytes(plan.budget_bytes),
                format_bytes(excess_bytes),
                ", ".join(f"{name} holds {format_bytes(nbytes)}" for name, nbytes in holders.items()),
            )

    def _excess_bytes(self, plan: Plan) -> int:
        """Return the bytes by which `plan` exceeds its budget beside other models, after these have made room."""
        excess_bytes = plan.prediction.device_peak_bytes + self.neighbours.idle_bytes() - plan.budget_bytes
        return excess_bytes - self.neighbours.make_room(excess_bytes)

    @property
    def may_leave(self) -> bool:
        """Whether the buckets of the model may move to the host now, and back: no forward is outstanding, neither other
        ranks nor a plan of the user decide where they are, and the host has room."""
        executor, planned = self.executor, [graph for graph in self._graphs if graph.is_planned]
        if executor.saved.outstanding_owners() or any(graph.planner.why_unmovable for graph in planned):
            return False
        problems = [graph.active.problem for graph in planned]
        free_bytes = min((problem.host_budget_bytes for problem in problems), default=0)
        held = self.neighbours.held()
        may_move = all(may_move_back(problem, executor) for problem in problems)
        return may_move and held.resident_bytes + held.grad_bytes <= free_bytes

    def planned(self) -> Sequence[tuple[StepGraph, Plan]]:
        """Return the graphs that train, with their plans."""
        training = [own for own in self._graphs if own.is_planned and not (own.is_inference or own.is_superseded)]
        return [(own.active.graph, own.active.plan) for own in training]

    def bytes_in_turn(self, graph: JointGraph) -> int:
        """Return the device bytes that models in turn hold while `graph` runs, if the user chose its budget; else 0."""
        return self.neighbours.bytes_in_turn() if graph.planner.is_budget_given else 0

    def needed_bytes(self, graph: JointGraph) -> int:
        """Return the peak of the plan in use of `graph`, beside what models in turn hold by now."""
        more_bytes = self.bytes_in_turn(graph) - graph.active.neighbour_bytes
        return graph.active.plan.prediction.device_peak_bytes + max(0, more_bytes)

    def is_pressed(self, graph: JointGraph) -> bool:
        """Return whether models in turn hold so much by now that the plan in use of `graph` exceeds the budget that the
        user gave."""
        if not (graph.is_planned and graph.planner.is_budget_given) or graph.planner.is_plan_given:
            return False
        plan = graph.active.plan
        return plan.budget_bytes < self.needed_bytes(graph) > plan.prediction.device_peak_bytes

    def begin(self, graph: JointGraph, args: Sequence[Any] = ()) -> None:
        """Record a forward of `graph` with the inputs `args`; first plan all graphs of the last steps together, with
        those of models in turn, if memory was short and no forward is outstanding.

        Raises NoFeasiblePlan if the steps exceed the budget of the user whatever their plans are.
        """
        is_alone = self.executor.peers is None and self.stages is None
        self.neighbours.begin(is_sharing=is_alone and graph.planner.is_budget_given)
        if graph.is_inference and self.first_steps.have_trained:
            return  # it runs with the homes of training
        models = [self, *self.neighbours.in_turn()]
        outstanding = _owners(models)
        is_pressed = self.is_pressed(graph)
        if is_pressed and graph.runs.offloads_first and self.offload():
            is_pressed = self.is_pressed(graph)
        self.is_crowded |= is_pressed
        if not outstanding:
            self.is_crowded |= any(model.is_pressed(own) for model in models[1:] for own in model.joint_graphs())
            steps, graphs = self.first_steps, [own for own in self.joint_graphs() if not own.is_inference]
            if models[1:]:  # a step holds what they allocate, so its figures tell nothing about `graphs`
                steps.watch.peaks = {}
                self.is_crowded |= steps.trial.is_lean
                steps.trial.conclude("other models, which run in turn with it")
            if graphs and steps.are_tried(graphs):
                is_crowded, self.is_crowded = self.is_crowded, False
                if steps.want_plans(graphs, is_crowded=is_crowded):
                    plans = JointPlans({self: graphs})
                    self.is_crowded = not steps.try_plans(graphs, plans.requests(), plans.follow)
            elif any(model.is_crowded for model in models):
                replan_together(models)
            elif graphs:
                self._leave_gaps(models, args)
        if self.neighbours.is_away and is_pressed:  # it is planned again for where its buckets are
            self.neighbours.stay()
        elif self.neighbours.is_away:
            self.make_room(graph)
            self.neighbours.come_back()
        graph.runs.has_run = True
        self._note(graph, _owners([self, *self.neighbours.others()]))

    def _leave_gaps(self, models: Sequence["Together"], args: Sequence[Any]) -> None:
        """Plan the graphs of `models`, which run in turn, again with room for gaps, if the allocator held more in the
        last step than the budget. The next has the inputs `args`."""
        if not self.gaps.is_watching or self is not min(models, key=id):
            return  # one of the models judges for all, or each would go back to plans that another has left
        plans = JointPlans({model: found for model in models if (found := model.joint_graphs())})
        inputs = [arg for arg in args if isinstance(arg, torch.Tensor)]

        def in_no_plan_bytes() -> int:
            beside_bytes = sum(other.neighbours.present_bytes() for other in models[1:])
            beside_bytes += 0 if self.stages is None else self.stages.present_bytes_beside(self)
            return max(0, foreign_bytes(self.executor, inputs) - beside_bytes)

        whys = ["" if self.stages is None else "the stages of a pipeline are planned one after another"]
        whys += [graph.planner.why_fixed for graph in plans.graphs]
        held = self.gaps.found(
            [(graph.active.problem, graph.active.plan) for graph in plans.graphs],
            in_no_plan_bytes,
            given_bytes=min((graph.planner.given_budget_bytes for graph in plans.graphs), key=lambda given: given or 0),
            why_fixed=next(filter(None, whys), ""),
        )
        if held is None:
            return
        planned = self.gaps.answer(held, plans.plan)
        for other in models[1:]:
            other.gaps.follow(self.gaps)
        if planned is not None:
            plans.follow(planned)
            self.gaps.begin(planned)

    def begin_backward(self, graph: JointGraph, ticket: torch.Tensor) -> None:
        """Record the outstanding forwards beside the backward of `graph` for the forward of `ticket`."""
        own = self.executor.saved.outstanding_owners(leaving_out=ticket)
        self._note(graph, [*own, *_owners(self.neighbours.others())])

    def _note(self, graph: JointGraph, outstanding: Sequence[object]) -> None:
        """Record the graphs of all `outstanding` forwards, if these are at least as many as ever beside `graph`.

        The last of as many count: a graph for other sizes may have taken the place of one."""
        if self.executor.calls.spec.num > 1:  # the plan of the graph counts its own
            outstanding = [other for other in outstanding if other is not graph]
        if len(outstanding) >= len(graph.runs.beside):
            graph.runs.beside = tuple(outstanding)

    def is_alone(self, graph: JointGraph) -> bool:
        """Whether no graph but `graph` trains."""
        return all(other is graph or other.is_superseded or other.is_inference for other in self._graphs)

    def counted_as(self, graph: JointGraph) -> object:
        """Return the object for which the calls of `graph` in a step are counted: the graph, if a call runs several
        graphs one after another, else the executor."""
        return graph if self.has_breaks else self.executor

    def share_step(self, graph: JointGraph, other: JointGraph) -> bool:
        """Return whether `graph`, whose forward begins, runs in the same steps as `other`, beside its forward.

        Graphs for inputs of other sizes run in different steps.
        """
        return other in self.executor.saved.outstanding_owners() or ran_beside(graph, other)

    def names(self) -> list[str]:
        """Return the name of the graph of each outstanding forward, in order."""
        owners = self.executor.saved.outstanding_owners()
        return [graph.name for owner in owners for graph in self._graphs if graph is owner]

    def descriptions(self) -> list[str]:
        """Return the name of each graph with an outstanding forward, and the graph break at which it ends, in order of
        capture."""
        outstanding = self.executor.saved.outstanding_owners()
        return [
            graph.name
            if graph.graph_break is None
            else "{} (up to the graph break at {}:{})".format(graph.name, *graph.graph_break)
            for graph in self._graphs
            if graph in outstanding
        ]

    def supersede(self, before: JointGraph, graph: JointGraph) -> None:
        """Replace `before`, an earlier capture of the same step, by `graph` in all records."""
        self.first_steps.outside.replace(before, graph)
        before.is_superseded = True
        graph.runs.has_run |= before.runs.has_run
        for other in (before, *self._graphs):
            other.runs.beside = tuple(graph if entry is before else entry for entry in other.runs.beside)
        graph.runs.beside = before.runs.beside

    def joint_graphs(self) -> list[JointGraph]:
        """Return the graphs that ran in the last steps: those that train, or all if none does."""
        ran = [own for own in self._graphs if own.runs.has_run and own.is_planned and not own.is_superseded]
        return [own for own in ran if not own.is_inference] or ran


def _owners(models: Iterable[Together]) -> list[object]:
    """Return the graph of each outstanding forward of `models`, in order for each model."""
    return [owner for model in models for owner in model.executor.saved.outstanding_owners()]


class JointPlans:
    """Plans of graphs that run beside each other, all of one model or some of each of several models in turn."""

    def __init__(
        self, graphs_of: Mapping[Together, Sequence[JointGraph]], beside: Sequence[tuple[int, ...]] | None = None
    ) -> None:
        """`beside` are the positions of the graphs beside each graph, once per outstanding forward; without them, those
        beside which it ran."""
        self._graphs_of = graphs_of
        self.graphs = [graph for own in graphs_of.values() for graph in own]
        """The graphs of all models."""
        self.beside = [graph.runs.positions_in(self.graphs) for graph in self.graphs] if beside is None else beside

    def requests(self) -> list[GraphRequest]:
        """Return the requests of all graphs, then those of the code between them."""
        joint = list(self._graphs_of)
        own_bytes = sum(fixed_bytes(model.executor, graphs) for model, graphs in self._graphs_of.items())
        problems: list[tuple[int, Problem]] = []
        codes: list[GraphRequest] = []
        for number, (model, graphs) in enumerate(self._graphs_of.items()):
            base_bytes = own_bytes + library_bytes(model.executor.device)
            base_bytes += sum(other.neighbours.unplaced_bytes() for other in joint if other is not model)
            base_bytes += model.neighbours.bytes_in_turn(leaving_out=joint)
            base_bytes += max(other.gaps.nbytes for other in joint)
            usage = ExternalUsage(neighbour_host_bytes=model.neighbours.host_bytes_in_turn())
            own = [graph.planner.joint_problem(graph.active, base_bytes, usage) for graph in graphs]
            problems += [(number, problem) for problem in own]
            code = model.first_steps.fixed_requests(self.graphs, replace(own[0], base_bytes=base_bytes))
            codes += [replace(request, model=number) for request in code]
        graphs_first = [
            GraphRequest(problem=problem, beside=own, model=number)
            for (number, problem), own in zip(problems, self.beside, strict=True)
        ]
        return [*graphs_first, *codes]

    def plan(self, missing_bytes: int = 0) -> Sequence[Planned]:
        """Return the problem and the plan of each graph; the plans exceed their budgets by `missing_bytes`.

        Raises NoFeasiblePlan if there are no such plans."""
        planner = searching(self.graphs)
        less = [
            replace(request, problem=replace(request.problem, base_bytes=request.problem.base_bytes - missing_bytes))
            for request in self.requests()
        ]
        found = plan_jointly(less, planner.search, may_divide=planner.may_divide)
        if not missing_bytes:
            return found
        return [
            (
                replace(problem, base_bytes=problem.base_bytes + missing_bytes),
                rebased(plan, plan.base_bytes + missing_bytes),
            )
            for problem, plan in found
        ]

    def follow(self, planned: Sequence[Planned]) -> None:
        """Let the graphs follow the plans in `planned` from now on; no forward is outstanding."""
        graphs, graphs_of = self.graphs, self._graphs_of
        programs = [
            graph.programs.write_next(graph.active.captured, problem.graph, plan)
            for graph, (problem, plan) in zip(graphs, planned, strict=True)
        ]
        plan_of = {id(graph): plan for graph, (_, plan) in zip(graphs, planned, strict=True)}
        for leaves_alone in (True, False):  # what leaves the device leaves first, of whatever model it is
            for model, own in graphs_of.items():
                pairs = {
                    bucket.id: (bucket, home)
                    for graph in own
                    for bucket, home in zip(plan_of[id(graph)].buckets, plan_of[id(graph)].placements, strict=True)
                    if not leaves_alone or home.optim is not Tier.DEVICE
                }
                buckets, homes = [bucket for bucket, _ in pairs.values()], [home for _, home in pairs.values()]
                model.executor.buckets.move(buckets, homes)
        for model in graphs_of:
            model.neighbours.stay()
        for graph, (problem, plan), written, others in zip(graphs, planned, programs, self.beside, strict=True):
            own_bytes = neighbour_bytes = 0
            for model, own in graphs_of.items():
                beside = [programs[other] for other in others if graphs[other] in own]
                left_bytes = sum(program.device_bytes + program.given_bytes for program in beside)
                if graph in own:
                    own_bytes = left_bytes
                    neighbour_bytes += model.neighbours.bytes_in_turn(leaving_out=list(graphs_of))
                else:
                    held = model.neighbours.held()
                    neighbour_bytes += held.resident_bytes + max(left_bytes, held.grad_bytes)
            external = ExternalUsage(outstanding_bytes=own_bytes, neighbour_bytes=neighbour_bytes)
            graph.follow(problem, plan, written, external)
            graph.runs.offloads_first = False
        for graph in graphs:
            graph.mark_in_force()


def replan_together(models: Sequence[Together]) -> None:
    """Plan the graphs of `models`, which ran in the last steps, together and let them follow the plans; no forward is
    outstanding.

    Several models are at least beside no graph, because activations of outstanding forwards can be offloaded before
    each run. If they fit under no plans then, their plans exceed the budget by what is missing.
    """
    graphs_of: dict[Together, list[JointGraph]] = {}
    for model in models:
        model.is_crowded = False
        found = model.joint_graphs()
        if found and all(graph.planner.may_replan for graph in found):
            graphs_of[model] = found
        else:
            for graph in found:
                graph.runs = GraphRuns(offloads_first=True)
    plans = as_ran = JointPlans(graphs_of)
    if not plans.graphs:
        return
    planned = answer(JointPlans.plan, plans)
    if isinstance(planned, NoFeasiblePlan) and len(graphs_of) == 1:
        log.warning(
            "no plans keep the budget of %s together: outstanding forwards need at least %s of %s memory, so their "
            "activations are offloaded in every step",
            format_bytes(planned.budget_bytes),
            format_bytes(planned.needed_bytes),
            planned.memory,
        )
    elif isinstance(planned, NoFeasiblePlan):
        plans = JointPlans(graphs_of, [() for _ in as_ran.graphs])
        planned = answer(JointPlans.plan, plans) if any(as_ran.beside) else planned
        if isinstance(planned, NoFeasiblePlan) and planned.memory == "device":
            planned = answer(plans.plan, planned.needed_bytes - planned.budget_bytes)
    has_plans = not isinstance(planned, NoFeasiblePlan)
    if not isinstance(planned, NoFeasiblePlan):
        plans.follow(planned)
    for graph in plans.graphs:
        graph.runs = GraphRuns(offloads_first=not has_plans or plans.beside != as_ran.beside)


# ----------------------------------------------------------------------------------------------------------------------
# The stages of a pipeline that one rank runs share its device: each is planned beside the bytes of the others.
#
#   budget of the rank    | stage 0 alone: its share | reserved for stage 2, which has no plan yet        first planned
#                         | idle bytes of stage 0    | stage 2 ................................ |         then
#
# Torch captures the stages one after another, in their first forwards. A stage without a plan gets
# as large a share as its training state has in the state of all stages without a plan. A stage with a plan counts with
# the bytes that it holds while the others run, so the bytes that only its own runs need are free for them. If the plans
# of all stages together hold more than the budget at any run of the schedule, the last plan is made again with less.


_MOST_TRIES = 6
"""Plans of a stage with less and less memory, until all stages fit together."""


class StagesOfRank:
    """The stages that a schedule runs on this rank, and the order in which it runs them."""

    def __init__(self, schedule: object, runs: Sequence[Run]) -> None:
        self._schedule = weakref.ref(schedule)
        self._runs = tuple(runs)
        self._stages: dict[int, weakref.ref[Together]] = {}
        """By place among the stages of the rank."""
        self._beside_bytes: dict[int, int] = {}
        """By place: how much of the external usage in the plan of a stage are the other stages."""

    def is_of(self, schedule: object) -> bool:
        """Whether these are the stages of `schedule`."""
        return self._schedule() is schedule

    def join(self, place: int, stage: Together) -> None:
        """Let `stage` be the one at `place`."""
        self._stages[place] = weakref.ref(stage)
        stage.stages = self

    def replace(self, before: Together, after: Together) -> None:
        """Let `after` take the place of `before`."""
        self.join(self._place_of(before), after)

    def _place_of(self, stage: Together) -> int:
        return next(place for place, own in self._alive() if own is stage)

    def _alive(self) -> Iterator[tuple[int, Together]]:
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

    def peak_bytes(self, stage: Together, own: Sequence[tuple[StepGraph, Plan]]) -> int:
        """Return the most bytes that the planned stages of the rank hold together, if `stage` has the plans `own`."""
        place = self._place_of(stage)
        planned = {other: there.planned() for other, there in self._alive()} | {place: own}
        places = [other for other, plans in planned.items() if plans]
        runs = [run._replace(stage=places.index(run.stage)) for run in self._runs if run.stage in places]
        peaks = stage_peaks([self._bytes_of(other, planned[other]) for other in places], runs)
        return max(peak.nbytes for peak in peaks) + library_bytes(stage.executor.device)

    def present_bytes_beside(self, stage: Together) -> int:
        """Return the device bytes that the other stages of the rank hold now."""
        return sum(present_bytes(there.executor) for _, there in self._alive() if there is not stage)

    def answered(self, stage: Together, problem: Problem, make: Callable[[Problem], Plan], options: Options) -> Plan:
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
