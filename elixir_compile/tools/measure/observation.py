"""Observe the training steps of one model: phases, bytes by lane, and figures of the process, for every step.

```text
  first training forward of ours        the step begins, and the step before it ends
  forward, backward                     as the executors of the model say
  optimizer.step()                      by torch's global hooks, for optimizers with parameters of the model
```

A step ends with the first training forward after an `optimizer.step()` returned. So it holds for accumulated gradients,
several optimizers and closures. On a device with a clock, moments are events that are read later: nothing waits.
"""

import inspect
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from elixir_compile.ir.kinds import Lane, Phase
from elixir_compile.runtime.phases import Phases, observe_phases
from elixir_compile.runtime.recording import ThreadSeconds
from elixir_compile.runtime.slab import live_slab_bytes
from elixir_compile.tools.measure.known_executors import KnownExecutors
from elixir_compile.tools.measure.phases import Moment, PhaseChanges, StepTimes, moment_now
from elixir_compile.tools.study.observed import Interval, name_of

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
                    self._begin_step()
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
        if Phase.UPDATE in self._open and not _is_running(self._hooked_step):
            while Phase.UPDATE in self._open:
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

    def _begin_step(self) -> None:
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


def _is_running(code: CodeType | None) -> bool:
    """Return whether `code` is on the stack of the calling thread."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False
