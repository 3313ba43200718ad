"""Cut layers into stages so that the slowest stage is as fast as possible within the memory of every rank.

```text
  layers   0 1 2 | 3 4 | 5 6 7 | 8 9        stage s is on rank s mod P; each stage has options: seconds and bytes
  T        the least seconds such that stages of at most T each cover all layers and fit
  cuts     of all with no stage above T, those with the least sum of squares of seconds
```

For a given T the stages are placed one after another, a dynamic program over (stage, layers done). If ranks have
several stages, the state also has the bytes left on each rank, and of two states with equal layers a state that is no
better in anything is dropped. Of very many states only the fastest and the leanest are kept, and T is searched in
`_MOST_COVERS` halvings; so with many stages per rank and little memory a better cut may be missed. With one stage per
rank no state is dropped that could be better.
"""

import itertools
import math
import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

_MANY_STATES, _MOST_KEPT = 64, 8
"""Of more states than the first with equal layers, so many of the fastest and so many of the leanest are kept."""
_MOST_COVERS = 8
"""Halvings of the times that the slowest stage can take: exact for up to 256 of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to run a stage: its seconds, and its bytes on its rank."""

    seconds: float
    added_bytes: int
    """Device bytes that add up over the stages of a rank."""
    passing_bytes: int
    """Device bytes that only one stage of a rank holds at a time."""
    host_bytes: int
    way: int = 0
    """The number of the way in the list of the caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The memory of a rank."""

    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A stage: its layers from `first` up to, not including, `end`, and how it runs."""

    first: int
    end: int
    option: Option


Options = Callable[[int, int, int], Sequence[Option]]
"""The options of a stage by its number, its first layer, and the end of its layers. More layers take more seconds."""

_Used = tuple[int, int, int]
"""Added, passing and host bytes of a rank."""
_NOTHING: _Used = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class _State:
    """Stages that are placed."""

    cost: float
    used: tuple[_Used, ...]
    """Of each rank that has stages still to come; nothing for others, whose stages fit."""
    cut: Cut | None = None
    before: "_State | None" = None

    def cuts(self) -> tuple[Cut, ...]:
        return () if self.cut is None or self.before is None else (*self.before.cuts(), self.cut)

    def is_no_better_than(self, other: "_State") -> bool:
        if self.cost < other.cost:
            return False
        return all(map(operator.ge, itertools.chain(*self.used), itertools.chain(*other.used)))


def best_split(num_layers: int, num_stages: int, rooms: Sequence[Room], options: Options) -> tuple[Cut, ...] | None:
    """Return the cuts of the fastest stages that fit `rooms`, one per rank; None if nothing fits.

    There must be as many layers as stages.
    """
    splitter = _Splitter(num_layers, num_stages, rooms, cache(options))
    limit_s, most_s = splitter.least_s(), splitter.most_s()
    found = splitter.cover(limit_s)
    growth = 1.05
    while found is None and limit_s < most_s:
        limit_s, growth = min(limit_s * growth, most_s), 1 + 1.5 * (growth - 1)
        found = splitter.cover(limit_s)
    if found is None:
        return None
    times = splitter.times(slowest_s(found))
    low, high = 0, len(times)  # the times from `high` on have a cut, those before `low` have none
    for _ in range(_MOST_COVERS):
        if low >= high:
            break
        middle = (low + high) // 2
        better = splitter.cover(times[middle])
        if better is None:
            low = middle + 1
        else:
            found, high = better, bisect_left(times, slowest_s(better))
    return splitter.cover(slowest_s(found)) or found


def slowest_s(cuts: Iterable[Cut]) -> float:
    """Return the seconds of the slowest stage."""
    return max(cut.option.seconds for cut in cuts)


class _Splitter:
    """The layers, stages and ranks of one question."""

    def __init__(self, num_layers: int, num_stages: int, rooms: Sequence[Room], options: Options) -> None:
        self._num_layers, self._num_stages, self._rooms = num_layers, num_stages, rooms
        self._options = options

    def _ends(self, stage: int, first: int) -> range:
        """Return where `stage` may end, so that every later stage has a layer and the last one ends last."""
        behind = self._num_stages - stage - 1
        return range(self._num_layers if not behind else first + 1, self._num_layers - behind + 1)

    def _begins(self) -> Iterator[tuple[int, int]]:
        """Yield each stage with each layer at which it may begin."""
        most = self._num_layers - self._num_stages
        for stage in range(self._num_stages):
            yield from ((stage, first) for first in (range(stage, stage + most + 1) if stage else (0,)))

    def _fastest_s(self, stage: int, first: int, end: int) -> float:
        return min(option.seconds for option in self._options(stage, first, end))

    def least_s(self) -> float:
        """Return the seconds of the slowest stage if everything fits."""
        best = {0: 0.0}
        for stage in range(self._num_stages):
            reached: dict[int, float] = {}
            for first, before_s in best.items():
                for end in self._ends(stage, first):
                    slower_s = max(before_s, self._fastest_s(stage, first, end))
                    reached[end] = min(reached.get(end, math.inf), slower_s)
            best = reached
        return best[self._num_layers]

    def most_s(self) -> float:
        """Return the seconds of the slowest option of any stage."""
        longest = ((stage, first, self._ends(stage, first)[-1]) for stage, first in self._begins())
        return max(option.seconds for stage, first, end in longest for option in self._options(stage, first, end))

    def times(self, limit_s: float) -> list[float]:
        """Return the seconds, from the least to `limit_s`, that the slowest stage can take."""
        least_s, found = self.least_s(), set[float]()
        for stage, first in self._begins():
            for end in self._ends(stage, first):
                seconds = [option.seconds for option in self._options(stage, first, end)]
                found.update(own_s for own_s in seconds if least_s <= own_s <= limit_s)
                if min(seconds) > limit_s:
                    break
        return sorted(found)

    def cover(self, limit_s: float) -> tuple[Cut, ...] | None:
        """Return the cuts with the least sum of squares whose stages take at most `limit_s` each and fit; or None."""
        num_ranks = len(self._rooms)
        states = {0: [_State(0.0, (_NOTHING,) * num_ranks)]}
        for stage in range(self._num_stages):
            reached: dict[int, list[_State]] = {}
            for first, before in states.items():
                for end in self._ends(stage, first):
                    options = [option for option in self._options(stage, first, end) if option.seconds <= limit_s]
                    if not options:
                        break
                    cuts = [Cut(first=first, end=end, option=option) for option in options]
                    made = (self._placed(state, stage, cut) for state in before for cut in cuts)
                    reached.setdefault(end, []).extend(state for state in made if state is not None)
            states = {end: _best_of(found) for end, found in reached.items() if found}
        found = states.get(self._num_layers)
        return min(found, key=lambda state: state.cost).cuts() if found else None

    def _placed(self, state: _State, stage: int, cut: Cut) -> _State | None:
        """Return `state` with `cut` as its next stage; None if that does not fit the rank."""
        num_ranks, option = len(self._rooms), cut.option
        rank = stage % num_ranks
        room, (added, passing, host) = self._rooms[rank], state.used[rank]
        now = (added + option.added_bytes, max(passing, option.passing_bytes), host + option.host_bytes)
        if now[0] + now[1] > room.device_bytes or now[2] > room.host_bytes:
            return None
        is_last = stage + num_ranks >= self._num_stages
        used = (*state.used[:rank], _NOTHING if is_last else now, *state.used[rank + 1 :])
        return _State(state.cost + option.seconds**2, used, cut, state)


def _best_of(states: list[_State]) -> list[_State]:
    """Return the states that no other is better than in everything; of many, the fastest and the leanest."""
    by_cost = sorted(states, key=lambda state: (state.cost, state.used))
    if len(states) <= _MANY_STATES:
        return _undominated(by_cost, _MANY_STATES)
    by_bytes = sorted(by_cost, key=lambda state: sum(added + passing + host for added, passing, host in state.used))
    return _undominated([*_undominated(by_cost, _MOST_KEPT), *_undominated(by_bytes, _MOST_KEPT)], _MANY_STATES)


def _undominated(states: Iterable[_State], most: int) -> list[_State]:
    """Return the first `most` of `states` that none before them is better than in everything."""
    kept: list[_State] = []
    for state in states:
        if not any(state.is_no_better_than(other) for other in kept):
            kept.append(state)
            if len(kept) == most:
                break
    return kept
