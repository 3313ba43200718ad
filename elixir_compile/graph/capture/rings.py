"""Collectives in captured graphs: what torch's tensor-parallel styles put between the ops of a model.

```text
  y = all_reduce(x, "sum", group)      an op: it allocates y, and sends it twice round the ranks of the group
  z = wait_tensor(y)                   a view of y: torch waits for the sum at once, where z is first read
```

torch starts a collective and waits for it as two ops. No plan puts anything between them: the wait is a view, so it
stays in the region of its collective, and the seconds of both are those of the collective on the lane of compute.
Collectives are never recomputed, because `node_facts.runs_once` says so of every op outside of `aten` and `prims`. So
all ranks of the axis run the same ones in the same order.
"""

import math
from typing import Any

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.graph.capture.node_facts import dense_tensors_of
from elixir_compile.ir.graph import Ring

_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "_dtensor")
_WAIT = "_c10d_functional.wait_tensor.default"


def is_wait(target: Any) -> bool:
    """Return whether the op `target` waits for a collective: its result is the memory of the collective's result."""
    return compat.is_op_overload(target) and target.namespace == "_c10d_functional" and str(target) == _WAIT


def is_collective(node: fx.Node) -> bool:
    """Return whether `node` is a collective of several ranks."""
    is_op = node.op == "call_function" and compat.is_op_overload(node.target)
    return is_op and _group_place(node.target) is not None


def ring_of(node: fx.Node, count: Any) -> Ring | None:
    """Return what `node` sends if it is a collective, else None; `count(size)` is a size as a number and as text."""
    if not is_collective(node):
        return None
    place = _group_place(node.target)
    assert place is not None, "a collective names its group"
    results, given = (sum(map(_nbytes, tensors)) for tensors in (dense_tensors_of(node), _operands(node)))
    passes = 2 if "all_reduce" in str(node.target) else 1
    is_gather = "all_gather" in str(node.target)
    nbytes, size = count(results if is_gather or not _operands(node) else given)
    return Ring(num_ranks=compat.group_size(node.args[place]), nbytes=nbytes, passes=passes, size=size)


def _operands(node: fx.Node) -> list[torch.Tensor]:
    return [tensor for source in node.all_input_nodes for tensor in dense_tensors_of(source)]


def _nbytes(value: torch.Tensor) -> Any:
    return math.prod(value.shape) * value.element_size()


def _group_place(target: Any) -> int | None:
    """Return the place of the group among the arguments of `target`; None if it is no collective."""
    if target.namespace not in _NAMESPACES or is_wait(target):
        return None
    names = [argument.name for argument in compat.schema_of(target).arguments]
    return next((place for place, name in enumerate(names) if name in ("group_name", "group")), None)
