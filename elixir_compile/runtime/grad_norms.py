"""Sums of squares of gradients for clipping, computed during the backward while the gradients are in fast memory.

    clip_grad_norm_    `ask`: compute the squares of these gradients from the next step on
    backward           a gradient leaves for the host: `take` reads it on the device; it becomes p.grad: `keep` stores
                       its squares
    clip_grad_norm_    `known`: the squares of each unchanged p.grad; the optimizer reads the other gradients

Squares are kept only for gradients on the host. Reading a gradient on the device again takes as long as reading it in
the backward would.

A gradient counts as unchanged if it is the same tensor with the same version and the same probed elements. The probe is
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

from elixir_compile.ops.registry import Slot
from elixir_compile.ops.shards import own_part, version

_NUM_PROBES = 8
"""Elements of each gradient that are compared to find writes that raise no version."""

Squares = float | torch.Tensor
"""The sum of squares of one gradient, or its norm as a tensor if the device computed it."""
SquaresOf = Callable[[torch.Tensor], Squares]


@dataclass(slots=True, eq=False)
class _Kept:
    """The squares of a `param.grad`, and the facts to tell whether it was written since."""

    slot: Slot
    squares: Squares
    squares_of: SquaresOf
    grad: TensorWeakRef
    version: int
    probe: torch.Tensor | None = None

    def unchanged(self) -> torch.Tensor | None:
        """Return this rank's part of the gradient, or None if the gradient was replaced or written."""
        grad = self.grad()
        if grad is None or self.slot.param.grad is not grad or version(grad) != self.version:
            return None
        return own_part(grad)


class GradNormCache:
    """The squares of an executor's gradients, for the hybrid optimizer's `clip_grad_norm_`."""

    def __init__(self) -> None:
        self._squares_of: dict[int, SquaresOf] = {}
        self._num_backwards = 0
        self._num_expected = 0
        self._taken: dict[int, tuple[TensorWeakRef, int, Squares]] = {}
        self._kept: dict[int, _Kept] = {}

    def ask(self, slots: Iterable[Slot], squares_of: SquaresOf) -> None:
        """Request `squares_of` for the gradients of `slots` from the next backward passes on.

        A step is expected to have as many backward passes as ran since the previous call.
        """
        if self._num_backwards:
            self._num_expected, self._num_backwards = self._num_backwards, 0
        self._squares_of.update((slot.key, squares_of) for slot in slots)

    def take(self, slot: Slot, grad: torch.Tensor, home: torch.Tensor) -> None:
        """Compute the squares of `grad`, whose copy `home` on the host becomes the gradient of `slot`, if requested."""
        squares_of = self._wanted(slot)
        if squares_of is not None and slot.param.grad is None:
            self._taken[slot.key] = TensorWeakRef(home), home._version, squares_of(grad)

    def keep(self, slot: Slot) -> None:
        """Store the squares of the published gradient of `slot`: from `take`, or by reading the gradient now."""
        squares_of, grad = self._wanted(slot), slot.param.grad
        taken = self._taken.pop(slot.key, None)
        if squares_of is None or grad is None or own_part(grad).device.type != "cpu":
            return
        own = own_part(grad)
        squares = taken[2] if taken is not None and taken[0]() is own and taken[1] == own._version else squares_of(own)
        self._kept[slot.key] = _Kept(slot, squares, squares_of, TensorWeakRef(grad), version(grad))

    def end_backward(self) -> None:
        """Probe the gradients kept in this backward; called after all copies to the host have arrived."""
        self._num_backwards += 1
        self._taken.clear()
        new = [
            (kept, own) for kept in self._kept.values() if kept.probe is None and (own := kept.unchanged()) is not None
        ]
        if new:
            probes = [_probe(own) for _, own in new]
            pieces = torch.cat(probes).split([probe.numel() for probe in probes])
            for (kept, _), piece in zip(new, pieces, strict=True):
                kept.probe = piece

    def known(self, squares_of: SquaresOf) -> Mapping[int, Squares]:
        """Return `squares_of` for each gradient unchanged since its computation, by the key of its slot."""
        found, before, now = {}, [], []
        for key, kept in self._kept.items():
            own = kept.unchanged() if kept.squares_of is squares_of and kept.probe is not None else None
            if own is not None:
                found[key] = kept.squares
                before.append(kept.probe)
                now.append(_probe(own))
        return found if found and torch.equal(torch.cat(before), torch.cat(now)) else {}

    def drop(self) -> None:
        """Forget all squares; called after a backward raised an exception."""
        self._taken.clear()
        self._kept.clear()

    def _wanted(self, slot: Slot) -> SquaresOf | None:
        return self._squares_of.get(slot.key) if self._num_backwards + 1 == self._num_expected else None


def _probe(own: torch.Tensor) -> torch.Tensor:
    """Return a few elements of a dense tensor, as a view."""
    numel = own.numel()
    return own.detach().as_strided((min(numel, _NUM_PROBES),), (max(numel // _NUM_PROBES, 1),))
