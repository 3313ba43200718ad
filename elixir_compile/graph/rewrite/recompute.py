"""Change both halves of a capture to a plan's activations: recompute ops in the backward, drop or offload saved values.

```text
  captured   forward  h = mm(x, w);  g = gelu(h);  return ..., h, g
             backward bwd.mm_1(g, ...);  bwd.gelu_1(h, ...)
  g again    forward  return ..., h, None
             backward re_g = gelu(h);  bwd.mm_1(re_g, ...);  bwd.gelu_1(h, ...)
```

`step.recompute.repeats` says which op is recomputed in front of which op; the functions here copy the nodes. The
`step_graph` of the result is `as_run` of the captured step, op for op.
"""

import copy
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx
from torch.fx.node import map_arg

from elixir_compile import compat
from elixir_compile.base.errors import InvalidPlan
from elixir_compile.graph.capture.convert import Captured, op_id, storages_behind
from elixir_compile.graph.capture.markers import key_of, marker_node, merge_markers, parameter, ticket
from elixir_compile.graph.capture.node_facts import ints_of, is_number, outputs_of, set_outputs, source_of
from elixir_compile.graph.capture.views import by_owner, fresh_value, is_view, ops_of, path_to, undo, view_chain
from elixir_compile.ir import Activations, GroupId, OpId, Phase, Saving, StepGraph, StorageId
from elixir_compile.step.fusion import absorbed_storages
from elixir_compile.step.recompute import AGAIN, repeats, stored, with_repeats

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
