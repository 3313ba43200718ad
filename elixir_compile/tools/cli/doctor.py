"""`elixir-compile doctor`: look for faults of this machine that make training fail or slow."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import typer

from elixir_compile.tools.doctor import Diagnosis, Verdict, diagnose, this_system

_COLORS = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.BAD: "red", Verdict.UNKNOWN: "cyan"}


def run_doctor(*, disk_path: Path | None, as_json: bool) -> int:
    """Print the findings of the checks on this machine and return the exit code: 1 if a finding is bad.

    If `disk_path` is a folder, its disk is tried too. If `as_json`, stdout gets a JSON object and nothing else.
    """
    found = diagnose(this_system(disk_path))
    is_bad = any(finding.verdict is Verdict.BAD for finding in found)
    if as_json:
        typer.echo(json.dumps({"is_bad": is_bad, "checks": [asdict(finding) for finding in found]}, indent=1))
    else:
        for line in diagnosis_lines(found):
            typer.echo(line)
    return int(is_bad)


def diagnosis_lines(found: Sequence[Diagnosis]) -> list[str]:
    """Return a line for each finding, a line below it that repairs or explains it, and the count of the verdicts."""
    lines: list[str] = []
    title_width = max(len(finding.title) for finding in found)
    for finding in found:
        verdict = typer.style(f"{finding.verdict:<7}", fg=_COLORS[finding.verdict])
        lines.append(f"{verdict}  {finding.code}  {finding.title:<{title_width}}  {finding.found}")
        if finding.fix:
            lines.append(f"{'':<{title_width + 16}}{finding.fix}")
    counts = Counter(finding.verdict for finding in found)
    return [*lines, ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict)]
