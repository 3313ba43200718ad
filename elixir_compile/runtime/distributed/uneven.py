"""A sharded bucket of which the ranks own parts of different sizes.

```text
own        | a0 b0 c0 |                                  this rank's rows of each parameter, one after another
ragged     | a0 b0 c0 | a1 b1 c1 | a2 b2 c2 |            flat buffer: the `own` of all ranks, each as long as it is
padded     | a0 b0 c0 | a1 b1 c1 . | a2 b2 c2 . . |      each as long as the longest
```

The plan says which of the two a bucket has. If a ragged bucket has a single parameter, the flat buffer is the parameter
itself, so neither the parameter nor its gradient is copied.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch

from elixir_compile.runtime.distributed.exchange import scale_by_weight
from elixir_compile.runtime.distributed.sharded import ShardedBucket


class UnevenBucket(ShardedBucket):
    """A bucket whose parameters are Portions over `ranks`."""

    @property
    def own_numel(self) -> int:
        """The elements of `own`, with its padding."""
        return self._row_numels[self._own_index]

    def rows(self, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized flat buffer in `dtype`, on the device."""
        return torch.empty(sum(self._row_numels), dtype=dtype, device=self.slots[0].device)

    def by_rank(self, rows: torch.Tensor) -> Sequence[torch.Tensor] | torch.Tensor:
        """Return what each rank has of the flat buffer `rows`, in the order of ranks: a matrix if it is padded."""
        return rows.split(self._row_numels) if self.spec.is_ragged else rows.view(self.ranks.num_shards, -1)

    def from_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the full parameters from `rows`, the `own` of every rank."""
        if not self.spec.is_unpacked:
            param = self.slots[0].param
            return (rows[: param.numel()].view(param.shape),)
        values = []
        for position, slot in enumerate(self.slots):
            value = torch.empty(slot.param.shape, dtype=rows.dtype, device=rows.device)
            for target, piece in self._pieces(position, value.view(-1), rows):
                target.copy_(piece)
            values.append(value)
        return tuple(values)

    def to_rows(self, positions: Sequence[int], grads: list[torch.Tensor]) -> torch.Tensor:
        """Return the sums of gradients as a flat buffer of `grad_dtype` for a reduce-scatter; zero for a parameter
        without any.

        Gradient i of `grads` belongs to the parameter at `positions[i]`. May empty `grads`.
        """
        is_weighed_later = self.ranks.applies_weight(self.grad_dtype)
        if self.ranks.weight == 0.0 and not is_weighed_later:
            grads.clear()  # frees their memory before the flat buffer is allocated
            return self.rows(self.grad_dtype).zero_()
        if not self.spec.is_packed and len(grads) == 1 and is_weighed_later and grads[0].dtype == self.grad_dtype:
            return grads[0].contiguous().view(-1)
        rows = self.rows(self.grad_dtype)
        if not self.spec.is_ragged or len(set(positions)) < len(self.slots):
            rows.zero_()
        filled: set[int] = set()
        for position, grad in zip(positions, grads, strict=True):
            for source, target in self._pieces(position, grad.reshape(-1), rows):
                target.add_(source) if position in filled else target.copy_(source)
            filled.add(position)
        if not is_weighed_later:
            scale_by_weight(rows, self.ranks.weight)
        return rows

    def _pieces(
        self, position: int, whole: torch.Tensor, rows: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield for each rank its elements of `whole`, the flat parameter at `position`, and their place in `rows`."""
        starts = accumulate(self._row_numels, initial=0)
        for start, parts, elements in zip(starts, self._parts, whole.split(self._parts_of(position)), strict=False):
            offset = start + sum(parts[:position])
            yield elements, rows[offset : offset + elements.numel()]

    def _parts_of(self, position: int) -> list[int]:
        return [parts[position] for parts in self._parts]

    def _layout(self) -> tuple[tuple[int, ...], int]:
        by_slot = [self.ranks.parts_of(slot.param) for slot in self.slots]
        self._parts = list(zip(*by_slot, strict=True))
        """By rank, the elements of each parameter that the rank owns."""
        totals = [sum(parts) for parts in self._parts]
        self._row_numels = totals if self.spec.is_ragged else [max(totals)] * len(totals)
        """By rank, the elements in the flat buffer, with padding."""
        self._own_index = self.ranks.mesh.get_local_rank(self.ranks.mesh.ndim - 1)
        itemsize = self.slots[0].param.element_size()
        *offsets, end = accumulate((itemsize * numel for numel in self._parts[self._own_index]), initial=0)
        return tuple(offsets), end
