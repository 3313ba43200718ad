"""Keep values of the batch in parts, one tensor for each micro-batch, and pass offloaded activations between device and
host slice by slice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from elixir_compile import compat
from elixir_compile.graph.rewrite.regions import Layout
from elixir_compile.ir import Lane
from elixir_compile.runtime.bucket import Slab
from elixir_compile.runtime.lanes import Event, Lanes
from elixir_compile.runtime.recording import Ledger

# ----------------------------------------------------------------------------------------------------------------------
# Values of the whole batch that stay in parts: a tensor for each micro-batch, as the body of a region has made it.
#
# Nothing is copied if the compiled body returns a tensor in the layout of the capture that has its memory for itself or
# shares it with views of the same value. All other tensors are copied into memory of that layout.


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


# ----------------------------------------------------------------------------------------------------------------------
# Activations that pass between device and host slice by slice, while a region runs in micro-batches.
#
#   forward    micro-batch j fills the slice on the device;  slice -> piece j of the host's copy, beside micro-batch j
# + 1
#   backward   piece j + 1 -> the next slice, beside micro-batch j, which reads the slice before it
#
# The slice of a storage that leaves is filled again when its copy is done. So the device has one slice of a storage
# that leaves, beside the result of the micro-batch, and two slices of a storage that arrives.


Slicing = Sequence[tuple[int, int] | None]
"""For each value of a group the dimension and the number of the slices in which it arrives; None if it arrives as a
whole. Empty if all values do."""


@dataclass(frozen=True, slots=True)
class View:
    """The layout of an activation: its storage in the group, and its view of this storage."""

    storage: int
    """The index of the storage in the group."""
    layout: compat.MemoryView

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this view of `flat`, the bytes of its storage."""
        return self.layout.over(flat.untyped_storage())

    def slice(self, dim: int, num: int) -> "View":
        """Return the view of a slice alone in memory, one of `num` along `dim`."""
        shape = self.layout.shape
        part = (*shape[:dim], shape[dim] // num, *shape[dim + 1 :])
        return replace(self, layout=replace(self.layout, shape=part))

    def is_consecutive(self, dim: int, num: int, nbytes: int) -> bool:
        """Return whether `num` slices along `dim` are consecutive pieces of a storage of `nbytes`."""
        shape, stride = self.layout.shape, self.layout.stride
        rows_apart = stride[dim]
        last = self.layout.offset + sum((shape[n] - 1) * stride[n] for n in range(len(shape)) if n != dim)
        is_outermost = shape[dim] * rows_apart * self.layout.dtype.itemsize == nbytes
        return is_outermost and shape[dim] % num == 0 and last < rows_apart


class LeavingStorage:
    """A storage of the running forward that leaves the device in slices."""

    def __init__(self, nbytes: int, num: int, slab: Slab, lanes: Lanes, ledger: Ledger, label: str) -> None:
        """Its `nbytes` go to the begin of `slab` in `num` slices."""
        self.slab = slab
        self.on_host = slab.tensor(torch.uint8, (nbytes,), 0)
        self.slice: torch.Tensor | None = None
        """The bytes of the slice on the device."""
        self.num = num
        self._lanes = lanes
        self._ledger = ledger
        self._label = label
        self._event: Event | None = None

    @property
    def nbytes(self) -> int:
        return self.on_host.numel()

    def begin(self) -> None:
        """Let compute issued from now on fill the slice: it waits until the slice before has left."""
        if self.slice is None:
            self.slice = self._lanes.empty(self.nbytes // self.num)
            self._ledger.takes(self._label, (self.slice,))
        self._lanes.compute_waits(self._event)
        self._lanes.touches((), (self.slice,))

    def part(self, view: View, dim: int) -> torch.Tensor:
        """Return the slice along `dim` of `view`, a view of the whole storage."""
        assert self.slice is not None
        return view.slice(dim, self.num).of(self.slice)

    def send(self, number: int) -> None:
        """Start copying the slice, which micro-batch `number` has filled, to its place on the host."""
        assert self.slice is not None
        size, d2h = self.slice.numel(), self._lanes.d2h
        with d2h.behind_compute(), self._ledger.span(Lane.D2H, self._label, size, times=0, piece=1 + number):
            d2h.copy(self.on_host[number * size : (number + 1) * size], self.slice)
        self._event = d2h.mark()

    def handed_over(self) -> torch.Tensor:
        """Return the slice that may still be leaving; the caller keeps it until then."""
        assert self.slice is not None
        last, self.slice = self.slice, None
        return last


@dataclass(frozen=True, slots=True)
class LeavingView:
    """A value of the forward that is on the host when its region ends: a view of a storage that left in slices."""

    source: LeavingStorage
    view: View


class ArrivingStorage:
    """A storage that arrives on the device in slices, for one run of the region that reads it."""

    def __init__(
        self,
        on_host: torch.Tensor,
        num: int,
        lanes: Lanes,
        ledger: Ledger,
        label: str,
    ) -> None:
        """`on_host` has the bytes of the storage, for whose copy to the host `lanes.h2d` waits already. The copy of the
        first slice starts."""
        self._on_host = on_host
        self._num = num
        self._lanes = lanes
        self._ledger = ledger
        self._label = label
        self._slice: torch.Tensor | None = None
        self._next, self._event = self._start(0)

    def _start(self, number: int) -> tuple[torch.Tensor, Event | None]:
        size, h2d = self._on_host.numel() // self._num, self._lanes.h2d
        # Compute uses and frees it, and waits for the copy before both.
        flat = self._lanes.empty(size)
        self._ledger.takes(self._label, (flat,))
        with h2d.behind_compute(), self._ledger.span(Lane.H2D, self._label, size, times=0, piece=1 + number):
            h2d.copy(flat, self._on_host[number * size : (number + 1) * size])
        return flat, h2d.mark()

    def begin(self, number: int) -> None:
        """Begin micro-batch `number`: start copying the next slice, and let compute wait for this one."""
        self._slice, arrived = self._next, self._event
        if number + 1 < self._num:
            self._next, self._event = self._start(number + 1)
        self._lanes.compute_waits(arrived)

    def slice(self, view: View, dim: int) -> torch.Tensor:
        """Return the slice along `dim` of `view`, a view of the whole storage."""
        assert self._slice is not None
        return view.slice(dim, self._num).of(self._slice)

    def release(self) -> None:
        """Leave the memory of the slice to the tensors that `slice` returned."""
        self._slice = None


@dataclass(frozen=True, slots=True)
class ArrivingView:
    """A value that the backward reads in slices: a view of a storage that arrives in slices."""

    source: ArrivingStorage
    view: View


def num_slices(storage: int, nbytes: int, views: Sequence[View], slices: Slicing) -> int:
    """Return the number of slices in which `storage` of a group arrives, 1 for the whole at once.

    `nbytes` are its bytes, and `views` the values of the group. It arrives as a whole if its slices are not consecutive
    in memory, as they are in the layout of the capture.
    """
    found = {
        cut[1] if cut is not None and view.is_consecutive(*cut, nbytes) else 1
        for view, cut in zip(views, slices, strict=bool(slices))
        if view.storage == storage
    }
    return found.pop() if len(found) == 1 else 1
