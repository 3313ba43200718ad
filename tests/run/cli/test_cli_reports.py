"""`elixir-compile explain` and `diff`: text or JSON on stdout, a mistake as one line on stderr."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import elixir_compile as elixir
from elixir_compile.base.options import Options
from elixir_compile.ir import Origin, Record, record_to_json
from elixir_compile.search import plan
from elixir_compile.search.question import question_of
from elixir_compile.session.saved import question_path
from elixir_compile.tools.cli.main import app
from tests.pure.problems import tight_problem
from tests.pure.search.test_planner import chain_of, problem_of

PROBLEM = tight_problem()
PLAN = plan(PROBLEM, "greedy")
WIDE = plan(problem_of(chain_of(6)), "greedy")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Return a folder with two plans, a record, half a plan and something else."""
    elixir.save_plan(PLAN, tmp_path / "plan.json")
    elixir.save_plan(WIDE, tmp_path / "wide.json")
    record = Record(origin=Origin.MEASURED, step_s=1.0, device_peak_bytes=1, host_peak_bytes=1)
    (tmp_path / "record.json").write_text(record_to_json(record))
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "half.json").write_text(text[: len(text) // 2])
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    elixir.save_plan(PLAN, tmp_path / "torn.json", question_of(PROBLEM, Options()))
    beside = question_path(tmp_path / "torn.json")
    beside.write_bytes(beside.read_bytes()[:100])
    return tmp_path


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def test_help_does_not_load_torch() -> None:
    code = """
import sys
from elixir_compile.tools.cli import main
try:
    main.app(["--help"])
finally:
    assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "export" in done.stdout


def test_explain_prints_the_text_of_the_function(files: Path) -> None:
    assert run("explain", files / "plan.json").stdout == elixir.explain(PLAN) + "\n"
    assert run("explain", files / "plan.json", "p2").stdout == elixir.explain(PLAN, "p2") + "\n"
    found = json.loads(run("explain", files / "plan.json", "b2", "--json").stdout)
    assert found["buckets"][0]["bucket"]["id"] == "b2"


def test_with_its_question_a_plan_is_explained_and_verified_as_with_its_graph(files: Path) -> None:
    elixir.save_plan(PLAN, files / "asked.json", question_of(PROBLEM, Options()))
    for subject in ("b2", PLAN.regions[-1].id, "p2"):
        said = elixir.explain(PLAN, subject, PROBLEM.graph)
        assert said != elixir.explain(PLAN, subject)
        assert run("explain", files / "asked.json", subject).stdout == said + "\n"
    verified = run("verify", files / "asked.json")
    assert (verified.exit_code, "file, question and graph hold" in verified.stdout) == (0, True)
    assert json.loads(run("verify", files / "asked.json", "--json").stdout)["checked"] == "file, question and graph"
    assert "Add --model" in run("verify", files / "plan.json").stdout


def test_a_plan_beside_the_question_of_another_plan_is_refused(files: Path) -> None:
    elixir.save_plan(PLAN, files / "asked.json", question_of(replace(PROBLEM, graph=chain_of(2)), Options()))
    for command in ("explain", "verify"):
        done = run(command, files / "asked.json")
        assert (done.exit_code, done.stdout) == (1, "")
        assert f"expected the question about graph {PLAN.graph}, which asked.json answers" in done.stderr
        assert "got 'graph " in done.stderr


def test_an_illegal_plan_does_not_verify_for_its_question(files: Path) -> None:
    schedule = replace(PLAN.schedules[0], actions=PLAN.schedules[0].actions[:-1])
    elixir.save_plan(replace(PLAN, schedules=(schedule,)), files / "short.json", question_of(PROBLEM, Options()))
    for command in ("verify", "explain"):
        done = run(command, files / "short.json")
        assert (done.exit_code, "<-- here" in done.stderr) == (1, True)
    question_path(files / "short.json").unlink()
    assert run("verify", files / "short.json").exit_code == 0


def test_diff_takes_plans_and_records(files: Path) -> None:
    assert run("diff", files / "plan.json", files / "wide.json").stdout == elixir.diff(PLAN, WIDE) + "\n"
    assert run("diff", files / "plan.json", files / "plan.json").stdout == "the plans are equal\n"
    assert "measured" in run("diff", files / "plan.json", files / "record.json").stdout
    found = json.loads(run("diff", files / "plan.json", files / "record.json", "--json").stdout)
    assert found["comparisons"][0]["what"] == "step_s"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["explain", "plan.json", "b77"], "no bucket, region, parameter, module or activations 'b77'"),
        (["explain", "half.json"], "plan file"),
        (["explain", "binary.json"], "a text file"),
        (["explain", "nowhere.json"], "a file that can be read"),
        (["explain", "record.json"], "expected 'plan'"),
        (["explain", "torn.json"], "question file"),
        (["verify", "torn.json"], "question file"),
        (["diff", "plan.json", "half.json"], "plan file"),
        (["diff", "record.json", "plan.json"], "expected 'plan'"),
        (["diff", "plan.json", "binary.json"], "a text file"),
    ],
)
def test_a_mistake_is_one_line_on_stderr(files: Path, args: list[str], said: str) -> None:
    done = run(args[0], *[files / arg if arg.endswith(".json") else arg for arg in args[1:]])
    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [["explain", "half.json"], ["diff", "plan.json", "half.json"]])
def test_a_mistake_is_a_json_object_with_json(files: Path, command: list[str]) -> None:
    done = run(command[0], *[files / arg for arg in command[1:]], "--json")
    assert done.exit_code == 1
    assert "plan file" in json.loads(done.stdout)["error"]
