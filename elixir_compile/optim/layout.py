"""How a statistic of an optimizer lies in memory: a value for each element of its parameter, or one for each block."""

from dataclasses import dataclass

import torch

from elixir_compile.runtime.slab import flat


@dataclass(frozen=True, slots=True)
class StatisticLayout:
    """The values of a statistic: one of `dtype` for each `block` elements of the parameter in the order of memory.

    A statistic with a value for each element has the shape and the strides of its parameter; with a value for each
    block it is flat.
    """

    dtype: torch.dtype
    block: int = 1

    def numel(self, numel: int) -> int:
        """Return the number of values of the statistic for `numel` elements of the parameter."""
        return -(-numel // self.block)

    def nbytes(self, numel: int) -> int:
        """Return the bytes of the statistic for `numel` elements of the parameter."""
        return self.numel(numel) * self.dtype.itemsize

    def span(self, start: int, stop: int) -> slice:
        """Return where the flat statistic has the elements `start` to `stop`; `start` is a multiple of `block`."""
        return slice(start // self.block, self.numel(stop))

    def zeros(self, like: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
        """Return zeros for a parameter with the shape and strides of `like`, by default on the device of `like`."""
        if self.block == 1:
            return torch.zeros_like(like, dtype=self.dtype, device=device)
        return torch.zeros(self.numel(like.numel()), dtype=self.dtype, device=device or like.device)

    def shaped(self, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return the flat `values`, those of the whole parameter `like`, in the shape of the statistic, as a view."""
        return values.as_strided(like.shape, like.stride()) if self.block == 1 else values


def is_alike(value: torch.Tensor, like: torch.Tensor) -> bool:
    """Return whether `value`, which has the shape of `like`, has its elements in the same order in memory."""
    strides = zip(value.stride(), like.stride(), like.shape, strict=True)
    return all(own == other for own, other, size in strides if size > 1)


def in_order_of(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return `value`, shaped like `like`, with its elements in the memory order of `like`; a copy if it has another."""
    if is_alike(value, like):
        return value
    return torch.empty_like(like, dtype=value.dtype, device=value.device).copy_(value)


def flat_order(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the elements of `value`, shaped like `like`, in the memory order of `like`: a view if it has the order."""
    return flat(in_order_of(value, like))
