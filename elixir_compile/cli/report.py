"""`elixir-compile report`: a plan as one page of HTML, or one of its figures as a picture."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import typer

from elixir_compile.api.curve import budget_curve
from elixir_compile.cli.plan import nothing_on_stdout
from elixir_compile.cli.reports import fail
from elixir_compile.errors import ElixirError, InvalidOption, QuestionFileError
from elixir_compile.ir import Plan, Record
from elixir_compile.managed.saved import load_answered, load_plan_or_record, question_path
from elixir_compile.report import charts
from elixir_compile.report.page import PlanSheet, drawn_memory, page, page_data, plan_sheet
from elixir_compile.search.question import Question

FIGURES = ("memory", "lanes", "step", "curve")


def run_report(
    *,
    plan: Path,
    others: Sequence[Path],
    output: Path | None,
    figure: str | None,
    is_dark: bool,
    curve: int | None,
    as_json: bool,
) -> int:
    """Write the page of `plan`, or its `figure` as SVG, and return the exit code: 1 if a file is at fault.

    A figure has the colours of a light or, if it `is_dark`, of a dark ground; the page has both.
    `others` may hold the record of a measured step and a second plan. `curve` is the number of budgets under which the
    question is asked again. Without `output` the page is written beside the plan. If `as_json`, stdout gets the data of
    the page and no file is written.
    """
    try:
        sheet = _sheet(plan, others, curve)
        text = _figure(sheet, figure, is_dark=is_dark) if figure is not None else "" if as_json else page(sheet)
    except ElixirError as error:
        return fail(error, as_json=as_json)
    if as_json:
        typer.echo(json.dumps(page_data(sheet), indent=1))
        return 0
    path = output or plan.with_suffix(".html" if figure is None else f".{figure}.svg")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        typer.echo(f"error: cannot write {path}: {error.strerror}", err=True)
        return 1
    typer.echo(f"{path}: {sheet.plan.name} on {sheet.plan.cluster}")
    if figure is None and not charts.can_draw():
        typer.echo(f"The page has no charts; for them: {charts.EXTRA}", err=True)
    return 0


def _sheet(plan: Path, others: Sequence[Path], curve: int | None) -> PlanSheet:
    """Return what the page shows; searches come last, when all files were read."""
    record: Record | None = None
    second: PlanSheet | None = None
    for path in others:
        found = load_plan_or_record(path)
        if record is not None if isinstance(found, Record) else second is not None:
            raise InvalidOption("others", str(path), "at most one second plan and one record of a measured step")
        if isinstance(found, Record):
            record = found
        else:
            second = _sheet_of(*_answered(path), None)
    made, asked = _answered(plan)
    sheet = replace(_sheet_of(made, asked, record), second=second)
    if curve is None:
        return sheet
    with nothing_on_stdout():
        points = budget_curve(asked, curve, lambda line: typer.echo(f"{line} ...", err=True))
    return replace(sheet, curve=points)


def _sheet_of(made: Plan, asked: Question, record: Record | None) -> PlanSheet:
    problem = asked.problem
    return plan_sheet(made, problem.graph, problem.cluster, problem.measured, record)


def _answered(path: Path) -> tuple[Plan, Question]:
    made, asked = load_answered(path)
    if asked is None:
        expected = "the question of the plan: write it with `plan -o` or `save_plan(compilation, ...)`"
        raise QuestionFileError(str(question_path(path)), expected, "no such file")
    return made, asked


def _figure(sheet: PlanSheet, figure: str, *, is_dark: bool) -> str:
    if figure not in FIGURES:
        raise InvalidOption("figure", figure, "one of " + ", ".join(FIGURES))
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
        "step": lambda: charts.step_chart(rows, bars, budget_bytes, second, is_static=True),
    }
    return charts.picture(specs[figure](), is_dark=is_dark)
