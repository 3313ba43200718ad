"""Published gradients: add a gradient to `param.grad`, tell later whether it is unchanged, and keep its norm.

**Publish** as autograd does at a leaf:

    reduce dtype None       the sum has the dtype of the parameter, as in eager code
    reduce dtype float32    the sum is fp32 from the second micro-batch on, so a single micro-batch costs nothing more.
                            With several ranks it is fp32 from the first micro-batch on, because their mean is

Only parameters with a master have an fp32 sum, because their update reads gradients of any dtype.

**Norms**: sums of squares of gradients for clipping, computed during the backward while the gradients are in fast
memory.

    clip_grad_norm_    `ask`: compute the squares of these gradients from the next step on
    backward           a gradient leaves for the host: `take` reads it on the device; it becomes p.grad: `keep` stores
                       its squares
    clip_grad_norm_    `known`: the squares of each unchanged p.grad; the optimizer reads the other gradients

Squares are cached only for gradients on the host. Reading a gradient on the device again takes as long as reading it in
the backward would.

A gradient counts as unchanged if its `GradientSnapshot` is current and the same elements were probed. The probe is
needed because collectives, `GradScaler.unscale_` and `p.grad.data.mul_()` do not raise the version (torch 2.13). If one
probed element of any gradient changed, no squares are returned. A write that raises no version and misses all probed
elements is not noticed; `p.grad.data.clamp_()` can be such a write.

A training loop without clipping pays nothing. In a loop with gradient accumulation, gradients are read only in the last
backward before the next clip, by the number of backwards between the previous two.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.utils.weak import TensorWeakRef

from elixir_compile.graph.ops.masters import has_master
from elixir_compile.graph.ops.registry import Slot
from elixir_compile.graph.ops.shards import as_dtensor, is_dtensor, own_part, version
from elixir_compile.runtime.slab import flat

_BLOCK = 1 << 19
"""Elements that are converted to the wider dtype at once, so that they stay in the cache. `add_` of a tensor of another
dtype takes ten times as long on a host."""
_NUM_PROBES = 8
"""Elements of each gradient that are compared to find writes that raise no version."""

Squares = float | torch.Tensor
"""The sum of squares of one gradient, or its norm as a tensor if the device computed it."""
SquaresOf = Callable[[torch.Tensor], Squares]


def fitted(param: torch.nn.Parameter, grad: torch.Tensor) -> torch.Tensor:
    """Return `grad`, this rank's part of a gradient, on the device of `param` and with its strides."""
    own = own_part(param)
    if grad.device != own.device:
        grad = grad.to(own.device)
    if grad.stride() != own.stride():
        grad = torch.empty_like(own, dtype=grad.dtype).copy_(grad)
    return grad


def widen_sum(param: torch.nn.Parameter, dtype: torch.dtype, new_buffer: Callable[[], torch.Tensor] | None) -> None:
    """Prepare `param.grad` so that a gradient of `dtype` can be added: convert it to fp32 if the sum is kept in fp32.

    `new_buffer` returns memory for an fp32 sum; None if sums have the dtype of `param`.
    """
    if is_dtensor(param) and dtype != param.dtype:
        param.grad_dtype = None  # allows any dtype; torch would refuse a gradient of another dtype than `param`
    elif new_buffer is not None and param.grad is not None and param.grad.dtype == param.dtype and has_master(param):
        total = new_buffer().copy_(own_part(param.grad))
        param.grad_dtype = None
        param.grad = as_dtensor(total, param)


def publish(param: torch.nn.Parameter, grad: torch.Tensor, new_buffer: Callable[[], torch.Tensor] | None) -> None:
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
        _add(own_part(param.grad), grad)
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
        """Return this rank's part of the gradient, or None if the gradient was replaced or written."""
        grad = self.slot.param.grad
        return own_part(grad) if grad is not None and self.snapshot.is_current(grad) else None


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
        if squares_of is None or grad is None or own_part(grad).device.type != "cpu":
            return
        own = own_part(grad)
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
