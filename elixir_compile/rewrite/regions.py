"""Cut one half of a capture into the regions of a plan, each a graph of its own that computes and nothing else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.capture.convert import MARKERS, is_parameter_view, op_id, ops_of
from elixir_compile.capture.joint import gradient
from elixir_compile.capture.views import is_number, viewed
from elixir_compile.ir import Phase, Region, RegionId


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionGraph:
    """One region: `module` takes `inputs` and returns `outputs`, nodes of the captured graph."""

    id: RegionId
    phase: Phase
    module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    is_whole: bool
    """Whether the region is the only one of its phase."""

    @property
    def name(self) -> str:
        """`fwd_0`: the id as an attribute name."""
        return self.id.replace(".", "_")


def split_regions(source: fx.GraphModule, regions: Sequence[Region], phase: Phase) -> Mapping[str, RegionGraph]:
    """Return those of `regions` that are of `phase`, by id; views of parameters are made again in each region that
    reads them."""
    graph = source.graph
    spans = [region for region in regions if region.phase is phase]
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

    A view costs nothing, so it belongs to the region that makes its base, or the last of the sizes that it takes: a
    gradient is whole once its storage is written. Views of parameters are left out: they belong to whoever reads them.
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
            made = [where[source] for source in node.all_input_nodes if source in where]
            where[node] = max(made, default=min(index, len(spans) - 1))
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
    # A view of a parameter is made where it is read, from sizes that any region may have made.
    is_outside = user.op == "output" or user.target is gradient or is_parameter_view(user)
    return is_outside or where.get(user, region) != region


def _extract(
    source: fx.GraphModule,
    region_id: RegionId,
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
    inputs = dict.fromkeys([*_symbols(graph), *inputs])
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
        id=region_id,
        phase=phase,
        module=fx.GraphModule(root, region),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        is_whole=is_whole,
    )


def _symbols(graph: fx.Graph) -> list[fx.Node]:
    """Return the inputs of `graph` that are symbols of dynamic sizes: Inductor wants each by itself, `s0` and `s1` for
    a tensor of `s0*s1`."""
    numbers = [node for node in graph.find_nodes(op="placeholder") if is_number(node)]
    return [node for node in numbers if compat.expression_of(node.meta["val"])[0].isidentifier()]


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
            visit(viewed(node))
            found[node] = None

    for node in body:
        for source in node.all_input_nodes:
            visit(source)
    return list(found)
