"""What a graph does if the device runs out of memory in the first steps of a plan.

```text
  first      OutOfMemoryError -> cache emptied -> the forward runs again: kernels are tuned in it, beside the plan
  forward    OutOfMemoryError -> cache emptied -> plan with the excess in `base_bytes` -> the forward runs again
  backward   OutOfMemoryError raised, with the budget that is enough; the next forward is planned with the excess in
             `base_bytes`
  again      OutOfDeviceMemory, with the largest tensors at the peak of the plan
  later      OutOfMemoryError raised, with a note that names these tensors
```

A backward does not run again, because gradients and updates of a part of it may be in place already. Nor does a forward
that writes its inputs or communicates: a part of that is done. On several ranks nothing is planned: the other ranks
wait in a collective.
"""

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.weak import TensorWeakRef

from elixir_compile.base.errors import NoFeasiblePlan, OutOfDeviceMemory, other_segments
from elixir_compile.base.units import format_bytes, parse_bytes
from elixir_compile.compat.platforms import platform_of
from elixir_compile.ir import Kind, Phase, StepGraph
from elixir_compile.runtime.executor import Executor
from elixir_compile.runtime.phases import observed_files
from elixir_compile.session.graph_planner import GraphPlanner
from elixir_compile.session.line import plan_line
from elixir_compile.session.step_profiler import STEPS_SKIPPED, STEPS_TIMED, foreign_bytes
from elixir_compile.session.variants import ActivePlan
from elixir_compile.step.timeline import device_lives, plan_timeline

log = logging.getLogger("elixir_compile")

_NUM_EARLY = STEPS_SKIPPED + STEPS_TIMED
"""The first so many forwards of a plan run a second time if the device is full. Its later forwards need as much."""
_NUM_LARGEST = 5
_MOST_ASKED, _ASKED_DIVISOR = 3, 64
"""So many plans are asked for after a shortage, each with as much less as the last error says, and this part of the
budget."""
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


class Forwards(Protocol):
    """A planned graph, as far as its forwards go."""

    @property
    def active(self) -> ActivePlan:
        """The plan in use."""
        ...

    def keep_current(self, args: Sequence[Any]) -> None:
        """Plan again if it is due, and put the plan in force."""
        ...

    def run_forward(self, args: list[Any]) -> Any:
        """Run the forward once."""
        ...


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
    def _may_plan_again(self) -> bool:
        """Whether the forward after a shortage in this step is planned again."""
        return self._is_early and self._planner.may_replan and not self._planner.excess_bytes

    @property
    def _is_early(self) -> bool:
        """Whether the last forward, or its backward, is of an early step."""
        return self._num_forwards <= _NUM_EARLY

    def forward(self, graph: Forwards, args: list[Any]) -> Any:
        """Run the forward of `graph`; in early steps, once more under a new plan if the device is full.

        The first forward has an attempt more under its plan before that, which lacks what tuning took: unless other
        ranks wait for its collectives, or it is one of several calls of a step.
        """
        self.wants_plan = False
        self._num_forwards += 1
        if not self._is_early:
            with self._explaining(lambda: graph.active):
                return graph.run_forward(args)
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

    def _attempt(self, graph: Forwards, args: list[Any], *, notes: bool) -> Any:
        """Return the result of the forward of `graph`, or a `_Failed` if the device is full and it may run again.

        If `notes`, it is planned with the excess from then on.
        """
        # Programs free their inputs after the last use: only the caller may keep them longer.
        kept = [TensorWeakRef(value) if isinstance(value, torch.Tensor) else value for value in args]
        try:
            return graph.run_forward(args)
        except torch.OutOfMemoryError as error:
            may_repeat = not changes_outside(graph.active.graph)
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

    def plan(self, active: ActivePlan, args: Sequence[Any], make: Callable[[], None]) -> None:
        """Let `make` plan a forward with the inputs `args`, with the excess if an allocation failed under `active`, or
        with as much of it as there are plans for.

        Raises OutOfDeviceMemory if no plan needs less.
        """
        if self._failed is not None:
            self._count_excess(self._failed, args)
            self._failed = None
        num_asked = 0
        while True:
            try:
                make()
                return
            except NoFeasiblePlan as error:
                if not self.wants_plan:
                    raise
                num_asked += 1
                missing_bytes = error.needed_bytes - error.budget_bytes + error.budget_bytes // _ASKED_DIVISOR
                less_bytes = self._planner.excess_bytes - missing_bytes
                if error.memory != "device" or less_bytes <= 0 or num_asked == _MOST_ASKED:
                    raise self._explained(active) from error
                log.warning(
                    "%s: no plan needs so much less; it is planned with %s less", self._name, format_bytes(less_bytes)
                )
                self._planner.excess_bytes = less_bytes

    def begin(self) -> None:
        """Note that a plan comes into force: its first steps are early ones, whatever came before it."""
        self._num_forwards = 0

    @contextmanager
    def _explaining(self, active: Callable[[], ActivePlan]) -> Iterator[None]:
        """Add a note with the largest tensors to an OutOfMemoryError that passes the block."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            self._explain(active(), error)
            raise

    def _explain(self, active: ActivePlan, error: torch.OutOfMemoryError) -> None:
        explain_shortage(active, error, self._fix(active, error), observed_files(self._executor.phases))

    def _fix(self, active: ActivePlan, error: torch.OutOfMemoryError) -> str:
        """Return what the allocation that failed with `error` lacked, and the budget that leaves room for it."""
        failed = self._failed_under(active, error)
        asked, tensors = format_bytes(failed.requested_bytes), format_bytes(failed.allocated_bytes)
        enough_bytes = failed.budget_bytes - failed.excess_bytes(0, self._limit_bytes())
        what = f"device_memory={enough_bytes} would leave room for that" if enough_bytes > 0 else "Lower device_memory"
        found = f"{asked} were asked for beside {tensors} of tensors and {format_bytes(failed.gap_bytes)} of gaps. "
        found += f"{what}{other_segments(', or try ')}"
        if self._may_plan_again:
            found += ". The next forward is planned with so much less: zero the gradients, and go on with it"
        return found

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
        return FailedAllocation(
            budget_bytes=active.plan.budget_bytes,
            planned_bytes=active.plan.prediction.device_peak_bytes,
            allocated_bytes=allocated_bytes,
            requested_bytes=_requested_bytes(error),
            gap_bytes=max(0, platform.reserved_bytes(device) - allocated_bytes),
        )

    def _limit_bytes(self) -> int | None:
        """Return the most bytes that this process may allocate; None if the budget is measured, which is that."""
        device = self._executor.device
        memory = platform_of(device).memory(device) if self._planner.is_budget_given else None
        return None if memory is None else min(memory.limit_bytes, memory.reserved_bytes + memory.free_bytes)

    def _count_excess(self, failed: FailedAllocation, args: Sequence[Any]) -> None:
        """Let the planner count the excess of `failed`, and empty the allocator's cache; the tensors of the failed step
        are freed by now."""
        inputs = [arg for arg in args if isinstance(arg, torch.Tensor)]
        self._planner.excess_bytes = failed.excess_bytes(foreign_bytes(self._executor, inputs), self._limit_bytes())
        log.warning(
            "%s ran out of device memory in an early step: %s requested beside %s. Its next forward is planned with "
            "%s less",
            self._name,
            format_bytes(failed.requested_bytes),
            format_bytes(failed.allocated_bytes),
            format_bytes(self._planner.excess_bytes),
        )
        platform_of(self._executor.device).empty_cache()

    def _explained(self, active: ActivePlan) -> OutOfDeviceMemory:
        device = self._executor.device
        return OutOfDeviceMemory(
            self._name,
            active.plan.budget_bytes,
            active.plan.prediction.device_peak_bytes,
            platform_of(device).allocated_bytes(device),
            platform_of(device).reserved_bytes(device),
            largest_tensors(active),
        )


def changes_outside(graph: StepGraph) -> bool:
    """Return whether the forward of `graph` writes values that exist before it, or communicates."""
    before = {storage.id for storage in graph.storages if storage.kind in (Kind.INPUT, Kind.BUFFER, Kind.PARAM)}
    ops = [op for op in graph.ops if op.phase is Phase.FORWARD]
    return any("c10d" in op.target or not before.isdisjoint(op.writes) for op in ops)


def largest_tensors(active: ActivePlan) -> dict[str, int]:
    """Return the bytes of the largest tensors at the peak of the plan in use, by name; a name begins with its
    module."""
    graph, plan = active.graph, active.plan
    peak = plan_timeline(graph, plan).peak.op
    at = next((index for index, op in enumerate(graph.ops) if op.id == peak), 0)
    lives = device_lives(graph, plan)
    live = [
        storage
        for storage in graph.storages
        if any(life.first <= at <= life.last for life in lives.get(storage.id, ()))
    ]
    largest = sorted(live, key=lambda storage: -storage.nbytes)[:_NUM_LARGEST]
    return {str(storage.id): storage.nbytes for storage in largest}


def explain_shortage(active: ActivePlan, error: torch.OutOfMemoryError, fix: str, files: Sequence[str] = ()) -> None:
    """Add a note to `error`: the plan in use, the largest tensors at its peak, whose names begin with modules, the
    `fix`, and `files`, where figures of the run are written."""
    plan = active.plan
    largest = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in largest_tensors(active).items())
    written = "".join(f"\nelixir: the steps before are in {found}" for found in files)
    error.add_note(
        f"elixir: {plan_line(plan)}   {plan.name}\nelixir: the largest tensors at the peak of the plan, at "
        f"{plan.prediction.device_peak_at}: {largest}\nelixir: {fix}{written}"
    )


def _requested_bytes(error: torch.OutOfMemoryError) -> int:
    """Return the bytes that the allocation which failed with `error` had asked for; 0 if its text does not tell."""
    found = _REQUESTED.search(str(error))
    return 0 if found is None else parse_bytes(found.group(1).replace(" bytes", "B").replace(" ", ""))
