"""Side streams for copies: asynchronous on CUDA, the plain order of the program on CPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(slots=True, eq=False)
class Transfer:
    """A copy in flight; `kept` are the tensors it reads, alive until it is waited for."""

    label: str
    event: "torch.cuda.Event | None"
    values: tuple[torch.Tensor, ...] = ()
    kept: tuple[torch.Tensor, ...] = ()

    def ensure_issued(self) -> "torch.cuda.Event | None":
        """Return the event behind which the copy is done, once there is one; None where copies are synchronous."""
        return self.event


class LateTransfer(Transfer):
    """A copy that begins when it is waited for: it would keep the thread from what comes before that."""

    __slots__ = ("_begin",)

    def __init__(self, label: str, begin: Callable[[], Transfer]) -> None:
        super().__init__(label, None)
        self._begin = begin

    def ensure_issued(self) -> "torch.cuda.Event | None":
        """Copy, and return the event behind which that is done; None where copies are synchronous."""
        copied = self._begin()
        self.values, copied.kept = copied.values, ()  # the copy is done, and others hold on to `copied`
        return copied.ensure_issued()


class CopyStream:
    """One direction of copies between the device and the host.

    It exists so that a copy runs beside compute yet starts no earlier than its place in the program: each copy first
    waits for the compute that was issued before it.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def is_asynchronous(self) -> bool:
        """Whether copies run beside compute."""
        return self._stream is not None

    @contextmanager
    def behind_compute(self, after: torch.cuda.Event | None = None) -> Iterator[None]:
        """Issue what the block copies on this stream, behind the compute issued so far and behind `after`."""
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
        """Issue what the block copies on this stream, behind nothing but what was copied on it before, and `after`."""
        if self._stream is None:
            yield
            return
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """Return an event that completes with the copies issued so far; None where copies are synchronous."""
        return None if self._stream is None else self._stream.record_event()

    def synchronize(self) -> None:
        """Let the caller wait until every copy issued so far is done."""
        if self._stream is not None:
            self._stream.synchronize()


def mark_compute(device: torch.device) -> torch.cuda.Event | None:
    """Return an event that completes with the compute issued on `device` so far; None where copies are synchronous."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def wait_on_compute(event: torch.cuda.Event | None, device: torch.device) -> None:
    """Let compute issued on `device` from now on start behind `event`."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)
