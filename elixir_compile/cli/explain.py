"""`elixir-compile explain plan.json layers.3`: print the decisions of a saved plan about a subject, with reasons."""

import json
from dataclasses import asdict
from pathlib import Path

import typer

from elixir_compile.cli.failure import fail
from elixir_compile.errors import ElixirError
from elixir_compile.managed.saved import load_plan
from elixir_compile.report.explain import answer, answer_text


def run_explain(*, plan: Path, subject: str, as_json: bool) -> int:
    """Print the plan's answer about `subject` and return the exit code: 1 if the plan or the subject is not found.

    The empty `subject` stands for the whole plan.
    """
    try:
        made = load_plan(plan)
        found = answer(made, subject)
    except ElixirError as error:
        return fail(error, as_json=as_json)
    text = json.dumps(asdict(found), indent=1) if as_json else answer_text(found, made.prediction.device_peak_at)
    typer.echo(text)
    return 0
