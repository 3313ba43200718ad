"""Find the storages whose slices of micro-batches are not consecutive pieces of memory.

```text
  [B, T, C]           slice j is bytes j * n to (j + 1) * n of the storage       consecutive
  [T, B, C]           slice j has rows of every t                                scattered
  [B, C] of [B, 2C]   slice j is a part of bytes j * n to (j + 1) * n            consecutive
```
"""

from collections.abc import Mapping

import torch
from torch import fx

from elixir_compile.graph.capture.batch import Walked
from elixir_compile.graph.capture.batch_call import State, States
from elixir_compile.graph.capture.markers import gradient
from elixir_compile.graph.capture.node_facts import outputs_of, source_of, value_of
from elixir_compile.ir import Phase, StorageId


def scattered(
    graph: fx.Graph, phase: Phase, storages: Mapping[fx.Node, tuple[StorageId, ...]], walked: Walked
) -> set[StorageId]:
    """Return the storages of `graph`, the half of `phase`, of which a slice cannot be alone in memory.

    `storages` has the storages of each node, and `walked` the states. A value that the backward returns counts too: the
    caller takes the whole of it.
    """
    found: set[StorageId] = set()
    for node, names in storages.items():
        value, state = value_of(node), walked.states.get(node)
        if isinstance(value, (tuple, list)):
            continue  # its results are nodes of their own
        if len(names) == 1 and node not in walked.apart and _is_consecutive(value, state):
            continue
        found.update(names)
    if phase is Phase.BACKWARD:
        returned = [node for node in outputs_of(graph) if isinstance(node, fx.Node)]
        returned += [source_of(node, 0) for node in graph.find_nodes(op="call_function", target=gradient)]
        found.update(name for node in returned for name in storages.get(node, ()))
    return found


def _is_consecutive(value: object, state: States | None) -> bool:
    if not (isinstance(value, torch.Tensor) and isinstance(state, State) and state.is_each):
        return False
    layout = (*value.shape, *value.stride(), value.storage_offset(), value.untyped_storage().nbytes())
    if not all(isinstance(number, int) for number in layout):
        return False
    rows_apart = value.stride(state.dim)
    last = value.storage_offset() + sum(
        (size - 1) * stride
        for dim, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True))
        if dim != state.dim
    )
    is_outermost = value.shape[state.dim] * rows_apart * value.element_size() == value.untyped_storage().nbytes()
    return is_outermost and last < rows_apart
