"""From the calls of a step that `prepare` was given, and the captured inputs, to the calls of a problem."""

from dataclasses import replace

import torch
from torch import fx

from elixir_compile import compat
from elixir_compile.graph.capture.convert import Captured, storages_behind
from elixir_compile.ir import Calls, StorageId
from elixir_compile.runtime.executor import Executor


def calls_of(executor: Executor, captured: Captured, *, stay: bool) -> Calls:
    """Return the calls of a step that trains `captured`; `stay` if gradients of earlier steps stay."""
    spec = executor.calls.spec
    if spec.num == 1:
        return spec
    return replace(spec, sums_in_fp32=executor.gradients.sums_in_fp32, sums_stay=stay, shared=shared_inputs(captured))


def shared_inputs(captured: Captured) -> tuple[StorageId, ...]:
    """Return the inputs of `captured` that are parts of larger tensors, as a batch cut into micro-batches makes them.

    The inputs of other calls are parts of the same tensors.
    """
    behind = storages_behind(captured)
    found = (name for node in behind if _is_part(node) for name in behind[node])
    return tuple(dict.fromkeys(found))


def _is_part(node: fx.Node) -> bool:
    """Return whether the example of a placeholder has fewer elements than its memory."""
    value = node.meta.get("val")
    if node.op != "placeholder" or not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    nbytes, memory_bytes = value.numel() * value.element_size(), value.untyped_storage().nbytes()
    return compat.evaluate_size(nbytes, {}) < compat.evaluate_size(memory_bytes, {})
