"""Measure the seconds of `elixir-compile plan` from the shell to the plan: a model's first command, and its next.

    python benchmarks/commands.py                  every case
    python benchmarks/commands.py rtx4090          a single case

The two commands of a case follow each other, each in a process of its own on one thread; captures may use a second
process. The first command starts with an empty cache. The next plans for another machine, so it searches but does not
capture. Results go to benchmarks/results/commands_cpu.{json,md}; cases that are not run keep their rows.
"""

import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import quiet  # noqa: F401  before torch
from machine import RESULTS, save

CASES = {
    "a100": ("llama-7b --hardware a100-80g", "llama-7b --hardware h100-80g"),
    "4 x a100": ('llama-7b --hardware "4 x a100-40g"', 'llama-7b --hardware "4 x h100-80g"'),
    "rtx4090": (
        "llama-7b --hardware rtx4090-24g --batch 4 --seq 2048 --state-bytes 12",
        "llama-7b --hardware a100-40g --batch 4 --seq 2048 --state-bytes 12",
    ),
    "gpt2-4b": ("gpt2-4b --hardware a100-80g --batch 4", "gpt2-4b --hardware h100-80g --batch 4"),
    "gpt2-20b": (
        "gpt2-20b --hardware a100-80g --batch 4 --seq 1024",
        "gpt2-20b --hardware h100-80g --batch 4 --seq 1024",
    ),
    "llama-70b": (
        'llama-70b --hardware "8 x h100-80g" --batch 1 --seq 4096 --state-bytes 12',
        'llama-70b --hardware "8 x a100-80g" --batch 1 --seq 4096 --state-bytes 12',
    ),
}
"""The first and the next command, for the same model and batch."""
PARTS = ("imports", "capture", "search", "all")
"""`imports` runs before the command line is read; `capture` includes the import of transformers and of the models."""


def main() -> None:
    """Run the cases from the command line, and save each row as soon as it is there."""
    if sys.argv[1:2] == ["--run"]:
        print(json.dumps(run(shlex.split(sys.argv[2]))), file=sys.stderr)
        return
    path = RESULTS / "commands_cpu.json"
    rows = json.loads(path.read_text())["cases"] if path.exists() else {}
    for name in sys.argv[1:] or CASES:
        with tempfile.TemporaryDirectory() as cache:
            first, following = (in_process(command, cache) for command in CASES[name])
        rows[name] = {"command": CASES[name][0], "first": first, "next": following, "load": os.getloadavg()[0]}
        print(name, rows[name], file=sys.stderr)
        save(path.stem, {"cases": rows})
        path.with_suffix(".md").write_text(table(rows))


def in_process(command: str, cache: str) -> dict[str, list[float]]:
    """Return the result of `run` in a new process with the cache folder `cache`; `all` counts the process's start."""
    began_s = time.perf_counter()
    made = subprocess.run(
        [sys.executable, __file__, "--run", command],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "ELIXIR_CACHE_DIR": cache},
    )
    parts = json.loads(made.stderr.splitlines()[-1])
    parts["all"][0] = round(time.perf_counter() - began_s, 2)
    return parts


def run(words: list[str]) -> dict[str, list[float]]:
    """Run the command of `words` in this process; return, by part, its wall seconds, CPU seconds and children's."""
    from elixir_compile.tools.cli import main as command_line

    before = now()
    seconds = {part: [0.0] * 3 for part in PARTS}

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = now()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[part] = [sum(pair) for pair in zip(seconds[part], since(began), strict=True)]

        return call

    def imported() -> None:
        from elixir_compile.base.process import collector_off

        with collector_off():
            from elixir_compile.tools.cli import plan

        plan.Request.capture = timed("capture", plan.Request.capture)
        plan.plan_for = timed("search", plan.plan_for)

    timed("imports", imported)()
    sys.argv = ["elixir-compile", "plan", *words]
    try:
        command_line.main()
    except SystemExit as end:
        if end.code:
            raise
    seconds["all"] = since(before)
    return {part: [round(second, 2) for second in found] for part, found in seconds.items()}


def now() -> list[float]:
    """Return the seconds of the wall clock, and CPU seconds of this process and of its children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return [time.perf_counter(), *(usage.ru_utime + usage.ru_stime for usage in usages)]


def since(before: list[float]) -> list[float]:
    """Return the seconds that passed since `before`, a result of `now`."""
    return [after - earlier for earlier, after in zip(before, now(), strict=True)]


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the rows as a table in Markdown."""
    lines = [
        "# Seconds of `elixir-compile plan`\n",
        "Wall seconds, and in brackets CPU seconds of all its processes.\n",
        "| command | | " + " | ".join(PARTS) + " | load |",
        "|---|---|" + "---|" * (len(PARTS) + 1),
    ]
    for row in rows.values():
        for which in ("first", "next"):
            seconds = [row[which][part] for part in PARTS]
            cells = [f"{wall_s:.1f} ({own_s + children_s:.1f})" for wall_s, own_s, children_s in seconds]
            lines.append(f"| `{row['command']}` | {which} | {' | '.join(cells)} | {row['load']:.1f} |")
    lines.append(
        "\nThe next command plans the same model and batch for another machine; its capture is read from disk. The "
        "load is the number of processes that wanted one of two cores: only rows of a load below 1 compare with others."
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
