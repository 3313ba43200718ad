"""`elixir-compile explain` and `diff`: print the decisions of a saved plan with reasons, or its differences to another.

`fail` turns an error of the package into the output of any command and its exit code.
"""

import json
from dataclasses import asdict
from pathlib import Path

import typer

from elixir_compile.base.errors import ElixirError, NoFeasiblePlan
from elixir_compile.session.saved import load_answered, load_plan, load_plan_or_record
from elixir_compile.tools.report.diff import diff_text, difference
from elixir_compile.tools.report.explain import answer, answer_text

INFEASIBLE = 2
"""Exit code if no plan fits the budget; every other error is 1."""


def fail(error: ElixirError, *, as_json: bool) -> int:
    """Print `error` and return the exit code; to stdout as a JSON object if `as_json`, else to stderr as text."""
    is_infeasible = isinstance(error, NoFeasiblePlan)
    if as_json:
        fields: dict[str, object] = {"error": str(error)}
        if is_infeasible:
            fields |= {"memory": error.memory, "needed_bytes": error.needed_bytes, "budget_bytes": error.budget_bytes}
        typer.echo(json.dumps(fields, indent=1))
    else:
        typer.echo(f"error: {error}", err=True)
    return INFEASIBLE if is_infeasible else 1


def run_explain(*, plan: Path, subject: str, as_json: bool) -> int:
    """Print the plan's answer about `subject` and return the exit code: 1 if the plan or the subject is not found.

    The empty `subject` stands for the whole plan. With the question file beside the plan, the answer has the bytes at
    the peak and the regions that recompute.
    """
    try:
        made, asked = load_answered(plan)
        found = answer(made, subject, None if asked is None else asked.problem.graph)
    except ElixirError as error:
        return fail(error, as_json=as_json)
    text = json.dumps(asdict(found), indent=1) if as_json else answer_text(found, made.prediction.device_peak_at)
    typer.echo(text)
    return 0


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
