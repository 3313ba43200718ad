"""Format parts of a report as text: tables, titled entries, curves and memory timelines."""

import itertools
import math
from collections.abc import Sequence

from elixir_compile.base.units import format_bytes
from elixir_compile.step.timeline import MemoryTimeline


def table_text(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with the first column flush left and the others flush right.

    Raises ValueError if a row has another number of cells than `headers`.
    """
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f"row {list(row)} has {len(row)} cells, the table has {len(headers)} columns")
    widths = [max(len(line[column]) for line in (headers, *rows)) for column in range(len(headers))]
    rule = ["-" * width for width in widths]
    return "\n".join(_line(cells, widths) for cells in (headers, rule, *rows))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (
        cell.rjust(width) if column else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join((first, *others)).rstrip()


def entry_text(title: str, fields: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Return `title` with a row for each line of each field below; fields without lines are left out."""
    shown = [(name, lines) for name, lines in fields if lines]
    width = max((len(name) for name, _ in shown), default=0)
    rows = [
        f"  {name if first else '':<{width}}  {line}".rstrip()
        for name, lines in shown
        for first, line in ((at == 0, line) for at, line in enumerate(lines))
    ]
    return "\n".join((title, *rows))


_BLOCKS = "▁▂▃▄▅▆▇█"


def curve_text(values: Sequence[float], low: float | None = None, high: float | None = None) -> str:
    """Return a block character for each value, scaled from `low` to `high` (default: the extremes of `values`).

    Values outside the scale are cut to it. NaN and infinity print as `!`.
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
    # If the range is too small or too large to divide by, the curve is flat.
    return _BLOCKS[min(int(height * len(_BLOCKS)), len(_BLOCKS) - 1)] if math.isfinite(height) else _BLOCKS[0]


def timeline_text(timeline: MemoryTimeline, width: int = 72) -> str:
    """Return the live bytes over the step as a row of blocks, and a table of the bytes by kind at the peak."""
    columns = min(width, len(timeline.ops))
    drawn = curve_text([float(most) for most in _highest(timeline.live_bytes, columns)], low=0.0)
    peak = timeline.peak
    largest = sorted(peak.by_kind.items(), key=lambda item: -item[1])
    rows = [(str(kind), format_bytes(nbytes), f"{nbytes / peak.nbytes:.0%}") for kind, nbytes in largest]
    rows.append(("all", format_bytes(peak.nbytes), "100%"))
    title = f"live bytes over {len(timeline.ops)} ops, peak {format_bytes(peak.nbytes)} at {peak.op}"
    return f"{title}\n{drawn}\n\n{table_text(('at the peak', 'bytes', 'share'), rows)}"


def _highest(values: Sequence[int], columns: int) -> list[int]:
    """Return the largest value of each of `columns` stretches, which keeps every peak."""
    edges = [len(values) * column // columns for column in range(columns + 1)]
    return [max(values[first:last]) for first, last in itertools.pairwise(edges)]
