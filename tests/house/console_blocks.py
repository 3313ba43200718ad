"""Run the blocks of a page of the docs in order: Python blocks, and the commands of console blocks.

A block that begins with "```console" shows commands behind `$ `, and below each what it prints, line for line. A line
`...` stands for any lines. In a block "```console machine" the figures are those of one machine and one moment: the
first word of each line must begin some line of the output. `python -m tests.house.console_blocks PAGE` writes the
output of today into the other blocks, and keeps the lines of a block with `...` whose first word it has already.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(python|console(?: machine)?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COLUMNS = "80"


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a console block, with the lines below it."""

    line: str
    shown: list[str]


def commands_of(text: str) -> list[Command]:
    """Return the commands of a console block."""
    found: list[Command] = []
    for line in text.rstrip("\n").split("\n"):
        if line.startswith("$ "):
            found.append(Command(line[2:], []))
        else:
            found[-1].shown.append(line.rstrip())
    return found


def printed(command: str) -> list[str]:
    """Run `command` in the folder of this process and return the lines that it prints."""
    words = {"PYTHONPATH": str(ROOT), "COLUMNS": _COLUMNS, "NO_COLOR": "1", "TERM": "dumb"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, **words, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return [line.rstrip() for line in done.stdout.rstrip("\n").split("\n")] if done.stdout.strip() else []


def first_word(line: str) -> str:
    return line.split(maxsplit=1)[0] if line.split() else ""


def is_shown(shown: list[str], lines: list[str]) -> bool:
    """Return whether `shown`, in which `...` stands for any lines, is what `lines` are."""
    parts = re.split(r"^\.\.\.$", "\n".join(shown).strip("\n"), flags=re.MULTILINE)
    pattern = "(?:.*\n)*?".join(re.escape(part.strip("\n")) + ("\n" if part.strip("\n") else "") for part in parts)
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in lines)) is not None


def shortened(shown: list[str], lines: list[str]) -> list[str]:
    """Return the lines whose first word `shown` has, with `...` in place of the others; all if `shown` has no `...`."""
    if "..." not in shown:
        return lines
    wanted = set(map(first_word, shown)) - {"..."}
    kept: list[str] = []
    for line in lines:
        if first_word(line) in wanted:
            kept.append(line)
        elif not kept or kept[-1] != "...":
            kept.append("...")
    return kept


def blocks_of(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of each block of `page` that runs."""
    yield from BLOCK.findall(page.read_text(encoding="utf-8"))


def run_page(page: Path, scope: dict[str, Any], *, with_commands: bool) -> None:
    """Run the blocks of `page` in the folder of this process; fail if a command prints other lines than the page."""
    for number, (kind, text) in enumerate(blocks_of(page), start=1):
        if kind == "python":
            exec(compile(text, f"{page.name} block {number}", "exec"), scope)
            continue
        for command in commands_of(text) if with_commands else ():
            lines = printed(command.line)
            if kind.endswith("machine"):
                words = set(map(first_word, lines))
                missing = [line for line in command.shown if first_word(line) and first_word(line) not in words]
                assert not missing, f"{page.name}: {command.line} prints no line like {missing}"
            else:
                shown = "\n".join(command.shown).strip("\n").split("\n") if command.shown else []
                assert is_shown(shown, lines), "\n".join((f"{page.name}: {command.line} prints", *lines))


def rewritten(page: Path, scope: dict[str, Any]) -> str:
    """Run the blocks of `page` and return its text with the output of today."""

    def written(found: re.Match[str]) -> str:
        kind, text = found.groups()
        if kind == "python":
            exec(compile(text, page.name, "exec"), scope)
            return found.group()
        if kind.endswith("machine"):
            return found.group()
        parts: list[str] = []
        for command in commands_of(text):
            parts.append("\n".join((f"$ {command.line}", *shortened(command.shown, printed(command.line)))))
        return f"```{kind}\n" + "\n\n".join(parts) + "\n```"

    return BLOCK.sub(written, page.read_text(encoding="utf-8"))


def scope_of_pages() -> dict[str, Any]:
    """Return what every page may assume: `model`, a small GPT-2 with random weights, and `loader`, three batches."""
    import transformers  # pages of the docs need it, other tests of the house do not

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=96, n_positions=64)
    tokens = [torch.randint(0, 96, (2, 16)) for _ in range(3)]
    model = transformers.GPT2LMHeadModel(config)
    loader = [{"input_ids": batch, "labels": batch} for batch in tokens]
    return {"__name__": "__main__", "model": model, "loader": loader}


if __name__ == "__main__":
    for path in map(Path.absolute, map(Path, sys.argv[1:])):
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            path.write_text(rewritten(path, scope_of_pages()), encoding="utf-8")
            os.chdir(ROOT)
