"""Storages, symbolic sizes, schemas, ops on tensors, and what the allocators and the profiler report of memory."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from elixir_compile.compat.symbols import is_jagged


def storage_key(tensor: torch.Tensor) -> int:
    """Return a key of the storage of `tensor`, real or fake; a tensor and its views have the same key.

    `UntypedStorage._cdata`: torch 2.11 to 2.13. Gone: AttributeError at the first capture.
    """
    return tensor.untyped_storage()._cdata


def unwrapped(value: Any) -> Any:
    """Return the tensor inside of `value`, a tensor within `vmap`, `func.grad` or `jvp`; any other value as it is.

    A function transform wraps a tensor once for each level; only the innermost has a storage. A batched tensor inside
    has the dimension of the batch among its own.

    `torch._C._functorch.is_functorch_wrapped_tensor`, `get_unwrapped`: torch 2.11 to 2.13. Gone: AttributeError at the
    first capture.
    """
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]  a module without stubs
    while isinstance(value, torch.Tensor) and functorch.is_functorch_wrapped_tensor(value):
        value = functorch.get_unwrapped(value)
    return value


def memory_address(storage: torch.UntypedStorage) -> int | None:
    """Return the address of the memory of `storage`; None if it stands for memory that is not there.

    The storages of tensors that only trace an op say a device and a size, and have no memory: those that
    `functionalize` makes are such, and tensor subclasses that hold other tensors. While torch captures a graph it makes
    many, and an exception keeps them alive, as a notebook keeps the last one.
    """
    try:
        return storage.data_ptr() or None
    except RuntimeError:  # "Attempted to access the data pointer on an invalid python storage."
        return None


def num_holders(storage: torch.UntypedStorage) -> int:
    """Return how many tensors or other objects hold the memory of `storage`, the caller's `storage` not counted.

    `torch._C._storage_Use_Count`: checked on torch 2.11 and 2.13. Gone: AttributeError if parameters share memory.
    """
    return torch._C._storage_Use_Count(storage._cdata) - 1


def dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return indices and values if `tensor` is sparse, else `tensor` itself, as a list of dense tensors.

    `Tensor._indices`, `_values`, which unlike the public methods do not require a coalesced tensor: torch 2.11 to
    2.13. Gone: AttributeError at the capture of a sparse gradient.
    """
    return [tensor._indices(), tensor._values()] if tensor.layout is torch.sparse_coo else [tensor]


def is_wrapper(value: object) -> bool:
    """Return whether `value` is a tensor that torch takes apart into the tensors inside when it captures a graph, as a
    jagged nested tensor is, or a DTensor.

    `torch.utils._python_dispatch.is_traceable_wrapper_subclass`: torch 2.11 to 2.13. Gone: ImportError at the first
    plan without a run.
    """
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return is_traceable_wrapper_subclass(value)


def rewrapped(value: Any, inside: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a tensor like `value`, of which `is_wrapper` is true, around `inside` of each tensor in it.

    `__tensor_flatten__`, `__tensor_unflatten__`, the protocol of such classes: torch 2.11 to 2.13. Gone: AttributeError
    at a plan without a run of a model with such an input.
    """
    names, context = value.__tensor_flatten__()
    inner = {name: inside(getattr(value, name)) for name in names}
    return type(value).__tensor_unflatten__(inner, context, value.shape, value.stride())


def schema_of(target: object) -> Any:
    """Return the schema of the operator `target`, None if it has none, as Python functions of torch.

    `OpOverload._schema`: torch 2.11 to 2.13. Gone: AttributeError at the first capture, which reads the schema of
    every ATen op.
    """
    return getattr(target, "_schema", None)


def evaluate_size(size: "int | torch.SymInt", values: Mapping[str, int]) -> int:
    """Return `size` as a number, without adding a guard.

    Its symbols have the values in `values`; if `values` lacks a symbol, `size` is the size at the capture.

    `SymNode.expr`, `SymNode.hint`: torch 2.11 to 2.13. Gone: AttributeError at the first dynamic capture.
    """
    if isinstance(size, int):
        return size
    node = size.node
    at = {symbol: values[symbol.name] for symbol in node.expr.free_symbols if symbol.name in values}
    expression = node.expr.subs(at)
    return int(expression) if expression.is_number else int(node.hint)


def expression_of(size: "int | torch.SymInt") -> tuple[str, Mapping[str, int]]:
    """Return `size` as an expression, "" if it is a number or jagged, and its symbols by name with their values at the
    capture.

    `SymNode.expr`, `ShapeEnv.backed_var_to_val` or by its earlier name `var_to_val`: torch 2.11 to 2.13. Gone:
    AttributeError at the first dynamic capture.
    """
    if isinstance(size, int) or is_jagged(size) or size.node.expr.is_number:
        return "", {}
    expression, env = size.node.expr, size.node.shape_env
    known = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
    symbols = sorted(expression.free_symbols, key=lambda symbol: symbol.name)
    return str(expression), {symbol.name: int(known[symbol]) for symbol in symbols if symbol in known}


def real_tensors() -> AbstractContextManager[object]:
    """Return a context in which tensors are real while torch captures a graph around it.

    `torch.utils._python_dispatch._disable_current_modes`: torch 2.11 to 2.13. Gone: ImportError when a state schema
    is probed, a region is timed, or activations of an outstanding forward are offloaded.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def ops_seen_by(see: Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]) -> AbstractContextManager[object]:
    """Return a context in which each op of torch on this thread is replaced by a call of `see(op, args, kwargs)`.

    `torch.utils._python_dispatch.TorchDispatchMode`: torch 2.11 to 2.13. Gone: ImportError at the first capture.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return see(func, args, kwargs or {})

    return Seen()


def foreach_writes() -> frozenset[Any]:
    """Return torch's functions that write each tensor of a list, their first argument.

    `torch._foreach_*_`: torch 2.11 to 2.13. Gone: the guard on gradients misses their writes, so on several ranks
    clipping after an update in the backward raises no error.
    """
    return frozenset(getattr(torch, name) for name in dir(torch) if name.startswith("_foreach_") and name[-1] == "_")


def is_profiling() -> bool:
    """Return whether torch.profiler is on. It cannot be started a second time.

    `torch.autograd._profiler_enabled`: torch 2.11 to 2.13. Gone: AttributeError with `profile_regions` on a CPU.
    """
    return torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]


def with_cpu_blocks(call: Callable[[], Any]) -> tuple[Any, list[int]]:
    """Return the result of `call`, and the bytes of each block that this thread allocated on the CPU in it, in order;
    negative if the block was freed. The thread must have no profiler yet.

    This is the profiler of torch before Kineto: it starts in 0.1 ms, on one thread, whatever profilers others have.

    `torch.autograd._enable_profiler_legacy`, `_disable_profiler_legacy`, `ProfilerConfig`: torch 2.11 to 2.13. Gone:
    ImportError at the first capture.
    """
    from torch._C._profiler import _ExperimentalConfig
    from torch.autograd import (
        ProfilerConfig,  # pyright: ignore[reportPrivateImportUsage]
        ProfilerState,  # pyright: ignore[reportPrivateImportUsage]
        _disable_profiler_legacy,  # pyright: ignore[reportPrivateImportUsage]
        _enable_profiler_legacy,  # pyright: ignore[reportPrivateImportUsage]
    )

    with_memory = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    _enable_profiler_legacy(with_memory)
    try:
        result = call()
    finally:
        threads = _disable_profiler_legacy()
    events = [event for events in threads for event in events if event.kind() == "memory_alloc"]
    return result, [event.cpu_memory_usage() for event in events]


def drop_cublas_workspaces() -> None:
    """Free the workspaces of cuBLAS and cuBLASLt. Each thread allocates new ones at its next matrix product.

    `torch._C._cuda_clearCublasWorkspaces`: torch 2.11 to 2.13. Gone: the workspaces stay, so those of products before
    the first capture count as memory in use instead of as a part of the plan.
    """
    drop = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if drop is not None:
        drop()


def apply_to_tensors(
    kind: type[torch.nn.Module],
    module: torch.nn.Module,
    fn: Callable[[torch.Tensor], torch.Tensor],
    recurse: bool,
) -> torch.nn.Module:
    """Replace each parameter and buffer of `module` by `fn` of it, as a `kind` of module does.

    `nn.Module._apply`, through which `to`, `half` and the like work: torch 2.11 to 2.13. Gone: those refuse a model of
    several ranks that has an optimizer.
    """
    return kind._apply(module, fn, recurse)
