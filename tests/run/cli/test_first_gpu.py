"""`benchmarks/first_gpu.sh` on a machine without a GPU: what it runs, resumes and reports."""

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
