"""Tell observers when the forwards and the backwards of training steps begin and end.

```text
  forward     around the checks, the plan and the program of one forward
  backward    from the first program of a backward pass to its published gradients
```

Nothing is timed here. Without an observer, a forward and a backward look at an empty tuple.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Protocol

from elixir_compile import compat
from elixir_compile.graph.ops.registry import Slot
from elixir_compile.ir.kinds import Phase
from elixir_compile.runtime.lanes import Lanes
from elixir_compile.runtime.ledger import Ledger


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
            compat.after_backward(partial(self._end_backward, number))

    def _end_backward(self, number: int) -> None:
        if number in self._open:
            self._open.remove(number)
            self._tell(Phase.BACKWARD, begins=False)

    def abandon(self) -> None:
        """End the phases of all backward passes, after an exception."""
        while self._open:
            self._open.pop()
            self._tell(Phase.BACKWARD, begins=False)

    def _tell(self, phase: Phase, *, begins: bool) -> None:
        for observer in _observers:
            (observer.phase_begins if begins else observer.phase_ends)(self, phase)
