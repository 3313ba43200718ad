"""A captured graph with its plans and programs, and the earlier captures of the same step."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from torch import fx

from elixir_compile import compat
from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.base.options import Options
from elixir_compile.graph.capture.additions import add_extra_saved
from elixir_compile.graph.capture.convert import Captured, returns_loss
from elixir_compile.graph.capture.tracing import captured_step
from elixir_compile.ir import Plan, StepGraph
from elixir_compile.runtime.executor import Executor
from elixir_compile.runtime.lowering import RegionCompiler
from elixir_compile.search import Problem, extents
from elixir_compile.search.joint.replan import StepStats
from elixir_compile.search.joint.variants import LossAttempt, is_pressed
from elixir_compile.session.agreement import Step, adopt_by_all, any_of_all, asked_by_all, plan_for_all, planned_in_step
from elixir_compile.session.compiled_code import for_compiled_code
from elixir_compile.session.graph_planner import GraphPlanner, ProgramVersions
from elixir_compile.session.neighbours import unplanned_bytes, unread_bytes
from elixir_compile.session.outstanding import Beside, GraphRuns, OutstandingForwards
from elixir_compile.session.over_budget import EarlyShortage
from elixir_compile.session.planning import ExternalUsage, param_names_of
from elixir_compile.session.programs import (
    ActivePlan,
    PlanVariant,
    PlanVariants,
    Programs,
    active_plan,
    storages_of,
    ticket_position,
    with_neighbours,
)
from elixir_compile.session.rank_facts import roll_key
from elixir_compile.session.saved import require_disk
from elixir_compile.session.staying_gradients import StayingGradients
from elixir_compile.session.step_profiler import Progress, StepProfiler
from elixir_compile.step import closing_verbs

# ----------------------------------------------------------------------------------------------------------------------
# Find the earlier captures of a step: of the first call of a plain model, or of a compilation under other options.


_MOST_RETURNS = 4
"""So many times a graph takes the homes of buckets back from the same step under other options. Without a limit, two
compilations of a step that run in turn would move the parameters before each of their steps."""


class CapturedStep(Protocol):
    """A captured graph with its planner: a `PlannedGraph`."""

    planner: GraphPlanner
    is_superseded: bool

    @property
    def is_planned(self) -> bool: ...

    @property
    def is_inference(self) -> bool: ...

    @property
    def active(self) -> ActivePlan: ...


_Captured = TypeVar("_Captured", bound=CapturedStep)


class EarlierCaptures:
    """Finds the captures of the same step that a graph takes over or replaces."""

    def __init__(self, executor: Executor, staying: StayingGradients) -> None:
        """`staying` are the gradients that stay in the graph."""
        self._executor = executor
        self._staying = staying
        self._num_returns = 0
        """Times that the graph was superseded and took the homes of buckets back."""

    def in_force(
        self, own: _Captured, graphs: Sequence[_Captured], step: StepGraph, external: ExternalUsage
    ) -> _Captured | None:
        """Return the first capture of `step`, the step of `own`, among `graphs` whose plan is in force and serves `own`
        beside the outstanding forwards and the models in turn of `external`; None if there is none."""
        for other in self._of(own, graphs, step):
            plan = other.active.plan
            is_same = own.planner.plans_like(other.planner)
            is_same = is_same and other.active.beside_bytes >= external.outstanding_bytes
            is_same = is_same and other.active.neighbour_bytes >= external.neighbour_bytes
            is_same = is_same and not self._staying.is_missing_in(plan)
            if is_same and self._executor.buckets.agree(plan.buckets, plan.placements, may_adopt=False):
                return other
        return None

    def outdated(self, own: _Captured, graphs: Sequence[_Captured], step: StepGraph) -> _Captured | None:
        """Return the newest capture of `step` among `graphs` that `own` replaces; None if it replaces none.

        `own` replaces a capture with other options if `own` has no plan yet, or if `own` itself was replaced and the
        user returned to its options, at most `_MOST_RETURNS` times. The plan of `own` may then move the buckets.
        """
        is_back = own.is_superseded and self._num_returns < _MOST_RETURNS
        if own.is_inference or not (is_back or not own.is_planned):
            return None
        newest = next((other for other in reversed(self._of(own, graphs, step)) if not other.is_superseded), None)
        return None if newest is None or own.planner.plans_like(newest.planner) else newest

    def replaced_by(self, own: CapturedStep) -> None:
        """Note that `own` has a plan that replaces the capture found by `outdated`."""
        self._num_returns += own.is_superseded
        own.is_superseded = False

    def _of(self, own: _Captured, graphs: Sequence[_Captured], step: StepGraph) -> list[_Captured]:
        if self._executor.peers is not None:  # another rank may have no such capture, and would wait for this rank
            return []
        return [other for other in graphs if other is not own and other.is_planned and other.active.is_of(step)]


# ----------------------------------------------------------------------------------------------------------------------
# A captured graph on its way from capture to running programs.
#
#   capture --> problem --> plan --> programs --> forward, backward          first steps --> corrected plan --> programs


_compile_lock = threading.RLock()
_USES_RESULTS = "code that uses its results, as a loss"
_COPIES_OF_RESULTS = 16
"""Code that uses the results of a graph is assumed to hold at most so many tensors of their size: a loss over logits in
half precision holds them in fp32, their logarithms, and the gradients of both."""


class PlannedGraph:
    """A captured graph, its plan, and the programs that obey the plan.

    It has more than 15 attributes and 20 methods, because it is where the parts meet that make a plan (planner,
    variants, outstanding forwards), obey it (programs) and measure it (profiler). Each part is a class of its own.
    """

    def __init__(
        self,
        name: str,
        executor: Executor,
        regions: RegionCompiler,
        options: Options,
        *,
        graphs: Sequence["PlannedGraph"],
        outstanding: OutstandingForwards,
        graph_break: tuple[str, int, str] | None = None,
    ) -> None:
        """`graphs` are the graphs of the model, which adds later ones to the same sequence, and `outstanding` its
        outstanding forwards. `graph_break` has file, line and reason of the graph break at which the graph ends."""
        self.name = name
        self.graph_break = graph_break
        """File, line and reason of the graph break at which the graph ends."""
        at_break = "" if graph_break is None else f" (up to the graph break at {graph_break[0]}:{graph_break[1]})"
        self.description = name + at_break
        """The name of the graph, and the graph break at which it ends."""
        self.is_superseded = False
        """Whether a later capture of the same step took its place."""
        self.runs = GraphRuns()
        self._executor = executor
        self._options = options
        self._graphs = graphs
        self._outstanding = outstanding
        self._own_capture: Captured | None = None
        self._active: ActivePlan | None = None
        self._progress = Progress(is_on=options.report, warns_of_division=options.micro_batches == "fit")
        self.planner = GraphPlanner(executor, regions, options, self._progress, outstanding.trial.budget_for)
        self.profiler = StepProfiler(executor, name, options, records=self.planner.may_replan)
        self._stats: StepStats | None = None
        """The measurements of the first steps, until the plan is corrected by them."""
        self.programs = ProgramVersions(executor, regions, self._progress)
        self._unplanned_bytes = 0
        """The bytes that plain optimizers kept beside the parameters when the plan was made."""
        self._ticket_position = -1
        self._staying = StayingGradients(executor, options, self._progress)
        self._earlier = EarlierCaptures(executor, self._staying)
        self._variants = PlanVariants(executor, name, outstanding.descriptions, self.profiler, self._progress)
        self._shortage = EarlyShortage(name, executor, self.planner)

    @property
    def active(self) -> ActivePlan:
        """The plan in use, with its capture and problem; exists once the graph was planned."""
        if self._active is None:
            raise AssertionError(f"{self.name} is not planned")
        return self._active

    @property
    def is_planned(self) -> bool:
        """Whether the graph has a plan."""
        return self._active is not None

    @property
    def is_inference(self) -> bool:
        """Whether the graph has no backward."""
        return self._own_capture is not None and self._own_capture.backward is None

    @property
    def _counted(self) -> object | None:
        """The object for which the calls of a step are counted (see `counted_as`); None if the graph does not train."""
        return None if self.is_inference else self._outstanding.counted_as(self)

    @property
    def param_names(self) -> list[str]:
        """Names of the parameters read by the graph, and of all others in their buckets."""
        return param_names_of(self.active.captured, self._executor)

    def capture(
        self, forward: fx.GraphModule, backward: fx.GraphModule | None, num_outputs: int, attempt: LossAttempt
    ) -> None:
        """Convert the forward and the backward graph, and plan the step with the loss of `attempt`.

        The review of the attempt is called with the first plan and returns the plan to use.
        """
        own = captured_step(self.name, forward, backward, num_outputs=num_outputs, inner=self._options.inner)
        own = replace(own, kernels=self.planner.kernels)
        self._own_capture = own
        if backward is not None:
            self.planner.step = add_extra_saved(own)
            self._ticket_position = ticket_position(own)
        self._variants.find_graph_set(lambda: roll_key(self.planner.graph(own)), self._counted)
        before = self._plan_or_put_off(is_last=attempt.is_last, keeps_whole=attempt.keeps_whole)
        is_new = before is None or self.active.plan is not before.active.plan
        if attempt.review is not None and not self._variants.graph_set_digest:
            reviewed = self.planner.reviewed = attempt.review(self.active.plan)
            self._active = replace(self.active, plan=reviewed)
        if before is not None:
            self._outstanding.supersede(before, self)
        elif self._outstanding.may_be_lean(self) and self._outstanding.begin_lean(self, self._rest_bytes()):
            self._plan_or_put_off()
        if not self.is_inference and is_new:
            self._progress.planned(self.active.plan)

    def _plan_or_put_off(
        self, *, is_last: bool = True, is_known: bool = False, keeps_whole: bool = False
    ) -> "PlannedGraph | None":
        """Return the result of `_make_plan`, for a larger budget if none fits and the whole step has to be known first.

        Nothing is put off if the capture is not the last form of the step to try (`is_last`), or if the step `is_known`
        already and only its inputs have grown. Raises NoFeasiblePlan then.
        """
        trial = self._outstanding.trial
        while True:
            try:
                return self.planner.whole_first(self._make_plan, keeps_whole=keeps_whole or trial.is_lean)
            except NoFeasiblePlan as error:
                if trial.ease(error.needed_bytes if error.memory == "device" else trial.given_bytes):
                    continue
                is_final = is_known or error.memory != "device" or bool(error.because)
                beside = "" if is_final else self._rest_of_step()
                if not beside:
                    raise
                if not (is_last and self._outstanding.put_off(self, error.needed_bytes, beside)):
                    raise error.without(beside) from None

    def _rest_bytes(self) -> int:
        """Return an estimate of what the step may hold beside this graph between its forward and its backward.

        That is code over its results, and other layers, which hold as much for each parameter as those of the graph; 0
        if there is neither.
        """
        rest, active, executor = self._rest_of_step(), self.active, self._executor
        if not rest:
            return 0
        nbytes_of = {storage.id: storage.nbytes for storage in active.graph.storages}
        rest_bytes = _COPIES_OF_RESULTS * sum(nbytes_of.get(name, 0) for name in active.graph.outputs)
        if rest == _USES_RESULTS:
            return rest_bytes
        trained = [slot for slot in executor.slots.values() if slot.param.requires_grad]
        total_bytes, read = sum(slot.own_nbytes for slot in trained), set(self.param_names)
        read_bytes = max(1, sum(slot.own_nbytes for slot in trained if slot.name in read))
        kept_bytes = extents(active.problem)[1].left_bytes
        return rest_bytes + kept_bytes + 2 * kept_bytes * (total_bytes - read_bytes) // read_bytes

    def _rest_of_step(self) -> str:
        """Return in words what a step holds beside the capture of this graph, as far as it may; empty if nothing."""
        own, executor, outstanding = self._own_capture, self._executor, self._outstanding
        assert own is not None
        if own.backward is None:
            trains = any(slot.param.requires_grad for slot in executor.slots.values())
            return "the backward of a step that trains" if trains else ""
        read = set(param_names_of(own, executor))
        if self.graph_break is not None:
            return "what runs after the graph break at {}:{}".format(*self.graph_break)
        if executor.saved.outstanding_owners():
            return "forwards that wait for their backward"
        if unread_bytes(own, executor, read) or outstanding.has_beside(self, read):
            return "the other graphs"
        if outstanding.knows_size_of(self):
            return ""
        return "" if returns_loss(own) else _USES_RESULTS

    def _make_plan(self) -> "PlannedGraph | None":
        """Plan the graph's own capture for the current sizes and external usage; return the earlier capture of the same
        step that this graph replaces, or None."""
        executor, own = self._executor, self._own_capture
        assert own is not None
        executor.gradients.stay = any_of_all(executor, executor.gradients.stay, "gradients that stay")
        if self._variants.graph_set_digest:
            answer, beside_bytes = self.planner.answer_for(own), executor.saved.held_bytes()
            joined, problem, plan = planned_in_step(executor, own, self._options, self.planner.sizes.values, answer)
            require_disk(plan, executor.buckets.disk)
            self._active = active_plan(joined, problem, plan, beside_bytes, self._bytes_in_turn())
            return None
        make = partial(self._plan_beside, own, self.planner.graph(own))
        unread = unread_bytes(own, executor, param_names_of(own, executor))
        return self._outstanding.plan_beside(unread, make)

    def _plan_beside(self, own: Captured, graph: StepGraph, external: ExternalUsage) -> "PlannedGraph | None":
        executor = self._executor
        outdated = self._earlier.outdated(self, self._graphs, graph)
        is_new = outdated is not None or self._shortage.wants_plan
        before = None if is_new else self._earlier.in_force(self, self._graphs, graph, external)
        if before is not None:
            self.planner.take_over(before.planner)
            self._staying.take_over(before._staying)
            if before.planner.correction is not None:
                self.profiler.stop()
        search = self.planner.answer_for(own)

        def ask() -> Problem:
            problem = self.planner.problem(own, graph, external, is_new=before is None)
            is_short = self._active is not None and self._staying.is_missing_in(self._active.plan)
            freed = self._active if is_short else outdated and outdated.active
            if freed is None or self._outstanding.neighbours.in_turn():  # homes that leave room for others stay
                return problem
            return self.planner.with_free_buckets(problem, freed.plan)

        make = partial(plan_for_all, executor, search=search, options=self._options)
        answer = partial(self._outstanding.answered, make=make, options=self._options)
        problem = asked_by_all(executor, ask)
        problem, plan = (problem, before.active.plan) if before else self._staying.answered(problem, ask, answer)
        require_disk(plan, executor.buckets.disk)
        active = active_plan(own, problem, plan, external.outstanding_bytes, external.neighbour_bytes)
        # Models in turn may hold more than leaves room for a plan: its peak says so.
        self._active = with_neighbours(active, max(external.neighbour_bytes, self._bytes_in_turn()))
        self._unplanned_bytes = unplanned_bytes(executor)
        if outdated is not None:
            self._active = replace(self._active, moves_at=executor.buckets.generation)
            self._earlier.replaced_by(self)
        # Other graphs may need more than the reserved bytes; their needs are known once they have run.
        has_others = bool(external.reserved_bytes) or bool(self._outstanding.neighbours.in_turn())
        self._outstanding.is_crowded |= has_others and is_pressed(plan)
        return before or outdated

    def runner(self, *, is_backward: bool) -> Callable[[list[Any]], Any]:
        """Return the function to run the backward, or the forward, after `ManagedModel.begin_forward`."""
        if is_backward:
            self.programs.write_backward()
        else:
            self._write_programs()
        return compat.boxed(for_compiled_code(self._run_backward if is_backward else self._run_forward))

    def _run_forward(self, args: list[Any]) -> Any:
        return self._shortage.forward(self, args)

    def run_forward(self, args: list[Any]) -> Any:
        """Run the forward once."""
        input_storages, executor = storages_of(args), self._executor
        programs = self.programs.next(executor.calls.num_full(self._counted, executor.saved.numbers))
        self._outstanding.watch.runs(self)
        try:
            results = executor.run_forward(self._counted, programs.plan.name, programs.forward.forward, args)
        except BaseException:
            self._outstanding.watch.drop()
            executor.abandon()
            raise
        if not self.is_inference:
            self.programs.keep_for(programs.note_outstanding(results, input_storages, self))
        self._outstanding.watch.ran(self, is_backward=False)
        return results

    def _run_backward(self, args: list[Any]) -> Any:
        ticket = args[self._ticket_position]
        self._staying.notice(is_forward=False)
        self._outstanding.begin_backward(self, ticket)
        watch = self._outstanding.watch
        watch.runs(self)
        self._executor.saved.restore(ticket)
        try:
            self._variants.begin_backward(self._counted, ticket)
            with _compile_lock:
                program, name = self.programs.of(ticket).backward, self.active.plan.name
            results = self._executor.run_backward(self._counted, ticket, name, program.forward, args)
            watch.ran(self, is_backward=True)
            return results
        except BaseException as error:
            watch.drop()
            self._executor.abandon()
            self._shortage.note_backward(self.active, error)
            raise

    def learn_from_steps(self, args: Sequence[Any]) -> None:
        """Before each forward: once enough steps were profiled, report them; take a better plan if there is one."""
        if self.planner.sizes.differ(self.active.captured, args):
            self.profiler.restart()
            return
        stats = self.profiler.forward_begins(self.active.problem, self._outstanding.names())
        if stats is not None:
            self._progress.measured(self.active.plan, stats)
            self._stats = stats if self.planner.may_replan and not stats.is_shared else None
        # Parameters do not move while a forward is outstanding.
        if self._stats is not None and not self._executor.saved.outstanding_owners():
            stats, self._stats = self._stats, None
            if self._executor.buckets.generation == self.active.generation:
                self._learn(stats)

    def _learn(self, stats: StepStats) -> None:
        with _compile_lock:
            outcome = self.planner.learn(self.active, stats)
            if outcome is None:
                return
            self._progress.say(outcome.line)
            if not outcome.is_new:
                self._active = replace(self.active, plan=outcome.plan)
                return
            problem, beside = self.active.problem, Beside(self.active.beside_bytes, self.active.neighbour_bytes)
            self.follow(problem, outcome.plan, self.write_programs(problem, outcome.plan), beside)
            self._executor.buckets.move(outcome.plan.buckets, outcome.plan.placements)
            self.mark_in_force()

    # Planned together with other graphs of the step: see `outstanding.JointGraph`.

    def joint_problem(self, base_bytes: int, external: ExternalUsage, *, is_as_run: bool = False) -> Problem:
        """Return the problem to plan together with other graphs, with `base_bytes` held outside of it; `external` has
        the bytes of other models that are planned together with it. If it `is_as_run`, it has the sizes of the last
        forward."""
        return self.planner.joint_problem(self.active, base_bytes, external, is_as_run=is_as_run)

    def write_programs(self, problem: Problem, plan: Plan) -> Programs:
        """Return the programs of `plan`, which answers `problem` and is not in force yet."""
        return self.programs.write_next(self.active.captured, problem.graph, plan)

    def follow(self, problem: Problem, plan: Plan, programs: Programs, beside: Beside) -> None:
        """Run `programs` of `plan`, which answers `problem`, from the next forward on; the caller moves parameters.

        Others may hold the device bytes `beside` meanwhile.
        """
        now = active_plan(self.active.captured, problem, plan, *beside)
        self._active = replace(now, generation=self.active.generation)
        self._unplanned_bytes = unplanned_bytes(self._executor)
        self.planner.sizes.take(dict(problem.graph.symbols))
        self._outstanding.watch.rearm(is_given=self.planner.is_budget_given)
        if programs is not self.programs.last:
            self._progress.planned(plan)
            self._shortage.begin()
            self.programs.take(programs, is_apart=self._variants.record_written())

    def mark_in_force(self) -> None:
        """Note the generation of the buckets under the plan, and tell each bucket when the plan updates it."""
        self._active = replace(self.active, generation=self._executor.buckets.generation)
        if not self.is_inference:
            closing = closing_verbs(self.active.plan) if self._outstanding.is_alone(self) else {}
            self._executor.buckets.schedule_updates(self.active.plan, closing)

    # Kept up to date with inputs, outstanding forwards, other graphs and other ranks.

    def keep_current(self, args: Sequence[Any]) -> None:
        """Before each forward: put the plan in force, after planning again if this rank or another needs it."""
        if not self.is_inference:
            self._staying.notice(is_forward=True)
        wants_plan = self._needs_plan(args)
        while (call := self._variants.call(self._counted, wants_plan=wants_plan)).step is not Step.RUN:
            with _compile_lock:
                if call.step is Step.JOIN:
                    wants_plan = not self._join(call.graph_set_digest) or self._needs_plan(args)
                else:
                    self._plan_anew(args)
                    wants_plan = False
        if self._executor.buckets.generation != self.active.generation:
            with _compile_lock:
                self._put_in_force()
        if self.planner.is_budget_given and self.needed_bytes > self.active.plan.prediction.device_peak_bytes:
            self._active = with_neighbours(self.active, self._bytes_in_turn())

    @property
    def needed_bytes(self) -> int:
        """The peak of the plan in use, beside what models in turn hold by now."""
        more_bytes = self._bytes_in_turn() - self.active.neighbour_bytes
        return self.active.plan.prediction.device_peak_bytes + max(0, more_bytes)

    @property
    def is_pressed(self) -> bool:
        """Whether models in turn hold so much by now that the plan in use exceeds the budget that the user gave."""
        may = self.is_planned and self.planner.is_budget_given and self._options.plan is None
        return may and self.active.plan.budget_bytes < self.needed_bytes > self.active.plan.prediction.device_peak_bytes

    @property
    def _misses_plain_state(self) -> bool:
        """Whether plain optimizers keep more beside the parameters than the plan in use counts."""
        may = self._options.plan is None and not self.is_inference
        return may and unplanned_bytes(self._executor) > self._unplanned_bytes

    def _bytes_in_turn(self) -> int:
        return self._outstanding.neighbours.bytes_in_turn() if self.planner.is_budget_given else 0

    def _put_in_force(self) -> None:
        executor, active = self._executor, self.active
        if executor.buckets.generation == active.moves_at:
            executor.buckets.move(active.plan.buckets, active.plan.placements)
        else:
            adopt_by_all(executor, active.plan, for_training=not self.is_inference, is_new=active.generation < 0)
        self.mark_in_force()

    def _needs_plan(self, args: Sequence[Any]) -> bool:
        """Return whether `args` or the activations of outstanding forwards outgrew the plan, or a bucket was moved."""
        executor, active, plan = self._executor, self.active, self.active.plan
        beside_bytes = active.beside_bytes + self.planner.excess_bytes  # by which the plan has more room
        is_crowded = not self.is_inference and executor.saved.held_bytes() > beside_bytes
        is_crowded &= not self._outstanding.trial.measures(self)
        if is_crowded and self.runs.offloads_first:
            is_crowded = not self._outstanding.offload()
        may_stay = executor.buckets.generation in (active.generation, active.moves_at)
        may_stay = may_stay or executor.buckets.agree(plan.buckets, plan.placements, may_adopt=active.generation < 0)
        is_crowded |= self.is_pressed or self._misses_plain_state
        is_short = self._shortage.wants_plan or (not self.is_inference and self._staying.is_missing_in(plan))
        is_back = self._earlier.outdated(self, self._graphs, active.graph) is not None
        has_grown = self.planner.has_grown(active, args)
        is_back |= bool(executor.reducers) and not active.problem.params_stay  # a wrapper came after the plan
        return has_grown or is_crowded or is_short or is_back or not may_stay

    def _join(self, graph_set_digest: str) -> bool:
        """Change to the plan made for the graphs of `graph_set_digest`; return whether it exists."""
        now = (self.active, self.programs.last, dict(self.planner.sizes.values))
        found = self._variants.join(graph_set_digest, PlanVariant(*now) if self._variants.is_planned else None)
        if found is not None:
            self._active, self.planner.sizes.values = found.active, dict(found.sizes)
            self.programs.take(found.programs, is_apart=self._variants.record_written())
        return found is not None

    def _plan_anew(self, args: Sequence[Any]) -> None:
        earlier, has_grown = self.active.plan, self.planner.has_grown(self.active, args)

        def make() -> None:
            with self.planner.growing(self.active.captured, args):
                before = self._plan_or_put_off(is_known=has_grown and not self._outstanding.trial.given_bytes)
                if before is not None:
                    self._outstanding.supersede(before, self)

        self._shortage.plan(self.active, args, make)
        if self._staying.planned(earlier, self.active.plan) or self._shortage.wants_plan:
            self.profiler.restart()
        self._progress.planned(self.active.plan)
        self._write_programs()

    def _write_programs(self) -> None:
        """Write the programs of a new plan, and run them from the next forward on."""
        self._outstanding.watch.rearm(is_given=self.planner.is_budget_given)
        self._shortage.begin()
        programs = self.programs.write_first(self.active.captured, self.active.graph, self.active.plan)
        self.programs.take(programs, is_apart=self._variants.record_written())
