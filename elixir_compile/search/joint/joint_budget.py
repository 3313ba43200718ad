"""One budget for the forwards of a step that wait for their backward at the same time: several graphs, or one again.

```text
  device bytes   |       B's own peak                     and, for every graph, resident + left
    budget ------+-------.--------                         beside it + its own peak <= budget
                 |  ____/ \\____
                 | | B         |___
                 |_|_______________|__  what A left, until A's backward
                 |  parameters and state of A and B on the device
                 +----------------------> A.fwd  B.fwd  B.bwd  A.bwd  update
```

First every graph gets the same share of the way from the least it needs to what it would take, the largest share at
which all fit. Then they are planned one by one, each on top of what the others hold, with room for the others between
its forward and its backward; what one does not use of its share, those after it may.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from elixir_compile.analysis.timeline import away_bytes, bucket_host_bytes
from elixir_compile.errors import NoFeasiblePlan
from elixir_compile.ir import BucketId, Placement, Plan
from elixir_compile.search import Extent, Problem, extent_of, extents

_BISECTIONS = 20
_EASED = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)
"""Shares to try, as parts of the largest: what a graph needs does not fall in a straight line with its share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRequest:
    """One graph of the step."""

    problem: Problem
    """As if it were alone; its `base_bytes` are outside all graphs of the step."""
    beside: tuple[int, ...]
    """The graphs whose forwards wait while it runs, by number, one entry per forward; may be its own."""


Planned = tuple[Problem, Plan]
"""A question and its answer."""


def plan_jointly(requests: Sequence[GraphRequest], search: Callable[[Problem], Plan]) -> list[Planned]:
    """Return what each of `requests` is asked and its plan, such that all plans keep the budget together.

    Raises NoFeasiblePlan with the bytes that the step needs at least.
    """
    found = [extents(request.problem) for request in requests]
    share = _largest_share(requests, found)
    budget_bytes, memory = requests[0].problem.budget_bytes, "device"
    needed_bytes = _needed_bytes(requests, [low for low, _ in found])
    host_needs: dict[int, int] = {}
    shares = [] if share is None else [share * part for part in _EASED]
    while shares:
        held = [low.towards(high, shares[0]) for low, high in found]
        num_known = len(host_needs)
        try:
            planned = _planned(requests, held, search, host_needs)
        except NoFeasiblePlan as error:
            budget_bytes, needed_bytes, memory = error.budget_bytes, error.needed_bytes, error.memory
            if len(host_needs) == num_known:
                shares.pop(0)
            continue
        shares.pop(0)
        if all(plan.prediction.device_peak_bytes <= plan.budget_bytes for _, plan in planned):
            return planned
    # No variable of this frame: a traceback would keep it, and so what its callers hold of earlier forwards.
    raise NoFeasiblePlan("", "", budget_bytes, needed_bytes, {}, memory)


def _largest_share(requests: Sequence[GraphRequest], found: Sequence[tuple[Extent, Extent]]) -> float | None:
    """None where not even the least fits."""

    def fits(share: float) -> bool:
        held = [low.towards(high, share) for low, high in found]
        return _needed_bytes(requests, held) <= requests[0].problem.budget_bytes

    if not fits(0.0):
        return None
    low, high = 0.0, 1.0
    if fits(high):
        return high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _needed_bytes(requests: Sequence[GraphRequest], held: Sequence[Extent]) -> int:
    return max(_base_bytes(requests, held, number) + own.peak_bytes for number, own in enumerate(held))


def _base_bytes(requests: Sequence[GraphRequest], held: Sequence[Extent], number: int) -> int:
    """Device bytes that are not of the graph `number` while it runs, or while its gradients wait for the update."""
    beside = requests[number].beside
    others = [own for other, own in enumerate(held) if other != number]
    done = [own for other, own in enumerate(held) if other != number and other not in beside]
    left_bytes = sum(held[other].left_bytes for other in beside)
    while_it_runs = left_bytes + sum(own.grad_bytes for own in done)
    at_the_update = sum(own.grad_bytes for own in others)
    resident_bytes = sum(own.resident_bytes for own in others)
    return requests[number].problem.base_bytes + resident_bytes + max(while_it_runs, at_the_update)


def _planned(
    requests: Sequence[GraphRequest], held: list[Extent], search: Callable[[Problem], Plan], host_needs: dict[int, int]
) -> list[Planned]:
    """Plan one after another; `held` is what each is thought to hold, then what it does.

    `host_needs` are bytes that a graph needs of the host, which those before it leave to it; where one finds too few,
    it is added.
    """
    found: list[Planned] = []
    placed: dict[BucketId, Placement] = {}
    for number, request in enumerate(requests):
        more_bytes = _more_host_bytes(request.problem, placed, [plan for _, plan in found])
        more_bytes += sum(needed for later, needed in host_needs.items() if later > number)
        problem = replace(
            request.problem,
            host_budget_bytes=request.problem.host_budget_bytes - more_bytes,
            host_base_bytes=max(0, request.problem.host_base_bytes + more_bytes),
            base_bytes=_base_bytes(requests, held, number),
            between_bytes=_more_bytes(requests, held, number, waits=True),
            after_bytes=_more_bytes(requests, held, number, waits=False),
            placements=tuple(placed.get(home.bucket, home) for home in request.problem.placements),
        )
        try:
            plan = search(problem)
        except NoFeasiblePlan as error:
            if error.memory == "host":
                host_needs.setdefault(number, error.needed_bytes - problem.host_base_bytes)
            raise
        found.append((problem, plan))
        placed |= {home.bucket: home for home in plan.placements}
        held[number] = extent_of(problem.graph, plan)
    return [
        (problem, _rebased(plan, _base_bytes(requests, held, number))) for number, (problem, plan) in enumerate(found)
    ]


def _more_host_bytes(problem: Problem, placed: Mapping[BucketId, Placement], plans: Sequence[Plan]) -> int:
    """Host bytes that the graphs of `plans`, whose buckets are `placed` anew, hold beyond what they held before."""
    own = {storage.id for storage in problem.graph.storages}
    more_bytes = sum(map(away_bytes, plans))
    for bucket, home in zip(problem.buckets, problem.placements, strict=True):
        if bucket.id in placed and own.isdisjoint(bucket.params):
            more_bytes += bucket_host_bytes(bucket, placed[bucket.id]) - bucket_host_bytes(bucket, home)
    return more_bytes


def _more_bytes(requests: Sequence[GraphRequest], held: Sequence[Extent], number: int, *, waits: bool) -> int:
    """What others need while the graph `number` waits, or while it does not, beyond its base.

    It may hold what it is thought to, and what is free then, shared by as many forwards of it as wait; nothing more
    where it waits for itself, because what is free is for its own peak.
    """
    own, budget_bytes = held[number], requests[number].problem.budget_bytes
    free_bytes = [
        0
        if other == number
        else (budget_bytes - _base_bytes(requests, held, other) - held[other].peak_bytes)
        // max(1, later.beside.count(number))
        for other, later in enumerate(requests)
        if (number in later.beside) == waits and (waits or other != number)
    ]
    if not free_bytes:
        return 0
    own_bytes = own.resident_bytes + (own.left_bytes if waits else own.grad_bytes)
    return max(0, budget_bytes - _base_bytes(requests, held, number) - own_bytes - min(free_bytes))


def _rebased(plan: Plan, base_bytes: int) -> Plan:
    """`plan` beside what the others do hold; what it does itself stays."""
    more_bytes = base_bytes - plan.base_bytes
    prediction = replace(plan.prediction, device_peak_bytes=plan.prediction.device_peak_bytes + more_bytes)
    formula = f"{plan.formula} + {more_bytes}" if plan.formula and more_bytes else plan.formula
    return replace(plan, base_bytes=base_bytes, prediction=prediction, formula=formula)
