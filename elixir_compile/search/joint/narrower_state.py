"""Plan with exact moments if any plan of them fits; else choose narrower moments for the fewest bytes of parameters.

    exact      needs 24.3 GiB of host memory, budget 22 GiB: 2.3 GiB too many
    narrower   bfloat16 saves 4 bytes for each parameter: the largest parameters that save 2.3 GiB together

Disk, recomputation, micro-batches and every other way to fit come first: they change no bit of the result.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.base.units import format_bytes
from elixir_compile.ir import Decision, Plan, StorageId
from elixir_compile.search.problem import Problem

Search = Callable[[Sequence[Problem]], Sequence[Plan]]
"""Plans the problem of a rank of each class of ranks. Raises NoFeasiblePlan if a class has no plan."""
_MOST_SEARCHES = 5
"""Searches with the narrower moments of some parameters, before all of them get narrower moments."""
_SPARE = 1.02
"""The bytes to be saved, over those that were missing: buckets are padded, and the planner has other buckets then."""


def plans_with_fewest_narrower(problems: Sequence[Problem], search: Search) -> Sequence[Plan]:
    """Return the plans of `search` for `problems`, with narrower moments for as few bytes of parameters as fit.

    `problems` are those of the classes of ranks of a step, one if all ranks follow one plan. All classes have the same
    moments. Raises NoFeasiblePlan if no plan fits even if all moments are narrower; the error names the bytes of that
    plan.
    """
    try:
        return search(problems)
    except NoFeasiblePlan as error:
        missing = error.renewed()
    saved_bytes = _savings(problems[0])
    if not saved_bytes:
        raise missing.renewed()
    order = sorted(saved_bytes, key=lambda param: (-saved_bytes[param], param))
    share = min(_share(problem) for problem in problems)
    wanted_bytes, exact = 0, missing
    for _ in range(_MOST_SEARCHES):
        wanted_bytes += int(_SPARE / share * (missing.needed_bytes - missing.budget_bytes))
        chosen = _fewest(order, saved_bytes, wanted_bytes)
        if len(chosen) == len(order):
            break
        try:
            return _narrower(problems, chosen, search, exact)
        except NoFeasiblePlan as error:
            missing = error.renewed()
    return _narrower(problems, order, search, exact)


def _share(problem: Problem) -> float:
    """Return the part of all state that the rank of `problem` has; of a rank without state, that of an equal part."""
    own = problem.state[problem.rank] if problem.state else 0.0
    return own or 1 / problem.num_shards


def _narrower(
    problems: Sequence[Problem], params: Collection[StorageId], search: Search, exact: NoFeasiblePlan
) -> Sequence[Plan]:
    """Return the plans of `search` with narrower moments for `params`; `exact` says why exact ones do not fit."""
    plans = search([with_narrower(problem, params) for problem in problems])
    return [_with_decisions(problem, plan, exact) for problem, plan in zip(problems, plans, strict=True)]


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
    # With more memory fewer moments are narrower, and the bound was proved for the narrower ones.
    return replace(made, decisions=(*made.decisions, *decisions), gib_bound_s=None)
