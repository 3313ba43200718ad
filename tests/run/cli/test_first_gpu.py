"""`benchmarks/first_gpu.sh` on a machine without a GPU: what it runs, resumes and reports."""

import json
import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"

STEPS = """\
import json, sys
from pathlib import Path
if "--list" in sys.argv:
    print("first 5\\nbroken 5\\nlate 1\\nlast 5")
else:
    if "first_gpu_page.py" in sys.argv[1]:
        sys.exit(Path(sys.argv[2], "README.md").write_text("a page") < 1)
    name, path = sys.argv[2], Path(sys.argv[-1])
    with Path(path.parent, "started").open("a") as file:
        file.write(name + "\\n")
    if name == "late":
        import time
        time.sleep(30)
    if name == "broken":
        sys.exit("no such device")
    path.write_text(json.dumps({"step": name}))
"""


def run(results: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script with a Python that answers steps of this test instead of those of `first_gpu.py`."""
    python = results / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {results / "steps.py"} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    (results / "steps.py").write_text(STEPS, encoding="utf-8")
    environment = {**os.environ, "PYTHON": str(python), "RESULTS": str(results)}
    command = ["sh", str(BENCHMARKS / "first_gpu.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_failed_and_a_late_step_stop_no_other_and_run_again(tmp_path: Path) -> None:
    first = run(tmp_path)
    assert first.returncode == 1
    assert (tmp_path / "broken.log").read_text(encoding="utf-8") == "no such device\n"
    assert "FAILED with exit code 124" in first.stdout  # `late`, stopped by its limit
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["first.json", "last.json"]
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == "a page"
    run(tmp_path)
    started = (tmp_path / "started").read_text(encoding="utf-8").split()
    assert started == ["first", "broken", "late", "last", "broken", "late"]


def test_no_step_starts_after_the_given_seconds(tmp_path: Path) -> None:
    assert "not started: last" in run(tmp_path, "--for", "0").stdout
    assert not (tmp_path / "started").exists()


def test_every_step_has_a_limit_and_none_runs_without_a_device() -> None:
    command = [sys.executable, str(BENCHMARKS / "first_gpu.py")]
    listed = subprocess.run([*command, "--list"], capture_output=True, text=True, check=True)
    steps = dict(line.split() for line in listed.stdout.splitlines())
    assert {"versions", "gpu_tests", "budgets"} <= steps.keys()
    assert sum(map(int, steps.values())) <= 3600
    refused = subprocess.run(
        [*command, "versions"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert refused.returncode == 2
    assert "no CUDA device" in refused.stderr


def test_the_page_has_the_figures_of_each_step_and_names_those_without_a_result(tmp_path: Path) -> None:
    figures = {"same_weights": {"in_backward, float32": True}, "output": [f"line {number}" for number in range(9)]}
    result = {"step": "slow_compute", "machine": {"processor": "H100", "commit": "abc"}, "figures": figures}
    (tmp_path / "slow_compute.json").write_text(json.dumps(result), encoding="utf-8")
    subprocess.run([sys.executable, str(BENCHMARKS / "first_gpu_page.py"), str(tmp_path)], check=True)
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "| same_weights, in_backward, float32 | True |" in page
    assert "<details><summary>output</summary>\n\n```text\nline 0\nline 1" in page
    assert "On processor H100, commit abc." in page
    assert "Without a result: second_device, two_ranks, versions, workspaces, gpt2_at_60_percent, attention" in page
