"""The plans of a graph: for growing sizes of its inputs, and beside different graphs of other ranks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from elixir_compile import compat
from elixir_compile.graph.capture.convert import Captured
from elixir_compile.ir import Plan, StepGraph
from elixir_compile.runtime.executor import Executor
from elixir_compile.search import Problem
from elixir_compile.search.joint.joint_budget import rebased
from elixir_compile.session.agreement.roll_call import RollCall, Step, call_the_roll, meet_in_backward
from elixir_compile.session.programs import Programs, saved_device_bytes
from elixir_compile.session.step_profiler import Progress, StepProfiler
from elixir_compile.step.laps import micro_batches_of
from elixir_compile.step.recompute import given_bytes

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


MOST = 32
"""Variants kept for one graph: each has its own programs."""


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


def active_plan(
    captured: Captured, problem: Problem, plan: Plan, beside_bytes: int, neighbour_bytes: int = 0
) -> ActivePlan:
    """Return `plan` as a plan in use that answers `problem`, which then has the micro-batches of the plan."""
    problem = replace(problem, micro_batches=micro_batches_of(plan))
    if plan.calls.outstanding > 1:  # the plan counts other outstanding forwards of the graph
        beside_bytes += (plan.calls.outstanding - 1) * given_bytes(problem.graph)
        beside_bytes += _saved_beside_bytes(problem.graph, plan)
    return ActivePlan(
        captured=captured, problem=problem, plan=plan, beside_bytes=beside_bytes, neighbour_bytes=neighbour_bytes
    )


def with_neighbours(active: ActivePlan, neighbour_bytes: int) -> ActivePlan:
    """Return `active` beside models in turn that hold `neighbour_bytes`; its schedule is unchanged."""
    more_bytes = neighbour_bytes - active.neighbour_bytes
    if not more_bytes:
        return active
    problem = replace(active.problem, base_bytes=active.problem.base_bytes + more_bytes)
    plan = rebased(active.plan, active.plan.base_bytes + more_bytes)
    return replace(active, problem=problem, plan=plan, neighbour_bytes=neighbour_bytes)


def _saved_beside_bytes(graph: StepGraph, plan: Plan) -> int:
    """Return the most bytes of activations that other outstanding forwards of `plan` hold on the device."""
    most, full_bytes = plan.calls.outstanding - 1, saved_device_bytes(graph, plan)
    if plan.lean is None:
        return most * full_bytes
    lean_bytes = saved_device_bytes(graph, plan.of_lean_calls())
    return max(full * full_bytes + (most - full) * lean_bytes for full in (plan.lean.num_full - 1, plan.lean.num_full))


class PlanVariant(NamedTuple):
    """The plan, programs and sizes of a graph while all ranks run the same set of graphs."""

    active: ActivePlan
    programs: Programs
    sizes: Mapping[str, int]
    """Planned values of the symbols, by name."""


class PlanVariants:
    """The plans of a graph, each for a set of graphs run by all ranks at the same time.

    A set of graphs is named by its digest, which is empty if the graphs of all ranks are equal.
    """

    def __init__(
        self,
        executor: Executor,
        name: str,
        outstanding: Callable[[], Sequence[str]],
        profiler: StepProfiler,
        progress: Progress,
    ) -> None:
        """`name` is the name of the graph. `outstanding` describes each graph of its model with an outstanding
        forward. `profiler` has the seconds of this rank, and `progress` logs what follows from those of all."""
        self._balance, self._progress = profiler.balance, progress
        self._name = name
        self._outstanding = outstanding
        self.key = ""
        """The digest of the graph in a roll call; empty on one rank, which calls no roll."""
        self.graph_set_digest = ""
        self.is_planned = False
        """Whether there is a plan for `graph_set_digest`."""
        self._executor = executor
        self._written_for = ""
        self._others: dict[str, PlanVariant] = {}

    def call(self, counted: object | None, *, wants_plan: bool) -> RollCall:
        """Return the next step of all ranks before the graph can run; see `roll_call`.

        The calls of a step are counted for `counted`; None if the graph does not train.
        """
        wants_plan = wants_plan or not self.is_planned
        number = self._executor.calls.number_of_forward(counted, self._executor.saved.numbers)
        found = call_the_roll(
            self._executor,
            self.key,
            self.graph_set_digest,
            wants_plan=wants_plan,
            is_measured=self._balance.is_known,
            number=number,
            doing=self._doing(number),
        )
        if found.is_measured and self._executor.ranks is not None:
            line = self._balance.suggested_line(self._executor.ranks)
            if line is not None:
                self._progress.say(line)
        return found

    def begin_backward(self, counted: object, ticket: torch.Tensor) -> None:
        """Wait until every rank begins the backward of the forward of `ticket`; `counted` is as in `call`.

        Raises RanksDiffer if another rank begins something else.
        """
        meet_in_backward(self._executor, counted, self._name, ticket)

    def _doing(self, number: int) -> str:
        """Return in words how far this rank is in its step, before call `number`, for the text of RanksDiffer."""
        before = self._outstanding()
        behind = f" behind {', '.join(before)}, whose backward is still to come" if before else ""
        return f"is about to run {self._name}{self._executor.calls.words(number)}{behind}"

    def find_graph_set(self, key_of_graph: Callable[[], str], counted: object | None) -> None:
        """Find out which graphs the other ranks run beside this graph, before its first plan.

        `key_of_graph` computes `key`; it is called only if there are several ranks. `counted` is as in `call`.
        """
        peers = self._executor.peers
        if peers is not None:
            self.key = key_of_graph()
            _ = peers.num_local  # a collective: later, planning may have failed on one rank alone
        while (call := self.call(counted, wants_plan=True)).step is Step.JOIN:
            self.graph_set_digest = call.graph_set_digest

    def join(self, graph_set_digest: str, now: PlanVariant | None) -> PlanVariant | None:
        """Change to the graphs of `graph_set_digest`, and keep `now`, the variant beside the graphs before.

        Returns the variant of earlier runs beside these graphs, or None if the graph has to be planned.
        """
        if now is not None:
            self._others[self.graph_set_digest] = now
        self.graph_set_digest = graph_set_digest
        found = self._others.pop(graph_set_digest, None)
        self.is_planned = found is not None
        if len(self._others) > MOST:
            self._others.pop(next(iter(self._others)))
        return found

    def record_written(self) -> bool:
        """Record that `graph_set_digest` has programs; return whether the programs before were for other graphs."""
        before, self._written_for, self.is_planned = self._written_for, self.graph_set_digest, True
        return before != self.graph_set_digest
