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
    cut = min(max(value, bottom), top)
    height = (cut - bottom) / (top - bottom) if top > bottom else 0.0
    # A range too small or too large for a quotient of floats is drawn flat.
    return _BLOCKS[min(int(height * len(_BLOCKS)), len(_BLOCKS) - 1)] if math.isfinite(height) else _BLOCKS[0]
