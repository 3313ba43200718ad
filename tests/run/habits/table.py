"""Write docs/compatibility.md from the habits that the tests of this folder prove.

Run as `python -m tests.run.habits.table`.
"""

import importlib
from pathlib import Path

from tests.run.habits.habit import AREAS, HABITS, Habit

PAGE = Path(__file__).parents[3] / "docs" / "compatibility.md"

_HEAD = """\
# Compatibility

What people do with parameters and gradients in a training loop, and what happens here. Each row is a test in
`tests/run/habits`, which compares with eager PyTorch in the same run; this page is written from those tests by
`python -m tests.run.habits.table`. "Works" means that losses and weights are those of eager PyTorch. "Refused" means
that the error is raised before anything is trained wrongly.
"""


def page_text() -> str:
    """Return the text of docs/compatibility.md."""
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        importlib.import_module(f"{__package__}.{path.stem}")
    sections = [_HEAD]
    for area in AREAS:
        rows = sorted((one for one in HABITS.values() if one.area == area), key=lambda one: one.text)
        if rows:
            sections.append("\n".join([f"## {area}", "", "| habit | here |", "|---|---|", *map(_row, rows), ""]))
    return "\n".join(sections)


def _row(habit: Habit) -> str:
    if habit.refused is None:
        return f"| {habit.text} | works{f': {habit.note}' if habit.note else ''} |"
    return f"| {habit.text} | refused, `{habit.refused.__name__}`: {habit.says} |"


if __name__ == "__main__":
    PAGE.write_text(page_text(), encoding="utf-8")
