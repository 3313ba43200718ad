"""Joint plans of several graphs under a shared budget: several forwards of a step are outstanding at once, or models
share a device.

```text
  device bytes   |       B's own peak                     and, for every graph, resident + left
    budget ------+-------.--------                         beside it + its own peak <= budget
                 |  ____/ \\____
                 | | B         |___
                 |_|_______________|__  what A left, until A's backward
                 |  parameters and state of A and B on the device
                 +----------------------> A.fwd  B.fwd  B.bwd  A.bwd  update
```

The graphs may belong to several models that share a device, each with a budget of its own for all that is there while
it runs. What graphs of one model read together is there once.

The forwards belong to different graphs, or to the same graph called several times. First, every graph gets bytes
between its minimum memory and its memory with everything kept: the same share of the way for all graphs, the largest at
which all fit. Then the graphs are planned in turn. Each plan counts the bytes of the other graphs as external usage,
and leaves the others the bytes they need between its forward and its backward. A graph may use the bytes left over by
the graphs planned before it.

The minimum memory of a graph is first that of its whole batch. If no plans are found, and the search may divide the
batch, it is the fewest bytes of any number of micro-batches.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.ir import BucketId, Phase, Placement, Plan
from elixir_compile.search import Extent, Problem, extent_of, extents
from elixir_compile.search.joint.variants import numbers_to_try
from elixir_compile.search.outer import Refusal, Variants, first_of
from elixir_compile.step.bucket_bytes import bucket_host_bytes
from elixir_compile.step.timeline import away_bytes

_BISECTIONS = 20
_EASED = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)
"""Parts of the largest share to try in turn: a smaller share does not always need fewer bytes."""

_MOST_BUDGETS = 12
"""So many budgets are tried in turn, until one has plans."""
_PRECISION = 64
"""The smallest budget is found up to this part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRequest:
    """One graph of the step, or code that runs op by op between its graphs."""

    problem: Problem
    """The problem of the graph alone; its `base_bytes` are held outside all graphs of the step."""
    beside: tuple[int, ...]
    """Numbers of the graphs with outstanding forwards while this graph runs, once per forward; may include its own."""
    outside_bytes: int | None = None
    """For code between graphs, which no plan changes, the most bytes that it holds beside the bytes of the graphs, as
    measured; None for a graph. The `problem` is then that of any graph."""
    model: int = 0
    """The number of the model of the graph: buckets of equal names are the same only in the same model."""

    def extents(self) -> tuple[Extent, Extent]:
        """Return the smallest extent, and the extent if nothing moves."""
        if self.outside_bytes is None:
            return extents(self.problem)
        return _fixed(self.outside_bytes), _fixed(self.outside_bytes)


def _fixed(peak_bytes: int) -> Extent:
    return Extent(peak_bytes=peak_bytes, left_bytes=0, resident={}, grads={})


_Home = tuple[str, int, BucketId]
"""A bucket: one in force is that of a "model" with this number, a new one that of a "graph"."""
Planned = tuple[Problem, Plan]
"""The problem of a graph beside the other graphs, and its plan."""


def plan_jointly(
    requests: Sequence[GraphRequest], search: Callable[[Problem], Plan], *, may_divide: bool = False
) -> list[Planned]:
    """Return the problem and the plan of each request that is a graph; all plans together keep the budget. Graphs come
    first among the requests.

    `search` plans a single problem; it `may_divide` the batch of the problem into micro-batches. Raises NoFeasiblePlan
    with the minimum bytes of the step if no plans are found.
    """
    found = [request.extents() for request in requests]
    may_be_divided = [may_divide and request.outside_bytes is None for request in requests]
    numbers = [
        numbers_to_try(request.problem) if may else [] for request, may in zip(requests, may_be_divided, strict=True)
    ]
    if any(numbers):
        with suppress(NoFeasiblePlan):
            return _planned_between(requests, found, search)

        def lowest(problem: Problem, numbers: Sequence[int], whole: Extent) -> Extent:
            divided = [extents(replace(problem, micro_batches=number))[0] for number in numbers]
            return min((whole, *divided), key=lambda extent: (extent.peak_bytes, extent.left_bytes))

        found = [
            (lowest(request.problem, own, low), high)
            for request, own, (low, high) in zip(requests, numbers, found, strict=True)
        ]
    return _planned_between(requests, found, search)


def plan_leanest(requests: Sequence[GraphRequest], search: Callable[[Problem], Plan]) -> list[Planned]:
    """Return plans as `plan_jointly` does, each with about the fewest bytes of its graph.

    Raises NoFeasiblePlan with the minimum bytes of the step if no plans are found.
    """
    return _planned_between(requests, [request.extents() for request in requests], search, is_least=True)


def plan_in_least(
    requests: Sequence[GraphRequest], least_bytes: int, search: Callable[[Problem], Plan], *, may_divide: bool = False
) -> tuple[int, list[Planned]]:
    """Return the smallest budget found, at least `least_bytes`, for which `plan_jointly` finds plans, and the plans.

    Raises NoFeasiblePlan if no device budget helps, as the host is full.
    """
    budget_bytes, needed_bytes, too_few_bytes = least_bytes, 0, least_bytes - 1
    enough: tuple[int, list[Planned]] | None = None
    for number in range(_MOST_BUDGETS):
        asked = [replace(request, problem=replace(request.problem, budget_bytes=budget_bytes)) for request in requests]
        try:
            enough = budget_bytes, plan_jointly(asked, search, may_divide=may_divide)
        except NoFeasiblePlan as error:
            if error.memory != "device" or (enough is None and number == _MOST_BUDGETS - 1):
                raise
            needed_bytes = error.needed_bytes
            too_few_bytes = max(budget_bytes, needed_bytes - 1)
        if enough is None:
            # A search need not find the plan whose bytes an error names.
            budget_bytes = max(needed_bytes, budget_bytes + (budget_bytes // _PRECISION << number))
        elif enough[0] - too_few_bytes <= enough[0] // _PRECISION:
            break
        else:
            budget_bytes = (too_few_bytes + enough[0]) // 2
    assert enough is not None
    return enough


def _planned_between(
    requests: Sequence[GraphRequest],
    found: Sequence[tuple[Extent, Extent]],
    search: Callable[[Problem], Plan],
    *,
    is_least: bool = False,
) -> list[Planned]:
    """Return the plans of `plan_jointly` with bytes of each graph between the two extents in `found`; if `is_least`,
    with the fewest."""
    share = _largest_share(requests, found)
    # Raised from numbers: a local variable with the caught error would keep its traceback alive, and with the traceback
    # the activations of earlier forwards in the frames of the callers.
    budget_bytes, needed_bytes = _tightest(requests, [low for low, _ in found])
    memory = "device"
    host_needs: dict[int, int] = {}
    eased = [] if share is None or is_least else dict.fromkeys(share * part for part in _EASED)
    shares: list[float | None] = [] if share is None else [*eased, None]
    while shares:
        own = shares[0]
        held = [low if own is None else low.towards(high, own) for low, high in found]
        num_known = len(host_needs)
        try:
            planned = _planned(requests, held, search, host_needs, is_least=own is None)
        except NoFeasiblePlan as error:
            budget_bytes, needed_bytes, memory = error.budget_bytes, error.needed_bytes, error.memory
            if len(host_needs) == num_known:
                shares.pop(0)
            continue
        shares.pop(0)
        if all(plan.prediction.device_peak_bytes <= plan.budget_bytes for _, plan in planned):
            return planned
    raise NoFeasiblePlan("", "", budget_bytes, needed_bytes, {}, memory)


def _largest_share(requests: Sequence[GraphRequest], found: Sequence[tuple[Extent, Extent]]) -> float | None:
    """Return the largest share, from 0 (minimum memory) to 1 (everything kept), at which all graphs fit; None if 0 is
    too much."""

    def fits(share: float) -> bool:
        budget_bytes, needed_bytes = _tightest(requests, [low.towards(high, share) for low, high in found])
        return needed_bytes <= budget_bytes

    if not fits(0.0):
        return None
    low, high = 0.0, 1.0
    if fits(high):
        return high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _tightest(requests: Sequence[GraphRequest], held: Sequence[Extent]) -> tuple[int, int]:
    """Return the budget and the peak beside the others of the graph that exceeds its budget most, or is closest to
    it."""
    pairs = [
        (requests[number].problem.budget_bytes, _base_bytes(requests, held, number) + extent.peak_bytes)
        for number, extent in enumerate(held)
    ]
    return max(pairs, key=lambda pair: pair[1] - pair[0])


def needed_bytes_of(requests: Sequence[GraphRequest], plans: Sequence[Plan | None]) -> list[int]:
    """Return the bytes that the step holds while each of `requests` runs, if the graphs among them follow `plans`.

    The plan of code between graphs is None; its bytes are those of all graphs while it runs, and its own.
    """
    held = [
        _fixed(request.outside_bytes or 0) if plan is None else extent_of(request.problem.graph, plan)
        for request, plan in zip(requests, plans, strict=True)
    ]
    return [_running_bytes(requests, held, number) + extent.peak_bytes for number, extent in enumerate(held)]


def _base_bytes(requests: Sequence[GraphRequest], held: Sequence[Extent], number: int) -> int:
    """Return the device bytes held outside the graph `number` while it runs or its gradients wait for the update."""
    while_it_runs = _running_bytes(requests, held, number)
    if requests[number].outside_bytes is not None:  # code between graphs does not run at the update
        return while_it_runs
    return max(while_it_runs, _done_bytes(requests, held, number, beside=()))


def _running_bytes(requests: Sequence[GraphRequest], held: Sequence[Extent], number: int) -> int:
    """Return the device bytes held outside the graph `number` while it runs."""
    beside = requests[number].beside
    left_bytes = sum(held[other].left_bytes for other in beside)
    return left_bytes + _done_bytes(requests, held, number, beside=beside)


def _done_bytes(
    requests: Sequence[GraphRequest], held: Sequence[Extent], number: int, *, beside: Collection[int]
) -> int:
    """Return the device bytes held outside the graph `number` once the backward of all others but `beside` is done,
    without what these left for their backward."""
    own = requests[number]
    others = [other for other in range(len(held)) if other != number]
    own_buckets = _by_home(requests, held, [number], lambda extent: extent.resident).keys()
    resident = _by_home(requests, held, others, lambda extent: extent.resident)
    grads = _by_home(requests, held, [other for other in others if other not in beside], lambda extent: extent.grads)
    # Gradients that stay are in the resident bytes of the graph itself, as sums.
    summed = own_buckets if own.problem.accumulates else ()
    return own.problem.base_bytes + _bytes_without(resident, own_buckets) + _bytes_without(grads, summed)


def _by_home(
    requests: Sequence[GraphRequest],
    held: Sequence[Extent],
    numbers: Iterable[int],
    bytes_of: Callable[[Extent], Mapping[BucketId, int]],
) -> dict[_Home, int]:
    """Return the bytes of each bucket of the graphs `numbers`; of a bucket of several graphs, the most bytes of any."""
    found: dict[_Home, int] = {}
    for number in numbers:
        request = requests[number]
        in_force = {bucket.id for bucket in request.problem.buckets}
        for bucket, nbytes in bytes_of(held[number]).items():
            home = ("model", request.model, bucket) if bucket in in_force else ("graph", number, bucket)
            found[home] = max(nbytes, found.get(home, 0))
    return found


def _bytes_without(buckets: Mapping[_Home, int], leaving_out: Collection[_Home]) -> int:
    return sum(nbytes for bucket, nbytes in buckets.items() if bucket not in leaving_out)


def _planned(
    requests: Sequence[GraphRequest],
    held: list[Extent],
    search: Callable[[Problem], Plan],
    host_needs: dict[int, int],
    *,
    is_least: bool,
) -> list[Planned]:
    """Plan the graphs in turn; return the problem and the plan of each. If `is_least`, none may use what others leave.

    `held` has the assumed bytes of each graph, replaced by the bytes of its plan once it is planned. `host_needs` has,
    by graph, the host bytes that the graphs before it leave free. If a graph finds too few host bytes, it is added to
    `host_needs` and NoFeasiblePlan is raised; the caller tries again.
    """
    found: list[Planned] = []
    placed: dict[tuple[int, BucketId], Placement] = {}
    for number, request in enumerate(requests):
        if request.outside_bytes is not None:
            continue
        more_bytes = _more_host_bytes(requests, number, placed) + sum(away_bytes(plan) for _, plan in found)
        more_bytes += sum(needed for later, needed in host_needs.items() if later > number)
        problem = replace(
            request.problem,
            host_budget_bytes=request.problem.host_budget_bytes - more_bytes,
            host_base_bytes=max(0, request.problem.host_base_bytes + more_bytes),
            base_bytes=_base_bytes(requests, held, number),
            between_bytes=_more_bytes(requests, held, number, waits=True),
            after_bytes=_more_bytes(requests, held, number, waits=False),
            placements=tuple(placed.get((request.model, home.bucket), home) for home in request.problem.placements),
        )
        if all(op.phase is Phase.FORWARD for op in problem.graph.ops):
            # It has no update, and holds its parameters alone from its last op on.
            problem = replace(problem, between_bytes=max(problem.between_bytes, problem.after_bytes))
        try:
            plan = _least(problem, held[number], search) if is_least else search(problem)
        except NoFeasiblePlan as error:
            if error.memory == "host":
                host_needs.setdefault(number, error.needed_bytes - problem.host_base_bytes)
            raise
        found.append((problem, replace(plan, budget_bytes=problem.budget_bytes)))
        placed |= {(request.model, home.bucket): home for home in plan.placements}
        held[number] = extent_of(problem.graph, plan)
    for number, request in enumerate(requests):
        needed_bytes = _base_bytes(requests, held, number) + held[number].peak_bytes
        if request.outside_bytes is not None and needed_bytes > request.problem.budget_bytes:
            raise NoFeasiblePlan("", "", request.problem.budget_bytes, needed_bytes, {})
    return [
        (problem, rebased(plan, _base_bytes(requests, held, number))) for number, (problem, plan) in enumerate(found)
    ]


def _least(problem: Problem, extent: Extent, search: Callable[[Problem], Plan]) -> Plan:
    """Return the plan of `problem` with no more memory than `extent` at any time: what others need is compared with it
    afterwards. Raises NoFeasiblePlan."""
    asked = replace(
        problem,
        budget_bytes=min(problem.budget_bytes, problem.base_bytes + extent.peak_bytes),
        between_bytes=max(0, extent.peak_bytes - extent.resident_bytes - extent.left_bytes),
        after_bytes=max(0, extent.peak_bytes - extent.resident_bytes - extent.grad_bytes),
    )

    def variants() -> Variants[Problem, Refusal]:
        found = yield asked
        if isinstance(found, NoFeasiblePlan):
            # Values that die in the last op of the forward are there beside what is left.
            more_bytes = found.needed_bytes - asked.budget_bytes
            between_bytes, after_bytes = asked.between_bytes - more_bytes, asked.after_bytes - more_bytes
            yield replace(asked, between_bytes=max(0, between_bytes), after_bytes=max(0, after_bytes))

    return first_of(variants(), search)


def _more_host_bytes(
    requests: Sequence[GraphRequest], number: int, placed: Mapping[tuple[int, BucketId], Placement]
) -> int:
    """Return the host bytes that the moves of buckets to the homes `placed` add.

    Buckets with parameters of the graph `number` are left out, because its own plan counts them.
    """
    own = requests[number]
    storages = {storage.id for storage in own.problem.graph.storages}
    in_force = {
        (request.model, bucket.id): (bucket, home)
        for request in requests
        for bucket, home in zip(request.problem.buckets, request.problem.placements, strict=True)
        if request.model != own.model or storages.isdisjoint(bucket.params)
    }
    return sum(
        bucket_host_bytes(bucket, placed[key]) - bucket_host_bytes(bucket, home)
        for key, (bucket, home) in in_force.items()
        if key in placed
    )


def _more_bytes(requests: Sequence[GraphRequest], held: Sequence[Extent], number: int, *, waits: bool) -> int:
    """Return the device bytes that other graphs need beyond the base of the graph `number`.

    If `waits`, while the graph has an outstanding forward; else while it has none. Beyond its assumed bytes the graph
    may hold the bytes free during these times, divided by the number of its outstanding forwards. No bytes count as
    free while the graph runs beside its own outstanding forward, because its own peak needs them.
    """
    extent, budget_bytes = held[number], requests[number].problem.budget_bytes
    free_bytes = [
        0
        if other == number
        else (later.problem.budget_bytes - _base_bytes(requests, held, other) - held[other].peak_bytes)
        // max(1, later.beside.count(number))
        for other, later in enumerate(requests)
        if (number in later.beside) == waits and (waits or other != number)
    ]
    if not free_bytes:
        return 0
    assumed_bytes = extent.resident_bytes + (extent.left_bytes if waits else extent.grad_bytes)
    return max(0, budget_bytes - _base_bytes(requests, held, number) - assumed_bytes - min(free_bytes))


def rebased(plan: Plan, base_bytes: int) -> Plan:
    """Return `plan` with the usage `base_bytes` outside of its graph; its schedule is unchanged."""
    more_bytes = base_bytes - plan.base_bytes
    prediction = replace(plan.prediction, device_peak_bytes=plan.prediction.device_peak_bytes + more_bytes)
    formula = f"{plan.formula} + {more_bytes}" if plan.formula and more_bytes else plan.formula
    return replace(plan, base_bytes=base_bytes, prediction=prediction, formula=formula)
