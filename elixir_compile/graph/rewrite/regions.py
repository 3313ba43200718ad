"""Cut a half of a capture into the regions of a plan, after its activations are recomputed, dropped or offloaded as the
plan says.
"""

import copy
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx
from torch.fx.node import map_arg

from elixir_compile import compat
from elixir_compile.base.errors import IllegalSchedule, InvalidPlan
from elixir_compile.graph.capture.batch import Walked, state_by_rule, walk
from elixir_compile.graph.capture.batch_call import Call, Mixes, State, States
from elixir_compile.graph.capture.convert import Captured, op_id, storages_behind
from elixir_compile.graph.capture.markers import (
    MARKERS,
    gradient,
    key_of,
    marker_node,
    merge_markers,
    parameter,
    ticket,
)
from elixir_compile.graph.capture.node_facts import ints_of, is_number, outputs_of, set_outputs, size_of, source_of
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
from elixir_compile.ir import Activations, GroupId, OpId, Phase, Region, RegionId, Saving, StepGraph, StorageId
from elixir_compile.step.as_run import AGAIN, absorbed_storages, repeats, stored, with_repeats

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
    where = _assign(graph, spans, phase, loose)
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


def _assign(graph: fx.Graph, spans: Sequence[Region], phase: Phase, loose: set[fx.Node]) -> dict[fx.Node, int]:
    """Return the region index of each op not in `loose`.

    A view costs nothing, so it belongs to the region of its base, or of the last size among its inputs. So a gradient
    that is a view is complete as soon as its storage is written.
    """
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
            made = [where[source] for source in node.all_input_nodes if source in where]
            where[node] = max(made, default=min(index, len(spans) - 1))
    return where


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
    inputs = dict.fromkeys([*_symbols(graph), *_inputs(members)])
    if is_only:
        # In the order of the captured graph, because torch has facts about inputs and outputs by position.
        order = [node for node in graph.nodes if node in inputs]
        inputs = dict.fromkeys(order)
        outputs = _in_output_order(graph, outputs)
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


def _symbols(graph: fx.Graph) -> list[fx.Node]:
    """Return the single symbols of dynamic sizes among the inputs of `graph`.

    Inductor needs each symbol as an input: `s0` and `s1` for a tensor of `s0*s1`.
    """
    numbers = [node for node in graph.find_nodes(op="placeholder") if is_number(node)]
    return [node for node in numbers if compat.expression_of(size_of(node))[0].isidentifier()]


def _in_output_order(graph: fx.Graph, outputs: Sequence[fx.Node]) -> list[fx.Node]:
    wanted = set(outputs)
    listed = [node for node in outputs_of(graph) if isinstance(node, fx.Node) and node in wanted]
    return list(dict.fromkeys([*listed, *outputs]))


# ----------------------------------------------------------------------------------------------------------------------
# The states of the values of one region, and which of its views are taken of the whole batch: see
# `graph.capture.batch`.


def walked(region: RegionGraph, states: Mapping[fx.Node, States], batch: int | torch.SymInt) -> Walked:
    """Return the states of the nodes of `region`. Its inputs are whole: a sum of an earlier region is equal for all
    micro-batches.

    `states` are those of the half from which the region was cut. Raises IllegalSchedule if an op of the region mixes
    the batch.
    """
    placeholders = region.module.graph.find_nodes(op="placeholder")
    given: dict[fx.Node, State] = {}
    for node, source in zip(placeholders, region.inputs, strict=True):
        state = states.get(source)
        if isinstance(state, State) and state.is_each:
            given[node] = state
    found = walk(region.module.graph, given, batch)
    mixing = next((node for node in found.mixes if viewed(node) is None), None)
    if mixing is not None:
        raise IllegalSchedule(
            f"{region.id} runs in micro-batches, but {mixing.name} mixes them: {found.mixes[mixing]}."
        )
    return found


def views_taken_apart(
    calls: Sequence[fx.Node], states: Mapping[fx.Node, States], batch: int | torch.SymInt
) -> set[fx.Node]:
    """Return the views of inputs among `calls` that do not keep the slices together, and the views of these: a view of
    a slice would be another value than a slice of the view."""
    found: set[fx.Node] = set()
    for node in calls:
        base = viewed(node)
        if base is None or (base.op != "placeholder" and base not in found):
            continue
        if base in found or _mixes(node, base, states[base], batch):
            found.add(node)
    return found


def _mixes(view: fx.Node, base: fx.Node, state: States, batch: int | torch.SymInt) -> bool:
    if not isinstance(state, State) or not state.is_each:
        return False
    try:
        state_by_rule(Call(view, {base: state}, compat.stand_in(batch), compat.symbol_of(batch)))
    except Mixes:
        return True
    return False


# ----------------------------------------------------------------------------------------------------------------------
# The parts of a region that runs in micro-batches, as graphs and as values that say how they fit together.


Size = int | str
"""A size, or the expression of a dynamic size, see `ir.sizes`."""


def as_size(size: "int | torch.SymInt") -> Size:
    """Return `size` as a number or an expression."""
    return compat.expression_of(size)[0] or int(size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A value that the body reads: entry `place` of the inputs of the region and the results of its head."""

    place: int
    dim: int | None = None
    """The dimension along which each micro-batch has its slice; None if all micro-batches read the same."""
    is_seed: bool = False
    """Whether the value seeds random numbers, so that each micro-batch needs another."""
    is_rows: bool = False
    """Whether the value, a dynamic number of rows, counts only the rows of the micro-batch."""
    is_unknown: bool = False
    """Whether the body knows nothing about the value, the rows of the batch, whose symbol has another value there."""
    strides: tuple[Size, ...] = ()
    """The strides in which the body expects its slice, if they depend on the number of rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """A result of the body that fills a tensor of the whole batch, a slice per micro-batch."""

    whole: int
    """The index in `wholes` of the memory of the tensor; views of one memory share it."""
    dim: int
    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    offset: Size
    bits: compat.LazyBits
    is_copied: bool
    """False if another result of the body has all elements of the memory."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A result of the body that stays in parts: the tensors of all micro-batches."""

    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsView:
    """An output of the region that is a view of its input `place`, which stays in parts."""

    place: int
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Summed:
    """A result of the body whose values in all micro-batches are added up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Last:
    """A result of the body that is equal in all micro-batches."""


Result = Filled | Kept | Summed | Last


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of a tensor of the whole batch."""

    numel: Size
    dtype: torch.dtype
    device: torch.device
    group: str = ""
    """The group of activations with which the tensor leaves the device in slices; empty if it stays until the region
    ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedGraph:
    """The three parts of a region.

    Values have places: first the inputs of the region, then its dynamic sizes `numbers`, then the results of its head,
    then those of its body as they are for the whole batch, then `views`, then those of its tail.
    """

    micro_batches: int
    """The number of micro-batches, an upper limit if the number of rows is dynamic."""
    num_inputs: int
    batch: Size
    """The rows of the batch; a symbol if their number is dynamic."""
    symbols: tuple[tuple[str, int], ...]
    """The symbols of dynamic sizes, each with its place among the inputs."""
    numbers: tuple[Size, ...]
    """The dynamic sizes among the outputs of the region."""
    head: RegionGraph | None
    head_reads: tuple[int, ...]
    body: RegionGraph
    body_reads: tuple[Read, ...]
    results: tuple[Result, ...]
    wholes: tuple[Memory, ...]
    views: tuple[PartsView, ...]
    tail: RegionGraph | None
    tail_reads: tuple[int, ...]
    outputs: tuple[int, ...]
    """The place of each output of the region."""


@dataclass(slots=True)
class Part:
    """A graph under construction, with the values that it reads."""

    source: RegionGraph
    graph: fx.Graph = field(default_factory=fx.Graph)
    root: torch.nn.Module = field(default_factory=torch.nn.Module)
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """The node of this graph for a node of the region."""
    reads: dict[fx.Node, Read] = field(default_factory=dict)
    """What each placeholder of this graph reads."""
    stands_for: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """The input of the region that a placeholder reads whole."""
    by_read: dict[Read, fx.Node] = field(default_factory=dict)
    created: dict[tuple[fx.Node, int | None], fx.Node] = field(default_factory=dict)
    """The copies of a tensor of one value, by the dimension along which they have the size of a micro-batch."""

    def read(self, read: Read, node: fx.Node, value: object) -> fx.Node:
        """Return the placeholder for `read` of the region's `node`, with the example `value`."""
        if read not in self.by_read:
            with self.graph.inserting_before(None):
                made = self.graph.placeholder(node.name)
            made.target = made.name  # a value may be read whole and in slices
            made.meta = {**node.meta, "val": value}
            self.by_read[read], self.reads[made] = made, read
            is_changed = read.is_seed or read.is_rows or read.is_unknown
            if read.dim is None and not is_changed and read.place < len(self.source.inputs):
                self.stands_for[made] = self.source.inputs[read.place]
        return self.by_read[read]

    def constant(self, node: fx.Node) -> fx.Node:
        """Return the copy of `node`, a constant of the region."""
        if node not in self.copies:
            setattr(self.root, str(node.target), getattr(self.source.module, str(node.target)))
            self.copies[node] = self.graph.node_copy(node)
        return self.copies[node]

    def finished(self, outputs: Sequence[fx.Node]) -> tuple[RegionGraph, tuple[Read, ...]]:
        """Return the graph, which returns `outputs`, as a region, and what it reads."""
        placeholders = self.graph.find_nodes(op="placeholder")
        self.graph.output(tuple(outputs))
        self.graph.lint()
        made = replace(
            self.source,
            module=compat.graph_module(self.root, self.graph),
            inputs=tuple(self.stands_for.get(node, node) for node in placeholders),
            outputs=tuple(outputs),
            is_only=False,
        )
        return made, tuple(self.reads[node] for node in placeholders)


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
    forward, backward = _copied(captured.forward), _copied(captured.backward)
    result = replace(captured, forward=forward, backward=backward)
    behind = {node: names[0] for node, names in storages_behind(result).items() if len(names) == 1}
    _Repeater(result, behind, stored(graph, activations)).run(graph, activations)
    away = _save_what_is_read(result, behind, activations)
    _drop_unread_views(forward.graph)
    for half in (forward, backward):
        half.graph.lint()
    inline = _inline(graph, activations, is_divided=is_divided) if captured.fused else frozenset()
    return Partition(captured=result, away=away, inline=inline)


def _inline(graph: StepGraph, activations: Sequence[Activations], *, is_divided: bool) -> frozenset[OpId]:
    step = with_repeats(graph, activations)
    absorbed = absorbed_storages(step, is_divided=is_divided)
    return frozenset(op.id for op in step.ops if op.writes and op.writes[-1] in absorbed)


def _copied(half: fx.GraphModule) -> fx.GraphModule:
    return compat.graph_module(half, copy.deepcopy(half.graph))


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
        backward = self.captured.backward_module.graph
        found = repeats(graph, activations)
        if not found:
            return
        self.there = {str(node.target): node for node in backward.find_nodes(op="placeholder")}
        saved = [node for node in self.captured.saved if isinstance(node, fx.Node) and node.name in self.there]
        self.sources = by_owner([node for node in saved if self.behind.get(node) in self.stored])
        ops = _by_id(self.captured)
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
        _take_apart(self.copies.values())
        self._stamp()

    def _value(self, node: fx.Node) -> fx.Node:
        """Return the node of the backward for the value of `node`, made at the insertion point if it is new."""
        if node not in self.copies:
            self.copies[node] = self._found(node)
        return self.copies[node]

    def _found(self, node: fx.Node) -> fx.Node:
        if is_number(node):
            return self.there[node.name]
        if node.target is parameter:
            return marker_node(self.captured.backward_module.graph, parameter, node.args, node.meta)
        if node.op == "get_attr":
            return self._constant(node)
        chain = view_chain(node)
        path = path_to(node, self.sources, self.there)
        if path is None:
            is_made = chain[-1] in self.copies or chain[-1].target is parameter or chain[-1].op == "get_attr"
            if len(chain) > 1 and is_made:
                return self._copy(node)
            raise InvalidPlan(f"a recomputed op reads {node.name}, which cannot be made from saved values.")
        value = self.there[path.source.name]
        for view in path.undo:
            value = undo(view, value)
        for view in path.redo:
            value = self._copy(view, value)
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

    def _constant(self, node: fx.Node) -> fx.Node:
        module, name = self.captured.backward_module, f"{AGAIN}{str(node.target).replace('.', '_')}"
        setattr(module, name, getattr(self.captured.forward, str(node.target)))
        made = module.graph.create_node("get_attr", name, name=name)
        made.meta = {**node.meta, RECOMPUTED: True}
        return made

    def _stamp(self) -> None:
        """Add the versions of the parameters of recomputed ops to the ticket."""
        stamp = self.captured.forward.graph.find_nodes(op="call_function", target=ticket)[0]
        read = self.captured.backward_module.graph.find_nodes(op="call_function", target=parameter)
        stamp.args = (tuple(dict.fromkeys([*ints_of(stamp, 0), *map(key_of, read)])),)


def _by_id(captured: Captured) -> dict[OpId, fx.Node]:
    halves = ((Phase.FORWARD, captured.forward), (Phase.BACKWARD, captured.backward_module))
    return {op_id(phase, node): node for phase, half in halves for node in ops_of(half.graph)}


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


def _take_apart(recomputed: Iterable[fx.Node]) -> None:
    """Move each result of an op with several to the place directly behind the op. A tuple holds the memory of all of
    its tensors until the last of them is taken."""
    for node in reversed([node for node in recomputed if node.target is operator.getitem]):
        source_of(node).append(node)


def _drop_unread_views(graph: fx.Graph) -> None:
    """Remove the views that no node reads. They would hold the memory of values that are not saved until they are made,
    at the end of the forward."""
    for node in reversed(graph.nodes):
        if not node.users and is_view(node):
            graph.erase_node(node)


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
