"""The pytest plugin in test runs of its own: the page of the docs, goldens, and what it loads."""

import importlib
import re
import tomllib
from pathlib import Path

import pytest
import torch

from elixir_compile.tools.testing.fixture import MemorySchedules

ROOT = Path(__file__).parents[3]
PLUGIN = "elixir_compile.testing.plugin"

GOLDEN_TEST = """
import torch
from torch import nn

def make():
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, n), nn.GELU(), nn.Linear(n, 16)) for n in WIDTHS))

def test_memory(memory_schedule):
    batch = torch.empty(8, 16)
    schedule = memory_schedule(make, batch, hardware="a100-40g", planner="keep_all", inner="aot_eager")
    schedule.assert_matches_golden("tiny")
"""


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """Load all modules that a plan needs: pytester forgets those that its runs import, and torch registers once."""
    plans = MemorySchedules(test_file=Path(__file__), writes_goldens=False)
    plans(torch.nn.Linear(4, 4), torch.empty(2, 4), hardware="a100-40g", planner="keep_all", inner="aot_eager")


def run_pytest(pytester: pytest.Pytester, *args: str) -> pytest.RunResult:
    return pytester.runpytest_inprocess("-p", PLUGIN, "-p", "no:cacheprovider", *args)


def write_test(pytester: pytest.Pytester, widths: str) -> None:
    pytester.makepyfile(test_of_a_user=f"WIDTHS = {widths}\n{GOLDEN_TEST}")


def test_the_block_of_the_page_is_a_test_file_that_passes(pytester: pytest.Pytester) -> None:
    page = (ROOT / "docs" / "testing-memory.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    pytester.makepyfile(test_of_the_page=block)
    run_pytest(pytester).assert_outcomes(passed=1)


def test_a_golden_is_written_on_request_and_says_which_layer_grew(pytester: pytest.Pytester) -> None:
    write_test(pytester, "(32, 32)")
    run_pytest(pytester).stdout.fnmatch_lines(["*there is no golden *test_of_a_user.tiny.txt*--elixir-update*"])
    run_pytest(pytester, "--elixir-update").assert_outcomes(passed=1)
    golden = pytester.path / "goldens" / "test_of_a_user.tiny.txt"
    assert "  0 saved 2048\n" in golden.read_text(encoding="utf-8")
    run_pytest(pytester).assert_outcomes(passed=1)

    write_test(pytester, "(32, 48)")
    failed = run_pytest(pytester)
    failed.assert_outcomes(failed=1)
    # Under `CI` pytest repeats the whole message in its summary; lines that begin with `E` are the failure's own.
    (grown,) = [line for line in failed.outlines if line.startswith("E ") and " grew by " in line]
    # 16 more columns: weights of 16 x 16 in and out and 16 biases, as parameter, gradient and two moments.
    assert re.search(r"E +1 grew by .* at the peak \(.*moment \+4.1 KiB", grown)
    assert not any(re.search(r"E +0 (grew|shrank)", line) for line in failed.outlines)
    assert "def assert_matches_golden" not in failed.stdout.str(), "the traceback ends in the test"


def test_a_test_run_that_does_not_use_the_fixture_loads_neither_torch_nor_numpy(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        f"""
        import sys

        def test_plain():
            assert "{PLUGIN}" in sys.modules
            assert not {{"torch", "numpy", "scipy", "sympy", "transformers"}} & set(sys.modules)
        """
    )
    pytester.runpytest_subprocess("-p", PLUGIN, "-p", "no:cacheprovider").assert_outcomes(passed=1)


def test_the_entry_point_names_the_plugin() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    points = settings["project"]["entry-points"]["pytest11"]
    # `-p` of the same name then loads it once, whether or not the entry point is installed.
    assert points == {PLUGIN: PLUGIN}
    assert importlib.import_module(PLUGIN).memory_schedule


@pytest.mark.slow
def test_workers_of_xdist_plan_and_write_goldens(pytester: pytest.Pytester) -> None:
    """30 s to two minutes: two workers load torch, twice."""
    for number in range(2):
        pytester.makepyfile(**{f"test_{number}": f"WIDTHS = (32, {16 + number})\n{GOLDEN_TEST}"})
    args = ("-p", PLUGIN, "-n", "2", "--dist", "loadfile")
    pytester.runpytest_subprocess(*args, "--elixir-update").assert_outcomes(passed=2)
    assert sorted(path.name for path in (pytester.path / "goldens").iterdir()) == [
        f"test_{number}.tiny.txt" for number in range(2)
    ]
    pytester.runpytest_subprocess(*args).assert_outcomes(passed=2)
