"""Add values to a capture that its own step does not need: extra saved values, and parameters of other ranks' graphs.

`add_extra_saved`: the list of saved values is fixed when the joint graph is partitioned, but a later plan of the same
capture may save more than the first plan. So the extra values, the spares, are added then.

```text
  forward   return loss, ticket, SPARES..., saved..., sizes..., SPARE SIZES...
  backward  sizes..., SPARE SIZES..., ticket, SPARES..., saved..., tangents...
```

A spare has no reader in the backward, so the step is the same with and without it. A program returns an empty tensor
at each position not kept by its plan, so a spare outside of all plans costs nothing. Spares are

  the storages from which a layer may be recomputed and which the capture did not save (`is_input` groups),
  the caller's inputs of recomputed ops,
  another view of a saved storage, if a recomputed op reads a view to which no saved view of the storage leads.

`with_absent`: ranks whose graphs differ gather and reduce the same buckets.

```text
  forward   w = parameter(key)                  no op reads it, but the parameter is gathered all the same
  backward  zeros = full(shape, 0);  gradient(zeros, key)
```

If a rank has no gradient of a parameter, the mean over the ranks counts zeros for it.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.graph.capture.convert import Captured, op_id, step_graph, storages_behind
from elixir_compile.graph.capture.input_sizes import add_numbers, add_placeholders
from elixir_compile.graph.capture.markers import TICKET, gradient, key_of, marker_node, merge_markers, parameter
from elixir_compile.graph.capture.node_facts import has_tensor, is_number, outputs_of, set_outputs, tensor_of
from elixir_compile.graph.capture.rewire import by_owner, is_view, ops_of, path_to, view_chain
from elixir_compile.graph.ops.registry import Slot
from elixir_compile.ir import Phase, StepGraph
from elixir_compile.step.as_run import saved_storages
from elixir_compile.step.liveness import activation_groups


def add_extra_saved(captured: Captured) -> StepGraph:
    """Add the spares to the forward's outputs and the backward's inputs of `captured`; return its `StepGraph`.

    The `StepGraph` has the sizes of the capture. It is the same with and without spares.
    """
    graph = step_graph(captured, {})
    saved = [node for node in captured.saved[1:] if isinstance(node, fx.Node)]
    numbers = _spare_numbers(captured, saved)
    spares = _spare_values(captured, graph, saved, {node.name for node in (*saved, *numbers) if is_number(node)})
    _save(captured, spares, numbers)
    for half in (captured.forward, captured.backward_module):
        half.graph.lint()
    return graph


def _spare_numbers(captured: Captured, saved: list[fx.Node]) -> list[fx.Node]:
    """Return the sizes taken by views of the forward and not saved yet."""
    views = [node for node in captured.forward.graph.nodes if node.op == "call_function" and is_view(node)]
    read = dict.fromkeys(source for view in views for source in view.all_input_nodes if is_number(source))
    return [node for node in read if node not in saved]


def _spare_values(captured: Captured, graph: StepGraph, saved: list[fx.Node], numbers: set[str]) -> list[fx.Node]:
    behind = storages_behind(captured)
    tensors = {node: behind[node][0] for node in behind if has_tensor(node) and len(behind[node]) == 1}
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


def _save(captured: Captured, spares: list[fx.Node], numbers: list[fx.Node]) -> None:
    """Save `spares` and `numbers`. Numbers come last in the forward's outputs and first in the backward's inputs, as
    AOTAutograd orders them."""
    values, behind_ticket = outputs_of(captured.forward.graph), captured.num_outputs + 1
    set_outputs(captured.forward.graph, (*values[:behind_ticket], *spares, *values[behind_ticket:], *numbers))
    backward = captured.backward_module.graph
    add_numbers(backward, numbers)
    add_placeholders(backward, backward.find_nodes(op="placeholder", target=TICKET)[0], spares)


def trained_keys(captured: Captured) -> frozenset[int]:
    """Return the keys of the parameters whose gradients the backward of `captured` computes."""
    if captured.backward is None:
        return frozenset()
    return frozenset(key_of(node) for node in captured.backward.graph.find_nodes(op="call_function", target=gradient))


def with_absent(captured: Captured, read: Sequence[Slot], trained: Sequence[Slot]) -> Captured:
    """Return a copy of `captured` that also gathers the parameters `read` and has gradients of zeros for `trained`.

    Nothing is added for a parameter that `captured` reads or trains already.
    """
    known = captured.param_names
    forward = _copied(captured.forward)
    example = next(tensor_of(node) for node in forward.graph.nodes if has_tensor(node))
    output = forward.graph.output_node()
    for slot in read:
        if slot.key not in known:
            with forward.graph.inserting_before(output):
                marker_node(forward.graph, parameter, (slot.key,), {"val": _like(slot, example)})
    merge_markers(forward.graph)
    backward = None if captured.backward is None else _copied(captured.backward)
    if backward is not None:
        own = trained_keys(captured)
        _add_zeros(backward, [slot for slot in trained if slot.key not in own], example)
    for half in (forward, backward):
        if half is not None:
            half.graph.lint()
    names = {slot.key: slot.name for slot in (*read, *trained)}
    return replace(captured, forward=forward, backward=backward, param_names={**known, **names})


def _add_zeros(backward: fx.GraphModule, slots: Sequence[Slot], example: torch.Tensor) -> None:
    """Add the gradients of zeros at the end of `backward`, because earlier they would only take memory."""
    graph = backward.graph
    for slot in slots:
        with graph.inserting_before(graph.output_node()):
            options = {"dtype": slot.param.dtype, "device": slot.device, "pin_memory": False}
            zeros = graph.call_function(torch.ops.aten.full.default, (list(slot.shape), 0), options)
            zeros.meta = {"val": _like(slot, example)}
            marker_node(graph, gradient, (zeros, slot.key), {"val": None})


def _like(slot: Slot, example: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor of the full parameter, in the fake mode of `example`."""
    with compat.own_fake_mode(example):
        return torch.empty(slot.shape, dtype=slot.param.dtype, device=slot.device)


def _copied(half: fx.GraphModule) -> fx.GraphModule:
    return compat.graph_module(half, copy.deepcopy(half.graph))
