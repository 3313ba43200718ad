"""`elixir-compile report` of the folder of an observed run or of a study: steps, losses, phases, findings."""

import functools
import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import elixir_compile as elixir
from elixir_compile.base.options import Options
from elixir_compile.base.units import format_bytes, format_s
from elixir_compile.ir import Origin
from elixir_compile.search.question import question_of
from elixir_compile.step.seconds import simulate
from elixir_compile.tools.cli.main import app
from elixir_compile.tools.observed import (
    FullStep,
    Study,
    StudyRow,
    TraceMeta,
    plan_path,
    steps_path,
    study_to_json,
    summary_to_json,
    write_full_step,
    write_meta,
)
from elixir_compile.tools.report import figures as charts
from elixir_compile.tools.report.runs import planned_row, thinned
from tests.pure.report import pages

tight = functools.cache(pages.tight)
KEY = "0123456789ab"


@functools.cache
def full_step(number: int) -> FullStep:
    """Return a step in full: that of the simulator, taken as measured, with the summary of step `number`."""
    made, problem = tight()
    row = StudyRow(name="", what="", budget_bytes=None)
    full = planned_row(row, made, problem.graph, problem.cluster, problem.measured).full
    assert full is not None
    record = replace(simulate(problem.graph, made, problem.cluster, problem.measured), origin=Origin.MEASURED)
    return replace(full, record=record, summary=replace(full.summary, step=number, plans=(KEY,)))


def written(folder: Path, losses: list[float], *, has_plan: bool = True, ranks: int = 1) -> Path:
    """Write the folder of a run whose steps noted `losses`, the last of them in full."""
    folder.mkdir()
    full = full_step(len(losses) - 1)
    write_meta(folder, TraceMeta(model="Net", num_ranks=ranks, device="cpu", versions={"torch": "2.13.0"}))
    for rank in range(ranks):
        # The other ranks work longer, and nobody waits.
        summaries = [
            replace(
                full.summary,
                step=step,
                rank=rank,
                notes={"train_loss": loss},
                period_s=full.summary.period_s * (1 + rank),
            )
            for step, loss in enumerate(losses)
        ]
        steps_path(folder, rank).write_text("".join(f"{summary_to_json(each)}\n" for each in summaries))
    write_full_step(folder, replace(full, live=None))
    if has_plan:
        made, problem = tight()
        elixir.save_plan(made, plan_path(folder, KEY), question_of(problem, Options()))
    return folder


@pytest.fixture(autouse=True)
def without_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "can_draw", lambda: False)


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, args)])


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def test_the_page_of_a_run_shows_its_plan_its_steps_and_its_losses_without_a_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(tmp_path / "trace", [3.0, 2.5, 2.25])
    monkeypatch.setattr("torch.export.export", pytest.fail)
    monkeypatch.setattr("torch.compile", pytest.fail)
    done = run(folder)
    assert done.exit_code == 0, done.output
    page = text_of(folder / "report.html")
    made, _ = tight()
    assert f"peak {format_bytes(made.prediction.device_peak_bytes)}" in page
    assert "Planned and measured" in page
    full = full_step(2)
    assert f'<td>0 to 2</td><td data-value="{full.summary.period_s!r}">{format_s(full.summary.period_s)}' in page
    assert "2.25 at step 2" in page
    assert "rank 0, step 2 in full" in page
    data = json.loads(run(folder, "--json").stdout)
    assert data["run"]["steps"]["0"]["loss"] == [3.0, 2.5, 2.25]
    assert data["device_peak_bytes"] == made.prediction.device_peak_bytes


def test_findings_of_a_run_see_the_steps_of_all_ranks(tmp_path: Path) -> None:
    folder = written(tmp_path / "trace", [3.0, 2.5], ranks=3)
    assert run(folder).exit_code == 0
    assert "F11 rank 2 works 50% longer than the median rank" in text_of(folder / "report.html")


def test_losses_of_two_runs_are_compared_bit_for_bit(tmp_path: Path) -> None:
    first = written(tmp_path / "first", [3.0, 2.5, 2.25])
    same = written(tmp_path / "same", [3.0, 2.5, 2.25], has_plan=False)
    other = written(tmp_path / "other", [3.0, 2.5, 2.2500000000000004])
    assert run(first, same, other).exit_code == 0
    page = text_of(first / "report.html")
    assert "The losses of first and same are equal in every bit over 3 steps." in page
    assert "The losses of first and other differ first at step 2: 2.25 and 2.2500000000000004." in page


def test_a_run_without_its_plan_has_a_page_of_its_steps(tmp_path: Path) -> None:
    folder = written(tmp_path / "trace", [3.0], has_plan=False)
    assert run(folder, "-o", tmp_path / "own.html").exit_code == 0
    page = text_of(tmp_path / "own.html")
    assert "Observed steps" in page
    assert "need the plan with its question" in page
    assert json.loads(run(folder, "--json").stdout)["steps"]["0"]["step"] == [0]


def test_the_page_of_a_study_is_drawn_again_from_its_figures(tmp_path: Path) -> None:
    made, problem = tight()
    empty = StudyRow(name="device", what="everything on the device", budget_bytes=None)
    row = planned_row(empty, made, problem.graph, problem.cluster, problem.measured)
    study = Study(model="Net", command="", cluster=problem.cluster, rows=(replace(row, losses=(3.0, 2.5)),))
    (tmp_path / "study.json").write_text(study_to_json(study))
    assert run(tmp_path).exit_code == 0
    assert "study of Net" in text_of(tmp_path / "study.html")
    assert json.loads(run(tmp_path, "--json").stdout)["rows"][0]["losses"] == [3.0, 2.5]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["empty"], "expected study.json of a study, or meta.json of an observed run, got 'neither'"),
        (["bare", "--figure", "memory"], "a plan with its question"),
        (["bare", "--curve", "3"], "a plan with its question"),
        (["bare", "empty"], "neither"),
        (["bare", "bare/meta.json"], "folders of other observed runs"),
        (["torn"], "record-r0-0.json.gz"),
        (["unstarted"], "at least one step"),
    ],
)
def test_a_mistake_is_one_line_on_stderr(args: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    written(tmp_path / "bare", [1.0], has_plan=False)
    torn = written(tmp_path / "torn", [1.0]) / "record-r0-0.json.gz"
    torn.write_bytes(gzip.compress(b"{}")[:-9])
    steps_path(written(tmp_path / "unstarted", [1.0]), 0).write_text("")
    done = run(*[arg if arg.startswith("-") or arg.isdecimal() or arg == "memory" else tmp_path / arg for arg in args])
    assert (done.exit_code, done.stdout) == (1, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_many_steps_are_drawn_as_medians_of_neighbours() -> None:
    points = tuple((step, float(step % 3)) for step in range(1000))
    drawn = thinned(points)
    assert len(drawn) == 250
    assert drawn[:2] == ((0, 0.5), (4, 1.0))
    assert thinned(points[:300]) == points[:300]
