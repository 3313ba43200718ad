"""Count the verbs of an executor, and record spans of its lanes while a recording is on."""

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, TypeVar

import torch

from elixir_compile import compat
from elixir_compile.base.living import Living
from elixir_compile.ir.kinds import Lane
from elixir_compile.ir.schedule import verb_of
from elixir_compile.runtime.lanes import Announced, Lanes
from elixir_compile.runtime.recording import (
    ON_THREADS,
    DeviceSpan,
    HostSpan,
    OnStream,
    Recording,
    StepClock,
    Taken,
    ThreadSeconds,
    Work,
)

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
    def is_recording(self) -> bool:
        """Whether spans are recorded now."""
        return bool(self._recordings)

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
        work = Work(lane, label, self.graph if graph is None else graph, nbytes, piece)
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
        return HostSpan(recordings, Work(Lane.CALLER, label, self.graph, 0, 0)) if recordings else _NOTHING

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
