"""Copies between host and device: on side streams on CUDA, synchronous on a CPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(slots=True, eq=False)
class Transfer:
    """A copy in flight."""

    label: str
    event: "torch.cuda.Event | None"
    """Completes with the copy; None if the copy is synchronous, or is not issued yet."""
    values: tuple[Any, ...] = ()
    """The tensors that the copy makes, and an `ArrivingView` for each value of which it makes the first slice."""
    sources: tuple[torch.Tensor, ...] = ()
    """The tensors that the copy reads, kept alive until the wait."""

    def ensure_issued(self) -> "torch.cuda.Event | None":
        """Issue the copy if it is not issued yet; return its event, or None if copies are synchronous."""
        return self.event


class LateTransfer(Transfer):
    """A synchronous copy that starts at the wait, to let the program continue until then."""

    __slots__ = ("_begin",)

    def __init__(self, label: str, begin: Callable[[], Transfer]) -> None:
        super().__init__(label, None)
        self._begin = begin

    def ensure_issued(self) -> "torch.cuda.Event | None":
        """Make the copy; return its event, or None if copies are synchronous."""
        copied = self._begin()
        self.values, copied.sources = copied.values, ()  # the copy is done, and other objects may hold `copied`
        return copied.ensure_issued()


class CopyStream:
    """A direction of copies between the device and the host.

    On CUDA a copy runs beside compute. It does not start before its place in the program, because it first waits for
    the compute issued before it.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def is_asynchronous(self) -> bool:
        """Whether copies run beside compute."""
        return self._stream is not None

    @contextmanager
    def behind_compute(self, after: torch.cuda.Event | None = None) -> Iterator[None]:
        """Issue the copies of the block on this stream, after the compute issued so far and after `after`."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            yield

    @contextmanager
    def beside_compute(self, after: torch.cuda.Event | None = None) -> Iterator[None]:
        """Issue the copies of the block on this stream, after its earlier copies and `after`, not after compute."""
        if self._stream is None:
            yield
            return
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """Return an event that completes with the copies issued so far, or None if copies are synchronous."""
        return None if self._stream is None else _recorded(self._stream)

    def synchronize(self) -> None:
        """Block the calling thread until every copy issued so far is done."""
        if self._stream is not None:
            self._stream.synchronize()


def mark_compute(device: torch.device) -> torch.cuda.Event | None:
    """Return an event that completes with the compute issued on `device` so far, or None without CUDA."""
    return _recorded(torch.cuda.current_stream(device)) if device.type == "cuda" else None


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


def wait_on_compute(event: torch.cuda.Event | None, device: torch.device) -> None:
    """Make compute issued on `device` from now on wait for `event`; no wait if `event` is None."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)
