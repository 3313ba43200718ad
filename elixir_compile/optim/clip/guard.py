"""Detect gradients that user code changes before a queued update has read them.

    g = p.grad; optimizer.step(); g.zero_()     the next wait for the update raises GradientsChanged

Reading `p.grad` waits for the update, but using a tensor that user code kept does not. The guard compares the version
counter of each gradient before the update, so that no weight is changed, and after it, because a change during the
update may have reached the weights.

torch's foreach ops, which clipping uses, do not increment the version counters of DTensors and of their local tensors.
So once an update is queued, a DTensor gradient gets a subclass that counts the writes of foreach ops.
"""

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, SupportsIndex

import torch
from torch.utils.weak import TensorWeakRef

from elixir_compile import compat
from elixir_compile.errors import GradientsChanged
from elixir_compile.ops.registry import slot_of
from elixir_compile.ops.shards import is_dtensor, own_part

_FOREACH_WRITES = compat.foreach_writes()


class GradientGuard:
    """The gradients that one update will read, held weakly, with the version that each has now; `check` compares."""

    def __init__(self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
        self._seen = [
            (name_of(param), TensorWeakRef(grad), grad._version) for param, grad in zip(params, grads, strict=True)
        ]

    def check(self) -> None:
        """Raise GradientsChanged if a gradient was changed in place."""
        for name, reference, version in self._seen:
            grad = reference()
            if grad is not None and grad._version != version:
                raise GradientsChanged(name, "had its gradient changed before its queued update had read it")


class KeptGradients:
    """Weak references to gradients, to check later whether any of them is still in use."""

    def __init__(self, grads: Iterable[torch.Tensor] = ()) -> None:
        self._seen = [TensorWeakRef(grad) for grad in grads]

    def has_any_of(self, grads: Iterable[torch.Tensor]) -> bool:
        """Return whether `grads` contains any of these gradients."""
        now = {id(grad) for grad in grads}
        return any((grad := reference()) is not None and id(grad) in now for reference in self._seen)


def name_of(param: torch.Tensor) -> str:
    """Return the name of `param` in its model, or `outside of every model`."""
    slot = slot_of(param)
    return "outside of every model" if slot is None else slot.name


def watch(grad: torch.Tensor) -> None:
    """Let foreach ops increment the version of the local tensor of `grad` from now on, if `grad` is a DTensor."""
    if is_dtensor(grad) and not isinstance(grad, _Watched):
        grad.__class__ = _watched(type(grad))


class _Watched:
    """Mixed into the class of a watched DTensor; `usual` is the original class."""

    __slots__ = ()
    usual: type[torch.Tensor]

    @classmethod
    @torch.compiler.disable
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with torch.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
            if func in _FOREACH_WRITES:
                written: Iterable[torch.Tensor] = args[0] if args else (kwargs or {})["self"]
                torch.autograd.graph.increment_version(
                    [own_part(grad) for grad in written if isinstance(grad, _Watched)]
                )
        return found

    # Copies get the original class: pickle cannot import a class made by `_watched`.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with _unwatched(self):
            return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        with _unwatched(self):
            return self.__reduce_ex__(protocol)


@contextmanager
def _unwatched(grad: Any) -> Iterator[None]:
    """Give the watched gradient `grad` its original class inside this context."""
    watched, grad.__class__ = type(grad), grad.usual
    try:
        yield
    finally:
        grad.__class__ = watched


@functools.cache
def _watched(usual: type[torch.Tensor]) -> type[torch.Tensor]:
    return type(usual.__name__, (_Watched, usual), {"usual": usual, "__module__": usual.__module__})
