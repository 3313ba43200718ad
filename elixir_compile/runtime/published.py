"""Add the gradients of a backward pass to `param.grad`, tell later whether they are unchanged, and keep their norms."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from elixir_compile import compat
from elixir_compile.base.errors import UnsupportedBackward
from elixir_compile.graph.ops.optimizers import has_master
from elixir_compile.graph.ops.registry import Slot
from elixir_compile.graph.ops.shards import as_dtensor, is_dtensor, own_shard, version
from elixir_compile.ir import BucketId, Calls
from elixir_compile.runtime.bucket import flat
from elixir_compile.runtime.distributed.sharded import ShardReduce
from elixir_compile.runtime.lanes import Event, Lanes, Transfer

# ----------------------------------------------------------------------------------------------------------------------
# One backward pass of autograd: the gradients that its graphs have made so far, and who takes them.


@dataclass(slots=True)
class BackwardPass:
    """A backward pass, from its first graph of this executor to its end."""

    asks_for_all: bool
    """Whether the backward adds the gradient of every leaf to `.grad`, and does not ask for chosen tensors."""
    asked: dict[int, compat.Asked] = field(default_factory=dict)
    """By slot, unless `asks_for_all`: how the backward uses the gradient."""
    pending: dict[int, tuple[Slot, torch.Tensor]] = field(default_factory=dict)
    """By slot, the sum of the gradients that graphs have made so far; on the device, or offloaded to the host."""
    offloaded: set[int] = field(default_factory=set)
    """Slots whose sum an offload has taken to the host."""
    handed: list[Slot] = field(default_factory=list)
    """Slots of the parameters whose gradient autograd adds to `.grad`."""
    reducing: dict[BucketId, ShardReduce] = field(default_factory=dict)
    """The last reduce of each sharded bucket."""
    computed: Event | None = None
    """After the compute of the last graph that ran, and of all before it."""
    arriving: list[Transfer] = field(default_factory=list)
    """Copies to the host, kept until they are done."""
    suspended: list[tuple[dict[int, Any], dict[int, Any]]] = field(default_factory=list)
    """By parameter, the dictionary of its hooks after accumulation, and the hooks that `_no_hook` replaces in it."""

    @contextmanager
    def in_order(self, lanes: Lanes) -> Iterator[None]:
        """Let the compute of the block follow that of earlier blocks of this backward pass; its end follows the last.

        Autograd runs each part of a backward on the stream of its forward, which a user may have chosen, and orders
        only the gradients that it handles itself.
        """
        lanes.compute_waits(self.computed)
        yield
        self.computed = lanes.mark_compute()

    def made_on(self, device: torch.device, slots: Iterable[Slot]) -> list[torch.Tensor]:
        """Return the gradients of `slots` that graphs have made so far and that are on `device`."""
        found = (self.pending.get(slot.key) for slot in slots)
        return [made[1] for made in found if made is not None and made[1].device == device]

    def asks_for(self, slot: Slot) -> compat.Asked:
        """Return how the backward uses the gradient of the slot's parameter."""
        if self.asks_for_all:
            return compat.Asked.TO_ACCUMULATE
        found = self.asked.get(slot.key)
        if found is None:
            with torch.DisableTorchFunctionSubclass():
                found = compat.asked_for(slot.param) if slot.param.requires_grad else compat.Asked.NOT
            if found is compat.Asked.NOT:
                # Code without a gate reads the handle itself. Autograd runs the handle's accumulate node only in a
                # backward for every leaf.
                leaves = (handle for handle in slot.handles if handle.requires_grad)
                if any(compat.asked_for(leaf) is compat.Asked.TO_ACCUMULATE for leaf in leaves):
                    found = compat.Asked.TO_ACCUMULATE
            self.asked[slot.key] = found
        return found

    def asks_for_any(self, slots: Iterable[Slot]) -> bool:
        """Return whether the backward asks for the gradient of any of `slots`."""
        return self.asks_for_all or any(self.asks_for(slot) is not compat.Asked.NOT for slot in slots)

    def suspend_hooks(self, slots: Iterable[Slot]) -> None:
        """Keep autograd from calling hooks after accumulation until `resume_hooks`: the gradients of `slots` are only
        there after the last call of a step."""
        for slot in slots:
            hooks = compat.hooks_after_accumulation(slot.param)
            kept = {key: hook for key, hook in hooks.items() if hook is not _no_hook}
            if kept:
                self.suspended.append((hooks, kept))
                hooks.update(dict.fromkeys(kept, _no_hook))

    def resume_hooks(self) -> None:
        """Give the suspended hooks back, except those that the user removed meanwhile."""
        for hooks, kept in self.suspended:
            hooks.update({key: hook for key, hook in kept.items() if key in hooks})
        self.suspended.clear()

    def run_missed_hooks(self, slots: Iterable[Slot]) -> None:
        """Run the hooks after accumulation of those `slots` whose gradient autograd did not take in this backward."""
        for slot in slots:
            if slot not in self.handed:
                for hook in list(compat.hooks_after_accumulation(slot.param).values()):
                    hook(slot.param)

    def goes_through_autograd(self, slot: Slot) -> bool:
        """Whether autograd itself takes the gradient of the slot's parameter."""
        return self.asks_for(slot) is compat.Asked.TO_RETURN or slot.has_hooks


def refuse_hooks(model: str, slots: Iterable[Slot], step: Calls) -> None:
    """Raise UnsupportedBackward if `slots` of `model` have a hook before accumulation, or one on their autograd node.

    In a `step` of several calls, the gradient of a parameter is there after the last backward: autograd would call such
    a hook with None in all others. Hooks after accumulation run once.
    """
    for slot in slots:
        if not (compat.has_hooks_before_accumulation(slot.param) or slot.has_node_holders):
            continue
        where = "the autograd node of" if slot.has_node_holders else "the gradient of"
        instead = "Use `register_post_accumulate_grad_hook`, which runs once, in the last backward of the step"
        raise UnsupportedBackward(model, f"a hook on {where} {slot.name} in a step of {step}", instead)


def _no_hook(param: torch.Tensor) -> None:
    """Stand in for a hook after accumulation."""


# ----------------------------------------------------------------------------------------------------------------------
# Published gradients: add a gradient to `param.grad`, tell later whether it is unchanged, and keep its norm.
#
# **Publish** as autograd does at a leaf:
#
#     reduce dtype None       the sum has the dtype of the parameter, as in eager code
#     reduce dtype float32    the sum is fp32 from the second micro-batch on, so a single micro-batch costs nothing
# more.
#                             With several ranks it is fp32 from the first micro-batch on, because their mean is
#
# Only parameters with a master have an fp32 sum, because their update reads gradients of any dtype.
#
# **Norms**: sums of squares of gradients for clipping, computed during the backward while the gradients are in fast
# memory.
#
#     clip_grad_norm_    `ask`: compute the squares of these gradients from the next step on
#     backward           a gradient leaves for the host: `take` reads it on the device; it becomes p.grad: `keep` stores
#                        its squares
#     clip_grad_norm_    `known`: the squares of each unchanged p.grad; the optimizer reads the other gradients
#
# Squares are cached only for gradients on the host. Reading a gradient on the device again takes as long as reading it
# in the backward would.
#
# A gradient counts as unchanged if its `GradientSnapshot` is current and the same elements were probed. The probe is
# needed because collectives, `GradScaler.unscale_` and `p.grad.data.mul_()` do not raise the version (torch 2.13). If
# one probed element of any gradient changed, no squares are returned. A write that raises no version and misses all
# probed elements is not noticed; `p.grad.data.clamp_()` can be such a write.
#
# A training loop without clipping pays nothing. In a loop with gradient accumulation, gradients are read only in the
# last backward before the next clip, by the number of backwards between the previous two.


_BLOCK = 1 << 19
"""Elements that are converted to the wider dtype at once, so that they stay in the cache. `add_` of a tensor of another
dtype takes ten times as long on a host."""
_NUM_PROBES = 8
"""Elements of each gradient that are compared to find writes that raise no version."""

Squares = float | torch.Tensor
"""The sum of squares of one gradient, or its norm as a tensor if the device computed it."""
SquaresOf = Callable[[torch.Tensor], Squares]


def fitted(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return `grad`, this rank's shard of a gradient, on the device of `param` and with its strides."""
    own = own_shard(param)
    if grad.device != own.device:
        grad = grad.to(own.device)
    if grad.stride() != own.stride():
        grad = torch.empty_like(own, dtype=grad.dtype).copy_(grad)
    return grad


def widen_sum(param: torch.Tensor, dtype: torch.dtype, new_buffer: Callable[[], torch.Tensor] | None) -> None:
    """Prepare `param.grad` so that a gradient of `dtype` can be added: convert it to fp32 if the sum is kept in fp32.

    `new_buffer` returns memory for an fp32 sum; None if sums have the dtype of `param`.
    """
    if is_dtensor(param) and dtype != param.dtype:
        param.grad_dtype = None  # allows any dtype; torch would refuse a gradient of another dtype than `param`
    elif new_buffer is not None and param.grad is not None and param.grad.dtype == param.dtype and has_master(param):
        total = new_buffer().copy_(own_shard(param.grad))
        param.grad_dtype = None
        param.grad = as_dtensor(total, param)


def publish(param: torch.Tensor, grad: torch.Tensor, new_buffer: Callable[[], torch.Tensor] | None) -> None:
    """Add `grad` to the gradient of `param`, unless `param` is frozen by now; `new_buffer` as for `widen_sum`."""
    if not param.requires_grad:
        return
    grad = fitted(param, grad)
    widen_sum(param, grad.dtype, new_buffer)
    if param.grad is None:
        if grad.dtype != param.dtype and not is_dtensor(param):  # a sum over the calls of a step
            param.grad_dtype = None
        param.grad = as_dtensor(grad, param)
    elif is_dtensor(param):
        _add(own_shard(param.grad), grad)
        torch.autograd.graph.increment_version(param.grad)
    else:
        _add(param.grad, grad)


def _add(total: torch.Tensor, grad: torch.Tensor) -> None:
    """Add `grad` to `total`, which has the same dtype, or a wider one and the same memory layout."""
    if total.dtype == grad.dtype:
        total.add_(grad)
        return
    wide, narrow = flat(total), flat(grad)
    for start in range(0, total.numel(), _BLOCK):
        block = slice(start, start + _BLOCK)
        wide[block].add_(narrow[block].to(wide.dtype))


@dataclass(frozen=True, slots=True, eq=False)
class GradientSnapshot:
    """A gradient at the moment when its norm, its update or its clipping read it: the tensor, held weakly, and its
    version.

    `is_current` is the usual question: cached norms and updates in the backward hold as long as `param.grad` is the
    same tensor, and nobody wrote to it. Two readers ask for one half of it:

    - A queued update asks `was_written`. Dropping `param.grad` before the update has read it is allowed, as the update
      keeps the tensor; writing the tensor is not.
    - Clipping and the search for overflow ask `is_of`. They write gradients themselves, or have them written by
      `GradScaler`, and need to know only whether the gradient was dropped since.
    """

    _tensor: TensorWeakRef
    _version: int

    @classmethod
    def of(cls, grad: torch.Tensor) -> "GradientSnapshot":
        """Return the snapshot of `grad` now."""
        return cls(TensorWeakRef(grad), version(grad))

    def is_current(self, grad: torch.Tensor | None) -> bool:
        """Return whether `grad` is the tensor of the snapshot and was not written since."""
        return self.is_of(grad) and not self.was_written()

    def is_of(self, grad: torch.Tensor | None) -> bool:
        """Return whether `grad` is the tensor of the snapshot, written or not."""
        return grad is not None and self._tensor() is grad

    def was_written(self) -> bool:
        """Return whether the tensor of the snapshot was written since; False if it was freed."""
        grad = self._tensor()
        return grad is not None and version(grad) != self._version


@dataclass(slots=True, eq=False)
class _CachedSquares:
    """The squares of a `param.grad`, and the facts to tell whether it was written since."""

    slot: Slot
    squares: Squares
    squares_of: SquaresOf
    snapshot: GradientSnapshot
    probe: torch.Tensor | None = None

    def unchanged(self) -> torch.Tensor | None:
        """Return this rank's shard of the gradient, or None if the gradient was replaced or written."""
        grad = self.slot.param.grad
        return own_shard(grad) if grad is not None and self.snapshot.is_current(grad) else None


class GradNormCache:
    """The squares of an executor's gradients, for the hybrid optimizer's `clip_grad_norm_`."""

    def __init__(self) -> None:
        self._squares_of: dict[int, SquaresOf] = {}
        self._num_backwards = 0
        self._num_expected = 0
        self._taken: dict[int, tuple[GradientSnapshot, Squares]] = {}
        self._cached: dict[int, _CachedSquares] = {}

    def ask(self, slots: Iterable[Slot], squares_of: SquaresOf) -> None:
        """Request `squares_of` for the gradients of `slots` from the next backward passes on.

        A step is expected to have as many backward passes as ran since the previous call.
        """
        if self._num_backwards:
            self._num_expected, self._num_backwards = self._num_backwards, 0
        self._squares_of.update((slot.key, squares_of) for slot in slots)

    def take(self, moved: Iterable[tuple[Slot, torch.Tensor, torch.Tensor]]) -> None:
        """Compute the requested squares of gradients that leave for the host, on the lane of the block.

        `moved` has for each its slot, the gradient on the device, and the copy on the host that becomes the gradient.
        """
        for slot, grad, home in moved:
            squares_of = self._wanted(slot)
            if squares_of is not None and slot.param.grad is None:
                self._taken[slot.key] = GradientSnapshot.of(home), squares_of(grad)

    def store(self, slot: Slot) -> None:
        """Store the squares of the published gradient of `slot`: from `take`, or by reading the gradient now."""
        squares_of, grad = self._wanted(slot), slot.param.grad
        taken = self._taken.pop(slot.key, None)
        if squares_of is None or grad is None or own_shard(grad).device.type != "cpu":
            return
        own = own_shard(grad)
        squares = taken[1] if taken is not None and taken[0].is_current(own) else squares_of(own)
        self._cached[slot.key] = _CachedSquares(slot, squares, squares_of, GradientSnapshot.of(grad))

    def end_backward(self) -> None:
        """Probe the gradients whose squares are new in this backward; called after all copies to the host arrived."""
        self._num_backwards += 1
        self._taken.clear()
        new = [
            (cached, own)
            for cached in self._cached.values()
            if cached.probe is None and (own := cached.unchanged()) is not None
        ]
        if new:
            probes = [_probe(own) for _, own in new]
            pieces = torch.cat(probes).split([probe.numel() for probe in probes])
            for (cached, _), piece in zip(new, pieces, strict=True):
                cached.probe = piece

    def known(self, squares_of: SquaresOf) -> Mapping[int, Squares]:
        """Return `squares_of` for each gradient unchanged since its computation, by the key of its slot."""
        found, before, now = {}, [], []
        for key, cached in self._cached.items():
            own = cached.unchanged() if cached.squares_of is squares_of and cached.probe is not None else None
            if own is not None:
                found[key] = cached.squares
                before.append(cached.probe)
                now.append(_probe(own))
        return found if found and torch.equal(torch.cat(before), torch.cat(now)) else {}

    def drop(self) -> None:
        """Forget all squares; called after a backward raised an exception."""
        self._taken.clear()
        self._cached.clear()

    def _wanted(self, slot: Slot) -> SquaresOf | None:
        return self._squares_of.get(slot.key) if self._num_backwards + 1 == self._num_expected else None


def _probe(own: torch.Tensor) -> torch.Tensor:
    """Return a few elements of a dense tensor, as a view."""
    numel = own.numel()
    return own.detach().as_strided((min(numel, _NUM_PROBES),), (max(numel // _NUM_PROBES, 1),))
