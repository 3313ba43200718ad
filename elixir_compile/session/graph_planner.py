"""What is known of a captured graph, and the problems and plans made from it.

```text
  sizes of the inputs, staying gradients, what the first steps showed, external usage --> problem --> plan
```

Each of these facts may change from one forward to the next: see `session.causes`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from elixir_compile import compat
from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.base.options import Options
from elixir_compile.base.units import format_bytes
from elixir_compile.graph.capture.captured import Captured
from elixir_compile.ir import Plan, StepGraph
from elixir_compile.ir.cost import Measured
from elixir_compile.runtime.executor import Executor
from elixir_compile.runtime.lowering import RegionCompiler
from elixir_compile.search import Problem
from elixir_compile.search.joint.joint_budget import rebased
from elixir_compile.search.joint.replan import (
    Correction,
    Outcome,
    StepStats,
    correct,
    fastest_rule,
    replan,
    with_buckets_free,
)
from elixir_compile.search.joint.variants import as_decided
from elixir_compile.session.agreement import any_of_all, asked_by_all
from elixir_compile.session.cache import (
    KnownKernels,
    forget_accumulation,
    plan_for,
    remember_accumulation,
    remembers_accumulation,
)
from elixir_compile.session.machine import Profiler, RegionProfile, device_budget_bytes, machine
from elixir_compile.session.neighbours import device_bytes, unplanned_bytes
from elixir_compile.session.plan_files import load_plan_for
from elixir_compile.session.planning import (
    ExternalUsage,
    bytes_beside,
    graph_of,
    may_move_back,
    problem_of,
    workspace_bytes,
)
from elixir_compile.session.programs import Programs, ProgramVersions, saved_device_bytes
from elixir_compile.session.rank_facts import warn_of_other_rows
from elixir_compile.session.step_profiler import Progress, StepProfiler
from elixir_compile.step.as_run import given_bytes
from elixir_compile.step.divide import micro_batches_of

# ----------------------------------------------------------------------------------------------------------------------
# The plan in use of a graph, and what it counts beside the graph.


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivePlan:
    """The plan in use of a graph, with its capture and its problem."""

    captured: Captured
    """The graph's own capture, or a capture extended by the parameters that only other ranks use."""
    problem: Problem
    plan: Plan
    beside_bytes: int
    """Device bytes that other outstanding forwards may hold while the graph runs under this plan."""
    neighbour_bytes: int = 0
    """Device bytes that models which run in turn with the graph's may hold meanwhile."""
    unplanned_bytes: int = 0
    """Device bytes of what no plan can place, as the state of plain optimizers."""
    generation: int = -1
    """The executor's generation when the plan was last in force; -1 if the plan has not been in force yet."""
    moves_at: int = -1
    """The executor's generation at which the plan was made with the homes of buckets in force open, which it moves if
    it is put in force at that generation; -1 for a plan made for the homes in force."""

    @property
    def graph(self) -> StepGraph:
        """The captured step, torch-free."""
        return self.problem.graph

    def is_of(self, graph: StepGraph) -> bool:
        """Return whether `graph` is the same step, whatever its name."""
        return self.graph == replace(graph, name=self.graph.name)

    def beside_neighbours(self, neighbour_bytes: int) -> "ActivePlan":
        """Return the same schedule beside models in turn that hold `neighbour_bytes`."""
        more_bytes = neighbour_bytes - self.neighbour_bytes
        if not more_bytes:
            return self
        problem = replace(self.problem, base_bytes=self.problem.base_bytes + more_bytes)
        plan = rebased(self.plan, self.plan.base_bytes + more_bytes)
        return replace(self, problem=problem, plan=plan, neighbour_bytes=neighbour_bytes)


def active_plan(
    executor: Executor,
    captured: Captured,
    problem: Problem,
    plan: Plan,
    external: ExternalUsage,
) -> ActivePlan:
    """Return `plan` as a plan in use that answers `problem`, which then has the micro-batches of the plan.

    It counts the outstanding forwards of other graphs and the models in turn of `external`, and, if a step calls its
    graph several times, the other outstanding forwards of the graph itself.
    """
    most = plan.calls.outstanding - 1
    own_bytes = 0
    if most:
        full_bytes = saved_device_bytes(problem.graph, plan)
        saved_bytes = most * full_bytes
        if plan.lean is not None:
            lean_bytes = saved_device_bytes(problem.graph, plan.of_lean_calls())
            nums_full = (plan.lean.num_full - 1, plan.lean.num_full)
            saved_bytes = max(full * full_bytes + (most - full) * lean_bytes for full in nums_full)
        own_bytes = most * given_bytes(problem.graph) + saved_bytes
    return ActivePlan(
        captured=captured,
        problem=replace(problem, micro_batches=micro_batches_of(plan)),
        plan=plan,
        beside_bytes=external.outstanding_bytes + own_bytes,
        neighbour_bytes=external.neighbour_bytes,
        unplanned_bytes=unplanned_bytes(executor),
    )


# ----------------------------------------------------------------------------------------------------------------------
# Sizes of dynamic inputs.


_GROWTH_DIVISOR = 8
"""A size that has grown is planned an eighth larger."""


class PlannedSizes:
    """The planned value of each symbol of a graph: its value in the capture, or a larger later value."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}
        """By the name of the symbol."""
        self._of_last: dict[str, int] = {}
        """The values in the last forward."""
        self._have_grown: set[str] = set()

    def grown(self, captured: Captured, args: Sequence[Any]) -> Mapping[str, int]:
        """Return the symbols whose value in `args` exceeds the planned value."""
        found: dict[str, int] = {}
        for name, example, value in _sizes_of(captured, args):
            self._of_last[name] = value
            if value > self.values.setdefault(name, self._planned(name, example)):
                found[name] = value
        self._have_grown |= found.keys()
        return found

    def as_run(self) -> Mapping[str, int]:
        """Return the values in the last forward."""
        return {**self.values, **self._of_last}

    def with_headroom(self) -> Mapping[str, int]:
        """Return the values, with an eighth added to each that has grown.

        The number of tokens of an expert differs in every step. Without headroom, a plan that fills the budget would be
        searched again for each number above all earlier ones.
        """
        return {
            name: value + value // _GROWTH_DIVISOR if name in self._have_grown else value
            for name, value in self.values.items()
        }

    def take(self, values: Mapping[str, int]) -> None:
        """Plan for `values` from now on."""
        self.values.update(values)
        self._have_grown.clear()

    def differ(self, captured: Captured, args: Sequence[Any]) -> bool:
        """Return whether a symbol has a value in `args` other than the planned value."""
        return any(value != self._planned(name, example) for name, example, value in _sizes_of(captured, args))

    def of(self, name: str, captured: Captured, args: Sequence[Any]) -> int:
        """Return the value in `args` of the symbol `name`, or its planned value if no input has it."""
        found = (value for own, _, value in _sizes_of(captured, args) if own == name)
        return next(found, self.values.get(name, 1))

    def _planned(self, name: str, example: torch.SymInt) -> int:
        return self.values.get(name, compat.evaluate_size(example, {}))


def _sizes_of(captured: Captured, args: Sequence[Any]) -> Iterator[tuple[str, torch.SymInt, int]]:
    """Yield the name, the value in the capture, and the value in `args` of each symbol among the inputs."""
    placeholders = captured.forward.graph.find_nodes(op="placeholder")
    for node, value in zip(placeholders, args, strict=True):
        example = node.meta.get("val")
        if isinstance(example, torch.SymInt):
            name, _ = compat.expression_of(example)
            if name.isidentifier():
                yield name, example, value


# ----------------------------------------------------------------------------------------------------------------------
# Gradients that stay through the next forward: noticed, counted by plans, and remembered for later runs.
#
#   step 0    forward backward          no gradient is there before
#             forward                   gradients of the first backward are there: plan again, with sums of gradients
#             forward ...               every later plan of the model counts them
#   later     forward                   the plan cache remembers the problem: the first plan counts them
#
# The bytes of these gradients are in the buckets of the plan, as sums (see `Bucket.sum_nbytes`).


_NUM_TRIED = 8
"""Forwards without gradients of an earlier backward after which a remembered accumulation is forgotten. A step of one
micro-batch leaves none, and a step of several leaves some at its second forward."""


class StayingGradients:
    """The gradients of earlier backward passes, as the forwards and backwards of one training graph find them."""

    def __init__(
        self, executor: Executor, options: Options, progress: Progress, is_plan_given: Callable[[], bool]
    ) -> None:
        """`is_plan_given` says whether the plan in use is the user's own."""
        self._executor = executor
        self._options = options
        self._is_plan_given = is_plan_given
        self._progress = progress
        self._first: Problem | None = None
        """The first problem of the graph, without sums of gradients: later runs ask it again."""
        self._num_without = 0
        """Forwards that found no kept gradients, since the graph was planned from memory."""
        self._is_from_memory = False

    def notice(self, *, is_forward: bool) -> None:
        """Look for gradients of an earlier backward, before a forward or a backward of the graph."""
        gradients = self._executor.gradients
        if gradients.stay and not self._is_from_memory:
            return
        if gradients.staying_bytes(self._executor.slots.values()):
            gradients.stay, self._is_from_memory = True, False
            if self._first is not None and self._options.accumulate is None:
                remember_accumulation(self._first, self._options)
            if self._is_plan_given():
                self._progress.say(
                    "accumulates: gradients of earlier backward passes stay. The plan of the option `plan` counts them "
                    "only if it was made with the option `accumulate`"
                )
        elif is_forward and self._is_from_memory and self._first is not None:
            self._num_without += 1
            if self._num_without == _NUM_TRIED:
                self._is_from_memory = False
                forget_accumulation(self._first, self._options)

    def is_missing_in(self, plan: Plan) -> bool:
        """Return whether gradients stay and `plan` does not count them. The user's own plan is never replaced."""
        return self._executor.gradients.stay and not plan.counts_staying_gradients and not self._is_plan_given()

    def take_over(self, other: "StayingGradients") -> None:
        """Take over the first problem of `other`, of an earlier capture of the same step."""
        self._first = self._first or other._first

    def answered(
        self, problem: Problem, ask: Callable[[], Problem], answer: Callable[[Problem], Plan]
    ) -> tuple[Problem, Plan]:
        """Return `problem` and its plan.

        If an earlier run of the problem found gradients that stay, return the problem that counts them, from `ask`, and
        its plan; unless no such plan fits. Raises NoFeasiblePlan if `answer` does for `problem`.
        """
        options, gradients = self._options, self._executor.gradients
        self._is_from_memory = False
        if self._first is None and not problem.accumulates and problem.trains:
            self._first = problem
            is_asked = options.accumulate is None and options.plan is None
            self._is_from_memory = is_asked and remembers_accumulation(problem, options)
        if any_of_all(self._executor, self._is_from_memory, "gradients that stayed in earlier runs"):
            gradients.stay = True
            with_sums = asked_by_all(self._executor, ask)
            try:
                return with_sums, answer(with_sums)
            except NoFeasiblePlan:
                gradients.stay = self._is_from_memory = False
        return problem, answer(problem)

    def planned(self, before: Plan, after: Plan) -> bool:
        """Log that `after` replaces `before` because it counts gradients that stay; return whether it does."""
        is_noticed = after.counts_staying_gradients and not before.counts_staying_gradients
        if is_noticed:
            there = format_bytes(self._executor.gradients.staying_bytes(self._executor.slots.values()))
            peaks = [format_bytes(plan.prediction.device_peak_bytes) for plan in (before, after)]
            self._progress.say(
                f"accumulates: {there} of gradients of earlier backward passes stay, and are in the plan from now on: "
                f"peak planned as {peaks[1]} of {format_bytes(after.budget_bytes)}, {peaks[0]} without them. If they "
                "need not stay, call `optimizer.zero_grad()` before the forward; if they do, the option `accumulate` "
                "counts them from the first step on"
            )
        return is_noticed


# ----------------------------------------------------------------------------------------------------------------------
# From the captured step of a graph to its problems and plans, with all that is known of the graph.


class GraphPlanner:
    """Builds the problems of a graph and answers them.

    It has more than 15 attributes, because all that one plan of the graph shows is kept for the next.
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
        self.options = options
        self.progress = progress
        self.kernels = KnownKernels(executor.device)
        """The bytes that kernels allocate on the device of this graph."""
        self.sizes = PlannedSizes()
        self._has_searched = options.plan_use == "start"
        """Whether the plan in use came of a search from the user's own, or may do so; the leader of ranks knows it."""
        self.staying = StayingGradients(executor, options, progress, lambda: self.is_plan_given)
        self.step: StepGraph | None = None
        """The graph's own step at the sizes of its capture, without the other parameters of its buckets; None if it was
        not converted yet. Converting it again takes as long as a small search."""
        self.profile: RegionProfile | None = None
        """Seconds and bytes of each region, measured before planning; None without the option `profile_regions`."""
        self.correction: Correction | None = None
        """The machine as the first steps showed it; None before that."""
        self.stats: StepStats | None = None
        """The measurements of the first steps, until the plan is corrected by them."""
        self.excess_bytes = 0
        """Device bytes that early steps took beyond the plan: see `over_budget`."""
        self.reviewed: Plan | None = None
        """The plan as its review left it: later plans keep its decision about the loss."""
        self.divides_to_fit = False
        """Whether searches may divide the batch under the option micro_batches="fit", because no plan fits the device
        without that."""

    # Questions to the options.

    @property
    def is_plan_given(self) -> bool:
        """Whether the plan in use is the user's own, which nothing replaces. On one rank it is not if a search started
        from it; ranks have to give the same answer, and only one of them has searched."""
        return self.options.plan is not None and (self._executor.peers is not None or not self._has_searched)

    @property
    def may_divide(self) -> bool:
        """Whether a search may choose a number of micro-batches."""
        return self.options.micro_batches == "auto" or self.divides_to_fit

    @property
    def why_unmovable(self) -> str:
        """Why no other plan may take the place of this one, in words; empty if it may."""
        if self.is_plan_given:
            return "the user chose its plan"
        if self._executor.peers is not None:
            return "several ranks follow one plan"
        # The seconds of several calls in a step include waiting for other stages.
        return "" if self._executor.calls.spec.num == 1 else "a step calls it several times"

    @property
    def why_fixed(self) -> str:
        """Why the first steps may not change the plan, in words; empty if they may."""
        return self.why_unmovable or ("" if self.options.replan else "the option replan is off")

    @property
    def may_replan(self) -> bool:
        """Whether the first steps may change the plan."""
        return not self.why_fixed

    @property
    def given_budget_bytes(self) -> int | None:
        """The device budget that the user chose; None if it is measured before each plan."""
        return self.options.device_memory

    @property
    def is_budget_given(self) -> bool:
        """Whether the user chose the device budget."""
        return self.options.device_memory is not None

    # What is known.

    def take_over(self, other: "GraphPlanner") -> None:
        """Take over what `other`, the planner of an earlier capture of the same step, knows."""
        self.staying.take_over(other.staying)
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

    def grow(self, captured: Captured, args: Sequence[Any]) -> Callable[[], None]:
        """Plan for the sizes in `args`, if they are larger; return what takes that back."""
        sizes, correction = dict(self.sizes.values), self.correction
        grown = self.sizes.grown(captured, args)
        self.sizes.values.update(grown)
        if grown and correction is not None:
            # The regions were measured at other sizes; the links and the optimizer are the same.
            self.correction = replace(correction, measured=Measured())

        def shrink() -> None:
            self.sizes.values, self.correction = sizes, correction

        return shrink

    def has_free(self, nbytes: int) -> bool:
        """Return whether the device has `nbytes` for this model, whatever budget the user chose."""
        executor, options = self._executor, replace(self.options, device_memory=None)
        cluster = machine(executor.device, options.hardware, options.host_memory)
        return nbytes <= device_budget_bytes(options, cluster, executor.device, device_bytes(executor))

    # Problems.

    def graph(self, captured: Captured) -> StepGraph:
        """Return the step of `captured`, the capture of this graph, with its dynamic sizes at the planned values."""
        graph = graph_of(captured, self._executor, self.sizes.values, self.step)
        self.kernels.keep()
        return graph

    def problem(
        self,
        captured: Captured,
        graph: StepGraph,
        external: ExternalUsage,
        *,
        is_new: bool = False,
        base_bytes: int | None = None,
    ) -> Problem:
        """Return the problem of `graph`, the step of `captured`, at the prices that the first steps showed.

        If the graph `is_new`, its regions are measured first under the option `profile_regions`. `base_bytes`, if they
        are given, are held outside of the graph.
        """
        problem = problem_of(captured, graph, self._executor, self.options, external)
        problem = replace(problem, budget_bytes=self._budget_for(problem.budget_bytes))
        is_profiled = is_new and self.correction is None and self.options.profile_regions
        if is_profiled and captured.backward is not None:
            profiler = Profiler(self._regions, self._executor.device, self.options.inner)
            self.profile = profiler.profile(captured, problem, self.sizes.values)
            self.progress.say(str(self.profile))
            problem = replace(problem, measured=self.profile.measured)
        base_bytes = (problem.base_bytes if base_bytes is None else base_bytes) + self.excess_bytes
        if self.correction is None:  # a measured peak includes the workspaces of kernels
            base_bytes += workspace_bytes(captured, self.sizes.values, self.profile)
        problem = replace(problem, base_bytes=base_bytes)
        return problem if self.correction is None else self.correction.applied_to(problem)

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
        problem = self.problem(captured, graph, external, base_bytes=base_bytes)
        if self.correction is None and self.profile is not None and graph == active.graph:
            problem = replace(problem, measured=self.profile.measured)
        return with_buckets_free(problem, active.plan) if may_move_back(problem, self._executor) else problem

    # Plans.

    def answer_for(self, captured: Captured) -> Callable[[Problem], Plan]:
        """Return the function to answer problems of `captured`: with the user's plan if it trains and the user gave
        one, else by a search, which may start from that plan."""
        path = None if captured.backward is None else self.options.plan
        if path is None:
            return self.search

        def answer(problem: Problem) -> Plan:
            found = load_plan_for(path, problem, self.options.plan_use)
            self._has_searched = isinstance(found, Problem) and not found.follows_start
            return found if isinstance(found, Plan) else self.search(found)

        return answer

    def search(self, problem: Problem, *, is_cached: bool = True) -> Plan:
        """Return a plan for `problem`, from the plan cache if it `is_cached` there, or from a search."""
        options = self.options if is_cached else replace(self.options, plan_cache=False)
        if options.micro_batches == "fit" and not self.divides_to_fit:
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
        search = partial(self.search, is_cached=False)
        may_move = may_move_back(active.problem, self._executor)
        return replan(active.problem, active.plan, self.correction, search if may_move else None)

    def fastest_rule(self, active: ActivePlan) -> Plan | None:
        """Return the plan of the fastest simple rule for the problem of `active` at the prices of the first steps, of
        those with other homes or activations than `active`; None if no other fits or may take its place."""
        if self.correction is None or not may_move_back(active.problem, self._executor):
            return None
        return fastest_rule(self.correction.applied_to(active.problem), active.plan)


# ----------------------------------------------------------------------------------------------------------------------
# A captured graph, as those see it that plan, measure and run it beside others.


@dataclass(slots=True)
class GraphRuns:
    """What is known of the runs of a graph since the graphs of its model were last planned together."""

    has_run: bool = False
    beside: tuple[object, ...] = ()
    """The graphs of the most forwards that were outstanding at once, one entry per forward."""
    offloads_first: bool = False
    """If True, activations of outstanding forwards are offloaded before each run of the graph."""

    def positions_in(self, graphs: Sequence[object]) -> tuple[int, ...]:
        """Return the positions in `graphs` of the outstanding forwards' graphs, one per forward."""
        return tuple(graphs.index(other) for other in self.beside if other in graphs)


class JointGraph(Protocol):
    """A captured graph beside others: a `PlannedGraph`."""

    name: str
    runs: GraphRuns
    planner: GraphPlanner
    programs: ProgramVersions
    profiler: StepProfiler
    graph_break: tuple[str, int, str] | None
    """File, line and reason of the graph break at which it ends."""
    is_superseded: bool
    """Whether a later capture of the same step took its place."""

    @property
    def is_planned(self) -> bool: ...

    @property
    def active(self) -> ActivePlan: ...

    @property
    def is_inference(self) -> bool: ...

    @property
    def param_names(self) -> Sequence[str]:
        """The parameters read by the graph, and all others in their buckets."""
        ...

    def follow(self, problem: Problem, plan: Plan, programs: Programs, external: ExternalUsage) -> None:
        """Run `programs` of `plan` from the next forward on, beside the `external` usage."""
        ...

    def keep_current(self, args: Sequence[Any]) -> None:
        """Plan again if there is a cause, and put the plan in force."""
        ...

    def run_forward(self, args: list[Any]) -> Any:
        """Run the forward once."""
        ...

    def mark_in_force(self) -> None:
        """Note the generation of the buckets under the plan."""
        ...


def ran_beside(one: JointGraph, other: JointGraph) -> bool:
    """Return whether a forward of `one` was outstanding while `other` ran, or the other way round."""
    return other in one.runs.beside or one in other.runs.beside


def searching(graphs: Sequence[JointGraph]) -> GraphPlanner:
    """Return the planner that searches for `graphs` together: one that may divide the batch, if any may."""
    return next((graph.planner for graph in graphs if graph.planner.may_divide), graphs[0].planner)


def fixed_bytes(executor: Executor, graphs: Sequence[JointGraph]) -> int:
    """Return the device bytes of the model of `executor` outside of its `graphs`, which no plan of them changes."""
    read = {name for graph in graphs for name in graph.param_names}
    return bytes_beside(executor, read, graphs[0].planner.options, ExternalUsage(), is_training=True)
