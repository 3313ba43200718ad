"""`elixir-compile trace`: the recorded steps of an observed run as a file for Perfetto."""

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from elixir_compile.base.errors import ElixirError, TraceFileError
from elixir_compile.base.folders import write_whole
from elixir_compile.ir import Record
from elixir_compile.session.saved import load_answered
from elixir_compile.step import plan_at
from elixir_compile.step.seconds import simulate
from elixir_compile.tools.cli.reports import fail
from elixir_compile.tools.report.subject import waiting_regions
from elixir_compile.tools.report.trace_events import trace_events
from elixir_compile.tools.study.observed import FullStep
from elixir_compile.tools.study.trace_files import Trace, plan_path, read_full_step, read_trace


def run_trace(*, folder: Path, output: Path | None) -> int:
    """Write the Chrome trace of the full steps in `folder`, and return the exit code: 1 if a file is at fault.

    Without `output` it is written into the folder.
    """
    try:
        trace = read_trace(folder)
        steps = [read_full_step(path) for path in trace.records.values()]
        if not steps:
            expected = "files of full steps, as `observe(model, folder, full=(8, 9, 10))` writes them"
            raise TraceFileError(str(folder), expected, "none")
        planned, waiting = _planned(folder, steps)
        events = trace_events(steps, _begins_s(trace), planned, waiting)
    except ElixirError as error:
        return fail(error, as_json=False)
    path = output or folder / "trace.json.gz"
    content = json.dumps(events, allow_nan=False, separators=(",", ":")).encode()
    try:
        write_whole(path, gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    except OSError as error:
        typer.echo(f"error: cannot write {path}: {error.strerror}", err=True)
        return 1
    numbers = ", ".join(f"{full.summary.step}" for full in steps)
    beside = "" if planned is None else ", beside the planned step"
    typer.echo(f"{path}: steps {numbers} of {trace.meta.model}{beside}; open it in https://ui.perfetto.dev")
    return 0


def _begins_s(trace: Trace) -> dict[tuple[int, int], float]:
    """Return when each step begins, in seconds since the first step of its rank began."""
    found: dict[tuple[int, int], float] = {}
    for rank, summaries in trace.steps.items():
        at_s = 0.0
        for summary in summaries:
            found[rank, summary.step] = at_s
            at_s += summary.period_s
    return found


def _planned(folder: Path, steps: list[FullStep]) -> tuple[Record | None, Mapping[str, Sequence[str]]]:
    """Return the simulated step of the plan of the last of `steps`, None if there are several plans or no question, and
    the regions that wait for each copy, by its label."""
    keys = steps[-1].summary.plans
    path = plan_path(folder, keys[0]) if len(keys) == 1 else None
    if path is None or not path.exists():
        return None, {}
    plan, question = load_answered(path)
    if question is None:
        return None, waiting_regions(plan)
    problem = question.problem
    planned = simulate(problem.graph, plan_at(problem.graph, plan), problem.cluster, problem.measured)
    return planned, waiting_regions(plan)
