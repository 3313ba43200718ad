"""Every layer at the same depth, from keeping everything to keeping next to nothing: where a search can begin.

kept, pointwise, matmul, attention, fixed        what is not recomputed stays
kept, pointwise, matmul, attention, fixed        what is not recomputed leaves
"""

from collections.abc import Iterator

from elixir_compile.search.judge import Judge
from elixir_compile.search.modes import deepest


def ladder(judge: Judge) -> Iterator[Judge]:
    """Yield the judge of each rung, the first with everything kept; each once."""
    layers = judge.facts.layers
    seen: set[tuple[int, ...]] = set()
    for leaves in (False, True):
        for depth in sorted({mode.depth for layer in layers for mode in layer.modes}):
            modes = tuple(deepest(layer, depth, leaves=leaves) for layer in layers)
            if modes not in seen:
                seen.add(modes)
                yield judge.at(modes)
    if not layers:
        yield judge


def leanest(judge: Judge) -> Judge:
    """Return the rung that needs the fewest device bytes with every bucket as far off as it can be."""
    return min(ladder(judge), key=floor_bytes)


def floor_bytes(judge: Judge) -> int:
    """Return the device bytes at the judge's modes with every bucket as far off as it can be, gathered at use."""
    return judge.memory.peak_bytes(judge.least_levels, ahead=0)
