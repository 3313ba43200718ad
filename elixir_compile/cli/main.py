"""`elixir-compile`: one command per file, imported when it runs, so that `--version` and `--help` never load torch."""

import os
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Train models that do not fit.")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"elixir-compile {version('elixir-compile')}")
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train models that do not fit."""


@app.command()
def demo(
    text: Annotated[
        Path | None, typer.Option(help="Train on this file or folder instead of Python's standard library.")
    ] = None,
    steps: Annotated[int, typer.Option(min=4, help="Training steps per run.")] = 20,
) -> None:
    """Train a byte-level GPT twice, without a budget and in half the memory, and compare.

    Exits with 1 when the losses differ or the measured peak exceeds the budget.
    """
    # All three are read when torch is loaded. OpenMP threads that spin while they wait make a step ten times slower on
    # a machine that does anything else (0.3 s to 3.4 s on two cores), and no faster on a quiet one. The profiler behind
    # the measurement reports its own start and stop on stderr.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from elixir_compile.cli.demo import run_demo

    raise typer.Exit(code=run_demo(text=text, num_steps=steps))


def main() -> None:
    """Run the command line."""
    app()
