"""Host memory of the optimizer: one slab per bucket and kind of state."""

import weakref
from collections.abc import Mapping

import torch
from torch import nn

from elixir_compile.runtime.bucket import RunningBucket

_Kind = tuple[str, torch.dtype]


class StateBuffers:
    """The slabs of one optimizer, made when first asked for and kept as long as the bucket."""

    def __init__(self) -> None:
        self._buffers: weakref.WeakKeyDictionary[RunningBucket, dict[_Kind, dict[int, torch.Tensor]]] = (
            weakref.WeakKeyDictionary()
        )

    def buffer(
        self, bucket: RunningBucket, kind: str, param: nn.Parameter, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return the host tensor of `kind` for `param`, in its dtype or `dtype`, zero when it was never written."""
        kinds = self._buffers.setdefault(bucket, {})
        dtype = dtype or param.dtype
        if (kind, dtype) not in kinds:
            tensors = bucket.state_room(dtype)
            kinds[kind, dtype] = {id(slot.param): tensor for slot, tensor in zip(bucket.slots, tensors, strict=True)}
        return kinds[kind, dtype][id(param)]

    def copies(
        self, bucket: RunningBucket, kind: str, values: Mapping[nn.Parameter, torch.Tensor]
    ) -> list[torch.Tensor]:
        """Start copying `values`, by parameter, to the host, and return where they land."""
        landing = []
        for param, value in values.items():
            landing.append(self.buffer(bucket, kind, param, value.dtype).copy_(value, non_blocking=True))
        return landing
