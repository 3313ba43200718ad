"""One captured graph on its way from capture to a running program, and its record after."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.analysis import MemoryTimeline, closing_verbs, plan_timeline
from elixir_compile.capture.convert import Captured
from elixir_compile.capture.extra_saved import add_extra_saved
from elixir_compile.capture.tracing import captured_step
from elixir_compile.cost import Measured
from elixir_compile.ir import Plan, StepGraph
from elixir_compile.managed.agreement.agreement import Step, adopt_by_all, asked_by_all, plan_for_all
from elixir_compile.managed.agreement.in_step import planned_in_step
from elixir_compile.managed.agreement.rank_facts import roll_key
from elixir_compile.managed.correction import Correction, correct
from elixir_compile.managed.lifetime import for_compiled_code
from elixir_compile.managed.outstanding import OutstandingForwards, earlier_capture, with_room
from elixir_compile.managed.programs import (
    Programs,
    ProgramVersions,
    is_one_region_each,
    runs_as,
    storages_of,
    ticket_position,
)
from elixir_compile.managed.replan import replan, with_buckets_free
from elixir_compile.managed.saved import disk_of, load_plan_for, require_disk
from elixir_compile.managed.step_profiler import Progress, StepProfiler, StepStats
from elixir_compile.managed.variants import PlanLimits, PlannedSizes, PlanVariant, PlanVariants
from elixir_compile.options import Options
from elixir_compile.problem.cache import plan_for
from elixir_compile.problem.loss import as_decided, is_pressed
from elixir_compile.problem.planning import ExternalUsage, graph_of, may_move_back, named, problem_of, unread_bytes
from elixir_compile.problem.profile import Profiler, RegionProfile
from elixir_compile.rewrite.show import program_text
from elixir_compile.runtime.executor import Executor
from elixir_compile.runtime.lowering import RegionCompiler
from elixir_compile.search import Problem

_compile_lock = threading.RLock()


class Compilation:
    """One captured graph, its plan and the programs that obey it. Made by the backend; the user reads it."""

    def __init__(
        self,
        executor: Executor,
        regions: RegionCompiler,
        options: Options,
        name: str,
        review: Callable[[Plan], Plan] | None = None,
    ) -> None:
        """`review` gets the first plan and returns the one to use."""
        self.name = name
        self.graph: StepGraph | None = None
        """The captured step, torch-free."""
        self.plan: Plan | None = None
        """What was decided."""
        self.forward: fx.GraphModule | None = None
        """The forward program."""
        self.backward: fx.GraphModule | None = None
        """The backward program; None before the first backward, and for inference."""
        self.profile: RegionProfile | None = None
        """What each region took before it was planned; None without the option `profile_regions`."""
        self._executor = executor
        executor.disk = disk_of(options) or executor.disk
        self._regions = regions
        self._options = options
        self._review = review
        self._reviewed: Plan | None = None
        self._own: Captured | None = None
        self._step: StepGraph | None = None
        self._captured: Captured | None = None
        """The capture, its step at its own sizes, and the capture with what the graphs of other ranks use besides."""
        self._progress = Progress(is_on=options.report)
        self._profiler = StepProfiler(executor, is_on=options.report or options.replan, records=self.may_replan())
        self._stats: StepStats | None = None
        self._problem: Problem | None = None
        self._correction: Correction | None = None
        self._sizes = PlannedSizes()
        self._generation = -1
        self.beside_bytes = 0
        """Bytes that other forwards may hold until their backward while this one runs."""
        self.outstanding = OutstandingForwards(self, executor)
        """Which forwards wait for their backward while this one runs."""
        self._wants_backward = False
        self._programs = ProgramVersions()
        self._ticket_at = -1
        self._chose_strides: bool | None = None
        self._variants = PlanVariants(executor, name)
        self.loss_chunks: int | None = None
        """In how many chunks its loss is computed; None where it has none that could be."""
        self.is_superseded = False
        """Whether a later capture of the same step took its place."""

    @property
    def timeline(self) -> MemoryTimeline:
        """Live bytes by kind at every op, as the plan has them."""
        return plan_timeline(self.graph, self.plan)

    @property
    def is_inference(self) -> bool:
        """Whether the graph has no backward."""
        return self._captured is not None and self._captured.backward is None

    def __str__(self) -> str:
        if self.plan is None:
            return f"{self.name}: not planned"
        return program_text(self.plan, self.timeline, self.graph, self.forward, self.backward)

    def runs(self, *, is_backward: bool) -> Callable[[list[Any]], Any]:
        """Return what runs one half of the captured graph, the forward behind `begin_forward`."""
        if not is_backward:
            self._write_forward()
            return compat.boxed(for_compiled_code(self._run_forward))
        self._wants_backward = True
        self._write_backward()
        return compat.boxed(for_compiled_code(self._run_backward))

    # Planning.

    def capture(self, forward: fx.GraphModule, backward: fx.GraphModule | None, num_outputs: int) -> None:
        """Take the two halves of the graph, and plan the step."""
        self._own = captured_step(self.name, forward, backward, num_outputs=num_outputs, inner=self._options.inner)
        self._captured = self._own
        if backward is not None:
            self._step = add_extra_saved(self._captured)
            self._ticket_at = ticket_position(self._captured)
        self._variants.find_graph_set(lambda: roll_key(graph_of(self._captured, self._executor, self._sizes.values)))
        before = self._replan()
        if self._review is not None and not self._variants.graph_set_digest:
            self.plan = self._reviewed = self._review(self.plan)
        self.outstanding.take_over(before)
        if not self.is_inference and not any(other.is_superseded for other in self._executor.compilations):
            self._progress.planned(self.plan)

    def _replan(self) -> "Compilation | None":
        """Plan for the sizes at hand, on top of what is in force; return the earlier capture whose plan was taken."""
        if self._variants.graph_set_digest:
            self.beside_bytes = self._executor.saved.held_bytes()
            found = planned_in_step(self._executor, self._own, self._options, self._sizes.values, self._answered)
            self._captured, self._problem, self.plan = found
            self.graph = self._problem.graph
            require_disk(self.plan, self._executor.disk)
            return None
        self._captured = self._own
        self.graph = graph_of(self._captured, self._executor, self._sizes.values, self._step)
        return with_room(self._executor, unread_bytes(self._captured, self._executor), self._plan_beside)

    def _plan_beside(self, external: ExternalUsage) -> "Compilation | None":
        self.beside_bytes = external.waiting_bytes
        before = earlier_capture(self, self._executor)
        in_force = None if before is None else self._as_in_force(before)
        self._problem = asked_by_all(self._executor, lambda: self._asked(external, is_new=in_force is None))
        self.plan = in_force or plan_for_all(self._executor, self._problem, self._answered, self._options)
        require_disk(self.plan, self._executor.disk)
        # What was left alone may be more than others want: that is known once they ran.
        self._executor.is_crowded |= bool(external.reserved_bytes) and is_pressed(self.plan)
        return before

    def _asked(self, external: ExternalUsage, *, is_new: bool) -> Problem:
        problem = problem_of(self._captured, self.graph, self._executor, self._options, external)
        if self._correction is not None:
            return self._correction.applied_to(problem)
        if not (self._options.profile_regions and is_new) or self.is_inference:
            return problem
        profiler = Profiler(self._regions, self._executor.device, self._options.inner)
        self.profile = profiler.profile(self._captured, problem, self._sizes.values)
        self._progress.say(str(self.profile))
        return replace(problem, measured=self.profile.measured)

    def _searched(self, problem: Problem, options: Options) -> Plan:
        found = plan_for(problem, options)
        return found if self._reviewed is None else as_decided(found, self._reviewed)

    def _as_in_force(self, other: "Compilation") -> Plan:
        """Return the plan of `other`, with what was learnt for it taken over."""
        self.profile = other.profile
        if other._correction is not None:
            self._correction = other._correction
            self._profiler.stop()
        return other.plan

    def _answered(self, problem: Problem) -> Plan:
        """Return the plan that the user asked for, which is of the training graph, or one that is found."""
        if self._options.plan is None or self.is_inference:
            return self._searched(problem, self._options)
        return load_plan_for(self._options.plan, problem.graph, problem.cluster, problem.num_copies)

    # Programs.

    def _write_forward(self) -> None:
        is_first = self._chose_strides is None
        if is_first:
            self._chose_strides = is_one_region_each(self.plan) and not self.is_inference
        programs = self._programs_of(self.graph, self.plan)
        if is_first and not self.is_inference:
            compat.report_forward(programs.output_strides if programs.chooses_strides else ())
        self._take(programs)

    def _programs_of(self, graph: StepGraph, plan: Plan) -> Programs:
        # Not under a plan of one region each that follows one of several: autograd's strides are those of the first.
        may_choose = bool(self._chose_strides)
        return Programs(
            self._captured, graph, plan, self._executor, self._regions, self._progress, may_choose_strides=may_choose
        )

    def _take(self, programs: Programs) -> None:
        """Let the next forward run `programs`."""
        self._programs.take(programs, self._executor.saved.next_number, is_apart=self._variants.record_written())
        self.forward = programs.forward
        self._write_backward()

    def _write_backward(self) -> None:
        self.backward = self._programs.last.backward if self._wants_backward else None

    def _backward_of(self, ticket: torch.Tensor) -> fx.GraphModule:
        """Return the program that follows the forward of `ticket`."""
        programs = self._programs.of(ticket)
        with _compile_lock:
            return self.backward if programs is self._programs.last else programs.backward

    # Running.

    def begin_forward(self, args: list[Any]) -> None:
        """Before a forward: plan anew and move parameters where that is due."""
        self._executor.adopt_replaced()
        if self.is_inference:
            for other in self._executor.compilations:
                other._profiler.restart()  # It runs the same buckets, and regions of the same labels.
        else:
            self._look_back(args)
            self.outstanding.begin()
        self._keep_current(args)
        self._programs.drop_old()
        self._executor.begin()

    def _run_forward(self, args: list[Any]) -> Any:
        given = storages_of(args)
        try:
            results = self.forward.forward(args)
            self._executor.end()
        except BaseException:
            self._executor.abandon()
            raise
        if not self.is_inference:
            self._programs.wait_for(self._programs.last.note(results, given, self))
        return results

    def _run_backward(self, args: list[Any]) -> Any:
        ticket = args[self._ticket_at]
        self.outstanding.note_waiting(self._executor.saved.outstanding_owners(leaving_out=ticket))
        self._executor.saved.restore(ticket)
        try:
            self._variants.begin_backward(ticket)
            return self._backward_of(ticket).forward(args)
        except BaseException:
            self._executor.abandon()
            raise

    def _look_back(self, args: Sequence[Any]) -> None:
        """Before a forward: once enough steps went by, say what they took, and correct the plan where it was wrong."""
        for other in self._executor.compilations:
            if other is not self and not other.is_inference:
                other._profiler.stop()  # Spans of two graphs have the same labels.
        if self._sizes.differ(self._captured, args):
            self._profiler.restart()
            return
        stats = self._profiler.forward_begins()
        if stats is not None:
            self._progress.measured(self.plan, stats)
            self._stats = stats if self.may_replan() else None
        # Parameters do not move while a forward still waits for its backward.
        if self._stats is not None and not self._executor.saved.outstanding_owners():
            stats, self._stats = self._stats, None
            if self._executor.generation == self._generation:
                self._learn(stats)

    # Planned together with other graphs of the step.

    @property
    def reads(self) -> list[str]:
        """Names of the parameters that it reads, and of those that travel with them."""
        return named(self._captured, self._executor)

    def question(self, base_bytes: int) -> Problem:
        """Return what to plan with `base_bytes` outside; its buckets may move wherever they can."""
        graph = graph_of(self._captured, self._executor, self._sizes.with_room())
        problem = problem_of(self._captured, graph, self._executor, self._options, ExternalUsage())
        problem = replace(problem, base_bytes=base_bytes)
        if self.profile is not None and graph == self.graph:
            problem = replace(problem, measured=self.profile.measured)
        problem = self._correction.applied_to(problem) if self._correction is not None else problem
        return with_buckets_free(problem, self.plan) if may_move_back(problem, self._executor) else problem

    def search(self, problem: Problem) -> Plan:
        """Return the plan that answers `problem`."""
        return self._searched(problem, self._options)

    def written(self, problem: Problem, plan: Plan) -> Programs:
        """Return the programs of `plan`, which answers `problem` and is not in force yet."""
        if problem.graph == self.graph and runs_as(plan, self._programs.last.plan):
            return self._programs.last
        programs = self._programs_of(problem.graph, plan)
        if self._wants_backward:
            _ = programs.backward
        return programs

    def follow(self, problem: Problem, plan: Plan, programs: Programs) -> None:
        """Go on with `programs` of `plan`, which answers `problem`; the caller puts it in force."""
        self._problem, self.graph, self.plan = problem, problem.graph, plan
        self._sizes.take(dict(problem.graph.symbols))
        if programs is self._programs.last:
            return
        self._progress.planned(self.plan)
        self._take(programs)

    def mark_active(self) -> None:
        """Note that the plan is in force, and tell the executor when it wants each bucket updated."""
        self._generation = self._executor.generation
        if not self.is_inference:
            closing = closing_verbs(self.plan) if self.outstanding.is_alone else {}
            self._executor.schedule_updates(self.plan, closing)

    def _learn(self, stats: StepStats) -> None:
        with _compile_lock:
            self._correction = correct(self._problem, self.plan, stats)
            if self._correction is None:
                return
            # No other run measures the very same seconds, so none would find a plan of this search.
            options = replace(self._options, plan_cache=False)
            search = partial(self._searched, options=options) if may_move_back(self._problem, self._executor) else None
            outcome = replan(self._problem, self.plan, self._correction, search)
            if outcome is None:
                return
            self._progress.say(outcome.line)
            if not outcome.is_new:
                self.plan = outcome.plan
                return
            self.follow(self._problem, outcome.plan, self.written(self._problem, outcome.plan))
            self._executor.move(self.plan.buckets, self.plan.placements)
            self.mark_active()

    def may_replan(self) -> bool:
        """Whether the first steps may change the plan: not one that the user gave, nor that of several ranks."""
        return self._options.replan and self._options.plan is None and self._executor.ranks is None

    def _keep_current(self, args: Sequence[Any]) -> None:
        """Before a forward: adopt the plan, or make a new one for larger inputs, beside forwards that still wait for
        their backward, after another graph moved a bucket, and where another rank has to."""
        executor = self._executor
        wants_plan = self._wants_plan(args)
        while (call := self._variants.call(wants_plan=wants_plan)).step is not Step.RUN:
            with _compile_lock:
                if call.step is Step.JOIN:
                    wants_plan = not self._join(call.graph_set_digest) or self._wants_plan(args)
                else:
                    self._plan_anew(args)
                    wants_plan = False
        if executor.generation != self._generation:
            with _compile_lock:
                adopt_by_all(executor, self.plan, for_training=not self.is_inference, is_new=self._generation < 0)
                self.mark_active()

    def _wants_plan(self, args: Sequence[Any]) -> bool:
        executor = self._executor
        has_company = not self.is_inference and executor.saved.held_bytes() > self.beside_bytes
        if has_company and self.outstanding.takes_turns:
            has_company = not executor.saved.offload_outstanding()
        is_moved, may_adopt = executor.generation != self._generation, self._generation < 0
        may_stay = not is_moved or executor.agrees(self.plan.buckets, self.plan.placements, may_adopt=may_adopt)
        return bool(self._sizes.grown(self._captured, args)) or has_company or not may_stay

    def _join(self, graph_set_digest: str) -> bool:
        """Go on with the plan made for the graphs of `graph_set_digest`; return whether there is one."""
        now = None
        if self._variants.is_planned:
            programs, room = self._programs.last, PlanLimits(dict(self._sizes.values), self.beside_bytes)
            now = PlanVariant(self._captured, self._problem, self.plan, programs, room, self._generation)
        found = self._variants.join(graph_set_digest, now)
        if found is None:
            return False
        self._captured, self._problem, self.plan, programs, room, self._generation = found
        self.graph, self._sizes.values, self.beside_bytes = self._problem.graph, dict(room.sizes), room.beside_bytes
        self._take(programs)
        return True

    def _plan_anew(self, args: Sequence[Any]) -> None:
        self._sizes.values.update(grown := self._sizes.grown(self._captured, args))
        if grown and self._correction is not None:
            # The regions were measured at other sizes; the links and the optimizer are the same.
            self._correction = replace(self._correction, measured=Measured())
        self.outstanding.take_over(self._replan())
        self._generation = -1
        self._progress.planned(self.plan)
        self._write_forward()
