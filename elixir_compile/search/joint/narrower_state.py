"""Plan with exact moments if any plan of them fits; else choose narrower moments for the fewest bytes of parameters.

    exact      needs 24.3 GiB of host memory, budget 22 GiB: 2.3 GiB too many
    narrower   bfloat16 saves 4 bytes for each parameter: the largest parameters that save 2.3 GiB together

Disk, recomputation, micro-batches and every other way to fit come first: they change no bit of the result.
"""

from collections.abc import Callable, Collection
from dataclasses import replace

from elixir_compile.errors import NoFeasiblePlan
from elixir_compile.ir import Decision, Plan, StorageId
from elixir_compile.search.problem import Problem
from elixir_compile.units import format_bytes

Search = Callable[[Problem], Plan]
"""Plans a problem. Raises NoFeasiblePlan."""
_MOST_SEARCHES = 5
"""Searches with the narrower moments of some parameters, before all of them get narrower moments."""
_SPARE = 1.02
"""The bytes to be saved, over those that were missing: buckets are padded, and the planner has other buckets then."""


def plan_with_fewest_narrower(problem: Problem, search: Search) -> Plan:
    """Return the plan of `search` for `problem`, with narrower moments for as few bytes of parameters as fit.

    Raises NoFeasiblePlan if no plan fits even if all moments are narrower; the error names the bytes of that plan.
    """
    try:
        return search(problem)
    except NoFeasiblePlan as error:
        missing = error.with_traceback(None)
    saved_bytes = _savings(problem)
    if not saved_bytes:
        raise missing
    order = sorted(saved_bytes, key=lambda param: (-saved_bytes[param], param))
    wanted_bytes, exact = 0, missing
    for _ in range(_MOST_SEARCHES):
        wanted_bytes += int(_SPARE * (missing.needed_bytes - missing.budget_bytes))
        chosen = _fewest(order, saved_bytes, wanted_bytes)
        if len(chosen) == len(order):
            break
        try:
            return _with_decisions(problem, search(with_narrower(problem, chosen)), exact)
        except NoFeasiblePlan as error:
            missing = error.with_traceback(None)
    return _with_decisions(problem, search(with_narrower(problem, order)), exact)


def with_narrower(problem: Problem, params: Collection[StorageId]) -> Problem:
    """Return `problem` with narrower moments for `params`, and no further choice."""
    assert problem.narrower is not None, "only a problem with a choice has narrower moments"
    nbytes = {param: problem.narrower.nbytes[param] for param in params}
    return replace(
        problem,
        state_nbytes={**problem.state_nbytes, **nbytes},
        state_dtypes={**problem.state_dtypes, **dict.fromkeys(params, problem.narrower.dtype)},
        narrower=None,
    )


def _savings(problem: Problem) -> dict[StorageId, int]:
    """Return the bytes that narrower moments of each parameter save; a parameter in a bucket in force keeps its own."""
    if problem.narrower is None:
        return {}
    in_force = {param for bucket in problem.buckets for param in bucket.params}
    saved = {
        param: problem.state_nbytes[param] - nbytes
        for param, nbytes in problem.narrower.nbytes.items()
        if param in problem.state_nbytes and param not in in_force and param not in problem.state_dtypes
    }
    return {param: nbytes for param, nbytes in saved.items() if nbytes > 0}


def _fewest(order: list[StorageId], saved_bytes: dict[StorageId, int], wanted_bytes: int) -> list[StorageId]:
    """Return the first parameters of `order` that save `wanted_bytes` together; all if they save less."""
    chosen: list[StorageId] = []
    for param in order:
        if wanted_bytes <= 0:
            break
        chosen.append(param)
        wanted_bytes -= saved_bytes[param]
    return chosen


def _with_decisions(problem: Problem, made: Plan, exact: NoFeasiblePlan) -> Plan:
    """Return `made` with a decision for each bucket with narrower moments; `exact` says why exact ones do not fit."""
    needed, budget = format_bytes(exact.needed_bytes), format_bytes(exact.budget_bytes)
    why = f"with exact moments the step needs {needed} of {exact.memory} memory, budget {budget}"
    decisions: list[Decision] = []
    for bucket in made.buckets:
        if bucket.state_dtype is None or any(bucket.id == old.id for old in problem.buckets):
            continue
        exact_bytes = sum(problem.state_nbytes[param] for param in bucket.params)
        decisions.append(
            Decision(
                subject=bucket.id,
                choice=f"moments {bucket.state_dtype}",
                because=f"{why}; its state takes {format_bytes(bucket.state_nbytes)} instead of "
                f"{format_bytes(exact_bytes)}",
                saves_bytes=exact_bytes - bucket.state_nbytes,
            )
        )
    return replace(made, decisions=(*made.decisions, *decisions))
