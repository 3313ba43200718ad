"""Gradients that a queued update reads may not change before it has read them.

    g = p.grad; optimizer.step(); g.zero_()     raises GradientsChanged where the update is waited for

Reading `p.grad` waits for the update, but a tensor that somebody kept does not. Its count of changes tells: looked at
before the update reads, so that nothing is lost, and after it, where a change in between may have reached the weights.
"""

from collections.abc import Iterable, Sequence

import torch
from torch.utils.weak import TensorWeakRef

from elixir_compile.errors import GradientsChanged
from elixir_compile.ops.registry import slot_of


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
