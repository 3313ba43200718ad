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

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.graph.capture.captured import Captured, copied
from elixir_compile.graph.capture.convert import op_id, step_graph, storages_behind
from elixir_compile.graph.capture.joint import add_numbers, add_placeholders
from elixir_compile.graph.capture.node_facts import (
    TICKET,
    gradient,
    has_tensor,
    is_number,
    key_of,
    marker_node,
    merge_markers,
    outputs_of,
    parameter,
    set_outputs,
    tensor_of,
)
from elixir_compile.graph.capture.rewire import by_owner, is_view, ops_of, path_to, view_chain
from elixir_compile.graph.ops.registry import Slot
from elixir_compile.ir import Phase, StepGraph
from elixir_compile.step.as_run import saved_storages
from elixir_compile.step.liveness import activation_groups


def add_extra_saved(captured: Captured) -> StepGraph:
    """Add the spares to the forward's outputs and the backward's inputs of `captured`; return its `StepGraph`.

    The `StepGraph` has the sizes of the capture. It is the same with and without spares.
    """
    graph, forward, backward = step_graph(captured, {}), captured.forward.graph, captured.backward_module.graph
    saved = [node for node in captured.saved[1:] if isinstance(node, fx.Node)]
    # The sizes taken by views of the forward and not saved yet.
    views = [node for node in forward.nodes if node.op == "call_function" and is_view(node)]
    read = dict.fromkeys(source for view in views for source in view.all_input_nodes if is_number(source))
    numbers = [node for node in read if node not in saved]
    spares = _spare_values(captured, graph, saved, {node.name for node in (*saved, *numbers) if is_number(node)})
    # Numbers come last in the forward's outputs and first in the backward's inputs, as AOTAutograd orders them.
    values, behind_ticket = outputs_of(forward), captured.num_outputs + 1
    set_outputs(forward, (*values[:behind_ticket], *spares, *values[behind_ticket:], *numbers))
    add_numbers(backward, numbers)
    add_placeholders(backward, backward.find_nodes(op="placeholder", target=TICKET)[0], spares)
    for half in (forward, backward):
        half.lint()
    return graph


def _spare_values(captured: Captured, graph: StepGraph, saved: list[fx.Node], numbers: set[str]) -> list[fx.Node]:
    forward, behind = captured.forward.graph, storages_behind(captured)
    tensors = {node: behind[node][0] for node in behind if has_tensor(node) and len(behind[node]) == 1}
    first = {name: node for node, name in reversed(tensors.items())}
    groups = [group for group in activation_groups(graph) if group.is_input]
    spares = dict.fromkeys(first[name] for group in groups for name in group.storages)
    given = {tensors[node] for node in forward.find_nodes(op="placeholder") if node in tensors}
    may_be_there = saved_storages(graph) | given | {tensors[node] for node in spares}
    there = by_owner([node for node in (*saved, *spares) if node in tensors])
    once = {op.id for op in graph.ops if op.once}
    repeatable = [node for node in ops_of(forward) if op_id(Phase.FORWARD, node) not in once]
    for node in dict.fromkeys(source for op in repeatable for source in op.all_input_nodes):
        if tensors.get(node) in may_be_there and path_to(node, there, numbers) is None:
            spare = [view for view in view_chain(node) if tensors.get(view) == tensors[node]][-1]
            spares[spare] = None
            there.setdefault(view_chain(spare)[-1], []).append(spare)
    return list(spares)


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
    forward = copied(captured.forward)
    backward = None if captured.backward is None else copied(captured.backward)
    example = next(tensor_of(node) for node in forward.graph.nodes if has_tensor(node))

    def like(slot: Slot) -> torch.Tensor:
        with compat.own_fake_mode(example):
            return torch.empty(slot.shape, dtype=slot.param.dtype, device=slot.device)

    for slot in read:
        if slot.key not in known:
            with forward.graph.inserting_before(forward.graph.output_node()):
                marker_node(forward.graph, parameter, (slot.key,), {"val": like(slot)})
    merge_markers(forward.graph)
    own = trained_keys(captured)
    for slot in trained:
        if backward is not None and slot.key not in own:
            # At the end of the backward, because earlier zeros would only take memory.
            with backward.graph.inserting_before(backward.graph.output_node()):
                options = {"dtype": slot.param.dtype, "device": slot.device, "pin_memory": False}
                zeros = backward.graph.call_function(torch.ops.aten.full.default, (list(slot.shape), 0), options)
                zeros.meta = {"val": like(slot)}
                marker_node(backward.graph, gradient, (zeros, slot.key), {"val": None})
    for half in (forward, backward):
        if half is not None:
            half.graph.lint()
    names = {slot.key: slot.name for slot in (*read, *trained)}
    return replace(captured, forward=forward, backward=backward, param_names={**known, **names})
