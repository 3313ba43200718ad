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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.base.units import format_bytes
from elixir_compile.graph.capture.captured import Captured, returns_loss
from elixir_compile.graph.ops.optimizers import are_optimized
from elixir_compile.ir import Plan, StepGraph, Tier
from elixir_compile.runtime.executor import Executor
from elixir_compile.search import Problem, extent_of, extents
from elixir_compile.search.joint.joint_budget import (
    GraphRequest,
    Planned,
    plan_in_least,
    plan_jointly,
    plan_leanest,
    rebased,
)
from elixir_compile.search.outer import answer
from elixir_compile.session.allocator_gaps import AllocatorGaps
from elixir_compile.session.graph_planner import Beside, GraphPlanner, GraphRuns, JointGraph
from elixir_compile.session.machine import library_bytes
from elixir_compile.session.neighbours import Neighbours, unread_bytes
from elixir_compile.session.over_budget import TOLERATED_BYTES, Outside, StepWatch, note_overrun
from elixir_compile.session.planning import ExternalUsage, bytes_beside, may_move_back, param_names_of
from elixir_compile.session.stages import StagesOfRank
from elixir_compile.session.step_profiler import foreign_bytes
from elixir_compile.session.trial import Trial, with_margin

log = logging.getLogger("elixir_compile")
_USES_RESULTS = "code that uses its results, as a loss"
_COPIES_OF_RESULTS = 16
"""Code that uses the results of a graph is assumed to hold at most so many tensors of their size: a loss over logits in
half precision holds them in fp32, their logarithms, and the gradients of both."""
_Beside = Sequence[tuple[int, ...]]
"""The positions of the graphs beside each graph."""


class Together:
    """The graphs of a model, whose forwards may be outstanding beside each other, and beside those of other models on
    the device: what they hold, and when they are planned together.

    It has more than 20 methods: a `PlannedGraph` and its `NextPlans` ask 14 of them for words and numbers about the
    other graphs.
    """

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
        self.watch = StepWatch(executor)
        """The measured bytes of the first steps."""
        self.outside = Outside()
        """The measured bytes of code between the graphs."""
        self.gaps = AllocatorGaps(executor)
        """The bytes between tensors for which plans leave room."""
        self.trial = Trial(executor.name)
        """The budget of steps that exceed their budget."""
        self.neighbours: Neighbours[Together] = Neighbours(self, unplaced)
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
        if not (graph.is_planned and graph.planner.is_budget_given and graph.planner.options.plan is None):
            return False
        plan = graph.active.plan
        return plan.budget_bytes < self.needed_bytes(graph) > plan.prediction.device_peak_bytes

    def rest_of_step(self, graph: JointGraph, own: Captured) -> str:
        """Return in words what a step holds beside `own`, the capture of `graph`, as far as it may; empty if
        nothing."""
        executor = self.executor
        if own.backward is None:
            trains = any(slot.param.requires_grad for slot in executor.slots.values())
            return "the backward of a step that trains" if trains else ""
        read = set(param_names_of(own, executor))
        if graph.graph_break is not None:
            return "what runs after the graph break at {}:{}".format(*graph.graph_break)
        if executor.saved.outstanding_owners():
            return "forwards that wait for their backward"
        others = [other for other in self._graphs if other is not graph and not other.is_superseded]
        # Another graph runs in the same steps if it trains other parameters, or trains nothing. One of the same
        # parameters is for inputs of another size.
        if unread_bytes(own, executor, read) or any(
            other.is_inference or self.share_step(graph, other) or not read >= set(other.param_names)
            for other in others
            if other.is_planned
        ):
            return "the other graphs"
        # Steps like those of the graph may have run, with inputs of another size.
        have_trained = any(other.runs.has_run and not other.is_inference for other in others)
        is_known = have_trained and not self.trial.given_bytes
        return "" if is_known or returns_loss(own) else _USES_RESULTS

    def put_off(self, graph: JointGraph, needed_bytes: int, beside: str) -> bool:
        """Return whether `graph`, which needs `needed_bytes`, is planned for a larger budget until the rest of its step
        is known too; `beside` names the rest.

        So the error names a budget that is enough for the whole step. That takes a budget of the user, bytes on the
        device, and for a forward without gradients, steps that train. Beside models in turn no step is measured.
        """
        planner, given_bytes = graph.planner, graph.planner.given_budget_bytes
        if given_bytes is None or not planner.may_replan or not planner.has_free(needed_bytes):
            return False
        if self.neighbours.in_turn():
            return False
        if graph.is_inference and self._have_trained:  # the steps are known, or what they need is being found out
            may_follow = bool(self.trial.given_bytes) or self.watch.is_waiting
        else:  # steps that train follow if an optimizer has parameters of the model
            trained = [slot.param for slot in self.executor.slots.values() if slot.param.requires_grad]
            may_follow = not graph.is_inference or are_optimized(trained)
        if not may_follow:
            return False
        self.trial.begin(given_bytes)
        self.trial.lift(needed_bytes, beside)
        return True

    def may_be_lean(self, graph: JointGraph) -> bool:
        """Return whether `graph` may be planned for few bytes until a step is measured: none was, and it may be planned
        again for the budget of the user."""
        planner, trial = graph.planner, self.trial
        if not planner.is_budget_given or trial.given_bytes or not trial.is_new or graph.is_inference:
            return False
        return planner.may_replan and not (
            self.neighbours.in_turn() or self.stages is not None or planner.divides_to_fit
        )

    def begin_lean(self, graph: JointGraph) -> bool:
        """Return whether `graph` has to be planned again for few bytes, because its step may hold more beside it than
        the plan in use leaves between its forward and its backward.

        The rest of its step is code over its results, or other layers too, which are taken to hold as much for each
        parameter as those of the graph.
        """
        active, slots, rest_bytes = graph.active, self.executor.slots.values(), 0
        rest = self.rest_of_step(graph, active.captured)
        if rest:
            nbytes_of = {storage.id: storage.nbytes for storage in active.graph.storages}
            rest_bytes = _COPIES_OF_RESULTS * sum(nbytes_of.get(name, 0) for name in active.graph.outputs)
        if rest not in ("", _USES_RESULTS):
            trained, read = [slot for slot in slots if slot.param.requires_grad], set(graph.param_names)
            total_bytes = sum(slot.own_nbytes for slot in trained)
            read_bytes = max(1, sum(slot.own_nbytes for slot in trained if slot.name in read))
            kept_bytes = extents(active.problem)[1].left_bytes
            rest_bytes += kept_bytes + 2 * kept_bytes * (total_bytes - read_bytes) // read_bytes
        plan, extent = active.plan, extent_of(active.graph, active.plan)
        is_too_much = rest_bytes > plan.budget_bytes - plan.base_bytes - extent.resident_bytes - extent.left_bytes
        if is_too_much:
            self.trial.begin_lean(plan.budget_bytes)
        return is_too_much

    @property
    def _have_trained(self) -> bool:
        """Whether a graph of the model has trained."""
        return any(own.runs.has_run and not own.is_inference for own in self._graphs)

    def begin(self, graph: JointGraph, args: Sequence[Any] = ()) -> None:
        """Record a forward of `graph` with the inputs `args`; first plan all graphs of the last steps together, with
        those of models in turn, if memory was short and no forward is outstanding.

        Raises NoFeasiblePlan if the steps exceed the budget of the user whatever their plans are.
        """
        is_alone = self.executor.peers is None and self.stages is None
        self.neighbours.begin(is_sharing=is_alone and graph.planner.is_budget_given)
        if graph.is_inference and self._have_trained:
            return  # it runs with the homes of training
        models = [self, *self.neighbours.in_turn()]
        outstanding = _owners(models)
        is_pressed = self.is_pressed(graph)
        if is_pressed and graph.runs.offloads_first and self.offload():
            is_pressed = self.is_pressed(graph)
        self.is_crowded |= is_pressed
        if not outstanding:
            self.is_crowded |= any(model.is_pressed(own) for model in models[1:] for own in model.joint_graphs())
            graphs = [own for own in self.joint_graphs() if not own.is_inference]
            if models[1:]:  # a step holds what they allocate, so its figures tell nothing about `graphs`
                self.watch.peaks = {}
                self.is_crowded |= self.trial.is_lean
                self.trial.conclude("other models, which run in turn with it")
            if graphs and self._is_tried(graphs):
                self._try_together(graphs)
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

    def _is_tried(self, graphs: Sequence[JointGraph]) -> bool:
        """Return whether the budget of `graphs` is tried. That begins if the measured step exceeded it, and they may
        be planned again."""
        peaks, budget_bytes = self.watch.peaks, graphs[0].planner.given_budget_bytes
        self.trial.is_new &= not peaks
        if budget_bytes is None or self.trial.is_of(budget_bytes):
            return budget_bytes is not None
        if max(peaks.values(), default=0) <= budget_bytes + TOLERATED_BYTES:
            return False
        may_plan = all(graph.planner.may_replan for graph in graphs)
        words = "It is planned again with room for them" if may_plan else "It is not planned again"
        if not self._note_overrun(graphs, budget_bytes, words) or not may_plan:
            return False  # nothing took more than its plan: the plans themselves exceed the budget
        self.trial.begin(budget_bytes)
        return True

    def _note_overrun(self, graphs: Sequence[JointGraph], budget_bytes: int, what_follows: str) -> bool:
        """Note what took how much more than planned in the measured step, and log it with `what_follows`; return
        whether anything did."""
        peaks, self.watch.peaks = self.watch.peaks, {}
        causes = note_overrun(peaks, graphs, self._requests(graphs), self._base_bytes(graphs), self.outside)
        # In a trial of a larger budget than the user's, the user knows that steps run over the budget.
        level = logging.WARNING if budget_bytes == graphs[0].planner.given_budget_bytes else logging.INFO
        if causes:
            log.log(
                level,
                "a step of %s took %s of %s: %s. %s",
                self.executor.name,
                format_bytes(max(peaks.values())),
                format_bytes(budget_bytes),
                "; ".join(causes),
                what_follows,
            )
        return bool(causes)

    def _try_together(self, graphs: Sequence[JointGraph]) -> None:
        """Plan `graphs` together for the smallest budget that is enough, at least the user's, unless they follow such
        plans and keep it; in lean steps, for as few bytes as they can.

        Raises NoFeasiblePlan once the budget is known, if it is more than the user's.
        """
        trial = self.trial
        is_crowded, self.is_crowded = self.is_crowded, False
        if (trial.follows(graphs) and self._stays(graphs, is_crowded=is_crowded)) or not trial.may_plan():
            return
        beside = [own.runs.positions_in(graphs) for own in graphs]
        requests, planner = _requests_of({self: graphs}, beside), _searching(graphs)
        if trial.is_lean:
            asked = [replace(each, problem=replace(each.problem, budget_bytes=trial.given_bytes)) for each in requests]
            for plan_all in (plan_leanest, partial(plan_jointly, may_divide=planner.may_divide)):
                with suppress(NoFeasiblePlan):
                    planned = plan_all(asked, planner.search)
                    _follow({self: graphs}, beside, planned)
                    peak_bytes = max(own.prediction.device_peak_bytes for _, own in planned)
                    trial.planned(graphs, min(peak_bytes, trial.given_bytes))
                    return
            self.is_crowded = True  # they are planned together after the step
            trial.conclude()
            return
        plan = partial(plan_in_least, requests, search=planner.search, may_divide=planner.may_divide)
        budget_bytes, planned = plan(trial.given_bytes)
        if budget_bytes > trial.given_bytes:
            # Plans that use a margin are measured, not smaller ones: with it, other plans take other bytes.
            budget_bytes, planned = plan(with_margin(budget_bytes))
        if budget_bytes > trial.budget_bytes == trial.given_bytes:
            if not planner.has_free(budget_bytes):
                trial.refuse(budget_bytes, "what the next steps would show")
            trial.lift(budget_bytes, "what these steps show")
        _follow({self: graphs}, beside, planned)
        trial.planned(graphs, budget_bytes)

    def _stays(self, graphs: Sequence[JointGraph], *, is_crowded: bool) -> bool:
        """Return whether `graphs`, which follow plans for the budget that is tried, go on with them: they have kept it,
        or they are lean, and no step was measured yet."""
        trial, peaks = self.trial, self.watch.peaks
        if trial.is_lean and not peaks:
            waits = trial.waits()
            if not waits:
                trial.end_lean()
            return waits and not is_crowded
        if trial.is_lean:
            self._note_overrun(graphs, trial.budget_bytes, "Its graphs are planned for the budget beside that")
            trial.end_lean()
            return False
        if max(peaks.values(), default=0) > trial.budget_bytes + TOLERATED_BYTES:
            self._note_overrun(graphs, trial.budget_bytes, "It is planned again with room for them")
            return False
        if not is_crowded:
            trial.kept(max(peaks.values(), default=None), {place.graph for place in peaks if not place.is_outside})
            self.watch.peaks = {}
            self.watch.measure_next(is_on=bool(trial.given_bytes))
        return not is_crowded

    def fixed_requests(self, graphs: Sequence[JointGraph], problem: Problem) -> list[GraphRequest]:
        """Return the requests of what runs between `graphs` and does not change with their plans, each with `problem`:
        code, and during a trial forwards without gradients, for which only the place of parameters can be planned."""
        found = self.outside.requests(graphs, problem)
        for other in self._graphs:
            is_tried = self.trial.is_of(other.planner.given_budget_bytes)
            if is_tried and other.is_inference and other.is_planned and not other.is_superseded:
                own = other.planner.joint_problem(other.active, 0, ExternalUsage())
                nbytes = extents(own)[0].peak_bytes + own.base_bytes
                found.append(GraphRequest(problem=problem, beside=(), outside_bytes=nbytes))
        return found

    def _leave_gaps(self, models: Sequence["Together"], args: Sequence[Any]) -> None:
        """Plan the graphs of `models`, which run in turn, again with room for gaps, if the allocator held more in the
        last step than the budget. The next has the inputs `args`."""
        if not self.gaps.is_watching or self is not min(models, key=id):
            return  # one of the models judges for all, or each would go back to plans that another has left
        graphs_of = {model: found for model in models if (found := model.joint_graphs())}
        graphs = [graph for own in graphs_of.values() for graph in own]
        inputs = [arg for arg in args if isinstance(arg, torch.Tensor)]

        def in_no_plan_bytes() -> int:
            beside_bytes = sum(other.neighbours.present_bytes() for other in models[1:])
            beside_bytes += 0 if self.stages is None else self.stages.present_bytes_beside(self)
            return max(0, foreign_bytes(self.executor, inputs) - beside_bytes)

        whys = ["" if self.stages is None else "the stages of a pipeline are planned one after another"]
        whys += [graph.planner.why_fixed for graph in graphs]
        held = self.gaps.found(
            [(graph.active.problem, graph.active.plan) for graph in graphs],
            in_no_plan_bytes,
            given_bytes=min((graph.planner.given_budget_bytes for graph in graphs), key=lambda given: given or 0),
            why_fixed=next(filter(None, whys), ""),
        )
        if held is None:
            return
        beside = [graph.runs.positions_in(graphs) for graph in graphs]
        answer = self.gaps.answer(held, lambda: _jointly(graphs_of, beside))
        for other in models[1:]:
            other.gaps.follow(self.gaps)
        if answer is not None:
            _follow(graphs_of, beside, answer)
            self.gaps.begin(answer)

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

    def share_step(self, graph: JointGraph, other: JointGraph) -> bool:
        """Return whether `graph`, whose forward begins, runs in the same steps as `other`, beside its forward.

        Graphs for inputs of other sizes run in different steps.
        """
        return (
            other in self.executor.saved.outstanding_owners()
            or other in graph.runs.beside
            or graph in other.runs.beside
        )

    def counted_as(self, graph: JointGraph) -> object:
        """Return the object for which the calls of `graph` in a step are counted: the graph, if a call runs several
        graphs one after another, else the executor."""
        return graph if self.has_breaks else self.executor

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
        self.outside.replace(before, graph)
        before.is_superseded = True
        graph.runs.has_run |= before.runs.has_run
        for other in (before, *self._graphs):
            other.runs.beside = tuple(graph if entry is before else entry for entry in other.runs.beside)
        graph.runs.beside = before.runs.beside

    def fixed_bytes(self, graphs: Sequence[JointGraph]) -> int:
        """Return the device bytes of the model outside of its `graphs`, which no plan of them changes."""
        read = {name for graph in graphs for name in graph.param_names}
        return bytes_beside(self.executor, read, graphs[0].planner.options, ExternalUsage(), is_training=True)

    def _base_bytes(self, graphs: Sequence[JointGraph]) -> int:
        """Return the device bytes held outside all of `graphs`, without what their steps took beyond their plans."""
        return self.fixed_bytes(graphs) + library_bytes(self.executor.device)

    def _requests(self, graphs: Sequence[JointGraph]) -> list[GraphRequest]:
        """Return the requests of `graphs` beside each other as they ran last, without the code between them."""
        base_bytes, usage = self._base_bytes(graphs), ExternalUsage()
        problems = [graph.planner.joint_problem(graph.active, base_bytes, usage, is_as_run=True) for graph in graphs]
        return [
            GraphRequest(problem=problem, beside=graph.runs.positions_in(graphs))
            for graph, problem in zip(graphs, problems, strict=True)
        ]

    def joint_graphs(self) -> list[JointGraph]:
        """Return the graphs that ran in the last steps: those that train, or all if none does."""
        ran = [own for own in self._graphs if own.runs.has_run and own.is_planned and not own.is_superseded]
        return [own for own in ran if not own.is_inference] or ran


def _owners(models: Iterable[Together]) -> list[object]:
    """Return the graph of each outstanding forward of `models`, in order for each model."""
    return [owner for model in models for owner in model.executor.saved.outstanding_owners()]


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
    graphs = [graph for own in graphs_of.values() for graph in own]
    if not graphs:
        return
    beside = ran_beside = [graph.runs.positions_in(graphs) for graph in graphs]
    planned = answer(partial(_jointly, graphs_of), beside)
    if isinstance(planned, NoFeasiblePlan) and len(graphs_of) == 1:
        log.warning(
            "no plans keep the budget of %s together: outstanding forwards need at least %s of %s memory, so their "
            "activations are offloaded in every step",
            format_bytes(planned.budget_bytes),
            format_bytes(planned.needed_bytes),
            planned.memory,
        )
    elif isinstance(planned, NoFeasiblePlan):
        beside = [() for _ in graphs]
        planned = answer(partial(_jointly, graphs_of), beside) if any(ran_beside) else planned
        if isinstance(planned, NoFeasiblePlan) and planned.memory == "device":
            missing_bytes = planned.needed_bytes - planned.budget_bytes
            planned = answer(partial(_jointly, graphs_of, missing_bytes=missing_bytes), beside)
    has_plans = not isinstance(planned, NoFeasiblePlan)
    if not isinstance(planned, NoFeasiblePlan):
        _follow(graphs_of, beside, planned)
    for graph in graphs:
        graph.runs = GraphRuns(offloads_first=not has_plans or beside != ran_beside)


def _follow(graphs_of: Mapping[Together, Sequence[JointGraph]], beside: _Beside, planned: Sequence[Planned]) -> None:
    """Let the graphs of `graphs_of` follow the plans in `planned` from now on, each with the graphs `beside` it; no
    forward is outstanding."""
    graphs = [graph for own in graphs_of.values() for graph in own]
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
            model.executor.buckets.move([bucket for bucket, _ in pairs.values()], [home for _, home in pairs.values()])
    for model in graphs_of:
        model.neighbours.stay()
    for graph, (problem, plan), written, others in zip(graphs, planned, programs, beside, strict=True):
        own_bytes = neighbour_bytes = 0
        for model, own in graphs_of.items():
            left_bytes = sum(
                programs[other].device_bytes + programs[other].given_bytes for other in others if graphs[other] in own
            )
            if graph in own:
                own_bytes = left_bytes
                neighbour_bytes += model.neighbours.bytes_in_turn(leaving_out=list(graphs_of))
            else:
                held = model.neighbours.held()
                neighbour_bytes += held.resident_bytes + max(left_bytes, held.grad_bytes)
        graph.follow(problem, plan, written, Beside(own_bytes, neighbour_bytes))
        graph.runs.offloads_first = False
    for graph in graphs:
        graph.mark_in_force()


def _jointly(
    graphs_of: Mapping[Together, Sequence[JointGraph]], beside: _Beside, missing_bytes: int = 0
) -> Sequence[Planned]:
    """Return the problem and the plan of each graph, beside the graphs `beside` each; the plans exceed their budgets by
    `missing_bytes`. Raises NoFeasiblePlan if there are no such plans."""
    requests = _requests_of(graphs_of, beside)
    planner = _searching([graph for graphs in graphs_of.values() for graph in graphs])
    less = [
        replace(request, problem=replace(request.problem, base_bytes=request.problem.base_bytes - missing_bytes))
        for request in requests
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


def _searching(graphs: Sequence[JointGraph]) -> GraphPlanner:
    """Return the planner that searches for `graphs` together: one that may divide the batch, if any may."""
    return next((graph.planner for graph in graphs if graph.planner.may_divide), graphs[0].planner)


def _requests_of(graphs_of: Mapping[Together, Sequence[JointGraph]], beside: _Beside) -> list[GraphRequest]:
    """Return the requests of all graphs, beside the graphs `beside` each, then those of the code between them."""
    joint = list(graphs_of)
    fixed_bytes = {model: model.fixed_bytes(graphs) for model, graphs in graphs_of.items()}
    problems: list[tuple[int, Problem]] = []
    codes: list[GraphRequest] = []
    everything = [graph for graphs in graphs_of.values() for graph in graphs]
    for number, (model, graphs) in enumerate(graphs_of.items()):
        base_bytes = sum(fixed_bytes.values()) + library_bytes(model.executor.device)
        base_bytes += sum(other.neighbours.unplaced_bytes() for other in joint if other is not model)
        base_bytes += model.neighbours.bytes_in_turn(leaving_out=joint)
        base_bytes += max(other.gaps.nbytes for other in joint)
        usage = ExternalUsage(neighbour_host_bytes=model.neighbours.host_bytes_in_turn())
        own = [graph.planner.joint_problem(graph.active, base_bytes, usage) for graph in graphs]
        problems += [(number, problem) for problem in own]
        code = model.fixed_requests(everything, replace(own[0], base_bytes=base_bytes))
        codes += [replace(request, model=number) for request in code]
    graphs_first = [
        GraphRequest(problem=problem, beside=own, model=number)
        for (number, problem), own in zip(problems, beside, strict=True)
    ]
    return [*graphs_first, *codes]
