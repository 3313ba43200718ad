"""Gradients that a queued update reads may not change before it has read them.

    g = p.grad; optimizer.step(); g.zero_()     raises GradientsChanged where the update is waited for

Reading `p.grad` waits for the update, but a tensor that somebody kept does not. Its count of changes tells: looked at
before the update reads, so that nothing is lost, and after it, where a change in between may have reached the weights.

torch's foreach ops, as clipping takes them, leave the counts of DTensors and of their parts alone. So a gradient that
ranks share is of a class that counts those writes, from when its update was queued.
"""

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from elixir_compile import compat
from elixir_compile.errors import GradientsChanged
from elixir_compile.ops.registry import slot_of
from elixir_compile.ops.shards import is_dtensor, own_part

_FOREACH_WRITES = compat.foreach_writes()


class GradientGuard:
    """The gradients of one update, as they are now; holds none of them."""

    def __init__(self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
        self._seen = [
            (name_of(param), TensorWeakRef(grad), grad._version) for param, grad in zip(params, grads, strict=True)
        ]

    def check(self) -> None:
        """Raise GradientsChanged where one was changed in place."""
        for name, reference, version in self._seen:
            grad = reference()
            if grad is not None and grad._version != version:
                raise GradientsChanged(name, "had its gradient changed before its queued update had read it")


class KeptGradients:
    """Gradients as they were at one moment, to tell whether they are still there; holds none of them."""

    def __init__(self, grads: Iterable[torch.Tensor] = ()) -> None:
        self._seen = [TensorWeakRef(grad) for grad in grads]

    def is_among(self, grads: Iterable[torch.Tensor]) -> bool:
        """Whether one of them is one of `grads`."""
        now = {id(grad) for grad in grads}
        return any((grad := reference()) is not None and id(grad) in now for reference in self._seen)


def name_of(param: torch.Tensor) -> str:
    """Return what the model calls `param`."""
    slot = slot_of(param)
    return "outside of every model" if slot is None else slot.name


def watch(grad: torch.Tensor) -> None:
    """Let every write to `grad` from now on count as a change of what this rank has of it."""
    if is_dtensor(grad) and not isinstance(grad, _Watched):
        grad.__class__ = _watched(type(grad))


class _Watched:
    """What a DTensor has besides while it is watched; `usual` is the class that it had."""

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
                written = args[0] if args else (kwargs or {})["self"]
                torch.autograd.graph.increment_version([own_part(t) for t in written if isinstance(t, _Watched)])
        return found

    # Copies are not watched: nobody can look up a class that is made here.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with _unwatched(self):
            return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: int) -> Any:
        with _unwatched(self):
            return self.__reduce_ex__(protocol)


@contextmanager
def _unwatched(grad: "_Watched") -> Iterator[None]:
    watched, grad.__class__ = type(grad), grad.usual
    try:
        yield
    finally:
        grad.__class__ = watched


@functools.cache
def _watched(usual: type[torch.Tensor]) -> type[torch.Tensor]:
    return type(usual.__name__, (_Watched, usual), {"usual": usual, "__module__": usual.__module__})
