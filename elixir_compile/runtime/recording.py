"""Time the work of a step: spans on the clock of the device or of the host, from one origin per step.

```text
  clock = StepClock(lanes)         a moment on the clock of the host, of the allocators, and of each device
  clock.at_s(time_ns)              where an event of an allocator is among the spans
  Recording(clock, lanes)          collects spans that begin before `end`; one that is still open then is added when it
                                   closes, so that the update of a worker thread is not lost
```

If the device has a clock, a span is a pair of events on the lane that does the work, so it shows when the device
worked, not when Python issued the work. A collective works on a stream of its process group, so the second event is on
a lane that waits for it. Else, and always for a thread of the host, a span is wall-clock time.

Two events are apart in milliseconds of 32 bits: after 1000 s they resolve 60 us. So each step has an origin of its own.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from elixir_compile.ir.kinds import Lane
from elixir_compile.ir.record import Span
from elixir_compile.runtime.lanes import Lanes, TimedEvent

ON_THREADS = frozenset({Lane.HOST, Lane.DISK, Lane.CALLER})
"""The lanes whose work threads of the host do, so that their spans are wall-clock time."""


class OnStream(Protocol):
    """A collective in flight."""

    def hold_stream(self) -> None:
        """Make work that is issued from now on on the current stream wait for the collective."""
        ...


class Anchor(NamedTuple):
    """A moment on two clocks of the host."""

    perf_s: float
    """As `time.perf_counter`, which times spans."""
    time_ns: int
    """As `time.time_ns`, which times allocations."""


def anchor() -> Anchor:
    """Return this moment."""
    return Anchor(time.perf_counter(), time.time_ns())


class StepClock:
    """The origin of a step: a moment on the clock of the host and on that of each device."""

    def __init__(self, lanes: Iterable[Lanes]) -> None:
        """Wait for the devices of `lanes` that have a clock: it starts with that of the host only if no work is queued
        before the first event."""
        clocked = {each.device: each for each in lanes if each.has_clock}
        for each in clocked.values():
            each.synchronize()
        self._events: dict[object, TimedEvent] = {device: each.timed_event() for device, each in clocked.items()}
        self.began = anchor()
        self.ended: Anchor | None = None
        """The end of the step, as `end` noted it."""

    def end(self) -> None:
        """Note the end of the step."""
        self.ended = anchor()

    def at_s(self, time_ns: int) -> float:
        """Return the seconds from the origin to `time_ns` of `time.time_ns`.

        Somebody may set this clock during the step, and it may run at another rate than `time.perf_counter`: after
        `end`, moments between both anchors are shifted in proportion.
        """
        began, ended = self.began, self.ended
        passed_s = (time_ns - began.time_ns) / 1e9
        if ended is None or ended.time_ns <= began.time_ns:
            return passed_s
        return passed_s * (ended.perf_s - began.perf_s) / ((ended.time_ns - began.time_ns) / 1e9)

    def host_s(self, perf_s: float) -> float:
        """Return the seconds from the origin to `perf_s` of `time.perf_counter`."""
        return perf_s - self.began.perf_s

    def device_s(self, lanes: Lanes, event: TimedEvent) -> float:
        """Return the seconds from the origin to `event` of the device of `lanes`, which must be past."""
        return self._events[lanes.device].elapsed_time(event) / 1e3


class Work(NamedTuple):
    """What a span says beside its times."""

    lane: Lane
    label: str
    graph: str
    nbytes: int
    piece: int

    def span(self, start_s: float, end_s: float, issued_s: float | None = None) -> Span:
        """Return the span of the work from `start_s` to `end_s`."""
        return Span(
            lane=self.lane,
            label=self.label,
            start_s=start_s,
            end_s=max(start_s, end_s),
            graph=self.graph,
            nbytes=self.nbytes,
            issued_s=issued_s,
            piece=self.piece,
        )


class Taken(NamedTuple):
    """A block of the device's allocator that was taken for an action."""

    label: str
    at_ns: int
    """A moment at which the block was there, as `time.time_ns`, the clock of allocations."""
    address: int


class Recording:
    """The spans of a ledger from `Ledger.start_recording` to `end`."""

    def __init__(self, clock: StepClock, lanes: Lanes, drop: "Callable[[Recording], None]") -> None:
        """`drop` takes the recording off the list of its ledger."""
        self.clock = clock
        self._lanes = lanes
        self._drop = drop
        self._lock = threading.Lock()
        self._all_ended = threading.Condition(self._lock)
        self._num_waiting = 0
        """Threads that wait until no span is open."""
        self._on_host: list[tuple[Work, float, float]] = []
        self._on_device: list[tuple[Work, float, TimedEvent, TimedEvent]] = []
        self._num_open = 0
        self.taken: list[Taken] = []
        """The blocks that were taken for actions, in that order; for a reduce, those that became gradients."""

    @property
    def num_open(self) -> int:
        """The number of spans that began and have not ended."""
        return self._num_open

    def end(self) -> None:
        """Let no further span begin; spans that are open are added when they end."""
        self._drop(self)

    def stop(self, patience_s: float = 0.0) -> tuple[Span, ...]:
        """End, and return the spans; wait at most `patience_s` for those that are open.

        A later call, or `spans`, also returns those that were open at the end of this one.
        """
        self.end()
        with self._all_ended:
            self._num_waiting += 1
            self._all_ended.wait_for(lambda: self._num_open == 0, patience_s)
            self._num_waiting -= 1
        return self.spans()

    def begin_span(self) -> None:
        """Note that a span begins, which will be added."""
        with self._lock:
            self._num_open += 1

    def add_on_host(self, work: Work, start_s: float, end_s: float) -> None:
        """Add a span that ends, from `start_s` to `end_s` of `time.perf_counter`."""
        with self._lock:
            self._on_host.append((work, start_s, end_s))
            self._num_open -= 1
            if self._num_waiting:
                self._all_ended.notify_all()

    def add_on_device(self, work: Work, issued_s: float, first: TimedEvent, last: TimedEvent) -> None:
        """Add a span between two events of the device, which Python issued at `issued_s` of `time.perf_counter`."""
        with self._lock:
            self._on_device.append((work, issued_s, first, last))
            self._num_open -= 1
            if self._num_waiting:
                self._all_ended.notify_all()

    def spans(self) -> tuple[Span, ...]:
        """Return the spans that have ended, in order of their start; wait for the device first if it timed any."""
        clock = self.clock
        with self._lock:
            on_host, on_device = tuple(self._on_host), tuple(self._on_device)
        if on_device:
            self._lanes.synchronize()
        found = [work.span(clock.host_s(start_s), clock.host_s(end_s)) for work, start_s, end_s in on_host]
        for work, issued_s, *events in on_device:
            start_s, end_s = (clock.device_s(self._lanes, event) for event in events)
            found.append(work.span(start_s, end_s, clock.host_s(issued_s)))
        return tuple(sorted(found, key=lambda span: (span.start_s, span.end_s)))


class ThreadSeconds:
    """The sums of the seconds of the lanes whose work threads of the host do, without spans."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds_s: dict[Lane, float] = {}

    def begin_span(self) -> None:
        """Do nothing: only ends are counted."""

    def add_on_host(self, work: Work, start_s: float, end_s: float) -> None:
        """Add the seconds of a span that ends."""
        with self._lock:
            self._seconds_s[work.lane] = self._seconds_s.get(work.lane, 0.0) + end_s - start_s

    def of(self, lane: Lane) -> float | None:
        """Return the seconds of `lane` so far; None if it had no work."""
        with self._lock:
            return self._seconds_s.get(lane)


class HostSpan:
    """Times its block by the wall clock."""

    __slots__ = ("_recordings", "_start_s", "_work")

    def __init__(self, recordings: Sequence[Recording | ThreadSeconds], work: Work) -> None:
        self._recordings, self._work = recordings, work

    def __enter__(self) -> Self:
        for recording in self._recordings:
            recording.begin_span()
        self._start_s = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_s = time.perf_counter()
        for recording in self._recordings:
            recording.add_on_host(self._work, self._start_s, end_s)


class DeviceSpan:
    """Times its block by events on the lane of the block."""

    __slots__ = ("_first", "_issued_s", "_lanes", "_recordings", "_work", "collective")

    def __init__(self, recordings: Sequence[Recording], lanes: Lanes, work: Work) -> None:
        self._recordings, self._lanes, self._work = recordings, lanes, work
        self.collective: OnStream | None = None
        """The collective that the block has started, with which the span ends; None if it ends with the block."""

    def __enter__(self) -> Self:
        for recording in self._recordings:
            recording.begin_span()
        self._issued_s = time.perf_counter()
        self._first = self._lanes.timed_event()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.collective is None:
            last = self._lanes.timed_event()
        else:
            with self._lanes.collectives.beside_compute():
                self.collective.hold_stream()
                last = self._lanes.timed_event()
        for recording in self._recordings:
            recording.add_on_device(self._work, self._issued_s, self._first, last)
