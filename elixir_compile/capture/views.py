"""Find the views among nodes, and how one view of a storage is rebuilt from another."""

import operator
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from elixir_compile import compat

_VIEWS_BEYOND_SCHEMAS = (operator.getitem, torch.ops.aten._unsafe_view.default)
"""Targets that return a view although their schema does not say so."""


def viewed(node: fx.Node) -> fx.Node | None:
    """Return the node of which `node` is a view, or None if `node` is no view.

    With dynamic shapes, the sizes of a view are inputs of the node too: `view(x, [s0, 64])`.
    """
    if node.target not in _VIEWS_BEYOND_SCHEMAS and not getattr(node.target, "is_view", False):
        return None
    bases = [source for source in node.all_input_nodes if not is_number(source)]
    return bases[0] if len(bases) == 1 else None


def is_number(node: fx.Node) -> bool:
    """Return whether the value of `node` is a symbolic number, not a tensor."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def view_chain(node: fx.Node) -> list[fx.Node]:
    """Return `node`, the node of which it is a view, and so on, to the owner of the memory."""
    found = [node]
    while (base := viewed(found[-1])) is not None:
        found.append(base)
    return found


def is_view(node: fx.Node) -> bool:
    """Return whether `node` is a view of another node, or one of the results of another node."""
    return viewed(node) is not None


_aten = torch.ops.aten
_RESHAPES = {
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.unsqueeze.default,
    _aten.squeeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
}
_SAME = {_aten.alias.default, _aten.detach.default}


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


def inverse(view: fx.Node) -> tuple[Callable[..., object], tuple[object, ...]]:
    """Return the target that undoes `view`, and the arguments of the target behind the first."""
    base = view.args[0]
    if view.target in _RESHAPES:
        return _aten.view.default, (list(base.meta["val"].shape),)
    if view.target is _aten.permute.default:
        dims = [dim % len(view.args[1]) for dim in view.args[1]]
        return _aten.permute.default, ([dims.index(place) for place in range(len(dims))],)
    if view.target is _aten.transpose.int or view.target in _SAME or view.target is _aten.t.default:
        return view.target, tuple(view.args[1:])
    raise AssertionError(f"{view.target} is not among the views that can be undone")


def example_of(node: fx.Node, base: fx.Node | None = None) -> object:
    """Return new fake tensors like the values of `node`: views of the values of `base`, or with separate memory.

    They are for a node in place of `node` in the backward. The partitioner may have recomputed `node` there with the
    same fake tensors, and two values with one storage would count as views of each other.
    """
    known: dict[int, torch.Tensor] = {}
    under = None if base is None else base.meta["val"]

    def like(value: object, under: object) -> object:
        if isinstance(value, (tuple, list)):
            pairs = zip(value, under, strict=True) if isinstance(under, (tuple, list)) else ((v, under) for v in value)
            return type(value)([like(part, base_part) for part, base_part in pairs])
        if not isinstance(value, torch.Tensor):
            return value
        source = under if isinstance(under, torch.Tensor) else known.get(compat.storage_key(value))
        with value.fake_mode:
            if source is None:
                made = _memory_like(value)
                return known.setdefault(compat.storage_key(value), made)
            flat = source if source.dtype is value.dtype else source.view(value.dtype)
            return torch.as_strided(flat, value.shape, value.stride(), value.storage_offset())

    value = node.meta.get("val")
    if isinstance(under, (tuple, list)) and not isinstance(value, (tuple, list)):
        under = under[node.args[1]]
    return like(value, under)


def _memory_like(value: torch.Tensor) -> torch.Tensor:
    if not isinstance(value.storage_offset(), int) or value.storage_offset() == 0:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    numel = value.untyped_storage().nbytes() // value.element_size()
    flat = torch.empty(numel, dtype=value.dtype, device=value.device)
    return flat.as_strided(value.shape, value.stride(), value.storage_offset())


def _can_undo(view: fx.Node) -> bool:
    if view.target in _RESHAPES:
        return all(isinstance(size, int) for size in view.args[0].meta["val"].shape)
    return view.target in (_aten.permute.default, _aten.transpose.int, _aten.t.default) or view.target in _SAME
