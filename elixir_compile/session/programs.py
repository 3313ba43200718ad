"""The forward and the backward program of a graph under a plan."""

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.base.errors import IllegalSchedule
from elixir_compile.graph.capture.batch import UNDIVIDED, step_states
from elixir_compile.graph.capture.convert import Captured, storages_behind
from elixir_compile.graph.capture.markers import TICKET
from elixir_compile.graph.capture.node_facts import outputs_of
from elixir_compile.graph.rewrite.check import check
from elixir_compile.graph.rewrite.divided_graph import DividedGraph
from elixir_compile.graph.rewrite.micro_batches import divide
from elixir_compile.graph.rewrite.program import actions_of, write_program
from elixir_compile.graph.rewrite.recompute import partition_of
from elixir_compile.graph.rewrite.regions import RegionGraph
from elixir_compile.graph.rewrite.sliced_values import SlicedValues, sliced_values
from elixir_compile.ir import GroupRef, Kind, Phase, Plan, RegionRef, Saving, StepGraph, Verb, label
from elixir_compile.ir.rows import LEAST_ROWS
from elixir_compile.runtime.executor import Executor
from elixir_compile.runtime.lowering import CompiledRegion, PlacedRegion, RegionCompiler
from elixir_compile.runtime.micro_batches import DividedRegion
from elixir_compile.runtime.saved import mark_lean, number_of
from elixir_compile.session.step_profiler import Progress
from elixir_compile.step.laps import laps_of
from elixir_compile.step.recompute import as_run, given_bytes
from elixir_compile.step.slices import leaving_name


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
