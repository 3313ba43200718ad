"""Sums of the gradients of the calls of a step, kept on the device until the last call reduces them.

```text
  backward 1    g1 -> sum           the gradient itself becomes the sum
  backward 2    sum += g2
  backward 3    sum += g3, reduce   one collective and one copy to the host, whatever the number of calls
```
"""

from collections.abc import Sequence

import torch

from elixir_compile.graph.ops.masters import has_master
from elixir_compile.runtime.bucket import RunningBucket


class SumsOfCalls:
    """The unreduced sums of an executor, by the key of the slot of their parameter."""

    def __init__(self) -> None:
        self._sums: dict[int, torch.Tensor] = {}

    def add(
        self,
        bucket: RunningBucket,
        positions: Sequence[int],
        grads: list[torch.Tensor],
        *,
        in_fp32: bool,
    ) -> None:
        """Add `grads`, of the parameters at `positions` of `bucket`, to their sums, and empty `grads`.

        If sums are `in_fp32`, so are those of parameters with a master; else a sum has the dtype of its gradients.
        """
        for place, position in enumerate(positions):
            key, grad = bucket.slots[position].key, grads[place]
            wide = torch.float32 if in_fp32 and has_master(bucket.slots[position].param) else grad.dtype
            total = self._sums.get(key)
            if total is None:
                # Not a view, as a transposed product is: a view keeps its base.
                self._sums[key] = grad.detach().to(wide)
            else:
                total.add_(grad)
        grads.clear()

    def with_sums(
        self, bucket: RunningBucket, positions: Sequence[int], grads: list[torch.Tensor]
    ) -> tuple[Sequence[int], list[torch.Tensor]]:
        """Return `positions` and `grads` of the last call with the sums of the earlier calls added, and forget these.

        The list that is returned is `grads` itself, which the caller may empty.
        """
        if not self._sums:
            return positions, grads
        found = list(positions)
        for place, position in enumerate(positions):
            total = self._sums.pop(bucket.slots[position].key, None)
            if total is not None:
                grads[place] = total.add_(grads[place])
        for position, slot in enumerate(bucket.slots):
            total = self._sums.pop(slot.key, None)
            if total is not None:  # the last call, for example of other experts, has no gradient of the parameter
                found.append(position)
                grads.append(total)
        return found, grads

    def holds_any_of(self, bucket: RunningBucket) -> bool:
        """Return whether there is a sum of a parameter of `bucket`."""
        return bool(self._sums) and any(slot.key in self._sums for slot in bucket.slots)

    def clear(self) -> None:
        """Forget all sums; called after an exception."""
        self._sums.clear()
