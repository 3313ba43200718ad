"""What one graph runs as, beside which graphs of other ranks.

```text
  step 0   rank 0 runs A, rank 1 runs A      the plan of A
  step 1   rank 0 runs A, rank 1 runs B      A and B in step
  step 2   rank 0 runs A, rank 1 runs A      the plan of A again: nothing is searched and nothing compiled
```
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from elixir_compile.api.agreement import RollCall, Step, call_the_roll, meet_in_backward
from elixir_compile.api.programs import Programs
from elixir_compile.capture.convert import Captured
from elixir_compile.ir import Plan
from elixir_compile.runtime.executor import Executor
from elixir_compile.search import Problem

MOST = 32
"""Kept for one graph: each has programs of its own."""


class PlanLimits(NamedTuple):
    """What a plan has room for."""

    sizes: Mapping[str, int]
    beside_bytes: int
    """What other forwards may hold beside it."""


class PlanVariant(NamedTuple):
    """What a graph runs as, as long as other ranks run the same graphs with it."""

    captured: Captured
    problem: Problem
    plan: Plan
    programs: Programs
    limits: PlanLimits
    generation: int
    """Of the executor, when the plan was in force last."""


class PlanVariants:
    """What one graph ran as until now, and for which graphs of other ranks it is planned."""

    def __init__(self, executor: Executor, name: str) -> None:
        """`name` is that of the graph."""
        self._name = name
        self.key = ""
        """What the roll call of several ranks says of the graph; empty on one rank, which calls no roll."""
        self.outstanding = ""
        """The graphs of all ranks, as a digest; empty where they are equal."""
        self.is_planned = False
        """Whether there is a plan for `company`."""
        self._executor = executor
        self._written_for = ""
        self._others: dict[str, PlanVariant] = {}

    def call(self, *, wants_plan: bool) -> RollCall:
        """Return what all ranks do before the graph can run; see `roll_call`."""
        wants_plan = wants_plan or not self.is_planned
        return call_the_roll(self._executor, self.key, self.outstanding, wants_plan=wants_plan, doing=self._doing())

    def begin_backward(self, ticket: torch.Tensor) -> None:
        """Before the backward of the forward of `ticket`: RanksDiffer where another rank does something else."""
        meet_in_backward(self._executor, self._name, ticket)

    def _doing(self) -> str:
        """Return in words where this rank is in its step."""
        waiting = self._executor.saved.waiting()
        before = [record.outstanding.place for record in self._executor.compilations if record in waiting]
        behind = f" behind {', '.join(before)}, whose backward is still to come" if before else ""
        return f"is about to run {self._name}{behind}"

    def find_graph_set(self, key_of_graph: Callable[[], str]) -> None:
        """Before the graph is planned for the first time: find out beside which others that is."""
        ranks = self._executor.ranks
        if ranks is not None:
            self.key = key_of_graph()
            _ = ranks.num_local  # now, as all ranks are here the first time; planning may fail on one
        while (call := self.call(wants_plan=True)).step is Step.JOIN:
            self.outstanding = call.outstanding

    def join(self, company: str, now: PlanVariant | None) -> PlanVariant | None:
        """Change to `company`, and keep `now`, what the graph runs as in the one before; return what it ran as there,
        or None where it has to be planned."""
        if now is not None:
            self._others[self.outstanding] = now
        self.outstanding = company
        found = self._others.pop(company, None)
        self.is_planned = found is not None
        if len(self._others) > MOST:
            self._others.pop(next(iter(self._others)))
        return found

    def record_written(self) -> bool:
        """Note that there are programs for `company`; return whether they are the first since it changed."""
        before, self._written_for, self.is_planned = self._written_for, self.outstanding, True
        return before != self.outstanding
