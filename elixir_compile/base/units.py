"""Parse bytes with units, as users write them, and format bytes and seconds: `"20GiB"` is 21474836480 bytes.

`KiB MiB GiB TiB` count in 1024, `KB MB GB TB` in 1000; a number without a unit is bytes. Case does not matter.
"""

import math
import re

KIB = 1024
MIB = 1024**2
GIB = 1024**3
TIB = 1024**4

_FACTORS: dict[str, int] = {
    "": 1,
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
}
_NUMBER_AND_UNIT = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
BYTES_EXAMPLE = 'a positive number of bytes such as "20GiB", "512 MB" or 1500000000'


def parse_bytes(text: str | int | float) -> int:
    """Return the number of bytes in `text`, rounded down.

    Raises ValueError, with `text` and an example, if it is not a finite number of at least one byte with a known unit.
    """
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise ValueError(f"{text!r} is not {BYTES_EXAMPLE}")
    if isinstance(text, str):
        match = _NUMBER_AND_UNIT.fullmatch(text)
        factor = None if match is None else _FACTORS.get(match.group(2).lower())
        if match is None or factor is None:
            raise ValueError(f"{text!r} is not {BYTES_EXAMPLE}")
        digits = match.group(1)
        # Whole numbers stay whole: a float holds only 53 bits.
        value = int(digits) * factor if digits.lstrip("+-").isdecimal() else float(digits) * factor
    else:
        value = text
    if not math.isfinite(value) or value < 1:
        raise ValueError(f"{text!r} is not {BYTES_EXAMPLE}")
    return int(value)


_COUNT_FACTORS: dict[str, int] = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3}
COUNT_EXAMPLE = "a number such as 524288, 500k or 0.5M, of 1 or more"


def parse_count(text: str) -> int:
    """Return the number in `text`, with the unit k, M or G for thousands, millions or billions, rounded down.

    Raises ValueError, with `text` and an example, if it is not a finite number of at least 1 with a known unit.
    """
    match = _NUMBER_AND_UNIT.fullmatch(text)
    factor = None if match is None else _COUNT_FACTORS.get(match.group(2).lower())
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not {COUNT_EXAMPLE}")
    digits = match.group(1)
    value = int(digits) * factor if digits.lstrip("+-").isdecimal() else round(float(digits) * factor, 6)
    if not math.isfinite(value) or value < 1:
        raise ValueError(f"{text!r} is not {COUNT_EXAMPLE}")
    return int(value)


def format_bytes(nbytes: int) -> str:
    """Return `nbytes` as text in the largest binary unit of which there is at least one: `17.9 GiB`."""
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(nbytes) >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} B"


def format_s(seconds: float) -> str:
    """Return a duration as text: `212 ms`, `4.1 us`, `1674 s`. It has three significant digits, from 1000 on whole
    units."""
    if seconds == 0:
        return "0 s"
    units = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
    unit, factor = next((each for each in units if abs(seconds) >= each[1]), units[-1])
    value = seconds / factor
    return f"{value:.3g} {unit}" if abs(value) < 999.5 else f"{value:.0f} {unit}"
