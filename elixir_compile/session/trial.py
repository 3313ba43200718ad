"""The budget of the first steps: less than the user's until they are measured, and more if they exceed it.

A step that exceeds its budget is planned again, or refused with a budget that is enough for the whole step.

```text
  step 0    A.fwd does not fit: it runs in the fewest bytes that it can, over the budget    B.fwd  B.bwd  A.bwd
  step 1    A and B follow plans for the smallest budget that has plans for both            measured
  step 2    ... with room for code between them, as measured                                measured again
  step 4    the last steps have kept the budget of the user: go on; or a larger one: NoFeasiblePlan names it
```

When the first graph of a step is planned, neither the later graphs are known nor the bytes of the code between them,
which runs op by op. A refusal with what the first graph needs would be followed by one with what the second needs.

Plans that fill the budget leave no room for what is not known. If it may need more than they leave, the first steps are
lean: each graph follows its smallest plan, for a budget below the user's, until a step is measured.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.base.units import format_bytes
from elixir_compile.graph.capture.captured import Captured, returns_loss
from elixir_compile.graph.ops.optimizers import are_optimized
from elixir_compile.runtime.executor import Executor
from elixir_compile.search import Problem, extent_of, extents
from elixir_compile.search.joint.joint_budget import GraphRequest, Planned, plan_in_least, plan_jointly, plan_leanest
from elixir_compile.session.graph_planner import JointGraph, fixed_bytes, ran_beside, searching
from elixir_compile.session.machine import library_bytes
from elixir_compile.session.neighbours import Neighbours, unread_bytes
from elixir_compile.session.over_budget import TOLERATED_BYTES, Outside, StepWatch, note_overrun
from elixir_compile.session.planning import ExternalUsage, param_names_of

log = logging.getLogger("elixir_compile")

# ----------------------------------------------------------------------------------------------------------------------
# The budget that is tried, and when it is enough.


_NUM_KEPT = 2
"""So many measured runs of each graph must keep a budget before it is enough."""
_MOST_PLANS = 8
"""So many times the graphs of a model are planned together in a trial."""
_MOST_KEPT = 3
"""After so many measured steps that kept a budget, it is enough: graphs that did not run in them, as for inputs of
other sizes, are not waited for."""
_MOST_UNMEASURED = 16
"""So many forwards in turn may begin without a measured step before them: accumulated gradients take several a step."""
_MOST_LEAN = 16
"""So many forwards in turn may be lean without a measured step: somebody else may hold torch.profiler."""
_EASE_DIVISOR = 8
"""A budget below the user's, for which no plan is found, grows by this part of it."""
_MARGIN_DIVISOR = 64
"""A budget that is tried is more than the smallest by this part of it."""


@dataclass(slots=True)
class _Tried:
    """What the steps have shown of the plans in force."""

    graphs: frozenset[object] = frozenset()
    """The graphs that were planned together; empty if they were planned one by one."""
    num_kept: dict[object, int] = field(default_factory=dict)
    """Measured steps of each graph that kept the budget."""
    num_measured: int = 0
    num_unmeasured: int = 0
    peak_bytes: int = 0
    """The most bytes of a measured step."""


class Trial:
    """The budget that is tried in the first steps of a model, at least that of its user."""

    def __init__(self, name: str) -> None:
        """`name` is the name of the model."""
        self._name = name
        self.given_bytes = 0
        """The budget of the user; 0 without a trial."""
        self.budget_bytes = 0
        """The budget under which plans are made meanwhile: less than the user's in lean steps."""
        self.is_new = True
        """Whether no step has been measured, and no budget tried."""
        self._enough_bytes = 0
        """The budget that is enough, once the step is refused; 0 before."""
        self._uncounted = ""
        """What is not in the budget that is enough."""
        self._tried = _Tried()
        self._num_plans = 0

    def is_of(self, given_bytes: int | None) -> bool:
        """Return whether the budget `given_bytes` is tried."""
        return self.given_bytes == given_bytes

    def budget_for(self, given_bytes: int) -> int:
        """Return the budget to plan for, if the user's is `given_bytes`."""
        return self.budget_bytes if given_bytes == self.given_bytes else given_bytes

    def begin(self, given_bytes: int) -> None:
        """Begin to try `given_bytes`, the budget of the user, unless it is tried already."""
        if given_bytes != self.given_bytes:
            self._end()
            self.given_bytes = self.budget_bytes = given_bytes

    @property
    def is_lean(self) -> bool:
        """Whether plans are made for less than the budget of the user, until a step is measured."""
        return self.budget_bytes < self.given_bytes

    def begin_lean(self, given_bytes: int) -> None:
        """Begin with lean steps; `given_bytes` is the budget of the user."""
        self.begin(given_bytes)
        self.budget_bytes = 1
        log.info(
            "the first steps of %s take as little device memory as they can, until what is held beside its graphs is "
            "measured",
            self._name,
        )

    def ease(self, needed_bytes: int) -> bool:
        """Plan for at least `needed_bytes`, or for the budget of the user if that is less; return whether plans were
        made for less."""
        was_lean = self.is_lean
        if was_lean:
            least_bytes = self.budget_bytes + self.budget_bytes // _EASE_DIVISOR
            self.budget_bytes = min(self.given_bytes, max(needed_bytes, least_bytes))
        return was_lean

    def end_lean(self) -> None:
        """Plan for the budget of the user from now on."""
        self.budget_bytes, self._tried = self.given_bytes, _Tried()

    def waits(self) -> bool:
        """Return whether lean steps go on, although a forward begins before which none was measured."""
        self._tried.num_unmeasured += 1
        return self._tried.num_unmeasured <= _MOST_LEAN

    def lift(self, needed_bytes: int, beside: str) -> None:
        """Plan for at least `needed_bytes` from now on; `beside` names what else the step may need."""
        if self.budget_bytes <= self.given_bytes:
            log.warning(
                "%s needs %s of device memory, budget %s. Its first steps run over the budget, and show what is enough "
                "for %s too. An error with this number follows if it is more than the budget",
                self._name,
                format_bytes(needed_bytes),
                format_bytes(self.given_bytes),
                beside,
            )
        # More than before in any case: an error may name the bytes of a plan that its search does not find.
        least_bytes = self.budget_bytes + self.budget_bytes // _MARGIN_DIVISOR
        self.budget_bytes, self._tried = max(needed_bytes, least_bytes), _Tried()

    def check(self, given_bytes: int | None) -> None:
        """Raise NoFeasiblePlan if the step was refused under the budget `given_bytes`.

        Under another budget the step is tried anew.
        """
        if self._enough_bytes and given_bytes != self.given_bytes:
            self._end()
        if self._enough_bytes:
            raise NoFeasiblePlan("", "", self.given_bytes, self._enough_bytes, {}, uncounted=self._uncounted)

    def follows(self, graphs: Iterable[object]) -> bool:
        """Return whether `graphs` were planned together for the budget."""
        return self._tried.graphs == frozenset(graphs)

    def measures(self, graph: object) -> bool:
        """Return whether `graph` follows a plan for another budget than the user's until its step is measured, whatever
        is held beside it: with another plan, the measurement would end."""
        return self.budget_bytes != self.given_bytes and graph in self._tried.graphs

    def may_plan(self) -> bool:
        """Return whether the graphs may be planned together once more; if not, the trial ends.

        Raises NoFeasiblePlan if their plans are for more than the budget of the user.
        """
        if self._num_plans < _MOST_PLANS:
            return True
        self.conclude("what its steps take beyond their plans, which was more in each")
        return False

    def planned(self, graphs: Iterable[object], budget_bytes: int) -> None:
        """Note that `graphs` follow plans for `budget_bytes` together."""
        self.budget_bytes, self._tried = budget_bytes, _Tried(frozenset(graphs))
        self._num_plans += 1

    def kept(self, peak_bytes: int | None, measured: Iterable[object]) -> None:
        """Note that a step, in which the graphs `measured` took at most `peak_bytes`, has kept the budget; None if it
        was not measured. The trial ends once enough is known.

        Raises NoFeasiblePlan if the budget of the user is too small.
        """
        tried = self._tried
        tried.num_measured += peak_bytes is not None
        tried.num_unmeasured = tried.num_unmeasured + 1 if peak_bytes is None else 0
        tried.peak_bytes = max(tried.peak_bytes, peak_bytes or 0)
        for graph in measured:
            tried.num_kept[graph] = tried.num_kept.get(graph, 0) + 1
        is_kept_by_all = all(tried.num_kept.get(graph, 0) >= _NUM_KEPT for graph in tried.graphs)
        if is_kept_by_all or tried.num_measured >= _MOST_KEPT:
            self.conclude()
        elif tried.num_unmeasured > _MOST_UNMEASURED:
            self.conclude("" if tried.num_measured else "code between its graphs, which was not measured")

    def refuse(self, enough_bytes: int, uncounted: str) -> None:
        """Raise NoFeasiblePlan: at least `enough_bytes` are needed, and more for what is `uncounted`."""
        self._enough_bytes, self._uncounted = enough_bytes, uncounted
        self.check(self.given_bytes)

    def conclude(self, uncounted: str = "") -> None:
        """End the trial with what the steps have shown, which lacks what is `uncounted`.

        Raises NoFeasiblePlan if the budget of the user is too small.
        """
        tried = self._tried
        has_kept = tried.num_measured > 0 and tried.peak_bytes <= self.given_bytes + TOLERATED_BYTES
        if self.budget_bytes <= self.given_bytes or (has_kept and not uncounted):
            self._end()
            return
        self.refuse(max(self.budget_bytes, tried.peak_bytes), uncounted)

    def _end(self) -> None:
        self.given_bytes = self.budget_bytes = self._enough_bytes = self._num_plans = 0
        self._tried, self._uncounted, self.is_new = _Tried(), "", False


# ----------------------------------------------------------------------------------------------------------------------
# The plans that are tried, and what the steps show of them.


_USES_RESULTS = "code that uses its results, as a loss"
_COPIES_OF_RESULTS = 16
"""Code that uses the results of a graph is assumed to hold at most so many tensors of their size: a loss over logits in
half precision holds them in fp32, their logarithms, and the gradients of both."""


class FirstSteps:
    """The first steps of a model: what is measured of them, what they may hold beside the graphs that are known, and
    the plans that are tried until a budget is enough."""

    def __init__(self, executor: Executor, graphs: Sequence[JointGraph], neighbours: Neighbours[Any]) -> None:
        """`graphs` are the captured graphs of the model, which adds later ones to the same sequence, and `neighbours`
        the other models on its device."""
        self._executor, self._graphs, self._neighbours = executor, graphs, neighbours
        self.trial = Trial(executor.name)
        """The budget of steps that exceed their budget."""
        self.watch = StepWatch(executor)
        """The measured bytes of the first steps."""
        self.outside = Outside()
        """The measured bytes of code between the graphs."""

    @property
    def have_trained(self) -> bool:
        """Whether a graph of the model has trained."""
        return any(own.runs.has_run and not own.is_inference for own in self._graphs)

    # While graphs are captured: the rest of their step is not known yet.

    def rest_of_step(self, graph: JointGraph, own: Captured) -> str:
        """Return in words what a step holds beside `own`, the capture of `graph`, as far as it may; empty if
        nothing."""
        executor = self._executor
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
            other.is_inference or ran_beside(graph, other) or not read >= set(other.param_names)
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
        if self._neighbours.in_turn():
            return False
        if graph.is_inference and self.have_trained:  # the steps are known, or what they need is being found out
            may_follow = bool(self.trial.given_bytes) or self.watch.is_waiting
        else:  # steps that train follow if an optimizer has parameters of the model
            trained = [slot.param for slot in self._executor.slots.values() if slot.param.requires_grad]
            may_follow = not graph.is_inference or are_optimized(trained)
        if not may_follow:
            return False
        self.trial.begin(given_bytes)
        self.trial.lift(needed_bytes, beside)
        return True

    def may_be_lean(self, graph: JointGraph) -> bool:
        """Return whether `graph`, which is no stage of a pipeline, may be planned for few bytes until a step is
        measured: none was, and it may be planned again for the budget of the user."""
        planner, trial = graph.planner, self.trial
        if not planner.is_budget_given or trial.given_bytes or not trial.is_new or graph.is_inference:
            return False
        return planner.may_replan and not (self._neighbours.in_turn() or planner.divides_to_fit)

    def begin_lean(self, graph: JointGraph) -> bool:
        """Return whether `graph` has to be planned again for few bytes, because its step may hold more beside it than
        the plan in use leaves between its forward and its backward.

        The rest of its step is code over its results, or other layers too, which are taken to hold as much for each
        parameter as those of the graph.
        """
        active, slots, rest_bytes = graph.active, self._executor.slots.values(), 0
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

    # Between two steps: `graphs` are those that ran in the last steps, and no forward is outstanding.

    def are_tried(self, graphs: Sequence[JointGraph]) -> bool:
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

    def want_plans(self, graphs: Sequence[JointGraph], *, is_crowded: bool) -> bool:
        """Return whether `graphs`, whose budget is tried, are planned again; if not, they go on with their plans.

        They go on with plans that have kept the budget, or that are lean before a step was measured, unless a step
        `is_crowded`. Raises NoFeasiblePlan once the budget that is enough is known, if it is more than the user's.
        """
        trial, peaks = self.trial, self.watch.peaks
        if not trial.follows(graphs):
            return trial.may_plan()
        if trial.is_lean and not peaks:
            if trial.waits():
                return is_crowded and trial.may_plan()
            trial.end_lean()
        elif trial.is_lean:
            self._note_overrun(graphs, trial.budget_bytes, "Its graphs are planned for the budget beside that")
            trial.end_lean()
        elif max(peaks.values(), default=0) > trial.budget_bytes + TOLERATED_BYTES:
            self._note_overrun(graphs, trial.budget_bytes, "It is planned again with room for them")
        elif not is_crowded:
            trial.kept(max(peaks.values(), default=None), {place.graph for place in peaks if not place.is_outside})
            self.watch.peaks = {}
            self.watch.measure_next(is_on=bool(trial.given_bytes))
            return False
        return trial.may_plan()

    def try_plans(
        self,
        graphs: Sequence[JointGraph],
        requests: Sequence[GraphRequest],
        follow: Callable[[Sequence[Planned]], None],
    ) -> bool:
        """Plan `graphs` together for the smallest budget that is enough for their `requests`, at least the user's, and
        let them `follow` the plans; in lean steps, for as few bytes as they can.

        Returns whether they do: if there are no lean plans, they do not. Raises NoFeasiblePlan if the device has less
        than a budget that is enough.
        """
        trial, planner = self.trial, searching(graphs)
        if trial.is_lean:
            asked = [replace(each, problem=replace(each.problem, budget_bytes=trial.given_bytes)) for each in requests]
            for plan_all in (plan_leanest, partial(plan_jointly, may_divide=planner.may_divide)):
                with suppress(NoFeasiblePlan):
                    planned = plan_all(asked, planner.search)
                    follow(planned)
                    peak_bytes = max(own.prediction.device_peak_bytes for _, own in planned)
                    trial.planned(graphs, min(peak_bytes, trial.given_bytes))
                    return True
            trial.conclude()
            return False
        plan = partial(plan_in_least, requests, search=planner.search, may_divide=planner.may_divide)
        budget_bytes, planned = plan(trial.given_bytes)
        if budget_bytes > trial.given_bytes:
            # Plans that use a margin are measured, not smaller ones: with it, other plans take other bytes.
            budget_bytes, planned = plan(budget_bytes + budget_bytes // _MARGIN_DIVISOR + TOLERATED_BYTES)
        if budget_bytes > trial.budget_bytes == trial.given_bytes:
            if not planner.has_free(budget_bytes):
                trial.refuse(budget_bytes, "what the next steps would show")
            trial.lift(budget_bytes, "what these steps show")
        follow(planned)
        trial.planned(graphs, budget_bytes)
        return True

    def _note_overrun(self, graphs: Sequence[JointGraph], budget_bytes: int, what_follows: str) -> bool:
        """Note what took how much more than planned in the measured step, and log it with `what_follows`; return
        whether anything did."""
        peaks, self.watch.peaks = self.watch.peaks, {}
        base_bytes = fixed_bytes(self._executor, graphs) + library_bytes(self._executor.device)
        problems = [
            graph.planner.joint_problem(graph.active, base_bytes, ExternalUsage(), is_as_run=True) for graph in graphs
        ]
        requests = [
            GraphRequest(problem=problem, beside=graph.runs.positions_in(graphs))
            for graph, problem in zip(graphs, problems, strict=True)
        ]
        causes = note_overrun(peaks, graphs, requests, base_bytes, self.outside)
        # In a trial of a larger budget than the user's, the user knows that steps run over the budget.
        level = logging.WARNING if budget_bytes == graphs[0].planner.given_budget_bytes else logging.INFO
        if causes:
            log.log(
                level,
                "a step of %s took %s of %s: %s. %s",
                self._executor.name,
                format_bytes(max(peaks.values())),
                format_bytes(budget_bytes),
                "; ".join(causes),
                what_follows,
            )
        return bool(causes)

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
