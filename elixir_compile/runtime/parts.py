"""Values of the whole batch that stay in parts: a tensor for each micro-batch, as the body of a region has made it.

Nothing is copied if the compiled body returns a tensor in the layout of the capture that has its memory for itself or
shares it with views of the same value. All other tensors are copied into memory of that layout.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from elixir_compile.rewrite.divided_graph import Layout


class InParts:
    """A value of the whole batch as its parts along dimension `dim`."""

    __slots__ = ("dim", "tensors")

    def __init__(self, tensors: list[torch.Tensor], dim: int) -> None:
        self.tensors = tensors
        """The part of each micro-batch, in order."""
        self.dim = dim

    def viewed(self, layout: Layout) -> "InParts":
        """Return the view of this value whose parts have `layout`."""
        return InParts([_view_of(part, layout) for part in self.tensors], layout.dim)

    def joined(self, memories: dict[int, torch.Tensor] | None = None) -> torch.Tensor:
        """Return a copy as one tensor in the layout of the capture, whose memory is that of all parts in order.

        `memories` are the copies so far, by the address of the memory of their first part. Views of one memory share
        its copy.
        """
        first, memories = self.tensors[0], {} if memories is None else memories
        address = first.untyped_storage().data_ptr()
        if address not in memories:
            memories[address] = torch.cat([_memory_of(part) for part in self.tensors])
        memory = memories[address].view(first.dtype)
        shape, stride = list(first.shape), list(first.stride())
        stride[self.dim] = memory.numel() // len(self.tensors) // max(shape[self.dim], 1)
        shape[self.dim] *= len(self.tensors)
        return memory.as_strided(shape, stride, first.storage_offset())


def kept_part(part: torch.Tensor, layout: Layout, of_memory: torch.Tensor | None) -> torch.Tensor:
    """Return `part`, a result of the body, in `layout`.

    `of_memory` is another result of the same micro-batch that is a view of the same memory, None if there is none yet.
    The dtype is that of `part`: torch 2.11 captures attention in fp64 on a CPU as if it made logarithms of sums in
    fp32. They are in fp64, and its backward refuses fp32.
    """
    if _has_layout(part, layout) and (of_memory is None or _share_memory(part, of_memory)):
        return part
    if of_memory is None:
        memory = torch.empty(layout.nbytes // layout.dtype.itemsize, dtype=part.dtype, device=part.device)
        own = memory.as_strided(layout.shape, layout.stride, layout.offset)
    else:
        own = _view_of(of_memory, layout)
    target = own
    for dim, (size, stride) in enumerate(zip(layout.shape, layout.stride, strict=True)):
        if stride == 0 and size > 1:  # an expanded dimension has the memory of one entry
            target, part = target.narrow(dim, 0, 1), part.narrow(dim, 0, 1)
    target.copy_(part)
    return own


def viewed(value: InParts | torch.Tensor, layout: Layout, num: int) -> InParts | torch.Tensor:
    """Return the view of `value` whose parts have `layout`. `value` has `num` parts, or is a tensor in the layout of
    the capture, because hooks packed it between forward and backward."""
    if isinstance(value, InParts):
        return value.viewed(layout)
    shape = tuple(size * num if dim == layout.dim else size for dim, size in enumerate(layout.shape))
    return _view_of(value, replace(layout, shape=shape, nbytes=layout.nbytes * num))


def tensors_in(values: Sequence["InParts | torch.Tensor"]) -> list[torch.Tensor]:
    """Return the tensors of all parts of `values`."""
    return [part for value in values for part in (value.tensors if isinstance(value, InParts) else (value,))]


def _has_layout(part: torch.Tensor, layout: Layout) -> bool:
    return (
        part.untyped_storage().nbytes() == layout.nbytes
        and part.storage_offset() == layout.offset
        and (
            part.stride() == layout.stride
            or all(
                own == wanted or size == 1
                for own, wanted, size in zip(part.stride(), layout.stride, layout.shape, strict=True)
            )
        )
    )


def _memory_of(part: torch.Tensor) -> torch.Tensor:
    """Return the memory of `part` as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=part.device).set_(part.untyped_storage())


def _share_memory(part: torch.Tensor, other: torch.Tensor) -> bool:
    return part.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _view_of(part: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return the view of the memory of `part` that has `layout`."""
    empty = torch.empty(0, dtype=layout.dtype, device=part.device)
    return empty.set_(part.untyped_storage(), layout.offset, layout.shape, layout.stride)
