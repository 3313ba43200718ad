"""Rows for each rank by the seconds that ranks were seen to compute, if some wait for others.

```text
  rank     rows   computes     seconds of a row    rows that even it out
  0        8      80 ms        10 ms               12
  1        8      240 ms       30 ms               4           120 ms instead of 240 ms
```
"""

import heapq
from collections.abc import Sequence

from elixir_compile.units import format_s

_FEWEST_ROWS = 2
"""The fewest rows that a rank is given: torch traces a batch of a single row differently."""
_UNEVEN = 1.1
"""Rows are suggested if the slowest rank computes for more than this times the mean."""


def balanced_rows(rows: Sequence[int], busy_s: Sequence[float]) -> tuple[int, ...]:
    """Return as many rows as `rows` has, shared out so that the slowest rank computes for the least seconds.

    `busy_s` are the seconds in which each rank computed its `rows`; each row is taken to need the same. A rank without
    rows gets none, any other at least 2, or its own if they are fewer.
    """
    found = [min(own, _FEWEST_ROWS) for own in rows]
    row_s = [seconds / own if own else 0.0 for own, seconds in zip(rows, busy_s, strict=True)]
    # The rank that is done first with one more row gets it: no other choice ends earlier.
    heap = [(row_s[rank] * (own + 1), rank) for rank, own in enumerate(found) if rows[rank]]
    heapq.heapify(heap)
    for _ in range(sum(rows) - sum(found)):
        _, rank = heap[0]
        found[rank] += 1
        heapq.heapreplace(heap, (row_s[rank] * (found[rank] + 1), rank))
    return tuple(found)


def balance_line(rows: Sequence[int], busy_s: Sequence[float]) -> str | None:
    """Return a line that suggests other rows if the slowest rank computes for more than a tenth longer than the mean;
    None if no rows are better, or if ranks are about as slow as each other."""
    slowest_s = max(busy_s)
    if slowest_s <= _UNEVEN * sum(busy_s) / len(busy_s):
        return None
    better = balanced_rows(rows, busy_s)
    pairs = zip(rows, better, busy_s, strict=True)
    then_s = max(seconds * new / own if own else seconds for own, new, seconds in pairs)
    if then_s >= slowest_s:
        return None
    seconds_text = ", ".join(map(format_s, busy_s))
    return (
        f"uneven    ranks compute {'/'.join(map(str, rows))} rows in {seconds_text}; shares would be "
        f"{'/'.join(map(str, better))}: {1 - then_s / slowest_s:.0%} shorter"
    )
