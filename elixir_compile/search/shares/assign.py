"""Who gets how many rows, run in which way, and which part of the state: the exact optimum.

```text
  minimise     max over ranks i of T_i(b_i, w_i)           w: the way in which a rank runs its rows
  subject to   sum b_i = B,  sum r_i = 1,  r_i S <= C_i(b_i, w_i)                     or r_i = 1 / ranks
```

For a fixed T, the most state for which a rank has room is a function of its rows, and the most room of all ranks
together is a max-plus convolution of these functions. T is found by bisection over the values that occur. It costs
ranks x quanta^2 additions for each step of the bisection.

Of two choices with the same T, that with the smaller maximum of the busy seconds wins: where all ranks wait for the
same collectives, T alone would not tell an even split from any other. Of choices that are left, one order of ranks
decides, fastest first: the slowest gets the fewest rows that leave the others within T. So the order in which ranks are
given decides only between equal ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_NONE = -(2**62)
"""The room where nothing fits. Twice this is still a number in 64 bits."""
_Bytes = npt.NDArray[np.int64]
_Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Offers:
    """The figures of one class of ranks for 0, 1, 2, .. quanta of rows, in each of its ways: rows and columns."""

    step_s: _Seconds
    busy_s: _Seconds
    """The seconds of its own compute and updates, less than `step_s` if it waits for collectives."""
    room_bytes: _Bytes
    """Bytes of state for which it has room; negative if the rows do not fit, or are not offered in this way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The choice for all ranks."""

    step_s: float
    quanta: tuple[int, ...]
    ways: tuple[int, ...]
    """The column of the offers of each rank."""
    parts: tuple[float, ...]
    """The part of the state of each rank; they sum to 1."""


def assign(
    offers: Sequence[Offers], class_of: Sequence[int], state_bytes: int, *, equal_parts: bool
) -> Assignment | None:
    """Return the choice with the shortest step, or None if nothing fits.

    Rank i takes one of the offers of class `class_of[i]`. All offers are for 0 up to the same number of quanta, which
    the ranks share out among them. The ranks hold `state_bytes` in all: if `equal_parts` each an equal part, else as
    even parts as their rooms allow.
    """
    part_bytes = -(-state_bytes // len(class_of)) if equal_parts else 0
    rooms = [np.where(offer.room_bytes >= part_bytes, offer.room_bytes, _NONE) for offer in offers]
    if equal_parts:
        rooms = [np.minimum(room, 0) for room in rooms]
    orders, times = _orders(offers)
    needed_bytes = 0 if equal_parts else state_bytes
    ranks = _fastest_first(offers, class_of)

    def within(limit: int) -> list[_Bytes]:
        """Return, by class, the most room for each number of quanta in the ways whose order is at most `limit`."""
        return [np.where(order <= limit, room, _NONE).max(axis=1) for order, room in zip(orders, rooms, strict=True)]

    def has_room(limit: int) -> bool:
        return bool(_joined(within(limit), [class_of[rank] for rank in ranks])[0][-1] >= needed_bytes)

    lowest, highest = 0, len(times) - 1
    if highest < 0 or not has_room(highest):
        return None
    while lowest < highest:
        middle = (lowest + highest) // 2
        lowest, highest = (lowest, middle) if has_room(middle) else (middle + 1, highest)
    _, taken = _joined(within(lowest), [class_of[rank] for rank in ranks])
    quanta = _traced(taken, ranks)
    ways = tuple(
        _way(orders[number], rooms[number], offers[number], count, lowest, is_roomiest=not equal_parts)
        for number, count in zip(class_of, quanta, strict=True)
    )
    chosen = [rooms[number][count, way] for number, count, way in zip(class_of, quanta, ways, strict=True)]
    parts = (1 / len(class_of),) * len(class_of)
    if not equal_parts:
        parts = filled([int(room) for room in chosen], state_bytes)
    step_s = max(
        float(offers[number].step_s[count, way]) for number, count, way in zip(class_of, quanta, ways, strict=True)
    )
    return Assignment(step_s=step_s, quanta=quanta, ways=ways, parts=parts)


def assign_fixed(
    offers: Sequence[Offers], counts: Sequence[int], state_bytes: int, *, equal_parts: bool
) -> Assignment | None:
    """Return the choice with the shortest step in which rank i has row `counts[i]` of `offers[i]`; None if nothing
    fits. See `assign` for the parts of the state."""
    part_bytes = -(-state_bytes // len(offers)) if equal_parts else 0
    step_s = [offer.step_s[count] for offer, count in zip(offers, counts, strict=True)]
    rooms = [offer.room_bytes[count] for offer, count in zip(offers, counts, strict=True)]
    allowed = [room >= part_bytes for room in rooms]
    for limit_s in np.unique(np.concatenate(step_s)):
        within = [fits & (seconds <= limit_s) for fits, seconds in zip(allowed, step_s, strict=True)]
        if not all(fits.any() for fits in within):
            continue
        if equal_parts:
            ways = tuple(int(np.where(fits, own, np.inf).argmin()) for fits, own in zip(within, step_s, strict=True))
            parts = (1 / len(offers),) * len(offers)
        else:
            ways = tuple(int(np.where(fits, room, _NONE).argmax()) for fits, room in zip(within, rooms, strict=True))
            chosen = [int(room[way]) for room, way in zip(rooms, ways, strict=True)]
            if sum(chosen) < state_bytes:
                continue
            parts = filled(chosen, state_bytes)
        return Assignment(step_s=float(limit_s), quanta=tuple(counts), ways=ways, parts=parts)
    return None


def _orders(offers: Sequence[Offers]) -> tuple[list[_Bytes], list[tuple[float, float]]]:
    """Return, by class, the place of each offer among all by (step_s, busy_s), and the distinct pairs in order."""
    pairs = np.concatenate([np.stack([offer.step_s.ravel(), offer.busy_s.ravel()], axis=1) for offer in offers])
    distinct, places = np.unique(pairs, axis=0, return_inverse=True)
    ends = np.cumsum([offer.step_s.size for offer in offers])[:-1]
    cut = np.split(places.reshape(-1), ends)
    return [own.reshape(offer.step_s.shape) for own, offer in zip(cut, offers, strict=True)], [
        (float(step_s), float(busy_s)) for step_s, busy_s in distinct
    ]


def _fastest_first(offers: Sequence[Offers], class_of: Sequence[int]) -> list[int]:
    """Return the ranks by the busy seconds of all rows, ranks of equal offers by number."""

    def key(number: int) -> tuple[float, bytes, bytes]:
        offer = offers[number]
        return float(offer.busy_s[-1].min(initial=np.inf)), offer.busy_s.tobytes(), offer.room_bytes.tobytes()

    keys = [key(number) for number in range(len(offers))]
    return sorted(range(len(class_of)), key=lambda rank: (keys[class_of[rank]], rank))


def _joined(rooms: Sequence[_Bytes], classes: Sequence[int]) -> tuple[_Bytes, list[_Bytes]]:
    """Return the most room of all ranks together for each number of quanta, and per rank, for each number of quanta of
    the ranks up to it, how many of them it takes: the fewest, if several numbers leave as much room."""
    size = len(rooms[0])
    places = np.arange(size)
    total = np.full(size, _NONE)
    total[0] = 0
    taken: list[_Bytes] = []
    for number in classes:
        padded = np.concatenate([np.full(size - 1, _NONE), total])
        before = np.lib.stride_tricks.sliding_window_view(padded, size)[:, ::-1]  # [j, b] is total[j - b]
        sums = before + rooms[number]
        took = sums.argmax(axis=1)
        best = sums[places, took]
        total = np.where(best <= _NONE // 2, _NONE, best)
        taken.append(took)
    return total, taken


def _traced(taken: Sequence[_Bytes], ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the quanta of each rank, by number of rank, if all quanta are shared out."""
    found = [0] * len(ranks)
    left = len(taken[0]) - 1
    for rank, took in zip(reversed(ranks), reversed(taken), strict=True):
        found[rank] = int(took[left])
        left -= found[rank]
    return tuple(found)


def _way(order: _Bytes, room: _Bytes, offer: Offers, count: int, limit: int, *, is_roomiest: bool) -> int:
    """Return the way in which a rank runs `count` quanta within `limit`: the one with the most room if `is_roomiest`,
    else the fastest."""
    allowed = np.flatnonzero((order[count] <= limit) & (room[count] > _NONE // 2))
    keys = [(-int(room[count, way]) if is_roomiest else 0, int(order[count, way]), int(way)) for way in allowed]
    return min(keys)[-1]


def filled(rooms: Sequence[int], state_bytes: int) -> tuple[float, ...]:
    """Return the part of `state_bytes` of each rank, as even as the `rooms` allow: the smallest room is filled first.

    The parts sum to 1. The rooms together must be at least `state_bytes`.
    """
    if not state_bytes:
        return (1 / len(rooms),) * len(rooms)
    held = [0] * len(rooms)
    left = state_bytes
    smallest_first = sorted(range(len(rooms)), key=lambda rank: (rooms[rank], rank))
    for place, rank in enumerate(smallest_first):
        held[rank] = min(rooms[rank], -(-left // (len(rooms) - place)))
        left -= held[rank]
    return tuple(nbytes / state_bytes for nbytes in held)


def most_room(offers: Sequence[Offers], class_of: Sequence[int]) -> tuple[int, ...] | None:
    """Return the room of each rank with the rows that leave the most room in all, however long they take; None if no
    rows fit."""
    rooms = [np.where(offer.room_bytes >= 0, offer.room_bytes, _NONE).max(axis=1) for offer in offers]
    ranks = _fastest_first(offers, class_of)
    total, taken = _joined(rooms, [class_of[rank] for rank in ranks])
    if total[-1] <= _NONE // 2:
        return None
    quanta = _traced(taken, ranks)
    return tuple(int(rooms[number][count]) for number, count in zip(class_of, quanta, strict=True))
