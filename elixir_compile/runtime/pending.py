"""Parameters that the host is updating: they look like themselves, and whoever reads one waits.

    begin_update(p)   type(p) becomes a subclass of what it was
    p.sum(), p.data, p.grad, torch.save(p), an optimizer that reads p, ...
                      p's `__torch_function__` waits for the update, type(p) is what it was, and the call goes on
    p.to_local(), p.full_tensor(), a checkpoint of p, ...
                      of a DTensor read this rank's part, which waits too
    p.shape, p.requires_grad, ...
                      are answered at once: an update does not change them

What goes around `__torch_function__` reads too early: the transforms of `torch.func`, handed the parameter itself, and
tensors that shared its memory before the step (`p.detach()`, values of an earlier `state_dict()`). `HybridAdamW.wait()`
is for them. The update itself, and an executor that only wants an address, go around on purpose.
"""

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from elixir_compile import compat
from elixir_compile.ops.registry import slot_of
from elixir_compile.ops.shards import is_dtensor

_Tensor = torch.Tensor
_UNCHANGED: frozenset[Any] = frozenset(
    {
        *(_Tensor.shape.__get__, _Tensor.dtype.__get__, _Tensor.device.__get__, _Tensor.layout.__get__),
        *(_Tensor.ndim.__get__, _Tensor.is_leaf.__get__, _Tensor.requires_grad.__get__, _Tensor.grad_fn.__get__),
        *(_Tensor.is_meta.__get__, _Tensor.is_cuda.__get__, _Tensor.is_cpu.__get__, _Tensor.is_sparse.__get__),
        *(_Tensor._version.__get__, _Tensor.itemsize.__get__, _Tensor.nbytes.__get__),
        *(_Tensor.size, _Tensor.stride, _Tensor.numel, _Tensor.nelement, _Tensor.dim, _Tensor.element_size),
        *(_Tensor.is_floating_point, _Tensor.is_complex, _Tensor.is_contiguous, _Tensor.storage_offset),
    }
)
"""What an update leaves as it is."""


class _Pending:
    """What a parameter has besides while its update is queued; `plain_class` is the class that it goes back to."""

    __slots__ = ()
    plain_class: type[nn.Parameter]

    @classmethod
    @torch.compiler.disable
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _UNCHANGED:
            with torch.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for param in _pending_in((*args, *kwargs.values())):
            await_update(param)
        return func(*args, **kwargs)

    # These ask for the class before they read.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        await_update(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: int) -> Any:
        await_update(self)
        return self.__reduce_ex__(protocol)


@functools.cache
def _pending(plain_class: type[nn.Parameter], *, is_dtensor: bool) -> type[nn.Parameter]:
    own = {"plain_class": plain_class, "__module__": plain_class.__module__}
    reads = compat.awaited_local_tensor(await_update) if is_dtensor else {}
    return type(plain_class.__name__, (_Pending, plain_class), {**own, **reads})


def begin_update(param: nn.Parameter) -> None:
    """Let whoever reads `param` wait, from now on, until `end_update`."""
    if not isinstance(param, _Pending):
        param.__class__ = _pending(type(param), is_dtensor=is_dtensor(param))


def end_update(param: nn.Parameter) -> None:
    """Let everybody read `param` as usual."""
    if isinstance(param, _Pending):
        param.__class__ = type(param).plain_class


def await_update(param: torch.Tensor) -> None:
    """Wait for the update of `param`'s bucket; raises what failed in it."""
    slot = slot_of(param)
    if slot is None:  # its model is gone, which waited
        end_update(param)
    else:
        slot.sink.await_update(slot)


def _pending_in(values: Iterable[Any]) -> Iterator[_Pending]:
    for value in values:
        if isinstance(value, _Pending):
            yield value
        elif isinstance(value, list | tuple):
            yield from _pending_in(value)
        elif isinstance(value, dict):
            yield from _pending_in(value.values())
