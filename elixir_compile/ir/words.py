"""The words of the text form: how a value is written on a line, and how a line is read back.

```text
  op "my op"  aten.mm.default  forward  reads p0 s1     # everything after `#` is comment
     \\_quoted  \\_bare                    \\_keyword
```

A name is quoted as in JSON when it is empty, equals a keyword, or holds a space, `#`, `"` or an unprintable character.
"""

import json
import math
import re
from enum import StrEnum
from typing import NoReturn, TypeVar

from elixir_compile.errors import PlanFileError

# fmt: off
KEYWORDS = frozenset(
    {
        "activations", "aliases", "at", "base", "because", "binding", "bound", "buckets", "budget", "bytes", "cost",
        "decisions", "exposed", "flops", "format", "formula", "frozen", "gib", "graph", "hidden", "host", "kernel",
        "loss", "module", "moved", "numel", "of", "on", "once", "ops", "optim", "outputs", "param", "params", "peak",
        "plan", "planner", "rank", "reads", "regions", "rejected", "resident", "saves", "schedule", "shards", "size",
        "source", "state", "step", "storages", "symbols", "trainable", "writes",
    }
)
# fmt: on

_MAX_INTEGER = (1 << 63) - 1
"""Bytes and elements are added up in 64 bits."""
_TOKEN = re.compile(r'(?P<skip>\s+|#.*)|(?P<quoted>"(?:[^"\\]|\\.)*")|(?P<bare>[^\s#"]+)|(?P<broken>.)')
_Member = TypeVar("_Member", bound=StrEnum)


def word(text: str) -> str:
    """Return `text` as one word of the text form, quoted where it must be."""
    if not text.isprintable():
        return json.dumps(text)
    if not text or text in KEYWORDS or any(character in text for character in ' #"'):
        return json.dumps(text, ensure_ascii=False)
    return text


def words(*texts: str) -> str:
    """Return several words, one space between them."""
    return " ".join(word(text) for text in texts)


def real(value: float) -> str:
    """Return the shortest decimal that reads back as exactly `value`."""
    # float() first: numpy's floats print as `np.float64(1.0)`.
    return repr(float(value))


def commented(line: str, comment: str, column: int = 64) -> str:
    """Return `line` with a comment that people read and the parser skips."""
    return f"{line:<{column}}  # {comment}"


class Row:
    """One line of text, read from left to right. Every reader raises PlanFileError with the line's number."""

    def __init__(self, number: int, line: str) -> None:
        self.number = number
        self.indented = line[:1].isspace()
        self._words: list[tuple[str, bool]] = []
        self._next = 0
        for match in _TOKEN.finditer(line):
            if match.lastgroup == "quoted":
                self._words.append((self._unquoted(match.group()), True))
            elif match.lastgroup == "bare":
                self._words.append((match.group(), False))
            elif match.lastgroup == "broken":
                self.fail("a closing quote", line[match.start() :])

    def __bool__(self) -> bool:
        return bool(self._words)

    def fail(self, expected: str, got: object = None) -> NoReturn:
        """Raise for this line; without `got`, the next word is at fault."""
        if got is None:
            got = self._words[self._next][0] if self._next < len(self._words) else "the end of the line"
        raise PlanFileError(f"line {self.number}", expected, got)

    def at(self, *keywords: str) -> bool:
        """Return whether the next word is one of `keywords`, unquoted."""
        return self._next < len(self._words) and self._words[self._next] in [(keyword, False) for keyword in keywords]

    def skip(self, keyword: str) -> bool:
        """Step over `keyword` if it comes next; return whether it did."""
        found = self.at(keyword)
        self._next += found
        return found

    def keyword(self, keyword: str) -> None:
        """Step over `keyword`, which must come next."""
        if not self.skip(keyword):
            self.fail(f"`{keyword}`")

    def name(self, expected: str) -> str:
        """Return the next word, which must not be a bare keyword."""
        if not self._has_name():
            self.fail(expected)
        return self._take()

    def names(self) -> tuple[str, ...]:
        """Return the words up to the next keyword or the end of the line."""
        found: list[str] = []
        while self._has_name():
            found.append(self._take())
        return tuple(found)

    def choice(self, members: type[_Member]) -> _Member:
        """Return the next word as a member of `members`."""
        options = [str(member) for member in members]
        if self._next >= len(self._words) or self._words[self._next][0] not in options:
            self.fail("one of " + ", ".join(options))
        return members(self._take())

    def either(self, yes: str, no: str) -> bool:
        """Return whether the next word is `yes`; it must be `yes` or `no`."""
        if self.skip(yes):
            return True
        if not self.skip(no):
            self.fail(f"`{yes}` or `{no}`")
        return False

    def integer(self, prefix: str = "", *, is_signed: bool = False) -> int:
        """Return the next word, less `prefix`, as a whole number; negative only where `is_signed`."""
        text = self._words[self._next][0] if self._next < len(self._words) else ""
        digits = text.removeprefix(prefix).removeprefix("-" if is_signed else "")
        if not text.startswith(prefix) or not (digits.isascii() and digits.isdecimal()):
            self.fail(f"{prefix}<whole number>" if prefix else "a whole number")
        if len(digits) > len(str(_MAX_INTEGER)) or int(digits) > _MAX_INTEGER:
            self.fail(f"a whole number of at most {_MAX_INTEGER}")
        self._next += 1
        return int(text.removeprefix(prefix))

    def constant(self, value: int) -> None:
        """Step over `value`, which must come next."""
        if self._next >= len(self._words) or self._words[self._next][0] != str(value):
            self.fail(f"the number {value}")
        self._next += 1

    def real(self) -> float:
        """Return the next word as a finite number."""
        text = self._words[self._next][0] if self._next < len(self._words) else ""
        try:
            value = float(text)
        except ValueError:
            self.fail("a number")
        if not math.isfinite(value):
            self.fail("a finite number")
        self._next += 1
        return value

    def is_done(self) -> bool:
        """Return whether every word was read."""
        return self._next == len(self._words)

    def end(self) -> None:
        """Check that every word was read."""
        if not self.is_done():
            self.fail("the end of the line")

    def _has_name(self) -> bool:
        return self._next < len(self._words) and (
            self._words[self._next][1] or self._words[self._next][0] not in KEYWORDS
        )

    def _take(self) -> str:
        self._next += 1
        return self._words[self._next - 1][0]

    def _unquoted(self, text: str) -> str:
        try:
            return json.loads(text)
        except ValueError:
            self.fail("a name quoted as in JSON", text)


class Page:
    """Rows of text without the empty ones, read from top to bottom."""

    def __init__(self, text: str) -> None:
        lines = text.split("\n")
        self._rows = [row for number, line in enumerate(lines, 1) if (row := Row(number, line))]
        self._end = Row(len(lines), "")
        self._next = 0

    @property
    def row(self) -> Row:
        """The current row; an empty one at the end of the text."""
        return self._rows[self._next] if self._next < len(self._rows) else self._end

    def advance(self) -> Row:
        """Check that the current row was read whole, and return the next one."""
        self.row.end()
        self._next += 1
        return self.row

    def title(self, keyword: str) -> Row:
        """Return the current row, which must open with `keyword` in the first column; the keyword is read."""
        if self.row.indented:
            self.row.fail(f"`{keyword}` in the first column")
        self.row.keyword(keyword)
        return self.row

    def rows(self) -> "list[Row]":
        """Return the indented rows after the current one, which is left behind; the caller reads each whole."""
        self.advance()
        first = self._next
        while self._next < len(self._rows) and self.row.indented:
            self._next += 1
        return self._rows[first : self._next]

    def end(self) -> None:
        """Check that no text is left."""
        if self.row:
            self.row.fail("the end of the text")
