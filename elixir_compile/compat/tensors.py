"""Storages, sizes and the ops that run on tensors."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


def storage_key(tensor: torch.Tensor) -> int:
    """Return what identifies the storage of `tensor`, fake ones too: views share it.

    `UntypedStorage._cdata`, torch 2.11 to 2.13. Gone: AttributeError at the first capture.
    """
    return tensor.untyped_storage()._cdata


def num_holders(storage: torch.UntypedStorage) -> int:
    """Return how many tensors, or others, hold the memory of `storage`, which the caller alone has got from one.

    `torch._C._storage_Use_Count`, checked on torch 2.13. Gone: AttributeError if parameters share memory.
    """
    return torch._C._storage_Use_Count(storage._cdata) - 1


def dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the dense tensors that `tensor` is made of: indices and values of a sparse one, else itself.

    `Tensor._indices`, `_values`, which do not ask for a coalesced tensor as the public ones do, torch 2.11 to 2.13.
    Gone: AttributeError at the capture of a sparse gradient.
    """
    return [tensor._indices(), tensor._values()] if tensor.layout is torch.sparse_coo else [tensor]


def evaluate_size(size: "int | torch.SymInt", values: Mapping[str, int]) -> int:
    """Return `size` with its symbols replaced by `values`, or by the hints of the capture, without adding a guard.

    `SymNode.expr` and `SymNode.hint`, torch 2.11 to 2.13. Gone: AttributeError at the first dynamic capture.
    """
    if isinstance(size, int):
        return size
    node = size.node
    at = {symbol: values[symbol.name] for symbol in node.expr.free_symbols if symbol.name in values}
    expression = node.expr.subs(at)
    return int(expression) if expression.is_number else int(node.hint)


def expression_of(size: "int | torch.SymInt") -> tuple[str, Mapping[str, int]]:
    """Return `size` as an expression, "" when it is a number, and its symbols by name with their values in the capture.

    `SymNode.expr`; `ShapeEnv.backed_var_to_val`, which older torch calls `var_to_val`. Gone: AttributeError as above.
    """
    if isinstance(size, int) or size.node.expr.is_number:
        return "", {}
    expression, env = size.node.expr, size.node.shape_env
    known = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
    symbols = sorted(expression.free_symbols, key=lambda symbol: symbol.name)
    return str(expression), {symbol.name: int(known[symbol]) for symbol in symbols if symbol in known}


def real_tensors() -> AbstractContextManager[object]:
    """Return a context in which tensors are real while torch captures a graph around it.

    `torch.utils._python_dispatch._disable_current_modes`, torch 2.11 to 2.13. Gone: ImportError at the first import.
    """
    return _disable_current_modes()


def ops_seen_by(see: Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]) -> AbstractContextManager[object]:
    """Return a context in which `see(op, args, kwargs)` takes the place of each op of torch on this thread.

    `torch.utils._python_dispatch.TorchDispatchMode`, torch 2.11 to 2.13. Gone: ImportError at the first import.
    """

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return see(func, args, kwargs or {})

    return Seen()


def foreach_writes() -> frozenset[Any]:
    """Return torch's functions that write to each tensor of a list, their first argument.

    `torch._foreach_*_`, torch 2.11 to 2.13. Gone: on several ranks, clipping after an update in the backward passes.
    """
    return frozenset(getattr(torch, name) for name in dir(torch) if name.startswith("_foreach_") and name[-1] == "_")
