"""`elixir-compile report`: a plan, an observed run or a study as one page of HTML, or a figure as a picture."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from elixir_compile.base.errors import ElixirError, InvalidOption, QuestionFileError
from elixir_compile.ir import Plan, Record
from elixir_compile.search.question import Question
from elixir_compile.session.saved import load_answered, load_plan_or_record, question_path
from elixir_compile.tools.cli.report_folders import FoundRun, read_folder
from elixir_compile.tools.cli.reports import fail
from elixir_compile.tools.curve import budget_curve
from elixir_compile.tools.report import charts
from elixir_compile.tools.report.observed_run import ObservedRun, run_data
from elixir_compile.tools.report.page import PlanSheet, drawn_memory, page, page_data, plan_sheet
from elixir_compile.tools.report.run_page import run_page
from elixir_compile.tools.report.study_page import study_page
from elixir_compile.tools.study.study import Study, study_to_json

FIGURES = ("memory", "lanes", "step", "curve")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """What a page shows: a plan, an observed run without a plan, or a study."""

    title: str
    path: Path
    """Where the page is written if the user names no file."""
    text: Callable[[], str]
    data: Callable[[], Any]
    sheet: PlanSheet | None = None
    """What figures are drawn of; None if no plan is shown."""


def run_report(
    *,
    source: Path,
    others: Sequence[Path],
    output: Path | None,
    figure: str | None,
    is_dark: bool,
    curve: int | None,
    as_json: bool,
) -> int:
    """Write the page of `source`, or its `figure` as SVG, and return the exit code: 1 if a file is at fault.

    `source` is a plan, or the folder of an observed run or of a study. A figure has the colours of a light or, if it
    `is_dark`, of a dark ground; the page has both. `others` may hold the record of a measured step and a second plan,
    and beside an observed run other runs, with whose losses its own are compared. `curve` is the number of budgets
    under which the question is asked again. Without `output` the page is written beside the plan, or into the folder.
    If `as_json`, stdout gets the data of the page and no file is written.
    """
    try:
        shown = _shown(source, others, curve, figure)
        text = "" if as_json else shown.text() if figure is None else _figure(shown.sheet, figure, is_dark=is_dark)
    except ElixirError as error:
        return fail(error, as_json=as_json)
    if as_json:
        typer.echo(json.dumps(shown.data(), indent=1))
        return 0
    path = output or (shown.path if figure is None else shown.path.with_suffix(f".{figure}.svg"))
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        typer.echo(f"error: cannot write {path}: {error.strerror}", err=True)
        return 1
    typer.echo(f"{path}: {shown.title}")
    if figure is None and not charts.can_draw():
        typer.echo(f"The page has no charts; for them: {charts.EXTRA}", err=True)
    return 0


def _shown(source: Path, others: Sequence[Path], curve: int | None, figure: str | None) -> _Shown:
    if not source.is_dir():
        return _plan_shown(_with_curve(*_sheet(source, others), curve), source.with_suffix(".html"))
    found = read_folder(source)
    has_plan = isinstance(found, FoundRun) and found.question is not None
    if not has_plan and (curve is not None or figure is not None):
        option, given = ("curve", curve) if curve is not None else ("figure", figure)
        raise InvalidOption(option, given, f"a plan with its question, which {source} does not hold")
    if isinstance(found, Study):
        if others:
            raise InvalidOption("others", str(others[0]), "nothing beside the folder of a study")
        return _study_shown(found, source)
    return _run_shown(found, source, others, curve)


def _plan_shown(sheet: PlanSheet, path: Path) -> _Shown:
    title = f"{sheet.plan.name} on {sheet.plan.cluster}"
    return _Shown(title=title, path=path, text=lambda: page(sheet), data=lambda: page_data(sheet), sheet=sheet)


def _study_shown(study: Study, folder: Path) -> _Shown:
    return _Shown(
        title=f"study of {study.model}",
        path=folder / "study.html",
        text=lambda: study_page(study),
        data=lambda: json.loads(study_to_json(study)),
    )


def _run_shown(found: FoundRun, folder: Path, others: Sequence[Path], curve: int | None) -> _Shown:
    """Return the page of an observed run, with its plan if the folder has it with its question."""
    compared = tuple(_other_run(path) for path in others)
    path = folder / "report.html"
    if found.plan is None or found.question is None:
        return _Shown(
            title=f"{found.run.meta.model}, observed",
            path=path,
            text=lambda: run_page(found.run, compared),
            data=lambda: run_data(found.run),
        )
    full = found.run.row.full
    sheet = _sheet_of(found.plan, found.question, None if full is None else full.record)
    return _plan_shown(replace(_with_curve(sheet, found.question, curve), run=found.run, other_runs=compared), path)


def _other_run(path: Path) -> ObservedRun:
    found = read_folder(path) if path.is_dir() else None
    if not isinstance(found, FoundRun):
        raise InvalidOption("others", str(path), "folders of other observed runs beside that of an observed run")
    return found.run


def _sheet(plan: Path, others: Sequence[Path]) -> tuple[PlanSheet, Question]:
    """Return what the page of a plan shows, and the question of the plan."""
    record: Record | None = None
    second: PlanSheet | None = None
    for path in others:
        found = load_plan_or_record(path)
        if record is not None if isinstance(found, Record) else second is not None:
            raise InvalidOption("others", str(path), "at most one second plan and one record of a measured step")
        if isinstance(found, Record):
            record = found
        else:
            second = _sheet_of(*_answered(path, found), None)
    made, asked = _answered(plan)
    return replace(_sheet_of(made, asked, record), second=second), asked


def _with_curve(sheet: PlanSheet, asked: Question, curve: int | None) -> PlanSheet:
    """Return `sheet` with the steps under `curve` budgets, found by searches; they come when all files were read."""
    if curve is None:
        return sheet
    points = budget_curve(asked, curve, lambda line: typer.echo(f"{line} ...", err=True))
    return replace(sheet, curve=points)


def _sheet_of(made: Plan, asked: Question, record: Record | None) -> PlanSheet:
    problem = asked.problem
    return plan_sheet(made, problem.graph, problem.cluster, problem.measured, record)


def _answered(path: Path, known: Plan | None = None) -> tuple[Plan, Question]:
    """Return the plan in the file at `path`, which is `known` if the file was read before, and its question."""
    made, asked = load_answered(path, known)
    if asked is None:
        expected = "the question of the plan: write it with `plan -o` or `save_plan(compilation, ...)`"
        raise QuestionFileError(str(question_path(path)), expected, "no such file")
    return made, asked


def _figure(sheet: PlanSheet | None, figure: str, *, is_dark: bool) -> str:
    if figure not in FIGURES:
        raise InvalidOption("figure", figure, "one of " + ", ".join(FIGURES))
    assert sheet is not None, "figures of folders without a plan are refused before"
    if figure == "curve" and not sheet.curve:
        raise InvalidOption("figure", figure, "--curve beside it, with the number of budgets")
    if not charts.can_draw():
        raise InvalidOption("figure", figure, f"the libraries of the charts: {charts.EXTRA}")
    budget_bytes, bars = sheet.plan.budget_bytes, sheet.drawn_bars
    rows, second = drawn_memory(sheet)
    specs = {
        "memory": lambda: charts.memory_chart(rows, budget_bytes, second),
        "lanes": lambda: charts.lanes_chart(bars),
        "curve": lambda: charts.curve_chart(sheet.curve),
        "step": lambda: charts.step_chart(rows, bars, budget_bytes, second, sheet.rates, is_static=True),
    }
    return charts.picture(specs[figure](), is_dark=is_dark)
