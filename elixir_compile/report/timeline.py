"""A memory timeline -> text: the live bytes over the step, and what is live at the peak."""

import itertools
from collections.abc import Sequence

from elixir_compile.analysis.timeline import MemoryTimeline
from elixir_compile.report.curve import curve_text
from elixir_compile.report.table import table_text
from elixir_compile.units import format_bytes


def timeline_text(timeline: MemoryTimeline, width: int = 72) -> str:
    """Return the live bytes over the step as one row of blocks, then the peak: its op and what is live there."""
    columns = min(width, len(timeline.ops))
    drawn = curve_text([float(most) for most in _highest(timeline.live_bytes, columns)], low=0.0)
    peak = timeline.peak
    largest = sorted(peak.by_kind.items(), key=lambda item: -item[1])
    rows = [(str(kind), format_bytes(nbytes), f"{nbytes / peak.nbytes:.0%}") for kind, nbytes in largest]
    rows.append(("all", format_bytes(peak.nbytes), "100%"))
    title = f"live bytes over {len(timeline.ops)} ops, peak {format_bytes(peak.nbytes)} at {peak.op}"
    return f"{title}\n{drawn}\n\n{table_text(('at the peak', 'bytes', 'share'), rows)}"


def _highest(values: Sequence[int], columns: int) -> list[int]:
    """The largest value of each of `columns` stretches, so that no peak is lost."""
    edges = [len(values) * column // columns for column in range(columns + 1)]
    return [max(values[first:last]) for first, last in itertools.pairwise(edges)]
