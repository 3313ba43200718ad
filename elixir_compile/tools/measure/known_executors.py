"""The executors of an observed model, and what their ledgers have counted since they were asked last."""

import weakref

from elixir_compile.runtime.lanes import Lanes
from elixir_compile.runtime.phases import Phases
from elixir_compile.runtime.recording import ThreadSeconds


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
