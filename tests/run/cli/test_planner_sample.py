"""Shallow models of the planner's grid, planned at full choice, against the ratios in `benchmarks/results`."""

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
MOST_PLAYS, MOST_SOLVES = 600, 200


@pytest.fixture(scope="module")
def grid() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        patch.delitem(sys.modules, "machine", raising=False)
        yield importlib.import_module("planner_full")


def saved(name: str) -> dict[str, Any]:
    """Return what the benchmark wrote."""
    return json.loads((BENCHMARKS / "results" / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.slow), 1])  # 8 and 5 s
def test_ratios_equal_the_saved_table(grid: Any, number: int) -> None:
    """Gap and rules as ratios, work as counts: seconds of another machine are other seconds."""
    model = grid.SMALL[2 * number]
    capture = grid.capture_of(model.model, model.batch, model.layers)
    by_case = {json.dumps(row["case"], sort_keys=True): row for row in saved("planner_small")["rows"]}
    for case in grid.SMALL[2 * number : 2 * number + 2]:
        row = grid.solve(case, grid.problem_from(case, capture))
        assert not grid.failures(row), case.name
        before = by_case[json.dumps(asdict(case), sort_keys=True)]
        assert row.gap == pytest.approx(before["gap"], abs=2e-3), case.name
        assert row.best_rule == pytest.approx(min(before["rules"].values()) / before["step_s"], rel=5e-3), case.name
        assert row.num_plays <= 1.5 * before["num_plays"] < MOST_PLAYS, case.name
        assert row.num_solves <= 1.5 * before["num_solves"] < MOST_SOLVES, case.name


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        ("planner_small", {0.01: 1.0}),
        # The bound has no row for the memory that an early copy takes, so it is far below the plans of the largest
        # models on small devices: GPT-2 20B on an A100 of 40 GB has a gap of 3.9 % with the best integral solution.
        ("planner_full", {0.01: 0.85, 0.02: 0.94}),
    ],
)
def test_saved_plans_are_no_slower_than_rules_and_near_their_bound(name: str, shares: dict[float, float]) -> None:
    """`shares`: by gap, the least share of the planned cases that are within this gap of their bound."""
    planned = [row for row in saved(name)["rows"] if row["step_s"] is not None]
    assert planned
    for row in planned:
        assert row["bound_s"] <= row["step_s"] <= min(row["rules"].values(), default=row["step_s"]) * (1 + 1e-9)
        assert row["bound_s"] <= min(row["rules"].values(), default=row["step_s"])
    for gap, share in shares.items():
        assert sum(row["gap"] <= gap for row in planned) >= share * len(planned), gap


def test_a_run_interrupted_while_writing_a_row_resumes_with_that_row(grid: Any, tmp_path: Path) -> None:
    rows = [grid.Row(case=case, cpu_s=1.0, num_plays=2, num_solves=3) for case in grid.SMALL[:2]]
    whole, torn = (json.dumps(asdict(row)) for row in rows)
    path = tmp_path / "rows"
    path.write_text(f"{whole}\n{torn[:-5]}", encoding="utf-8")
    assert grid.read_rows(path) == {rows[0].case: rows[0]}
    assert path.read_text(encoding="utf-8") == f"{whole}\n"  # the next row begins a line
