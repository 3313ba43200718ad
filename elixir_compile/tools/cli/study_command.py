"""The arguments of `elixir-compile study`."""

from pathlib import Path
from typing import Annotated

import typer


def study(
    model: Annotated[str, typer.Argument(help="gpt2-124m, ...; path.py:function; or a Hugging Face config file.")],
    placements: Annotated[
        str | None,
        typer.Option(help="Rows to run: device,after_backward,across_steps,in_backward,disk,plan,inductor; else all."),
    ] = None,
    budgets: Annotated[
        str, typer.Option(help="Device budgets of the row plan: bytes, or percent of the peak of the row device.")
    ] = "60%",
    batch: Annotated[int, typer.Option(min=1, help="Samples per step.")] = 2,
    seq: Annotated[int, typer.Option(min=1, help="Tokens per sample.")] = 256,
    dtype: Annotated[str, typer.Option(help="Dtype of parameters and compute.")] = "float32",
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Steps that are timed in each row.")] = 8,
    hardware: Annotated[
        str | None, typer.Option(help="Simulate the rows on this machine instead of running them here.")
    ] = None,
    disk_path: Annotated[Path | None, typer.Option(help="Folder for the state of the row disk.")] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for study.json and study.html.")] = Path(
        "study"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Train a model under several placements of its state, and show their steps side by side.

    Each row is a process of its own with the same seed and batches: everything on the device, state on the host with
    its update at three times, state on disk, the plan of a search, and torch.compile alone.
    """
    from elixir_compile.tools.cli.study import StudyRequest, run_study

    asked = StudyRequest(
        model=model,
        placements=placements,
        budgets=budgets,
        batch=batch,
        seq=seq,
        dtype=dtype,
        steps=steps,
        hardware=hardware,
        disk_path=disk_path,
    )
    raise typer.Exit(code=run_study(asked, output, as_json=as_json))
