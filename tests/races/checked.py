"""Lanes that check every access to memory: two accesses that no wait orders raise `Race`, whatever the timing was.

Chosen by `ELIXIR_CHECK_RACES=tests.races.checked`, this module. The copies run on other lanes, `inner`; here only their
order is followed. So the lanes of a CPU, where each copy is done when the call returns, are checked as if they were
streams: a proof by a run on a CPU holds for an accelerator, where copies take their time.

Seen are the copies of lanes, the regions of programs, sums of gradients, updates and collectives, and the end of every
allocation. Not seen is code of users between them, such as a write to `param.data`.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from elixir_compile.runtime.lanes import CopyLane, Event, Lanes, TimedEvent, Waitable
from tests.races.checker import Checker, has_memory
from tests.races.happens_before import Actor, Clock


class CheckedEvent:
    """An event of `inner`, with the clock of all works that are over when it is past."""

    __slots__ = ("action", "clock", "inner")

    def __init__(self, inner: Event | None, clock: Clock, action: str) -> None:
        self.inner, self.clock, self.action = inner, clock, action

    def query(self) -> bool:
        """Return whether the event is past."""
        return self.inner is None or self.inner.query()


class CheckedLane:
    """The lane `inner`, with a check of each copy."""

    is_asynchronous = True

    def __init__(self, name: str, inner: CopyLane, checker: Checker) -> None:
        self._inner, self._checker = inner, checker
        self._actor = Actor(name)

    def behind_compute(self, after: Event | None = None) -> Any:
        """Issue the work of the block on the lane, after the compute issued so far and after `after`."""
        self._checker.learn(self._actor, self._checker.current.clock)
        return self._block(after, self._inner.behind_compute)

    def beside_compute(self, after: Event | None = None) -> Any:
        """Issue the work of the block on the lane, after its earlier work and after `after`."""
        return self._block(after, self._inner.beside_compute)

    @contextmanager
    def _block(self, after: Event | None, inner: Callable[[Event | None], Any]) -> Iterator[None]:
        if after is not None:
            self._checker.learn(self._actor, _checked(after).clock)
        here = self._checker.here
        before, here.lane = here.lane, self._actor
        try:
            with inner(_inner(after)):
                yield
        finally:
            here.lane = before

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start copying `source` to `target`. Raises Race."""
        self._checker.issue(self._actor, (source,), (target,))
        self._inner.copy(target, source)

    def mark(self) -> CheckedEvent:
        """Return an event after the work issued on the lane so far."""
        return CheckedEvent(self._inner.mark(), self._checker.clock_of(self._actor), self._checker.here.action)

    def synchronize(self) -> None:
        """Block the calling thread until the work of the lane is done."""
        self._inner.synchronize()
        self._checker.learn(self._checker.thread, self._actor.clock)


class _CheckedWork:
    """A collective in flight; `clock` has all works that are over when it is done."""

    def __init__(self, inner: Waitable, clock: Clock, checker: Checker) -> None:
        self._inner, self._clock, self._checker = inner, clock, checker

    def wait(self) -> None:
        self._inner.wait()
        self._checker.learn(self._checker.current, self._clock)


class Checked:
    """The lanes `inner`, with a check of each access to memory."""

    def __init__(self, inner: Lanes) -> None:
        self._inner = inner
        self._checker = checker = Checker(inner.device)
        self.device = inner.device
        self.pins, self.has_clock = inner.pins, inner.has_clock
        self.h2d = CheckedLane("h2d", inner.h2d, checker)
        self.d2h = CheckedLane("d2h", inner.d2h, checker)
        self.collectives = CheckedLane("collectives", inner.collectives, checker)
        self._exchanges = Actor("the stream of the ranks")
        """Does the collectives in their order, as the stream of a communicator does."""

    @contextmanager
    def announced(self, action: str) -> Iterator[None]:
        """Give the accesses of the block the name `action` in errors."""
        here = self._checker.here
        before = here.action, here.moment
        here.action, here.moment = action, self._checker.note(action)
        try:
            yield
        finally:
            here.action, here.moment = before

    def hand_over(self) -> Callable[[], None]:
        """Return a function with which another thread goes on after the work of this thread."""
        checker, begin, giver = self._checker, self._inner.hand_over(), threading.get_ident()
        clock = checker.clock_of(checker.thread)

        def go_on() -> None:
            begin()
            if threading.get_ident() != giver:
                checker.here.actor = checker.other_thread(threading.current_thread().name)
                checker.learn(checker.here.actor, clock)

        return go_on

    def hand_back(self, event: Event | None) -> Callable[[], None]:
        """Return a function with which a reader goes on after the work of this thread and after `event`."""
        clock = self._checker.clock_of(self._checker.thread)

        def go_on() -> None:
            self._checker.learn(self._checker.thread, clock)
            self.compute_waits(event)

        return go_on

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return `nbytes` of uninitialized device memory, allocated by compute."""
        memory = self._inner.empty(nbytes)
        self._checker.issue(self._checker.compute, (), (memory,))
        return memory

    def computes(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Return `run` with a check of its inputs and outputs."""
        checker, inner = self._checker, self._inner.computes(run)

        def checked(box: list[Any]) -> Any:
            reads = [value for value in box if isinstance(value, torch.Tensor) and has_memory(value)]
            checker.issue(checker.current, reads, ())
            known = {value.untyped_storage().data_ptr() for value in reads}
            del reads
            made = inner(box)
            outputs = made if isinstance(made, tuple | list) else (made,)
            new = [value for value in outputs if isinstance(value, torch.Tensor) and has_memory(value)]
            checker.issue(checker.current, (), [t for t in new if t.untyped_storage().data_ptr() not in known])
            return made

        return checked

    def touches(self, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor] = ()) -> None:
        """Check accesses by Python code or by a kernel. Raises Race."""
        self._checker.touch(reads, writes)

    def collective(
        self, work: Waitable, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]
    ) -> "_CheckedWork":
        """Return `work`, which reads `reads` and writes `writes` until its wait. Raises Race."""
        checker, actor = self._checker, self._exchanges
        checker.learn(actor, checker.current.clock)
        checker.issue(actor, reads, writes)
        return _CheckedWork(self._inner.collective(work, (), ()), checker.clock_of(actor), checker)

    def mark_compute(self) -> CheckedEvent:
        """Return an event after the compute issued so far."""
        checker = self._checker
        return CheckedEvent(self._inner.mark_compute(), checker.clock_of(checker.current), checker.here.action)

    def compute_waits(self, event: Event | None) -> None:
        """Make compute that is issued from now on wait for `event`."""
        if event is not None:
            found = _checked(event)
            self._checker.note(f"wait {found.action}")
            self._checker.learn(self._checker.current, found.clock)
            self._inner.compute_waits(found.inner)

    def host_waits(self, event: Event | None) -> None:
        """Block the calling thread until `event` is past."""
        if event is not None:
            self._inner.host_waits(_checked(event).inner)
            self._checker.learn(self._checker.thread, _checked(event).clock)

    def synchronize(self) -> None:
        """Block the calling thread until all work issued on the device is done."""
        self._inner.synchronize()
        for lane in (self.h2d, self.d2h, self.collectives):
            lane.synchronize()
        self._checker.learn(self._checker.thread, self._checker.compute.clock)

    def timed_event(self) -> TimedEvent:
        """Return an event with the device's time."""
        return self._inner.timed_event()


def _checked(event: Event) -> CheckedEvent:
    assert isinstance(event, CheckedEvent), "all lanes of an executor are checked, or none is"
    return event


def _inner(event: Event | None) -> Event | None:
    return None if event is None else _checked(event).inner
