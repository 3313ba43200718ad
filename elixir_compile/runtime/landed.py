"""What an optimizer wants to know of gradients, computed while the backward has them at hand.

    clip_grad_norm_    `ask`: the squares of these gradients, from the next step on
    backward           a gradient leaves for the host -> `take`, where it still is; it becomes p.grad -> `keep`
    clip_grad_norm_    `known`: of each p.grad that is what it was then; the rest is read again

Only gradients on the host are kept: a device reads its own again in the time that it would take in the backward.

A gradient is what it was when it is the same tensor, of the same version, with the same few elements: collectives,
`GradScaler.unscale_` and `p.grad.data.mul_()` leave the version alone, torch 2.13. One changed element of any gradient
distrusts all. Not seen is a write past the version that misses all of them, as `p.grad.data.clamp_()` may.

Nobody pays who does not clip: gradients are read in the backward that was the last one before the call the last time.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.utils.weak import TensorWeakRef

from elixir_compile.ops.registry import Slot
from elixir_compile.ops.shards import own_part, version

_NUM_PROBES = 8
"""Elements of each gradient that are looked at again."""

Squares = float | torch.Tensor
"""The sum of squares of one gradient, or its norm as a tensor where the device has computed that."""
SquaresOf = Callable[[torch.Tensor], Squares]


@dataclass(slots=True, eq=False)
class _Kept:
    """What was computed of one `param.grad`."""

    slot: Slot
    squares: Squares
    squares_of: SquaresOf
    grad: TensorWeakRef
    version: int
    probe: torch.Tensor | None = None

    def unchanged(self) -> torch.Tensor | None:
        """Return this rank's part of the gradient; None where it is gone, or was written."""
        grad = self.grad()
        is_same = grad is not None and self.slot.param.grad is grad and version(grad) == self.version
        return own_part(grad) if is_same else None


class GradNormCache:
    """The gradients of one executor, since the last time that anybody asked."""

    def __init__(self) -> None:
        self._squares_of: dict[int, SquaresOf] = {}
        self._num_backwards = 0
        self._num_expected = 0
        self._taken: dict[int, tuple[TensorWeakRef, int, Squares]] = {}
        self._kept: dict[int, _Kept] = {}

    def ask(self, slots: Iterable[Slot], squares_of: SquaresOf) -> None:
        """Let the backward passes to come compute `squares_of` of the gradients of `slots`; a step has as many of them
        as there were since this was asked before."""
        if self._num_backwards:
            self._num_expected, self._num_backwards = self._num_backwards, 0
        self._squares_of.update((slot.key, squares_of) for slot in slots)

    def take(self, slot: Slot, grad: torch.Tensor, home: torch.Tensor) -> None:
        """Read `grad`, which was copied to `home` on the host, if that is to become the gradient of `slot`."""
        squares_of = self._wanted(slot)
        if squares_of is not None and slot.param.grad is None:
            self._taken[slot.key] = TensorWeakRef(home), home._version, squares_of(grad)

    def keep(self, slot: Slot) -> None:
        """Know the gradient of `slot`, which is published: by what was taken of it, else by reading it."""
        squares_of, grad = self._wanted(slot), slot.param.grad
        taken = self._taken.pop(slot.key, None)
        if squares_of is None or grad is None or own_part(grad).device.type != "cpu":
            return
        own = own_part(grad)
        is_taken = taken is not None and taken[0]() is own and taken[1] == own._version
        squares = taken[2] if is_taken else squares_of(own)
        self._kept[slot.key] = _Kept(slot, squares, squares_of, TensorWeakRef(grad), version(grad))

    def end_backward(self) -> None:
        """Probe what was kept, when all of it is there."""
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
        """Return `squares_of` of each gradient that is what it was when that was computed, by the key of its slot."""
        found, before, now = {}, [], []
        for key, kept in self._kept.items():
            own = kept.unchanged() if kept.squares_of is squares_of and kept.probe is not None else None
            if own is not None:
                found[key] = kept.squares
                before.append(kept.probe)
                now.append(_probe(own))
        return found if found and torch.equal(torch.cat(before), torch.cat(now)) else {}

    def drop(self) -> None:
        """Forget what a backward that failed has read."""
        self._taken.clear()
        self._kept.clear()

    def _wanted(self, slot: Slot) -> SquaresOf | None:
        return self._squares_of.get(slot.key) if self._num_backwards + 1 == self._num_expected else None


def _probe(own: torch.Tensor) -> torch.Tensor:
    """Return a few elements of a dense tensor, as a view."""
    numel = own.numel()
    return own.detach().as_strided((min(numel, _NUM_PROBES),), (max(numel // _NUM_PROBES, 1),))
