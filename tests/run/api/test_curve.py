"""`tools.tune`: more memory never makes a step longer, and no bound is above the plan that it bounds."""

from dataclasses import replace

import pytest

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.base.options import Options
from elixir_compile.base.units import GIB
from elixir_compile.search import plan
from elixir_compile.search.question import question_of
from elixir_compile.tools.tune import budget_curve
from tests.pure.problems import tight_problem
from tests.pure.search.test_planner import needed_bytes

PROBLEM = tight_problem()
OPTIONS = Options(search_timeout=0.3, plan_cache=False)


def test_the_curve_falls_from_the_least_budget_to_everything_on_the_device() -> None:
    lines: list[str] = []
    points = budget_curve(question_of(PROBLEM, OPTIONS), 3, lines.append)
    assert points[0].budget_bytes == needed_bytes(PROBLEM)
    assert points[-1].budget_bytes == plan(replace(PROBLEM, budget_bytes=GIB), "keep_all").prediction.device_peak_bytes
    assert [point.budget_bytes for point in points] == sorted({point.budget_bytes for point in points})
    assert [point.budget_bytes for point in points if point.is_own] == [PROBLEM.budget_bytes]
    assert len(points) == len(lines) == 4
    steps = [point.step_s for point in points]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < steps[0]
    bounds = [point.bound_s for point in points]
    assert None not in bounds
    assert bounds == sorted(bounds, reverse=True)  # pyright: ignore[reportArgumentType]
    for point in points:
        assert point.bound_s is not None
        assert point.bound_s <= point.step_s * (1 + 1e-9)
        assert point.step_s <= point.planned_s


def test_the_plan_at_a_point_is_that_of_its_budget() -> None:
    asked = question_of(PROBLEM, replace(OPTIONS, planner="greedy"))
    for point in budget_curve(asked, 3):
        made = plan(replace(PROBLEM, budget_bytes=point.budget_bytes), "greedy")
        assert point.planned_s == made.prediction.step_s
        assert point.bound_s == made.bound_s


def test_budgets_for_which_the_host_is_too_small_have_no_point() -> None:
    whole = plan(replace(PROBLEM, budget_bytes=GIB), "greedy").prediction.host_peak_bytes
    roomy = replace(PROBLEM, budget_bytes=GIB, host_budget_bytes=whole)
    points = budget_curve(question_of(roomy, replace(OPTIONS, planner="greedy")), 3)
    assert points
    assert all(point.budget_bytes >= PROBLEM.budget_bytes for point in points)


def test_a_rule_that_fits_nowhere_is_told() -> None:
    tiny = replace(PROBLEM, host_budget_bytes=0, base_bytes=PROBLEM.budget_bytes)
    with pytest.raises(NoFeasiblePlan):
        budget_curve(question_of(replace(tiny, budget_bytes=1), replace(OPTIONS, planner="zero_offload")), 2)
