"""Make all ranks find overflow if any rank has gradients that are not finite: then all ranks skip the step.

```text
            GradScaler.step(optimizer)                                          GradScaler.update()
  rank 0    asks the optimizer: agrees, an element becomes inf    finds inf    halves the scale
  rank 1    asks the optimizer: agrees, has inf already            finds inf    halves the scale
```

GradScaler checks the gradients of its own rank and does not tell other ranks. For DTensors torch asks the other ranks,
but only if the first gradient of a device and dtype is sharded; a small replicated gradient in front hides the others.
The element that becomes inf belongs to a step that all ranks skip.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import distributed

from elixir_compile.ops.shards import is_sharded, own_grad, sum_over_parts
from elixir_compile.optim.clip.guard import KeptGradients
from elixir_compile.runtime.distributed.errors import OverflowUnseen


class Overflow:
    """The last overflow on which all ranks agreed, for an optimizer."""

    def __init__(self) -> None:
        self._seen = KeptGradients()
        """All gradients of this rank, if some rank had a gradient that was not finite; else empty."""

    @torch.no_grad()
    def spread(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Set a gradient element to infinity on each rank if any rank has overflow. A collective of all ranks."""
        params = [param for group in groups for param in group["params"] if param.grad is not None]
        sharded = [param for param in params if is_sharded(param)]
        self._seen = KeptGradients()
        if not sharded or not sum_over_parts(_has_overflow(map(own_grad, sharded)), sharded[0]):
            return
        self._seen = KeptGradients(params)
        marked = next((param for param in params if own_grad(param).numel()), None)
        if marked is not None:
            grad = own_grad(marked)
            grad[(0,) * grad.dim()] = torch.inf
            torch.autograd.graph.increment_version(marked.grad)

    def require_skipped(self) -> None:
        """Raise OverflowUnseen if `step()` runs although a gradient was not finite on some rank."""
        if self._seen.any_remains():
            raise OverflowUnseen([distributed.get_rank()])


def _has_overflow(grads: Iterable[torch.Tensor]) -> bool:
    """Return whether any value is not finite; costs a single synchronisation for each device."""
    ends: dict[torch.device, list[torch.Tensor]] = {}
    for grad in grads:
        if grad.numel():
            # 1.1 ms for 10 M float16 elements on a CPU; a norm takes 130 ms. With a NaN, both min and max are NaN.
            ends.setdefault(grad.device, []).extend(torch.aminmax(grad))
    return not all(bool(torch.stack(values).isfinite().all()) for values in ends.values())
