"""What a graph does if the device runs out of memory in its first steps.

```text
  forward    OutOfMemoryError -> cache emptied -> plan with the excess in `base_bytes` -> the forward runs again
  backward   OutOfMemoryError raised; the next forward is planned with the excess in `base_bytes`
  again      OutOfDeviceMemory, with the largest tensors at the peak of the plan
```

A backward does not run again, because gradients and updates of a part of it may be in place already. On several ranks
nothing is planned: the other ranks wait in a collective.
"""

import logging
import re
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from elixir_compile.analysis.timeline import device_lives, plan_timeline
from elixir_compile.errors import NoFeasiblePlan, OutOfDeviceMemory
from elixir_compile.ir import Plan
from elixir_compile.managed.graph_planner import GraphPlanner
from elixir_compile.managed.step_profiler import STEPS_SKIPPED, STEPS_TIMED, own_bytes
from elixir_compile.managed.variants import ActivePlan
from elixir_compile.platforms import platform_of
from elixir_compile.runtime.executor import Executor
from elixir_compile.units import format_bytes, parse_bytes

log = logging.getLogger("elixir_compile")

_NUM_EARLY = STEPS_SKIPPED + STEPS_TIMED
"""Forwards that run once more. Later forwards of the same plan need what these did."""
_NUM_LARGEST = 5
_REQUESTED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?[KMGT]?i?B|\d+ bytes)")


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


class EarlyShortage:
    """Out-of-memory errors in the first steps of one graph: one new plan, then an error with the largest tensors."""

    def __init__(self, name: str, executor: Executor, planner: GraphPlanner) -> None:
        """`name` is the name of the graph, and `planner` makes its plans."""
        self._name = name
        self._executor = executor
        self._planner = planner
        self._num_forwards = 0
        self.wants_plan = False
        """Whether the next forward must be planned again."""

    def forward(self, graph: Forwards, args: list[Any]) -> Any:
        """Run the forward of `graph`; in early steps, once more under a new plan if the device is full."""
        self.wants_plan = False
        if self._num_forwards >= _NUM_EARLY:
            return graph.run_forward(args)
        self._num_forwards += 1
        kept = list(args)
        try:
            return graph.run_forward(args)
        except torch.OutOfMemoryError as error:
            self._note(graph.active, error)
        # Outside of the handler: the error's traceback holds the tensors of the failed forward.
        self._planner.excess_bytes += self._foreign_bytes()
        try:
            graph.keep_current(kept)
        except NoFeasiblePlan as error:
            raise self._explained(graph.active) from error
        self.wants_plan = False
        self._executor.begin()
        try:
            return graph.run_forward(kept)
        except torch.OutOfMemoryError as error:
            raise self._explained(graph.active) from error

    def note_backward(self, active: ActivePlan, error: BaseException) -> None:
        """Let the next forward be planned again if `error` says that the device is full in an early backward under
        `active`; raise OutOfDeviceMemory if it was planned again before."""
        if isinstance(error, torch.OutOfMemoryError) and self._num_forwards < _NUM_EARLY:
            self._note(active, error)

    def _note(self, active: ActivePlan, error: torch.OutOfMemoryError) -> None:
        """Let the graph be planned with the excess. Raises OutOfDeviceMemory if it was before, and `error` if no plan
        of the planner may be changed."""
        if not self._planner.may_replan:
            raise error
        if self._planner.excess_bytes:
            raise self._explained(active) from error
        device = self._executor.device
        platform, requested_bytes = platform_of(device), _requested_bytes(error)
        self._planner.excess_bytes = _excess_bytes(active.plan, device, requested_bytes)
        self.wants_plan = True
        log.warning(
            "%s ran out of device memory in an early step: %s requested beside %s. Its next forward is planned with "
            "%s less",
            self._name,
            format_bytes(requested_bytes),
            format_bytes(platform.allocated_bytes(device)),
            format_bytes(self._planner.excess_bytes),
        )
        platform.empty_cache()

    def _foreign_bytes(self) -> int:
        """Return the bytes of tensors on the device, between two forwards, that no plan counts."""
        allocated_bytes = platform_of(self._executor.device).allocated_bytes(self._executor.device)
        return max(0, allocated_bytes - own_bytes(self._executor))

    def _explained(self, active: ActivePlan) -> OutOfDeviceMemory:
        return OutOfDeviceMemory(
            self._name,
            active.plan.budget_bytes,
            active.plan.prediction.device_peak_bytes,
            platform_of(self._executor.device).reserved_bytes(self._executor.device),
            largest_tensors(active),
        )


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


def _requested_bytes(error: torch.OutOfMemoryError) -> int:
    """Return the bytes that the allocation which failed with `error` had asked for; 0 if its text does not tell."""
    found = _REQUESTED.search(str(error))
    return 0 if found is None else parse_bytes(found.group(1).replace(" bytes", "B").replace(" ", ""))


def _excess_bytes(plan: Plan, device: torch.device, requested_bytes: int) -> int:
    """Return by how many bytes the memory was too small for `plan`: at least the request, or 1/16 of the budget."""
    memory = platform_of(device).memory(device)
    if memory is None:
        return requested_bytes or plan.budget_bytes // 16
    usable_bytes = min(memory.limit_bytes, memory.reserved_bytes + memory.free_bytes)
    return max(
        requested_bytes or plan.budget_bytes // 16,
        memory.allocated_bytes + requested_bytes - plan.budget_bytes,
        plan.budget_bytes - usable_bytes,
    )
