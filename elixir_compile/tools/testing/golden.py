"""Goldens: the memory of a training step as a small text file, and what has changed since it was written.

```text
# Memory of a training step in bytes. `pytest --elixir-update` writes this file.
machine 1 x a100-40g
peak at bwd.blocks.2.up.addmm

step
  peak bytes 1583104
  host bytes 0
at the peak
  blocks.0 param 66816
  blocks.0 saved 16384
activations
  blocks.0 recomputed 32768
```

Lines with two spaces are figures: a layer or an action, a key without spaces, a number. The op at the peak is for
readers and is not compared, because the numbers in names of ops change with versions of torch.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elixir_compile.base.errors import ElixirError, InvalidOption
from elixir_compile.base.folders import write_whole
from elixir_compile.base.units import format_bytes
from elixir_compile.tools.report.text import table_text

_HEADER = "# Memory of a training step in bytes. `pytest --elixir-update` writes this file."
_SECTIONS = ("step", "actions", "at the peak", "homes", "activations")
_MOST_ROWS = 30
"""Figures that a message lists, the largest changes first."""
_NAME = re.compile(r"[\w.\-\[\]=]+")

Key = tuple[str, str, str]
"""Section, name of a layer or an action, and what is counted: `("at the peak", "blocks.0", "saved")`."""


class GoldenFileError(ElixirError, ValueError):
    """The golden in the file `path` cannot be read; `because` says why."""

    def __init__(self, path: Path, because: str) -> None:
        super().__init__(path, because)
        self.path, self.because = path, because

    def __str__(self) -> str:
        return f"{self.path} is no golden of a training step: {self.because}. Write it anew with `--elixir-update`."


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """The figures of a training step that a test compares."""

    machine: str
    peak_at: str = field(compare=False)
    """The op at the peak."""
    figures: Mapping[Key, int]

    def __str__(self) -> str:
        lines = [_HEADER, f"machine {self.machine}", f"peak at {self.peak_at}", ""]
        for section in _SECTIONS:
            own = [f"  {key[1]} {key[2]} {value}" for key, value in self.figures.items() if key[0] == section]
            lines += [section, *own] if own else []
        return "\n".join(lines) + "\n"


def golden_path(test_file: Path, name: str) -> Path:
    """Return the file of the golden `name` of a test in `test_file`: `goldens/test_memory.name.txt` beside it.

    Raises InvalidOption if `name` cannot be part of the name of a file.
    """
    if not _NAME.fullmatch(name):
        raise InvalidOption("name of a golden", name, "letters, digits and any of . _ - = [ ]")
    return test_file.parent / "goldens" / f"{test_file.stem}.{name}.txt"


def check_golden(path: Path, found: Golden, *, writes: bool = False, tolerance: float = 0.0) -> None:
    """Raise AssertionError with all differences if `found` is not the golden in the file `path`; if `writes`, write it.

    Bytes may differ by the share `tolerance` of those in the file. Raises GoldenFileError if the file cannot be read.
    """
    __tracebackhide__ = True
    if writes:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, str(found).encode())
        return
    if not path.exists():
        raise AssertionError(f"there is no golden {path}. Write it with `pytest --elixir-update`:\n\n{found}")
    said = difference(read_golden(path), found, tolerance)
    if said:
        hint = "If the change is meant, `pytest --elixir-update` writes the new golden."
        raise AssertionError(f"the memory of the step is not that of {path}:\n{said}\n{hint}")


def read_golden(path: Path) -> Golden:
    """Return the golden in the file `path`. Raises GoldenFileError if it is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise GoldenFileError(path, str(error)) from error
    heads, figures, section = dict[str, str](), dict[Key, int](), ""
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith("  "):
            name, what, value = (["", "", "", *line.strip().rsplit(" ", 2)])[-3:]
            if not (section and name and value.isdecimal()):
                raise GoldenFileError(path, f"line {number} is {line!r}, expected a name, a key and a number")
            figures[section, name, what] = int(value)
        elif line in _SECTIONS:
            section = line
        else:
            head, _, rest = line.partition(" ")
            heads[head] = rest
    if "machine" not in heads:
        raise GoldenFileError(path, "it has no line `machine ...`")
    return Golden(machine=heads["machine"], peak_at=heads.get("peak", "").removeprefix("at "), figures=figures)


def difference(expected: Golden, found: Golden, tolerance: float = 0.0) -> str:
    """Return the changes from `expected` to `found` as text, the layers that grew or shrank first; empty if none.

    Bytes that differ by at most the share `tolerance` are no change.
    """
    lines = []
    if expected.machine != found.machine:
        lines.append(f"it was planned for {expected.machine}, and now for {found.machine}")
    keys = dict.fromkeys((*expected.figures, *found.figures))
    pairs = {key: (expected.figures.get(key, 0), found.figures.get(key, 0)) for key in keys}
    changed = {key: pair for key, pair in pairs.items() if _is_changed(key, *pair, tolerance)}
    lines += _growth(key_pair for key_pair in changed.items() if key_pair[0][0] == "at the peak")
    if changed:
        by_size = sorted(changed.items(), key=lambda item: (_SECTIONS.index(item[0][0]), -abs(_by(item[1]))))
        lines += ["", table_text(("", "golden", "now", "change"), [_row(*item) for item in by_size[:_MOST_ROWS]])]
        lines += [f"and {len(changed) - _MOST_ROWS} more"] if len(changed) > _MOST_ROWS else []
    return "\n".join(lines)


def _is_changed(key: Key, before: int, now: int, tolerance: float) -> bool:
    return abs(now - before) > (0.0 if key[0] == "actions" else tolerance * before)


def _by(pair: tuple[int, int]) -> int:
    return pair[1] - pair[0]


def _growth(changed: Iterable[tuple[Key, tuple[int, int]]]) -> list[str]:
    """Return a sentence for each layer whose bytes at the peak changed, the largest change first."""
    by_layer: dict[str, Counter[str]] = {}
    for (_, layer, kind), pair in changed:
        by_layer.setdefault(layer, Counter())[kind] += _by(pair)
    sums = sorted(
        ((sum(kinds.values()), layer, kinds) for layer, kinds in by_layer.items()), key=lambda one: -abs(one[0])
    )
    lines = []
    for total, layer, kinds in sums:
        parts = ", ".join(f"{kind} {_signed(nbytes)}" for kind, nbytes in kinds.items())
        verb = "grew" if total > 0 else "shrank" if total < 0 else "changed"
        lines.append(f"{layer} {verb} by {format_bytes(abs(total))} at the peak ({parts})")
    return lines


def _row(key: Key, pair: tuple[int, int]) -> tuple[str, str, str, str]:
    section, name, what = key
    before, now = pair
    share = f" ({_by(pair) / before:+.0%})" if before else " (new)" if now else ""
    if section == "actions":
        return f"{name}", str(before), str(now), f"{_by(pair):+d}{share}"
    label = f"{name} {what}" + (" at the peak" if section == "at the peak" else "")
    return label, format_bytes(before), format_bytes(now), f"{_signed(_by(pair))}{share}"


def _signed(nbytes: int) -> str:
    return f"{'+' if nbytes >= 0 else '-'}{format_bytes(abs(nbytes))}"
