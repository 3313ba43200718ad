"""Parameters whose update on the host is queued: every read of such a parameter first waits for the update.

    begin_update(p)   the class of p becomes a subclass of its class
    p.sum(), p.data, p.grad, torch.save(p), an optimizer that reads p, ...
                      p's `__torch_function__` waits for the update, restores the class of p, and makes the call
    p.to_local(), p.full_tensor(), a checkpoint of p, ...
                      if p is a DTensor: they read this rank's shard, which waits too
    p.shape, p.requires_grad, ...
                      are answered at once, because an update does not change them

Code that bypasses `__torch_function__` reads too early: the transforms of `torch.func` if they get the parameter
itself, and tensors that shared its memory before the step (`p.detach()`, values of an earlier `state_dict()`). Users
call `HybridAdamW.wait()` before such reads. The update itself bypasses `__torch_function__` on purpose, and so does an
executor that needs only an address.
"""

import copy
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, SupportsIndex

import torch
from torch import nn

from elixir_compile import compat
from elixir_compile.graph.ops.registry import Slot, slot_of
from elixir_compile.graph.ops.shards import is_dtensor
from elixir_compile.runtime.updates import PendingUpdate

_queued_lock = threading.Lock()
_Tensor = torch.Tensor
_UNCHANGED_PROPERTIES = (
    *("shape", "dtype", "device", "layout", "ndim", "is_leaf", "requires_grad", "grad_fn"),
    *("is_meta", "is_cuda", "is_cpu", "is_sparse", "_version", "itemsize", "nbytes"),
)
_UNCHANGED: frozenset[Any] = frozenset(
    {
        *(getattr(_Tensor, name).__get__ for name in _UNCHANGED_PROPERTIES),
        *(_Tensor.size, _Tensor.stride, _Tensor.numel, _Tensor.nelement, _Tensor.dim, _Tensor.element_size),
        *(_Tensor.is_floating_point, _Tensor.is_complex, _Tensor.is_contiguous, _Tensor.storage_offset),
    }
)
"""Attributes and methods that an update does not change; reading one does not wait."""


class _Awaited:
    """Mixed into the class of a parameter while its update is queued; `plain_class` is the class without it."""

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
        for param in _awaited_in((*args, *kwargs.values())):
            await_update(param)
        return func(*args, **kwargs)

    # `copy` and `pickle` look up these methods on the class, so `__torch_function__` would not see the call.

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        await_update(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self: Any, protocol: SupportsIndex) -> Any:
        await_update(self)
        return self.__reduce_ex__(protocol)


@functools.cache
def _awaited(plain_class: type[nn.Parameter], *, is_dtensor: bool) -> type[nn.Parameter]:
    own = {"plain_class": plain_class, "__module__": plain_class.__module__}
    reads = compat.awaited_local_tensor(await_update) if is_dtensor else {}
    return type(plain_class.__name__, (_Awaited, plain_class), {**own, **reads})


_UPDATES = "_elixir_updates"
"""The attribute of a parameter with its queued updates, which a reader finds if the model is gone."""


def begin_update(param: nn.Parameter, updates: Sequence[PendingUpdate]) -> None:
    """Make every read of `param` wait for `updates`, until `end_update`."""
    vars(param)[_UPDATES] = updates
    if not isinstance(param, _Awaited):
        param.__class__ = _awaited(type(param), is_dtensor=is_dtensor(param))


def end_update(param: torch.Tensor) -> None:
    """Make reads of `param` immediate again."""
    if isinstance(param, _Awaited):
        plain_class: Any = param.plain_class
        param.__class__ = plain_class
        vars(param).pop(_UPDATES, None)


def await_update(param: torch.Tensor) -> None:
    """Wait for the update of `param`'s bucket. Raises the exception of the update if it failed."""
    slot = slot_of(param)
    if slot is not None:
        slot.sink.buckets.await_update(slot)
        return
    # The model is gone, but its updates go on: the worker has them, or copies to the host are under way.
    try:
        for update in vars(param).get(_UPDATES, ()):
            update.wait()
    finally:
        end_update(param)


def _awaited_in(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, _Awaited):
            yield value
        elif isinstance(value, list | tuple):
            yield from _awaited_in(value)
        elif isinstance(value, dict):
            yield from _awaited_in(value.values())


class QueuedUpdates:
    """The queued updates of the parameters of one bucket. `wait` is thread-safe."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        """`slots` are the slots of the bucket."""
        self._slots = slots
        self._updates: tuple[PendingUpdate, ...] = ()
        self.waiting: Callable[[], AbstractContextManager[object]] = nullcontext
        """Makes a block in which the calling thread waits, so that a ledger can time it."""
        self._let_compute_wait: Callable[[], None] | None = None
        """Makes compute of the calling thread wait for the copies of the last update to the device; None if it made
        none. Kept after the first wait, because other readers compute on other streams."""

    @property
    def is_empty(self) -> bool:
        """Whether there is no queued update for which no thread has waited yet."""
        return not self._updates

    def add(self, update: PendingUpdate, params: Iterable[nn.Parameter]) -> None:
        """Make every read of `params` wait for `update`."""
        params = list(params)
        with _queued_lock:
            self._updates = (*self._updates, update)
            for param in params:
                begin_update(param, self._updates)

    def check(self) -> None:
        """Raise the exception of a queued update if one has already failed; return at once otherwise."""
        if self._updates and all(update.is_done for update in self._updates):
            self.wait()

    def follow(self, work: Callable[[], None]) -> bool:
        """Make the update worker call `work` right after the last queued update, as a part of it.

        Return False, without calling `work`, if no update is queued or the last update is done already.
        """
        updates = self._updates
        return bool(updates) and updates[-1].then(work)

    def join(self) -> None:
        """Wait until the worker is done with the queued updates; `wait`, on another thread, says whether one failed."""
        for update in self._updates:
            update.join()

    def wait(self) -> None:
        """Wait until no update is queued, and make compute of this thread wait for results on their way to the device.

        Raises the exception of a failed update.
        """
        while updates := self._updates:
            try:
                for update in updates:
                    with nullcontext() if update.is_done else self.waiting():
                        update.wait()
            finally:
                with _queued_lock:
                    # Another thread may have ended this wait already, and the next step may have queued more updates.
                    if self._updates is updates and all(update.is_done for update in updates):
                        # First, because a `wait` of another thread reads both without the lock: `_updates` before it.
                        self._let_compute_wait = updates[-1].let_compute_wait
                        self._updates = ()
                        for slot in self._slots:
                            end_update(slot.param)
        if self._let_compute_wait is not None:
            self._let_compute_wait()
