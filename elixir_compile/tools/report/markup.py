"""Write parts of a page as HTML: tables that a script can sort, lists, and blocks of JSON. All text is escaped."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from elixir_compile.base.units import format_bytes, format_s

_FRAME = '<div class="scroll" tabindex="0" role="region" aria-label="Table">'


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table: its text, and the number by which it sorts."""

    text: str
    value: float | None = None
    is_html: bool = False
    """Whether the text is HTML already, with all names in it escaped."""


def bytes_cell(nbytes: int) -> Cell:
    """Return a cell of bytes with a unit, which sorts by their number."""
    return Cell(format_bytes(nbytes), nbytes)


def seconds_cell(seconds: float) -> Cell:
    """Return a cell of seconds with a unit, which sorts by their number."""
    return Cell(format_s(seconds), seconds)


def table(heads: Sequence[str], rows: Iterable[Sequence["str | Cell"]], name: str = "") -> Iterator[str]:
    """Yield a table that can be sorted, in a frame that scrolls."""
    made = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    columns = [[row[at].value for row in made] for at in range(len(heads))]
    numbers = [' class="number"' if values and None not in values else "" for values in columns]
    own = f' id="{name}"' if name else ""
    yield f'{_FRAME}<table class="sortable"{own}><thead><tr>'
    yield "".join(f'<th scope="col"{kind}>{escape(head)}</th>' for head, kind in zip(heads, numbers, strict=True))
    yield "</tr></thead><tbody>"
    yield from (f"<tr>{''.join(map(_cell, row))}</tr>" for row in made)
    yield "</tbody></table></div>"


def _cell(cell: Cell) -> str:
    value = "" if cell.value is None else f' data-value="{cell.value!r}"'
    return f"<td{value}>{cell.text if cell.is_html else escape(cell.text)}</td>"


def plain_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield a table of text that cannot be sorted, for tables of many rows."""
    yield f"{_FRAME}<table><thead><tr>{''.join(f'<th>{escape(head)}' for head in heads)}</thead><tbody>"
    yield from (f"<tr>{''.join(f'<td>{escape(cell)}' for cell in row)}" for row in rows)
    yield "</tbody></table></div>"


def definitions(lines: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield a list of names with a text for each."""
    yield "<dl>"
    yield from (f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in lines)
    yield "</dl>"


def figure(caption: str, picture: str) -> str:
    """Return a picture, SVG that this package has drawn, with a caption that also describes it to a screen reader."""
    text = escape(caption)
    drawn = f'<div class="chart" role="img" aria-label="{text}">{picture}</div>'
    return f"<figure><figcaption>{text}</figcaption>{drawn}</figure>"


def json_block(name: str, data: Mapping[str, Any]) -> str:
    """Return a block of JSON that no HTML parser can leave early."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'
