"""`benchmarks/gpu/run.sh` on a machine without a GPU: what it runs, packs and reports, and the page of its results."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

KIT = Path(__file__).parents[3] / "benchmarks" / "gpu"

PYTHON = """\
import json, sys
if sys.argv[1] == "-c":  # pytest
    sys.exit(0)
place = sys.argv.index("--out")
out, question = sys.argv[place + 1 : place + 3]
name = sys.argv[sys.argv.index("--name") + 1] if "--name" in sys.argv else question
with open(f"{out}/{name}.jsonl", "a") as file:
    print(json.dumps({"case": name, "ok": name != "half", "error": "no such device"}), file=file)
sys.exit(name == "half")
"""


def run(folder: Path, call: str, most_s: int) -> str:
    """Run the kit with a Python that answers each question at once; the question `half` fails. Return the summary."""
    answers, python = folder / "answers.py", folder / "python"
    answers.write_text(PYTHON, encoding="utf-8")
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {answers} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    command = ["sh", str(KIT / "run.sh"), call, str(most_s), str(folder)]
    subprocess.run(command, env={**os.environ, "PYTHON": str(python)}, check=True, capture_output=True)
    return (folder / "summary.txt").read_text(encoding="utf-8")


def test_a_question_that_fails_stops_no_other_and_its_error_is_in_the_summary(tmp_path: Path) -> None:
    summary = run(tmp_path, "figures", 600)
    assert "half: exit code 1" in summary
    assert "no such device" in summary
    with tarfile.open(tmp_path / "results.tgz") as packed:
        names = {Path(name).name for name in packed.getnames()}
    assert {"measure.jsonl", "torch.jsonl", "half.jsonl", "masters.jsonl", "half.log"} <= names


def test_no_question_begins_in_the_last_seconds(tmp_path: Path) -> None:
    summary = run(tmp_path, "figures", 7)
    assert "not started: torch" in summary
    assert not list((tmp_path / "results").glob("*.jsonl"))


def test_questions_beside_each_other_are_all_answered(tmp_path: Path) -> None:
    summary = run(tmp_path, "lives", 600)
    for name in ("facts", "trains", "compiles", "pinning", "late", "sanitizer", "tests"):
        assert f"{name}: exit code 0" in summary


def test_the_page_shows_which_budgets_held_and_leaves_tracebacks_out(tmp_path: Path) -> None:
    facts = [
        {"torch": "2.11.0"},
        {"case": "aot_eager 60%", "gradients_differ": 0, "of": 52, "most": 0.0},
        {"case": "aot_eager 60%", "budget_bytes": 600 << 20, "planned_bytes": 590 << 20, "measured_bytes": 601 << 20,
         "held": False, "losses_apart": 1e-7},
        {"case": "aot_eager 40%", "ok": False, "error": "RuntimeError: late", "traceback": "File /secret/steps.py"},
    ]  # fmt: skip
    (tmp_path / "trains.jsonl").write_text("\n".join(map(json.dumps, facts)), encoding="utf-8")
    target = tmp_path / "page"
    command = [sys.executable, str(KIT / "page.py"), str(tmp_path), str(target), "--commit", "abc"]
    subprocess.run(command, check=True)
    page = (target / "README.md").read_text(encoding="utf-8")
    assert "| aot_eager 60% | 600.0 | 590.0 | 601.0 | **no** | 0 of 52, 0.0e+00 | 1.0e-07 |" in page
    assert "- trains: aot_eager 40%: RuntimeError: late" in page
    assert "/secret" not in (target / "facts.json").read_text(encoding="utf-8")
    assert len(json.loads((target / "facts.json").read_text(encoding="utf-8"))["trains"]) == len(facts)


@pytest.mark.slow
@pytest.mark.parametrize("options", [["trains"], ["late"], ["train", "--dtype", "bfloat16", "--steps", "6"]])
def test_the_questions_run_on_a_second_device(options: list[str], tmp_path: Path) -> None:
    start = (
        "import runpy, sys; from tests.device import fakegpu; fakegpu.start(); sys.argv[0] = 'steps.py'; "
        f"runpy.run_path({str(KIT / 'steps.py')!r}, run_name='__main__')"
    )
    command = [sys.executable, "-c", start, *options, "--device", "fakegpu", "--tiny", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=KIT.parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    facts = [json.loads(line) for line in (tmp_path / f"{options[0]}.jsonl").read_text("utf-8").splitlines()]
    assert all(fact.get("held", True) and fact.get("same", True) for fact in facts)
