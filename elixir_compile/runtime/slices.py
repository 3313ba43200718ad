"""Activations that pass between device and host slice by slice, while a region runs in micro-batches.

```text
  forward    micro-batch j fills the slice on the device;  slice -> piece j of the host's copy, beside micro-batch j + 1
  backward   piece j + 1 -> the next slice, beside micro-batch j, which reads the slice before it
```

The slice of a storage that leaves is filled again when its copy is done. So the device has one slice of a storage
that leaves, beside the result of the micro-batch, and two slices of a storage that arrives.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from elixir_compile import compat
from elixir_compile.ir import Lane
from elixir_compile.runtime.lanes import Event, Lanes
from elixir_compile.runtime.ledger import Ledger
from elixir_compile.runtime.slab import Slab

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
