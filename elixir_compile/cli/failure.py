"""Turn an error of the package into the output of a command and its exit code."""

import json

import typer

from elixir_compile.errors import ElixirError, NoFeasiblePlan

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
