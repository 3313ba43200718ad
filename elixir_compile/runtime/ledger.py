"""Count the verbs of an executor, and record spans of its lanes while a recording is on.

If the device has a clock, a span is a pair of events on the lane that does the work, so it shows when the device
worked, not when Python issued the work. A collective works on a stream of its process group, so the second event is on
a lane that waits for it. Else, and always on the host lane, a span is wall-clock time.
"""

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import Protocol, Self, TypeVar

from elixir_compile.ir.kinds import Lane
from elixir_compile.ir.record import Span
from elixir_compile.runtime.lanes import Lanes, TimedEvent
from elixir_compile.runtime.lanes.checked import Checked

_ledgers: "weakref.WeakSet[Ledger]" = weakref.WeakSet()
_NOTHING = nullcontext()


def all_ledgers() -> tuple["Ledger", ...]:
    """Return the ledgers of all executors alive."""
    return tuple(_ledgers)


class OnStream(Protocol):
    """A collective in flight."""

    def hold_stream(self) -> None:
        """Make work that is issued from now on on the current stream wait for the collective."""
        ...


Started = TypeVar("Started", bound=OnStream)


class Ledger:
    """The counts and spans of the executor with `lanes`."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._lock = threading.Lock()  # the host lane of an optimizer step runs on its own thread
        self._times: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._lane_bytes: Counter[str] = Counter()
        self._recordings: tuple[Recording, ...] = ()
        _ledgers.add(self)

    @property
    def is_recording(self) -> bool:
        """Whether spans are recorded now."""
        return bool(self._recordings)

    @property
    def times(self) -> Mapping[str, int]:
        """How often each label ran since the ledger was made: `{"gather b1": 4}`."""
        with self._lock:
            return dict(self._times)

    @property
    def bytes(self) -> Mapping[str, int]:
        """Bytes of the full buffers of collectives, and of copies of activations, by label, since the ledger was made:
        `{"reduce b1": 4096}`."""
        with self._lock:
            return dict(self._bytes)

    @property
    def lane_bytes(self) -> Mapping[str, int]:
        """Bytes of `bytes` by the name of the lane that moved them: `{"h2d": 4096}`."""
        with self._lock:
            return dict(self._lane_bytes)

    @property
    def counts(self) -> Mapping[str, int]:
        """How often each verb, the first word of a label, ran since the ledger was made: `{"gather": 12}`."""
        counts: Counter[str] = Counter()
        for label, times in self.times.items():
            counts[label.partition(" ")[0]] += times
        return dict(counts)

    def span(self, lane: Lane, label: str, nbytes: int = 0, *, times: int = 1) -> AbstractContextManager[object]:
        """Count `label`, a verb and its object (`gather b1`), and `nbytes`; while recording, time the block.

        `times` is 0 for a part of an action that is counted elsewhere.
        """
        return self._timed(lane, label, nbytes, times)

    def _timed(self, lane: Lane, label: str, nbytes: int, times: int) -> AbstractContextManager[object]:
        with self._lock:
            if times:
                self._times[label] += times
            if nbytes:
                self._bytes[label] += nbytes
                self._lane_bytes[lane.value] += nbytes
        recordings = self._recordings
        if not recordings:
            return _NOTHING
        if self._lanes.has_clock and lane is not Lane.HOST:
            return _DeviceSpan(recordings, self._lanes, lane, label)
        return _HostSpan(recordings, lane, label)

    def started(self, lane: Lane, label: str, nbytes: int, start: Callable[[], Started]) -> Started:
        """Count `label` and `nbytes`, and return the collective that `start` starts; while recording, time it."""
        with self._timed(lane, label, nbytes, 1) as span:
            collective = start()
            if isinstance(span, _DeviceSpan):
                span.collective = collective
        return collective

    def start_recording(self) -> "Recording":
        """Return a recording of the spans from now on, in seconds from this call; several can run at once."""
        recording = Recording(self, self._lanes)
        with self._lock:
            self._recordings = (*self._recordings, recording)
        return recording

    def _drop(self, recording: "Recording") -> None:
        with self._lock:
            self._recordings = tuple(other for other in self._recordings if other is not recording)


class _AnnouncedLedger(Ledger):
    """A ledger whose spans also name the accesses of their block, for lanes that check them."""

    def __init__(self, lanes: Checked) -> None:
        super().__init__(lanes)
        self._checked = lanes

    def span(self, lane: Lane, label: str, nbytes: int = 0, *, times: int = 1) -> AbstractContextManager[object]:
        """Count and time the block as a ledger does, and name its accesses `label`."""
        both = ExitStack()
        both.enter_context(self._checked.announced(label))
        both.enter_context(super().span(lane, label, nbytes, times=times))
        return both

    def started(self, lane: Lane, label: str, nbytes: int, start: Callable[[], Started]) -> Started:
        """Start and time the collective as a ledger does, and name the accesses of `start` `label`."""
        with self._checked.announced(label):
            return super().started(lane, label, nbytes, start)


def ledger_for(lanes: Lanes) -> Ledger:
    """Return a new ledger for the executor with `lanes`."""
    return _AnnouncedLedger(lanes) if isinstance(lanes, Checked) else Ledger(lanes)


class Recording:
    """The spans of a ledger from `Ledger.start_recording` to `stop`."""

    def __init__(self, ledger: Ledger, lanes: Lanes) -> None:
        self._ledger = ledger
        self._lanes = lanes
        self.on_host: list[Span] = []
        self.on_device: list[tuple[Lane, str, TimedEvent, TimedEvent]] = []
        self._began: TimedEvent | None = None
        if lanes.has_clock:
            # The clocks of host and device start together only if no work is queued before the first event.
            lanes.synchronize()
            self._began = lanes.timed_event()
        self.began_s = time.perf_counter()

    def stop(self) -> tuple[Span, ...]:
        """Stop, and return the spans in order of their start; wait for the device first if it timed them."""
        self._ledger._drop(self)
        if self._began is not None:
            self._lanes.synchronize()
            for lane, label, first, last in self.on_device:
                start_s, end_s = (self._began.elapsed_time(event) / 1e3 for event in (first, last))
                self.on_host.append(Span(lane=lane, label=label, start_s=start_s, end_s=end_s))
            self.on_device.clear()
        return tuple(sorted(self.on_host, key=lambda span: (span.start_s, span.end_s)))


class _HostSpan:
    """Times its block by the wall clock."""

    __slots__ = ("_label", "_lane", "_recordings", "_start_s")

    def __init__(self, recordings: "tuple[Recording, ...]", lane: Lane, label: str) -> None:
        self._recordings, self._lane, self._label = recordings, lane, label

    def __enter__(self) -> Self:
        self._start_s = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_s = time.perf_counter()
        for recording in self._recordings:
            span = Span(
                lane=self._lane,
                label=self._label,
                start_s=self._start_s - recording.began_s,
                end_s=end_s - recording.began_s,
            )
            recording.on_host.append(span)


class _DeviceSpan:
    """Times its block by events on the lane of the block."""

    __slots__ = ("_first", "_label", "_lane", "_lanes", "_recordings", "collective")

    def __init__(self, recordings: "tuple[Recording, ...]", lanes: Lanes, lane: Lane, label: str) -> None:
        self._recordings, self._lanes, self._lane, self._label = recordings, lanes, lane, label
        self.collective: OnStream | None = None
        """The collective that the block has started, with which the span ends; None if it ends with the block."""

    def __enter__(self) -> Self:
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
            recording.on_device.append((self._lane, self._label, self._first, last))
