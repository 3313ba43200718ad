"""Detect gradients that change between an update and `step()`, overflow on other ranks, and optimizers that update no
planned model although they should.
"""

import copy
import functools
import gc
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, SupportsIndex
from weakref import WeakSet

import torch
from torch import distributed, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from elixir_compile import compat
from elixir_compile.base.errors import GradientsChanged, NoGraphCaptured
from elixir_compile.graph.capture.modules import model_of
from elixir_compile.graph.ops.registry import slot_of
from elixir_compile.graph.ops.shards import by_mesh, cut_axes, is_dtensor, own_grad, own_shard, sum_over_shards
from elixir_compile.optim.rule import GRAD_SCALE, snapshot
from elixir_compile.runtime.distributed.errors import OverflowUnseen
from elixir_compile.runtime.published import GradientSnapshot

# ----------------------------------------------------------------------------------------------------------------------
# Detect gradients that change between the update that reads them and `step()`, and overflow on other ranks.
#
#     GradientGuard   g = p.grad; optimizer.step(); g.zero_()   the next wait for the update raises GradientsChanged
#     EarlyUpdates    an update in the backward -> `note`; `step()` -> `check`: same gradients, unchanged, and the same
#                     hyperparameters, else GradientsChanged
#     Overflow        all ranks skip a step if any rank has gradients that are not finite
#
# Reading `p.grad` waits for the update, but using a tensor that user code kept does not. The guard compares the version
# counter of each gradient before the update, so that no weight is changed, and after it, because a change during the
# update may have reached the weights.
#
# torch's foreach ops, which clipping uses, do not increment the version counters of DTensors and of their local
# tensors. So once an update is queued, a DTensor gradient gets a subclass that counts the writes of foreach ops.


_FOREACH_WRITES = compat.foreach_writes()


class GradientGuard:
    """The gradients of an update, as they were when it was queued."""

    def __init__(self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
        self._seen = [(name_of(param), GradientSnapshot.of(grad)) for param, grad in zip(params, grads, strict=True)]

    def check(self) -> None:
        """Raise GradientsChanged if a gradient was changed in place."""
        for name, seen in self._seen:
            if seen.was_written():
                raise GradientsChanged(name, "had its gradient changed before its queued update had read it")


class GradientSnapshots:
    """The gradients of parameters at one moment, to check later whether any parameter still has its own."""

    def __init__(self, params: Iterable[torch.Tensor] = ()) -> None:
        self._seen = [(param, GradientSnapshot.of(param.grad)) for param in params if param.grad is not None]

    def any_remains(self) -> bool:
        """Return whether the gradient of any of the parameters is the same tensor, written or not."""
        return any(snapshot.is_of(param.grad) for param, snapshot in self._seen)


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
        usual: Any = super()
        found = usual.__torch_function__(func, types, args, kwargs or {})
        with torch.DisableTorchFunctionSubclass():
            if func in _FOREACH_WRITES:
                written: Iterable[torch.Tensor] = args[0] if args else (kwargs or {})["self"]
                torch.autograd.graph.increment_version(
                    [own_shard(grad) for grad in written if isinstance(grad, _Watched)]
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


_UPDATED = "was updated in its backward, and then"


@dataclass(frozen=True, slots=True)
class _Note:
    """The inputs of an update: gradient and hyperparameters."""

    grad: GradientSnapshot
    group: Mapping[str, Any]


class EarlyUpdates:
    """The updates that an optimizer queued in a backward, until the next `step()`."""

    def __init__(self) -> None:
        self._notes: dict[nn.Parameter, _Note] = {}
        self._overwritten: dict[nn.Parameter, GradientSnapshot] = {}
        """By parameter, the gradient of an update whose result a loaded state dict has replaced."""

    def refuse(self, because: str) -> None:
        """Raise GradientsChanged if a parameter was updated since the last step; forget all updates."""
        notes, self._notes = self._notes, {}
        for param in notes:
            raise GradientsChanged(name_of(param), f"{_UPDATED} {because}")

    def require_first(self, params: Sequence[nn.Parameter]) -> None:
        """Raise GradientsChanged, and forget all, if any of `params` was updated since the last step."""
        for param in params:
            note = self._notes.get(param)
            if note is not None:
                self._notes = {}
                is_added_to = note.grad.is_of(param.grad)
                because = "another backward pass, or code outside the graph, added to it"
                dropped = "its gradient was dropped without a `step()`, so the update is in the weights already"
                raise GradientsChanged(name_of(param), f"{_UPDATED} {because if is_added_to else dropped}")

    def forget_dropped(self) -> None:
        """Forget notes of parameters whose gradient was dropped; called before the first step, when no update runs."""
        self._notes = {param: note for param, note in self._notes.items() if note.grad.is_of(param.grad)}

    def overwrite(self, *, were_updated: bool) -> None:
        """Forget all updates because a state dict is being loaded.

        If `were_updated`, the next `check` raises for each parameter that still has the gradient of its update.
        """
        notes, self._notes = self._notes, {}
        if were_updated:
            self._overwritten.update((param, note.grad) for param, note in notes.items())

    def note(self, params: Sequence[nn.Parameter], group: Mapping[str, Any]) -> None:
        """Record the gradients and hyperparameters that an update of `params`, which are in `group`, reads."""
        now = snapshot(group) if params else {}
        for param in params:
            if param.grad is not None:
                watch(param.grad)
                self._notes[param] = _Note(GradientSnapshot.of(param.grad), now)

    def check(self, groups: Sequence[Mapping[str, Any]]) -> frozenset[nn.Parameter]:
        """Return the parameters that were updated in the backward, and forget them.

        Raises GradientsChanged if a gradient or a hyperparameter differs from the value at the update.
        """
        notes, self._notes = self._notes, {}
        overwritten, self._overwritten = self._overwritten, {}
        for param, grad in overwritten.items():
            if grad.is_of(param.grad):
                raise GradientsChanged(name_of(param), f"{_UPDATED} a state dict was loaded before `step()`")
        if not notes:
            return frozenset()
        for group in groups:
            now = snapshot(group)
            for param in group["params"]:
                note = notes.get(param)
                if note is None:
                    continue
                if not note.grad.is_current(param.grad):
                    raise GradientsChanged(name_of(param), f"{_UPDATED} its gradient was changed")
                if not _is_same(now, note.group):
                    raise GradientsChanged(name_of(param), f"{_UPDATED} {_difference(now, note.group)}")
        return frozenset(notes)


def _difference(now: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    is_clipped = now.get(GRAD_SCALE, 1.0) != before.get(GRAD_SCALE, 1.0)
    return "`clip_grad_norm_` scaled its gradient" if is_clipped else "a hyperparameter of its group was changed"


def _is_same(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(value, second[name])
        if isinstance(value, torch.Tensor) and isinstance(second[name], torch.Tensor)
        else value == second[name]
        for name, value in first.items()
    )


class Overflow:
    """The last overflow on which all ranks agreed, for an optimizer: then all ranks skip the step.

    ```text
                GradScaler.step(optimizer)                                          GradScaler.update()
      rank 0    asks the optimizer: agrees, an element becomes inf    finds inf    halves the scale
      rank 1    asks the optimizer: agrees, has inf already            finds inf    halves the scale
    ```

    GradScaler checks the gradients of its own rank and does not tell other ranks. For DTensors torch asks the other
    ranks, but only if the first gradient of a device and dtype is sharded; a small replicated gradient in front hides
    the others. The element that becomes inf belongs to a step that all ranks skip.
    """

    def __init__(self) -> None:
        self._seen = GradientSnapshots()
        """All gradients of this rank, if some rank had a gradient that was not finite; else empty."""

    @torch.no_grad()
    def spread(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Set a gradient element to infinity on each rank if any rank has overflow. A collective of all ranks."""
        params = [param for group in groups for param in group["params"] if param.grad is not None]
        self._seen = GradientSnapshots()
        num_overflows = 0.0
        for sharded in by_mesh(params):
            ends: dict[torch.device, list[torch.Tensor]] = {}
            for grad in map(own_grad, sharded):
                if grad.numel():
                    # 1.1 ms for 10 M float16 elements on a CPU; a norm takes 130 ms. With a NaN, both min and max are.
                    ends.setdefault(grad.device, []).extend(torch.aminmax(grad))
            # A single synchronisation for each device, and a collective for each mesh.
            has_overflow = not all(bool(torch.stack(values).isfinite().all()) for values in ends.values())
            axes = sorted({axis for param in sharded for axis in cut_axes(param)})
            num_overflows += sum_over_shards(has_overflow, sharded[0], axes)
        if not num_overflows:
            return
        self._seen = GradientSnapshots(params)
        marked = next((param for param in params if own_grad(param).numel()), None)
        if marked is not None:
            grad = own_grad(marked)
            grad[(0,) * grad.dim()] = torch.inf
            torch.autograd.graph.increment_version(marked.grad)

    def require_skipped(self) -> None:
        """Raise OverflowUnseen if `step()` runs although a gradient was not finite on some rank."""
        if self._seen.any_remains():
            raise OverflowUnseen([distributed.get_rank()])


# ----------------------------------------------------------------------------------------------------------------------
# Warn of an optimizer whose first step updates no model that Elixir planned, although it should.


_captured = WeakIdKeyDictionary()
"""The parameters that captured graphs read as plain inputs: no plan can move them, so they have no slot."""


def warn_if_unplanned(optimizer: Optimizer) -> None:
    """Warn if no parameter of `optimizer` belongs to a compiled or prepared model; called by its first `step()`."""
    if any(slot_of(param) is not None for param in _params(optimizer)):
        return
    warnings.warn(
        NoGraphCaptured(
            f"no parameter of this {type(optimizer).__name__} belongs to a model that Elixir compiled or prepared, "
            "so nothing is planned or offloaded. Call what `torch.compile(model, backend='elixir')` returns, "
            "not `model`. If torch has logged that `recompile_limit` was reached, call `torch.compiler.reset()` "
            "before compiling another model of the same class. Of a module of torch itself, such as `nn.Sequential`, "
            "Dynamo captures nothing if it is compiled in place, or around DistributedDataParallel: give the wrapper "
            "what `torch.compile(model, backend='elixir')` returns."
        ),
        stacklevel=4,
    )


def note_captured(inputs: Iterable[object]) -> None:
    """Note `inputs`, those of a graph that was captured: an optimizer of a parameter among them needs no warning."""
    for value in inputs:
        if isinstance(value, nn.Parameter):
            _captured[value] = True


def watch_plain_optimizers(backend: Callable[..., Any], hybrid: type[Optimizer]) -> None:
    """From now on, warn after the first step of each optimizer that is no `hybrid` one, if nothing of its model was
    captured although `torch.compile` was to compile the model by `backend`."""
    seen: WeakSet[Optimizer] = WeakSet()
    compiled = _Compiled(backend)

    def inspect(optimizer: Optimizer, args: object, kwargs: object) -> None:
        if optimizer in seen:
            return
        seen.add(optimizer)
        params = _params(optimizer)
        if "torch._dynamo" not in sys.modules:
            return  # nothing was compiled in this process
        is_asked = not isinstance(optimizer, hybrid) and not any(
            slot_of(param) is not None or param in _captured for param in params
        )
        if is_asked and any(map(compiled.has, params)):
            warn_if_unplanned(optimizer)

    hook: Any = torch.compiler.disable(inspect)
    register_optimizer_step_post_hook(hook)


def _params(optimizer: Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


class _Compiled:
    """Finds the parameters of modules that `torch.compile` was to compile by one backend, and that were not prepared.

    It looks through all objects of the process, once for all parameters of a model, which may have an optimizer each.
    """

    def __init__(self, backend: Callable[..., Any]) -> None:
        self._backend = backend
        self._has = WeakIdKeyDictionary()

    def has(self, param: torch.Tensor) -> bool:
        """Return whether `param` was such a parameter when one of its model was looked for first."""
        if param not in self._has:
            self._has[param] = False
            modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
            children = {id(child) for module in modules for child in module.children()}
            roots = [module for module in modules if id(module) not in children]
            for root in roots:
                params = list(root.parameters())
                if not any(own is param for own in params):
                    continue
                wanted = {
                    id(own)
                    for module in root.modules()
                    if compat.backend_of(module) is self._backend and model_of(module) is None
                    for own in module.parameters()
                }
                for own in params:
                    self._has[own] = id(own) in wanted or self._has.get(own, False)
        return bool(self._has[param])
