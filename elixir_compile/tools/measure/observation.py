"""Observe the training steps of one model: phases, bytes by lane, and counters of the process, the device and its
executors, for every step; summarize each step, and record chosen steps in full.
"""

import bisect
import inspect
import logging
import resource
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Protocol

import psutil
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from elixir_compile.base.process import GROUPS, MEMBERSHIPS, group_folders, text_of
from elixir_compile.compat import can_profile
from elixir_compile.compat.platforms import platform_of
from elixir_compile.ir.kinds import Lane, Phase
from elixir_compile.ir.schedule import Origin, Record
from elixir_compile.runtime.bucket import live_slab_bytes, pinned_slab_bytes
from elixir_compile.runtime.lanes import Lanes
from elixir_compile.runtime.measure import drop_running_step_bytes
from elixir_compile.runtime.recording import Ledger, Phases, Recording, StepClock, ThreadSeconds, observe_phases
from elixir_compile.tools.measure.memory import (
    CpuMemory,
    DeviceMemory,
    GpuCounters,
    Moment,
    PhaseChanges,
    StepMemory,
    StepTimes,
    gpu_counters,
    kinds_of,
    moment_now,
)
from elixir_compile.tools.observed import Counters, FullStep, Interval, StepSummary, name_of, seconds_by_phase

# ----------------------------------------------------------------------------------------------------------------------
# The executors of an observed model, and the counts of their ledgers since they were asked last.


class KnownExecutors:
    """The executors that an observation has met; it does not keep them alive.

    They are a list and not a `WeakSet`, whose iteration takes 40 us: each change of phases looks at all of them.
    """

    def __init__(self) -> None:
        self._known: list[weakref.ref[Phases]] = []
        self._bytes: dict[str, int] = {}
        """Bytes that each lane had moved when `take_bytes` was called last."""
        self._elements = 0
        """Elements that the host had updated when `take_elements` was called last."""

    def __contains__(self, phases: Phases) -> bool:
        return any(known() is phases for known in self._known)

    def add(self, phases: Phases, seconds: ThreadSeconds) -> None:
        """Count the work of the executor of `phases` from now on, and add the seconds of its threads to `seconds`."""
        self._known.append(weakref.ref(phases))
        phases.ledger.sum_threads(seconds)
        self._elements += phases.ledger.updated_elements
        for lane, nbytes in phases.ledger.lane_bytes.items():
            self._bytes[lane] = self._bytes.get(lane, 0) + nbytes

    def alive(self) -> list[Phases]:
        """Return the executors that are alive."""
        return [phases for known in self._known if (phases := known()) is not None]

    @property
    def lanes(self) -> Lanes | None:
        """The lanes of the first executor; None if there is none."""
        executors = self.alive()
        return executors[0].lanes if executors else None

    def take_bytes(self) -> dict[str, int]:
        """Return the bytes that each lane has moved since the last call, without lanes that moved none."""
        total: dict[str, int] = {}
        for phases in self.alive():
            for lane, nbytes in phases.ledger.lane_bytes.items():
                total[lane] = total.get(lane, 0) + nbytes
        before, self._bytes = self._bytes, total
        return {lane: moved for lane, nbytes in total.items() if (moved := nbytes - before.get(lane, 0)) > 0}

    def take_elements(self) -> int:
        """Return the elements of parameters that the host has updated since the last call."""
        before, self._elements = self._elements, sum(phases.ledger.updated_elements for phases in self.alive())
        return max(self._elements - before, 0)


# ----------------------------------------------------------------------------------------------------------------------
# Read counters of the machine beside a run: one thread, a few times per second.
#
#   process   resident bytes, CPU seconds, page faults, slabs      psutil, getrusage
#   group     bytes of the control group                           memory.current
#   device    memory, power, energy, link                          NVML, if there is a GPU
#
# Figures that the machine does not tell are None.


log = logging.getLogger("elixir_compile")

_MOST_SAMPLES = 4096
"""The most samples that are kept, 13 minutes at 5 per second; at least half of them are."""
Sample = tuple[float, Mapping[str, float | None]]


class HostCounters:
    """The counters of this process and of its control group."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        names = {1: "memory.usage_in_bytes", 2: "memory.current"}
        found = (folder / names[version] for folder, version in group_folders(MEMBERSHIPS, GROUPS, "memory"))
        self._group_file = next((path for path in found if path.is_file()), None)

    def read(self) -> dict[str, float | None]:
        """Return the figures now; seconds and counts are those since the process began."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        group = "" if self._group_file is None else text_of(self._group_file)
        return {
            "process_rss_bytes": self._process.memory_info().rss,
            "process_cpu_s": usage.ru_utime + usage.ru_stime,
            "process_num_major_faults": usage.ru_majflt,
            "process_num_forced_switches": usage.ru_nivcsw,
            "host_slab_bytes": live_slab_bytes(),
            "group_memory_bytes": int(group) if group.isdecimal() else None,
        }


class _Samples:
    """The last samples in order of their times. One thread adds, others read.

    Each step of an observed run asks for the samples of its time, so these are found by bisection: after 13 minutes a
    look at each of them took 0.4 ms.
    """

    def __init__(self) -> None:
        self._samples: list[Sample] = []

    def add(self, sample: Sample) -> None:
        """Add a sample later than all others; drop the oldest half if there are too many."""
        self._samples.append(sample)
        if len(self._samples) > _MOST_SAMPLES:
            self._samples = self._samples[_MOST_SAMPLES // 2 :]  # a new list: a reader keeps the one that it reads

    def between(self, start_s: float, end_s: float) -> Sequence[Sample]:
        """Return the samples from `start_s` to `end_s`."""
        samples = self._samples
        first = bisect.bisect_left(samples, start_s, key=_time_of)
        return samples[first : bisect.bisect_right(samples, end_s, lo=first, key=_time_of)]

    def around(self, time_s: float) -> tuple[Sample, Sample] | None:
        """Return the last sample before `time_s` and the first that is not; None if there is none on one side."""
        samples = self._samples
        after = bisect.bisect_left(samples, time_s, key=_time_of)
        return None if after in (0, len(samples)) else (samples[after - 1], samples[after])


def _time_of(sample: Sample) -> float:
    return sample[0]


class CounterThread:
    """A thread that samples the counters of this process, and of a GPU if there is one, until `stop`."""

    def __init__(self, per_s: float, uuid: Callable[[], str | None]) -> None:
        """`uuid` returns the number of the GPU; it is asked on the thread, before each sample until it knows one."""
        self._period_s = 1 / per_s
        self._uuid = uuid
        self._samples = _Samples()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._work, name="elixir counters", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Take a last sample, and end the thread."""
        self._ends.set()
        self._thread.join()

    def between(self, start_s: float, end_s: float) -> Counters | None:
        """Return the samples from `start_s` to `end_s` of `time.perf_counter`, with times counted from `start_s`; None
        if there are none."""
        found = self._samples.between(start_s, end_s)
        if not found:
            return None
        names = sorted({name for _, values in found for name in values})
        columns = {name: tuple(values.get(name) for _, values in found) for name in names}
        return Counters(at_s=tuple(at_s - start_s for at_s, _ in found), values=columns)

    def difference(self, name: str, start_s: float, end_s: float) -> float | None:
        """Return by how much the counter `name` grew between two times, on a line between its samples; None if it is
        not known at one of them."""
        values: list[float] = []
        for time_s in (start_s, end_s):
            around = self._samples.around(time_s)
            if around is None:
                return None
            (before_s, before), (after_s, after) = around
            first, last = before.get(name), after.get(name)
            if first is None or last is None:
                return None
            values.append(first + (last - first) * (time_s - before_s) / (after_s - before_s))
        return values[1] - values[0]

    def mean(self, name: str, start_s: float, end_s: float) -> float | None:
        """Return the mean of the samples of `name` between two times; None if there is none."""
        found = (values.get(name) for _, values in self._samples.between(start_s, end_s))
        known = [value for value in found if value is not None]
        return sum(known) / len(known) if known else None

    def _work(self) -> None:
        host = HostCounters()
        gpu: GpuCounters | None = None
        is_looked_for = False
        try:
            while True:
                is_last = self._ends.is_set()
                if not is_looked_for and (uuid := self._uuid()) is not None:
                    is_looked_for, gpu = True, gpu_counters(uuid)
                now_s = time.perf_counter()
                self._samples.add((now_s, host.read() | ({} if gpu is None else gpu.read(now_s))))
                if is_last:
                    return
                self._ends.wait(self._period_s)
        except Exception:  # a counter must not end the training that it looks at
            log.exception("no more counters of the machine are read")
        finally:
            if gpu is not None:
                gpu.close()


# ----------------------------------------------------------------------------------------------------------------------
# Observe the training steps of one model: phases, bytes by lane, and figures of the process, for every step.
#
#   first training forward of ours        the step begins, and the step before it ends
#   forward, backward                     as the executors of the model say
#   optimizer.step()                      by torch's global hooks, for optimizers with parameters of the model
#
# A step ends with the first training forward after an `optimizer.step()` returned. So it holds for accumulated
# gradients, several optimizers and closures. On a device with a clock, moments are events that are read later: nothing
# waits.


_MOST_PENDING = 8
"""The most ended steps of which events may not be past yet. With more, the oldest is waited for: the device is that far
behind only if Python never waits for it."""


@dataclass(kw_only=True, eq=False)
class ObservedStep:
    """A step that is observed: running, or ended with events that may not be past yet."""

    number: int
    changes: PhaseChanges
    moved_bytes: dict[str, dict[str, int]] = field(default_factory=dict)
    """Bytes by lane and phase."""
    slab_bytes: int = 0
    updated_elements: int = 0
    """Elements of parameters that the host has updated in the step."""
    thread_s: dict[Lane, float | None] = field(default_factory=dict)
    """Seconds of work on lanes of threads of the host that ended in the step; None for a lane without any so far."""
    notes: dict[str, float] = field(default_factory=dict)
    ended: Moment | None = None

    @property
    def intervals(self) -> tuple[Interval, ...]:
        """The phases of the ended step, once its events are past."""
        assert self.ended is not None, f"step {self.number} has not ended"
        return self.changes.intervals(self.ended)

    @property
    def times(self) -> StepTimes:
        """The phases of the ended step on both clocks, once its events are past."""
        assert self.ended is not None, f"step {self.number} has not ended"
        return self.changes.times(self.ended)


class StepSink(Protocol):
    """Takes the steps of an observation."""

    def step_begins(self, number: int, executors: Collection[Phases]) -> bool:
        """Prepare for step `number` of `executors`; return whether that may have taken long."""
        ...

    def step_ends(self, step: ObservedStep) -> None:
        """Take the figures of the process at the end of `step`; events of the step may not be past yet."""
        ...

    def step_known(self, step: ObservedStep) -> None:
        """Take `step`, whose events are past."""
        ...

    def ended(self) -> None:
        """Let go of a step that has begun: the observation is over."""
        ...


class Observation:
    """The steps of `model`, told to a sink, from `start` to `stop`."""

    def __init__(self, model: nn.Module, sink: StepSink, files: Callable[[], str] = str) -> None:
        """`files` returns where figures of the model are written, as text; empty if nowhere."""
        self._files = files
        self._owners = _Owners(model)
        self._sink = sink
        self._lock = threading.RLock()  # a backward runs on autograd's thread
        self._leave: list[Callable[[], None]] = []
        self._open: list[Phase] = []
        """The phases that have begun and not ended, the innermost last."""
        self._step: ObservedStep | None = None
        self._pending: deque[ObservedStep] = deque()
        self._next_number = 0
        self._has_updated = False
        self._notes: dict[str, float] = {}
        """Notes made before the first step."""
        self._executors = KnownExecutors()
        self._thread_seconds = ThreadSeconds()
        self._thread_s = {Lane.HOST: 0.0, Lane.CALLER: 0.0}
        """Seconds of these lanes at the end of the last step."""
        self._hooked_step: CodeType | None = None
        """The code of torch's function that calls the hooks around `optimizer.step()`."""

    def start(self) -> None:
        """Begin to observe: the first step is the next training forward."""
        self._leave = [
            observe_phases(self),
            register_optimizer_step_pre_hook(self._update_begins).remove,
            register_optimizer_step_post_hook(self._update_ends).remove,
        ]

    def stop(self) -> None:
        """End the observation, and its last step if an update of it was done. A second call does nothing."""
        with self._lock:
            if not self._leave:
                return
            for leave in self._leave:
                leave()
            self._leave.clear()
            for phases in self._executors.alive():
                phases.ledger.sum_threads(None)
            if self._step is not None and self._has_updated:
                # The time since the last phase is not the step's: nothing says what the caller does with it.
                changes = self._step.changes.changes
                self._end_step(changes.pop()[0] if changes[-1][1] is None and len(changes) > 1 else self._now())
            self._step = None
            while self._pending:
                self._take_oldest(waits=True)
            self._sink.ended()

    def note(self, figures: dict[str, float]) -> None:
        """Add `figures` to the step that is running, or to the first one."""
        with self._lock:
            (self._notes if self._step is None else self._step.notes).update(figures)

    def update_done(self) -> None:
        """Note that parameters were updated: the next training forward begins a step."""
        with self._lock:
            self._has_updated = self._step is not None

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that have updated the model since the observation began."""
        return self._owners.optimizers()

    # Phases.

    def phase_begins(self, phases: Phases, phase: Phase) -> None:
        """See `PhaseObserver`."""
        with self._lock:
            if not self._owners.have(phases, lambda: [slot.param for slot in phases.slots.values()]):
                return
            if phases not in self._executors:
                self._executors.add(phases, self._thread_seconds)
            if phase is Phase.FORWARD:
                self._drop_failed_update()
                if self._step is None or self._has_updated:
                    now = self._now()
                    if self._step is not None:
                        self._end_step(now)
                    if self._sink.step_begins(self._next_number, self._executors.alive()):
                        now = self._now()
                    changes = PhaseChanges(now, self._open[-1] if self._open else None)
                    self._step = ObservedStep(number=self._next_number, changes=changes, notes=self._notes)
                    self._notes, self._has_updated = {}, False
                    self._next_number += 1
                    if len(self._pending) > _MOST_PENDING:
                        self._take_oldest(waits=True)
                    while self._pending and self._take_oldest(waits=False):
                        pass
            self._open.append(phase)
            self._change()

    def phase_ends(self, phases: Phases, phase: Phase) -> None:
        """See `PhaseObserver`."""
        with self._lock:
            if phases in self._executors:
                self._close(phase)

    def files_of(self, phases: Phases) -> str:
        """See `PhaseObserver`."""
        return self._files() if phases in self._executors else ""

    def _update_begins(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        with self._lock:
            if self._step is not None and self._owners.have(optimizer, lambda: _params_of(optimizer)):
                self._drop_failed_update()
                frame = inspect.currentframe()
                self._hooked_step = None if frame is None or frame.f_back is None else frame.f_back.f_code
                self._open.append(Phase.UPDATE)
                self._change()

    def _update_ends(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        with self._lock:
            if self._step is not None and self._owners.have(optimizer, lambda: _params_of(optimizer)):
                self._close(Phase.UPDATE)
                self._has_updated = True

    def _drop_failed_update(self) -> None:
        """Close updates that an exception has left: torch calls no hook then, but its function is not on the stack."""
        frame = inspect.currentframe() if Phase.UPDATE in self._open else None
        while frame is not None and frame.f_code is not self._hooked_step:
            frame = frame.f_back
        while frame is None and Phase.UPDATE in self._open:
            self._close(Phase.UPDATE)

    def _close(self, phase: Phase) -> None:
        for place in reversed(range(len(self._open))):
            if self._open[place] is phase:
                del self._open[place]
                self._change()
                return

    def _change(self) -> None:
        """Note that the innermost phase may have changed."""
        step = self._step
        if step is None:
            return
        before, now = step.changes.changes[-1][1], self._open[-1] if self._open else None
        self._count_bytes(step, name_of(before))
        if now is not before:
            step.changes.change(self._now(), now)

    def _count_bytes(self, step: ObservedStep, phase: str) -> None:
        """Count the bytes that were moved since the last change as those of `phase`."""
        for lane, nbytes in self._executors.take_bytes().items():
            by_phase = step.moved_bytes.setdefault(lane, {})
            by_phase[phase] = by_phase.get(phase, 0) + nbytes
        step.slab_bytes = max(step.slab_bytes, live_slab_bytes())

    # Steps.

    def _end_step(self, ended: Moment) -> None:
        step = self._step
        assert step is not None, "only a step that has begun ends"
        self._count_bytes(step, name_of(step.changes.changes[-1][1]))
        step.ended = ended
        step.updated_elements = self._executors.take_elements()
        for lane, before_s in self._thread_s.items():
            now_s = self._thread_seconds.of(lane)
            step.thread_s[lane] = None if now_s is None else now_s - before_s
            self._thread_s[lane] = now_s or 0.0
        self._sink.step_ends(step)
        self._pending.append(step)

    def _take_oldest(self, *, waits: bool) -> bool:
        """Hand the oldest ended step to the sink if its events are past, or after waiting for them."""
        step = self._pending[0]
        assert step.ended is not None, "only ended steps are pending"
        if step.ended.event is not None and not step.ended.event.query():
            if not waits:
                return False
            lanes = self._executors.lanes
            if lanes is not None:
                lanes.synchronize()
        self._pending.popleft()
        self._sink.step_known(step)
        return True

    def _now(self) -> Moment:
        return moment_now(self._executors.lanes)


class _Owners:
    """The executors and optimizers that hold parameters of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._known: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def have(self, owner: Any, params: Callable[[], list[torch.Tensor]]) -> bool:
        """Return whether the executor or optimizer `owner`, which holds `params()`, holds a parameter of the model."""
        if not self._known.get(owner, False):
            model = self._model()
            own = set() if model is None else {id(param) for param in model.parameters()}
            self._known[owner] = any(id(param) in own for param in params())
        return self._known[owner]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that have parameters of the model, as far as they were asked for."""
        return [owner for owner, is_own in self._known.items() if is_own and isinstance(owner, torch.optim.Optimizer)]


def _params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


# ----------------------------------------------------------------------------------------------------------------------
# Record chosen steps in full: spans of the lanes, and on request the device bytes by kind over time.
#
# A record is handed over when the next step ends, or at the end of the observation: an update on the host that began in
# the recorded step may last until then.


@dataclass(kw_only=True, eq=False)
class _Recorded:
    """A step that is recorded in full."""

    recordings: list[tuple[Ledger, Recording]]
    counts_before: Counter[str]
    memory: StepMemory | None
    counts: Counter[str] = field(default_factory=Counter)
    summary: StepSummary | None = None
    times: StepTimes | None = None
    counters: Counters | None = None


class FullSteps:
    """The records of the steps that `wants` chooses by number."""

    def __init__(
        self,
        model: nn.Module,
        wants: Callable[[int], bool],
        take: Callable[[FullStep], None],
        *,
        memory_events: bool,
        optimizers: Callable[[], Iterable[torch.optim.Optimizer]],
    ) -> None:
        """`take` is called with each record; `optimizers` returns those that update the model, as far as known."""
        self._model = weakref.ref(model)
        self._wants = wants
        self._take = take
        self._memory_events = memory_events
        self._optimizers = optimizers
        self._running: _Recorded | None = None
        self._last_profiled = -2
        """The number of the last step of which memory was recorded."""
        self._ended: dict[int, _Recorded] = {}
        """By number, the steps that have ended and were not handed over yet."""

    def begins(self, number: int, executors: Iterable[Phases]) -> bool:
        """Begin to record step `number` if it is chosen; return whether it is."""
        if not self._wants(number):
            return False
        known = list(executors)
        memory = self._memory(number, known)
        counts: Counter[str] = Counter()
        for each in known:
            counts.update(each.ledger.counts)
        if memory is not None:
            memory.start()
        clock = StepClock(each.lanes for each in known)
        recordings = [(each.ledger, each.ledger.start_recording(clock)) for each in known]
        self._running = _Recorded(recordings=recordings, counts_before=counts, memory=memory)
        return True

    def _memory(self, number: int, executors: Iterable[Phases]) -> "StepMemory | None":
        """Return the recorder of the memory of step `number`; None if it is not asked for, or cannot be had now."""
        model = self._model()
        devices = [each.lanes.device for each in executors]
        if not self._memory_events or model is None:
            return None
        for device in devices:
            platform = platform_of(device)
            if platform.has_own_memory:
                blocks = platform.record_blocks(device)
                return None if blocks is None else DeviceMemory(blocks, kinds_of(model, self._optimizers(), device))
        # torch.profiler tells the blocks of a CPU, and cannot be started while it runs. It was stopped within a forward
        # if it recorded the step before: a profiler that starts in the same forward gets the ends of ops that the
        # stopped one has freed, and torch 2.13 then writes to freed memory.
        if not drop_running_step_bytes() or number <= self._last_profiled + 1 or not can_profile():
            return None
        self._last_profiled = number
        return CpuMemory(kinds_of(model, self._optimizers(), torch.device("cpu")))

    def ends(self, number: int) -> None:
        """End the record of step `number`, if there is one."""
        self.hand_over()
        recorded, self._running = self._running, None
        if recorded is None:
            return
        if recorded.memory is not None:
            recorded.memory.stop()
        for ledger, recording in recorded.recordings:
            recording.end()
            recorded.counts.update(ledger.counts)
        recorded.counts.subtract(recorded.counts_before)
        self._ended[number] = recorded

    def known(self, step: ObservedStep, summary: StepSummary, counters: Callable[[], Counters | None]) -> None:
        """Keep the summary, the phases and the counters of a step that has ended, if it is recorded in full.

        `counters` is called only for such a step.
        """
        recorded = self._ended.get(summary.step)
        if recorded is not None:
            recorded.summary, recorded.times, recorded.counters = summary, step.times, counters()

    def drop(self) -> None:
        """Stop recording a step that has not ended, without a result."""
        recorded, self._running = self._running, None
        if recorded is not None:
            if recorded.memory is not None:
                recorded.memory.stop()
            for _, recording in recorded.recordings:
                recording.stop()

    def hand_over(self) -> None:
        """Hand over the records of all steps that are known."""
        for number, recorded in list(self._ended.items()):
            if recorded.summary is not None and recorded.times is not None:
                del self._ended[number]
                summary, times, memory = recorded.summary, recorded.times, recorded.memory
                spans = [span for _, recording in recorded.recordings for span in recording.spans()]
                spans.sort(key=lambda span: (span.start_s, span.end_s))
                taken = [block for _, recording in recorded.recordings for block in recording.taken]
                live = None if memory is None else memory.live(times, spans, taken)
                record = Record(
                    origin=Origin.MEASURED,
                    step_s=summary.period_s,
                    device_peak_bytes=live.peak_bytes if live is not None else summary.device_peak_bytes or 0,
                    host_peak_bytes=summary.host_slab_bytes,
                    spans=tuple(spans),
                    counts={verb: number for verb, number in recorded.counts.items() if number > 0},
                )
                full = FullStep(
                    summary=summary, intervals=times.intervals, record=record, live=live, counters=recorded.counters
                )
                self._take(full)


# ----------------------------------------------------------------------------------------------------------------------
# Summarize each observed step: its phases and bytes, and the figures of the process and of torch's allocator.


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFigures:
    """Figures of the process at the end of a step; None where they are not known."""

    rss_bytes: int
    pinned_bytes: int
    device_peak_bytes: int | None
    device_reserved_bytes: int | None
    alloc_retries: int | None
    """Retries since the process began."""


class Summaries:
    """A sink that turns the steps of an observation into summaries, and the chosen ones into full records."""

    def __init__(
        self,
        rank: int,
        plans: Callable[[], tuple[str, ...]],
        take: Callable[[StepSummary], None],
        full_steps: FullSteps,
        counters: CounterThread | None,
    ) -> None:
        """`plans` returns the keys of the plans in force, and `take` is called with each summary."""
        self._rank = rank
        self._plans = plans
        self._take = take
        self._full_steps = full_steps
        self._counters = counters
        self._process = psutil.Process()
        self.device: torch.device | None = None
        """The device of the model; None before the first step."""
        self._at_end: dict[int, tuple[ProcessFigures | None, tuple[str, ...]]] = {}
        """By the number of an ended step, the figures and the plans at its end, until the step is known."""
        self._retries: int | None = None
        """Retries of the allocator at the end of the last step; None before it."""

    def uuid(self) -> str | None:
        """Return the number of the GPU of the model; None before the first step, and if there is no GPU."""
        return None if self.device is None else platform_of(self.device).uuid(self.device)

    def step_begins(self, number: int, executors: Collection[Phases]) -> bool:
        """See `StepSink`."""
        self.device = next((phases.lanes.device for phases in executors), None)
        return self._full_steps.begins(number, executors)

    def step_ends(self, step: ObservedStep) -> None:
        """See `StepSink`."""
        self._full_steps.ends(step.number)
        figures, device = None, self.device
        if device is not None:
            platform = platform_of(device)
            has_memory = platform.has_own_memory
            figures = ProcessFigures(
                rss_bytes=self._process.memory_info().rss,
                pinned_bytes=pinned_slab_bytes(),
                # Peaks are read and never reset: other code of the process reads them too.
                device_peak_bytes=platform.peak_bytes(device) if has_memory else None,
                device_reserved_bytes=platform.reserved_bytes(device) if has_memory else None,
                alloc_retries=platform.alloc_retries(device) if has_memory else None,
            )
        self._at_end[step.number] = (figures, self._plans())

    def step_known(self, step: ObservedStep) -> None:
        """See `StepSink`."""
        figures, plans = self._at_end.pop(step.number)
        intervals, counters = step.intervals, self._counters
        retries = None if figures is None else figures.alloc_retries
        before, self._retries = self._retries, self._retries if retries is None else retries
        assert step.ended is not None, "a step that is known has ended"
        span_s = (step.changes.began.host_s, step.ended.host_s)
        summary = StepSummary(
            step=step.number,
            rank=self._rank,
            plans=plans,
            period_s=intervals[-1].end_s if intervals else 0.0,
            seconds_s=seconds_by_phase(intervals),
            moved_bytes=step.moved_bytes,
            host_update_s=step.thread_s.get(Lane.HOST),
            host_update_elements=step.updated_elements or None,
            waited_s=step.thread_s.get(Lane.CALLER),
            device_peak_bytes=None if figures is None else figures.device_peak_bytes,
            device_reserved_bytes=None if figures is None else figures.device_reserved_bytes,
            alloc_retries=None if retries is None or before is None else retries - before,
            host_slab_bytes=step.slab_bytes,
            host_pinned_bytes=0 if figures is None else figures.pinned_bytes,
            rss_bytes=None if figures is None else figures.rss_bytes,
            energy_j=None if counters is None else counters.difference("device_energy_j", *span_s),
            device_busy_share=None if counters is None else counters.mean("device_busy_share", *span_s),
            notes=step.notes,
        )
        self._full_steps.known(step, summary, lambda: None if counters is None else counters.between(*span_s))
        self._take(summary)

    def ended(self) -> None:
        """See `StepSink`."""
        self._full_steps.drop()
        self._full_steps.hand_over()
