"""Lanes: the queues on which copies and collectives run beside compute, on the streams of an accelerator or without
streams, and the transfers in flight on them.
"""

import importlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch

from elixir_compile.base.errors import InvalidOption, UnsupportedDevice
from elixir_compile.compat.platforms import lane_stream, platform_of

# ----------------------------------------------------------------------------------------------------------------------
# The interface of lanes: everything that the runtime does beside the program order of its Python code.
#
#   gather b1        lanes.h2d.beside_compute(): copy slab -> flat; mark
#   run h.0          lanes.computes(region)(inputs)                               compute  | run h.0 |.wait.| run h.1 |
#   wait b1          lanes.compute_waits(mark)                                    h2d      | copy b1      |
#   run h.1
#
# Compute is the work that torch issues on the current stream of `Lanes.device`. Each copy lane is one more queue: its
# work is done in the order of issue, at any time relative to compute and to the other lanes, unless a wait says more.
# An event is None if the lane is synchronous, that is, if its work is done when the issuing call returns.


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


# ----------------------------------------------------------------------------------------------------------------------
# A copy or a collective in flight, as programs hold it between its start and its wait.


@dataclass(slots=True, eq=False)
class Transfer:
    """A copy in flight."""

    label: str
    event: Event | None
    """Past when the copy is done; None if the copy is synchronous, or is not issued yet."""
    values: tuple[Any, ...] = ()
    """The tensors that the copy makes, and an `ArrivingView` for each value of which it makes the first slice."""
    sources: tuple[torch.Tensor, ...] = ()
    """The tensors that the copy reads, kept alive until the wait."""

    def ensure_issued(self) -> Event | None:
        """Issue the copy if it is not issued yet; return its event, or None if copies are synchronous."""
        return self.event


class LateTransfer(Transfer):
    """A synchronous copy that starts at the wait, to let the program continue until then."""

    __slots__ = ("_begin",)

    def __init__(self, label: str, begin: Callable[[], Transfer]) -> None:
        super().__init__(label, None)
        self._begin = begin

    def ensure_issued(self) -> Event | None:
        """Make the copy; return its event, or None if copies are synchronous."""
        copied = self._begin()
        self.values, copied.sources = copied.values, ()  # the copy is done, and other objects may hold `copied`
        return copied.ensure_issued()


# ----------------------------------------------------------------------------------------------------------------------
# Lanes without streams: each call does its work before it returns, as on a CPU.


_AT_ONCE: AbstractContextManager[object] = nullcontext()


class PlainLane:
    """A lane whose copies are done when the call returns."""

    is_asynchronous = False

    def behind_compute(self, after: Event | None = None) -> AbstractContextManager[object]:
        """Return a block without effect."""
        return _AT_ONCE

    def beside_compute(self, after: Event | None = None) -> AbstractContextManager[object]:
        """Return a block without effect."""
        return _AT_ONCE

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source` to `target`."""
        target.copy_(source)

    def mark(self) -> None:
        """Return None."""

    def synchronize(self) -> None:
        """Return at once."""


class Plain:
    """The lanes of a device that computes in host memory."""

    pins = False
    has_clock = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.h2d = PlainLane()
        self.d2h = PlainLane()
        self.collectives = PlainLane()

    def hand_over(self) -> Callable[[], None]:
        """Return a function that does nothing: there is a single device."""
        return lambda: None

    def hand_back(self, event: Event | None) -> None:
        """Return None."""

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return `nbytes` of uninitialized memory."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def computes(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Return `run` itself."""
        return run

    def touches(self, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor] = ()) -> None:
        """Do nothing."""

    def collective(self, work: Waitable, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]) -> Waitable:
        """Return `work` itself."""
        return work

    def mark_compute(self) -> None:
        """Return None."""

    def compute_waits(self, event: Event | None) -> None:
        """Return at once."""

    def host_waits(self, event: Event | None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def timed_event(self) -> TimedEvent:
        """Raise AssertionError: work is timed by the clock of the host."""
        raise AssertionError("the host has no events; ask `has_clock` first")


# ----------------------------------------------------------------------------------------------------------------------
# Lanes of an accelerator: a stream for each, by `torch.Stream` and `torch.Event`, which serve every device type.
#
# Every event is recorded on a named stream, never on "the current stream of the current device": autograd's thread and
# ours may have another current device than the thread that made the lanes.


_POLL_S = 5e-5
"""Between two looks at an event. `torch.Event.synchronize` would keep a core busy, one of those that update, because
`torch.Event` ignores `blocking` (torch 2.11 to 2.13)."""


class StreamLane:
    """A stream beside the stream of compute on the same device, which all lanes of that name on the device share."""

    is_asynchronous = True

    def __init__(self, device: torch.device, name: str) -> None:
        self._device = device
        self._stream = lane_stream(device, name)

    def behind_compute(self, after: Event | None = None) -> AbstractContextManager[object]:
        """Issue the work of the block on the stream, after the compute issued so far and after `after`."""
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        return self.beside_compute(after)

    @contextmanager
    def beside_compute(self, after: Event | None = None) -> Iterator[None]:
        """Issue the work of the block on the stream, after its earlier work and after `after`."""
        if after is not None:
            self._stream.wait_event(_device_event(after))
        # A new object for each block, because the thread of the updates and the thread of the step may be in blocks of
        # this lane at the same time. torch 2.13 keeps the stream before the block on a stack of the `torch.Stream`,
        # which all threads share; torch 2.11 raises RuntimeError if an object is entered twice.
        stream = self._stream
        with torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type):
            yield

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start copying `source` to `target` on the stream."""
        target.copy_(source, non_blocking=True)

    def mark(self) -> torch.Event:
        """Return an event after the work issued on the stream so far."""
        return recorded(self._stream)

    def synchronize(self) -> None:
        """Block the calling thread until the work of the stream is done."""
        self._stream.synchronize()


class Accelerator:
    """The lanes of `device`, which has memory of its own."""

    pins = True
    has_clock = True

    def __init__(self, device: torch.device) -> None:
        self._platform = platform_of(device)
        self.device = device if device.index is not None else self._platform.current()
        self.h2d = StreamLane(self.device, "h2d")
        self.d2h = StreamLane(self.device, "d2h")
        self.collectives = StreamLane(self.device, "collectives")

    def hand_over(self) -> Callable[[], None]:
        """Return a function that makes the device the current device of the calling thread.

        Without it, a thread would open a context on device 0, half a gigabyte, when it leaves a block of a stream.
        """
        return partial(self._platform.make_current, self.device)

    def hand_back(self, event: Event | None) -> Callable[[], None] | None:
        """Return a function that makes compute wait for `event`; None without an event."""
        return None if event is None else partial(self.compute_waits, event)

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return `nbytes` of uninitialized device memory, allocated on the stream of compute."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def computes(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Return `run` itself: it issues its kernels on the current stream."""
        return run

    def touches(self, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor] = ()) -> None:
        """Do nothing: streams order kernels, not the memory that they use."""

    def collective(self, work: Waitable, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]) -> Waitable:
        """Return `work` itself, whose wait makes the current stream wait."""
        return work

    def mark_compute(self) -> torch.Event:
        """Return an event after the compute issued so far."""
        return recorded(self._compute())

    def compute_waits(self, event: Event | None) -> None:
        """Make compute that is issued from now on wait for `event`."""
        if event is not None:
            self._compute().wait_event(_device_event(event))

    def host_waits(self, event: Event | None) -> None:
        """Block the calling thread until `event` is past, asking again every `_POLL_S`."""
        while event is not None and not event.query():
            time.sleep(_POLL_S)

    def synchronize(self) -> None:
        """Block the calling thread until all work issued on the device is done."""
        self._platform.synchronize(self.device)

    def timed_event(self) -> torch.Event:
        """Return an event, with the device's time, on the stream of the block."""
        return recorded(self._compute(), is_timed=True)

    def _compute(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)


def recorded(stream: torch.Stream, *, is_timed: bool = False) -> torch.Event:
    """Return an event after the work issued on `stream` so far, with the time of the device if `is_timed`."""
    event = torch.Event(stream.device, enable_timing=is_timed)
    event.record(stream)
    return event


def _device_event(event: Event) -> torch.Event:
    assert isinstance(event, torch.Event), "all lanes of a process wait for events of the same kind"
    return event


# ----------------------------------------------------------------------------------------------------------------------
# Choose the lanes of an executor: by its device, and with the checks of tests around them.


_CHECKER = "ELIXIR_CHECK_RACES"


def lanes_for(device: torch.device) -> Lanes:
    """Return new lanes on `device`, if the environment has `ELIXIR_CHECK_RACES=tests.races.checked` with its checks.

    Raises UnsupportedDevice if torch has no streams, no events or no figures of memory for the type of `device`, and
    InvalidOption if the module that the environment names has no checks.
    """
    platform = platform_of(device)
    if missing := platform.missing(device):
        raise UnsupportedDevice(device.type, missing)
    lanes: Lanes = Accelerator(device) if platform.has_own_memory else Plain(device)
    checker = os.environ.get(_CHECKER)
    if not checker:
        return lanes
    try:
        return importlib.import_module(checker).Checked(lanes)
    except (ImportError, AttributeError, TypeError) as error:
        expected = '"tests.races.checked", with the folder of the tests of this package in PYTHONPATH'
        raise InvalidOption(_CHECKER, checker, expected) from error
