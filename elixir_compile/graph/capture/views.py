"""Find the views among nodes, and how one view of a storage is rebuilt from another."""

import operator
from collections.abc import Container, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.graph.capture.markers import MARKERS, parameter
from elixir_compile.graph.capture.node_facts import int_of, ints_of, is_number, source_of, tensor_of, value_of
from elixir_compile.graph.capture.rings import is_wait

_VIEWS_BEYOND_SCHEMAS = (operator.getitem, torch.ops.aten._unsafe_view.default)
"""Targets that return a view although their schema does not say so."""


def viewed(node: fx.Node) -> fx.Node | None:
    """Return the node of which `node` is a view, or None if `node` is no view.

    With dynamic shapes, the sizes of a view are inputs of the node too: `view(x, [s0, 64])`.
    """
    is_one = node.target in _VIEWS_BEYOND_SCHEMAS or getattr(node.target, "is_view", False) or is_wait(node.target)
    if not is_one:
        return None
    bases = [source for source in node.all_input_nodes if not is_number(source)]
    return bases[0] if len(bases) == 1 else None


def view_chain(node: fx.Node) -> list[fx.Node]:
    """Return `node`, the node of which it is a view, and so on, to the owner of the memory."""
    found = [node]
    while (base := viewed(found[-1])) is not None:
        found.append(base)
    return found


def is_view(node: fx.Node) -> bool:
    """Return whether `node` is a view of another node, or one of the results of another node."""
    return viewed(node) is not None


def ops_of(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes of `graph` for the ops of the `StepGraph`, in order.

    A view is no op: it computes nothing, takes no memory, and stays with its base. The exception is a view of a
    parameter among the outputs of the step.
    """
    calls = [node for node in graph.nodes if node.op == "call_function" and node.target not in MARKERS]
    return [node for node in calls if not is_view(node) or _is_returned_parameter_view(node)] or calls


def is_parameter_view(node: fx.Node) -> bool:
    """Return whether `node` is a view of a parameter, or a view of such a view."""
    while (base := viewed(node)) is not None:
        node = base
        if node.target is parameter:
            return True
    return False


def _is_returned_parameter_view(node: fx.Node) -> bool:
    return is_parameter_view(node) and any(user.op == "output" for user in node.users)


_aten = torch.ops.aten
_RESHAPES = {
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.unsqueeze.default,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
}
_SELF_INVERSE = {_aten.alias.default, _aten.detach.default, _aten.transpose.int, _aten.t.default}


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The way to a view of a storage: start with `source`, undo views, then apply other views."""

    source: fx.Node
    undo: tuple[fx.Node, ...]
    """Views of the forward to undo, the last view first."""
    redo: tuple[fx.Node, ...]
    """Views of the forward to apply, the first view first."""


def path_to(wanted: fx.Node, there: Mapping[fx.Node, list[fx.Node]], numbers: Container[str]) -> Path | None:
    """Return the shortest path from an available value to `wanted`, a node of the forward; None if there is no path.

    `there` has the available nodes, by the owner of their memory. `numbers` has the names of the available
    dynamic sizes.
    """
    chain_of_wanted = view_chain(wanted)
    for at, common in enumerate(chain_of_wanted):
        redo = tuple(reversed(chain_of_wanted[:at]))
        if not all(number.name in numbers for view in redo for number in view.all_input_nodes if is_number(number)):
            return None
        for source in there.get(chain_of_wanted[-1], ()):
            chain = view_chain(source)
            if common not in chain:
                continue
            undo = tuple(chain[: chain.index(common)])
            if all(map(_can_undo, undo)):
                return Path(source=source, undo=undo, redo=redo)
    return None


def by_owner(nodes: "list[fx.Node] | tuple[fx.Node, ...]") -> dict[fx.Node, list[fx.Node]]:
    """Return `nodes` grouped by the owner of their memory."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        found.setdefault(view_chain(node)[-1], []).append(node)
    return found


def undo(view: fx.Node, value: fx.Node) -> fx.Node:
    """Add a node at the insertion point that undoes `view` for `value`, a node in place of `view`; return the node."""
    graph, base = value.graph, source_of(view)
    if view.target in _RESHAPES:
        made = graph.call_function(_aten.view.default, (value, list(tensor_of(base).shape)))
    elif view.target is _aten.permute.default:
        dims = [dim % len(ints_of(view, 1)) for dim in ints_of(view, 1)]
        made = graph.call_function(_aten.permute.default, (value, [dims.index(place) for place in range(len(dims))]))
    elif view.target in _SELF_INVERSE:
        made = graph.create_node("call_function", view.target, (value, *view.args[1:]))
    else:
        raise AssertionError(f"{view.target} is not among the views that can be undone")
    made.meta = {**base.meta, "val": fresh_value(base, value)}
    return made


def fresh_value(node: fx.Node, base: fx.Node | None = None) -> object:
    """Return new fake tensors like the values of `node`: views of the values of `base`, or with separate memory.

    They are for a node in place of `node` in the backward. The partitioner may have recomputed `node` there with the
    same fake tensors, and two values with one storage would count as views of each other.
    """
    value, under = value_of(node), None if base is None else value_of(base)
    if isinstance(under, (tuple, list)) and not isinstance(value, (tuple, list)):
        under = under[int_of(node, 1)]
    return renewed(value, _memory_under(value, under))


def _memory_under(value: object, under: object) -> dict[int, torch.Tensor]:
    """Return the tensors of `under` by the storages of the tensors of `value` that become views of them."""
    if isinstance(value, (tuple, list)):
        parts = zip(value, under, strict=True) if isinstance(under, (tuple, list)) else ((v, under) for v in value)
        return {key: tensor for pair in parts for key, tensor in _memory_under(*pair).items()}
    if isinstance(value, torch.Tensor) and isinstance(under, torch.Tensor):
        return {compat.storage_key(value): under}
    return {}


def renewed(value: object, memory: dict[int, torch.Tensor]) -> object:
    """Return `value` with new fake tensors in place of its own.

    A tensor whose storage has its key in `memory` becomes a view of the tensor there. Other tensors get new memory,
    which is added to `memory`.
    """
    if isinstance(value, (tuple, list)):
        return type(value)([renewed(part, memory) for part in value])
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value
    key = compat.storage_key(value)
    with compat.own_fake_mode(value):
        if key not in memory:
            return memory.setdefault(key, _memory_like(value))
        source = memory[key]
        flat = compat.with_bits(source, compat.LazyBits())
        flat = flat if flat.dtype is value.dtype else flat.view(value.dtype)
        made = torch.as_strided(flat, value.shape, value.stride(), value.storage_offset())
        return compat.with_bits(made, compat.lazy_bits(value))


def _memory_like(value: torch.Tensor) -> torch.Tensor:
    if not isinstance(value.storage_offset(), int) or value.storage_offset() == 0:
        return compat.like_in_strides(value, value.stride())
    numel = value.untyped_storage().nbytes() // value.element_size()
    flat = torch.empty(numel, dtype=value.dtype, device=value.device)
    made = flat.as_strided(value.shape, value.stride(), value.storage_offset())
    return compat.with_bits(made, compat.lazy_bits(value))


def _can_undo(view: fx.Node) -> bool:
    if view.target in _RESHAPES:
        return all(isinstance(size, int) for size in tensor_of(source_of(view)).shape)
    return view.target is _aten.permute.default or view.target in _SELF_INVERSE
