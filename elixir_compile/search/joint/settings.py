"""Divide the tokens of an optimizer step into forwards of so many rows.

```text
  tokens per step  =  rows of one forward  x  tokens of a row  x  forwards  x  ranks
```
"""

import math
from dataclasses import dataclass

from elixir_compile.base.errors import InvalidOption

TOLERANCE = 0.025
"""Share by which the tokens of a step may differ from those that were asked for, if these are not a whole number of
rows. So 64k, which is 64,000, allows 64 rows of 1024 tokens."""
_MOST_ROWS = 1 << 16
"""The most rows of one forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way to run an optimizer step."""

    rows: int
    """Rows of each rank in one forward."""
    forwards: int
    """Forwards, each with its backward, before each update."""
    micro_batches: int = 1
    """Micro-batches of each layer in a forward, of those layers that can be divided."""
    state_bytes: int | None = None
    """Bytes of optimizer state per element; None for the state of HybridAdamW."""
    tokens: int
    """Tokens of the step, over all ranks."""

    def __str__(self) -> str:
        parts = [f"{self.forwards} x {self.rows} rows"]
        parts += [f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else []
        parts += [f"{self.state_bytes} bytes of state"] if self.state_bytes is not None else []
        return ", ".join(parts)


def splits(
    tokens: int, seq: int, num_ranks: int = 1, *, rows: int | None = None, divisor: int = 1
) -> list[tuple[int, int]]:
    """Return pairs of rows and forwards whose product with `seq` and `num_ranks` is about `tokens`, most rows first.

    There is at most one pair for each doubling of the rows: the rows with the most factors of two. If `tokens` are a
    whole number of rows, every product is exact; else it differs by at most `TOLERANCE`. If `rows` are given, there is
    no other pair. Rows are multiples of `divisor`. Raises InvalidOption with the nearest numbers of tokens if there is
    no pair.
    """
    unit = seq * num_ranks
    asked = tokens / unit
    allowed = 0.0 if tokens % unit == 0 else TOLERANCE
    most = min(math.floor(asked * (1 + allowed)), _MOST_ROWS)
    found: dict[int, tuple[int, int]] = {}
    for number in range(divisor, most + 1, divisor) if rows is None else (rows,):
        forwards = max(1, round(asked / number))
        is_near = abs(number * forwards - asked) <= allowed * asked and number % divisor == 0
        power = number.bit_length()
        if is_near and (power not in found or _roundness(number) > _roundness(found[power][0])):
            found[power] = number, forwards
    if not found:
        raise InvalidOption("tokens_per_step", tokens, _nearest(tokens, unit * math.lcm(rows or 1, divisor), unit))
    return [found[power] for power in sorted(found, reverse=True)]


def _nearest(tokens: int, step: int, unit: int) -> str:
    """Return a text with the multiples of `step` next to `tokens`; `unit` are the tokens of a row on each rank."""
    near = sorted({max(1, tokens // step) * step, -(-tokens // step) * step})
    named = " or ".join(map(str, near))
    rows = "a row" if step == unit else f"{step // unit} rows"
    return f"{named}: a multiple of {step}, the tokens of {rows} on each rank"


def _roundness(rows: int) -> int:
    """Return the largest power of two that divides `rows`."""
    return rows & -rows
