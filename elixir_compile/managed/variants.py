"""What one graph runs as: for which sizes, and beside which graphs of other ranks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from elixir_compile import compat
from elixir_compile.capture.convert import Captured
from elixir_compile.ir import Plan
from elixir_compile.managed.agreement.agreement import RollCall, Step, call_the_roll, meet_in_backward
from elixir_compile.managed.programs import Programs
from elixir_compile.runtime.executor import Executor
from elixir_compile.search import Problem

_ROOM = 8
"""An eighth more."""


class PlannedSizes:
    """The value of each symbol, by name; those of the capture where nothing larger came."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}
        self._have_grown: set[str] = set()

    def grown(self, captured: Captured, args: Sequence[Any]) -> Mapping[str, int]:
        """Return the symbols whose value in `args` exceeds what was planned for."""
        found = {
            name: value
            for name, example, value in _sizes_of(captured, args)
            if value > self.values.setdefault(name, self._planned(name, example))
        }
        self._have_grown |= found.keys()
        return found

    def with_room(self) -> Mapping[str, int]:
        """Return the values with room for more growth where they have grown: tokens of an expert are another number in
        every step, and a plan that fills the budget has to be made anew for each that is larger than all before."""
        return {
            name: value + value // _ROOM if name in self._have_grown else value for name, value in self.values.items()
        }

    def take(self, values: Mapping[str, int]) -> None:
        """Plan for `values` from now on."""
        self.values.update(values)
        self._have_grown.clear()

    def differ(self, captured: Captured, args: Sequence[Any]) -> bool:
        """Whether a symbol in `args` has another value than was planned for."""
        return any(value != self._planned(name, example) for name, example, value in _sizes_of(captured, args))

    def _planned(self, name: str, example: torch.SymInt) -> int:
        return self.values.get(name, compat.evaluate_size(example, {}))


def _sizes_of(captured: Captured, args: Sequence[Any]) -> Iterator[tuple[str, torch.SymInt, int]]:
    """Yield each input that is a symbol: its name, its value in the capture, and its value now."""
    placeholders = captured.forward.graph.find_nodes(op="placeholder")
    for node, value in zip(placeholders, args, strict=True):
        example = node.meta.get("val")
        if isinstance(example, torch.SymInt):
            name, _ = compat.expression_of(example)
            if name.isidentifier():
                yield name, example, value


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
        self.graph_set_digest = ""
        """The graphs of all ranks, as a digest; empty where they are equal."""
        self.is_planned = False
        """Whether there is a plan for `graph_set_digest`."""
        self._executor = executor
        self._written_for = ""
        self._others: dict[str, PlanVariant] = {}

    def call(self, *, wants_plan: bool) -> RollCall:
        """Return what all ranks do before the graph can run; see `roll_call`."""
        wants_plan = wants_plan or not self.is_planned
        return call_the_roll(
            self._executor, self.key, self.graph_set_digest, wants_plan=wants_plan, doing=self._doing()
        )

    def begin_backward(self, ticket: torch.Tensor) -> None:
        """Before the backward of the forward of `ticket`: RanksDiffer where another rank does something else."""
        meet_in_backward(self._executor, self._name, ticket)

    def _doing(self) -> str:
        """Return in words where this rank is in its step."""
        waiting = self._executor.saved.outstanding_owners()
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
            self.graph_set_digest = call.graph_set_digest

    def join(self, graph_set_digest: str, now: PlanVariant | None) -> PlanVariant | None:
        """Change to the graphs of `graph_set_digest`, and keep `now`, the plan beside the graphs before. Return the
        plan that the graph had beside these graphs, or None if it has to be planned."""
        if now is not None:
            self._others[self.graph_set_digest] = now
        self.graph_set_digest = graph_set_digest
        found = self._others.pop(graph_set_digest, None)
        self.is_planned = found is not None
        if len(self._others) > MOST:
            self._others.pop(next(iter(self._others)))
        return found

    def record_written(self) -> bool:
        """Note that there are programs for `graph_set_digest`; return whether they are the first since it changed."""
        before, self._written_for, self.is_planned = self._written_for, self.graph_set_digest, True
        return before != self.graph_set_digest
