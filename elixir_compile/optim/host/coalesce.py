"""Tensors that follow each other in host memory, as one: a bucket is then one call into C, not one for each tensor.

    slab of the parameters   |-- a --|pad|---- b ----|pad|-- c --|
    slab of a moment         |-- a --|pad|---- b ----|pad|-- c --|      the same elements, each of another size

A slab is cut so that the next tensor starts behind the last one's end, rounded up to `ALIGN_BYTES` of the parameters,
and nothing else is between them: an update may run over it. See `RunningBucket.state_buffers`.
"""

import ctypes
from collections.abc import Iterator, Sequence

import torch

from elixir_compile.runtime.slab import ALIGN_BYTES, aligned_bytes, flat, is_slab_memory

Row = Sequence[torch.Tensor]
"""What one parameter has: tensors of one size, dense, each kind at the same place; the first is the parameter."""


def coalesce(rows: Sequence[Row], steps: Sequence[int]) -> Iterator[tuple[list[int], Row]]:
    """Yield the indices of neighbours among `rows` that are at one step, and each kind of theirs as one flat tensor."""
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
    """Whether each tensor of `following` is where a slab has it that holds that of `row` right before."""
    step = aligned_bytes(row[0].nbytes) // row[0].element_size()
    return all(
        (one.dtype, one.data_ptr() + step * one.element_size()) == (other.dtype, other.data_ptr())
        for one, other in zip(row, following, strict=True)
    ) and all(map(_is_cut, (*row, *following)))


def _is_cut(tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() % ALIGN_BYTES == 0 and is_slab_memory(tensor.data_ptr())


def _joined(rows: Sequence[Row], members: Sequence[int]) -> Row:
    first, last = rows[members[0]], rows[members[-1]]
    if len(members) == 1:
        return [flat(tensor) for tensor in first]
    return [_between(one, other) for one, other in zip(first, last, strict=True)]


def _between(first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return the memory from the start of `first` to the end of `last`; good while somebody holds both."""
    nbytes = last.data_ptr() + last.nbytes - first.data_ptr()
    memory = (ctypes.c_byte * nbytes).from_address(first.data_ptr())
    return torch.frombuffer(memory, dtype=first.dtype)
