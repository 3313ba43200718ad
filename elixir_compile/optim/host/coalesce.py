"""Join tensors that follow each other in host memory, so that a bucket takes a single call into C.

    slab of the parameters   |-- a --|pad|---- b ----|pad|-- c --|
    slab of a moment         |-- a --|pad|---- b ----|pad|-- c --|      the same elements, each of another size

In a slab, each tensor starts at the end of the tensor before it, rounded up to `ALIGN_BYTES` of the parameters. Only
padding is between them, so an update may run over the padding too. See `RunningBucket.state_buffers`.
"""

import ctypes
from collections.abc import Iterator, Sequence

import torch

from elixir_compile.runtime.slab import ALIGN_BYTES, aligned_bytes, flat, is_slab_memory

Row = Sequence[torch.Tensor]
"""The tensors of a parameter, dense and of equal element count: the parameter first, the others in a fixed order."""


def coalesce(rows: Sequence[Row], steps: Sequence[int]) -> Iterator[tuple[list[int], Row]]:
    """Yield groups of rows that are neighbours in memory and at the same step: their indices and joined tensors."""
    order = sorted(range(len(rows)), key=lambda index: rows[index][0].data_ptr())
    members: list[int] = []
    for index in order:
        if members and not (steps[members[-1]] == steps[index] and _follows(rows[members[-1]], rows[index])):
            yield members, _joined(rows, members)
            members = []
        members.append(index)
    if members:
        yield members, _joined(rows, members)


def _follows(row: Row, following: Row) -> bool:
    """Return whether each tensor of `following` comes right behind the same kind of tensor of `row` in a slab."""
    step = aligned_bytes(row[0].nbytes) // row[0].element_size()
    return all(
        (tensor.dtype, tensor.data_ptr() + step * tensor.element_size()) == (behind.dtype, behind.data_ptr())
        for tensor, behind in zip(row, following, strict=True)
    ) and all(map(_is_cut, (*row, *following)))


def _is_cut(tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() % ALIGN_BYTES == 0 and is_slab_memory(tensor.data_ptr())


def _joined(rows: Sequence[Row], members: Sequence[int]) -> Row:
    first, last = rows[members[0]], rows[members[-1]]
    if len(members) == 1:
        return [flat(tensor) for tensor in first]
    return [_between(start, end) for start, end in zip(first, last, strict=True)]


def _between(first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return the memory from the start of `first` to the end of `last`; valid only while both are alive."""
    nbytes = last.data_ptr() + last.nbytes - first.data_ptr()
    memory = (ctypes.c_byte * nbytes).from_address(first.data_ptr())
    return torch.frombuffer(memory, dtype=first.dtype)
