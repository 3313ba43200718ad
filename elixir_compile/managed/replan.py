"""From a plan and the measured seconds of its first steps to the plan of all later steps.

    measured steps -> corrected prices -> plan simulated again -> off by more than 10 % -> new search -> better by 1 %

The simulation with measured seconds is compared with the plan's prediction. Both count the lanes alone: the rest of a
step's period (autograd, the caller's own code) is the same under every plan. A bucket may move in either direction:
parameters, gradients and optimizer state follow their placement to the host and back.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from elixir_compile.errors import NoFeasiblePlan
from elixir_compile.ir import Placement, Plan, Saving, Tier, Verb
from elixir_compile.managed.correction import TOLERANCE, Correction
from elixir_compile.search import Problem
from elixir_compile.simulate import prediction_of, simulate
from elixir_compile.units import format_bytes, format_s

_GAIN = 0.01
"""Share of the step that a new plan must save before it is worth compiling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The plan to follow after the first steps."""

    plan: Plan
    is_new: bool
    """Whether it is another plan, so that programs must be written again; else only its prediction is new."""
    line: str
    """The log line that tells the user the measured step and the change."""


def replan(
    problem: Problem, plan: Plan, correction: Correction, search: Callable[[Problem], Plan] | None
) -> Outcome | None:
    """Return the plan to follow from now on; None if the prediction of `plan` was right.

    `problem` is the problem of `plan`. `search` answers it again at the corrected prices. If `search` is
    None, or if `plan` moves nothing and still fits, the plan stays and gets the corrected prediction.
    """
    corrected = correction.applied_to(problem)
    repriced = _repriced(corrected, plan, correction.excess_bytes)
    was_s, planned_s = repriced.prediction.step_s, plan.prediction.step_s
    if abs(was_s - planned_s) <= TOLERANCE * planned_s and not correction.excess_bytes:
        return None
    facts = f"step was {format_s(was_s)}, planned {format_s(planned_s)}; regions measured; "
    if correction.excess_bytes:
        facts = f"peak was {format_bytes(correction.excess_bytes)} above the plan; {facts}"
    has_to_move = repriced.prediction.device_peak_bytes > plan.budget_bytes
    if search is None or not (has_to_move or _moves_anything(plan)):
        return Outcome(plan=repriced, is_new=False, line=f"measured: {facts}nothing to plan again")
    better = _searched(corrected, plan, search)
    if better is None or not (has_to_move or better.prediction.step_s < (1 - _GAIN) * was_s):
        return Outcome(plan=repriced, is_new=False, line=f"measured: {facts}no better plan found")
    num_moved = _num_moved(plan, better)
    moved = f"{num_moved} {'bucket' if num_moved == 1 else 'buckets'} moved"
    num_changed = _num_changed(plan, better)
    moved += f", {num_changed} groups of activations treated otherwise" if num_changed else ""
    line = f"replanned: {facts}{moved}, planned step now {format_s(better.prediction.step_s)}"
    return Outcome(plan=better, is_new=True, line=line)


def _repriced(corrected: Problem, plan: Plan, excess_bytes: int) -> Plan:
    """Return `plan` with the prediction at the corrected prices, and without its bound, proved at other prices."""
    record = simulate(corrected.graph, plan, corrected.cluster, corrected.measured)
    peak_bytes = plan.prediction.device_peak_bytes + excess_bytes
    prediction = prediction_of(record, peak_bytes, plan.prediction.device_peak_at)
    return replace(
        plan,
        base_bytes=plan.base_bytes + excess_bytes,
        prediction=prediction,
        bound_s=None,
        binding=(),
        gib_saves_s=None,
        formula=f"{plan.formula} + {excess_bytes}" if plan.formula and excess_bytes else plan.formula,
    )


def _moves_anything(plan: Plan) -> bool:
    verbs = {action.verb for schedule in plan.schedules for action in schedule.actions}
    is_all_on_device = all(placement.optim is Tier.DEVICE for placement in plan.placements)
    is_all_kept = all(group.saving is Saving.KEEP for group in plan.activations)
    return not (is_all_on_device and is_all_kept and verbs.isdisjoint({Verb.GATHER, Verb.OFFLOAD}))


def with_buckets_free(problem: Problem, plan: Plan) -> Problem:
    """Return `problem`, which `plan` answers, with the placements of all buckets of `plan` open."""
    ours = {bucket.id for bucket in plan.buckets}
    kept = {placement.bucket: placement for placement in problem.placements}
    buckets = {bucket.id: bucket for bucket in (*problem.buckets, *plan.buckets)}
    placements = tuple(
        Placement(bucket=name, param=Tier.DEVICE, optim=Tier.DEVICE, resident=True) if name in ours else kept[name]
        for name in buckets
    )
    return replace(problem, buckets=tuple(buckets.values()), placements=placements)


def _searched(corrected: Problem, plan: Plan, search: Callable[[Problem], Plan]) -> Plan | None:
    """Return a new plan in which every bucket of `plan` may move; None if no plan fits at the corrected prices."""
    try:
        return search(with_buckets_free(corrected, plan))
    except NoFeasiblePlan:
        return None


def _num_changed(before: Plan, after: Plan) -> int:
    """Return the number of groups of activations treated differently by the two plans."""
    then, now = (
        {(g.id, g.saving) for g in plan.activations if g.saving is not Saving.KEEP} for plan in (before, after)
    )
    return len({group for group, _ in then ^ now})


def _num_moved(before: Plan, after: Plan) -> int:
    homes = {placement.bucket: placement for placement in before.placements}
    return sum(homes.get(placement.bucket) != placement for placement in after.placements)
