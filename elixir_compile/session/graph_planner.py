"""Make problems and plans from the captured step of a graph with all its measurements, and keep each program as long as
a forward of it waits for its backward.
"""

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.base.options import Options, plans_alike
from elixir_compile.graph.capture.convert import Captured
from elixir_compile.ir import Plan, StepGraph
from elixir_compile.ir.cost import Measured
from elixir_compile.runtime.executor import Executor
from elixir_compile.runtime.lowering import RegionCompiler
from elixir_compile.runtime.saved import is_lean, number_of
from elixir_compile.search import Problem
from elixir_compile.search.joint.replan import Correction, Outcome, StepStats, correct, replan, with_buckets_free
from elixir_compile.search.joint.variants import as_decided
from elixir_compile.search.question import Question, question_of
from elixir_compile.session.cache import KnownKernels, plan_for
from elixir_compile.session.machine import Profiler, RegionProfile, device_budget_bytes, machine
from elixir_compile.session.neighbours import device_bytes
from elixir_compile.session.planning import (
    ExternalUsage,
    bytes_beside,
    graph_of,
    may_move_back,
    problem_of,
    workspace_bytes,
)
from elixir_compile.session.programs import ActivePlan, PlannedSizes, Programs, is_one_region_each
from elixir_compile.session.rank_facts import warn_of_other_rows
from elixir_compile.session.saved import load_plan_for
from elixir_compile.session.step_profiler import Progress

# ----------------------------------------------------------------------------------------------------------------------
# The programs of a graph under its plans, older ones as long as a forward of theirs waits for its backward.
#
# The plan in force during a forward decides which activations autograd keeps. Its backward must run the program of the
# same plan, even if the graph follows another plan by then; and of a plan with lean calls, the program of the same
# treatment of activations.


class ProgramVersions:
    """Writes the programs of a graph; keeps programs that save different activations, each until its last backward."""

    def __init__(self, executor: Executor, regions: RegionCompiler, progress: Progress) -> None:
        self._executor = executor
        self._regions = regions
        self._progress = progress
        self._programs: tuple[tuple[int, Programs], ...] = ()
        """Programs, each with the number of the first forward that may run them."""
        self._outstanding: set[int] = set()
        """Numbers of forwards whose ticket autograd holds."""
        self._has_backward = False
        self._chose_strides: bool | None = None

    @property
    def last(self) -> Programs:
        """The programs of the next forward."""
        return self._programs[-1][1]

    @property
    def forward(self) -> fx.GraphModule | None:
        """The program of the next forward; None before it was written."""
        return self.last.forward if self._programs else None

    @property
    def backward(self) -> fx.GraphModule | None:
        """The program of the backward of the next forward; None before the first backward, and for inference."""
        return self.last.backward if self._programs and self._has_backward else None

    def next(self, num_full: int) -> Programs:
        """Return the programs of the next forward, while `num_full` full forwards wait for their backward."""
        lean = self.last.plan.lean
        runs_lean = lean is not None and num_full >= lean.num_full
        return (self.last.lean or self.last) if runs_lean else self.last

    def write_backward(self) -> None:
        """Write the backward of the last programs, and from now on the backward of all programs with their forward."""
        self._has_backward = True
        self.last.write_backward()

    def write_first(self, captured: Captured, graph: StepGraph, plan: Plan) -> Programs:
        """Return new programs as `write` does; the first call decides whether Inductor chooses strides."""
        is_first, is_training = self._chose_strides is None, captured.backward is not None
        if is_first:
            self._chose_strides = is_one_region_each(plan) and is_training
        programs = self.write(captured, graph, plan)
        if is_first and is_training:
            compat.report_forward(programs.output_strides if programs.chooses_strides else ())
        return programs

    def write(self, captured: Captured, graph: StepGraph, plan: Plan) -> Programs:
        """Return new programs of `plan` for `graph`, the step of `captured`."""
        return Programs(
            captured,
            graph,
            plan,
            self._executor,
            self._regions,
            self._progress,
            # Autograd keeps the strides of the first programs. If these had several regions, Inductor may choose none.
            may_choose_strides=bool(self._chose_strides),
        )

    def write_next(self, captured: Captured, graph: StepGraph, plan: Plan) -> Programs:
        """Return programs of `plan` for `graph`, which may follow the last programs: these themselves if new ones
        would be equal."""
        if graph == self.last.graph and runs_as(plan, self.last.plan):
            return self.last
        programs = self.write(captured, graph, plan)
        if self._has_backward:
            programs.write_backward()
        return programs

    def take(self, programs: Programs, *, is_apart: bool = False) -> None:
        """Let `programs` run from the next forward on.

        They replace the last programs if these save the same activations, unless `is_apart`.
        """
        if self._programs and not is_apart and self.last.saves_as(programs):
            self._programs = (*self._programs[:-1], (self._programs[-1][0], programs))
        else:
            self._programs = (*self._programs, (self._executor.saved.next_number, programs))
        if self._has_backward:
            programs.write_backward()

    def keep_for(self, ticket: torch.Tensor) -> None:
        """Keep the programs of the forward of `ticket` as long as the memory of `ticket` lives."""
        number = number_of(ticket)
        self._outstanding.add(number)
        weakref.finalize(ticket.untyped_storage(), self._outstanding.discard, number).atexit = False

    def of(self, ticket: torch.Tensor) -> Programs:
        """Return the programs of the forward of `ticket`."""
        found = self._programs[self._place(number_of(ticket))][1]
        return found.lean if is_lean(ticket) and found.lean is not None else found

    def drop_old(self) -> None:
        """Drop the programs that no outstanding forward and no next forward needs."""
        if len(self._programs) > 1:
            # Any thread may free a ticket: copy the set, which must not change during the iteration.
            needed = {self._place(number) for number in self._outstanding.copy()} | {len(self._programs) - 1}
            self._programs = tuple(self._programs[place] for place in sorted(needed))

    def _place(self, number: int) -> int:
        """Return the position of the programs of the forward `number`."""
        return max(place for place, (first, _) in enumerate(self._programs) if first <= number)


def runs_as(plan: Plan, other: Plan) -> bool:
    """Return whether `plan` and `other`, both for the same graph, have the same programs."""
    return all(
        getattr(plan, field) == getattr(other, field)
        for field in ("buckets", "placements", "activations", "regions", "schedules", "lean")
    )


# ----------------------------------------------------------------------------------------------------------------------
# From the captured step of a graph to its problems and plans, with all measurements of the graph.
#
#   sizes, external usage, region profile, correction --> problem --> plan of the user, of the cache, or of a search


Made = TypeVar("Made")


class GraphPlanner:
    """Builds the problems of a graph and answers them.

    It has more than 20 methods: 8 are questions to the options, which other classes ask.
    """

    def __init__(
        self,
        executor: Executor,
        regions: RegionCompiler,
        options: Options,
        progress: Progress,
        budget_for: Callable[[int], int],
    ) -> None:
        """`budget_for` returns the device budget to plan for instead of the given one: see `session.trial`."""
        self._executor = executor
        self._budget_for = budget_for
        self._regions = regions
        self._options = options
        self._progress = progress
        self.kernels = KnownKernels(executor.device)
        """The bytes that kernels allocate on the device of this graph."""
        self.sizes = PlannedSizes()
        self.step: StepGraph | None = None
        """The graph's own step at the sizes of its capture, without the other parameters of its buckets; None if it was
        not converted yet. Converting it again takes as long as a small search."""
        self.profile: RegionProfile | None = None
        """Seconds and bytes of each region, measured before planning; None without the option `profile_regions`."""
        self.correction: Correction | None = None
        """The machine as the first steps showed it; None before that."""
        self.excess_bytes = 0
        """Device bytes that early steps took beyond the plan: see `over_budget`."""
        self.reviewed: Plan | None = None
        """The plan as its review left it: later plans keep its decision about the loss."""
        self._divides = False
        """Whether searches may divide the batch under the option micro_batches="fit"."""

    @property
    def may_divide(self) -> bool:
        """Whether a search may choose a number of micro-batches."""
        return self._options.micro_batches == "auto" or self._divides

    @property
    def divides_to_fit(self) -> bool:
        """Whether the batch was divided because no plan fits the device without that."""
        return self._divides

    @property
    def may_replan(self) -> bool:
        """Whether the first steps may change the plan."""
        return not self.why_fixed

    @property
    def why_fixed(self) -> str:
        """Why the first steps may not change the plan, in words; empty if they may."""
        return self._why_unmovable or ("" if self._options.replan else "the option replan is off")

    @property
    def may_move(self) -> bool:
        """Whether another plan may take the place of this one."""
        return not self._why_unmovable

    @property
    def _why_unmovable(self) -> str:
        """Why no other plan may take the place of this one, in words; empty if it may."""
        if self._options.plan is not None:
            return "the user chose its plan"
        if self._executor.peers is not None:
            return "several ranks follow one plan"
        # The seconds of several calls in a step include waiting for other stages.
        return "" if self._executor.calls.spec.num == 1 else "a step calls it several times"

    @property
    def is_budget_given(self) -> bool:
        """Whether the user chose the device budget; else it is measured before each plan."""
        return self._options.device_memory is not None

    @property
    def given_budget_bytes(self) -> int | None:
        """The device budget that the user chose; None if it is measured before each plan."""
        return self._options.device_memory

    def plans_like(self, other: "GraphPlanner") -> bool:
        """Return whether the same step gets the same plan here and by `other`: no option differs that shapes plans."""
        return plans_alike(self._options, other._options)

    def take_over(self, other: "GraphPlanner") -> None:
        """Take over the measurements of `other`, the planner of an earlier capture of the same step."""
        self.profile = other.profile
        self.correction = other.correction or self.correction
        self.excess_bytes = max(self.excess_bytes, other.excess_bytes)

    def has_grown(self, active: ActivePlan, args: Sequence[Any]) -> bool:
        """Return whether a size in `args` exceeds its planned value. If the rows of the batch are not those of the
        share of this rank, warn of them, once for each number of rows."""
        ranks, graph = self._executor.ranks, active.graph
        if ranks is not None and ranks.shares and active.captured.backward is not None:
            rows = self.sizes.of(graph.batch_size, active.captured, args) if graph.batch_size else graph.batch
            warn_of_other_rows(ranks, rows)
        return bool(self.sizes.grown(active.captured, args))

    @contextmanager
    def growing(self, captured: Captured, args: Sequence[Any]) -> Iterator[None]:
        """Plan for the sizes in `args`, if they are larger, from the context on; if it fails, as before."""
        sizes, correction = dict(self.sizes.values), self.correction
        grown = self.sizes.grown(captured, args)
        self.sizes.values.update(grown)
        if grown and correction is not None:
            # The regions were measured at other sizes; the links and the optimizer are the same.
            self.correction = replace(correction, measured=Measured())
        try:
            yield
        except BaseException:
            # The programs in force are for the smaller sizes, so a later batch of this size has to be planned again.
            self.sizes.values, self.correction = sizes, correction
            raise

    def graph(self, captured: Captured) -> StepGraph:
        """Return the step of `captured`, the capture of this graph, with its dynamic sizes at the planned values."""
        graph = graph_of(captured, self._executor, self.sizes.values, self.step)
        self.kernels.keep()
        return graph

    def problem(self, captured: Captured, graph: StepGraph, external: ExternalUsage, *, is_new: bool) -> Problem:
        """Return the problem of `graph`, the step of `captured`.

        If the graph `is_new`, its regions are measured first under the option `profile_regions`.
        """
        problem = self._problem_of(captured, graph, external)
        if self.correction is not None:
            return self._with_workspaces(self.correction.applied_to(problem), captured)
        if not (self._options.profile_regions and is_new) or captured.backward is None:
            return self._with_workspaces(problem, captured)
        profiler = Profiler(self._regions, self._executor.device, self._options.inner)
        self.profile = profiler.profile(captured, problem, self.sizes.values)
        self._progress.say(str(self.profile))
        return self._with_workspaces(replace(problem, measured=self.profile.measured), captured)

    def _problem_of(self, captured: Captured, graph: StepGraph, external: ExternalUsage) -> Problem:
        problem = problem_of(captured, graph, self._executor, self._options, external)
        return replace(problem, budget_bytes=self._budget_for(problem.budget_bytes))

    def has_free(self, nbytes: int) -> bool:
        """Return whether the device has `nbytes` for this model, whatever budget the user chose."""
        executor, options = self._executor, replace(self._options, device_memory=None)
        cluster = machine(executor.device, options.hardware)
        return nbytes <= device_budget_bytes(options, cluster, executor.device, device_bytes(executor))

    def _with_workspaces(self, problem: Problem, captured: Captured) -> Problem:
        """Return `problem` with the bytes of kernels' workspaces, and those that early steps lacked, in `base_bytes`.

        A measured peak includes the workspaces.
        """
        beside_bytes = self.excess_bytes
        if self.correction is None:
            beside_bytes += workspace_bytes(captured, self.sizes.values, self.profile)
        return replace(problem, base_bytes=problem.base_bytes + beside_bytes)

    def with_free_buckets(self, problem: Problem, plan: Plan) -> Problem:
        """Return `problem` with the placements of `plan`, now in force, open, if its parameters may move now."""
        executor = self._executor
        may_move = executor.peers is None and not executor.saved.outstanding_owners()
        return with_buckets_free(problem, plan) if may_move and may_move_back(problem, executor) else problem

    def bytes_beside(self, read: Collection[str]) -> int:
        """Return the device bytes of the model outside of its training graphs, which read the parameters `read`."""
        return bytes_beside(self._executor, read, self._options, ExternalUsage(), is_training=True)

    def joint_problem(
        self, active: ActivePlan, base_bytes: int, external: ExternalUsage, *, is_as_run: bool = False
    ) -> Problem:
        """Return the problem that `active` answers, with headroom for larger sizes and with `base_bytes` held outside
        of it; its buckets are free to move if the optimizer's state can follow them.

        `external` has the bytes of other models that are planned together with its model. If the problem `is_as_run`,
        it has the sizes of the last forward.
        """
        captured = active.captured
        sizes = self.sizes.as_run() if is_as_run else self.sizes.with_headroom()
        graph = graph_of(captured, self._executor, sizes)
        problem = self._problem_of(captured, graph, external)
        problem = self._with_workspaces(replace(problem, base_bytes=base_bytes), captured)
        if self.profile is not None and graph == active.graph:
            problem = replace(problem, measured=self.profile.measured)
        problem = self.correction.applied_to(problem) if self.correction is not None else problem
        return with_buckets_free(problem, active.plan) if may_move_back(problem, self._executor) else problem

    def question(self, active: ActivePlan) -> Question:
        """Return what the plan of `active` answers, with the options of its search.

        A plan that the user gave was made for the budget that it names, whatever is free here.
        """
        plan = active.plan
        asked = replace(active.problem, budget_bytes=plan.budget_bytes, base_bytes=plan.base_bytes)
        return question_of(asked, self._options)

    def answer_for(self, captured: Captured) -> Callable[[Problem], Plan]:
        """Return the function to answer problems of `captured`: with the user's plan if it trains and the user gave
        one, else by a search."""
        path = None if captured.backward is None else self._options.plan
        if path is None:
            return self.search
        return lambda problem: load_plan_for(path, problem.graph, problem.cluster, problem.num_copies, problem.calls)

    def whole_first(self, make: Callable[[], Made], *, keeps_whole: bool = False) -> Made:
        """Return the result of `make`, which plans the graph.

        Under the option micro_batches="fit", the first call keeps the batch whole, whatever else it has to try. If no
        plan fits the device, `make` is called again and may divide the batch, unless the caller `keeps_whole`.
        """
        self._divides = False
        try:
            return make()
        except NoFeasiblePlan as error:
            is_last_resort = self._options.micro_batches == "fit" and error.memory == "device" and not error.because
            if keeps_whole or not is_last_resort:
                raise
        self._divides = True
        return make()

    def search(self, problem: Problem) -> Plan:
        """Return a plan for `problem`, from the plan cache or from a search."""
        return self._search_with(self._options, problem)

    def _search_with(self, options: Options, problem: Problem) -> Plan:
        if options.micro_batches == "fit" and not self._divides:
            options = replace(options, micro_batches=1)
        found = plan_for(problem, options)
        return found if self.reviewed is None else as_decided(found, self.reviewed)

    def learn(self, active: ActivePlan, stats: StepStats) -> Outcome | None:
        """Correct the machine by `stats` of the first steps under `active`, and search again if it may pay.

        Returns None if nothing was learnt or the prediction was right.
        """
        self.correction = correct(active.problem, active.plan, stats)
        if self.correction is None:
            return None
        # No later run measures exactly these seconds, so a plan of this search would never be found in the cache.
        search = partial(self._search_with, replace(self._options, plan_cache=False))
        may_move = may_move_back(active.problem, self._executor)
        return replan(active.problem, active.plan, self.correction, search if may_move else None)
