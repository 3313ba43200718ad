"""A series of numbers -> a line of blocks, high for large."""

import math
from collections.abc import Sequence

_BLOCKS = "▁▂▃▄▅▆▇█"


def curve_text(values: Sequence[float], low: float | None = None, high: float | None = None) -> str:
    """Return one block per value, scaled from `low` to `high` (the extremes of `values` where left out).

    What is not finite prints as `!`; what lies outside the scale is cut to it.
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "!" * len(values)
    bottom = min(finite) if low is None else low
    top = max(finite) if high is None else high
    return "".join(_block(value, bottom, top) for value in values)


def _block(value: float, bottom: float, top: float) -> str:
    if not math.isfinite(value):
        return "!"
    height = (value - bottom) / (top - bottom) if top > bottom else 0.0
    return _BLOCKS[min(max(int(height * len(_BLOCKS)), 0), len(_BLOCKS) - 1)]
