"""Updates whose results are on their way to the host, and the memory that their copies use until then.

    landing = LandingUpdate(landed, ...)   `line` keeps the memory, whatever becomes of model and optimizer
    landing.wait()                         host_waits(landed); the line lets go of the memory
    the line ends                          its finalizer waits for all that has not landed, and lets go of it

A copy to the host writes until `landed`, without a reference to its target. If the target is freed before, a slab
is unlocked and unmapped under the copy.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from elixir_compile.runtime.lanes import Event, Lanes


@dataclass(frozen=True, slots=True, eq=False)
class _Landing:
    """Copies that use `memory` until `landed`."""

    landed: Event | None
    lanes: Lanes
    memory: Sequence[torch.Tensor]


class Landings:
    """The memory in use by copies to the host, for the updates of a line; thread-safe."""

    def __init__(self) -> None:
        self._open: dict[_Landing, None] = {}

    @property
    def memory(self) -> list[torch.Tensor]:
        """What copies may still use."""
        return [tensor for landing in tuple(self._open) for tensor in landing.memory]

    def keep(self, landed: Event | None, lanes: Lanes, memory: Sequence[torch.Tensor]) -> _Landing:
        """Keep `memory` until `land` or `land_all`, which wait for `landed`."""
        landing = _Landing(landed, lanes, memory)
        self._open[landing] = None
        return landing

    def land(self, landing: _Landing) -> None:
        """Wait for the copies of `landing`, and let go of their memory."""
        landing.lanes.host_waits(landing.landed)
        self._open.pop(landing, None)

    def land_all(self) -> None:
        """Wait for all copies, and let go of their memory."""
        for landing in tuple(self._open):
            self.land(landing)


class Line(Protocol):
    """The updates of an optimizer."""

    landings: Landings

    def check(self) -> None:
        """Raise the exception of a failed update; only once for each failure."""
        ...

    def fail(self, error: BaseException) -> None:
        """Keep `error` for the next `check`."""
        ...


class LandingUpdate:
    """An update whose results are on their way to the host; the worker thread has no part in it.

    The first reader that waits for it calls `finish`, which may raise an exception. Its maker adds it to a line.
    """

    let_compute_wait: Callable[[], None] | None = None

    def __init__(
        self,
        landed: Event | None,
        finish: Callable[[], None],
        line: Line,
        label: str,
        lanes: Lanes,
        memory: Sequence[torch.Tensor] = (),
    ) -> None:
        """`landed` is past when the results are on the host; None if they are there. Until then copies use `memory`."""
        self.label = label
        self._finish, self._line = finish, line
        self._landing: _Landing | None = line.landings.keep(landed, lanes, memory)
        # Re-entrant: a signal handler or a finalizer that runs while this thread waits may wait for the update too.
        self._lock = threading.RLock()

    @property
    def is_done(self) -> bool:
        """Whether a reader has waited."""
        return self._landing is None

    def then(self, follower: Callable[[], None]) -> bool:
        """Return False: the worker has nothing to do with this update."""
        return False

    def wait(self) -> None:
        """Wait until the results have landed. Raises the exception of an update on the same line that failed."""
        with self._lock:
            if self._landing is not None:
                self._line.landings.land(self._landing)
            finish, self._finish = self._finish, _nothing  # also done if a signal handler waited meanwhile
            try:
                finish()
            except BaseException as error:  # of any class: the line raises it
                self._line.fail(error)
            self._landing = None  # holds no tensors any more
        self._line.check()


def _nothing() -> None:
    """Do nothing."""
