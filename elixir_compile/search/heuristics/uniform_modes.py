"""Every layer at the same depth, from keeping everything to keeping next to nothing: where a search can begin.

kept, pointwise, matmul, attention, fixed        what is not recomputed stays
kept, pointwise, matmul, attention, fixed        what is not recomputed leaves
layer by layer                                   from the first and the leanest of these, while that needs fewer bytes
"""

from collections.abc import Iterator

import numpy as np

from elixir_compile.search.evaluator import Evaluator
from elixir_compile.search.space.memory import MemoryModel
from elixir_compile.search.space.min_memory import fullness
from elixir_compile.search.space.modes import deepest


def uniform_modes(evaluator: Evaluator) -> Iterator[Evaluator]:
    """Yield the evaluator of each rung, the first with everything kept; each once."""
    layers = evaluator.facts.layers
    seen: set[tuple[int, ...]] = set()
    for leaves in (False, True):
        for depth in sorted({mode.depth for layer in layers for mode in layer.modes}):
            modes = tuple(deepest(layer, depth, leaves=leaves) for layer in layers)
            if modes not in seen:
                seen.add(modes)
                yield evaluator.at(modes)
    if not layers:
        yield evaluator
        return
    for start in (evaluator.at([0] * len(layers)), min(map(evaluator.at, seen), key=lambda rung: rung.floor_bytes)):
        if start.lowered_modes is None:
            start.lowered_modes = _layer_by_layer(evaluator, start)
        modes = start.lowered_modes
        if modes not in seen:
            seen.add(modes)
            yield evaluator.at(modes)


def leanest(evaluator: Evaluator) -> Evaluator:
    """Return the rung that needs the fewest device bytes with every bucket as far off as it can be."""
    return min(uniform_modes(evaluator), key=lambda rung: rung.floor_bytes)


def _layer_by_layer(evaluator: Evaluator, start: Evaluator) -> tuple[int, ...]:
    """Return the modes that changes of one layer after another lead to from those of `start`, each of which lowers the
    peak, or the number of segments at it, by the bytes of `profiles`."""
    now = list(start.facts.modes)
    more_bytes = [[own.nbytes - layer[0].nbytes for own in layer] for layer in evaluator.profiles]
    changed = {int(slot) + 1 for layer in more_bytes for own in layer for slot in np.flatnonzero(np.diff(own))}
    memory = MemoryModel(evaluator.at([0] * len(now)).facts, changed)
    own_bytes, more_bytes = memory.own_bytes(), [[memory.highest(own) for own in layer] for layer in more_bytes]
    live_bytes = memory.rest_bytes + sum(own_bytes[i, level] for i, level in enumerate(start.min_memory_levels))
    live_bytes += sum(layer[mode] for layer, mode in zip(more_bytes, now, strict=True))
    while True:
        key, fullest = fullness(live_bytes), int(live_bytes.argmax())
        found = [
            (fullness(live_bytes + own - layer[now[i]]), i, mode)
            for i, layer in enumerate(more_bytes)
            for mode, own in enumerate(layer)
            if own[fullest] < layer[now[i]][fullest]
        ]
        best, i, mode = min(found, default=(key, 0, now[0]))
        if best >= key:
            return tuple(now)
        live_bytes += more_bytes[i][mode] - more_bytes[i][now[i]]
        now[i] = mode
