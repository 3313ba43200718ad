"""A tensor as a view of memory: its layout, and the two bits whose work torch leaves to the readers of the tensor.

torch computes neither `z.conj()` nor, of real tensors, `z.conj().imag`: it returns a view of the memory of `z` with a
bit, the conjugate bit or the negative bit, and each op that reads the view applies the bit. So the bytes of such a
tensor are not its values. Two rules follow, and whatever handles memory instead of values keeps one of them:

    bytes go elsewhere and come back     the tensor is made again by its `MemoryView`, which knows both bits
    an address goes to a kernel, a       the tensor is `settled` first: its values are in its memory
    collective or a file
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class LazyBits(NamedTuple):
    """Which of the two bits a tensor has; its values are those in memory, conjugated and negated as they say."""

    is_conj: bool = False
    is_neg: bool = False


def lazy_bits(tensor: torch.Tensor) -> LazyBits:
    """Return the bits of `tensor`, real or fake."""
    return LazyBits(tensor.is_conj(), tensor.is_neg())


def is_lazy(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` has a bit."""
    return tensor.is_conj() or tensor.is_neg()


def with_bits(tensor: torch.Tensor, bits: LazyBits) -> torch.Tensor:
    """Return the memory of `tensor` as a tensor with `bits`: a view, or `tensor` itself if it has them.

    `torch._neg_view`: torch 2.11 to 2.13. Gone: AttributeError if an activation with a negative bit is offloaded.
    """
    if tensor.is_conj() != bits.is_conj:
        tensor = tensor.conj()
    if tensor.is_neg() != bits.is_neg:
        tensor = torch._neg_view(tensor)  # pyright: ignore[reportPrivateImportUsage]
    return tensor


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of `tensor` in memory without bits: a copy, or `tensor` itself if it has none."""
    return tensor.resolve_conj().resolve_neg()


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the bytes of `storage` as a tensor over the same memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryView:
    """How a tensor reads its storage."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """In elements."""
    bits: LazyBits = field(default_factory=LazyBits)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "MemoryView":
        """Return how `tensor`, whose sizes are numbers, reads its storage."""
        return cls(
            dtype=tensor.dtype,
            shape=tuple(map(int, tensor.shape)),
            stride=tuple(map(int, tensor.stride())),
            offset=int(tensor.storage_offset()),
            bits=lazy_bits(tensor),
        )

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor that reads `storage` in this way."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return with_bits(empty.set_(storage, self.offset, self.shape, self.stride), self.bits)

    def is_like(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor`, of this shape and dtype, reads its storage in this way."""
        strides = zip(tensor.stride(), self.stride, self.shape, strict=True)
        is_laid_out = all(own == wanted or size == 1 for own, wanted, size in strides)
        return is_laid_out and tensor.storage_offset() == self.offset and lazy_bits(tensor) == self.bits


def like_in_strides(example: torch.Tensor, stride: "Sequence[int | torch.SymInt]", device: torch.device | None = None):
    """Return an uninitialised tensor with the shape, the dtype and the bits of `example`, in the strides `stride`."""
    made = torch.empty_strided(example.shape, stride, dtype=example.dtype, device=device or example.device)
    return with_bits(made, lazy_bits(example))
