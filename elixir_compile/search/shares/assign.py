"""Divide rows, micro-batches and state among ranks that differ: exactly, by rules, and by the seconds that were
seen."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elixir_compile.base.errors import InvalidPlan
from elixir_compile.base.units import format_s
from elixir_compile.ir import StepGraph
from elixir_compile.ir.hardware import Cluster
from elixir_compile.ir.schedule import LEAST_ROWS
from elixir_compile.ir.share import largest_remainder
from elixir_compile.search.outline import seconds_of_ops
from elixir_compile.step.as_run import graph_of_rows

# ----------------------------------------------------------------------------------------------------------------------
# Who gets how many rows, run in which way, and which shard of the state: the exact optimum.
#
#   minimise     max over ranks i of T_i(b_i, w_i)           w: the way in which a rank runs its rows
#   subject to   sum b_i = B,  sum r_i = 1,  r_i S <= C_i(b_i, w_i)                     or r_i = 1 / ranks
#
# For a fixed T, the most state for which a rank has room is a function of its rows, and the most room of all ranks
# together is a max-plus convolution of these functions. T is found by bisection over the values that occur. It costs
# ranks x quanta^2 additions for each step of the bisection.
#
# Of two choices with the same T, that with the smaller maximum of the busy seconds wins: where all ranks wait for the
# same collectives, T alone would not tell an even split from any other. Of choices that are left, one order of ranks
# decides, fastest first: the slowest gets the fewest rows that leave the others within T. So the order in which ranks
# are given decides only between equal ones.


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
    shards: tuple[float, ...]
    """The shard of the state of each rank; they sum to 1."""


def assign(
    offers: Sequence[Offers], class_of: Sequence[int], state_bytes: int, *, equal_shards: bool
) -> Assignment | None:
    """Return the choice with the shortest step, or None if nothing fits.

    Rank i takes one of the offers of class `class_of[i]`. All offers are for 0 up to the same number of quanta, which
    the ranks share out among them. The ranks hold `state_bytes` in all: if `equal_shards` each an equal shard, else as
    even shards as their rooms allow.
    """
    shard_bytes = -(-state_bytes // len(class_of)) if equal_shards else 0
    rooms = [np.where(offer.room_bytes >= shard_bytes, offer.room_bytes, _NONE) for offer in offers]
    if equal_shards:
        rooms = [np.minimum(room, 0) for room in rooms]
    # By class, the place of each offer among all by (step_s, busy_s).
    pairs = np.concatenate([np.stack([offer.step_s.ravel(), offer.busy_s.ravel()], axis=1) for offer in offers])
    distinct, places = np.unique(pairs, axis=0, return_inverse=True)
    split = np.split(places.reshape(-1), np.cumsum([offer.step_s.size for offer in offers])[:-1])
    orders = [own.reshape(offer.step_s.shape) for own, offer in zip(split, offers, strict=True)]
    needed_bytes = 0 if equal_shards else state_bytes
    ranks = _fastest_first(offers, class_of)

    def within(limit: int) -> list[_Bytes]:
        """Return, by class, the most room for each number of quanta in the ways whose order is at most `limit`."""
        return [np.where(order <= limit, room, _NONE).max(axis=1) for order, room in zip(orders, rooms, strict=True)]

    def has_room(limit: int) -> bool:
        return bool(_joined(within(limit), [class_of[rank] for rank in ranks])[0][-1] >= needed_bytes)

    lowest, highest = 0, len(distinct) - 1
    if highest < 0 or not has_room(highest):
        return None
    while lowest < highest:
        middle = (lowest + highest) // 2
        lowest, highest = (lowest, middle) if has_room(middle) else (middle + 1, highest)
    _, taken = _joined(within(lowest), [class_of[rank] for rank in ranks])
    quanta = _traced(taken, ranks)

    def way_of(number: int, count: int) -> int:
        """Return the way in which a rank runs its quanta: the one with the most room, or of equal shards, the
        fastest."""
        order, room = orders[number][count], rooms[number][count]
        allowed = np.flatnonzero((order <= lowest) & (room > _NONE // 2))
        return min((0 if equal_shards else -int(room[way]), int(order[way]), int(way)) for way in allowed)[-1]

    ways = tuple(way_of(number, count) for number, count in zip(class_of, quanta, strict=True))
    chosen = [rooms[number][count, way] for number, count, way in zip(class_of, quanta, ways, strict=True)]
    shards = (1 / len(class_of),) * len(class_of)
    if not equal_shards:
        shards = filled([int(room) for room in chosen], state_bytes)
    step_s = max(
        float(offers[number].step_s[count, way]) for number, count, way in zip(class_of, quanta, ways, strict=True)
    )
    return Assignment(step_s=step_s, quanta=quanta, ways=ways, shards=shards)


def assign_fixed(
    offers: Sequence[Offers], counts: Sequence[int], state_bytes: int, *, equal_shards: bool
) -> Assignment | None:
    """Return the choice with the shortest step in which rank i has row `counts[i]` of `offers[i]`; None if nothing
    fits. See `assign` for the shards of the state."""
    shard_bytes = -(-state_bytes // len(offers)) if equal_shards else 0
    step_s = [offer.step_s[count] for offer, count in zip(offers, counts, strict=True)]
    rooms = [offer.room_bytes[count] for offer, count in zip(offers, counts, strict=True)]
    allowed = [room >= shard_bytes for room in rooms]
    for limit_s in np.unique(np.concatenate(step_s)):
        within = [fits & (seconds <= limit_s) for fits, seconds in zip(allowed, step_s, strict=True)]
        if not all(fits.any() for fits in within):
            continue
        if equal_shards:
            ways = tuple(int(np.where(fits, own, np.inf).argmin()) for fits, own in zip(within, step_s, strict=True))
            shards = (1 / len(offers),) * len(offers)
        else:
            ways = tuple(int(np.where(fits, room, _NONE).argmax()) for fits, room in zip(within, rooms, strict=True))
            chosen = [int(room[way]) for room, way in zip(rooms, ways, strict=True)]
            if sum(chosen) < state_bytes:
                continue
            shards = filled(chosen, state_bytes)
        return Assignment(step_s=float(limit_s), quanta=tuple(counts), ways=ways, shards=shards)
    return None


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


def filled(rooms: Sequence[int], state_bytes: int) -> tuple[float, ...]:
    """Return the shard of `state_bytes` of each rank, as even as the `rooms` allow: the smallest room is filled first.

    The shards sum to 1. The rooms together must be at least `state_bytes`.
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


# ----------------------------------------------------------------------------------------------------------------------
# Rules that share out rows without a proof, to compare the exact search with.
#
# `even`      equal rows for all ranks
# `greedy`    rows in proportion to the speed of each rank alone, rounded
# `cephalo`   the dynamic program of Cephalo (arXiv 2411.01075) as its authors published it: the shortest step for each
#             sum of the sizes of micro-batches, of which the shortest wins whose memory, of all devices as one sum, is
#             enough. Each rank has a row at least. What it leaves out is that every single device has to hold its rows.


_FEW_RANKS = 8
_MOST_TIMES = 8


def even(num_ranks: int, total: int) -> tuple[int, ...]:
    """Return `total` rows or quanta in equal numbers; lower ranks get one more if they cannot be equal."""
    return largest_remainder(total, [1.0] * num_ranks)


def greedy(offers: Sequence[Offers], class_of: Sequence[int]) -> tuple[int, ...]:
    """Return quanta in proportion to the speed of each rank with an even part of them."""
    total = offers[0].busy_s.shape[0] - 1
    each = max(1, total // len(class_of))
    seconds = [float(np.min(offer.busy_s[each])) for offer in offers]
    speeds = [0.0 if not np.isfinite(busy_s) else 1 / max(busy_s, 1e-12) for busy_s in seconds]
    if not any(speeds):
        return even(len(class_of), total)
    return largest_remainder(total, [speeds[number] for number in class_of])


_Option = tuple[int, int, float, int]
"""Quanta, size of a micro-batch in quanta, seconds, and bytes of room."""


def cephalo(
    offers: Sequence[Offers], class_of: Sequence[int], micro_batches: Sequence[int], state_bytes: int
) -> tuple[int, ...] | None:
    """Return the quanta of each rank by Cephalo's dynamic program, or None if it finds nothing.

    `micro_batches` is the number of micro-batches of each way. Its table has the shortest step of the first ranks for
    each number of quanta and each sum of the sizes of their micro-batches. Of many ranks, one gets at most eight times
    an even part: its options are tried on the whole table.
    """
    total = offers[0].busy_s.shape[0] - 1
    shape = (total + 1, total + 1)
    table = np.full(shape, np.inf)
    table[0, 0] = 0.0
    choices: list[np.ndarray] = []
    most = total if len(class_of) <= _FEW_RANKS else min(total, _MOST_TIMES * -(-total // len(class_of)))
    options: list[list[_Option]] = []
    for offer in offers:
        # Of ways with equal quanta and sizes, the fastest.
        found_options: dict[tuple[int, int], _Option] = {}
        for quanta in range(1, most + 1):
            for way, number in enumerate(micro_batches):
                step_s, size = float(offer.step_s[quanta, way]), -(-quanta // number)
                if np.isfinite(step_s) and step_s < found_options.get((quanta, size), (0, 0, np.inf, 0))[2]:
                    found_options[quanta, size] = (quanta, size, step_s, int(offer.room_bytes[quanta, way]))
        options.append(list(found_options.values()))
    for number in class_of:
        best, choice = np.full(shape, np.inf), np.full(shape, -1, dtype=np.int64)
        for place, (quanta, size, step_s, _) in enumerate(options[number]):
            later = np.full(shape, np.inf)
            later[quanta:, size:] = np.maximum(table[: total + 1 - quanta, : total + 1 - size], step_s)
            is_better = later < best
            best[is_better], choice[is_better] = later[is_better], place
        table = best
        choices.append(choice)
    found: tuple[int, ...] | None = None
    shortest_s = np.inf
    for sizes in range(1, total + 1):
        if not np.isfinite(table[total, sizes]):
            continue
        taken: list[_Option] = []
        at = total, sizes
        for choice, number in zip(reversed(choices), reversed(class_of), strict=True):
            taken.append(options[number][int(choice[at])])
            at = at[0] - taken[-1][0], at[1] - taken[-1][1]
        taken.reverse()
        room_bytes = sum(room for _, _, _, room in taken)
        if table[total, sizes] < shortest_s and (room_bytes >= state_bytes or found is None):
            found, shortest_s = tuple(quanta for quanta, _, _, _ in taken), float(table[total, sizes])
    return found


# ----------------------------------------------------------------------------------------------------------------------
# Rows for each rank by the seconds that ranks were seen to compute, if some wait for others.
#
#   rank     rows   computes     seconds of a row    rows that even it out
#   0        8      80 ms        10 ms               12
#   1        8      240 ms       30 ms               4           120 ms instead of 240 ms
#
# Some seconds of a step do not depend on rows, as launches and reads of weights: prices tell their share.


_UNEVEN = 1.1
"""Rows are suggested if the slowest rank computes for more than this times the mean."""


def fixed_share(graph: StepGraph, cluster: Cluster) -> float:
    """Return the share of the seconds of compute of `graph` that more rows do not lengthen, by prices on a device of
    `cluster`; 0 if the graph does not say what belongs to its rows."""
    try:
        double = graph_of_rows(graph, 2 * graph.batch)
    except InvalidPlan:
        return 0.0
    own_s, double_s = (sum(seconds for _, seconds in seconds_of_ops(step, cluster)) for step in (graph, double))
    return min(max(2 - double_s / own_s, 0.0), 1.0) if own_s else 0.0


def balanced_rows(rows: Sequence[int], busy_s: Sequence[float], fixed: Sequence[float] = ()) -> tuple[int, ...]:
    """Return as many rows as `rows` has, shared out so that the slowest rank computes for the least seconds.

    `busy_s` are the seconds in which each rank computed its `rows`, and `fixed` the share of them that does not depend
    on rows, by default 0; all rows are taken to need the same seconds of the rest. A rank without rows gets none, any
    other at least 2, or its own if they are fewer.
    """
    found = [min(own, LEAST_ROWS) for own in rows]
    lines = _lines(rows, busy_s, fixed)
    # The rank that is done first with one more row gets it: no other choice ends earlier.
    heap = [(_seconds(lines[rank], own + 1), rank) for rank, own in enumerate(found) if rows[rank]]
    heapq.heapify(heap)
    for _ in range(sum(rows) - sum(found)):
        _, rank = heap[0]
        found[rank] += 1
        heapq.heapreplace(heap, (_seconds(lines[rank], found[rank] + 1), rank))
    return tuple(found)


_Line = tuple[float, float]
"""Seconds that do not depend on rows, and seconds of a row."""


def _lines(rows: Sequence[int], busy_s: Sequence[float], fixed: Sequence[float]) -> list[_Line]:
    shares = fixed or (0.0,) * len(rows)
    return [
        (seconds * share, seconds * (1 - share) / own) if own else (seconds, 0.0)
        for own, seconds, share in zip(rows, busy_s, shares, strict=True)
    ]


def _seconds(line: _Line, rows: int) -> float:
    return line[0] + line[1] * rows


def balance_line(rows: Sequence[int], busy_s: Sequence[float], fixed: Sequence[float] = ()) -> str | None:
    """Return a line that suggests other rows if the slowest rank computes for more than a tenth longer than the mean;
    None if no rows are better, or if ranks are about as slow as each other. Arguments are as for `balanced_rows`."""
    slowest_s = max(busy_s)
    if slowest_s <= _UNEVEN * sum(busy_s) / len(busy_s):
        return None
    better = balanced_rows(rows, busy_s, fixed)
    then_s = max(_seconds(line, new) for line, new in zip(_lines(rows, busy_s, fixed), better, strict=True))
    if then_s >= slowest_s:
        return None
    seconds_text = ", ".join(map(format_s, busy_s))
    return (
        f"uneven    ranks compute {'/'.join(map(str, rows))} rows in {seconds_text}; shares would be "
        f"{'/'.join(map(str, better))}: {1 - then_s / slowest_s:.0%} shorter"
    )
