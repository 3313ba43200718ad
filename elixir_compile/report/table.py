"""Rows of text -> one text with aligned columns."""

from collections.abc import Sequence


def table_text(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose first column is flush left and whose others are flush right.

    Raises ValueError for a row that has not as many cells as there are headers.
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
