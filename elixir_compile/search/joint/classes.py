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

from elixir_compile.base.errors import InvalidPlan
from elixir_compile.base.units import format_bytes
from elixir_compile.ir import BucketId, Placement, Plan, Prediction, RankClass, Record, Tier, Update
from elixir_compile.search.joint.loss import is_pressed
from elixir_compile.search.joint.narrower_state import plans_with_fewest_narrower
from elixir_compile.search.problem import Problem
from elixir_compile.search.skeleton import Use, common_sequence, following, released_by
from elixir_compile.search.space.buckets import form_buckets, with_larger_buckets
from elixir_compile.step.collectives import Collective
from elixir_compile.step.formula import peak_formula
from elixir_compile.step.laps import micro_batches_of
from elixir_compile.step.prediction import prediction_of
from elixir_compile.step.seconds import RankStep, busy_share, simulate_ranks
from elixir_compile.step.timeline import plan_timeline
from elixir_compile.step.verify import verify

_MOST_PASSES = 4
"""Searches of a class. Buckets that are released once stay released, so passes come to an end; two are usual."""

Each = Callable[[Callable[[int], Plan]], Sequence[Plan]]
"""Calls the function with the number of each class, and returns the plan of each."""


def plan_classes(
    problems: Sequence[Problem],
    members: Sequence[Sequence[int]],
    search: Callable[[Problem], Plan],
    each: Each,
) -> tuple[Plan, ...]:
    """Return the plan of each class of ranks, verified; `problems` has the problem of a rank of each class.

    `members` are the ranks of each class. `each` calls `search`, perhaps on several machines. The predicted seconds are
    those of all ranks simulated together, and the bound is the highest of any class: no rank is faster than the last.

    If a class has no plan, and the problems allow narrower moments, some have them: see `narrower_state`.

    Raises NoFeasiblePlan if a class has no plan, and InvalidPlan if the plans cannot follow one sequence of collectives
    within their budgets.
    """
    return tuple(
        plans_with_fewest_narrower(problems, lambda variants: _plan_in_one_order(variants, members, search, each))
    )


def _plan_in_one_order(
    problems: Sequence[Problem],
    members: Sequence[Sequence[int]],
    search: Callable[[Problem], Plan],
    each: Each,
) -> tuple[Plan, ...]:
    """Return the plans of `plan_classes` with the moments that `problems` have."""
    asked = [with_buckets_formed(problem) for problem in problems]
    plans = list(each(lambda number: search(asked[number])))
    for _ in range(_MOST_PASSES - 1):
        released = frozenset[BucketId]().union(*map(released_by, plans))
        behind = [number for number, plan in enumerate(plans) if released_by(plan) != released]
        if not behind:
            break
        plans = _searched_again(asked, plans, released, behind, search, each)
    return _as_predicted(asked, members, _in_one_order(asked, plans))


def with_buckets_formed(problem: Problem) -> Problem:
    """Return `problem` with all of its buckets in force, the new ones on the device and resident.

    The buckets depend on the parameters alone, so they are equal for all ranks. All calls of a step are treated alike.
    """
    own = problem.buckets
    formed = form_buckets(with_larger_buckets(problem) or problem)
    new = [bucket for bucket in formed if bucket not in own]
    there = [Placement(bucket=bucket.id, param=Tier.DEVICE, optim=Tier.DEVICE, resident=True) for bucket in new]
    placements = (*problem.placements, *there)
    return replace(problem, buckets=(*own, *new), placements=placements, may_have_lean_calls=False)


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


def _in_one_order(asked: Sequence[Problem], plans: Sequence[Plan]) -> list[Plan]:
    """Return `plans` with their collectives in one order, and updates at one time."""
    sequence = common_sequence(plans)
    released = frozenset[BucketId]().union(*map(released_by, plans))
    updates = {plan.update for plan in plans}
    update = Update.ACROSS_STEPS if Update.ACROSS_STEPS in updates else plans[0].update
    return [
        _followed(problem, replace(plan, update=update), sequence, released)
        for problem, plan in zip(asked, plans, strict=True)
    ]


def _followed(
    problem: Problem, plan: Plan, sequence: Sequence[Collective | Use], released: frozenset[BucketId]
) -> Plan:
    """Return `plan` with its collectives in the order of `sequence`.

    Raises InvalidPlan if it cannot follow within the budget of `problem`.
    """
    least_bytes: int | None = None
    for made in following(plan, sequence, released):
        nbytes = plan_timeline(problem.graph, made).peak.nbytes
        if nbytes <= plan.budget_bytes:
            return made
        least_bytes = nbytes if least_bytes is None else min(least_bytes, nbytes)
    if least_bytes is None:
        raise InvalidPlan(f"the collectives of rank {plan.rank} cannot come in the order of the other ranks.")
    raise InvalidPlan(
        f"rank {plan.rank} needs {format_bytes(least_bytes)} to issue its collectives in the order of the other ranks, "
        f"and has {format_bytes(plan.budget_bytes)}."
    )


def _class_of(ranks: Sequence[int], problem: Problem, plan: Plan, prediction: Prediction, record: Record) -> RankClass:
    """Return the class of `ranks`, all with the same `plan`; `problem` is the problem of a single rank."""
    share = problem.shares[ranks[0]] if problem.shares else None
    return RankClass(
        ranks=tuple(ranks),
        device=problem.cluster.device.name,
        budget_bytes=plan.budget_bytes,
        device_peak_bytes=prediction.device_peak_bytes,
        host_peak_bytes=prediction.host_peak_bytes,
        busy_share=busy_share(record),
        is_pressed=is_pressed(plan),
        num_rows=problem.graph.batch if share is None else share.num_rows,
        micro_batches=micro_batches_of(plan),
        state=1 / problem.num_shards if share is None else share.state,
    )


def _as_predicted(
    asked: Sequence[Problem], members: Sequence[Sequence[int]], plans: Sequence[Plan]
) -> tuple[Plan, ...]:
    """Return `plans`, verified, with the predictions of all ranks simulated together."""
    records = simulate_ranks(
        [
            RankStep(graph=problem.graph, plan=plan, cluster=problem.cluster, measured=problem.measured)
            for problem, plan in zip(asked, plans, strict=True)
        ]
    )
    peaks = [plan_timeline(problem.graph, plan).peak for problem, plan in zip(asked, plans, strict=True)]
    predictions = [prediction_of(record, peak.nbytes, peak.op) for record, peak in zip(records, peaks, strict=True)]
    lines = zip(members, asked, plans, predictions, records, strict=True)
    classes = tuple(_class_of(*line) for line in lines)
    bounds_s = [plan.bound_s for plan in plans if plan.bound_s is not None]
    found: list[Plan] = []
    for problem, plan, prediction in zip(asked, plans, predictions, strict=True):
        formula = peak_formula(problem.graph, plan)
        bound_s = max(bounds_s, default=None)
        bound_s = None if bound_s is None else min(bound_s, prediction.step_s)
        made = replace(plan, prediction=prediction, formula=formula, bound_s=bound_s, classes=classes)
        verify(problem.graph, made)
        found.append(made)
    return tuple(found)
