"""Cut a half of a capture into the regions of a plan, each a separate graph of computing ops."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.graph.capture.convert import op_id
from elixir_compile.graph.capture.markers import MARKERS, gradient, parameter
from elixir_compile.graph.capture.node_facts import is_number, outputs_of, size_of
from elixir_compile.graph.capture.views import is_parameter_view, ops_of, viewed
from elixir_compile.ir import OpId, Phase, Region, RegionId


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
