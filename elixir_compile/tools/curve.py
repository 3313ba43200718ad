"""Ask the question of a plan again under other device budgets: the curve of step time over memory.

```text
  budgets   from the smallest with a plan to that of everything on the device, and the plan's own budget between them
  step_s    a plan for less memory fits more memory too, so the curve never rises with the budget
  bound_s   what no plan within a budget beats, no plan within a smaller budget beats either
```
"""

from collections.abc import Callable
from dataclasses import replace

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.ir import Plan
from elixir_compile.ir.graph import MOST_BYTES
from elixir_compile.search import plan
from elixir_compile.search.question import Question
from elixir_compile.session.cache import plan_for
from elixir_compile.tools.report.figures import CurvePoint


def budget_curve(
    question: Question, num_points: int, report: Callable[[str], None] = lambda line: None
) -> tuple[CurvePoint, ...]:
    """Return the step under `num_points` budgets, in rising order, and under the question's own budget if it is between
    them.

    Each point is a search of its own, unless its plan is in the plan cache. Budgets for which the host has too little
    memory have no point. `report` is called with a line before each search. Raises NoFeasiblePlan if no budget has a
    plan.
    """
    least, most = _least_bytes(question), _most_bytes(question)
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
    return _points(found, own)


def _least_bytes(question: Question) -> int:
    """Return the smallest budget with a plan, or the question's own if the host has too little memory for less."""
    try:
        return _plan_within(question, 0).prediction.device_peak_bytes
    except NoFeasiblePlan as error:
        return error.needed_bytes if error.memory == "device" else question.problem.budget_bytes


def _most_bytes(question: Question) -> int:
    """Return the bytes of everything on the device."""
    roomy = replace(question.problem, budget_bytes=MOST_BYTES)
    return plan(roomy, "keep_all").prediction.device_peak_bytes


def _plan_within(question: Question, budget_bytes: int) -> Plan:
    problem = question.problem
    # Every memory is given, so plans of other runs come from the cache only if their budgets are equal.
    options = replace(question.options, device_memory=budget_bytes, host_memory=problem.host_budget_bytes)
    return plan_for(replace(problem, budget_bytes=budget_bytes), options)


def _points(found: list[tuple[int, Plan]], own: int) -> tuple[CurvePoint, ...]:
    steps = [plan.prediction.step_s for _, plan in found]
    bounds = [plan.bound_s for _, plan in found]
    points: list[CurvePoint] = []
    for at, (budget_bytes, made) in enumerate(found):
        proved = [bound_s for bound_s in bounds[at:] if bound_s is not None]
        points.append(
            CurvePoint(
                budget_bytes=budget_bytes,
                step_s=min(steps[: at + 1]),
                planned_s=made.prediction.step_s,
                bound_s=max(proved, default=None),
                is_own=budget_bytes == own,
            )
        )
    return tuple(points)
