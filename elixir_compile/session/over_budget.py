"""Measure the bytes of the first steps, find what took more than its plan says, and plan again, also if the device runs
out of memory.

Two things may follow a plan that is wrong about the bytes of its step: the step exceeds a budget that the user chose
(`StepWatch`), or the device has no memory left (`EarlyShortage`). `session.causes` makes the next plan.
"""

import functools
import logging
import re
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import TensorWeakRef

from elixir_compile import compat
from elixir_compile.base.errors import NoFeasiblePlan, OutOfDeviceMemory, other_segments
from elixir_compile.base.process import Living
from elixir_compile.base.units import format_bytes, parse_bytes
from elixir_compile.compat.platforms import platform_of
from elixir_compile.graph.ops.shards import own_shard, parts_of
from elixir_compile.ir import Kind, Phase
from elixir_compile.ir.plan import plan_line
from elixir_compile.runtime.executor import Executor
from elixir_compile.runtime.measure import StepBytes, end_idle_profiler, start_step_bytes
from elixir_compile.runtime.recording import observed_files
from elixir_compile.search import Problem
from elixir_compile.search.joint.joint_budget import GraphRequest, needed_bytes_of
from elixir_compile.search.outer import Refusal, Variants, first_of
from elixir_compile.session.allocator_gaps import MOST_ASKED, missing_bytes
from elixir_compile.session.graph_planner import ActivePlan, GraphPlanner, JointGraph
from elixir_compile.session.machine import library_bytes
from elixir_compile.session.neighbours import state_bytes
from elixir_compile.session.step_profiler import STEPS_SKIPPED, STEPS_TIMED, foreign_bytes
from elixir_compile.step.timeline import live_storages, plan_timeline

# ----------------------------------------------------------------------------------------------------------------------
# Measure the bytes of a model's first steps, and find what took more than its plan says.
#
#   step 0    compiles                                             no figure
#   step 1    A.fwd  eager code  B.fwd  B.bwd  eager code  A.bwd   the peak of A, of B, and of the code after A
#   step 2    more than the budget: the graphs are planned again, with room for what was seen, and measured again
#
# The bytes that a graph took beyond its plan are added to its `base_bytes`. Code between graphs counts as a graph whose
# bytes no plan changes (see `joint_budget.GraphRequest`): other graphs leave room for it.
#
# A graph takes more than its plan if a kernel takes other bytes than its meta kernel says, or if code that no plan
# counts holds memory while the graph runs. Code between graphs, which runs op by op, has no plan at all. Only a budget
# that the user chose is watched: one that is measured is all free memory, and a step that exceeds it runs out of it.


TOLERATED_BYTES = 16384
"""Bytes by which a step may exceed its budget: losses, tickets and counters of steps, and workspaces of kernels, which
are too small to be counted up to 4 KiB each (see `runtime.measure`)."""
_NUM_NAMED = 4
"""So many causes are named."""
_MOST_PASSES = 4
"""A step has at most so many backward passes that no update of an optimizer follows, as far as it is measured. If no
update comes after so many passes of a model, its user updates it in another way, and each pass ends a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A graph, or the code that runs op by op before or after it."""

    graph: object | None
    """The graph; for code between graphs, the graph whose forward was the last before it; None if none was."""
    beside: tuple[object, ...] = ()
    """The graphs of the outstanding forwards, once per forward; empty for a graph, which knows its own."""
    is_outside: bool = False
    """Whether it is code between graphs."""
    site: str = ""
    """File and line before that code; empty before the first graph."""


class Outside:
    """The bytes of code between graphs, by the graph after whose forward it runs; None before the first."""

    def __init__(self) -> None:
        self._found: dict[object | None, tuple[tuple[object, ...], int]] = {}
        """The graphs of the forwards outstanding beside the code, and its bytes."""

    def note(self, place: Place, nbytes: int) -> None:
        """Note that the code at `place` held `nbytes` beside the graphs."""
        beside, most = self._found.get(place.graph, ((), 0))
        if nbytes > most:
            self._found[place.graph] = (place.beside, nbytes)
        elif beside:
            self._found[place.graph] = (beside, most)

    def requests(self, graphs: Sequence[object], problem: Problem) -> list[GraphRequest]:
        """Return the code between `graphs` as requests beside them, each with `problem`, the problem of some graph."""
        return [
            GraphRequest(
                problem=problem,
                beside=tuple(graphs.index(other) for other in beside if other in graphs),
                outside_bytes=nbytes,
            )
            for beside, nbytes in self._found.values()
        ]

    def replace(self, before: object, after: object) -> None:
        """Let `after`, a later capture of the same step, take the place of the graph `before`."""
        self._found = {
            after if graph is before else graph: (tuple(after if each is before else each for each in beside), nbytes)
            for graph, (beside, nbytes) in self._found.items()
        }


def note_overrun(
    peaks: Mapping[Place, int],
    graphs: Sequence[JointGraph],
    requests: Sequence[GraphRequest],
    base_bytes: int,
    outside: Outside,
) -> tuple[str, ...]:
    """Note what the places of a step took beyond their plans: in the planners of `graphs` and in `outside`.

    `peaks` are the measured bytes, `requests` those of `graphs` without code between them, and `base_bytes` what is
    held outside of both. Returns each cause in words.
    """
    plans = [graph.active.plan for graph in graphs]
    causes: list[tuple[int, str]] = []
    for place, peak_bytes in peaks.items():
        if place.is_outside:
            beside = tuple(graphs.index(other) for other in place.beside if other in graphs)
            problem = replace(requests[0].problem, base_bytes=base_bytes)
            code = GraphRequest(problem=problem, beside=beside, outside_bytes=0)
            *_, held_bytes = needed_bytes_of([*requests, code], [*plans, None])
            outside.note(place, peak_bytes - held_bytes)
            where = f"after {place.site}" if place.site else "before the first graph"
            words = f"code that runs op by op {where}"
        else:
            graph: Any = place.graph
            if graph in graphs:
                held_bytes = needed_bytes_of(requests, plans)[graphs.index(graph)]
            else:  # it has no backward
                held_bytes = graph.active.plan.prediction.device_peak_bytes
            graph.planner.excess_bytes += max(0, peak_bytes - held_bytes)
            words = f"{graph.name} beyond its plan"
        if peak_bytes - held_bytes > TOLERATED_BYTES:
            causes.append((peak_bytes - held_bytes, words))
    return tuple(f"{format_bytes(nbytes)} in {words}" for nbytes, words in sorted(causes, reverse=True)[:_NUM_NAMED])


_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
"""Folders of files that are not the user's."""


def call_site(graph: JointGraph) -> str:
    """Return file and line behind the program of `graph`, which has just ended on this thread: the graph break at which
    it ends, or the call of its function."""
    if graph.graph_break is not None:
        return "{}:{}".format(*graph.graph_break)
    users = (
        f"{frame.f_code.co_filename}:{line}"
        for frame, line in traceback.walk_stack(None)
        if not frame.f_code.co_filename.startswith((*_LIBRARIES, "<"))
    )
    found = list(islice(users, 2))
    return found[-1] if found else graph.name  # the first of two is the function that runs as the graph


class _Steps:
    """Where the steps of a model begin, as its forwards and the updates of optimizers tell."""

    def __init__(self) -> None:
        self.has_backward = False
        """Whether a backward has begun since the last forward that trains."""
        self._num_updates: int | None = None
        """The updates of optimizers before the last forward that trains; None before the first."""
        self._sees_updates = False
        """Whether an update has come between two forwards that train."""
        self._num_open = 0
        """Forwards that train behind a backward, before any update."""
        self._num_leading = 0
        """Forwards without gradients in turn, before the last that trains behind any."""
        self._num_without = 0
        """Forwards without gradients since the last that trains."""

    @property
    def may_begin(self) -> bool:
        """Whether the next forward may begin a step: an update has ended the last. The first step is none, as it
        compiles, and optimizers have no state in it."""
        if self._num_updates is None or self._sees_updates or self._num_open < _MOST_PASSES:
            return self._num_updates not in (None, _updates.num)
        return self.has_backward

    @property
    def is_evaluation(self) -> bool:
        """Whether more forwards without gradients came in turn than before any that trains, as those of a reference."""
        return self._num_without > self._num_leading

    def note_forward(self, *, is_training: bool) -> bool:
        """Note a forward; return whether it is the first of a step that trains, as far as the last steps tell."""
        num_before, self._num_without = self._num_without, 0 if is_training else self._num_without + 1
        is_first = self.may_begin and not num_before and (is_training or self._num_leading > 0)
        if is_training:
            self._num_leading = num_before or self._num_leading
            self._sees_updates |= self._num_updates not in (None, _updates.num)
            self._num_updates = _updates.num
            self._num_open += self.has_backward and not self._sees_updates
            self.has_backward = False
        return is_first


class StepWatch:
    """Measures the peaks of the first steps under each set of plans of a model whose user chose a budget."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.tensors: Callable[[], Iterable[torch.Tensor]] = tuple
        """Returns the parameters and the buffers of the model."""
        self.peaks: dict[Place, int] = {}
        """The peaks of the last measured step in bytes, without memory of others; empty if they were taken."""
        self._is_on = False
        self._steps = _Steps()
        self._bytes: StepBytes | None = None
        self._at_death: weakref.finalize[..., Any] | None = None
        """Ends the measurement with this object."""
        self._has_ended = False
        """Whether the backward of the measured step has ended."""
        self._num_passes = 0
        """Backward passes of the measured step that a forward has followed."""
        self._has_forward = False
        """Whether a forward that trains has run in the measured step."""
        self._has_stopped = False
        """Whether a measurement has ended in this forward: torch 2.13 writes to freed memory if its profiler stops and
        starts again below one op (see `tools.measure.observation`)."""
        self._places: dict[Place, int] = {}
        self._sites: dict[object, str] = {}
        """File and line behind each graph."""

    @property
    def is_measuring(self) -> bool:
        """Whether the running step is measured."""
        return self._bytes is not None

    @property
    def is_waiting(self) -> bool:
        """Whether a step under the plans in force is still to be measured."""
        return self._is_on or self.is_measuring

    def rearm(self, *, is_given: bool) -> None:
        """Measure the next step, because a plan is new; `is_given` says whether the user chose its budget.

        A step of several calls is not measured: stages of a pipeline run in turn, and torch 2.13 crashes if its
        profiler ends below the forward of another model.
        """
        if is_given and self._executor.calls.spec.num == 1:
            self._is_on = True
            _follow_updates()
        self._has_stopped |= self.is_measuring
        self.drop()
        self.peaks = {}

    def measure_next(self, *, is_on: bool) -> None:
        """Measure the next step under the plans in force if `is_on`, else none."""
        self._is_on = is_on

    def step_may_begin(self) -> None:
        """Note a forward, of which kind ever: the measurement of the step before ends.

        If no optimizer has ended the step, gradients add up over backward passes: a few are measured together.
        """
        end_idle_profiler()
        for other in _measuring:
            if other is not self:
                other.end()
                other.drop_if_left()
        was_measuring = self.is_measuring
        if self._has_ended and not self._steps.may_begin and self._num_passes < _MOST_PASSES:
            self._num_passes += 1
            self._has_ended = self._has_forward = False
        self.end()
        if self._has_forward:
            self.drop_if_left()  # a forward without a backward, as of an evaluation
        self._has_stopped = was_measuring and not self.is_measuring

    def forward_begins(self, args: Sequence[Any], *, is_training: bool) -> None:
        """Note a forward with the inputs `args`, after plans were made: begin to measure if it begins a step."""
        is_first = self._steps.note_forward(is_training=is_training)
        if not self._is_on and self._bytes is None:
            return
        inputs = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if self._bytes is not None and (is_training or self._has_forward or not self._steps.is_evaluation):
            self._bytes.adopt(inputs)
        elif self._bytes is not None:
            self.drop()
        elif is_first and not (self._has_stopped or self._executor.saved.outstanding_owners()):
            own: list[torch.Tensor] = []
            tensors = list(self.tensors())
            with torch.DisableTorchFunctionSubclass():  # reads no value, so it need not wait for a queued update
                for tensor in tensors:
                    own += parts_of(own_shard(tensor)).values()
                    if tensor.is_leaf and tensor.grad is not None:
                        own += parts_of(own_shard(tensor.grad)).values()
            own += [*inputs, *compat.saved_behind(inputs)]  # code before the first graph has left them for its backward
            params = [tensor for tensor in tensors if isinstance(tensor, torch.nn.Parameter)]
            # Every plan counts the workspaces of libraries, which are there before the step.
            more_bytes = state_bytes(self._executor, params) + library_bytes(self._executor.device)
            self._places, self._sites = {}, {}
            self._has_ended = self._has_forward = False
            self._num_passes = 0
            self._bytes = start_step_bytes(self._executor.device, own, more_bytes)
            if self._bytes is not None:
                # A model may go in the middle of a step, and its measurement holds torch.profiler.
                self._at_death = weakref.finalize(self, self._bytes.drop)
                self._at_death.atexit = False
                _measuring.add(self)
        if is_training:
            self._has_forward = self.is_measuring

    def runs(self, graph: object) -> None:
        """Note that a program of `graph` begins."""
        if self._bytes is not None:
            self._mark(Place(graph=graph))

    def ran(self, graph: JointGraph, *, is_backward: bool) -> None:
        """Note that a program of `graph` has ended: what follows runs op by op."""
        if is_backward:
            self._steps.has_backward = True
            if self._is_on or self._bytes is not None:
                compat.after_backward(self.backward_ended)
        if self._bytes is not None:
            owners = self._executor.saved.outstanding_owners()
            last = owners[-1] if owners else None
            if not is_backward:
                self._sites[graph] = call_site(graph)
            site = "" if last is None else self._sites.get(last, "")
            self._mark(Place(graph=last, beside=tuple(owners), is_outside=True, site=site))

    def backward_ended(self) -> None:
        """Note the end of a backward pass: what follows is the user's."""
        executor = self._executor
        unread = [slot for slot in executor.slots.values() if executor.buckets.of(slot) is None]
        with torch.DisableTorchFunctionSubclass():  # a parameter may be in update
            # Eager code has read the parameter itself, and autograd has accumulated the gradient.
            executor.gradients.trained_eagerly.update(slot.key for slot in unread if slot.param.grad is not None)
        if self._bytes is not None and not self._executor.saved.outstanding_owners():
            self._has_ended = True
            self._bytes.mark(None)

    def _mark(self, place: Place) -> None:
        assert self._bytes is not None
        self._bytes.mark(self._places.setdefault(place, len(self._places)))

    def end(self) -> None:
        """End the measurement of a step, if one runs and its backward has ended; keep the figures."""
        if self._bytes is None or not self._has_ended:
            return
        found = self._taken(self._bytes).stop()
        self._is_on = not found  # somebody else may have taken torch.profiler
        self.peaks = {place: found[number] for place, number in self._places.items() if number in found}

    def drop_if_left(self) -> None:
        """End the measurement of a step that has no outstanding forward: nobody will run its backward."""
        if self._bytes is not None and not self._executor.saved.outstanding_owners():
            self.drop()

    def drop(self) -> None:
        """End the measurement of a step without a result."""
        if self._bytes is not None:
            self._taken(self._bytes).drop()
        self._has_forward = False

    def _taken(self, measured: StepBytes) -> StepBytes:
        """Return the running measurement, which is not kept: it holds all events of the step."""
        if self._at_death is not None:
            self._at_death.detach()
        self._bytes = self._at_death = None
        _measuring.discard(self)
        return measured


_measuring: "Living[StepWatch]" = Living()
"""The watches of running measurements."""


class _Updates:
    """The updates of all optimizers of the process, from the first plan under a budget of a user on."""

    num = 0


_updates = _Updates()


@functools.cache
def _follow_updates() -> None:
    """Have all updates of optimizers counted, and end the measurements whose backward has ended before; the first call
    does it."""

    def end(optimizer: Optimizer, args: object, kwargs: object) -> None:
        for watch in _measuring:
            watch.end()
        end_idle_profiler()

    def count(optimizer: Optimizer, args: object, kwargs: object) -> None:
        _updates.num += 1

    before: Any = torch.compiler.disable(end)
    after: Any = torch.compiler.disable(count)
    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


# ----------------------------------------------------------------------------------------------------------------------
# What a graph does if the device runs out of memory in the first steps of a plan.
#
#   first      OutOfMemoryError -> cache emptied -> the forward runs again: kernels are tuned in it, beside the plan
#   forward    OutOfMemoryError -> cache emptied -> plan with the excess in `base_bytes` -> the forward runs again
#   backward   OutOfMemoryError raised, with the budget that is enough; the next forward is planned with the excess in
#              `base_bytes`
#   again      OutOfDeviceMemory, with the largest tensors at the peak of the plan
#   later      OutOfMemoryError raised, with a note that names these tensors
#
# A backward does not run again, because gradients and updates of a part of it may be in place already. Nor does a
# forward that writes its inputs or communicates: a part of that is done. On several ranks nothing is planned: the other
# ranks wait in a collective.


log = logging.getLogger("elixir_compile")

_NUM_EARLY = STEPS_SKIPPED + STEPS_TIMED
"""The first so many forwards of a plan run a second time if the device is full. Its later forwards need as much."""
_NUM_LARGEST = 5
_REQUESTED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?[KMGT]?i?B|\d+ bytes)")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAllocation:
    """An allocation in a step that the device had too little memory for."""

    budget_bytes: int
    """The budget of the plan in use."""
    planned_bytes: int
    """The peak of the plan."""
    allocated_bytes: int
    """Bytes of all tensors of the process at the failure."""
    requested_bytes: int
    """Bytes of the allocation; 0 if they are not known."""
    gap_bytes: int = 0
    """Bytes that the allocator held beside tensors, with its cache freed: none of them fits the allocation."""

    def excess_bytes(self, foreign_bytes: int, limit_bytes: int | None) -> int:
        """Return by how many bytes a new plan must need less.

        The allocation found no place between the tensors. Under a new plan other gaps between them stay free: as many
        bytes as were seen, and at least those of one such allocation. `foreign_bytes` are tensors that no plan counts.
        `limit_bytes` are the most bytes that the process may allocate on the device, if the user chose the budget; a
        measured budget is that limit, without `foreign_bytes`, and for it `limit_bytes` is None.
        """
        requested_bytes = self.requested_bytes or self.budget_bytes // 16
        needed_bytes = self.allocated_bytes + self.requested_bytes - foreign_bytes
        above_plan_bytes = max(requested_bytes, needed_bytes - self.planned_bytes)
        own_bytes = self.budget_bytes if limit_bytes is None else limit_bytes - foreign_bytes
        return above_plan_bytes + max(0, self.budget_bytes - own_bytes + max(self.gap_bytes, requested_bytes))


Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class _Failed:
    """A forward that the device had too little memory for."""

    kept: Sequence[Any]
    """Its inputs; tensors by weak references."""
    text: str
    """What the allocator said."""

    def inputs(self) -> list[Any]:
        """Return the inputs. Raises OutOfMemoryError if the caller has kept one of the tensors no longer."""
        again = [value() if isinstance(value, TensorWeakRef) else value for value in self.kept]
        if any(value is None and isinstance(ref, TensorWeakRef) for value, ref in zip(again, self.kept, strict=True)):
            raise torch.OutOfMemoryError(self.text)
        return again


class EarlyShortage:
    """Out-of-memory errors in the first steps of the plans of one graph: one new plan because of them, then an error
    with the largest tensors."""

    def __init__(self, name: str, executor: Executor, planner: GraphPlanner) -> None:
        """`name` is the name of the graph, and `planner` makes its plans."""
        self._name = name
        self._executor = executor
        self._planner = planner
        self._num_forwards = 0
        """Forwards under the plan in force."""
        self._failed: FailedAllocation | None = None
        """The allocation for which the next plan must need less."""
        self.wants_plan = False
        """Whether the next forward must be planned again."""

    @property
    def _is_early(self) -> bool:
        """Whether the last forward, or its backward, is of an early step."""
        return self._num_forwards <= _NUM_EARLY

    def forward(self, graph: JointGraph, args: list[Any]) -> Any:
        """Run the forward of `graph`; in early steps, once more under a new plan if the device is full.

        The first forward has an attempt more under its plan before that, which lacks what tuning took: unless other
        ranks wait for its collectives, or it is one of several calls of a step.
        """
        self.wants_plan = False
        self._num_forwards += 1
        if not self._is_early:
            try:
                return graph.run_forward(args)
            except torch.OutOfMemoryError as error:
                self._explain(graph.active, error)
                raise
        tunes = self._num_forwards == 1 and self._executor.peers is None and self._executor.calls.spec.num == 1
        found = self._attempt(graph, args, notes=not tunes)
        if tunes and isinstance(found, _Failed):
            again = found.inputs()
            log.warning(
                "%s ran out of device memory in its first forward, which tunes kernels: it runs again", self._name
            )
            platform_of(self._executor.device).empty_cache()
            self._executor.begin()
            found = self._attempt(graph, again, notes=True)
        if not isinstance(found, _Failed):
            return found
        again = found.inputs()
        graph.keep_current(again)
        self.wants_plan = False
        self._executor.begin()
        try:
            return graph.run_forward(again)
        except torch.OutOfMemoryError as error:
            raise self._explained(graph.active) from error

    def _attempt(self, graph: JointGraph, args: list[Any], *, notes: bool) -> Any:
        """Return the result of the forward of `graph`, or a `_Failed` if the device is full and it may run again.

        If `notes`, it is planned with the excess from then on.
        """
        # Programs free their inputs after the last use: only the caller may keep them longer.
        kept = [TensorWeakRef(value) if isinstance(value, torch.Tensor) else value for value in args]
        try:
            return graph.run_forward(args)
        except torch.OutOfMemoryError as error:
            step = graph.active.graph
            before = {each.id for each in step.storages if each.kind in (Kind.INPUT, Kind.BUFFER, Kind.PARAM)}
            # A forward that writes values which exist before it, or communicates, is done in part.
            may_repeat = not any(
                op.phase is Phase.FORWARD and ("c10d" in op.target or not before.isdisjoint(op.writes))
                for op in step.ops
            )
            if notes or not may_repeat:
                if not self._planner.may_replan:
                    raise
                self._note(graph.active, error)
            if not may_repeat:
                self._explain(graph.active, error)
                raise
            # Not the error: its traceback holds the tensors of the failed forward.
            return _Failed(kept, str(error))

    def note_backward(self, active: ActivePlan, error: BaseException) -> None:
        """Let the next forward be planned again if `error` says that the device is full in an early backward under
        `active`; raise OutOfDeviceMemory if it was planned again before."""
        if isinstance(error, torch.OutOfMemoryError):
            self._explain(active, error)
            if self._is_early and self._planner.may_replan:
                self._note(active, error)

    def plan(self, active: ActivePlan, args: Sequence[Any], make: Callable[[], Made]) -> Made:
        """Return what `make` plans for a forward with the inputs `args`, with the excess if an allocation failed under
        `active`, or with as much of it as there are plans for.

        Raises OutOfDeviceMemory if no plan needs less.
        """
        failed, self._failed = self._failed, None
        if failed is not None:  # the tensors of its step are freed by now
            inputs = [arg for arg in args if isinstance(arg, torch.Tensor)]
            excess_bytes = failed.excess_bytes(foreign_bytes(self._executor, inputs), self._limit_bytes())
            log.warning(
                "%s ran out of device memory in an early step: %s requested beside %s. Its next forward is planned "
                "with %s less",
                self._name,
                format_bytes(failed.requested_bytes),
                format_bytes(failed.allocated_bytes),
                format_bytes(excess_bytes),
            )
            self._planner.excess_bytes = excess_bytes
            platform_of(self._executor.device).empty_cache()

        def lessened() -> Variants[int, Refusal]:
            less_bytes = self._planner.excess_bytes
            for num_left in reversed(range(MOST_ASKED)):
                error = yield less_bytes
                if not isinstance(error, NoFeasiblePlan) or not self.wants_plan:
                    raise error.renewed()
                less_bytes -= missing_bytes(error, error.budget_bytes)
                if error.memory != "device" or less_bytes <= 0 or not num_left:
                    raise self._explained(active) from error
                log.warning(
                    "%s: no plan needs so much less; it is planned with %s less", self._name, format_bytes(less_bytes)
                )

        def plan_with(less_bytes: int) -> Made:
            self._planner.excess_bytes = less_bytes
            return make()

        return first_of(lessened(), plan_with)

    def begin(self) -> None:
        """Note that a plan comes into force: its first steps are early ones, whatever came before it."""
        self._num_forwards = 0

    def _explain(self, active: ActivePlan, error: torch.OutOfMemoryError) -> None:
        """Add a note to `error`: what the allocation that failed lacked, and the budget that leaves room for it; the
        plan in use, and the largest tensors at its peak, whose names begin with modules."""
        failed, plan = self._failed_under(active, error), active.plan
        asked, tensors = format_bytes(failed.requested_bytes), format_bytes(failed.allocated_bytes)
        enough_bytes = failed.budget_bytes - failed.excess_bytes(0, self._limit_bytes())
        fix = f"device_memory={enough_bytes} would leave room for that" if enough_bytes > 0 else "Lower device_memory"
        fix += other_segments(", or try ")
        if self._is_early and self._planner.may_replan and not self._planner.excess_bytes:
            fix += ". The next forward is planned with so much less: zero the gradients, and go on with it"
        largest = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in _largest_tensors(active).items())
        files = observed_files(self._executor.phases)
        written = "".join(f"\nelixir: the steps before are in {found}" for found in files)
        error.add_note(
            f"elixir: {plan_line(plan)}   {plan.name}\nelixir: the largest tensors at the peak of the plan, at "
            f"{plan.prediction.device_peak_at}: {largest}\nelixir: {asked} were asked for beside {tensors} of tensors "
            f"and {format_bytes(failed.gap_bytes)} of gaps. {fix}{written}"
        )

    def _note(self, active: ActivePlan, error: torch.OutOfMemoryError) -> None:
        """Let the graph be planned with the excess; plans of the planner may be changed. Raises OutOfDeviceMemory if it
        was before."""
        if self._planner.excess_bytes:
            raise self._explained(active) from error
        self._failed = self._failed_under(active, error)
        self.wants_plan = True

    def _failed_under(self, active: ActivePlan, error: torch.OutOfMemoryError) -> FailedAllocation:
        """Return the allocation that failed under `active` with `error`, while the tensors of its step are there."""
        device = self._executor.device
        platform = platform_of(device)
        allocated_bytes = platform.allocated_bytes(device)
        said = _REQUESTED.search(str(error))
        text = "" if said is None else said.group(1).replace(" bytes", "B").replace(" ", "")
        return FailedAllocation(
            budget_bytes=active.plan.budget_bytes,
            planned_bytes=active.plan.prediction.device_peak_bytes,
            allocated_bytes=allocated_bytes,
            requested_bytes=parse_bytes(text) if text else 0,
            gap_bytes=max(0, platform.reserved_bytes(device) - allocated_bytes),
        )

    def _limit_bytes(self) -> int | None:
        """Return the most bytes that this process may allocate; None if the budget is measured, which is that."""
        device = self._executor.device
        memory = platform_of(device).memory(device) if self._planner.is_budget_given else None
        return None if memory is None else min(memory.limit_bytes, memory.reserved_bytes + memory.free_bytes)

    def _explained(self, active: ActivePlan) -> OutOfDeviceMemory:
        device = self._executor.device
        return OutOfDeviceMemory(
            self._name,
            active.plan.budget_bytes,
            active.plan.prediction.device_peak_bytes,
            platform_of(device).allocated_bytes(device),
            platform_of(device).reserved_bytes(device),
            _largest_tensors(active),
        )


def _largest_tensors(active: ActivePlan) -> dict[str, int]:
    """Return the bytes of the largest tensors at the peak of the plan in use, by name; a name begins with its
    module."""
    graph, plan = active.graph, active.plan
    largest = live_storages(graph, plan, plan_timeline(graph, plan).peak.op)[:_NUM_LARGEST]
    return {str(storage.id): storage.nbytes for storage in largest}
