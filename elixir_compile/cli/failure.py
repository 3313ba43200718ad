"""An error of the package -> what a command prints and the code it exits with."""

import json

import typer

from elixir_compile.errors import ElixirError, NoFeasiblePlan

INFEASIBLE = 2
"""Exit code where no plan fits; 1 is for every other error."""


def fail(error: ElixirError, *, as_json: bool) -> int:
    """Print `error`, with `as_json` as one object on stdout, else on stderr, and return the exit code."""
    is_infeasible = isinstance(error, NoFeasiblePlan)
    if as_json:
        told: dict[str, object] = {"error": str(error)}
        if is_infeasible:
            told |= {"memory": error.memory, "needed_bytes": error.needed_bytes, "budget_bytes": error.budget_bytes}
        typer.echo(json.dumps(told, indent=1))
    else:
        typer.echo(f"error: {error}", err=True)
    return INFEASIBLE if is_infeasible else 1
