"""Which values Inductor never writes to memory.

Inductor computes a pointwise result inside the kernels that read it. It allocates a buffer only where something needs
one: an opaque kernel (a matrix product, an attention kernel), a graph output, or readers in kernels that cannot be
one. This is a model of that rule, not a copy of the scheduler: `docs/memory.md` has the measured error.
"""

from collections.abc import Mapping

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.capture.views import is_view, viewed

_ALLOCATES_NOTHING = {
    torch.ops.aten.full.default,
    torch.ops.aten.full_like.default,
    torch.ops.prims.iota.default,
    torch.ops.aten.arange.default,
    torch.ops.aten.scalar_tensor.default,
    torch.ops.aten.embedding.default,
    torch.ops.aten.constant_pad_nd.default,
    torch.ops.aten.gather.default,
    torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select_scatter.default,
}

_WRITES_INTO_FIRST = {
    torch.ops.aten.index_put.default,
    torch.ops.aten._unsafe_index_put.default,
    torch.ops.aten.scatter.src,
    torch.ops.aten.scatter.value,
    torch.ops.aten.scatter_add.default,
    torch.ops.aten.scatter_reduce.two,
    torch.ops.aten.index_add.default,
}


def absorbed_nodes(graph: fx.Graph) -> Mapping[fx.Node, None]:
    """Return the nodes of `graph` whose value is computed inside its readers."""
    absorbed: dict[fx.Node, None] = {}
    for node in graph.nodes:
        is_view_of_absorbed = viewed(node) in absorbed
        if is_view_of_absorbed or (_is_fusible(node) and not _needs_memory(node)):
            absorbed[node] = None
    return absorbed


def overwritten_input(node: fx.Node) -> fx.Node | None:
    """Return the input whose memory a functional scatter takes for its result, or None: Inductor writes into a
    value nobody else reads."""
    name = getattr(node.target, "_opname", "")
    writes_into_first = node.target in _WRITES_INTO_FIRST or name == "_unsafe_masked_index_put_accumulate"
    if not writes_into_first or not isinstance(node.args[0], fx.Node):
        return None
    base = node.args[0]
    return base if len(base.users) == 1 and base.op == "call_function" else None


def _is_fusible(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    is_inline = node.target in _ALLOCATES_NOTHING or node.target in compat.inductor_random_ops()
    return is_inline or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _needs_memory(node: fx.Node) -> bool:
    """Whether a reader of `node`, seen through views, cannot compute it for itself."""
    pending, seen = [node], {node}
    while pending:
        for user in pending.pop().users:
            if user in seen:
                continue
            seen.add(user)
            if is_view(user):
                pending.append(user)
            elif not _reads_inline(user):
                return True
    return False


def _reads_inline(user: fx.Node) -> bool:
    return _is_fusible(user) or torch.Tag.reduction in getattr(user.target, "tags", ())
