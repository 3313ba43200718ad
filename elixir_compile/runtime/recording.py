"""Count the verbs of an executor, record spans of its lanes while a recording is on, and tell observers when forwards
and backwards begin and end.
"""

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch

from elixir_compile import compat
from elixir_compile.base.process import Living
from elixir_compile.graph.ops.registry import Slot
from elixir_compile.ir.kinds import Lane, Phase
from elixir_compile.ir.schedule import Span, verb_of
from elixir_compile.runtime.lanes import Announced, Lanes, TimedEvent

# ----------------------------------------------------------------------------------------------------------------------
# Time the work of a step: spans on the clock of the device or of the host, from one origin per step.
#
#   clock = StepClock(lanes)         a moment on the clock of the host, of the allocators, and of each device
#   clock.at_s(time_ns)              where an event of an allocator is among the spans
#   Recording(clock, lanes)          collects spans that begin before `end`; one that is still open then is added
#                                    when it closes, so that the update of a worker thread is not lost
#
# If the device has a clock, a span is a pair of events on the lane that does the work, so it shows when the device
# worked, not when Python issued the work. A collective works on a stream of its process group, so the second event is
# on a lane that waits for it. Else, and always for a thread of the host, a span is wall-clock time.
#
# Two events are apart in milliseconds of 32 bits: after 1000 s they resolve 60 us. So each step has an origin of its
# own.


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


class Untimed(NamedTuple):
    """A span without its times."""

    lane: Lane
    label: str
    graph: str
    nbytes: int
    piece: int

    def span(self, start_s: float, end_s: float, issued_s: float | None = None) -> Span:
        """Return the span from `start_s` to `end_s`."""
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
        self._on_host: list[tuple[Untimed, float, float]] = []
        self._on_device: list[tuple[Untimed, float, TimedEvent, TimedEvent]] = []
        self._num_open = 0
        """Spans that began and have not ended."""
        self.taken: list[Taken] = []
        """The blocks that were taken for actions, in that order; for a reduce, those that became gradients."""

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

    def add_on_host(self, work: Untimed, start_s: float, end_s: float) -> None:
        """Add a span that ends, from `start_s` to `end_s` of `time.perf_counter`."""
        with self._lock:
            self._on_host.append((work, start_s, end_s))
            self._num_open -= 1
            if self._num_waiting:
                self._all_ended.notify_all()

    def add_on_device(self, work: Untimed, issued_s: float, first: TimedEvent, last: TimedEvent) -> None:
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

    def add_on_host(self, work: Untimed, start_s: float, end_s: float) -> None:
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

    def __init__(self, recordings: Sequence[Recording | ThreadSeconds], work: Untimed) -> None:
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

    def __init__(self, recordings: Sequence[Recording], lanes: Lanes, work: Untimed) -> None:
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


# ----------------------------------------------------------------------------------------------------------------------
# Count the verbs of an executor, and record spans of its lanes while a recording is on.


_ledgers: "Living[Ledger]" = Living()
_NOTHING = nullcontext()


def all_ledgers() -> tuple["Ledger", ...]:
    """Return the ledgers of all executors alive."""
    return tuple(_ledgers)


Started = TypeVar("Started", bound=OnStream)


class Ledger:
    """The counts and spans of the executor with `lanes`."""

    def __init__(self, lanes: Lanes) -> None:
        self.graph = ""
        """The name of the captured graph whose program runs now; empty outside of programs."""
        self.lanes = lanes
        """The lanes whose work is counted."""
        self._lock = threading.Lock()  # the host lane of an optimizer step runs on its own thread
        self._times: Counter[str] = Counter()
        self._bytes: Counter[tuple[Lane, str]] = Counter()
        self._lane_bytes: dict[str, int] = {}
        self._updated_elements = 0
        self._recordings: tuple[Recording, ...] = ()
        self._thread_seconds: ThreadSeconds | None = None
        _ledgers.add(self)

    def run(self, graph: str, program: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Return the result of `program` for `args`; its spans belong to `graph`, the captured graph of the program."""
        before, self.graph = self.graph, graph
        try:
            return program(args)
        finally:
            self.graph = before

    @property
    def times(self) -> Mapping[str, int]:
        """How often each label ran since the ledger was made: `{"gather b1": 4}`."""
        with self._lock:
            return dict(self._times)

    @property
    def bytes(self) -> Mapping[tuple[Lane, str], int]:
        """Bytes by lane and label since the ledger was made: `{(Lane.REDUCE, "reduce b1"): 4096}`.

        They are the bytes of copies, and of the full buffers of collectives.
        """
        with self._lock:
            return dict(self._bytes)

    @property
    def lane_bytes(self) -> Mapping[str, int]:
        """Bytes of `bytes` by the name of the lane that moved them: `{"h2d": 4096}`.

        An observed run reads them at each change of phases, so they are summed as they come: a plan for Llama 7B has
        760 labels.
        """
        with self._lock:
            return dict(self._lane_bytes)

    @property
    def updated_elements(self) -> int:
        """The elements of parameters that the host has updated since the ledger was made."""
        return self._updated_elements

    def count_updated(self, num_elements: int) -> None:
        """Note that the host has updated `num_elements` elements of parameters."""
        with self._lock:
            self._updated_elements += num_elements

    @property
    def counts(self) -> Mapping[str, int]:
        """How often each verb ran since the ledger was made: `{"gather": 12}`."""
        counts: Counter[str] = Counter()
        for label, times in self.times.items():
            counts[verb_of(label)] += times
        return dict(counts)

    def span(
        self, lane: Lane, label: str, nbytes: int = 0, *, times: int = 1, piece: int = 0, graph: str | None = None
    ) -> AbstractContextManager[object]:
        """Count `label`, made by `ir.label`, and `nbytes`; while recording, time the block.

        `times` is 0 for a part of an action that is counted elsewhere, and `piece` the number of the piece if an action
        passes the lane in several. `graph` is the captured graph of the work, None for the graph that runs now.
        """
        timed = self._timed(lane, label, nbytes, times, piece, graph)
        if not compat.is_profiling():
            return timed
        both = ExitStack()  # while torch's profiler is on, its trace has the label too
        both.enter_context(torch.profiler.record_function(label))
        both.enter_context(timed)
        return both

    def _timed(
        self, lane: Lane, label: str, nbytes: int, times: int, piece: int = 0, graph: str | None = None
    ) -> AbstractContextManager[object]:
        with self._lock:
            if times:
                self._times[label] += times
            if nbytes:
                self._bytes[lane, label] += nbytes
                self._lane_bytes[lane.value] = self._lane_bytes.get(lane.value, 0) + nbytes
        recordings = self._recordings_on(lane)
        if not recordings:
            return _NOTHING
        work = Untimed(lane, label, self.graph if graph is None else graph, nbytes, piece)
        if self.lanes.has_clock and lane not in ON_THREADS:
            return DeviceSpan(self._recordings, self.lanes, work)
        return HostSpan(recordings, work)

    def _recordings_on(self, lane: Lane) -> Sequence[Recording | ThreadSeconds]:
        """Return what records work on `lane` now."""
        if self._thread_seconds is not None and lane in ON_THREADS:
            return (*self._recordings, self._thread_seconds)
        return self._recordings

    def begin(self, lane: Lane, label: str, nbytes: int, *, piece: int = 0) -> Callable[[], object]:
        """Count `nbytes` of work that other threads do for no graph, and return the function that ends its span."""
        span = self._timed(lane, label, nbytes, 0, piece, "")
        span.__enter__()
        return functools.partial(span.__exit__, None, None, None)

    def waits(self, label: str) -> AbstractContextManager[object]:
        """While recording, time the block, in which the calling thread waits for `label`."""
        recordings = self._recordings_on(Lane.CALLER)
        return HostSpan(recordings, Untimed(Lane.CALLER, label, self.graph, 0, 0)) if recordings else _NOTHING

    def takes(self, label: str, tensors: Iterable[torch.Tensor]) -> None:
        """While recording, note that the device memory of `tensors` is there for the action `label` now."""
        for recording in self._recordings:
            recording.taken += (Taken(label, time.time_ns(), tensor.untyped_storage().data_ptr()) for tensor in tensors)

    def started(self, lane: Lane, label: str, nbytes: int, start: Callable[[], Started]) -> Started:
        """Count `label` and `nbytes`, and return the collective that `start` starts; while recording, time it."""
        with self._timed(lane, label, nbytes, 1) as span:
            collective = start()
            if isinstance(span, DeviceSpan):
                span.collective = collective
        return collective

    def sum_threads(self, seconds: ThreadSeconds | None) -> None:
        """Add the seconds of the lanes of threads to `seconds` from now on; None ends this."""
        self._thread_seconds = seconds

    def start_recording(self, clock: StepClock | None = None) -> Recording:
        """Return a recording of the spans from now on, in seconds of `clock`, or else from this call.

        Several can run at once.
        """
        recording = Recording(StepClock([self.lanes]) if clock is None else clock, self.lanes, self._drop)
        with self._lock:
            self._recordings = (*self._recordings, recording)
        return recording

    def _drop(self, recording: Recording) -> None:
        with self._lock:
            self._recordings = tuple(other for other in self._recordings if other is not recording)


class _AnnouncedLedger(Ledger):
    """A ledger whose spans also name the accesses of their block, for lanes that check them."""

    def __init__(self, lanes: Lanes, named: Announced) -> None:
        super().__init__(lanes)
        self._named = named

    def span(
        self, lane: Lane, label: str, nbytes: int = 0, *, times: int = 1, piece: int = 0, graph: str | None = None
    ) -> AbstractContextManager[object]:
        """Count and time the block as a ledger does, and name its accesses `label`."""
        both = ExitStack()
        both.enter_context(self._named.announced(label))
        both.enter_context(super().span(lane, label, nbytes, times=times, piece=piece, graph=graph))
        return both

    def started(self, lane: Lane, label: str, nbytes: int, start: Callable[[], Started]) -> Started:
        """Start and time the collective as a ledger does, and name the accesses of `start` `label`."""
        with self._named.announced(label):
            return super().started(lane, label, nbytes, start)


def ledger_for(lanes: Lanes) -> Ledger:
    """Return a new ledger for the executor with `lanes`."""
    return _AnnouncedLedger(lanes, lanes) if isinstance(lanes, Announced) else Ledger(lanes)


# ----------------------------------------------------------------------------------------------------------------------
# Tell observers when the forwards and the backwards of training steps begin and end.
#
#   forward     around the checks, the plan and the program of one forward
#   backward    from the first program of a backward pass to its published gradients
#
# Nothing is timed here. Without an observer, a forward and a backward look at an empty tuple.


class PhaseObserver(Protocol):
    """Is told of the phases of every executor of the process, on the thread that runs them."""

    def phase_begins(self, phases: "Phases", phase: Phase) -> None:
        """Note that `phase` begins on the executor of `phases`. Phases may be nested."""
        ...

    def phase_ends(self, phases: "Phases", phase: Phase) -> None:
        """Note that the innermost `phase` on the executor of `phases` ends, if one is open."""
        ...

    def files_of(self, phases: "Phases") -> str:
        """Return where figures of the executor of `phases` are written, as text; empty if nowhere."""
        ...


_observers: tuple[PhaseObserver, ...] = ()
_lock = threading.Lock()
_UNTIMED: AbstractContextManager[object] = nullcontext()


def observe_phases(observer: PhaseObserver) -> Callable[[], None]:
    """Tell `observer` of all phases from now on, and return the function that ends this."""
    global _observers
    with _lock:
        _observers = (*_observers, observer)

    def leave() -> None:
        global _observers
        with _lock:
            _observers = tuple(other for other in _observers if other is not observer)

    return leave


def observed_files(phases: "Phases") -> tuple[str, ...]:
    """Return where observations have written figures of the executor of `phases`, a text for each."""
    return tuple(found for observer in _observers if (found := observer.files_of(phases)))


class Phases:
    """The phases of one executor, whose parameters are those of `slots`."""

    def __init__(self, slots: Mapping[str, Slot], lanes: Lanes, ledger: Ledger) -> None:
        self.slots = slots
        self.lanes = lanes
        self.ledger = ledger
        self._open: list[int] = []
        """Autograd's numbers of the backward passes whose phase is open."""

    def forward(self, *, is_training: bool) -> AbstractContextManager[object]:
        """Return a context around one forward. A forward that is not a training step's is no phase."""
        return self._forward() if _observers and is_training else _UNTIMED

    @contextmanager
    def _forward(self) -> Iterator[None]:
        if self._open and compat.backward_pass_id() == -1:
            self.abandon()  # an exception ended the backward pass before its last callback
        self._tell(Phase.FORWARD, begins=True)
        try:
            yield
        finally:
            self._tell(Phase.FORWARD, begins=False)

    def begin_backward(self) -> None:
        """Begin the phase of the backward pass on this thread, if it has none yet; it ends with the pass.

        Callbacks at the end of the pass that were queued before this call still belong to the phase.
        """
        if not _observers:
            return
        number = compat.backward_pass_id()
        if number not in self._open:
            self._open.append(number)
            self._tell(Phase.BACKWARD, begins=True)

            def end() -> None:
                if number in self._open:
                    self._open.remove(number)
                    self._tell(Phase.BACKWARD, begins=False)

            compat.after_backward(end)

    def abandon(self) -> None:
        """End the phases of all backward passes, after an exception."""
        while self._open:
            self._open.pop()
            self._tell(Phase.BACKWARD, begins=False)

    def _tell(self, phase: Phase, *, begins: bool) -> None:
        for observer in _observers:
            (observer.phase_begins if begins else observer.phase_ends)(self, phase)
