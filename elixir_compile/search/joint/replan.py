"""Decide after the first steps of a plan whether another plan is better, at prices corrected by these steps.

    measured steps -> corrected prices -> plan simulated again -> off by more than 10 % -> new search -> better by 1 %

    run fwd.0         ->  a stretch of ops with its seconds
    gather b1         ->  the rate of the link to the device
    offload b1.grad   ->  the rate of the link to the host
    update b1         ->  the update rate of the memory, device or host, in which the state of b1 lives

A rate is divided by the ratio of all measured seconds to all predicted seconds. A link without transfers gets the ratio
of the other link. A processor without updates keeps its rate, unless device and host are the same cores.

The simulation with measured seconds is compared with the plan's prediction. Both count the lanes alone: the rest of a
step's period (autograd, the caller's own code) is the same under every plan. A bucket may move in either direction:
parameters, gradients and optimizer state follow their placement to the host and back.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import cast

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.base.options import Planner
from elixir_compile.base.units import format_bytes, format_s
from elixir_compile.ir import (
    BucketId,
    BucketRef,
    GradientRef,
    GroupRef,
    Lane,
    Plan,
    Region,
    RegionRef,
    Saving,
    Span,
    Tier,
    Verb,
    label,
)
from elixir_compile.ir.cost import Measured, Stretch
from elixir_compile.ir.hardware import Cluster, Link, Node
from elixir_compile.search.greedy import RULES
from elixir_compile.search.outer import answer, is_worth
from elixir_compile.search.planner import plan as planned
from elixir_compile.search.problem import Problem
from elixir_compile.search.space.buckets import Level, placement_of
from elixir_compile.step.prices import Prices, prices
from elixir_compile.step.seconds import prediction_of, simulate

TOLERANCE = 0.10
"""Share by which a prediction may be wrong before it is corrected."""
_MAX_RATIO = 1e4
"""Largest ratio by which a rate is corrected: the clock is too coarse for larger ones."""
_OnLane = tuple[Lane, str]
"""A lane and a label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Measurements of the profiled steps."""

    period_s: float
    """Median seconds from the beginning of one forward to the beginning of the next."""
    graph_s: float | None = None
    """Mean seconds per step in which regions of the graph ran; None if the steps were only timed."""
    is_shared: bool = False
    """Whether other graphs ran in the same steps. Then the plan stays: it was made with room for theirs."""
    spans: tuple[Span, ...] = ()
    """The spans of all profiled steps; empty if the steps were only timed, or other graphs ran in them."""
    device_peak_bytes: int | None = None
    """Most bytes that tensors asked for at once; None if it is not known, as on a CPU, or while somebody else reads the
    history of the allocator."""
    reserved_bytes: int | None = None
    """Bytes that the allocator held after the steps, with its roundings and gaps; None on a CPU."""
    foreign_bytes: int = 0
    """Device bytes in use before a forward that belong to neither this model nor its optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """The machine as measured in the first steps."""

    cluster: Cluster
    measured: Measured
    excess_bytes: int = 0
    """Device bytes of the measured peak above the planned peak."""

    def applied_to(self, problem: Problem) -> Problem:
        """Return `problem` at the corrected rates; its graph must be the graph whose steps were measured."""
        base_bytes = problem.base_bytes + self.excess_bytes
        return replace(problem, cluster=self.cluster, measured=self.measured, base_bytes=base_bytes)


def correct(problem: Problem, plan: Plan, stats: StepStats) -> Correction | None:
    """Return the corrected machine of `problem` by `stats` of steps under `plan`; None if a region has no span."""
    seconds = _seconds(plan, stats.spans)
    runs = [_run_of(region) for region in plan.regions]
    if any(run not in seconds for run in runs):
        return None
    stretches = tuple(
        Stretch(first=region.first, last=region.last, run_s=seconds[run])
        for region, run in zip(plan.regions, runs, strict=True)
    )
    # The measured peak is in excess if it is over the budget, or more than 10 % above the planned peak. A lower one is
    # no error, as the planned peak is an upper bound. Foreign bytes, as of a second model, are outside the budget.
    excess_bytes, planned_bytes = 0, plan.prediction.device_peak_bytes
    if stats.device_peak_bytes is not None:
        peak_bytes = stats.device_peak_bytes - stats.foreign_bytes
        is_over = peak_bytes > min((1 + TOLERANCE) * planned_bytes, plan.budget_bytes)
        excess_bytes = peak_bytes - planned_bytes if is_over else 0
    return Correction(
        cluster=_corrected(problem, plan, seconds),
        measured=Measured(stretches=stretches, activations=plan.activations, micro_batches=problem.micro_batches),
        excess_bytes=excess_bytes,
    )


def _run_of(region: Region) -> _OnLane:
    return Lane.COMPUTE, label(Verb.RUN, RegionRef(region.id))


def _update_of(bucket: BucketId, tier: Tier) -> _OnLane:
    return Lane.COMPUTE if tier is Tier.DEVICE else Lane.HOST, label(Verb.UPDATE, BucketRef(bucket))


def _seconds(plan: Plan, spans: Iterable[Span]) -> Mapping[_OnLane, float]:
    """Return the median seconds of the spans of each lane and label.

    Seconds of an update are per step: a bucket shared by several parameter groups has several updates in each step.
    """
    found: defaultdict[_OnLane, list[float]] = defaultdict(list)
    for span in spans:
        found[span.lane, span.label].append(span.end_s - span.start_s)
    median_s = {work: statistics.median(seconds) for work, seconds in found.items()}
    num_steps = max(1, *(len(found.get(_run_of(region), ())) for region in plan.regions))
    updates = {_update_of(bucket.id, tier) for bucket in plan.buckets for tier in (Tier.DEVICE, Tier.HOST)}
    for work in updates & median_s.keys():
        median_s[work] *= max(1.0, len(found[work]) / num_steps)
    return median_s


def _corrected(problem: Problem, plan: Plan, seconds: Mapping[_OnLane, float]) -> Cluster:
    """Return the machine of `problem` with the rates of links, and then of updates, corrected by `seconds`."""
    price = prices(problem.graph, plan.buckets, problem.cluster, activations=plan.activations)
    groups = {str(group.id): GroupRef(group.id) for group in plan.activations}
    buckets = {str(bucket.id): BucketRef(bucket.id) for bucket in plan.buckets}
    arriving = {name: label(Verb.GATHER, ref) for name, ref in buckets.items()}
    arriving |= {name: label(Verb.PREFETCH, ref) for name, ref in groups.items()}
    leaving = {name: label(Verb.OFFLOAD, GradientRef(ref.bucket)) for name, ref in buckets.items()}
    leaving |= {name: label(Verb.OFFLOAD, ref) for name, ref in groups.items()}
    to_device = _ratio(seconds, {(Lane.H2D, arriving[name]): own_s for name, own_s in price.h2d_s.items()})
    to_host = _ratio(seconds, {(Lane.D2H, leaving[name]): own_s for name, own_s in price.d2h_s.items()})
    nodes = tuple(
        replace(
            node, h2d=_slowed_link(node.h2d, to_device or to_host), d2h=_slowed_link(node.d2h, to_host or to_device)
        )
        for node in problem.cluster.nodes
    )
    cluster = replace(problem.cluster, nodes=nodes)
    price = prices(problem.graph, plan.buckets, cluster)
    on_device = _ratio(seconds, _update_prices(plan, price, Tier.DEVICE))
    on_host = _ratio(seconds, _update_prices(plan, price, Tier.HOST))
    if not cluster.copies_overlap:
        on_device, on_host = on_device or on_host, on_host or on_device

    def slowed(node: Node) -> Node:
        device, host = node.device, node.host
        if on_device is not None:
            device = replace(device, update_elements_per_s=device.update_elements_per_s / on_device)
        if on_host is not None:
            busy_per_s = _slowed_rate(host.busy_update_elements_per_s, on_host)
            own_per_s = host.update_elements_per_s / on_host
            flops_per_s = host.flops_per_s
            if flops_per_s is not None:
                flops_per_s = {dtype: rate / on_host for dtype, rate in flops_per_s.items()}
            host = replace(
                host,
                update_elements_per_s=own_per_s,
                busy_update_elements_per_s=busy_per_s,
                flops_per_s=flops_per_s,
            )
        return replace(node, device=device, host=host)

    return replace(cluster, nodes=tuple(map(slowed, cluster.nodes)))


def _update_prices(plan: Plan, price: Prices, tier: Tier) -> Mapping[_OnLane, float]:
    """Return the predicted seconds of the updates of state on `tier`.

    A streamed update consists of copies for the most part, so it says nothing about the update rates.
    """
    of_tier = price.device_update_s if tier is Tier.DEVICE else price.host_update_s
    return {
        _update_of(placed.bucket, tier): of_tier[placed.bucket]
        for placed in plan.placements
        if placed.optim is tier and not placed.streamed
    }


def _ratio(seconds: Mapping[_OnLane, float], price_s: Mapping[_OnLane, float]) -> float | None:
    """Return measured over predicted seconds of all works in `price_s` together; None if none was measured."""
    measured_s = {work: seconds[work] for work in price_s if work in seconds}
    priced_s = sum(price_s[work] for work in measured_s)
    if priced_s == 0:
        return None
    return min(max(sum(measured_s.values()) / priced_s, 1 / _MAX_RATIO), _MAX_RATIO)


def _slowed_link(link: Link, ratio: float | None) -> Link:
    if ratio is None:
        return link
    return replace(
        link,
        bytes_per_s=link.bytes_per_s / ratio,
        busy_bytes_per_s=_slowed_rate(link.busy_bytes_per_s, ratio),
        latency_s=link.latency_s * ratio,
        source="the first steps of a run",
    )


def _slowed_rate(rate_per_s: float | None, ratio: float) -> float | None:
    return None if rate_per_s is None else rate_per_s / ratio


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
    corrected, excess_bytes = correction.applied_to(problem), correction.excess_bytes
    # The plan at the corrected prices, and without its bound, proved at other prices.
    record = simulate(corrected.graph, plan, corrected.cluster, corrected.measured)
    peak_bytes = plan.prediction.device_peak_bytes + excess_bytes
    repriced = replace(
        plan,
        base_bytes=plan.base_bytes + excess_bytes,
        prediction=prediction_of(record, peak_bytes, plan.prediction.device_peak_at),
        bound_s=None,
        binding=(),
        gib_bound_s=None,
        formula=f"{plan.formula} + {excess_bytes}" if plan.formula and excess_bytes else plan.formula,
    )
    was_s, planned_s = repriced.prediction.step_s, plan.prediction.step_s
    if abs(was_s - planned_s) <= TOLERANCE * planned_s and not excess_bytes:
        return None
    facts = f"step is {format_s(was_s)} at measured prices, planned {format_s(planned_s)}; regions measured; "
    if excess_bytes:
        facts = f"peak was {format_bytes(excess_bytes)} above the plan; {facts}"
    has_to_move = peak_bytes > plan.budget_bytes
    verbs = {action.verb for schedule in plan.schedules for action in schedule.actions}
    is_all_on_device = all(placement.optim is Tier.DEVICE for placement in plan.placements)
    is_all_kept = all(group.saving is Saving.KEEP for group in plan.activations)
    moves_anything = not (is_all_on_device and is_all_kept and verbs.isdisjoint({Verb.GATHER, Verb.OFFLOAD}))
    if search is None or not (has_to_move or moves_anything):
        return Outcome(plan=repriced, is_new=False, line=f"measured: {facts}nothing to plan again")
    # Every bucket of the plan may move.
    better = answer(search, with_buckets_free(corrected, plan))
    if isinstance(better, NoFeasiblePlan) or not (has_to_move or is_worth(better.prediction.step_s, was_s)):
        return Outcome(plan=repriced, is_new=False, line=f"measured: {facts}no better plan found")
    homes = {placement.bucket: placement for placement in plan.placements}
    num_moved = sum(homes.get(placement.bucket) != placement for placement in better.placements)
    then, now = (
        {(group.id, group.saving) for group in own.activations if group.saving is not Saving.KEEP}
        for own in (plan, better)
    )
    num_changed = len({group for group, _ in then ^ now})
    moved = f"{num_moved} {'bucket' if num_moved == 1 else 'buckets'} moved"
    moved += f", {num_changed} groups of activations treated otherwise" if num_changed else ""
    line = f"replanned: {facts}{moved}, planned step now {format_s(better.prediction.step_s)}"
    return Outcome(plan=better, is_new=True, line=line)


def fastest_rule(problem: Problem, plan: Plan) -> Plan | None:
    """Return the plan with the shortest step of those of the simple rules for `problem`, with other homes or another
    treatment of activations than `plan`, whose buckets may move; None if there is none.

    The rules of `RULES` choose the homes of buckets, and keep all activations. The greedy planner also recomputes or
    offloads activations.
    """
    free = with_buckets_free(problem, plan)
    kept = replace(free, savings=frozenset({Saving.KEEP}))
    rules: list[tuple[Problem, Planner]] = [*((kept, cast(Planner, rule)) for rule in RULES), (free, "greedy")]
    found = (answer(lambda asked: planned(*asked), asked) for asked in rules)
    others = [
        own
        for own in found
        if isinstance(own, Plan) and (own.placements, own.activations) != (plan.placements, plan.activations)
    ]
    return min(others, key=lambda own: own.prediction.step_s, default=None)


def with_buckets_free(problem: Problem, plan: Plan) -> Problem:
    """Return `problem` with the placements of all buckets of `plan`, which are in force, open."""
    ours = {bucket.id for bucket in plan.buckets}
    in_force = {placement.bucket: placement for placement in problem.placements}
    buckets = {bucket.id: bucket for bucket in problem.buckets}
    buckets |= {bucket.id: bucket for bucket in plan.buckets if bucket.id not in buckets}
    placements = tuple(
        placement_of(bucket, Level.ON_DEVICE) if name in ours else in_force[name] for name, bucket in buckets.items()
    )
    return replace(problem, buckets=tuple(buckets.values()), placements=placements)
