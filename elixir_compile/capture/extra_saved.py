"""Add extra saved values to a capture, because a later plan of the same capture may save more than the first plan.

The list of saved values is fixed when the joint graph is partitioned, so the extra values are added then.

```text
  forward   return loss, ticket, SPARES..., saved..., sizes..., SPARE SIZES...
  backward  sizes..., SPARE SIZES..., ticket, SPARES..., saved..., tangents...
```

An extra value, a spare, has no reader in the backward, so the step is the same with and without it. A program returns
an empty tensor at each position not kept by its plan, so a spare outside of all plans costs nothing. Spares are

  the storages from which a layer may be recomputed and which the capture did not save (`is_input` groups),
  the caller's inputs of recomputed ops,
  another view of a saved storage, if a recomputed op reads a view to which no saved view of the storage leads.
"""

import torch
from torch import fx

from elixir_compile.analysis.activations import activation_groups
from elixir_compile.analysis.recompute import saved_storages
from elixir_compile.capture.convert import Captured, op_id, ops_of, step_graph, storages_behind
from elixir_compile.capture.joint import TICKET
from elixir_compile.capture.views import by_owner, example_of, is_number, is_view, path_to, view_chain
from elixir_compile.ir import Phase, StepGraph


def add_extra_saved(captured: Captured) -> StepGraph:
    """Add the spares to the forward's outputs and the backward's inputs of `captured`; return its `StepGraph`.

    The `StepGraph` has the sizes of the capture. It is the same with and without spares.
    """
    graph = step_graph(captured, {})
    saved = [node for node in _saved_positions(captured)[1:] if isinstance(node, fx.Node)]
    numbers = _spare_numbers(captured, saved)
    spares = _spare_values(captured, graph, saved, {node.name for node in (*saved, *numbers) if is_number(node)})
    _save(captured, spares, numbers)
    for half in (captured.forward, captured.backward):
        half.graph.lint()
    return graph


def _saved_positions(captured: Captured) -> tuple[fx.Node, ...]:
    return captured.forward.graph.output_node().args[0][captured.num_outputs :]


def _spare_numbers(captured: Captured, saved: list[fx.Node]) -> list[fx.Node]:
    """Return the sizes taken by views of the forward and not saved yet."""
    views = [node for node in captured.forward.graph.nodes if node.op == "call_function" and is_view(node)]
    read = dict.fromkeys(source for view in views for source in view.all_input_nodes if is_number(source))
    return [node for node in read if node not in saved]


def _spare_values(captured: Captured, graph: StepGraph, saved: list[fx.Node], numbers: set[str]) -> list[fx.Node]:
    behind = storages_behind(captured)
    tensors = {node: behind[node][0] for node in behind if _is_tensor(node) and len(behind[node]) == 1}
    first = {name: node for node, name in reversed(tensors.items())}
    groups = [group for group in activation_groups(graph) if group.is_input]
    spares = dict.fromkeys(first[name] for group in groups for name in group.storages)
    given = {tensors[node] for node in captured.forward.graph.find_nodes(op="placeholder") if node in tensors}
    may_be_there = saved_storages(graph) | given | {tensors[node] for node in spares}
    there = by_owner([node for node in (*saved, *spares) if node in tensors])
    for node in _recomputation_inputs(captured, graph):
        if tensors.get(node) in may_be_there and path_to(node, there, numbers) is None:
            spare = [view for view in view_chain(node) if tensors.get(view) == tensors[node]][-1]
            spares[spare] = None
            there.setdefault(view_chain(spare)[-1], []).append(spare)
    return list(spares)


def _recomputation_inputs(captured: Captured, graph: StepGraph) -> list[fx.Node]:
    """Return the inputs of the forward ops that may be recomputed."""
    once = {op.id for op in graph.ops if op.once}
    ops = [node for node in ops_of(captured.forward.graph) if op_id(Phase.FORWARD, node) not in once]
    return list(dict.fromkeys(source for node in ops for source in node.all_input_nodes))


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _save(captured: Captured, spares: list[fx.Node], numbers: list[fx.Node]) -> None:
    """Save `spares` and `numbers`. Numbers come last in the forward's outputs and first in the backward's inputs, as
    AOTAutograd orders them."""
    output = captured.forward.graph.output_node()
    stamp = captured.num_outputs + 1
    values = output.args[0]
    output.args = ((*values[:stamp], *spares, *values[stamp:], *numbers),)
    backward = captured.backward.graph
    placeholders = backward.find_nodes(op="placeholder")
    known = [node for node in placeholders if is_number(node)]
    _take(backward, known[-1] if known else None, numbers)
    _take(backward, next(node for node in placeholders if node.target == TICKET), spares)


def _take(backward: fx.Graph, last: fx.Node | None, nodes: list[fx.Node]) -> None:
    """Add a placeholder to `backward` for each of `nodes`, behind `last`, or at the front if `last` is None."""
    for node in nodes:
        with backward.inserting_before(next(iter(backward.nodes)) if last is None else last.next):
            last = backward.placeholder(node.name)
        last.meta = {**node.meta, "val": example_of(node)}
