"""The rows of each micro-batch of a batch whose number of rows is known only when a step runs.

The number of micro-batches that a plan states is then an upper limit. torch compiles a dynamic size for two rows and
more, so a micro-batch has at least `LEAST_ROWS`.

```text
  rows       16         7        6        3       in at most 4 micro-batches
  each       4 4 4 4    3 2 2    2 2 2    3
```
"""

LEAST_ROWS = 2
"""The fewest rows of a micro-batch of a dynamic number of rows. torch compiles another graph for a single row."""


def rows_of_micro_batches(rows: int, most: int) -> tuple[int, ...]:
    """Return the rows of each micro-batch of a batch of `rows`, in at most `most` micro-batches, the largest first."""
    num = max(1, min(most, rows // LEAST_ROWS))
    return tuple(rows // num + (place < rows % num) for place in range(num))


def most_rows(rows: int, most: int) -> int:
    """Return the most rows of a micro-batch of any batch of up to `rows`, in at most `most` micro-batches.

    A batch of 7 rows in at most 4 has a micro-batch of 3, but a batch of 8 has only micro-batches of 2.
    """
    return max(-(-rows // most), min(rows, 2 * LEAST_ROWS - 1))
