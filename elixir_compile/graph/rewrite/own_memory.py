"""Ops that copy all the memory behind their first argument, written so that they copy that argument alone.

```text
  slice_scatter(x[8:16], src, ...)     torch's kernel     all of x, of which the result is a view again
                                       here               8 rows
```

The results of `copy`, `slice_scatter`, `select_scatter` and `diagonal_scatter` have the strides of the first argument,
and torch makes them by a copy of its whole storage (`at::clone_preserve_strides`, torch 2.11 to 2.13). So in n
micro-batches, which read slices of whole values, an op took n times its bytes, one on a gathered parameter took its
bucket, and one on rows of a data set the data set. Inductor lowers these ops to kernels that write the result alone.

An argument whose elements share memory, as those of `x.unfold(0, 3, 1)`, goes to torch's kernel: in its result, too, a
write of one element is one of all that share its place.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten


def _overlaps(tensor: torch.Tensor) -> bool:
    """Return whether two elements of `tensor` may share a place in memory."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * max(0, size - 1)
    return False


def _copy(into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if _overlaps(into):
        return _aten.copy.default(into, source, non_blocking)
    return torch.empty_like(into).copy_(source, non_blocking)


def _slice_scatter(into: torch.Tensor, source: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _scattered(_aten.slice_scatter.default, _aten.slice.Tensor, into, source, *args, **kwargs)


def _select_scatter(into: torch.Tensor, source: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _scattered(_aten.select_scatter.default, _aten.select.int, into, source, *args, **kwargs)


def _diagonal_scatter(into: torch.Tensor, source: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _scattered(_aten.diagonal_scatter.default, _aten.diagonal.default, into, source, *args, **kwargs)


def _scattered(
    scatter: Any, part_of: Any, into: torch.Tensor, source: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Return the result of the op `scatter`: a copy of `into` whose part, by the op `part_of`, is `source`."""
    if _overlaps(into):
        return scatter(into, source, *args, **kwargs)
    made = into.clone()
    part_of(made, *args, **kwargs).copy_(source)
    return made


_IN_OWN_MEMORY: dict[Any, Callable[..., torch.Tensor]] = {
    _aten.copy.default: _copy,
    _aten.slice_scatter.default: _slice_scatter,
    _aten.select_scatter.default: _select_scatter,
    _aten.diagonal_scatter.default: _diagonal_scatter,
}


_BY_PLACE = (_aten.as_strided.default, _aten.as_strided_scatter.default)
"""Ops that count places from the start of the memory of a tensor."""


def in_own_memory(target: Any) -> Any:
    """Return a function with the results of the op `target` that allocates no more than these; `target` itself, if it
    does not copy the memory behind an argument. The results are dense, in the order of the strides of that argument."""
    return _IN_OWN_MEMORY.get(target, target)


def with_own_memory(module: fx.GraphModule) -> fx.GraphModule:
    """Return `module`, a graph that runs op by op, with its ops `in_own_memory`, also in the graphs that it runs.

    A graph stays as it is if some op of it counts places from the start of a memory: a result would begin elsewhere.
    """
    nodes = module.graph.nodes
    if any(node.target in _BY_PLACE for node in nodes):
        return module
    bodies = {
        str(node.target): body
        for node in module.graph.find_nodes(op="get_attr")
        if isinstance(body := getattr(module, str(node.target)), fx.GraphModule)
    }
    if not bodies and _IN_OWN_MEMORY.keys().isdisjoint(node.target for node in nodes):
        return module
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        node.target = in_own_memory(node.target)
    made = fx.GraphModule(module, graph)
    for name, body in bodies.items():
        setattr(made, name, with_own_memory(body))
    return made
