"""The device bytes of a step over time, by kind: from blocks of the allocator, phases, and the work that was running.

```text
  there before the step          param, master, moment, buffer, grad, gathered by address, else other
  taken for or under a gather    gathered              taken in the forward, freed within it            temp
  taken for or under a prefetch  saved                 taken in the forward, alive at its end           saved
  taken in the backward, and     grad                  in the backward, else                            temp
    reduced, or alive at its end
  taken in the update, freed     temp                  in the update, alive at its end                  moment
    within it                                          in no phase of ours                              other
```

Nothing is read from a plan. The order of the allocator's events is exact; labels refine what phase and lifetime tell,
because ops between two regions run under no label. The executor says by address which blocks it took for its copies,
and which it reduced.
"""

import bisect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elixir_compile.ir.kinds import Kind, Lane, Phase, Verb
from elixir_compile.ir.record import Span
from elixir_compile.ir.schedule import verb_of
from elixir_compile.tools.study.observed import OTHER, Interval, Live

_UNTHREADED = frozenset({Lane.COMPUTE, Lane.GATHER, Lane.REDUCE, Lane.H2D, Lane.D2H})
"""The lanes whose work the thread of the step issues."""


@dataclass(slots=True)
class _Block:
    """A block of the allocator from its allocation to its end."""

    nbytes: int
    born_s: float
    address: int = 0
    kind: str = ""
    """The kind if it was there before the step, else empty until its end is known."""
    died_s: float | None = None
    taken_for: str = ""
    """The verb of the action for which the executor took it; empty if it took it for none."""


def live_by_kind(
    resident: Mapping[int, tuple[int, str]],
    events: Iterable[tuple[float, int, int]],
    intervals: Sequence[Interval],
    spans: Sequence[Span],
    taken: Iterable[tuple[float, int, str]] = (),
) -> Live:
    """Return the bytes by kind over a step.

    `resident` has bytes and kind of the blocks before the step, by address. `events` are (seconds since the step began,
    address, bytes) in order: bytes are positive for a new block, negative or 0 for one that was freed. `taken` are
    (seconds, address, label) of blocks that were taken for an action; for a reduce, they are gradients of parameters.
    """
    before = [_Block(nbytes, 0.0, kind=kind) for nbytes, kind in resident.values()]
    blocks, changes = _blocks(dict(zip(resident, before, strict=True)), events)
    running = _Running(spans)
    _mark_taken(blocks, taken)
    for block in blocks:
        block.kind = _kind_of(block, intervals, running)
    return _summed(before, changes)


@dataclass(frozen=True, slots=True)
class _Change:
    """A block comes, a block goes, or one takes the address of another."""

    at_s: float
    born: _Block | None
    died: _Block | None


def _blocks(alive: dict[int, _Block], events: Iterable[tuple[float, int, int]]) -> tuple[list[_Block], list[_Change]]:
    """Return the blocks of the step, and all changes in order. `alive` are the blocks before the step, by address."""
    found: list[_Block] = []
    changes: list[_Change] = []
    at_s = 0.0
    for time_s, address, nbytes in events:
        at_s = max(at_s, time_s)
        died = alive.get(address)
        if nbytes == 0 and died is not None and not died.kind:
            continue  # an end of a block from before the step that was told late: its address is in use again
        if died is not None:
            died.died_s = at_s
            del alive[address]
        born = _Block(nbytes, at_s, address) if nbytes > 0 else None
        if born is not None:
            alive[address] = born
            found.append(born)
        if born is not None or died is not None:
            changes.append(_Change(at_s, born, died))
    return found, changes


CLOCKS_APART_S = 1e-4
"""How far the profiler's times of allocations may be from the clock of the host: it converts them from a counter of the
processor. Two gathers are further apart."""


def _mark_taken(blocks: Iterable[_Block], taken: Iterable[tuple[float, int, str]]) -> None:
    """Mark the blocks that were taken for an action: of those at the address, the one that was alive, or nearly so."""
    by_address: dict[int, list[_Block]] = {}
    for block in blocks:
        by_address.setdefault(block.address, []).append(block)

    def apart_s(block: _Block, at_s: float) -> float:
        died_s = at_s if block.died_s is None else block.died_s
        return max(block.born_s - at_s, at_s - died_s, 0.0)

    for at_s, address, label in taken:
        nearest = min(by_address.get(address, ()), key=lambda block: apart_s(block, at_s), default=None)
        if nearest is not None and apart_s(nearest, at_s) <= CLOCKS_APART_S:
            nearest.taken_for = verb_of(label)


class _Running:
    """Which work the thread of the step was doing at a time."""

    def __init__(self, spans: Sequence[Span]) -> None:
        own = sorted((span for span in spans if span.lane in _UNTHREADED), key=lambda span: span.start_s)
        self._starts_s = [span.start_s for span in own]
        self._spans = own

    def verb_at(self, time_s: float) -> str:
        """Return the verb of the innermost span around `time_s`; empty if there is none."""
        for place in range(bisect.bisect_right(self._starts_s, time_s) - 1, -1, -1):
            span = self._spans[place]
            if span.end_s >= time_s:
                return verb_of(span.label)
            if place < bisect.bisect_right(self._starts_s, time_s) - _DEEPEST:
                break
        return ""


_DEEPEST = 4
"""The most spans of one thread that are open at once, with one to spare: a copy in a gather in a region."""


def _kind_of(block: _Block, intervals: Sequence[Interval], running: _Running) -> str:
    """Return the kind of a block of the step."""
    interval = _interval_at(intervals, block.born_s)
    if interval is None or interval.phase is None:
        return OTHER
    is_gone = block.died_s is not None and block.died_s <= interval.end_s
    if interval.phase is Phase.UPDATE:
        return Kind.TEMP if is_gone else Kind.MOMENT
    verb = block.taken_for or running.verb_at(block.born_s)
    if verb == Verb.GATHER:
        return Kind.GATHERED
    if verb == Verb.PREFETCH:
        return Kind.SAVED
    if interval.phase is Phase.FORWARD:
        return Kind.TEMP if is_gone else Kind.SAVED
    return Kind.GRAD if block.taken_for == Verb.REDUCE or not is_gone else Kind.TEMP


def _interval_at(intervals: Sequence[Interval], time_s: float) -> Interval | None:
    place = bisect.bisect_right(intervals, time_s, key=lambda interval: interval.start_s) - 1
    return intervals[place] if place >= 0 and time_s <= intervals[place].end_s else None


def _summed(before: Iterable[_Block], changes: Iterable[_Change]) -> Live:
    """Return the sums by kind after each of `changes`, in their order; times may repeat."""
    now = Counter[str]()
    for block in before:
        now[block.kind] += block.nbytes
    times_s, rows = [0.0], [dict(now)]
    for change in changes:
        for block, sign in ((change.died, -1), (change.born, 1)):
            if block is not None:
                now[block.kind] += sign * block.nbytes
        times_s.append(change.at_s)
        rows.append(dict(now))
    kinds = sorted(now)
    return Live(at_s=tuple(times_s), by_kind={kind: tuple(row.get(kind, 0) for row in rows) for kind in kinds})
