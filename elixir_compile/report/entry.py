"""A title and named lines -> one entry of a report, its lines indented and aligned.

```text
b3  7087872 elements of float32
  bytes     27.0 MiB of parameters
  rejected  b2 to the host
            b4 to the host
```
"""

from collections.abc import Sequence


def entry_text(title: str, fields: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Return the entry; a field of several lines goes on below its first, one without lines is left out."""
    told = [(name, lines) for name, lines in fields if lines]
    width = max((len(name) for name, _ in told), default=0)
    rows = [
        f"  {name if first else '':<{width}}  {line}".rstrip()
        for name, lines in told
        for first, line in ((at == 0, line) for at, line in enumerate(lines))
    ]
    return "\n".join((title, *rows))
