"""A captured graph on its way from capture to running programs, and the record of its first steps.

```text
  capture --> problem --> plan --> programs --> forward, backward          first steps --> corrected plan --> programs
```
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx

from elixir_compile import compat
from elixir_compile.analysis import MemoryTimeline, closing_verbs, plan_timeline
from elixir_compile.capture.additions import add_extra_saved
from elixir_compile.capture.convert import Captured
from elixir_compile.capture.tracing import captured_step
from elixir_compile.ir import Plan, StepGraph
from elixir_compile.managed.agreement.agreement import Step, adopt_by_all, asked_by_all, plan_for_all
from elixir_compile.managed.agreement.in_step import planned_in_step
from elixir_compile.managed.agreement.rank_facts import roll_key
from elixir_compile.managed.graph_planner import GraphPlanner
from elixir_compile.managed.lifetime import for_compiled_code
from elixir_compile.managed.outstanding import OutstandingForwards, plan_beside_outstanding
from elixir_compile.managed.programs import (
    Programs,
    ProgramVersions,
    is_one_region_each,
    runs_as,
    storages_of,
    ticket_position,
)
from elixir_compile.managed.saved import disk_of, require_disk
from elixir_compile.managed.step_profiler import Progress, StepProfiler
from elixir_compile.managed.variants import ActivePlan, PlanVariant, PlanVariants
from elixir_compile.options import Options
from elixir_compile.problem.planning import ExternalUsage, param_names_of, unread_bytes
from elixir_compile.problem.profile import RegionProfile
from elixir_compile.rewrite.show import program_text
from elixir_compile.runtime.executor import Executor
from elixir_compile.runtime.lowering import RegionCompiler
from elixir_compile.search import Problem
from elixir_compile.search.joint.loss import is_pressed
from elixir_compile.search.joint.replan import StepStats

_compile_lock = threading.RLock()


class Compilation:
    """A captured graph, its plan and its programs. The backend makes it; the user reads it."""

    def __init__(
        self,
        executor: Executor,
        regions: RegionCompiler,
        options: Options,
        name: str,
        review: Callable[[Plan], Plan] | None = None,
    ) -> None:
        """`review` is called with the first plan and returns the plan to use."""
        self.name = name
        self.forward: fx.GraphModule | None = None
        """The forward program."""
        self.backward: fx.GraphModule | None = None
        """The backward program; None before the first backward, and for inference."""
        self._executor = executor
        executor.disk = disk_of(options) or executor.disk
        self._regions = regions
        self._options = options
        self._review = review
        self._own_capture: Captured | None = None
        self._active: ActivePlan | None = None
        self._progress = Progress(is_on=options.report)
        self._planner = GraphPlanner(executor, regions, options, self._progress)
        self._profiler = StepProfiler(executor, is_on=options.report or options.replan, records=self.may_replan)
        self._stats: StepStats | None = None
        self.outstanding = OutstandingForwards(self, executor)
        """The forwards that were outstanding while this graph ran."""
        self._wants_backward = False
        self._programs = ProgramVersions()
        self._ticket_position = -1
        self._chose_strides: bool | None = None
        self._variants = PlanVariants(executor, name)
        self.loss_chunks: int | None = None
        """The number of chunks of the loss; None if no loss that could be chunked was found."""
        self.is_superseded = False
        """Whether a later capture of the same step took its place."""

    @property
    def active(self) -> ActivePlan:
        """The plan in use, with its capture and problem; exists once the graph was planned."""
        if self._active is None:
            raise AssertionError(f"{self.name} is not planned")
        return self._active

    @property
    def graph(self) -> StepGraph | None:
        """The captured step, torch-free; None before it was planned."""
        return None if self._active is None else self._active.graph

    @property
    def plan(self) -> Plan | None:
        """The plan of the graph; None before it was planned."""
        return None if self._active is None else self._active.plan

    @property
    def timeline(self) -> MemoryTimeline:
        """Live bytes by kind at every op under the plan."""
        return plan_timeline(self.active.graph, self.active.plan)

    @property
    def is_inference(self) -> bool:
        """Whether the graph has no backward."""
        return self._own_capture is not None and self._own_capture.backward is None

    @property
    def profile(self) -> RegionProfile | None:
        """Seconds and bytes of each region, measured before planning; None without the option `profile_regions`."""
        return self._planner.profile

    @property
    def param_names(self) -> list[str]:
        """Names of the parameters read by the graph, and of all others in their buckets."""
        return param_names_of(self.active.captured, self._executor)

    def __str__(self) -> str:
        if self._active is None:
            return f"{self.name}: not planned"
        return program_text(self.active.plan, self.timeline, self.active.graph, self.forward, self.backward)

    def runner(self, *, is_backward: bool) -> Callable[[list[Any]], Any]:
        """Return the function to run the backward, or the forward, after `begin_forward`."""
        if not is_backward:
            self._write_forward()
            return compat.boxed(for_compiled_code(self._run_forward))
        self._wants_backward = True
        self._write_backward()
        return compat.boxed(for_compiled_code(self._run_backward))

    # Planning.

    def capture(self, forward: fx.GraphModule, backward: fx.GraphModule | None, num_outputs: int) -> None:
        """Convert the forward and the backward graph, and plan the step."""
        own = captured_step(self.name, forward, backward, num_outputs=num_outputs, inner=self._options.inner)
        self._own_capture = own
        if backward is not None:
            self._planner.step = add_extra_saved(own)
            self._ticket_position = ticket_position(own)
        self._variants.find_graph_set(lambda: roll_key(self._planner.graph(own)))
        before = self._make_plan()
        if self._review is not None and not self._variants.graph_set_digest:
            reviewed = self._planner.reviewed = self._review(self.active.plan)
            self._active = replace(self.active, plan=reviewed)
        self.outstanding.take_over(before)
        if not self.is_inference and not any(other.is_superseded for other in self._executor.compilations):
            self._progress.planned(self.active.plan)

    def _make_plan(self) -> "Compilation | None":
        """Plan the graph's own capture for the current sizes and external usage.

        Returns the earlier capture whose plan was taken over; None if a new plan was made.
        """
        executor, own = self._executor, self._own_capture
        assert own is not None
        if self._variants.graph_set_digest:
            beside_bytes = executor.saved.held_bytes()
            answer, sizes = self._planner.answer_for(own), self._planner.sizes.values
            joined, problem, plan = planned_in_step(executor, own, self._options, sizes, answer)
            require_disk(plan, executor.disk)
            self._active = ActivePlan(captured=joined, problem=problem, plan=plan, beside_bytes=beside_bytes)
            return None
        make = partial(self._plan_beside, own, self._planner.graph(own))
        return plan_beside_outstanding(executor, unread_bytes(own, executor), make)

    def _plan_beside(self, own: Captured, graph: StepGraph, external: ExternalUsage) -> "Compilation | None":
        executor, beside_bytes = self._executor, external.outstanding_bytes
        before = self._earlier_capture(graph, beside_bytes)
        if before is not None:
            self._planner.take_over(before._planner)
            if before._planner.correction is not None:
                self._profiler.stop()
        problem = asked_by_all(executor, lambda: self._planner.problem(own, graph, external, is_new=before is None))
        answer = self._planner.answer_for(own)
        plan = before.active.plan if before else plan_for_all(executor, problem, answer, self._options)
        require_disk(plan, executor.disk)
        self._active = ActivePlan(captured=own, problem=problem, plan=plan, beside_bytes=beside_bytes)
        # Other graphs may need more than the reserved bytes; their needs are known once they have run.
        executor.is_crowded |= bool(external.reserved_bytes) and is_pressed(plan)
        return before

    def _earlier_capture(self, graph: StepGraph, beside_bytes: int) -> "Compilation | None":
        """Return the earlier capture of the same step whose plan is in force: the first call of a plain model."""
        executor = self._executor
        if executor.ranks is not None:  # another rank may have no such capture, and would wait for this rank to plan
            return None
        for other in executor.compilations:
            if other is self or other.plan is None:
                continue
            active: ActivePlan = other.active
            is_same = active.graph == replace(graph, name=active.graph.name) and active.beside_bytes >= beside_bytes
            if is_same and executor.agrees(active.plan.buckets, active.plan.placements, may_adopt=False):
                return other
        return None

    # Programs.

    def _write_forward(self) -> None:
        is_first = self._chose_strides is None
        if is_first:
            self._chose_strides = is_one_region_each(self.active.plan) and not self.is_inference
        programs = self._new_programs(self.active.graph, self.active.plan)
        if is_first and not self.is_inference:
            compat.report_forward(programs.output_strides if programs.chooses_strides else ())
        self._take(programs)

    def _new_programs(self, graph: StepGraph, plan: Plan) -> Programs:
        # Autograd keeps the strides of the first programs. If these had several regions, Inductor may choose none.
        return Programs(
            self.active.captured,
            graph,
            plan,
            self._executor,
            self._regions,
            self._progress,
            may_choose_strides=bool(self._chose_strides),
        )

    def _take(self, programs: Programs) -> None:
        """Let the next forward run `programs`."""
        self._programs.take(programs, self._executor.saved.next_number, is_apart=self._variants.record_written())
        self.forward = programs.forward
        self._write_backward()

    def _write_backward(self) -> None:
        self.backward = self._programs.last.backward if self._wants_backward else None

    # Running.

    def begin_forward(self, args: list[Any]) -> None:
        """Before each forward: search again if it is due, and move parameters to the homes of the plan."""
        self._executor.adopt_replaced()
        if self.is_inference:
            for other in self._executor.compilations:
                other._profiler.restart()  # Inference runs the same buckets, and regions of the same labels.
        else:
            self._look_back(args)
            self.outstanding.begin()
        self._keep_current(args)
        self._programs.drop_old()
        self._executor.begin()

    def _run_forward(self, args: list[Any]) -> Any:
        input_storages, programs = storages_of(args), self._programs.last
        try:
            results = programs.forward.forward(args)
            self._executor.end()
        except BaseException:
            self._executor.abandon()
            raise
        if not self.is_inference:
            self._programs.keep_for(programs.note_outstanding(results, input_storages, self))
        return results

    def _run_backward(self, args: list[Any]) -> Any:
        ticket = args[self._ticket_position]
        self.outstanding.note_outstanding(self._executor.saved.outstanding_owners(leaving_out=ticket))
        self._executor.saved.restore(ticket)
        try:
            self._variants.begin_backward(ticket)
            with _compile_lock:
                program = self._programs.of(ticket).backward
            return program.forward(args)
        except BaseException:
            self._executor.abandon()
            raise

    def _look_back(self, args: Sequence[Any]) -> None:
        """Once enough steps were profiled, report them, and correct the plan if its prediction was wrong."""
        for other in self._executor.compilations:
            if other is not self and not other.is_inference:
                other._profiler.stop()  # Spans of two graphs have the same labels.
        if self._planner.sizes.differ(self.active.captured, args):
            self._profiler.restart()
            return
        if (stats := self._profiler.forward_begins()) is not None:
            self._progress.measured(self.active.plan, stats)
            self._stats = stats if self.may_replan else None
        # Parameters do not move while a forward is outstanding.
        if self._stats is not None and not self._executor.saved.outstanding_owners():
            stats, self._stats = self._stats, None
            if self._executor.generation == self.active.generation:
                self._learn(stats)

    def _learn(self, stats: StepStats) -> None:
        """Correct the machine by `stats` of the first steps, and change to a better plan if it finds any."""
        with _compile_lock:
            outcome = self._planner.learn(self.active, stats)
            if outcome is None:
                return
            self._progress.say(outcome.line)
            if not outcome.is_new:
                self._active = replace(self.active, plan=outcome.plan)
                return
            problem, beside_bytes = self.active.problem, self.active.beside_bytes
            self.follow(problem, outcome.plan, self.write_programs(problem, outcome.plan), beside_bytes)
            self._executor.move(outcome.plan.buckets, outcome.plan.placements)
            self.mark_in_force()

    @property
    def may_replan(self) -> bool:
        """Whether the first steps may change the plan."""
        return self._planner.may_replan

    # Planned together with other graphs of the step: see `outstanding.PlannedGraph`.

    def joint_problem(self, base_bytes: int) -> Problem:
        """Return the problem to plan together with other graphs, with `base_bytes` of external usage."""
        return self._planner.joint_problem(self.active, base_bytes)

    def search(self, problem: Problem) -> Plan:
        """Return a plan for `problem`."""
        return self._planner.search(problem)

    def write_programs(self, problem: Problem, plan: Plan) -> Programs:
        """Return the programs of `plan`, which answers `problem` and is not in force yet."""
        if problem.graph == self.active.graph and runs_as(plan, self._programs.last.plan):
            return self._programs.last
        programs = self._new_programs(problem.graph, plan)
        if self._wants_backward:
            _ = programs.backward
        return programs

    def follow(self, problem: Problem, plan: Plan, programs: Programs, beside_bytes: int) -> None:
        """Run `programs` of `plan`, which answers `problem`, from the next forward on; the caller moves parameters.

        `beside_bytes` are device bytes for other outstanding forwards meanwhile.
        """
        self._active = replace(self.active, problem=problem, plan=plan, beside_bytes=beside_bytes)
        self._planner.sizes.take(dict(problem.graph.symbols))
        if programs is self._programs.last:
            return
        self._progress.planned(plan)
        self._take(programs)

    def mark_in_force(self) -> None:
        """Note the executor's generation under the plan, and tell the executor when the plan updates each bucket."""
        self._active = replace(self.active, generation=self._executor.generation)
        if not self.is_inference:
            closing = closing_verbs(self.active.plan) if self.outstanding.is_alone else {}
            self._executor.schedule_updates(self.active.plan, closing)

    # Kept up to date with inputs, outstanding forwards, other graphs and other ranks.

    def _keep_current(self, args: Sequence[Any]) -> None:
        """Put the plan in force, after planning again if this rank or another needs it: see `_needs_plan`."""
        executor = self._executor
        wants_plan = self._needs_plan(args)
        while (call := self._variants.call(wants_plan=wants_plan)).step is not Step.RUN:
            with _compile_lock:
                if call.step is Step.JOIN:
                    wants_plan = not self._join(call.graph_set_digest) or self._needs_plan(args)
                else:
                    self._plan_anew(args)
                    wants_plan = False
        if executor.generation != self.active.generation:
            with _compile_lock:
                is_new = self.active.generation < 0
                adopt_by_all(executor, self.active.plan, for_training=not self.is_inference, is_new=is_new)
                self.mark_in_force()

    def _needs_plan(self, args: Sequence[Any]) -> bool:
        """Return whether `args` or the activations of outstanding forwards outgrew the plan, or a bucket was moved."""
        executor, active = self._executor, self.active
        is_crowded = not self.is_inference and executor.saved.held_bytes() > active.beside_bytes
        if is_crowded and self.outstanding.offloads_first:
            is_crowded = not executor.saved.offload_outstanding()
        is_moved, may_adopt = executor.generation != active.generation, active.generation < 0
        may_stay = not is_moved or executor.agrees(active.plan.buckets, active.plan.placements, may_adopt=may_adopt)
        return bool(self._planner.sizes.grown(active.captured, args)) or is_crowded or not may_stay

    def _join(self, graph_set_digest: str) -> bool:
        """Change to the plan made for the graphs of `graph_set_digest`; return whether it exists."""
        now = None
        if self._variants.is_planned:
            now = PlanVariant(self.active, self._programs.last, dict(self._planner.sizes.values))
        found = self._variants.join(graph_set_digest, now)
        if found is None:
            return False
        self._active, self._planner.sizes.values = found.active, dict(found.sizes)
        self._take(found.programs)
        return True

    def _plan_anew(self, args: Sequence[Any]) -> None:
        with self._planner.growing(self.active.captured, args):
            self.outstanding.take_over(self._make_plan())
        self._progress.planned(self.active.plan)
        self._write_forward()
