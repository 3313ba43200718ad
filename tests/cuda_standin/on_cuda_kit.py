"""`benchmarks/gpu/run.sh`, which asks what only a GPU can answer, to its end: all calls, each question and answer."""

import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

KIT = Path(__file__).parents[2] / "benchmarks" / "gpu"
A_TEST = "tests/gpu/test_cuda.py::test_workspaces_are_the_same_inside_a_capture"
# Copies are late, models tiny, and no question is cut by its limit of seconds.
VARIABLES = {"STEPS_ARGS": "--tiny", "PATIENCE": "30", "TESTS": A_TEST, "WORKERS": "1", "CUDA_STANDIN_POLICY": "1"}

LIVES = {
    "facts": {"torch", "said", "cudnn"},
    "trains": {"gradients_differ", "held", "losses_apart"},
    "compiles": {"gradients_differ", "held", "losses_apart"},
    "pinning": {"is_pinned", "bytes_per_s", "library_bytes", "more_bytes", "attention"},
    "late": {"same"},
    "sanitizer": {"losses"},
}
STEPS = {"params", "step_s", "requested_bytes", "median_s"}
PLANNED = STEPS | {"planned_bytes", "bound_s", "record_s", "lanes_s", "without_waits_s"}
FIGURES = {
    "measure": {"measured", "built_in"},
    "torch": STEPS,
    "half": PLANNED,
    "fsdp2": STEPS,
    "muon_torch": STEPS,
    "coded_torch": STEPS,
    **dict.fromkeys(("as_fsdp2", "third", "all", "masters", "muon", "coded"), PLANNED),
}
"""By question, the names of the facts that its answer has."""


def started(call: str, folder: Path, **variables: str) -> subprocess.Popen[str]:
    """Start a call of the kit."""
    return subprocess.Popen(
        ["sh", str(KIT / "run.sh"), call, "100000", str(folder)],
        env={**os.environ, **VARIABLES, "PYTHON": sys.executable, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def facts_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def page_of(results: Path, target: Path) -> str:
    subprocess.run([sys.executable, str(KIT / "page.py"), str(results), str(target)], check=True)
    return (target / "README.md").read_text(encoding="utf-8")


def assert_answered(folder: Path, questions: Mapping[str, set[str]], said: str) -> None:
    """Check that each question ended well, and that what was packed has all its facts."""
    summary = (folder / "summary.txt").read_text(encoding="utf-8")
    with tarfile.open(folder / "results.tgz") as packed:
        packed.extractall(folder / "sent", filter="data")
    for name, expected in questions.items():
        assert f"{name}: exit code 0" in summary, summary + said
        found = facts_of(folder / "sent" / f"{name}.jsonl")
        assert {"done", *expected} <= {key for fact in found for key in fact}, name
        assert all(fact.get("ok", True) and fact.get("held", True) and fact.get("same", True) for fact in found), name


def test_each_question_of_the_first_call_is_answered(tmp_path: Path) -> None:
    call = started("lives", tmp_path, NEWER_ARGS="-k test_a_large_buffer_that_the_forward_writes_stays")
    said, _ = call.communicate()
    assert_answered(tmp_path, LIVES, said)
    page = page_of(tmp_path / "sent", tmp_path / "page")
    for expected in ("| aot_eager 40% offload |", "| in_backward | bfloat16 | True |", "1 passed, 0 failed"):
        assert expected in page
    assert "sanitizer of streams over three steps: nothing found" in page


def test_each_question_of_the_wide_call_is_answered(tmp_path: Path) -> None:
    call = started("wide", tmp_path, RUNS_ARGS="-k test_pgd", RANDOM_RUNS="1", HELD_STEPS="14")
    said, _ = call.communicate()
    summary = (tmp_path / "summary.txt").read_text(encoding="utf-8")
    for name in ("runs", "random_0", "random_100", "random_others", "held_GPT-2", "held_Llama", "held_mixed"):
        assert f"{name}: exit code 0" in summary, summary + said
    page = page_of(tmp_path / "results", tmp_path / "page")
    for expected in ("1 passed, 0 failed", "3 of 3 have torch's losses", "| GPT-2 |", "| Llama |", "| mixed |"):
        assert expected in page


def test_each_question_of_the_figures_is_answered(tmp_path: Path) -> None:
    call = started("figures", tmp_path)
    said, _ = call.communicate()
    assert_answered(tmp_path, FIGURES, said)
    page = page_of(tmp_path / "sent", tmp_path / "page")
    for name in FIGURES.keys() - {"measure"}:
        assert f"| {name} |" in page
    assert "- measured TFLOP/s: " in page


def test_a_machine_that_is_taken_away_leaves_what_was_known(tmp_path: Path) -> None:
    call = started("figures", tmp_path, STEPS_ARGS="--tiny --steps 1000000", ONLY="torch")
    results = tmp_path / "results"
    while call.poll() is None and not any(fact.get("step") == 2 for fact in whole_facts_of(results / "torch.jsonl")):
        time.sleep(0.2)
    for process in (psutil.Process(call.pid), *psutil.Process(call.pid).children(recursive=True)):
        process.kill()
    said, _ = call.communicate()
    with tarfile.open(tmp_path / "results.tgz") as packed:
        packed.extractall(tmp_path / "sent", filter="data")
    assert "measured" in {key for fact in facts_of(tmp_path / "sent" / "measure.jsonl") for key in fact}, said
    page = page_of(results, tmp_path / "page")
    assert "| torch |" in page
    assert "- measured TFLOP/s: " in page


def whole_facts_of(path: Path) -> list[dict[str, Any]]:
    """Return the facts of a question that is being answered: its last line may be cut."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
