"""Find the parameters written by Dynamo's graph. They cannot be gathers, because a gather returns a copy.

    weight.clamp_(-1, 1)                 embedding(ids, weight, max_norm=1.0)          weight.data = ...
    torch.mul(a, b, out=weight)          torch._foreach_lerp_(targets, sources, 0.01)

Few nodes take a parameter or a view of a parameter, and most of these write no argument, by their name. The others are
called a second time on the fake tensors of the capture, and the schemas of the ops inside say which arguments they
write.
"""

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate

from elixir_compile import compat
from elixir_compile.base.errors import UnsupportedModel
from elixir_compile.graph.capture.markers import key_of
from elixir_compile.graph.capture.node_facts import (
    bodies_of,
    example_of,
    leaves_of,
    storages_of,
    tensors_of,
    values_of_arguments,
)
from elixir_compile.graph.capture.rewire import gathers_of
from elixir_compile.graph.ops.gather import GATHER
from elixir_compile.graph.ops.registry import Slot, slot_by_key, slot_of

_WRITES_STATISTICS = ("batch_norm", "instance_norm", "fake_quant", "embedding")
"""Parts of the names of torch's compiled functions that write an input, or whose gradient may be sparse."""

_Roots = frozenset[int]


@dataclass(slots=True)
class _Found:
    """The parameters of a graph and the reasons found so far why some of them cannot be gathered."""

    params: dict[int, nn.Parameter] = field(default_factory=dict)
    """The parameters that the graph takes or gathers, by their id."""
    roots: dict[fx.Node, _Roots] = field(default_factory=dict)
    """The ids of the parameters with which a node shares memory."""
    reasons: dict[int, str] = field(default_factory=dict)
    """The reason why a parameter cannot be gathered, by its id."""

    def mark(self, roots: _Roots, reason: str) -> None:
        for root in roots:
            self.reasons.setdefault(root, reason)


def written_parameters(gm: fx.GraphModule, inputs: Sequence[Any]) -> list[tuple[nn.Parameter, str]]:
    """Return the parameters of `gm` that must be plain inputs instead of gathers, each with the reason.

    A parameter must be an input if `gm` writes it, if `gm` returns it to eager code behind a graph break, which may
    write it, if its gradient is sparse, or if an earlier graph made it an input.

    Raises UnsupportedModel for a write to a parameter with gradients on, which eager PyTorch refuses.
    """
    found = _Found()
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        if isinstance(value, nn.Parameter):
            found.params[id(value)] = value
            found.roots[node] = frozenset({id(value)})
    for node in gathers_of(gm):
        param = slot_by_key(key_of(node)).param
        found.params[id(param)] = param
        found.roots[node] = frozenset({id(param)})
        if slot_of(param) is None:
            found.mark(found.roots[node], "an earlier graph writes it")
    if found.roots:
        _walk(gm, found, is_grad_on=torch.is_grad_enabled())
    if found.roots and compat.graph_break_of(gm) is not None:
        for node in gm.graph.output_node().all_input_nodes:
            found.mark(found.roots.get(node, frozenset()), "eager code behind a graph break may write it")
    return [(found.params[root], reason) for root, reason in found.reasons.items()]


def gathered_among(gm: fx.GraphModule, params: Sequence[tuple[nn.Parameter, str]]) -> dict[Slot, str]:
    """Return the slots of `params` that `gm` gathers, or reads by name beside gathers, with the reason of each.

    A graph without gathers reads all its parameters where they live, and can write them there.
    """
    reasons = {id(param): reason for param, reason in params}
    gathers = gathers_of(gm) if reasons else []
    slots = dict.fromkeys(slot_by_key(key_of(node)) for node in gathers)
    if gathers:
        by_name = (slot for param, _ in params if (slot := slot_of(param)) is not None)
        slots |= dict.fromkeys(slot for slot in by_name if not slot.is_dtensor)
    return {slot: reasons[id(slot.param)] for slot in slots if id(slot.param) in reasons}


def _walk(gm: fx.GraphModule, found: _Found, *, is_grad_on: bool) -> None:
    """Follow the parameters through `gm` in order, from the roots of its placeholders and gathers."""
    for node in gm.graph.nodes:
        is_grad_on = compat.sets_gradients(node, is_grad_on)
        taken = [source for source in node.all_input_nodes if source in found.roots]
        bodies = bodies_of(gm, node)
        for body in bodies:
            _enter(body, taken, found)
            _walk(body, found, is_grad_on=is_grad_on)
        if not taken or bodies or node.op == "output":
            continue
        if compat.is_higher_order(node.target):
            # Such a function may write any input, as a Triton kernel does: it has no schema.
            found.mark(frozenset().union(*(found.roots[source] for source in taken)), _reason(node))
        elif _may_write(node):
            _call(node, taken, found, is_grad_on=is_grad_on)
        _follow(node, taken, found)


def _enter(body: fx.GraphModule, taken: Sequence[fx.Node], found: _Found) -> None:
    """Give each placeholder of `body`, a graph that a node runs, the roots of the nodes `taken` with its memory."""
    for node in body.graph.find_nodes(op="placeholder"):
        _follow(node, taken, found)


def _follow(node: fx.Node, taken: Sequence[fx.Node], found: _Found) -> None:
    """Give `node` the roots of each node in `taken` with which its result shares memory."""
    keys = storages_of(node)
    shared = [found.roots[source] for source in taken if not keys.isdisjoint(storages_of(source))]
    if shared and node not in found.roots:
        found.roots[node] = frozenset().union(*shared)


def _may_write(node: fx.Node) -> bool:
    target = node.target
    if node.kwargs.get("out") is not None:
        return True
    if isinstance(target, str):
        return target.endswith("_")
    if target is GATHER:
        return False
    if isinstance(target, types.FunctionType) or compat.is_operator(target):
        return True
    name = getattr(target, "__name__", "_")
    if getattr(target, "__module__", None) == "_operator":
        return name == "setitem" or name.startswith("i")
    return name.endswith("_") or any(part in name for part in _WRITES_STATISTICS)


def _call(node: fx.Node, taken: Sequence[fx.Node], found: _Found, *, is_grad_on: bool) -> None:
    """Call `node` on fake tensors, and mark the written parameters."""
    by_object = {id(leaf): found.roots[source] for source in taken for leaf in tensors_of(source)}
    by_storage: dict[int, _Roots] = {}
    for source in taken:
        for key in storages_of(source):
            by_storage[key] = by_storage.get(key, frozenset()) | found.roots[source]

    def note(value: object, reason: str, *, is_write: bool) -> None:
        for leaf in leaves_of(value):
            if not isinstance(leaf, torch.Tensor) or leaf.is_sparse:
                continue
            roots = by_object.get(id(leaf)) or by_storage.get(compat.storage_key(leaf), frozenset())
            if is_write and is_grad_on and leaf.requires_grad:
                _refuse_leaf(roots, found, reason)
            found.mark(roots, reason)

    def see(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        written, is_only_writing = _writes_of(op, args, kwargs)
        for value in written:
            note(value, _reason(node), is_write=True)
        if _argument(op, args, kwargs, "sparse") is True:
            note(args[0], "its gradient is sparse", is_write=False)
        if not is_only_writing:
            return op(*args, **kwargs)
        # `set_` and `t_` are not run: they would change shape or memory of the fake tensors of the capture.
        num_returns = len(compat.schema_of(op).returns)
        return None if num_returns == 0 else written[0] if num_returns == 1 else tuple(written)

    args, kwargs = values_of_arguments(node, _inner_example)
    function: Callable[..., Any] = node.target if callable(node.target) else getattr(type(args[0]), node.target)
    fakes = compat.own_fake_mode(next(iter(tensors_of(taken[0]))))
    try:
        with torch.no_grad(), fakes, compat.ops_seen_by(see):
            function(*args, **kwargs)
    except UnsupportedModel:
        raise
    except Exception:
        # The call can fail although it works in the graph, as under autocast. Its writes until the error are known. A
        # function of torch writes first; another function may write later, so all its parameters are marked.
        if not str(getattr(function, "__module__", "")).startswith("torch"):
            found.mark(frozenset().union(*by_object.values()), _reason(node))


def _inner_example(node: fx.Node) -> object:
    """Return Dynamo's example value of `node` without the wrappers of function transforms, whose levels are gone."""
    return map_aggregate(example_of(node), compat.unwrapped)  # pyright: ignore[reportArgumentType]  it maps any value


def _writes_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], bool]:
    """Return the arguments written by `op`, and whether all its results are such arguments."""
    schema = compat.schema_of(op)
    if not schema.is_mutable:
        return [], False
    written = [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return written, bool(written) and all(value.alias_info is not None for value in schema.returns)


def _argument(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    for place, argument in enumerate(compat.schema_of(op).arguments):
        if argument.name == name:
            return args[place] if place < len(args) else kwargs.get(name)
    return None


def _refuse_leaf(roots: _Roots, found: _Found, reason: str) -> None:
    for root in roots:
        slot = slot_of(found.params[root])
        name = "a parameter" if slot is None else slot.name
        because = f"{reason} while gradients are on, which PyTorch refuses for a leaf that requires one. "
        raise UnsupportedModel(name, f"{because}Write it under `torch.no_grad()`")


def _reason(node: fx.Node) -> str:
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    return f"the forward writes it ({name})"
