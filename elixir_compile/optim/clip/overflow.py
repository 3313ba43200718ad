"""Where one rank has gradients that are not finite, all ranks find some, and skip the step together.

```text
            GradScaler.step(optimizer)                                          GradScaler.update()
  rank 0    asks the optimizer: agrees, one element becomes inf    finds inf    halves the scale
  rank 1    asks the optimizer: agrees, has inf already            finds inf    halves the scale
```

GradScaler looks at what its rank has, and keeps what it found to itself. For DTensors torch asks the other ranks, but
only where the first gradient of a device and dtype is cut: a small one in front is whole on each rank and hides the
rest. What is written over are gradients of a step that no rank takes.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import distributed

from elixir_compile.ops.shards import is_sharded, own_grad, sum_over_parts
from elixir_compile.optim.clip.guard import KeptGradients
from elixir_compile.runtime.distributed.errors import OverflowUnseen


class Overflow:
    """What the ranks of one optimizer agreed on last."""

    def __init__(self) -> None:
        self._seen = KeptGradients()
        """The gradients that were not finite on some rank."""

    @torch.no_grad()
    def spread(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Where a gradient is not finite on any rank, let one on each be infinite; all ranks call this at once."""
        params = [param for group in groups for param in group["params"] if param.grad is not None]
        cut = [param for param in params if is_sharded(param)]
        self._seen = KeptGradients()
        if not cut or not sum_over_parts(_has_overflow(map(own_grad, cut)), cut[0]):
            return
        self._seen = KeptGradients(param.grad for param in params)
        own = next((param for param in params if own_grad(param).numel()), None)
        if own is not None:
            grad = own_grad(own)
            grad[(0,) * grad.dim()] = torch.inf
            torch.autograd.graph.increment_version(own.grad)

    def require_skipped(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Raise OverflowUnseen where an update begins with gradients that are not finite on some rank."""
        params = [param for group in groups for param in group["params"] if param.grad is not None]
        if self._seen.is_among(param.grad for param in params):
            raise OverflowUnseen([distributed.get_rank()])


def _has_overflow(grads: Iterable[torch.Tensor]) -> bool:
    """Return whether a value is not finite; gradients on one device cost one wait together."""
    ends: dict[torch.device, list[torch.Tensor]] = {}
    for grad in grads:
        if grad.numel():
            # On a CPU 1.1 ms for 10 M elements of float16, where a norm takes 130 ms; NaN is the end of what has any.
            ends.setdefault(grad.device, []).extend(torch.aminmax(grad))
    return not all(bool(torch.stack(own).isfinite().all()) for own in ends.values())
