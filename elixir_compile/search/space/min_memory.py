"""Find the levels, and the modes, that need the fewest device bytes.

On one rank these are the furthest levels. On several ranks a gather needs more bytes for a moment than a resident copy
does. If the step peaks at this moment, the bucket needs fewer bytes if it is resident.

    peak = max over segments s of (rest_bytes[s] + sum over buckets of bytes[bucket][level][s])

Two descents change a bucket at a time, the first from all buckets released, the second from all buckets resident. The
lower of the two peaks is taken. It is not proved to be the minimum, but was on 326 random chains of up to 1500
candidates on two ranks.

Modes are lowered layer by layer in the same way.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from elixir_compile.search.space.facts import Facts
from elixir_compile.search.space.levels import Level
from elixir_compile.search.space.memory import MemoryModel
from elixir_compile.search.space.profiles import Profile

_Levels = tuple[Level, ...]


def min_memory_levels(facts: Facts, memory: MemoryModel) -> _Levels:
    """Return the levels with the lowest peak found, every gather at its use; the furthest levels if peaks are equal."""
    furthest = facts.furthest_levels
    resident = tuple(
        Level.ALL_OFF if bucket.is_sharded and level.is_released and Level.ALL_OFF in choices else level
        for bucket, level, choices in zip(facts.buckets, furthest, facts.choices, strict=True)
    )
    if resident == furthest:
        return furthest
    own_bytes = memory.own_bytes()
    found = [
        _lowered(memory.rest_bytes, own_bytes, start, other)
        for start, other in ((furthest, resident), (resident, furthest))
    ]
    return min(found, key=lambda lowered: lowered[0])[1]


def _lowered(
    rest_bytes: NDArray[np.int64], own_bytes: NDArray[np.int64], levels: _Levels, others: _Levels
) -> tuple[tuple[int, int], _Levels]:
    """Switch buckets between `levels` and `others` as long as that lowers the `fullness`; return it and the levels."""
    now, buckets = list(levels), np.arange(len(levels))
    live_bytes = rest_bytes + own_bytes[buckets, now].sum(axis=0)
    more_bytes = own_bytes[buckets, list(others)] - own_bytes[buckets, now]
    """What each bucket adds if it is switched."""
    key = fullness(live_bytes)
    while True:
        tried = np.flatnonzero(more_bytes[:, int(live_bytes.argmax())] < 0)
        if not len(tried):
            return key, tuple(now)
        switched_bytes = live_bytes + more_bytes[tried]
        peaks_bytes = switched_bytes.max(axis=1)
        lowest = np.flatnonzero(peaks_bytes == peaks_bytes.min())
        best, place = min((fullness(switched_bytes[place]), place) for place in lowest)
        if best >= key:
            return key, tuple(now)
        i = int(tried[place])
        now[i] = others[i] if now[i] is levels[i] else levels[i]
        live_bytes, key = switched_bytes[place], best
        more_bytes[i] = -more_bytes[i]


def fullness(live_bytes: NDArray[np.int64]) -> tuple[int, int]:
    """Return the peak in bytes, and the number of segments with as many bytes."""
    peak_bytes = int(live_bytes.max())
    return peak_bytes, int((live_bytes == peak_bytes).sum())


def lowered_modes(
    kept: Facts, profiles: Sequence[Sequence[Profile]], modes: Sequence[int], levels: Sequence[Level]
) -> tuple[int, ...]:
    """Return the modes reached from `modes` by changes of single layers, each time the change with the lowest peak.

    `kept` are the facts with every activation kept. Bytes are those of `profiles`, with all buckets at `levels`. At
    equal peaks, fewer segments at the peak count as lower. The changes end if none lowers the peak.
    """
    now = list(modes)
    more_bytes = [[profile.nbytes - layer[0].nbytes for profile in layer] for layer in profiles]
    changed = {int(point) + 1 for layer in more_bytes for mode in layer for point in np.flatnonzero(np.diff(mode[0]))}
    memory = MemoryModel(kept, changed)
    own_bytes, more_bytes = memory.own_bytes(), [[memory.highest(mode) for mode in layer] for layer in more_bytes]
    live_bytes = memory.rest_bytes + sum(own_bytes[i, level] for i, level in enumerate(levels))
    live_bytes += sum(layer[mode] for layer, mode in zip(more_bytes, now, strict=True))
    while True:
        key, fullest = fullness(live_bytes), int(live_bytes.argmax())
        found = [
            (fullness(live_bytes + nbytes - layer[now[i]]), i, mode)
            for i, layer in enumerate(more_bytes)
            for mode, nbytes in enumerate(layer)
            if nbytes[fullest] < layer[now[i]][fullest]
        ]
        best, i, mode = min(found, default=(key, 0, now[0]))
        if best >= key:
            return tuple(now)
        live_bytes += more_bytes[i][mode] - more_bytes[i][now[i]]
        now[i] = mode
