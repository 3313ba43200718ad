"""The forward and the backward program of a graph under a plan, and the plans of a graph for growing sizes of its
inputs and beside different graphs of other ranks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.base.errors import IllegalSchedule
from elixir_compile.graph.capture.batch import UNDIVIDED, step_states
from elixir_compile.graph.capture.convert import Captured, storages_behind
from elixir_compile.graph.capture.markers import TICKET
from elixir_compile.graph.capture.node_facts import outputs_of
from elixir_compile.graph.rewrite.micro_batches import SlicedValues, divide, sliced_values
from elixir_compile.graph.rewrite.program import actions_of, check, write_program
from elixir_compile.graph.rewrite.regions import DividedGraph, RegionGraph, partition_of
from elixir_compile.ir import GroupRef, Kind, Phase, Plan, RegionRef, Saving, StepGraph, Verb, label
from elixir_compile.ir.schedule import LEAST_ROWS
from elixir_compile.runtime.executor import Executor
from elixir_compile.runtime.lowering import CompiledRegion, PlacedRegion, RegionCompiler
from elixir_compile.runtime.micro_batches import DividedRegion
from elixir_compile.runtime.saved import mark_lean, number_of
from elixir_compile.search import Problem
from elixir_compile.search.joint.joint_budget import rebased
from elixir_compile.session.agreement import RollCall, Step, call_the_roll, meet_in_backward
from elixir_compile.session.step_profiler import Progress, StepProfiler
from elixir_compile.step.as_run import as_run, given_bytes
from elixir_compile.step.divide import laps_of, leaving_name, micro_batches_of

# ----------------------------------------------------------------------------------------------------------------------
# The forward and the backward program of a graph under a plan.


class Programs:
    """The programs of a graph under a plan; the forward is written at once, the backward at its first use.

    It has more than 15 attributes, because the backward is written later, from the same values as the forward.
    """

    def __init__(
        self,
        captured: Captured,
        graph: StepGraph,
        plan: Plan,
        executor: Executor,
        regions: RegionCompiler,
        progress: Progress,
        *,
        may_choose_strides: bool,
        is_lean: bool = False,
    ) -> None:
        """`is_lean` if these are the programs of the lean calls of a plan, and `plan` is that of these calls."""
        self.graph, self.plan, self.is_lean = graph, plan, is_lean
        self.chooses_strides = may_choose_strides and is_one_region_each(plan) and captured.backward is not None
        """Whether Inductor chose the strides of the activations that the forward saves."""
        self._executor, self._regions, self._progress = executor, regions, progress
        self._partition = partition_of(captured, graph, plan.activations, is_divided=bool(laps_of(plan)))
        self._strides: Mapping[str, compat.Strides] = {}
        self.device_bytes = saved_device_bytes(graph, plan)
        """Device bytes of activations that one forward saves for its backward."""
        self.given_bytes = given_bytes(graph)
        """Bytes of inputs that the backward reads."""
        self._states = UNDIVIDED
        """How each value of both halves is made of its values in micro-batches, if a region runs in them."""
        self._sliced = SlicedValues()
        if laps_of(plan):
            self._states = step_states(self._partition.captured)
            self._sliced = sliced_values(self._partition, graph, plan, self._states.states)
        self._saved_only = _saved_only_positions(self._partition.captured, graph)
        self._backward: fx.GraphModule | None = None
        self.forward = self._write(Phase.FORWARD)
        self.lean: Programs | None = None
        """The programs of lean calls; None if all calls treat activations alike."""
        if plan.lean is not None:
            parts = (executor, regions, progress)
            lean_plan = plan.of_lean_calls()
            self.lean = Programs(
                captured, graph, lean_plan, *parts, may_choose_strides=may_choose_strides, is_lean=True
            )

    @property
    def _room_bytes(self) -> int:
        """Device bytes that the plan leaves free at its peak."""
        return max(0, self.plan.budget_bytes - self.plan.prediction.device_peak_bytes)

    @property
    def output_strides(self) -> list[compat.Strides]:
        """The strides of each output of the forward; None for an output whose strides Inductor did not choose."""
        outputs = outputs_of(self._partition.captured.forward.graph)
        away = self._partition.away_names
        names = [node.name if isinstance(node, fx.Node) and node.name not in away else None for node in outputs]
        return [None if name is None else self._strides.get(name) for name in names]

    @property
    def backward(self) -> fx.GraphModule:
        """The backward program."""
        if self._backward is None:
            self._restride_placeholders()
            self._backward = self._write(Phase.BACKWARD)
        return self._backward

    def write_backward(self) -> None:
        """Write the backward program, and that of lean calls, if they are not written yet."""
        _ = self.backward
        if self.lean is not None:
            self.lean.write_backward()

    def saved_only(self, results: Sequence[Any], input_storages: Set[int]) -> list[torch.Tensor]:
        """Return the `results` of a forward made in the step and read by its backward alone.

        `input_storages` are the keys of the storages of the forward's inputs.
        """
        # A kernel may return its input itself, where the captured graph makes a copy.
        seen = input_storages | storages_of(results[: self._partition.captured.num_outputs])
        values = [results[position] for position in self._saved_only]
        return [value for value in values if value is not None and compat.storage_key(value) not in seen]

    def note_outstanding(self, results: Sequence[Any], input_storages: Set[int], owner: object) -> torch.Tensor:
        """Record an outstanding forward of the graph `owner` by its `results`; return its ticket.

        `input_storages` are the keys of the storages of the forward's inputs.
        """
        self._progress.compiled()
        ticket = results[self._partition.captured.num_outputs]
        activations = self.saved_only(results, input_storages)
        self._executor.saved.note(ticket, owner, self.device_bytes, self.given_bytes, activations)
        self._executor.calls.note_forward(number_of(ticket), is_lean=self.is_lean)
        if self.is_lean:
            mark_lean(ticket)
        return ticket

    def saves_as(self, other: "Programs") -> bool:
        """Return whether the backward of `other` can follow this forward."""
        # Micro-batches draw random numbers of their own, which the backward may draw again.
        is_same = self.plan.activations == other.plan.activations and laps_of(self.plan) == laps_of(other.plan)
        if self.lean is not None and other.lean is not None:
            is_same = is_same and self.lean.saves_as(other.lean)
        is_same = is_same and (self.lean is None) == (other.lean is None)
        return is_same and self.chooses_strides == other.chooses_strides

    def _restride_placeholders(self) -> None:
        """Give the inputs of the backward graph the strides in which the forward saves them.

        A forward of one region saves activations in the strides chosen by its kernels. A forward of several regions
        saves them in the strides of the capture.
        """
        captured, strides = self._partition.captured, self.output_strides if self.chooses_strides else ()
        outputs = outputs_of(captured.forward.graph)
        chosen = {
            node.name: stride for node, stride in zip(outputs, strides, strict=False) if isinstance(node, fx.Node)
        }
        assert captured.backward is not None
        for node in captured.backward.graph.find_nodes(op="placeholder"):
            stride, value = chosen.get(str(node.target)), node.meta.get("val")
            if stride is not None and isinstance(value, torch.Tensor) and tuple(value.stride()) != tuple(stride):
                with compat.own_fake_mode(value):
                    node.meta["val"] = compat.like_in_strides(value, stride)

    def _write(self, phase: Phase) -> fx.GraphModule:
        keys = {name: key for key, name in self._partition.captured.param_names.items()}
        program = write_program(
            self._partition, self.plan, phase, keys, self._lower_region, self._executor, self._sliced
        )
        self._regions.start_kernels()
        check(program, self.plan, phase)
        return program

    def _lower_region(self, region: RegionGraph) -> torch.nn.Module:
        ids = [own.id for own in self.plan.regions if own.phase is region.phase]
        self._progress.compiling(region.phase, ids.index(region.id) + 1, len(ids))
        micro_batches = next(own.micro_batches for own in self.plan.regions if own.id == region.id)
        if micro_batches > 1 and (divided := self._divided(region, micro_batches)) is not None:
            return self._lower_divided(divided, region)
        visible = list(range(len(region.outputs)))
        is_whole_forward = region.is_only and region.phase is Phase.FORWARD
        if is_whole_forward and self.chooses_strides:
            visible = self._visible(region)
        is_inference = self._partition.captured.backward is None
        compiled = self._regions.lower(region, visible, is_inference=is_inference, room_bytes=self._room_bytes)
        if is_whole_forward:
            names = [node.name for node in region.outputs]
            self._strides = dict(zip(names, compiled.strides, strict=False))
        return PlacedRegion(
            compiled, self._executor.lanes, self._executor.ledger, label(Verb.RUN, RegionRef(region.id))
        )

    def _divided(self, region: RegionGraph, micro_batches: int) -> DividedGraph | None:
        half = self._states.half(region.phase)
        return divide(region, half.states, self._states.batch, micro_batches, self._sliced)

    def _lower_divided(self, divided: DividedGraph, region: RegionGraph) -> DividedRegion:
        def lower(part: RegionGraph) -> CompiledRegion:
            return self._regions.lower(part, range(len(part.outputs)), room_bytes=self._room_bytes)

        head = None if divided.head is None else lower(divided.head)
        tail = None if divided.tail is None else lower(divided.tail)
        parts = (head, lower(divided.body), tail)
        batch = self._states.batch
        if isinstance(batch, torch.SymInt) and not compat.may_have_any_value_from(LEAST_ROWS, batch):
            raise IllegalSchedule(
                f"{region.id} runs in micro-batches of a dynamic number of rows, but its kernels are compiled for some "
                "numbers alone. Use the option micro_batches=1, or batches of one size."
            )
        executor = self._executor
        return DividedRegion(
            divided, parts, executor.lanes, executor.ledger, label(Verb.RUN, RegionRef(region.id)), executor.saved
        )

    def _visible(self, region: RegionGraph) -> list[int]:
        """Return the positions of the outputs of `region`, the whole forward, that keep the strides of the capture.

        They are the outputs for the user, and the activations to be offloaded or recomputed.
        """
        captured = self._partition.captured
        output = captured.forward.graph.output_node()
        seen: Sequence[Any] = output.meta.get("user_visible_output_idxs", range(captured.num_outputs))
        values = outputs_of(captured.forward.graph)
        nodes = {value for index in seen if isinstance(value := values[index], fx.Node)}
        away = self._partition.away_names
        return [index for index, node in enumerate(region.outputs) if node in nodes or node.name in away]


def storages_of(values: Sequence[Any]) -> Set[int]:
    """Return the keys of the storages of the tensors among `values`."""
    return {compat.storage_key(value) for value in values if isinstance(value, torch.Tensor)}


def is_one_region_each(plan: Plan) -> bool:
    """Return whether the forward is one region, and the backward too, and both run on the whole batch."""
    return not laps_of(plan) and all(
        sum(region.phase is phase for region in plan.regions) <= 1 for phase in (Phase.FORWARD, Phase.BACKWARD)
    )


def ticket_position(captured: Captured) -> int:
    """Return the position of the ticket among the inputs of the backward."""
    assert captured.backward is not None
    placeholders = captured.backward.graph.find_nodes(op="placeholder")
    return next(index for index, node in enumerate(placeholders) if node.target == TICKET)


def saved_device_bytes(graph: StepGraph, plan: Plan) -> int:
    """Return the bytes of saved activations left on the device by a forward under `plan`."""
    waited = {action.target for action in actions_of(plan, Phase.FORWARD) if action.verb is Verb.WAIT}
    away = {
        name
        for group in plan.activations
        if group.saving is Saving.OFFLOAD and GroupRef(group.id) in waited
        for name in group.storages
    }
    storages = as_run(graph, plan.activations, laps_of(plan)).storages
    nbytes = {storage.id: storage.nbytes for storage in storages}
    saved = [storage.id for storage in storages if storage.kind is Kind.SAVED and storage.id not in away]
    return sum(nbytes.get(leaving_name(name), nbytes[name]) for name in saved)


def _saved_only_positions(captured: Captured, graph: StepGraph) -> list[int]:
    """Return the positions of the forward's results made in the step and not returned to the caller."""
    made = {storage.id for storage in graph.storages if storage.kind in (Kind.SAVED, Kind.TEMP)} - {*graph.outputs}
    behind = storages_behind(captured)
    outputs = outputs_of(captured.forward.graph)
    found = [(position, behind.get(node, ())) for position, node in enumerate(outputs) if isinstance(node, fx.Node)]
    return [place for place, names in found if place >= captured.num_outputs and names and made.issuperset(names)]


# ----------------------------------------------------------------------------------------------------------------------
# The plans of a graph: for growing sizes of its inputs, and beside different graphs of other ranks.


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
