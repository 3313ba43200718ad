"""Values of the whole batch that stay in parts: a tensor for each micro-batch, as the body of a region has made it.

Nothing is copied if the compiled body returns a tensor in the layout of the capture that has its memory for itself or
shares it with views of the same value. All other tensors are copied into memory of that layout.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from elixir_compile import compat
from elixir_compile.graph.rewrite.divided_graph import Layout


class InParts:
    """A value of the whole batch as its parts along dimension `dim`."""

    __slots__ = ("dim", "tensors")

    def __init__(self, tensors: list[torch.Tensor], dim: int) -> None:
        self.tensors = tensors
        """The part of each micro-batch, in order."""
        self.dim = dim

    def viewed(self, layout: Layout) -> "InParts":
        """Return the view of this value whose parts have `layout`."""
        return InParts([layout.view.over(part.untyped_storage()) for part in self.tensors], layout.dim)

    def joined(self, memories: dict[int, torch.Tensor] | None = None) -> torch.Tensor:
        """Return a copy as one tensor in the layout of the capture, whose memory is that of all parts in order.

        `memories` are the copies so far, by the address of the memory of their first part. Views of one memory share
        its copy.
        """
        first, memories = self.tensors[0], {} if memories is None else memories
        address = first.untyped_storage().data_ptr()
        if address not in memories:
            memories[address] = torch.cat([compat.bytes_of(part.untyped_storage()) for part in self.tensors])
        memory, view = memories[address], compat.MemoryView.of(first)
        shape, stride = list(view.shape), list(view.stride)
        stride[self.dim] = memory.nbytes // view.dtype.itemsize // len(self.tensors) // max(shape[self.dim], 1)
        shape[self.dim] *= len(self.tensors)
        return replace(view, shape=tuple(shape), stride=tuple(stride)).over(memory.untyped_storage())


def kept_part(part: torch.Tensor, layout: Layout, of_memory: torch.Tensor | None) -> torch.Tensor:
    """Return `part`, a result of the body, in `layout`.

    `of_memory` is another result of the same micro-batch that is a view of the same memory, None if there is none yet.
    The dtype is that of `part`: torch 2.11 captures attention in fp64 on a CPU as if it made logarithms of sums in
    fp32. They are in fp64, and its backward refuses fp32.
    """
    view = replace(layout.view, dtype=part.dtype)
    has_layout = part.untyped_storage().nbytes() == layout.nbytes and view.is_like(part)
    if has_layout and (of_memory is None or _share_memory(part, of_memory)):
        return part
    if of_memory is None:
        numel = layout.nbytes // layout.view.dtype.itemsize
        own = view.over(torch.empty(numel, dtype=part.dtype, device=part.device).untyped_storage())
    else:
        own = layout.view.over(of_memory.untyped_storage())
    target = own
    for dim, (size, stride) in enumerate(zip(view.shape, view.stride, strict=True)):
        if stride == 0 and size > 1:  # an expanded dimension has the memory of one entry
            target, part = target.narrow(dim, 0, 1), part.narrow(dim, 0, 1)
    target.copy_(part)
    return own


def viewed(value: InParts | torch.Tensor, layout: Layout, num: int) -> InParts | torch.Tensor:
    """Return the view of `value` whose parts have `layout`. `value` has `num` parts, or is a tensor in the layout of
    the capture, because hooks packed it between forward and backward."""
    if isinstance(value, InParts):
        return value.viewed(layout)
    shape = tuple(size * num if dim == layout.dim else size for dim, size in enumerate(layout.view.shape))
    return replace(layout.view, shape=shape).over(value.untyped_storage())


def tensors_in(values: Sequence["InParts | torch.Tensor"]) -> list[torch.Tensor]:
    """Return the tensors of all parts of `values`."""
    return [part for value in values for part in (value.tensors if isinstance(value, InParts) else (value,))]


def _share_memory(part: torch.Tensor, other: torch.Tensor) -> bool:
    return part.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
