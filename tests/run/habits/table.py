"""Write docs/compatibility.md from the habits that the tests of this folder prove.

Run as `python -m tests.run.habits.table`.
"""

import importlib
import sys
from pathlib import Path

from tests.run.habits.habit import AREAS, HABITS, Habit

PAGE = Path(__file__).parents[3] / "docs" / "compatibility.md"

_HEAD = """\
# Compatibility

What users do with models, parameters, gradients and optimizers in a training loop, and whether it works with Elixir.

- **Works**: the losses and the weights are those of eager PyTorch.
- **Refused**: Elixir or PyTorch raises the error before anything is trained wrongly. A part of its text is quoted.

Each row is a test in `tests/run/habits`, which compares with eager PyTorch in the same run.
`python -m tests.run.habits.table` writes this page from the tests.
"""


def page_text() -> str:
    """Return the text of docs/compatibility.md."""
    folder = Path(__file__).parent
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    for path in sorted(folder.glob("test_*.py")):
        # The name under which pytest imports the file too, so that its ops are registered once.
        importlib.import_module(path.stem)
    sections = [_HEAD]
    for area in AREAS:
        rows = sorted((row for row in HABITS.values() if row.area == area), key=lambda row: row.text)
        if rows:
            sections.append(
                "\n".join([f"## {area}", "", "| what the user does | result |", "|---|---|", *map(_row, rows), ""])
            )
    return "\n".join(sections)


def _row(habit: Habit) -> str:
    if habit.refused is None:
        return f"| {habit.text} | works{f': {habit.note}' if habit.note else ''} |"
    return f'| {habit.text} | refused, `{habit.refused.__name__}`: "... {habit.says} ..." |'


if __name__ == "__main__":
    PAGE.write_text(page_text(), encoding="utf-8")
