"""Lanes without streams: each call does its work before it returns, as on a CPU."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from elixir_compile.runtime.lanes.interface import Event, TimedEvent, Waitable

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
        return _go_on

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


def _go_on() -> None:
    """Do nothing."""
