"""`elixir-compile study`: the same training under several placements, each in a process of its own, side by side."""

import json
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import typer
from rich.console import Console

from elixir_compile.base.errors import ElixirError, InvalidOption, NoFeasiblePlan
from elixir_compile.base.folders import write_whole
from elixir_compile.base.options import parse_options
from elixir_compile.base.units import format_bytes
from elixir_compile.base.version import __version__
from elixir_compile.compat.platforms import accelerator_type
from elixir_compile.session.cache import plan_for
from elixir_compile.session.machine import machine
from elixir_compile.tools.cli.plan import Request
from elixir_compile.tools.cli.report import fail
from elixir_compile.tools.cli.study_worker import (
    PLACEMENTS,
    Budget,
    Case,
    Placement,
    budgets_named,
    case_to_json,
    placements_named,
    row_from_json,
)
from elixir_compile.tools.observed import Study, StudyRow, study_to_json
from elixir_compile.tools.plan import named_cluster, question
from elixir_compile.tools.preview.models import require_model
from elixir_compile.tools.report.page import study_page
from elixir_compile.tools.report.runs import planned_row, study_text


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRequest:
    """The arguments of a command line, as typed."""

    model: str
    placements: str | None
    budgets: str
    batch: int
    seq: int
    dtype: str
    steps: int
    hardware: str | None
    disk_path: Path | None

    def request(self) -> Request:
        """Return what captures the model, for rows that are simulated."""
        return Request(
            model=self.model,
            batch=self.batch,
            seq=self.seq,
            dtype=self.dtype,
            recompute=False,
            hardware=self.hardware,
            ranks=1,
        )


def run_study(asked: StudyRequest, output: Path, *, as_json: bool) -> int:
    """Run the rows of `asked`, print their table and findings, and write study.json and study.html to `output`.

    Returns the exit code: 1 if an argument is wrong, or if no row could be run.
    """
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        placements, budgets = placements_named(asked.placements), budgets_named(asked.budgets)
        cluster = named_cluster(asked.hardware)
        rows = _planned_rows if cluster is not None else _measured_rows
        here = cluster or machine(torch.device(accelerator_type() or "cpu"))
        found: list[StudyRow] = []
        for row in rows(asked, placements, budgets, lambda line: notes.print(line, markup=False)):
            found.append(row)
            notes.print(f"{row.name}: {row.reason or 'done'}", markup=False)
    except ElixirError as error:
        return fail(error, as_json=as_json)
    study = Study(
        model=f"{asked.model}, {asked.batch} x {asked.seq}, {asked.dtype}",
        command=shlex.join(["elixir-compile", *sys.argv[1:]]),
        cluster=here,
        rows=tuple(found),
        versions={"elixir_compile": __version__, "python": platform.python_version(), "torch": str(torch.__version__)},
    )
    output.mkdir(parents=True, exist_ok=True)
    write_whole(output / "study.json", study_to_json(study).encode())
    write_whole(output / "study.html", study_page(study).encode())
    if as_json:
        typer.echo(json.dumps(json.loads(study_to_json(study)), indent=1))
    else:
        typer.echo(study_text(study))
        typer.echo(f"{output / 'study.html'}", err=True)
    return 0 if any(row.full is not None for row in found) else 1


def _cases(
    placements: tuple[Placement, ...], budgets: tuple[Budget, ...]
) -> Iterator[tuple[str, Placement, Budget | None]]:
    """Yield the name, the placement and the budget of each row: a plan is searched for each budget, other rows have
    none."""
    for placement in placements:
        if placement.name != "plan":
            yield placement.name, placement, None
            continue
        for budget in budgets:
            yield f"plan {budget.text}", placement, budget


Say = Callable[[str], None]


def _measured_rows(
    asked: StudyRequest, placements: tuple[Placement, ...], budgets: tuple[Budget, ...], say: Say
) -> Iterator[StudyRow]:
    """Yield the rows, each trained in a process of its own on this machine.

    A percentage of a budget is of the peak of the row `device`. Raises InvalidOption if that row is not asked for
    before, and UnknownModel.
    """
    require_model(asked.model)  # else each row would start a process that finds nothing
    peaks: dict[str, int | None] = {}
    for name, placement, budget in _cases(placements, budgets):
        whole_bytes = peaks.get("device")
        if budget is not None and budget.is_share and whole_bytes is None:
            if "device" not in peaks:
                said = "bytes, because no row `device` has run before: add it first"
                raise InvalidOption("budgets", asked.budgets, said)
            reason = f"{budget.text} of the peak of the row `device`, which did not run"
            yield StudyRow(name=name, what=placement.what, budget_bytes=None, reason=reason)
            continue
        budget_bytes = None if budget is None else budget.nbytes(whole_bytes or 0)
        say(f"{name} ..." if budget_bytes is None else f"{name}, {format_bytes(budget_bytes)} ...")
        case = Case(
            name=name,
            placement=placement.name,
            model=asked.model,
            batch=asked.batch,
            seq=asked.seq,
            dtype=asked.dtype,
            num_timed=asked.steps,
            budget_bytes=budget_bytes,
            disk_path="" if asked.disk_path is None else str(asked.disk_path),
        )
        row = _apart(case)
        peaks[name] = row.peak_bytes
        yield row


def _apart(case: Case) -> StudyRow:
    """Return the row of `case`, trained in a new process; if the process fails, a row with its last line."""
    with tempfile.TemporaryDirectory(prefix="elixir-study-") as folder:
        case_path, row_path = Path(folder, "case.json"), Path(folder, "row.json")
        case_path.write_text(case_to_json(case), encoding="utf-8")
        command = [sys.executable, "-m", "elixir_compile.tools.cli.study_worker", str(case_path), str(row_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if row_path.is_file():
            return row_from_json(row_path.read_text(encoding="utf-8"))
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        what = PLACEMENTS[case.placement].what
        reason = f"its process ended with {done.returncode}: {last}"
        return StudyRow(name=case.name, what=what, budget_bytes=case.budget_bytes, reason=reason)


def _planned_rows(
    asked: StudyRequest, placements: tuple[Placement, ...], budgets: tuple[Budget, ...], say: Say
) -> Iterator[StudyRow]:
    """Yield the rows as simulated on a machine that is not here. A percentage is of the peak of the row `device`."""
    say(f"capturing {asked.model} ...")
    request = asked.request()
    cluster = request.cluster()
    assert cluster is not None
    capture = request.capture()
    peaks: dict[str, int | None] = {}
    for name, placement, budget in _cases(placements, budgets):
        whole_bytes = peaks.get("device") or cluster.device.memory_bytes - cluster.device.reserve_bytes
        budget_bytes = None if budget is None else budget.nbytes(whole_bytes)
        row = StudyRow(name=name, what=placement.what, budget_bytes=budget_bytes, is_simulated=True)
        if placement.backend != "elixir" or placement.on_disk:
            yield replace(row, reason="not simulated: it is measured on a machine that is here")
            continue
        say(f"{name} ...")
        given = dict(placement.options) | ({} if budget_bytes is None else {"device_memory": budget_bytes})
        problem, options = question(capture, parse_options(given), cluster)
        try:
            plan = plan_for(problem, options)
        except NoFeasiblePlan as error:
            yield replace(row, reason=str(error))
            continue
        made = planned_row(row, plan, problem.graph, cluster, problem.measured)
        peaks[name] = made.peak_bytes
        yield made
