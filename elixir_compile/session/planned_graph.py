"""A captured graph on its way from capture to running programs.

capture --> problem --> plan --> programs --> forward, backward          a cause --> next plan --> programs
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx

from elixir_compile import compat
from elixir_compile.base.options import Options
from elixir_compile.base.process import for_compiled_code
from elixir_compile.graph.capture.additions import add_extra_saved
from elixir_compile.graph.capture.tracing import captured_step
from elixir_compile.ir import Plan
from elixir_compile.runtime.executor import Executor
from elixir_compile.runtime.lowering import RegionCompiler
from elixir_compile.search import Problem
from elixir_compile.search.joint.variants import LossAttempt
from elixir_compile.session.agreement import Step, adopt_by_all
from elixir_compile.session.causes import Cause, NextPlans, PlanOfGraphSet, PlansOfGraphSets
from elixir_compile.session.graph_planner import ActivePlan, GraphPlanner, GraphRuns, active_plan
from elixir_compile.session.guard import Guard
from elixir_compile.session.over_budget import EarlyShortage
from elixir_compile.session.planning import ExternalUsage, param_names_of
from elixir_compile.session.programs import Programs, ProgramVersions, storages_of, ticket_position
from elixir_compile.session.rank_facts import roll_key
from elixir_compile.session.step_profiler import Progress, StepProfiler
from elixir_compile.session.together import Together
from elixir_compile.step import closing_verbs

_compile_lock = threading.RLock()


class PlannedGraph:
    """A captured graph: its plan in use, and the programs that obey it.

    It has more than 15 attributes, because it plans, learns and runs, alone and with others, each by a part of its own.
    """

    def __init__(
        self,
        name: str,
        executor: Executor,
        regions: RegionCompiler,
        options: Options,
        *,
        graphs: Sequence["PlannedGraph"],
        together: Together,
        graph_break: tuple[str, int, str] | None = None,
    ) -> None:
        """`graphs` are the graphs of the model, which adds later ones to the same sequence, and `together` plans them
        together. `graph_break` has file, line and reason of the graph break at which the graph ends."""
        self.name, self.graph_break = name, graph_break
        self.is_superseded = False
        """Whether a later capture of the same step took its place."""
        self.is_inference = False
        """Whether the graph has no backward."""
        self.runs = GraphRuns()
        self._executor, self._together = executor, together
        self._active: ActivePlan | None = None
        progress = Progress(is_on=options.report, warns_of_division=options.micro_batches == "fit")
        self.planner = GraphPlanner(executor, regions, options, progress, together.first_steps.trial.budget_for)
        self.profiler = StepProfiler(executor, name, options, records=self.planner.may_replan)
        self._guard = Guard(options.guard, self.profiler, lambda: self.planner.fastest_rule(self.active), progress.say)
        self.programs = ProgramVersions(executor, regions, progress)
        self._ticket_position = -1
        self._graph_sets = PlansOfGraphSets(executor, name, together.descriptions, self.profiler, progress)
        self._shortage = EarlyShortage(name, executor, self.planner)
        self._next = NextPlans(executor, self.planner, graphs, together, self._shortage, self._graph_sets)

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
    def param_names(self) -> list[str]:
        """Names of the parameters read by the graph, and of all others in their buckets."""
        return param_names_of(self.active.captured, self._executor)

    @property
    def _counted(self) -> object | None:
        """The object for which the calls of a step are counted (see `counted_as`); None if the graph does not train."""
        return None if self.is_inference else self._together.counted_as(self)

    # Plans.

    def capture(
        self, forward: fx.GraphModule, backward: fx.GraphModule | None, num_outputs: int, attempt: LossAttempt
    ) -> None:
        """Convert the forward and the backward graph, and plan the step with the loss of `attempt`.

        The review of the attempt is called with the first plan and returns the plan to use.
        """
        planner, together, first_steps = self.planner, self._together, self._together.first_steps
        own = captured_step(self.name, forward, backward, num_outputs=num_outputs, inner=planner.options.inner)
        own = self._next.captured = replace(own, kernels=planner.kernels)
        self.is_inference = backward is None
        if not self.is_inference:
            planner.step = add_extra_saved(own)
            self._ticket_position = ticket_position(own)
        self._graph_sets.find_graph_set(lambda: roll_key(planner.graph(own)), self._counted)
        self._active, before = self._next.plan(self, (Cause.FIRST,), attempt)
        is_new = before is None or self.active.plan is not before.active.plan
        if attempt.review is not None and not self._graph_sets.graph_set_digest:
            planner.reviewed = attempt.review(self.active.plan)
            self._active = replace(self.active, plan=planner.reviewed)
        if before is not None:
            together.supersede(before, self)
        elif together.stages is None and first_steps.may_be_lean(self) and first_steps.begin_lean(self):
            self._active, _ = self._next.plan(self, (Cause.FIRST,), LossAttempt(is_last=True))
        if not self.is_inference and is_new:
            self.planner.progress.planned(self.active.plan)

    def keep_current(self, args: Sequence[Any]) -> None:
        """Before each forward: put the plan in force, after planning again if this rank or another has a cause."""
        executor, planner, together = self._executor, self.planner, self._together
        if not self.is_inference:
            planner.staying.notice(is_forward=True)
        causes = self._next.causes(self, args)
        while (call := self._graph_sets.call(self._counted, wants_plan=bool(causes))).step is not Step.RUN:
            with _compile_lock:
                if call.step is Step.JOIN:
                    now = PlanOfGraphSet(self.active, self.programs.last, dict(planner.sizes.values))
                    found = self._graph_sets.join(call.graph_set_digest, now)
                    if found is None:
                        causes = (Cause.PEERS,)
                        continue
                    self._active, planner.sizes.values = found.active, dict(found.sizes)
                    self.programs.take(found.programs, is_apart=self._graph_sets.record_written())
                    causes = self._next.causes(self, args)
                else:
                    self._plan_next(causes or (Cause.PEERS,), args)
                    causes = ()
        if executor.buckets.generation != self.active.generation:
            with _compile_lock:
                active = self.active
                if executor.buckets.generation == active.moves_at:
                    executor.buckets.move(active.plan.buckets, active.plan.placements)
                else:
                    is_new = active.generation < 0
                    adopt_by_all(executor, active.plan, for_training=not self.is_inference, is_new=is_new)
                self.mark_in_force()
        peak_bytes = self.active.plan.prediction.device_peak_bytes
        if planner.is_budget_given and together.needed_bytes(self) > peak_bytes:
            self._active = self.active.beside_neighbours(together.bytes_in_turn(self))

    def _plan_next(self, causes: Sequence[Cause], args: Sequence[Any]) -> None:
        """Plan the graph again because of `causes`, before a forward with the inputs `args`."""
        earlier, planner = self.active.plan, self.planner
        undo = planner.grow(self.active.captured, args)
        try:
            make = partial(self._next.plan, self, causes, LossAttempt(is_last=True))
            self._active, before = self._shortage.plan(self.active, args, make)
        except BaseException:
            # The programs in force are for the smaller sizes, so a later batch of this size has to be planned again.
            undo()
            raise
        if before is not None:
            self._together.supersede(before, self)
        if planner.staying.planned(earlier, self.active.plan) or Cause.SHORTAGE in causes:
            self.profiler.restart()
        self.planner.progress.planned(self.active.plan)
        self._write_programs()

    def learn_from_steps(self, args: Sequence[Any]) -> None:
        """Before each forward: once enough steps were profiled, report them; take a better plan if there is one."""
        executor, planner = self._executor, self.planner
        if planner.sizes.differ(self.active.captured, args):
            self.profiler.restart()
            return
        stats = self.profiler.forward_begins(self.active.problem, self._together.names())
        if stats is not None and self._guard.is_on:
            self._guard.period_s = stats.period_s
        elif stats is not None:
            planner.progress.measured(self.active.plan, stats)
            planner.stats = stats if planner.may_replan and not stats.is_shared else None
        # Parameters do not move while a forward is outstanding.
        if (planner.stats is None and not self._guard.is_due) or executor.saved.outstanding_owners():
            return
        stats, planner.stats = planner.stats, None
        if executor.buckets.generation != self.active.generation:
            return
        with _compile_lock:
            if stats is None:
                plan = self._guard.next_plan(self.active.plan)
                if plan is not None:
                    self._move_to(plan)
                return
            outcome = planner.learn(self.active, stats)
            if outcome is not None:
                planner.progress.say(outcome.line)
                if outcome.is_new:
                    self._move_to(outcome.plan)
                else:
                    self._active = replace(self.active, plan=outcome.plan)
            if planner.correction is not None:
                self._guard.begin(self.active.plan)

    def _move_to(self, plan: Plan) -> None:
        """Follow `plan`, another plan for the problem of that in use, from the next forward on; none is outstanding."""
        active = self.active
        programs = self.programs.write_next(active.captured, active.graph, plan)
        external = ExternalUsage(outstanding_bytes=active.beside_bytes, neighbour_bytes=active.neighbour_bytes)
        self.follow(active.problem, plan, programs, external)
        self._executor.buckets.move(plan.buckets, plan.placements)
        self.mark_in_force()

    def follow(self, problem: Problem, plan: Plan, programs: Programs, external: ExternalUsage) -> None:
        """Run `programs` of `plan`, which answers `problem`, from the next forward on; the caller moves parameters.

        Others may hold the `external` bytes meanwhile: outstanding forwards of its model, and models in turn.
        """
        now = active_plan(self._executor, self.active.captured, problem, plan, external)
        self._active = replace(now, generation=self.active.generation)
        self.planner.sizes.take(dict(problem.graph.symbols))
        self._together.first_steps.watch.rearm(is_given=self.planner.is_budget_given)
        if programs is not self.programs.last:
            self.planner.progress.planned(plan)
            self._shortage.begin()
            self.programs.take(programs, is_apart=self._graph_sets.record_written())

    def mark_in_force(self) -> None:
        """Note the generation of the buckets under the plan, and tell each bucket when the plan updates it."""
        self._active = replace(self.active, generation=self._executor.buckets.generation)
        if not self.is_inference:
            closing = closing_verbs(self.active.plan) if self._together.is_alone(self) else {}
            self._executor.buckets.schedule_updates(self.active.plan, closing)

    # Programs.

    def runner(self, *, is_backward: bool) -> Callable[[list[Any]], Any]:
        """Return the function to run the backward, or the forward, after `ManagedModel.begin_forward`."""
        if is_backward:
            self.programs.write_backward()
        else:
            self._write_programs()
        return compat.boxed(for_compiled_code(self._run_backward if is_backward else self._run_forward))

    def _write_programs(self) -> None:
        """Write the programs of a new plan, and run them from the next forward on."""
        self._together.first_steps.watch.rearm(is_given=self.planner.is_budget_given)
        self._shortage.begin()
        programs = self.programs.write_first(self.active.captured, self.active.graph, self.active.plan)
        self.programs.take(programs, is_apart=self._graph_sets.record_written())

    def _run_forward(self, args: list[Any]) -> Any:
        return self._shortage.forward(self, args)

    def run_forward(self, args: list[Any]) -> Any:
        """Run the forward once."""
        input_storages, executor, watch = storages_of(args), self._executor, self._together.first_steps.watch
        counted = self._counted
        programs = self.programs.next(executor.calls.num_full(counted, executor.saved.numbers))
        watch.runs(self)
        try:
            results = executor.run_forward(counted, programs.plan.name, programs.forward.forward, args)
        except BaseException:
            watch.drop()
            executor.abandon()
            raise
        if not self.is_inference:
            self.programs.keep_for(programs.note_outstanding(results, input_storages, self))
        watch.ran(self, is_backward=False)
        return results

    def _run_backward(self, args: list[Any]) -> Any:
        ticket, counted, watch = args[self._ticket_position], self._counted, self._together.first_steps.watch
        self.planner.staying.notice(is_forward=False)
        self._together.begin_backward(self, ticket)
        watch.runs(self)
        self._executor.saved.restore(ticket)
        try:
            self._graph_sets.begin_backward(counted, ticket)
            with _compile_lock:
                program, name = self.programs.of(ticket).backward, self.active.plan.name
            results = self._executor.run_backward(counted, ticket, name, program.forward, args)
            watch.ran(self, is_backward=True)
            return results
        except BaseException as error:
            watch.drop()
            self._executor.abandon()
            self._shortage.note_backward(self.active, error)
            raise
