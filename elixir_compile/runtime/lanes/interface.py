"""The interface of lanes: everything that the runtime does beside the program order of its Python code.

```text
  gather b1        lanes.h2d.beside_compute(): copy slab -> flat; mark
  run h.0          lanes.computes(region)(inputs)                               compute  | run h.0 |.wait.| run h.1 |
  wait b1          lanes.compute_waits(mark)                                    h2d      | copy b1      |
  run h.1
```

Compute is the work that torch issues on the current stream of `Lanes.device`. Each copy lane is one more queue: its
work is done in the order of issue, at any time relative to compute and to the other lanes, unless a wait says more.
An event is None if the lane is synchronous, that is, if its work is done when the issuing call returns.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch


class Event(Protocol):
    """A moment in the work of a lane: it is past when all work issued on the lane before it is done."""

    def query(self) -> bool:
        """Return whether the moment is past."""
        ...


class CopyLane(Protocol):
    """A queue of copies in one direction, or of collectives."""

    @property
    def is_asynchronous(self) -> bool:
        """Whether the work of the lane runs beside compute."""
        ...

    def behind_compute(self, after: Event | None = None) -> AbstractContextManager[object]:
        """Issue the work of the block on this lane, after the compute issued so far and after `after`."""
        ...

    def beside_compute(self, after: Event | None = None) -> AbstractContextManager[object]:
        """Issue the work of the block on this lane, after its earlier work and after `after`, not after compute."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start copying `source` to `target` on this lane; the caller is in the block of this lane.

        Both tensors must stay alive and unwritten until an event after the copy.
        """
        ...

    def mark(self) -> Event | None:
        """Return an event after the work issued on this lane so far, or None if the lane is synchronous."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until all work issued on this lane so far is done."""
        ...


class Waitable(Protocol):
    """A collective in flight."""

    def wait(self) -> object:
        """Make work that is issued from now on wait for the collective."""
        ...


class TimedEvent(Event, Protocol):
    """A moment of the device's clock."""

    def elapsed_time(self, other: Any) -> float:
        """Return the milliseconds from this moment to `other`; both must be past."""
        ...


class Lanes(Protocol):
    """The lanes of one executor: compute on `device`, copies in each direction, and collectives."""

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        ...

    @property
    def h2d(self) -> CopyLane:
        """Copies from the host to the device."""
        ...

    @property
    def d2h(self) -> CopyLane:
        """Copies from the device to the host."""
        ...

    @property
    def collectives(self) -> CopyLane:
        """Collectives that wait for other collectives."""
        ...

    @property
    def pins(self) -> bool:
        """Whether copies need page-locked host memory to run beside compute."""
        ...

    @property
    def has_clock(self) -> bool:
        """Whether the device times its work, so that `timed_event` serves. Else the clock of the host times it."""
        ...

    def hand_over(self) -> Callable[[], None]:
        """Return a function that another thread calls before it goes on after the work of the calling thread.

        It makes `device` the current device of that thread, which began with device 0.
        """
        ...

    def hand_back(self, event: Event | None) -> Callable[[], None] | None:
        """Return a function that a reader of the calling thread's work calls first; None if there is nothing to do.

        It makes compute of the reader's thread wait for `event`.
        """
        ...

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return `nbytes` of uninitialized device memory for several lanes.

        The memory is allocated and freed in the order of compute: a lane that uses it waits for `mark_compute` first,
        and compute waits for that use before the memory is freed.
        """
        ...

    def computes(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Return `run`, a function that reads the tensors in its list of inputs and returns new tensors, as compute.

        Programs call the result in place of `run`.
        """
        ...

    def touches(self, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor] = ()) -> None:
        """Declare that the following Python code or kernel reads `reads` and writes `writes`.

        A tensor in host memory is touched by the calling thread, a tensor in device memory by compute. Nothing else
        sees kernels that are called through ctypes.
        """
        ...

    def collective(self, work: Waitable, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]) -> Waitable:
        """Return the collective to wait for in place of `work`, which reads `reads` and writes `writes` until then."""
        ...

    def mark_compute(self) -> Event | None:
        """Return an event after the compute issued so far, or None if compute is synchronous."""
        ...

    def compute_waits(self, event: Event | None) -> None:
        """Make compute that is issued from now on wait for `event`."""
        ...

    def host_waits(self, event: Event | None) -> None:
        """Block the calling thread until `event` is past, without keeping a core busy."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until all work issued on the device is done, on any lane."""
        ...

    def timed_event(self) -> TimedEvent:
        """Return an event after the work issued so far on the lane of the block, compute outside of a block.

        Only for lanes that have a clock.
        """
        ...


@runtime_checkable
class Announced(Protocol):
    """What lanes also are that name actions, as those that check accesses do."""

    def announced(self, action: str) -> AbstractContextManager[object]:
        """Give the accesses of the block the name `action`."""
        ...
