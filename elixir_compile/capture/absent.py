"""Add the parameters of other ranks' graphs to the capture of this rank.

```text
  forward   w = parameter(key)                  no op reads it, but the parameter is gathered all the same
  backward  zeros = full(shape, 0);  gradient(zeros, key)
```

So ranks whose graphs differ gather and reduce the same buckets. If a rank has no gradient of a parameter, the mean over
the ranks counts zeros for it.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.capture.convert import Captured
from elixir_compile.capture.joint import gradient, marker_node, merge_markers, parameter
from elixir_compile.ops.registry import Slot


def trained_keys(captured: Captured) -> frozenset[int]:
    """Return the keys of the parameters whose gradients the backward of `captured` computes."""
    if captured.backward is None:
        return frozenset()
    return frozenset(node.args[1] for node in captured.backward.graph.find_nodes(op="call_function", target=gradient))


def with_absent(captured: Captured, read: Sequence[Slot], trained: Sequence[Slot]) -> Captured:
    """Return a copy of `captured` that also gathers the parameters `read` and has gradients of zeros for `trained`.

    Nothing is added for a parameter that `captured` reads or trains already.
    """
    known = captured.param_names
    forward = _copied(captured.forward)
    example = next(node.meta["val"] for node in forward.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor))
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
            zeros = graph.call_function(torch.ops.aten.full.default, (list(slot.param.shape), 0), options)
            zeros.meta = {"val": _like(slot, example)}
            marker_node(graph, gradient, (zeros, slot.key), {"val": None})


def _like(slot: Slot, example: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor of the full parameter, in the fake mode of `example`."""
    with example.fake_mode:
        return torch.empty(slot.param.shape, dtype=slot.param.dtype, device=slot.device)


def _copied(half: fx.GraphModule) -> fx.GraphModule:
    return compat.graph_module(half, copy.deepcopy(half.graph))
