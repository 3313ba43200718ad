"""How names and numbers are written on a line of a printed graph or plan.

```text
  op "my op"  aten.mm.default  forward  reads p0 s1     # what follows `#` explains the line
     \\_quoted  \\_bare
```

A name is quoted as in JSON if it is empty or holds a space, `#`, `"` or an unprintable character. The printed form is
for people; JSON (`ir.codec`) is the form that is read back.
"""

import json


def word(text: str) -> str:
    """Return `text` as a word of a printed line, quoted if it is empty or would look like several words."""
    if not text.isprintable():
        return json.dumps(text)
    if not text or any(character in text for character in ' #"'):
        return json.dumps(text, ensure_ascii=False)
    return text


def words(*texts: str) -> str:
    """Return several words with a space between them."""
    return " ".join(word(text) for text in texts)


def real(value: float) -> str:
    """Return the shortest decimal that equals `value` exactly."""
    # float() first: numpy's floats print as `np.float64(1.0)`.
    return repr(float(value))


def commented(line: str, comment: str, column: int = 64) -> str:
    """Return `line`, padded to `column` characters, with `comment` behind a `#`."""
    return f"{line:<{column}}  # {comment}"
