"""Lanes of an accelerator: a stream for each, by `torch.Stream` and `torch.Event`, which serve every device type.

Every event is recorded on a named stream, never on "the current stream of the current device": autograd's thread and
ours may have another current device than the thread that made the lanes.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from elixir_compile.compat.platforms import lane_stream, platform_of
from elixir_compile.runtime.lanes.interface import Event, Waitable

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
