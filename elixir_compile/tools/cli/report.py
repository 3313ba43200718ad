"""`elixir-compile explain`, `diff` and `report`: show a saved plan, an observed run or a study as text, as one page of
HTML or as a picture.
"""

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import typer

from elixir_compile.base.errors import ElixirError, InvalidOption, NoFeasiblePlan, QuestionFileError, TraceFileError
from elixir_compile.base.folders import write_whole
from elixir_compile.base.units import format_bytes
from elixir_compile.ir import Plan, Record
from elixir_compile.ir.graph import MOST_BYTES
from elixir_compile.search import plan as plan_of_problem
from elixir_compile.search.problem import Question
from elixir_compile.session.cache import plan_for
from elixir_compile.session.plan_files import load_answered, load_plan, load_plan_or_record, question_path
from elixir_compile.step import plan_at
from elixir_compile.step.seconds import simulate
from elixir_compile.tools.observed import (
    Study,
    meta_path,
    plan_path,
    read_full_step,
    read_study,
    read_trace,
    study_path,
    study_to_json,
)
from elixir_compile.tools.report import figures as charts
from elixir_compile.tools.report.diff import diff_text, difference
from elixir_compile.tools.report.explain import answer, answer_text
from elixir_compile.tools.report.figures import CurvePoint
from elixir_compile.tools.report.page import PlanSheet, drawn_memory, page, page_data, plan_sheet, run_page, study_page
from elixir_compile.tools.report.runs import ObservedRun, observed_run, run_data, trace_events
from elixir_compile.tools.report.tables import waiting_regions

# ----------------------------------------------------------------------------------------------------------------------
# `elixir-compile explain` and `diff`: print the decisions of a saved plan with reasons, or its differences to another.
#
# `fail` turns an error of the package into the output of any command and its exit code.


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


# ----------------------------------------------------------------------------------------------------------------------
# The contents of a folder that `elixir-compile report` shows: of an observed run, or of a study.


@dataclass(frozen=True, slots=True)
class FoundRun:
    """An observed run, and the plan of its last step with its question, if its folder has both."""

    run: ObservedRun
    plan: Plan | None
    question: Question | None


def read_folder(folder: Path) -> Study | FoundRun:
    """Return the study or the observed run in `folder`.

    Raises TraceFileError if the folder holds neither, or if a file in it is damaged.
    """
    if study_path(folder).is_file():
        return read_study(folder)
    if meta_path(folder).is_file():
        return read_run(folder)
    raise TraceFileError(str(folder), "study.json of a study, or meta.json of an observed run", "neither")


def read_run(folder: Path) -> FoundRun:
    """Return the observed run in `folder`, and its plan if its last step had only one and the folder has its question.

    Raises TraceFileError if no step has ended in the run, or if a file is damaged.
    """
    trace = read_trace(folder)
    steps = {rank: own for rank, own in trace.steps.items() if own}
    if not steps:
        raise TraceFileError(str(folder), "the summary of at least one step", "none: no step has ended")
    first = min(steps)
    full = [read_full_step(path) for (rank, _), path in trace.records.items() if rank == first]
    keys = (full[-1].summary if full else steps[first][-1]).plans
    path = plan_path(folder, keys[0]) if len(keys) == 1 else None
    plan, question = (None, None) if path is None or not path.is_file() else load_answered(path)
    cluster = None if question is None else question.problem.cluster
    run = observed_run(folder.resolve().name, trace.meta, steps, full, plan, cluster)
    return FoundRun(run, plan, question)


# ----------------------------------------------------------------------------------------------------------------------
# Ask the question of a plan again under other device budgets: the curve of step time over memory.
#
#   budgets   from the smallest with a plan to that of everything on the device, and the plan's own budget between them
#   step_s    a plan for less memory fits more memory too, so the curve never rises with the budget
#   bound_s   what no plan within a budget beats, no plan within a smaller budget beats either


def budget_curve(
    question: Question, num_points: int, report: Callable[[str], None] = lambda line: None
) -> tuple[CurvePoint, ...]:
    """Return the step under `num_points` budgets, in rising order, and under the question's own budget if it is between
    them.

    Each point is a search of its own, unless its plan is in the plan cache. Budgets for which the host has too little
    memory have no point. `report` is called with a line before each search. Raises NoFeasiblePlan if no budget has a
    plan.
    """
    try:
        least = _plan_within(question, 0).prediction.device_peak_bytes
    except NoFeasiblePlan as error:  # the smallest budget with a plan, unless the host has too little memory for less
        least = error.needed_bytes if error.memory == "device" else question.problem.budget_bytes
    everything = plan_of_problem(replace(question.problem, budget_bytes=MOST_BYTES), "keep_all")
    most = everything.prediction.device_peak_bytes
    budgets = {least + (most - least) * number // (num_points - 1) for number in range(num_points)}
    own = question.problem.budget_bytes
    budgets |= {own} if least < own < most else set()
    found: list[tuple[int, Plan]] = []
    for number, budget_bytes in enumerate(sorted(budgets), start=1):
        report(f"budget {number} of {len(budgets)}")
        try:
            found.append((budget_bytes, _plan_within(question, budget_bytes)))
        except NoFeasiblePlan:
            if number == len(budgets) and not found:
                raise
    steps = [made.prediction.step_s for _, made in found]
    points: list[CurvePoint] = []
    for at, (budget_bytes, made) in enumerate(found):
        proved = [larger.bound_s for _, larger in found[at:] if larger.bound_s is not None]
        point = CurvePoint(
            budget_bytes=budget_bytes,
            step_s=min(steps[: at + 1]),
            planned_s=made.prediction.step_s,
            bound_s=max(proved, default=None),
            is_own=budget_bytes == own,
        )
        points.append(point)
    return tuple(points)


def _plan_within(question: Question, budget_bytes: int) -> Plan:
    problem = question.problem
    # Every memory is given, so plans of other runs come from the cache only if their budgets are equal.
    options = replace(question.options, device_memory=budget_bytes, host_memory=problem.host_budget_bytes)
    return plan_for(replace(problem, budget_bytes=budget_bytes), options)


# ----------------------------------------------------------------------------------------------------------------------
# `elixir-compile report`: a plan, an observed run or a study as one page of HTML, or a figure as a picture.


FIGURES = ("memory", "lanes", "step", "curve")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """A page to show: of a plan, of an observed run without a plan, or of a study."""

    title: str
    path: Path
    """Where the page is written if the user names no file."""
    text: Callable[[], str]
    data: Callable[[], Any]
    sheet: PlanSheet | None = None
    """The contents from which figures are drawn; None if no plan is shown."""


def run_report(
    *,
    source: Path,
    others: Sequence[Path] | None,
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
        shown = _shown(source, others or (), curve, figure)
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
        return _Shown(
            title=f"study of {found.model}",
            path=source / "study.html",
            text=lambda: study_page(found),
            data=lambda: json.loads(study_to_json(found)),
        )
    runs: list[ObservedRun] = []
    for path in others:
        other = read_folder(path) if path.is_dir() else None
        if not isinstance(other, FoundRun):
            raise InvalidOption("others", str(path), "folders of other observed runs beside that of an observed run")
        runs.append(other.run)
    path, run = source / "report.html", found.run
    if found.plan is None or found.question is None:
        title = f"{run.meta.model}, observed"
        return _Shown(title=title, path=path, text=lambda: run_page(run, runs), data=lambda: run_data(run))
    full = run.row.full
    sheet = _sheet_of(found.plan, found.question, None if full is None else full.record)
    return _plan_shown(replace(_with_curve(sheet, found.question, curve), run=run, other_runs=tuple(runs)), path)


def _plan_shown(sheet: PlanSheet, path: Path) -> _Shown:
    title = f"{sheet.plan.name} on {sheet.plan.cluster}"
    return _Shown(title=title, path=path, text=lambda: page(sheet), data=lambda: page_data(sheet), sheet=sheet)


def _sheet(plan: Path, others: Sequence[Path]) -> tuple[PlanSheet, Question]:
    """Return the contents of the page of a plan, and the question of the plan."""
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


# ----------------------------------------------------------------------------------------------------------------------
# `elixir-compile trace`: the recorded steps of an observed run as a file for Perfetto.


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
        begins_s: dict[tuple[int, int], float] = {}  # since the first step of the rank began
        for rank, summaries in trace.steps.items():
            at_s = 0.0
            for summary in summaries:
                begins_s[rank, summary.step] = at_s
                at_s += summary.period_s
        # The simulated step of the plan of the last step, unless there are several plans or no question.
        planned: Record | None = None
        waiting: Mapping[str, Sequence[str]] = {}
        keys = steps[-1].summary.plans
        if len(keys) == 1 and plan_path(folder, keys[0]).exists():
            plan, question = load_answered(plan_path(folder, keys[0]))
            waiting = waiting_regions(plan)
            if question is not None:
                problem = question.problem
                graph = problem.graph
                planned = simulate(graph, plan_at(graph, plan), problem.cluster, problem.measured)
        events = trace_events(steps, begins_s, planned, waiting)
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


# ----------------------------------------------------------------------------------------------------------------------
# `elixir-compile export`: the model of a checkpoint as a safetensors file.


def run_export(*, checkpoint: Path, out: Path, as_json: bool) -> int:
    """Write the file `out`, print its content, and return the exit code: 1 if a file cannot be read or written."""
    from elixir_compile.checkpoint.loading import export  # it loads torch's checkpoints, which other commands need not

    try:
        made = export(checkpoint, out)
    except ElixirError as error:
        return fail(error, as_json=as_json)
    tied = "".join(f"\n{name} is tied to {untied} and not in the file" for name, untied in made.tied.items())
    text = f"{made.num_tensors} tensors, {format_bytes(made.nbytes)}, in {out}{tied}"
    typer.echo(json.dumps(asdict(made), indent=1) if as_json else text)
    return 0
