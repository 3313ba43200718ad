"""`elixir-compile export CHECKPOINT OUT.safetensors`: write the model of a checkpoint to a safetensors file."""

import json
from dataclasses import asdict
from pathlib import Path

import typer

from elixir_compile.base.errors import ElixirError
from elixir_compile.base.units import format_bytes
from elixir_compile.checkpoint.loading import export
from elixir_compile.tools.cli.report import fail


def run_export(*, checkpoint: Path, out: Path, as_json: bool) -> int:
    """Write the file `out`, print its content, and return the exit code: 1 if a file cannot be read or written."""
    try:
        made = export(checkpoint, out)
    except ElixirError as error:
        return fail(error, as_json=as_json)
    tied = "".join(f"\n{name} is tied to {untied} and not in the file" for name, untied in made.tied.items())
    text = f"{made.num_tensors} tensors, {format_bytes(made.nbytes)}, in {out}{tied}"
    typer.echo(json.dumps(asdict(made), indent=1) if as_json else text)
    return 0
