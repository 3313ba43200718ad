"""The programs of one capture under one plan.

What autograd keeps of a forward is fixed by the plan in force when it ran, so its backward runs the program of that
plan, though another may have taken over in between.
"""

import weakref
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.analysis.recompute import as_run, given_bytes
from elixir_compile.capture.convert import Captured, storages_behind
from elixir_compile.capture.joint import TICKET
from elixir_compile.ir import Kind, Phase, Plan, Saving, StepGraph, Verb
from elixir_compile.managed.step_profiler import Progress
from elixir_compile.rewrite.check import check
from elixir_compile.rewrite.program import actions_of, write_program
from elixir_compile.rewrite.recompute import partition_of
from elixir_compile.rewrite.regions import RegionGraph
from elixir_compile.runtime.executor import Executor
from elixir_compile.runtime.lowering import PlacedRegion, RegionCompiler
from elixir_compile.runtime.saved import number_of


class Programs:
    """The forward, written at once, and the backward, written when it is first asked for."""

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
    ) -> None:
        self.plan = plan
        self.chooses_strides = may_choose_strides and is_one_region_each(plan) and captured.backward is not None
        """Whether Inductor chose the strides of what the forward saves."""
        self._executor = executor
        self._regions = regions
        self._progress = progress
        self._halves = partition_of(captured, graph, plan.activations)
        self._strides: Mapping[str, compat.Strides] = {}
        self.device_bytes = _device_bytes(graph, plan)
        """What a forward leaves on the device."""
        self.given_bytes = given_bytes(graph)
        """Inputs that the backward reads."""
        self._alone = _for_the_backward_alone(self._halves.captured, graph)
        self._backward: fx.GraphModule | None = None
        self.forward = self._write(Phase.FORWARD)

    @property
    def output_strides(self) -> list[compat.Strides]:
        """Strides of the forward's outputs where Inductor chose them, None for each of the others."""
        outputs = self._halves.captured.forward.graph.output_node().args[0]
        away = self._halves.away_names
        names = [node.name if isinstance(node, fx.Node) and node.name not in away else None for node in outputs]
        return [None if name is None else self._strides.get(name) for name in names]

    @property
    def backward(self) -> fx.GraphModule:
        """The backward program."""
        if self._backward is None:
            self._restride_placeholders()
            self._backward = self._write(Phase.BACKWARD)
        return self._backward

    def kept(self, results: Sequence[Any], given: Set[int]) -> list[torch.Tensor]:
        """Return what of `results` the step made and nobody but its backward sees; `given` are storages of inputs."""
        # A kernel may hand on what it got where the capture made a copy.
        seen = given | storages_of(results[: self._halves.captured.num_outputs])
        values = [results[position] for position in self._alone]
        return [value for value in values if value is not None and compat.storage_key(value) not in seen]

    def note(self, results: Sequence[Any], given: Set[int], owner: object) -> torch.Tensor:
        """Note that a forward of `owner`, which made `results` of inputs whose storages are `given`, waits for its
        backward; return its ticket."""
        self._progress.compiled()
        ticket = results[self._halves.captured.num_outputs]
        kept = self.kept(results, given)
        self._executor.saved.note(ticket, owner, self.device_bytes, self.given_bytes, kept)
        return ticket

    def saves_as(self, other: "Programs") -> bool:
        """Whether the backward of `other` can follow this forward."""
        is_same = self.plan.activations == other.plan.activations
        return is_same and self.chooses_strides == other.chooses_strides

    def _restride_placeholders(self) -> None:
        """A forward of one region saves in the strides its kernels chose, one of several in those of the capture."""
        captured, strides = self._halves.captured, self.output_strides if self.chooses_strides else ()
        outputs = captured.forward.graph.output_node().args[0]
        chosen = {
            node.name: stride for node, stride in zip(outputs, strides, strict=False) if isinstance(node, fx.Node)
        }
        for node in captured.backward.graph.find_nodes(op="placeholder"):
            stride, value = chosen.get(str(node.target)), node.meta.get("val")
            if stride is not None and isinstance(value, torch.Tensor) and tuple(value.stride()) != tuple(stride):
                with value.fake_mode:
                    node.meta["val"] = torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device)

    def _write(self, phase: Phase) -> fx.GraphModule:
        keys = {name: key for key, name in self._halves.captured.param_names.items()}
        program = write_program(self._halves, self.plan, phase, keys, self._lower_region, self._executor)
        self._regions.start_kernels()
        check(program, self.plan, phase)
        return program

    def _lower_region(self, region: RegionGraph) -> PlacedRegion:
        ids = [own.id for own in self.plan.regions if own.phase is region.phase]
        self._progress.compiling(region.phase, ids.index(region.id) + 1, len(ids))
        visible = list(range(len(region.outputs)))
        is_whole_forward = region.is_only and region.phase is Phase.FORWARD
        if is_whole_forward and self.chooses_strides:
            visible = self._visible(region)
        is_inference = self._halves.captured.backward is None
        compiled = self._regions.lower(region, visible, is_inference=is_inference)
        if is_whole_forward:
            names = [node.name for node in region.outputs]
            self._strides = dict(zip(names, compiled.strides, strict=False))
        return PlacedRegion(compiled, self._executor.ledger, f"run {region.id}")

    def _visible(self, region: RegionGraph) -> list[int]:
        """Return the outputs of a whole forward that keep their strides: what the user sees, and what goes to the host
        and comes back as the capture has it."""
        captured = self._halves.captured
        output = captured.forward.graph.output_node()
        seen: Sequence[Any] = output.meta.get("user_visible_output_idxs", range(captured.num_outputs))
        nodes = {output.args[0][index] for index in seen}
        away = self._halves.away_names
        return [index for index, node in enumerate(region.outputs) if node in nodes or node.name in away]


class ProgramVersions:
    """The programs of one capture that save differently, each for as long as a forward of theirs may have a backward.

    A copy keeps what was there when it was made.
    """

    def __init__(self) -> None:
        self._programs: tuple[tuple[int, Programs], ...] = ()
        """Each with the number of the first forward that may run them."""
        self._waiting: set[int] = set()
        """Numbers of forwards whose ticket autograd holds."""

    @property
    def last(self) -> Programs:
        """What the next forward runs."""
        return self._programs[-1][1]

    def take(self, programs: Programs, next_number: int, *, is_apart: bool = False) -> None:
        """Let `programs` run from the forward `next_number` on; `is_apart` keeps those before for their backward."""
        if self._programs and not is_apart and self.last.saves_as(programs):
            self._programs = (*self._programs[:-1], (self._programs[-1][0], programs))
        else:
            self._programs = (*self._programs, (next_number, programs))

    def wait_for(self, ticket: torch.Tensor) -> None:
        """Keep the programs of the forward of `ticket` for as long as the tensor's memory lives."""
        number = number_of(ticket)
        self._waiting.add(number)
        weakref.finalize(ticket.untyped_storage(), self._waiting.discard, number).atexit = False

    def of(self, ticket: torch.Tensor) -> Programs:
        """Return the programs of the forward of `ticket`."""
        return self._programs[self._place(number_of(ticket))][1]

    def drop_old(self) -> None:
        """Let go of programs that no backward can ask for."""
        if len(self._programs) > 1:
            # Tickets may go from any thread: a set must not change while it is walked through.
            needed = {self._place(number) for number in self._waiting.copy()} | {len(self._programs) - 1}
            self._programs = tuple(self._programs[place] for place in sorted(needed))

    def _place(self, number: int) -> int:
        return max(place for place, (first, _) in enumerate(self._programs) if first <= number)


def storages_of(values: Sequence[Any]) -> Set[int]:
    """Return the keys of the storages of the tensors among `values`."""
    return {compat.storage_key(value) for value in values if isinstance(value, torch.Tensor)}


def is_one_region_each(plan: Plan) -> bool:
    """Whether each half is one region."""
    return all(sum(region.phase is phase for region in plan.regions) <= 1 for phase in (Phase.FORWARD, Phase.BACKWARD))


def runs_as(plan: Plan, other: Plan) -> bool:
    """Whether the programs of `other` are those of `plan`, which is for the same graph."""
    return all(
        getattr(plan, field) == getattr(other, field)
        for field in ("buckets", "placements", "activations", "regions", "schedules")
    )


def ticket_position(captured: Captured) -> int:
    """Return where among the inputs of the backward the ticket stands."""
    placeholders = captured.backward.graph.find_nodes(op="placeholder")
    return next(index for index, node in enumerate(placeholders) if node.target == TICKET)


def _device_bytes(graph: StepGraph, plan: Plan) -> int:
    waited = {action.what for action in actions_of(plan, Phase.FORWARD) if action.verb is Verb.WAIT}
    away = {
        name
        for group in plan.activations
        if group.saving is Saving.OFFLOAD and group.id in waited
        for name in group.storages
    }
    storages = as_run(graph, plan.activations).storages
    return sum(storage.nbytes for storage in storages if storage.kind is Kind.SAVED and storage.id not in away)


def _for_the_backward_alone(captured: Captured, graph: StepGraph) -> list[int]:
    """Positions among the forward's results of tensors that the step makes and does not hand out."""
    made = {storage.id for storage in graph.storages if storage.kind in (Kind.SAVED, Kind.TEMP)} - {*graph.outputs}
    behind = storages_behind(captured)
    outputs = captured.forward.graph.output_node().args[0]
    found = [(position, behind.get(node, ())) for position, node in enumerate(outputs) if isinstance(node, fx.Node)]
    return [place for place, names in found if place >= captured.num_outputs and names and made.issuperset(names)]
