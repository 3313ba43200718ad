"""Choose the number of micro-batches of a step together with its plan.

The step is first planned on the whole batch. If this plan keeps everything on the device, micro-batches gain nothing.
If it moves or drops something, or if nothing fits, numbers that divide the batch are searched: the two smallest that
fit, then larger ones as long as the step gets shorter. Micro-batches have to save 1 % of the step to be taken. Under
the option micro_batches="fit", numbers are searched only if nothing fits.

The bound of the result holds for every plan in any of the numbers: it is the lowest of the bounds of all numbers that
fit, and of those that were not searched, the relaxed optimum counts.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.base.options import Options
from elixir_compile.base.units import format_bytes, format_s
from elixir_compile.ir import Decision, Phase, Plan
from elixir_compile.ir.rows import LEAST_ROWS
from elixir_compile.search.best import relaxed_bound_s, with_gib_bound_of
from elixir_compile.search.clock import Clock, Deadline
from elixir_compile.search.evaluator import Evaluator
from elixir_compile.search.heuristics.rules import RULES
from elixir_compile.search.joint.loss import is_pressed
from elixir_compile.search.joint.narrower_state import plans_with_fewest_narrower
from elixir_compile.search.limits import leanest
from elixir_compile.search.planner import plan
from elixir_compile.search.problem import Problem
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.step.laps import micro_batches_of

MICRO_BATCHES = "micro_batches"
"""The subject of the decision about the number of micro-batches."""
_ASKED = "the option micro_batches says so"
"""The reason of a number that the user asks for."""
_MOST = 64
"""The largest number of micro-batches that is tried."""
_GAIN = 0.01
"""Share of the step that micro-batches must save to be taken."""
_NUM_FIRST = 2
"""So many numbers that fit are searched in any case."""
Search = Callable[[Problem, float], Plan]
"""Plans a problem within so many seconds. Raises NoFeasiblePlan."""


def plan_as_asked(problem: Problem, options: Options) -> Plan:
    """Return the plan for `problem` by the planner of `options`, which also say in how many micro-batches.

    If no plan fits, and the problem allows narrower moments, some have them: see `narrower_state`. Raises the errors of
    `plan`.
    """
    [made] = plans_with_fewest_narrower([problem], lambda variants: [_plan_exact(each, options) for each in variants])
    return made


def _plan_exact(problem: Problem, options: Options) -> Plan:
    def search(variant: Problem, timeout_s: float) -> Plan:
        return plan(variant, options.planner, timeout_s)

    # The fixed rules are there for comparison, so they change nothing that they do not name.
    is_last_resort = options.micro_batches == "fit" and options.planner not in RULES
    if problem.micro_batches == 1 and (is_last_resort or options.micro_batches == "auto"):
        return plan_divided(problem, search, options.search_timeout, is_last_resort=is_last_resort)
    made = search(problem, options.search_timeout)
    if problem.micro_batches == 1:
        return made
    is_asked = options.micro_batches == problem.micro_batches
    return _with_decision(made, problem, _ASKED if is_asked else "the plan before it has as many", ())


def _with_decision(made: Plan, problem: Problem, because: str, rejected: tuple[str, ...]) -> Plan:
    """Return `made`, a plan in micro-batches, with the decision for their number."""
    number = micro_batches_of(made)
    graph = problem.graph
    choice = f"{number} of {graph.batch // number} rows"
    if graph.batch_size:
        choice = f"at most {number} for {graph.batch} rows"
    decision = Decision(subject=MICRO_BATCHES, choice=choice, because=because, rejected=rejected)
    return replace(made, decisions=(*made.decisions, decision))


def chosen_number(plan: Plan) -> Decision | None:
    """Return the decision about the number of micro-batches of `plan`; None if it is 1, or the number of the option."""
    if micro_batches_of(plan) == 1:
        return None
    found = (decision for decision in plan.decisions if decision.subject == MICRO_BATCHES)
    return next((decision for decision in found if decision.because != _ASKED), None)


def plan_divided(problem: Problem, search: Search, timeout_s: float, *, is_last_resort: bool = False) -> Plan:
    """Return the plan of `search` for `problem` on the whole batch, or in micro-batches if their plan is better.

    If micro-batches are only the last resort (`is_last_resort`), any plan on the whole batch is better. All searches
    together end after about `timeout_s` seconds. Raises the NoFeasiblePlan of the number that needs the fewest bytes if
    nothing fits.
    """
    clock = Clock()
    whole: Plan | NoFeasiblePlan
    try:
        whole = search(problem, timeout_s)
    except NoFeasiblePlan as error:
        if error.memory != "device":
            raise
        whole = error.renewed()
    if isinstance(whole, Plan) and (is_last_resort or not is_pressed(whole)):
        return whole
    numbers = candidates(problem)
    if not numbers:
        if isinstance(whole, NoFeasiblePlan):
            raise whole.renewed()
        return whole
    evaluators = {number: Evaluator(gather_facts(replace(problem, micro_batches=number))) for number in numbers}
    floors = {number: leanest(evaluator).floor_bytes for number, evaluator in evaluators.items()}
    fitting = [number for number in numbers if floors[number] <= problem.budget_bytes]
    plans: dict[int, Plan] = {}
    for number in fitting:
        is_shorter = len(plans) < _NUM_FIRST or _is_falling(plans)
        if not is_shorter or (plans and clock.spent_s > timeout_s):
            break
        try:
            plans[number] = search(replace(problem, micro_batches=number), max(1.0, timeout_s - clock.spent_s))
        except NoFeasiblePlan:
            continue
    if plans:
        unsearched = [evaluators[number] for number in fitting if number not in plans]
        bound_s = _bound_s(whole, plans, unsearched, clock.until(timeout_s + 1.0))
        best = _best(problem, whole, plans, floors, bound_s)
        # With more memory other numbers fit, and the whole batch at once.
        others = [evaluator for number, evaluator in evaluators.items() if number not in plans]
        others += [] if isinstance(whole, Plan) else [Evaluator(gather_facts(problem))]
        return with_gib_bound_of(best, others, clock.until(timeout_s + 2.0))
    if isinstance(whole, Plan):
        return whole
    raise _leanest_error(problem, whole, floors, search).renewed()


def candidates(problem: Problem) -> list[int]:
    """Return the numbers of micro-batches to try: of the divisors of the batch from 2 to 64, one in each doubling, a
    power of two if there is one. On several ranks they divide the batch of each. A dynamic number of rows needs no
    divisor. Empty if nothing can be divided, or if several ranks have a dynamic number of rows each."""
    graph = problem.graph
    is_training = any(op.phase is Phase.UPDATE for op in graph.ops)
    if not is_training or (graph.batch_size and problem.cluster.num_ranks > 1):
        return []
    rows = graph.batch if problem.common_rows is None else problem.common_rows
    found: list[int] = []
    for power in (2, 4, 8, 16, 32, 64):
        if graph.batch_size:
            found += [power] if power * LEAST_ROWS <= graph.batch else []
            continue
        divisors = [number for number in range(power, 2 * power) if rows % number == 0 and number <= _MOST]
        found += divisors[:1]
    return [number for number in found if replace(problem, micro_batches=number).laps(())]


def _is_falling(plans: dict[int, Plan]) -> bool:
    """Return whether the last of `plans` has the shortest step."""
    steps = [plan.prediction.step_s for plan in plans.values()]
    return steps[-1] == min(steps)


def _best(
    problem: Problem,
    whole: Plan | NoFeasiblePlan,
    plans: dict[int, Plan],
    floors: dict[int, int],
    bound_s: float | None,
) -> Plan:
    """Return the plan with the shortest step, with the decision for it and the bound over all numbers, `bound_s`."""
    chosen = min(plans, key=lambda number: plans[number].prediction.step_s)
    best = plans[chosen]
    searched = [*plans.values(), *([whole] if isinstance(whole, Plan) else [])]
    known = [plan.gib_bound_s for plan in searched if plan.gib_bound_s is not None]
    gib_bound_s = min(known) if len(known) == len(searched) else None
    if isinstance(whole, Plan) and best.prediction.step_s >= whole.prediction.step_s * (1 - _GAIN):
        return replace(whole, bound_s=bound_s if whole.bound_s is not None else None, gib_bound_s=gib_bound_s)
    rejected = tuple(
        _rejected(number, plans.get(number), floor_bytes, best, problem.budget_bytes)
        for number, floor_bytes in floors.items()
        if number != chosen
    )
    best = replace(best, bound_s=None if best.bound_s is None else bound_s, gib_bound_s=gib_bound_s)
    return _with_decision(best, problem, _because(whole, best), rejected)


def _because(whole: Plan | NoFeasiblePlan, best: Plan) -> str:
    if isinstance(whole, NoFeasiblePlan):
        return f"the whole batch at once needs {format_bytes(whole.needed_bytes)}"
    saved_s = whole.prediction.step_s - best.prediction.step_s
    return f"the whole batch at once takes {format_s(saved_s)} longer"


def _rejected(number: int, plan: Plan | None, floor_bytes: int, best: Plan, budget_bytes: int) -> str:
    if floor_bytes > budget_bytes:
        return f"{number}: needs {format_bytes(floor_bytes)}"
    if plan is None:
        return f"{number}: not searched, as smaller numbers were faster"
    return f"{number}: {plan.prediction.step_s / best.prediction.step_s - 1:.1%} longer"


def _bound_s(
    whole: Plan | NoFeasiblePlan, plans: dict[int, Plan], unsearched: Sequence[Evaluator], deadline: Deadline
) -> float | None:
    """Return the lowest bound of all numbers that fit, or None if the bound of one is not known.

    `unsearched` are the evaluators of the numbers that fit and have no plan.
    """
    bounds = [plan.bound_s for plan in plans.values()]
    bounds += [whole.bound_s] if isinstance(whole, Plan) else []
    step_s = min(plan.prediction.step_s for plan in plans.values())
    bounds += [relaxed_bound_s(evaluator, step_s, deadline) for evaluator in unsearched]
    known = [bound_s for bound_s in bounds if bound_s is not None]
    return min(known) if len(known) == len(bounds) else None


def _leanest_error(problem: Problem, whole: NoFeasiblePlan, floors: dict[int, int], search: Search) -> NoFeasiblePlan:
    """Return the error of the number of micro-batches that needs the fewest bytes; `whole` is that of the whole
    batch."""
    number = min(floors, key=lambda key: floors[key])
    if floors[number] >= whole.needed_bytes:
        return whole
    try:
        search(replace(problem, micro_batches=number), 1.0)
    except NoFeasiblePlan as error:
        return error.renewed()
    raise AssertionError(f"{number} micro-batches need {floors[number]} bytes, and a plan was found in fewer")
