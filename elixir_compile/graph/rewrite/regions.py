"""Cut a half of a capture into the regions of a plan, after its activations are recomputed, dropped or offloaded as the
plan says, and find the values that are there in slices or in parts.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx
from torch.fx.node import map_arg

from elixir_compile import compat
from elixir_compile.base.errors import InvalidPlan
from elixir_compile.graph.capture.batch_call import known_shape
from elixir_compile.graph.capture.captured import Captured, State, States, copied
from elixir_compile.graph.capture.convert import op_id, storages_behind
from elixir_compile.graph.capture.node_facts import (
    MARKERS,
    gradient,
    ints_of,
    is_number,
    key_of,
    marker_node,
    merge_markers,
    outputs_of,
    parameter,
    set_outputs,
    size_of,
    source_of,
    tensor_of,
    ticket,
)
from elixir_compile.graph.capture.rewire import (
    by_owner,
    fresh_value,
    is_parameter_view,
    is_view,
    ops_of,
    path_to,
    undo,
    view_chain,
    viewed,
)
from elixir_compile.ir import Activations, GroupId, OpId, Phase, Plan, Region, RegionId, Saving, StepGraph, StorageId
from elixir_compile.step.as_run import AGAIN, absorbed_storages, as_run, repeats, stays_in_parts, stored, with_repeats
from elixir_compile.step.divide import Lap, crossings, laps_of, leaving_name, next_name

# ----------------------------------------------------------------------------------------------------------------------
# Cut a half of a capture into the regions of a plan, each a separate graph of computing ops.


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionGraph:
    """A region. `module` takes the values of `inputs` and returns the values of `outputs`, nodes of the capture."""

    id: RegionId
    phase: Phase
    module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    is_only: bool
    """Whether the region is the only one of its phase."""

    @property
    def name(self) -> str:
        """The id as an attribute name, such as `fwd_0`."""
        return name_of(self.id)


def name_of(region: RegionId) -> str:
    """Return the id of a region as an attribute name, such as `fwd_0`."""
    return region.replace(".", "_")


def split_regions(
    source: fx.GraphModule, regions: Sequence[Region], phase: Phase, inline: frozenset[OpId] = frozenset()
) -> Mapping[str, RegionGraph]:
    """Return the regions of `phase` by id.

    Views of parameters and inputs, and the ops in `inline`, are copied into each reading region.
    """
    graph = source.graph
    spans = [region for region in regions if region.phase is phase]
    loose = _loose(graph, phase, inline)
    # The region of each op not in `loose`. A view costs nothing, so it belongs to the region of its base, or of the
    # last size among its inputs. So a gradient that is a view is complete as soon as its storage is written.
    index, where, ops = 0, {}, set(ops_of(graph))
    for node in graph.nodes:
        if node.op != "call_function" or node.target in MARKERS:
            continue
        if node in ops:
            if node not in loose or is_parameter_view(node):
                where[node] = index
            index += op_id(phase, node) == spans[index].last
        elif node not in loose:
            # A view of an input among the outputs belongs to the region of the next op, or to the last region.
            made = [where[base] for base in node.all_input_nodes if base in where]
            where[node] = max(made, default=min(index, len(spans) - 1))
    bodies: list[list[fx.Node]] = [[] for _ in spans]
    for node in graph.nodes:
        if node in where:
            bodies[where[node]].append(node)
    members = [_members(graph, body, loose) for body in bodies]
    read = {node for nodes in members for node in _inputs(nodes)}
    found: dict[str, RegionGraph] = {}
    for span, nodes, body in zip(spans, members, bodies, strict=True):
        outputs = [node for node in body if node in read or _is_output(node)]
        found[span.id] = _extract(source, span.id, phase, nodes, outputs, is_only=len(spans) == 1)
    return found


def _loose(graph: fx.Graph, phase: Phase, inline: frozenset[OpId]) -> set[fx.Node]:
    """Return the nodes that are copied into each region that reads them.

    These are views of parameters and of inputs, inline ops, and views of these. A view of an input must stay with its
    reader, because the input may still be offloaded at the place of the view in the graph.
    """
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or node.target in MARKERS:
            continue
        base = viewed(node)
        is_input_view = base is not None and (base.target is parameter or base.op == "placeholder")
        if is_input_view or base in found or op_id(phase, node) in inline:
            found.add(node)
    # An output must be in memory, so a node stays in one region if it or a view of it is an output.
    for node in reversed(graph.nodes):
        is_out = _is_output(node) or any(viewed(user) is node and user not in found for user in node.users)
        if node in found and not is_parameter_view(node) and is_out:
            found.discard(node)
    return found


def _is_output(node: fx.Node) -> bool:
    return any(user.op == "output" or user.target is gradient for user in node.users)


def _members(graph: fx.Graph, body: Sequence[fx.Node], loose: set[fx.Node]) -> list[fx.Node]:
    """Return `body` and its inputs in `loose` and among constants, in the order of the graph."""
    found = dict.fromkeys(body)
    pending = list(body)
    while pending:
        for source in pending.pop().all_input_nodes:
            if source not in found and (source in loose or source.op == "get_attr"):
                found[source] = None
                pending.append(source)
    return [node for node in graph.nodes if node in found]


def _inputs(members: Sequence[fx.Node]) -> dict[fx.Node, None]:
    """Return the inputs of `members` from outside of `members`, in the order of the reads."""
    inside = set(members)
    return dict.fromkeys(n for node in members for n in node.all_input_nodes if n not in inside)


def _extract(
    source: fx.GraphModule,
    region_id: RegionId,
    phase: Phase,
    members: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    *,
    is_only: bool,
) -> RegionGraph:
    graph, root = source.graph, torch.nn.Module()
    for node in members:
        if node.op == "get_attr":
            setattr(root, str(node.target), getattr(source, str(node.target)))
    # Inductor needs each symbol of a dynamic size as an input: `s0` and `s1` for a tensor of `s0*s1`.
    numbers = [node for node in graph.find_nodes(op="placeholder") if is_number(node)]
    symbols = [node for node in numbers if compat.expression_of(size_of(node))[0].isidentifier()]
    inputs = dict.fromkeys([*symbols, *_inputs(members)])
    if is_only:
        # In the order of the captured graph, because torch has facts about inputs and outputs by position.
        inputs = dict.fromkeys(node for node in graph.nodes if node in inputs)
        listed = [node for node in outputs_of(graph) if isinstance(node, fx.Node) and node in set(outputs)]
        outputs = list(dict.fromkeys([*listed, *outputs]))
    region = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = region.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in members:
        copies[node] = region.node_copy(node, copies.__getitem__)
    region.output(tuple(copies[node] for node in outputs))
    region.lint()
    return RegionGraph(
        id=region_id,
        phase=phase,
        module=compat.graph_module(root, region),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        is_only=is_only,
    )


# ----------------------------------------------------------------------------------------------------------------------
# Change both halves of a capture to a plan's activations: recompute ops in the backward, drop or offload saved values.
#
#   captured   forward  h = mm(x, w);  g = gelu(h);  return ..., h, g
#              backward bwd.mm_1(g, ...);  bwd.gelu_1(h, ...)
#   g again    forward  return ..., h, None
#              backward re_g = gelu(h);  bwd.mm_1(re_g, ...);  bwd.gelu_1(h, ...)
#
# `step.as_run.repeats` says which op is recomputed in front of which op; the functions here copy the nodes. The
# `step_graph` of the result is `as_run` of the captured step, op for op.


RECOMPUTED = "elixir_recomputed"
"""The key in `node.meta` that marks the nodes of recomputed ops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The two halves of a capture, changed to the activations of a plan.

    The forward returns None for each saved value without a reader in the backward.
    """

    captured: Captured
    away: Mapping[GroupId, tuple[str, ...]]
    """The names of the saved values that are offloaded and that the backward reads, by group."""
    inline: frozenset[OpId] = frozenset()
    """Ops that are computed inside of the kernels that read them."""

    @property
    def away_names(self) -> frozenset[str]:
        """The names of all offloaded values."""
        return frozenset(name for names in self.away.values() for name in names)


def partition_of(
    captured: Captured, graph: StepGraph, activations: Sequence[Activations], *, is_divided: bool = False
) -> Partition:
    """Return copies of the halves of `captured`, changed to `activations`. `graph` is the step of `captured`, and
    `is_divided` says whether regions run in micro-batches.

    Raises InvalidPlan if an op must be recomputed and cannot be.
    """
    if captured.backward is None:
        return Partition(captured=captured, away={})
    forward, backward = copied(captured.forward), copied(captured.backward)
    result = replace(captured, forward=forward, backward=backward)
    behind = {node: names[0] for node, names in storages_behind(result).items() if len(names) == 1}
    _Repeater(result, behind, stored(graph, activations)).run(graph, activations)
    away = _save_what_is_read(result, behind, activations)
    # Views that no node reads would hold the memory of values that are not saved until they are made, at the end of the
    # forward.
    for node in reversed(forward.graph.nodes):
        if not node.users and is_view(node):
            forward.graph.erase_node(node)
    for half in (forward, backward):
        half.graph.lint()
    inline: frozenset[OpId] = frozenset()
    if captured.fused:
        step = with_repeats(graph, activations)
        absorbed = absorbed_storages(step, is_divided=is_divided)
        inline = frozenset(op.id for op in step.ops if op.writes and op.writes[-1] in absorbed)
    return Partition(captured=result, away=away, inline=inline)


@dataclass(slots=True)
class _Repeater:
    """Copies the recomputed nodes of the forward into the backward, each node once."""

    captured: Captured
    behind: Mapping[fx.Node, StorageId]
    """The storage of each value of the forward."""
    stored: frozenset[StorageId]
    there: dict[str, fx.Node] = field(default_factory=dict)
    """Placeholders of the backward, by the name of the value that the forward saves for it."""
    sources: Mapping[fx.Node, list[fx.Node]] = field(default_factory=dict)
    """Values of the forward that are saved, by the node that owns their memory."""
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def run(self, graph: StepGraph, activations: Sequence[Activations]) -> None:
        captured, backward = self.captured, self.captured.backward_module.graph
        found = repeats(graph, activations)
        if not found:
            return
        self.there = {str(node.target): node for node in backward.find_nodes(op="placeholder")}
        saved = [node for node in captured.saved if isinstance(node, fx.Node) and node.name in self.there]
        self.sources = by_owner([node for node in saved if self.behind.get(node) in self.stored])
        halves = ((Phase.FORWARD, captured.forward), (Phase.BACKWARD, captured.backward_module))
        ops = {op_id(phase, node): node for phase, half in halves for node in ops_of(half.graph)}
        placed: dict[fx.Node, fx.Node] = {}
        for repeat in found:
            node = ops[repeat.op]
            placed[node] = ops[repeat.before]
            with backward.inserting_before(ops[repeat.before]):
                self.copies[node] = self._copy(node)
        for node in saved:
            owner = view_chain(node)[-1]
            is_dropped = owner in placed and self.behind.get(node) not in self.stored
            if is_dropped and self.there[node.name].users:
                with backward.inserting_before(placed[owner]):
                    self.there[node.name].replace_all_uses_with(self._value(node))
        merge_markers(backward)
        _sort(backward)
        # Each result of an op with several moves to the place directly behind the op: a tuple holds the memory of all
        # of its tensors until the last of them is taken.
        for node in reversed([node for node in self.copies.values() if node.target is operator.getitem]):
            source_of(node).append(node)
        # The ticket gets the versions of the parameters of recomputed ops too.
        stamp = captured.forward.graph.find_nodes(op="call_function", target=ticket)[0]
        read = backward.find_nodes(op="call_function", target=parameter)
        stamp.args = (tuple(dict.fromkeys([*ints_of(stamp, 0), *map(key_of, read)])),)

    def _value(self, node: fx.Node) -> fx.Node:
        """Return the node of the backward for the value of `node`, made at the insertion point if it is new."""
        if node in self.copies:
            return self.copies[node]
        backward = self.captured.backward_module
        if is_number(node):
            value = self.there[node.name]
        elif node.target is parameter:
            value = marker_node(backward.graph, parameter, node.args, node.meta)
        elif node.op == "get_attr":
            name = f"{AGAIN}{str(node.target).replace('.', '_')}"
            setattr(backward, name, getattr(self.captured.forward, str(node.target)))
            value = backward.graph.create_node("get_attr", name, name=name)
            value.meta = {**node.meta, RECOMPUTED: True}
        elif (path := path_to(node, self.sources, self.there)) is not None:
            value = self.there[path.source.name]
            for view in path.undo:
                value = undo(view, value)
            for view in path.redo:
                value = self._copy(view, value)
        else:
            chain = view_chain(node)
            is_made = chain[-1] in self.copies or chain[-1].target is parameter or chain[-1].op == "get_attr"
            if len(chain) == 1 or not is_made:
                raise InvalidPlan(f"a recomputed op reads {node.name}, which cannot be made from saved values.")
            value = self._copy(node)
        self.copies[node] = value
        return value

    def _copy(self, node: fx.Node, base: fx.Node | None = None) -> fx.Node:
        """Copy `node` into the backward. If it is a view, `base` replaces the node of which it is a view."""
        graph, viewed = self.captured.backward_module.graph, view_chain(node)[1:2]

        def read(source: fx.Node) -> fx.Node:
            return base if base is not None and source in viewed else self._value(source)

        args, kwargs = map_arg((node.args, dict(node.kwargs)), read)
        made = graph.create_node(node.op, node.target, args, kwargs, name=f"{AGAIN}{node.name}")
        made.meta = {**node.meta, RECOMPUTED: True, "val": fresh_value(node, read(viewed[0]) if viewed else None)}
        return made


def _sort(graph: fx.Graph) -> None:
    """Move each node in front of one of its inputs to the place directly behind this input.

    Such nodes are the views of recomputed values.
    """
    missing: dict[fx.Node, set[fx.Node]] = {}
    readers: dict[fx.Node, list[fx.Node]] = {}
    done: set[fx.Node] = set()
    for node in list(graph.nodes):
        lacks = {source for source in node.all_input_nodes if source not in done}
        if lacks:
            missing[node] = lacks
            for source in lacks:
                readers.setdefault(source, []).append(node)
            continue
        ready, last = [node], node
        while ready:
            made = ready.pop(0)
            done.add(made)
            if made is not node:
                last.append(made)
                last = made
            for reader in readers.pop(made, ()):
                missing[reader].discard(made)
                if not missing[reader]:
                    ready.append(reader)


def _save_what_is_read(
    captured: Captured, behind: Mapping[fx.Node, StorageId], activations: Sequence[Activations]
) -> Mapping[GroupId, tuple[str, ...]]:
    """Replace saved values without a reader in the backward by None; return the offloaded values by group."""
    placeholders = captured.backward_module.graph.find_nodes(op="placeholder")
    read = {str(node.target) for node in placeholders if node.users}
    group_of = {s: group.id for group in activations if group.saving is Saving.OFFLOAD for s in group.storages}
    away: dict[GroupId, list[str]] = {group: [] for group in group_of.values()}
    values = list(outputs_of(captured.forward.graph))
    for index in range(captured.num_outputs, len(values)):
        node = values[index]
        if not isinstance(node, fx.Node) or node.target is ticket or is_number(node):
            continue
        if node.name not in read:
            values[index] = None
        elif behind.get(node) in group_of:
            away[group_of[behind[node]]].append(node.name)
    set_outputs(captured.forward.graph, values)
    return {group: tuple(names) for group, names in away.items()}


# ----------------------------------------------------------------------------------------------------------------------
# Find the values of a capture that are there in slices or in parts, by what the plan counts.
#
# Offloaded values may pass between device and host in slices. Others may stay in parts between two laps.


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The layout of each part of a value that stays in parts, or of its whole."""

    memory: int
    """A number that the results have in common that are views of one memory."""
    dim: int
    """The dimension of the slices."""
    view: compat.MemoryView
    nbytes: int
    """The bytes of the memory of a part."""


def layout_of(value: torch.Tensor, state: State, micro_batches: int, memory: int = 0) -> Layout:
    """Return the layout of the parts of `value`, which are views of the memory with the number `memory`."""
    return Layout(
        memory=memory,
        dim=state.dim,
        view=replace(compat.MemoryView.of(value), shape=local_shape(value, state, micro_batches)),
        nbytes=value.untyped_storage().nbytes() // micro_batches,
    )


def local_shape(whole: torch.Tensor, state: State, divisor: int) -> tuple[int, ...]:
    """Return the shape of one micro-batch's part of `whole`: the size along its slices is divided by `divisor`."""
    return tuple(
        size // divisor if state.is_each and dim == state.dim else size for dim, size in enumerate(known_shape(whole))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicedValues:
    """The values that pass in slices, and those that stay in parts."""

    leaving: Mapping[fx.Node, GroupId] = field(default_factory=dict)
    """The group of each value of the forward that leaves in slices."""
    arriving: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """The dimension and the number of the slices of each value that arrives in slices, by its name."""
    in_parts: frozenset[fx.Node] = frozenset()
    """The values of both halves that stay in parts."""
    saved_in_parts: Mapping[str, Layout] = field(default_factory=dict)
    """The layout in the capture of each value in parts that the forward saves for the backward, by its name."""


def sliced_values(halves: Partition, graph: StepGraph, plan: Plan, states: Mapping[fx.Node, States]) -> SlicedValues:
    """Return the values of `halves`, made for the activations of `plan`, that pass in slices or stay in parts.

    `graph` is the step of the capture, and `states` are those of the values of `halves`.
    """
    laps = laps_of(plan)
    leaving, arriving = _passing(halves, graph, plan, states, laps)
    names = stays_in_parts(graph, plan.activations, laps)
    if not names:
        return SlicedValues(leaving=leaving, arriving=arriving)
    captured = halves.captured
    forward, backward = (storages_behind(captured, phase) for phase in (Phase.FORWARD, Phase.BACKWARD))
    of_both = (*forward.items(), *backward.items())
    in_parts = frozenset(node for node, storages in of_both if len(storages) == 1 and storages[0] in names)
    # The layout of the whole of each value; views of one storage share a memory.
    memories: dict[StorageId, int] = {}
    layouts: dict[str, Layout] = {}
    for node in captured.saved:
        if isinstance(node, fx.Node) and node in in_parts:
            state, memory = states[node], memories.setdefault(forward[node][0], len(memories))
            assert isinstance(state, State), f"{node.name} is one tensor"
            layouts[node.name] = layout_of(tensor_of(node), state, 1, memory)
    return SlicedValues(leaving=leaving, arriving=arriving, in_parts=in_parts, saved_in_parts=layouts)


def _passing(
    halves: Partition, graph: StepGraph, plan: Plan, states: Mapping[fx.Node, States], laps: tuple[Lap, ...]
) -> tuple[Mapping[fx.Node, GroupId], Mapping[str, tuple[int, int]]]:
    """Return the values that leave in slices, and those that arrive in slices."""
    step = as_run(graph, plan.activations, laps)
    crosses = crossings(step, plan.activations)
    leaving: dict[fx.Node, GroupId] = {}
    arriving: dict[str, tuple[int, int]] = {}
    if not crosses:
        return leaving, arriving
    there = {storage.id for storage in step.storages}
    forward = halves.captured.forward.graph
    saved = {node.name: node for node in outputs_of(forward) if isinstance(node, fx.Node)}
    behind = storages_behind(halves.captured)
    for group, found in crosses.items():
        for name in halves.away[group]:
            node = saved[name]
            (storage,), state = behind[node], states[node]
            if found.arriving is not None and next_name(storage) in there:
                assert isinstance(state, State), f"{name} is one tensor"
                arriving[name] = (state.dim, found.arriving.micro_batches)
            if leaving_name(storage) in there:
                leaving[node] = group
    return leaving, arriving
