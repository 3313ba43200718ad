"""The forward and the backward program of a graph under a plan, and the programs of earlier plans, each as long as a
forward of it waits for its backward.
"""

import weakref
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.base.errors import IllegalSchedule
from elixir_compile.graph.capture.batch import step_states
from elixir_compile.graph.capture.captured import UNDIVIDED, Captured
from elixir_compile.graph.capture.convert import storages_behind
from elixir_compile.graph.capture.node_facts import TICKET, outputs_of
from elixir_compile.graph.rewrite.micro_batches import divide
from elixir_compile.graph.rewrite.program import actions_of, check, write_program
from elixir_compile.graph.rewrite.regions import RegionGraph, SlicedValues, partition_of, sliced_values
from elixir_compile.ir import GroupRef, Kind, Phase, Plan, RegionRef, Saving, StepGraph, Verb, label
from elixir_compile.ir.plan import next_is_lean
from elixir_compile.ir.schedule import LEAST_ROWS
from elixir_compile.runtime.executor import Executor
from elixir_compile.runtime.lowering import DividedRegion, PlacedRegion, RegionCompiler
from elixir_compile.runtime.saved import is_lean, mark_lean, number_of
from elixir_compile.session.step_profiler import Progress
from elixir_compile.step.as_run import as_run, given_bytes
from elixir_compile.step.divide import laps_of, leaving_name

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
        halves = self._partition.captured
        made = {storage.id for storage in graph.storages if storage.kind in (Kind.SAVED, Kind.TEMP)} - {*graph.outputs}
        behind, outputs = storages_behind(halves), outputs_of(halves.forward.graph)
        self._saved_only = [
            place
            for place, node in enumerate(outputs)
            if place >= halves.num_outputs
            and isinstance(node, fx.Node)
            and (names := behind.get(node, ()))
            and made.issuperset(names)
        ]
        """Positions of the forward's results made in the step and not returned to the caller."""
        self._backward: fx.GraphModule | None = None
        self.forward = self._write(Phase.FORWARD)
        self.lean: Programs | None = None
        """The programs of lean calls; None if all calls treat activations alike."""
        if plan.lean is not None:
            parts = (graph, plan.of_lean_calls(), executor, regions, progress)
            self.lean = Programs(captured, *parts, may_choose_strides=may_choose_strides, is_lean=True)

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
            captured = self._partition.captured
            assert captured.backward is not None
            # A forward of one region saves activations in the strides chosen by its kernels, a forward of several
            # regions in the strides of the capture.
            strides = self.output_strides if self.chooses_strides else ()
            saved = zip(outputs_of(captured.forward.graph), strides, strict=False)
            chosen = {node.name: stride for node, stride in saved if isinstance(node, fx.Node)}
            for node in captured.backward.graph.find_nodes(op="placeholder"):
                stride, value = chosen.get(str(node.target)), node.meta.get("val")
                if stride is not None and isinstance(value, torch.Tensor) and tuple(value.stride()) != tuple(stride):
                    with compat.own_fake_mode(value):
                        node.meta["val"] = compat.like_in_strides(value, stride)
            self._backward = self._write(Phase.BACKWARD)
        return self._backward

    def write_backward(self) -> None:
        """Write the backward program, and that of lean calls, if they are not written yet."""
        _ = self.backward
        if self.lean is not None:
            self.lean.write_backward()

    def note_outstanding(self, results: Sequence[Any], input_storages: Set[int], owner: object) -> torch.Tensor:
        """Record an outstanding forward of the graph `owner` by its `results`; return its ticket.

        `input_storages` are the keys of the storages of the forward's inputs.
        """
        self._progress.compiled()
        ticket = results[self._partition.captured.num_outputs]
        # A kernel may return its input itself, where the captured graph makes a copy.
        seen = input_storages | storages_of(results[: self._partition.captured.num_outputs])
        values = [results[position] for position in self._saved_only]
        activations = [value for value in values if value is not None and compat.storage_key(value) not in seen]
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

    def _write(self, phase: Phase) -> fx.GraphModule:
        keys = {name: key for key, name in self._partition.captured.param_names.items()}
        program = write_program(
            self._partition, self.plan, phase, keys, self._lower_region, self._executor, self._sliced
        )
        self._regions.start_kernels()
        check(program, self.plan, phase)
        return program

    def _lower_region(self, region: RegionGraph) -> torch.nn.Module:
        plan, executor = self.plan, self._executor
        own = next(own for own in plan.regions if own.id == region.id)
        ids = [other.id for other in plan.regions if other.phase is region.phase]
        self._progress.compiling(region.phase, ids.index(region.id) + 1, len(ids))
        room_bytes = max(0, plan.budget_bytes - plan.prediction.device_peak_bytes)
        name, (lanes, ledger) = label(Verb.RUN, RegionRef(region.id)), (executor.lanes, executor.ledger)
        states, batch = self._states.half(region.phase).states, self._states.batch
        divided = divide(region, states, batch, own.micro_batches, self._sliced) if own.micro_batches > 1 else None
        if divided is not None:
            ends = [
                None if part is None else self._regions.lower(part, range(len(part.outputs)), room_bytes=room_bytes)
                for part in (divided.head, divided.tail)
            ]
            body = self._regions.lower(divided.body, range(len(divided.body.outputs)), room_bytes=room_bytes)
            if isinstance(batch, torch.SymInt) and not compat.may_have_any_value_from(LEAST_ROWS, batch):
                raise IllegalSchedule(
                    f"{region.id} runs in micro-batches of a dynamic number of rows, but its kernels are compiled for "
                    "some numbers alone. Use the option micro_batches=1, or batches of one size."
                )
            return DividedRegion(divided, (ends[0], body, ends[1]), lanes, ledger, name, executor.saved)
        captured = self._partition.captured
        visible = list(range(len(region.outputs)))
        is_whole_forward = region.is_only and region.phase is Phase.FORWARD
        if is_whole_forward and self.chooses_strides:
            # Outputs for the user, and activations to be offloaded or recomputed, keep the strides of the capture.
            output = captured.forward.graph.output_node()
            seen: Sequence[Any] = output.meta.get("user_visible_output_idxs", range(captured.num_outputs))
            values = outputs_of(captured.forward.graph)
            nodes = {value for index in seen if isinstance(value := values[index], fx.Node)}
            away = self._partition.away_names
            visible = [index for index, node in enumerate(region.outputs) if node in nodes or node.name in away]
        is_inference = captured.backward is None
        compiled = self._regions.lower(region, visible, is_inference=is_inference, room_bytes=room_bytes)
        if is_whole_forward:
            names = [node.name for node in region.outputs]
            self._strides = dict(zip(names, compiled.strides, strict=False))
        return PlacedRegion(compiled, lanes, ledger, name)


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


# ----------------------------------------------------------------------------------------------------------------------
# The programs of a graph under its plans, older ones as long as a forward of theirs waits for its backward.
#
# The plan in force during a forward decides which activations autograd keeps. Its backward must run the program of the
# same plan, even if the graph follows another plan by then; and of a plan with lean calls, the program of the same
# treatment of activations.


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
        return (self.last.lean or self.last) if next_is_lean(num_full, self.last.plan.most_full) else self.last

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
