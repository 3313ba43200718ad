"""Write a page of the results of `first_gpu.sh`; the script calls it at its end.

    python benchmarks/first_gpu_page.py [FOLDER]    FOLDER/README.md from FOLDER/<step>.json

A step without a result is on the page as missing. Figures that are lines of output are folded.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import first_gpu
from machine import RESULTS

FEW_LINES = 3
"""The most lines of a text that are shown without folding."""


def page_of(folder: Path) -> str:
    """Return the page of the results in `folder` as Markdown, a section for each step in the order of the script."""
    found = {
        name: json.loads(path.read_text()) for name in first_gpu.STEPS if (path := folder / f"{name}.json").exists()
    }
    missing = [name for name in first_gpu.STEPS if name not in found]
    lines = [
        "# The first half hour on an accelerator",
        "",
        "Written by `benchmarks/first_gpu.sh`, each step a process.",
    ]
    if missing:
        lines += ["", f"Without a result: {', '.join(missing)}."]
    for name, result in found.items():
        said = (first_gpu.STEPS[name].answer.__doc__ or "").splitlines()[0]
        machine = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
        lines += ["", f"## {name}", "", said, "", f"On {machine}.", ""]
        lines += section_of(result["figures"])
    return "\n".join(lines) + "\n"


def section_of(figures: Mapping[str, object]) -> Iterator[str]:
    """Yield a table of the short values of `figures`, then a folded block for each long one."""
    values = dict(flat(figures))
    short = {name: text for name, text in values.items() if len(text.splitlines()) <= FEW_LINES}
    if short:
        yield from ("| figure | value |", "|---|---|")
        yield from (f"| {name} | {'; '.join(text.splitlines())} |" for name, text in short.items())
    for name, text in values.items():
        if name not in short:
            yield from ("", f"<details><summary>{name}</summary>", "", "```text", text, "```", "", "</details>")


def flat(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values in `value` as text, each with the names on the way to it; a list of texts is one of lines."""
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from flat(each, f"{name}, {key}" if name else str(key))
    elif isinstance(value, list) and value and all(isinstance(line, str) for line in value):
        yield name, "\n".join(value)
    else:
        yield name, str(value)


def main() -> int:
    """Write the page of the folder of the command line; return the exit code."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "first_gpu"
    (folder / "README.md").write_text(page_of(folder), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
