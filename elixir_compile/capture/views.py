"""Nodes that only look at memory that another node made, and how one view is rebuilt from another."""

import operator
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from elixir_compile import compat

_LOOKS = (operator.getitem, torch.ops.aten._unsafe_view.default)
"""What looks at memory of another node though its schema does not say so."""


def viewed(node: fx.Node) -> fx.Node | None:
    """Return the node whose memory `node` looks at, or None when `node` makes its own value.

    With dynamic shapes a view has the sizes that it takes as inputs too: `view(x, [s0, 64])`.
    """
    if node.target not in _LOOKS and not getattr(node.target, "is_view", False):
        return None
    bases = [source for source in node.all_input_nodes if not is_number(source)]
    return bases[0] if len(bases) == 1 else None


def is_number(node: fx.Node) -> bool:
    """Whether the value of `node` is a number made of dynamic sizes, no tensor."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def view_chain(node: fx.Node) -> list[fx.Node]:
    """Return `node`, what it looks at, what that looks at, and so on."""
    found = [node]
    while (base := viewed(found[-1])) is not None:
        found.append(base)
    return found


def is_view(node: fx.Node) -> bool:
    """Whether `node` is another look at memory: a view, or one of several results."""
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
    """How to look at a storage: begin with `source`, undo views, then do others."""

    source: fx.Node
    undo: tuple[fx.Node, ...]
    """Views of the forward, the last first."""
    redo: tuple[fx.Node, ...]
    """Views of the forward, the first first."""


def path_to(wanted: fx.Node, there: Mapping[fx.Node, list[fx.Node]], numbers: Container[str]) -> Path | None:
    """Return the shortest way to `wanted`, a node of the forward, or None.

    `there` lists, by the node whose memory they look at, the nodes whose values are there; `numbers` names the dynamic
    sizes that are.
    """
    looks = view_chain(wanted)
    for at, common in enumerate(looks):
        redo = tuple(reversed(looks[:at]))
        if not all(number.name in numbers for view in redo for number in view.all_input_nodes if is_number(number)):
            return None
        for source in there.get(looks[-1], ()):
            chain = view_chain(source)
            if common not in chain:
                continue
            undo = tuple(chain[: chain.index(common)])
            if all(map(_can_undo, undo)):
                return Path(source=source, undo=undo, redo=redo)
    return None


def by_owner(nodes: "list[fx.Node] | tuple[fx.Node, ...]") -> dict[fx.Node, list[fx.Node]]:
    """Return `nodes` by the node whose memory each looks at."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        found.setdefault(view_chain(node)[-1], []).append(node)
    return found


def inverse(view: fx.Node) -> tuple[Callable[..., object], tuple[object, ...]]:
    """Return the target that undoes `view`, and its arguments behind the first."""
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
    """Return fake values like those of `node`: looks at those of `base`, or in memory of their own.

    For a node that takes the place of `node` in the backward, where the partitioner may have repeated it with
    the same fake values; two of one storage would be taken for one.
    """
    known: dict[int, torch.Tensor] = {}
    under = None if base is None else base.meta["val"]

    def like(value: object, under: object) -> object:
        if isinstance(value, (tuple, list)):
            pairs = zip(value, under, strict=True) if isinstance(under, (tuple, list)) else ((v, under) for v in value)
            return type(value)([like(one, look) for one, look in pairs])
        if not isinstance(value, torch.Tensor):
            return value
        source = under if isinstance(under, torch.Tensor) else known.get(compat.storage_key(value))
        with value.fake_mode:
            if source is None:
                made = _memory_like(value)
                return known.setdefault(compat.storage_key(value), made)
            look = source if source.dtype is value.dtype else source.view(value.dtype)
            return torch.as_strided(look, value.shape, value.stride(), value.storage_offset())

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
