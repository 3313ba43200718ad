"""Cut one half of a capture into the regions of a plan, each a graph of its own that computes and nothing else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from elixir_compile.capture.convert import MARKERS, is_parameter_view, op_id, ops_of
from elixir_compile.capture.joint import gradient
from elixir_compile.ir import Phase, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionGraph:
    """One region: `module` takes `inputs` and returns `outputs`, nodes of the captured graph."""

    name: str
    """`fwd_0`: the region's id as an attribute name."""
    phase: Phase
    module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    is_whole: bool
    """Whether the region is the only one of its phase."""


def split_regions(source: fx.GraphModule, plan: Plan, phase: Phase) -> Mapping[str, RegionGraph]:
    """Return the regions of `phase` by id; views of parameters are made again in each region that reads them."""
    graph = source.graph
    spans = [region for region in plan.regions if region.phase is phase]
    where = _assign(graph, spans, phase)
    needed_later = _outputs(graph, where)
    names = [node for node in graph.nodes if node in where]
    found: dict[str, RegionGraph] = {}
    for index, span in enumerate(spans):
        body = [node for node in names if where[node] == index]
        outputs = [node for node in body if node in needed_later]
        found[span.id] = _extract(source, span.id, phase, body, outputs, is_whole=len(spans) == 1)
    return found


def _assign(graph: fx.Graph, spans: Sequence, phase: Phase) -> dict[fx.Node, int]:
    """Return the region index of each op.

    A view costs nothing, so it belongs to the region that makes its base: a gradient is whole once its storage is
    written. Views of parameters are left out: they belong to whoever reads them.
    """
    index, where, ops = 0, {}, set(ops_of(graph))
    for node in graph.nodes:
        if node.op != "call_function" or node.target in MARKERS:
            continue
        if node in ops:
            where[node] = index
            index += op_id(phase, node) == spans[index].last
        elif not is_parameter_view(node):
            # A view of an input belongs to whatever runs next; behind the last op, to the last region.
            where[node] = where.get(node.all_input_nodes[0], min(index, len(spans) - 1))
    return where


def _outputs(graph: fx.Graph, where: Mapping[fx.Node, int]) -> set[fx.Node]:
    """Return the nodes that are read outside the region that makes them: by another, by the output, by a gradient
    marker."""
    found = set()
    for node, region in where.items():
        if any(_is_outside(user, region, where) for user in node.users):
            found.add(node)
    return found


def _is_outside(user: fx.Node, region: int, where: Mapping[fx.Node, int]) -> bool:
    return user.op == "output" or user.target is gradient or where.get(user, region) != region


def _extract(
    source: fx.GraphModule,
    region_id: str,
    phase: Phase,
    body: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    *,
    is_whole: bool,
) -> RegionGraph:
    graph, root = source.graph, torch.nn.Module()
    constants = dict.fromkeys(n for node in body for n in node.all_input_nodes if n.op == "get_attr")
    for node in constants:
        setattr(root, str(node.target), getattr(source, str(node.target)))
    views = _parameter_views(body)
    members = (*constants, *views, *body)
    inside = set(members)
    inputs = dict.fromkeys(n for node in members for n in node.all_input_nodes if n not in inside)
    if is_whole:
        # Same order of inputs and outputs as the captured graph: what torch knows about their positions stays true.
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
        name=region_id.replace(".", "_"),
        phase=phase,
        module=fx.GraphModule(root, region),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        is_whole=is_whole,
    )


def _in_output_order(graph: fx.Graph, outputs: Sequence[fx.Node]) -> list[fx.Node]:
    wanted = set(outputs)
    listed = [node for node in graph.output_node().args[0] if isinstance(node, fx.Node) and node in wanted]
    return list(dict.fromkeys([*listed, *outputs]))


def _parameter_views(body: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the parameter views that `body` reads, bases before the views of them."""
    found: dict[fx.Node, None] = {}
    own = set(body)

    def visit(node: fx.Node) -> None:
        if node not in found and node not in own and is_parameter_view(node):
            visit(node.all_input_nodes[0])
            found[node] = None

    for node in body:
        for source in node.all_input_nodes:
            visit(source)
    return list(found)
