"""Plans for classes of ranks that differ in memory, each its own, with all collectives in one order.

```text
  pass 1      each class searches its own problem, all with the same buckets
  released    what any class wants to release after each window, every class gathers again
  pass 2      each class that kept such a bucket gathered searches again
  sequence    every class moves its collectives into one order (see `search.skeleton`)
```
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from elixir_compile.analysis.collectives import Collective
from elixir_compile.analysis.formula import peak_formula
from elixir_compile.analysis.timeline import plan_timeline
from elixir_compile.analysis.verify import verify
from elixir_compile.errors import InvalidPlan
from elixir_compile.ir import BucketId, Placement, Plan, Tier, Update
from elixir_compile.search.problem import Problem
from elixir_compile.search.skeleton import Use, common_sequence, following, released_by
from elixir_compile.search.space.buckets import form_buckets, with_larger_buckets
from elixir_compile.simulate import prediction_of, simulate
from elixir_compile.units import format_bytes

_MOST_PASSES = 4
"""Searches of a class. Buckets that are released once stay released, so passes come to an end; two are usual."""

Each = Callable[[Callable[[int], Plan]], Sequence[Plan]]
"""Calls the function with the number of each class, and returns the plan of each."""


def plan_classes(problems: Sequence[Problem], search: Callable[[Problem], Plan], each: Each) -> tuple[Plan, ...]:
    """Return the plan of each class of ranks, of which `problems` holds the problem of one rank; all are verified.

    `each` calls `search`, perhaps on several machines. Raises NoFeasiblePlan if a class has no plan, and InvalidPlan if
    the plans cannot follow one sequence of collectives within their budgets.
    """
    asked = [with_buckets_formed(problem) for problem in problems]
    plans = list(each(lambda number: search(asked[number])))
    for _ in range(_MOST_PASSES - 1):
        released = frozenset[BucketId]().union(*map(released_by, plans))
        behind = [number for number, plan in enumerate(plans) if released_by(plan) != released]
        if not behind:
            break
        plans = _searched_again(asked, plans, released, behind, search, each)
    return _in_one_order(asked, plans)


def with_buckets_formed(problem: Problem) -> Problem:
    """Return `problem` with all of its buckets in force, the new ones on the device and resident.

    The buckets depend on the parameters alone, so they are equal for all ranks.
    """
    own = problem.buckets
    formed = form_buckets(with_larger_buckets(problem) or problem)
    new = [bucket for bucket in formed if bucket not in own]
    there = [Placement(bucket=bucket.id, param=Tier.DEVICE, optim=Tier.DEVICE, resident=True) for bucket in new]
    return replace(problem, buckets=(*own, *new), placements=(*problem.placements, *there))


def _searched_again(
    asked: Sequence[Problem],
    plans: Sequence[Plan],
    released: frozenset[BucketId],
    behind: Sequence[int],
    search: Callable[[Problem], Plan],
    each: Each,
) -> list[Plan]:
    """Return `plans`, those of the classes `behind` searched again with the buckets `released`.

    Their bounds are those of the first search, which hold for any plan.
    """

    def again(number: int) -> Plan:
        if number not in behind:
            return plans[number]
        found = search(replace(asked[number], released=released))
        return replace(found, bound_s=plans[number].bound_s)

    return list(each(again))


def _in_one_order(asked: Sequence[Problem], plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """Return `plans` with their collectives in one order, and updates at one time."""
    sequence = common_sequence(plans)
    released = frozenset[BucketId]().union(*map(released_by, plans))
    updates = {plan.update for plan in plans}
    update = Update.ACROSS_STEPS if Update.ACROSS_STEPS in updates else plans[0].update
    return tuple(
        _followed(problem, replace(plan, update=update), sequence, released)
        for problem, plan in zip(asked, plans, strict=True)
    )


def _followed(
    problem: Problem, plan: Plan, sequence: Sequence[Collective | Use], released: frozenset[BucketId]
) -> Plan:
    """Return `plan` with its collectives in the order of `sequence`, verified.

    Raises InvalidPlan if it cannot follow within the budget of `problem`.
    """
    least_bytes: int | None = None
    for made in following(plan, sequence, released):
        peak = plan_timeline(problem.graph, made).peak
        least_bytes = peak.nbytes if least_bytes is None else min(least_bytes, peak.nbytes)
        if peak.nbytes <= plan.budget_bytes:
            record = simulate(problem.graph, made, problem.cluster, problem.measured)
            found = replace(
                made,
                prediction=prediction_of(record, peak.nbytes, peak.op),
                formula=peak_formula(problem.graph, made),
            )
            verify(problem.graph, found)
            return found
    if least_bytes is None:
        raise InvalidPlan(f"the collectives of rank {plan.rank} cannot come in the order of the other ranks.")
    raise InvalidPlan(
        f"rank {plan.rank} needs {format_bytes(least_bytes)} to issue its collectives in the order of the other ranks, "
        f"and has {format_bytes(plan.budget_bytes)}."
    )
