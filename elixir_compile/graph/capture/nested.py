"""Put the graph of each nested region in place of the node that runs it.

    before   y = invoke_subgraph(body, "body", x, w)[0]         body   a = placeholder;  b = placeholder;  linear(a, b)
    after    y = linear(x, w)

`torch.compiler.nested_compile_region` keeps the graph of a function apart, so that a compiler compiles it once for all
its calls. A plan acts on the ops inside: it places their parameters, and saves or recomputes their results. Equal
layers are compiled once by `rewrite` too, whether or not the user marked them.

Dynamo may trace such a function once and let several nodes run its graph, whose example values and module paths are
those of the first call. Each call gets its own here.
"""

import itertools
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import Argument, map_arg

from elixir_compile import compat
from elixir_compile.graph.capture.node_facts import bodies_of, example_of, outputs_of, tensors_of
from elixir_compile.graph.capture.views import renewed

_INVOKE = torch.ops.higher_order.invoke_subgraph
_Stack = Mapping[str, tuple[str, Any]]
"""The modules around a node as Dynamo notes them, outermost first: by id, the path and the class of each."""


def inline_regions(gm: fx.GraphModule) -> None:
    """Inline each nested region in Dynamo's graph `gm`, and in the graphs that its nodes run, in place."""
    for body in dict.fromkeys(body for node in gm.graph.nodes for body in bodies_of(gm, node)):
        inline_regions(body)
    paths: dict[fx.GraphModule, str] = {}
    calls = gm.graph.find_nodes(op="call_function", target=_INVOKE)
    for call in calls:
        (body,) = bodies_of(gm, call)
        path = _path(call.meta.get("nn_module_stack"))
        _inline(gm, call, body, _Renewal(memory={}, old_path=paths.setdefault(body, path), path=path))
    if calls:
        gm.recompile()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Renewal:
    """How the facts about the nodes of a region become those of one of its calls."""

    memory: dict[int, torch.Tensor]
    """By storage of an example value inside, a tensor in the memory that is in its place."""
    old_path: str
    """The path of the module in whose forward the region was traced."""
    path: str
    """The path of the module in whose forward it is called."""

    def meta_of(self, node: fx.Node) -> dict[str, Any]:
        """Return the facts that differ from those of `node`."""
        found: dict[str, Any] = {"example_value": renewed(example_of(node), self.memory)}
        stack: _Stack | None = node.meta.get("nn_module_stack")
        if stack and self.path != self.old_path:
            found["nn_module_stack"] = {key: (self._moved(path), kind) for key, (path, kind) in stack.items()}
        return found

    def _moved(self, path: str) -> str:
        is_inside = f"{path}.".startswith(f"{self.old_path}.")
        return self.path + path.removeprefix(self.old_path) if is_inside else path


def _path(stack: _Stack | None) -> str:
    """Return the path of the innermost module of `stack`, empty if it has none."""
    return [path for path, _ in stack.values()][-1] if stack else ""


def _inline(gm: fx.GraphModule, call: fx.Node, body: fx.GraphModule, renewal: _Renewal) -> None:
    """Replace `call` by copies of the nodes of `body`."""
    inputs, results = body.graph.find_nodes(op="placeholder"), outputs_of(body.graph)
    values: dict[fx.Node, Argument] = dict(zip(inputs, call.args[2:], strict=True))
    taken = {user: results[_place_of(user)] for user in call.users}
    # Results first: an input that is a result too lies in the memory of the input.
    for outer, inner in [*taken.items(), *((outer, inner) for inner, outer in values.items())]:
        if isinstance(inner, fx.Node) and isinstance(outer, fx.Node):
            pairs = zip(tensors_of(inner), tensors_of(outer), strict=False)
            renewal.memory.update((compat.storage_key(old), new) for old, new in pairs if _is_as_large(new, old))
    names = _attributes_of(body, gm)
    with gm.graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op not in ("placeholder", "output"):
                copied = values[node] = gm.graph.node_copy(node, values.__getitem__)
                copied.target = names[str(node.target)] if node.op == "get_attr" else node.target
                copied.meta |= renewal.meta_of(node)
    for user, result in taken.items():
        _replace(user, values[result] if isinstance(result, fx.Node) else result)
        gm.graph.erase_node(user)
    gm.graph.erase_node(call)


def _is_as_large(new: torch.Tensor, old: torch.Tensor) -> bool:
    """Return whether the storage of `new` has the bytes of that of `old`; it has fewer if `old` is a view of a part."""
    new_bytes, old_bytes = (compat.evaluate_size(value.untyped_storage().nbytes(), {}) for value in (new, old))
    return new_bytes == old_bytes


def _place_of(user: fx.Node) -> int:
    """Return which result of a region `user` takes; Dynamo takes each result by itself."""
    place = user.args[1] if user.target is operator.getitem else None
    if not isinstance(place, int):
        raise AssertionError(f"{user.name} takes all results of a nested region together")
    return place


def _replace(node: fx.Node, value: Argument) -> None:
    """Put `value`, a node or a constant, in place of `node` wherever it is read."""
    for user in list(node.users):
        user.args = map_arg(user.args, lambda source: value if source is node else source)
        user.kwargs = map_arg(user.kwargs, lambda source: value if source is node else source)


def _attributes_of(body: fx.GraphModule, gm: fx.GraphModule) -> dict[str, str]:
    """Make what the graph of `body` reads by name attributes of `gm`; return the names there, by the names inside."""
    names: dict[str, str] = {}
    for node in body.graph.find_nodes(op="get_attr"):
        inside = str(node.target)
        value = operator.attrgetter(inside)(body)
        stem = inside.replace(".", "_")
        candidates = itertools.chain([stem], (f"{stem}_{number}" for number in itertools.count()))
        names[inside] = next(name for name in candidates if getattr(gm, name, value) is value)
        setattr(gm, names[inside], value)
    return names
