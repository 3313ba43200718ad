"""The modes from which a search starts: equal for all layers, from keeping all activations to the fewest bytes.

kept, pointwise, matmul, attention, fixed        recompute up to this class, keep the rest on the device
kept, pointwise, matmul, attention, fixed        recompute up to this class, offload the rest
layer by layer                                   from the first and from the leanest of these, as long as bytes fall
"""

from collections.abc import Iterator

import numpy as np

from elixir_compile.search.evaluator import Evaluator
from elixir_compile.search.space.memory import MemoryModel
from elixir_compile.search.space.min_memory import fullness
from elixir_compile.search.space.modes import modes_by_depth


def uniform_modes(evaluator: Evaluator) -> Iterator[Evaluator]:
    """Yield the evaluator of each choice of modes for the start of a search, each once.

    The first keeps all activations. Layer-by-layer modes are computed once and kept in `Evaluator.lowered_modes`.
    """
    layers = evaluator.facts.layers
    seen: set[tuple[int, ...]] = set()
    for modes in modes_by_depth(layers):
        if modes not in seen:
            seen.add(modes)
            yield evaluator.at(modes)
    if not layers:
        yield evaluator
        return
    for start in (evaluator.at([0] * len(layers)), min(map(evaluator.at, seen), key=lambda at: at.floor_bytes)):
        if start.lowered_modes is None:
            start.lowered_modes = _layer_by_layer(evaluator, start)
        modes = start.lowered_modes
        if modes not in seen:
            seen.add(modes)
            yield evaluator.at(modes)


def leanest(evaluator: Evaluator) -> Evaluator:
    """Return the evaluator of the uniform modes with the fewest device bytes if all buckets are at minimum memory."""
    return min(uniform_modes(evaluator), key=lambda at: at.floor_bytes)


def _layer_by_layer(evaluator: Evaluator, start: Evaluator) -> tuple[int, ...]:
    """Return the modes reached from `start` by changes of single layers, each time the change with the lowest peak.

    Bytes are those of `Evaluator.profiles`, with all buckets at minimum memory. At equal peaks, fewer segments at the
    peak count as lower. The changes end if none lowers the peak.
    """
    now = list(start.facts.modes)
    more_bytes = [[profile.nbytes - layer[0].nbytes for profile in layer] for layer in evaluator.profiles]
    changed = {int(slot) + 1 for layer in more_bytes for mode in layer for slot in np.flatnonzero(np.diff(mode))}
    memory = MemoryModel(evaluator.at([0] * len(now)).facts, changed)
    own_bytes, more_bytes = memory.own_bytes(), [[memory.highest(mode) for mode in layer] for layer in more_bytes]
    live_bytes = memory.rest_bytes + sum(own_bytes[i, level] for i, level in enumerate(start.min_memory_levels))
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
