"""`@habit`: enter a test in the table of docs/compatibility.md, as the proof that a user's habit works or is refused.

The page has a row for each such test and no other rows.
`python -m tests.run.habits.table` writes the page.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True, slots=True, kw_only=True)
class Habit:
    """One row of docs/compatibility.md."""

    area: str
    """The section of the page: one of `AREAS`."""
    text: str
    """The actions of the user as a phrase; code in backticks."""
    refused: type[BaseException] | None
    """The error that refuses the habit; None if it works."""
    says: str
    """A part of the error's text without names and numbers; empty if the habit works."""
    note: str
    """A remark for users if the habit works; may be empty."""


AREAS = ("Gradients", "Parameters", "Modules", "Optimizers", "Mixed precision", "Checkpoints", "Training loops")

HABITS: dict[str, Habit] = {}
"""The habits of all imported tests, by the name of the test."""


def habit(
    text: str, *, area: str, refused: type[BaseException] | None = None, says: str = "", note: str = ""
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that enters a test in the table of habits.

    If `refused` is given, the test passes only if its body raises that error with `says` in its text.
    """
    if area not in AREAS:
        raise ValueError(f"area {area!r} is none of {AREAS}")
    if (refused is None) != (not says):
        raise ValueError("a refusal needs both the error and a part of its text")

    def enter(test: Callable[..., None]) -> Callable[..., None]:
        row = Habit(area=area, text=text, refused=refused, says=says, note=note)
        if HABITS.setdefault(test.__name__, row) != row:
            raise ValueError(f"two tests are called {test.__name__}: the page would have the row of one of them")
        if refused is None:
            return test

        @functools.wraps(test)
        def refusing(*args: Any, **kwargs: Any) -> None:
            with pytest.raises(refused, match=re.escape(says)):
                test(*args, **kwargs)

        return refusing

    return enter
