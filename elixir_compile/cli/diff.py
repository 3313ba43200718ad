"""`elixir-compile diff a.json b.json`: print the differences of two plans, or of a plan and a measured step."""

import json
from dataclasses import asdict
from pathlib import Path

import typer

from elixir_compile.cli.failure import fail
from elixir_compile.errors import ElixirError
from elixir_compile.managed.saved import load_plan, load_plan_or_record
from elixir_compile.report.diff import diff_text, difference


def run_diff(*, first: Path, second: Path, as_json: bool) -> int:
    """Print the difference and return the exit code: 1 if a file cannot be read.

    `first` is a plan, `second` a plan or a record.
    """
    try:
        found = difference(load_plan(first), load_plan_or_record(second))
    except ElixirError as error:
        return fail(error, as_json=as_json)
    typer.echo(json.dumps(asdict(found), indent=1) if as_json else diff_text(found))
    return 0
