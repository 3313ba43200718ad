"""The programs of a graph under its plans, older ones as long as a forward of theirs waits for its backward.

The plan in force during a forward decides which activations autograd keeps. Its backward must run the program of the
same plan, even if the graph follows another plan by then; and of a plan with lean calls, the program of the same
treatment of activations.
"""

import weakref

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.graph.capture.convert import Captured
from elixir_compile.ir import Plan, StepGraph
from elixir_compile.runtime.executor import Executor
from elixir_compile.runtime.lowering import RegionCompiler
from elixir_compile.runtime.saved import is_lean, number_of
from elixir_compile.session.programs import Programs, is_one_region_each
from elixir_compile.session.step_profiler import Progress


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
