"""Ask torch about tensors: their storages, symbolic sizes and schemas, what the allocators report of memory, and how a
tensor is made again from its bytes.
"""

import functools
import operator
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch

# ----------------------------------------------------------------------------------------------------------------------
# The symbols of dynamic sizes: which a size has, numbers that stand in for them, and what torch knows of their
# values.


_Size = int | torch.SymInt
_FIRST_STAND_IN = 1 << 60


def is_jagged(value: object) -> bool:
    """Return whether `value` is the length of the jagged dimension of a nested tensor.

    Such a value names the offsets of the tensor, and only stands where a size does: it is no number, it can be compared
    with others of its kind, and no tensor without subclass has it among its sizes.

    `SymNode.is_nested_int`: torch 2.11 to 2.13. Gone: AttributeError at the first dynamic capture.
    """
    return isinstance(value, torch.SymInt) and value.node.is_nested_int()


def symbol_of(size: object) -> str:
    """Return the name of the symbol that `size` is, "" if it is a number, another expression, or anything else.

    `SymNode.expr`: torch 2.11 to 2.13. Gone: AttributeError at the first dynamic capture.
    """
    if not isinstance(size, torch.SymInt) or is_jagged(size):
        return ""
    return size.node.expr.name if size.node.expr.is_symbol else ""


def symbols_in(number: Any) -> frozenset[str]:
    """Return the names of the symbols in `number`, which may also be a symbolic float or a condition.

    `SymNode.expr`: torch 2.11 to 2.13. Gone: AttributeError at the first dynamic capture.
    """
    if not isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)) or is_jagged(number):
        return frozenset()
    return frozenset(symbol.name for symbol in number.node.expr.free_symbols)


def stand_in(size: _Size) -> int:
    """Return `size` as a number, without adding a guard: each symbol counts as a large prime number of its own.

    Two sizes have the same number if and only if they have the same expansion, except by a coincidence that sizes
    of tensors, with factors far below 2**60, cannot have.

    `SymNode.expr`: torch 2.11 to 2.13. Gone: AttributeError at the first dynamic capture.
    """
    return _stand_in(size.node.expr) if isinstance(size, torch.SymInt) else size


@functools.lru_cache(maxsize=4096)
def _stand_in(expression: Any) -> int:
    return int(expression.subs({symbol: _prime(symbol.name) for symbol in expression.free_symbols}))


@functools.lru_cache(maxsize=256)
def _prime(name: str) -> int:
    import sympy

    # Checksums of names are at least 1 apart, so these numbers are at least 2**20 apart: farther than primes are.
    return int(sympy.nextprime(_FIRST_STAND_IN + (zlib.crc32(name.encode()) << 20)))


def is_multiple(size: _Size, symbol: str) -> bool:
    """Return whether `size` is `symbol` times a factor without it.

    `SymNode.expr`: torch 2.11 to 2.13. Gone: AttributeError at the first dynamic capture.
    """
    return isinstance(size, torch.SymInt) and _is_multiple(size.node.expr, symbol)


@functools.lru_cache(maxsize=4096)
def _is_multiple(expression: Any, name: str) -> bool:
    symbol = next((symbol for symbol in expression.free_symbols if symbol.name == name), None)
    return symbol is not None and not (expression / symbol).expand().has(symbol)


def may_have_any_value_from(least: int, size: torch.SymInt) -> bool:
    """Return whether code that is compiled for `size`, a symbol, is right for each of its values from `least` on.

    It is not if torch knows that the value is larger, or that a number divides an expression with the symbol.

    `ShapeEnv.var_to_range`, `ShapeEnv.divisible`: torch 2.11 to 2.13. Gone: AttributeError if micro-batches divide a
    batch of dynamic size.
    """
    symbol, env = size.node.expr, size.node.shape_env
    return int(env.var_to_range[symbol].lower) <= least and not any(
        symbol in known.free_symbols for known in env.divisible
    )


def unknown_number(like: torch.SymInt) -> torch.SymInt:
    """Return a new symbolic number, of which nothing is known, for the captures of `like`.

    `ShapeEnv.create_unbacked_symint`, `ShapeEnv.ignore_fresh_unbacked_symbols`: torch 2.11 to 2.13. Gone:
    AttributeError if an op of a divided batch of dynamic size reads its number of rows.
    """
    env = like.node.shape_env
    with env.ignore_fresh_unbacked_symbols():
        return env.create_unbacked_symint()


# ----------------------------------------------------------------------------------------------------------------------
# A tensor as a view of memory: its layout, and the two bits whose work torch leaves to the readers of the tensor.
#
# torch computes neither `z.conj()` nor, of real tensors, `z.conj().imag`: it returns a view of the memory of `z` with a
# bit, the conjugate bit or the negative bit, and each op that reads the view applies the bit. So the bytes of such a
# tensor are not its values. Two rules follow, and whatever handles memory instead of values keeps one of them:
#
#     bytes go elsewhere and come back     the tensor is made again by its `MemoryView`, which knows both bits
#     an address goes to a kernel, a       the tensor is `settled` first: its values are in its memory
#     collective or a file


class LazyBits(NamedTuple):
    """Which of the two bits a tensor has; its values are those in memory, conjugated and negated as they say."""

    is_conj: bool = False
    is_neg: bool = False


def lazy_bits(tensor: torch.Tensor) -> LazyBits:
    """Return the bits of `tensor`, real or fake."""
    return LazyBits(tensor.is_conj(), tensor.is_neg())


def is_lazy(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` has a bit."""
    return tensor.is_conj() or tensor.is_neg()


def with_bits(tensor: torch.Tensor, bits: LazyBits) -> torch.Tensor:
    """Return the memory of `tensor` as a tensor with `bits`: a view, or `tensor` itself if it has them.

    `torch._neg_view`: torch 2.11 to 2.13. Gone: AttributeError if an activation with a negative bit is offloaded.
    """
    if tensor.is_conj() != bits.is_conj:
        tensor = tensor.conj()
    if tensor.is_neg() != bits.is_neg:
        tensor = torch._neg_view(tensor)  # pyright: ignore[reportPrivateImportUsage]
    return tensor


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of `tensor` in memory without bits: a copy, or `tensor` itself if it has none."""
    return tensor.resolve_conj().resolve_neg()


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the bytes of `storage` as a tensor over the same memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryView:
    """How a tensor reads its storage."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """In elements."""
    bits: LazyBits = field(default_factory=LazyBits)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "MemoryView":
        """Return how `tensor`, whose sizes are numbers, reads its storage."""
        return cls(
            dtype=tensor.dtype,
            shape=tuple(map(int, tensor.shape)),
            stride=tuple(map(int, tensor.stride())),
            offset=int(tensor.storage_offset()),
            bits=lazy_bits(tensor),
        )

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor that reads `storage` in this way."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return with_bits(empty.set_(storage, self.offset, self.shape, self.stride), self.bits)

    def is_consecutive(self, dim: int, nbytes: int) -> bool:
        """Return whether slices along `dim` are consecutive pieces of a storage of `nbytes`."""
        rows_apart = self.stride[dim]
        dims = enumerate(zip(self.shape, self.stride, strict=True))
        last = self.offset + sum((size - 1) * stride for place, (size, stride) in dims if place != dim)
        return self.shape[dim] * rows_apart * self.dtype.itemsize == nbytes and last < rows_apart

    def is_like(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor`, of this shape and dtype, reads its storage in this way."""
        strides = zip(tensor.stride(), self.stride, self.shape, strict=True)
        is_laid_out = all(own == wanted or size == 1 for own, wanted, size in strides)
        return is_laid_out and tensor.storage_offset() == self.offset and lazy_bits(tensor) == self.bits


def like_in_strides(example: torch.Tensor, stride: "Sequence[int | torch.SymInt]", device: torch.device | None = None):
    """Return an uninitialised tensor with the shape, the dtype and the bits of `example`, in the strides `stride`."""
    made = torch.empty_strided(example.shape, stride, dtype=example.dtype, device=device or example.device)
    return with_bits(made, lazy_bits(example))


# ----------------------------------------------------------------------------------------------------------------------
# Storages, symbolic sizes, schemas, ops on tensors, and what the allocators and the profiler report of memory.


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


def is_in_4_bits(value: object) -> bool:
    """Return whether `value` is a quantised `Params4bit` of bitsandbytes: codes, with scales in `quant_state`.

    `Params4bit.quant_state`, `QuantState`: bitsandbytes 0.50. Gone: AttributeError when such a model is prepared.
    """
    kind = type(value)
    if kind.__name__ != "Params4bit" or not kind.__module__.startswith("bitsandbytes."):
        return False
    state = getattr(value, "quant_state", None)
    return state is not None and not getattr(state, "packing_format_for_cpu", False)


_IN_4_BITS = ("absmax", "code")
_IN_4_BITS_TWICE = (*_IN_4_BITS, "offset", "state2.absmax", "state2.code")


def plain_inside(value: Any) -> dict[str, torch.Tensor]:
    """Return the tensors inside of `value`, of which `is_wrapper` is true, however deep, by the path of their
    attributes, such as `scales.codes`; any other tensor itself, by an empty path. Codes in 4 bits are both: the
    parameter itself, and the tensors of its `quant_state`."""
    if is_in_4_bits(value):
        paths = [f"quant_state.{path}" for path in (_IN_4_BITS_TWICE if value.quant_state.nested else _IN_4_BITS)]
        return {"": value, **{path: operator.attrgetter(path)(value) for path in paths}}
    if not is_wrapper(value):
        return {"": value}
    names, _ = value.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]  the protocol of such classes
    inside = ((name, plain_inside(getattr(value, name))) for name in names)
    return {f"{name}.{path}" if path else name: leaf for name, found in inside for path, leaf in found.items()}


_CONSTANTS = ("shape", "dtype", "blocksize", "quant_type")


class In4Bits:
    """Gathered codes of a `Params4bit`, as `Linear4bit` reads it in a trace: Dynamo adds no attribute to a tensor."""

    def __init__(self, context: dict[str, Any], codes: torch.Tensor, *scales: torch.Tensor) -> None:
        self.data, self.quant_state = codes, _state_of(context, *scales)
        self.shape, self.dtype, self.device = codes.shape, codes.dtype, codes.device

    def view(self, *size: int) -> torch.Tensor:
        return self.data.view(*size)

    def t(self) -> torch.Tensor:
        return self.data.t()


def _state_of(context: dict[str, Any], absmax: torch.Tensor, code: torch.Tensor, *second: torch.Tensor) -> Any:
    """Return a `QuantState` of the constants in `context` and of tensors, those of `state2` behind its offset."""
    kind = context["class"]
    if not second:
        return kind(absmax, code=code, **context["state"])
    offset, absmax_of_absmax, code_of_absmax = second
    state2 = kind(absmax_of_absmax, code=code_of_absmax, **context["second"])
    return kind(absmax, code=code, offset=offset, state2=state2, **context["state"])


@dataclass(frozen=True, slots=True)
class Wrapping:
    """How a tensor of which `is_wrapper` or `is_in_4_bits` is true is made of the tensors inside of it, which it does
    not hold.

    `__tensor_flatten__`, `__tensor_unflatten__`, the protocol of such classes: torch 2.11 to 2.13. Gone: AttributeError
    when a model with such a parameter is prepared.
    """

    kind: type[torch.Tensor]
    inside: tuple[tuple[str, "Wrapping | None"], ...]
    """The attributes with the tensors inside, None for a tensor that is no wrapper itself; none for codes in 4 bits."""
    context: Any
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, value: Any) -> "Wrapping | None":
        """Return how `value` is made; None if it is no wrapper."""
        if is_in_4_bits(value):
            state, second = value.quant_state, value.quant_state.state2
            names = ("blocksize", "compress_statistics", "quant_type", "quant_storage", "bnb_quantized")
            context = {
                "param": {name: getattr(value, name) for name in names},
                "state": {name: getattr(state, name) for name in _CONSTANTS},
                "second": {name: getattr(second, name) for name in _CONSTANTS} if state.nested else None,
                "class": type(state),
            }
            return cls(type(value), (), context, value.shape, value.stride())
        if not is_wrapper(value):
            return None
        names, context = value.__tensor_flatten__()
        inside = tuple((name, cls.of(getattr(value, name))) for name in names)
        return cls(type(value), inside, context, value.shape, value.stride())

    def around(self, leaves: Iterator[torch.Tensor]) -> torch.Tensor:
        """Return a tensor made of `leaves`, in the order of `plain_inside`."""
        if not self.inside:
            kind, data = cast("Any", self.kind), next(leaves)
            return kind(data, quant_state=_state_of(self.context, *leaves), **self.context["param"])
        inner = {name: next(leaves) if within is None else within.around(leaves) for name, within in self.inside}
        kind: Any = self.kind
        return kind.__tensor_unflatten__(inner, self.context, self.shape, self.stride)

    def makes(self, value: Any) -> bool:
        """Return whether `value` is made in this way: of the same classes and contexts, and of the same sizes."""
        try:
            return bool(self == Wrapping.of(value))
        except (RuntimeError, ValueError):  # contexts with tensors have no truth value
            return False


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


def fake_tensors() -> AbstractContextManager[object]:
    """Return a context in which new tensors have a shape, a dtype and a device, and no memory. A real tensor that an op
    is given beside them counts as one of them.

    `torch._subclasses.fake_tensor.FakeTensorMode`: torch 2.11 to 2.13. Gone: ImportError when the step of an optimizer
    class that is not element-wise is run at real shapes.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is one of `fake_tensors`, or of a graph that is being captured.

    `torch._subclasses.fake_tensor.FakeTensor`: torch 2.11 to 2.13. Gone: ImportError, as for `fake_tensors`.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def uses_foreach(device: torch.device) -> bool:
    """Return whether optimizers of torch, if nobody chose, run ops on lists of the tensors on `device`.

    They ask for the type of each parameter too, so they never do so with tensors without memory.

    `torch.utils._foreach_utils._get_foreach_kernels_supported_devices`: torch 2.11 to 2.13. Gone: ImportError, as
    for `fake_tensors`.
    """
    from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

    return device.type in _get_foreach_kernels_supported_devices()


def ops_seen_by(see: Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]) -> AbstractContextManager[object]:
    """Return a context in which each op of torch on this thread is replaced by a call of `see(op, args, kwargs)`.

    `torch.utils._python_dispatch.TorchDispatchMode`, `_should_skip_dynamo`: torch 2.11 to 2.13. Gone: ImportError at
    the first capture, and the watch of optimizer classes takes longer.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # callers are outside of captures already, and saying so at each op takes a sixth of the time

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
