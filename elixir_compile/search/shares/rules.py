"""Rules that share out rows without a proof, to compare the exact search with.

`even`      equal rows for all ranks
`greedy`    rows in proportion to the speed of each rank alone, rounded
`cephalo`   the dynamic program of Cephalo (arXiv 2411.01075) as its authors published it: the shortest step for each
            sum of the sizes of micro-batches, of which the shortest wins whose memory, of all devices as one sum, is
            enough. Each rank has a row at least. What it leaves out is that every single device has to hold its rows.
"""

from collections.abc import Sequence

import numpy as np

from elixir_compile.ir.share import largest_remainder
from elixir_compile.search.shares.assign import Offers

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
    options = [_options(offer, micro_batches, most) for offer in offers]
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
        taken = _traced(choices, options, class_of, total, sizes)
        room_bytes = sum(room for _, _, _, room in taken)
        if table[total, sizes] < shortest_s and (room_bytes >= state_bytes or found is None):
            found, shortest_s = tuple(quanta for quanta, _, _, _ in taken), float(table[total, sizes])
    return found


_Option = tuple[int, int, float, int]
"""Quanta, size of a micro-batch in quanta, seconds, and bytes of room."""


def _options(offer: Offers, micro_batches: Sequence[int], most: int) -> list[_Option]:
    """Return the options of a rank, up to `most` quanta: of ways with equal quanta and sizes, the fastest."""
    found: dict[tuple[int, int], _Option] = {}
    for quanta in range(1, most + 1):
        for way, number in enumerate(micro_batches):
            step_s = float(offer.step_s[quanta, way])
            size = -(-quanta // number)
            if np.isfinite(step_s) and step_s < found.get((quanta, size), (0, 0, np.inf, 0))[2]:
                found[quanta, size] = (quanta, size, step_s, int(offer.room_bytes[quanta, way]))
    return list(found.values())


def _traced(
    choices: Sequence[np.ndarray], options: Sequence[list[_Option]], class_of: Sequence[int], quanta: int, sizes: int
) -> list[_Option]:
    found: list[_Option] = []
    for choice, number in zip(reversed(choices), reversed(class_of), strict=True):
        option = options[number][int(choice[quanta, sizes])]
        found.append(option)
        quanta, sizes = quanta - option[0], sizes - option[1]
    return found[::-1]
