"""Rows for each rank by the seconds that ranks were seen to compute, if some wait for others.

```text
  rank     rows   computes     seconds of a row    rows that even it out
  0        8      80 ms        10 ms               12
  1        8      240 ms       30 ms               4           120 ms instead of 240 ms
```

Some seconds of a step do not depend on rows, as launches and reads of weights: prices tell their share.
"""

import heapq
from collections.abc import Sequence

from elixir_compile.base.errors import InvalidPlan
from elixir_compile.base.units import format_s
from elixir_compile.ir import Phase, StepGraph
from elixir_compile.ir.cost import op_s
from elixir_compile.ir.hardware import DeviceProfile
from elixir_compile.step.rows import graph_of_rows

_FEWEST_ROWS = 2
"""The fewest rows that a rank is given: torch traces a batch of a single row differently."""
_UNEVEN = 1.1
"""Rows are suggested if the slowest rank computes for more than this times the mean."""


def fixed_share(graph: StepGraph, device: DeviceProfile) -> float:
    """Return the share of the seconds of compute of `graph` that more rows do not lengthen, by prices on `device`; 0 if
    the graph does not say what belongs to its rows."""
    try:
        double = graph_of_rows(graph, 2 * graph.batch)
    except InvalidPlan:
        return 0.0
    own_s, double_s = _priced_s(graph, device), _priced_s(double, device)
    return min(max(2 - double_s / own_s, 0.0), 1.0) if own_s else 0.0


def _priced_s(graph: StepGraph, device: DeviceProfile) -> float:
    dtypes = {storage.id: storage.dtype for storage in graph.storages}
    ops = [op for op in graph.ops if op.phase is not Phase.UPDATE]
    return sum(op_s(op, device, dtypes[op.writes[0]] if op.writes else "float32") for op in ops)


def balanced_rows(rows: Sequence[int], busy_s: Sequence[float], fixed: Sequence[float] = ()) -> tuple[int, ...]:
    """Return as many rows as `rows` has, shared out so that the slowest rank computes for the least seconds.

    `busy_s` are the seconds in which each rank computed its `rows`, and `fixed` the share of them that does not depend
    on rows, by default 0; all rows are taken to need the same seconds of the rest. A rank without rows gets none, any
    other at least 2, or its own if they are fewer.
    """
    found = [min(own, _FEWEST_ROWS) for own in rows]
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
