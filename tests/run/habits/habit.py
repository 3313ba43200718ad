"""A habit of people who train: what they do, and whether it works or is refused by name.

`@habit` ties a row of docs/compatibility.md to the test that proves it: a row cannot say what no test checks.
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
    """What the user does, a phrase; may hold code in backticks."""
    refused: type[BaseException] | None
    """The error that refuses the habit; None if it works."""
    says: str
    """The part of the error's text that every user sees, without names or numbers; empty if the habit works."""
    note: str
    """What a user of a habit that works should know; empty if there is nothing."""


AREAS = ("Gradients", "Parameters", "Modules", "Optimizers", "Mixed precision", "Checkpoints", "Training loops")

HABITS: dict[str, Habit] = {}
"""Every habit whose test was imported, by the name of the test."""


def habit(
    text: str, *, area: str, refused: type[BaseException] | None = None, says: str = "", note: str = ""
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that enters a test in the table of habits.

    If `refused` is given, the test passes only if its body raises that error with `says` in its text.
    """
    if area not in AREAS:
        raise ValueError(f"area {area!r} is none of {AREAS}")
    if (refused is None) != (not says):
        raise ValueError("a refusal needs both the error and what it says")

    def enter(test: Callable[..., None]) -> Callable[..., None]:
        HABITS[test.__name__] = Habit(area=area, text=text, refused=refused, says=says, note=note)
        if refused is None:
            return test

        @functools.wraps(test)
        def refusing(*args: Any, **kwargs: Any) -> None:
            with pytest.raises(refused, match=re.escape(says)):
                test(*args, **kwargs)

        return refusing

    return enter
