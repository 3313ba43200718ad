"""Fit the host memory: choose the optimizer state that goes to disk, or count the fewest host bytes that are enough.

If the host has no room for all state off the device, and the problem allows state on disk:

    1  search as if state took no host memory       a relaxation: its bound holds for every plan, with disk or without
    2  put the fewest bytes of state on disk        until the rest, and the staging buffers of the disk, fit the host
    3  search with all state in host memory         its plan is taken instead if there is one and it is faster

The state of the buckets that the next forward reads last goes to disk first: buckets are updated in the order in which
the next forward reads them, and compute waits for the first ones. The second search runs only if the plan of the first
needs the disk. Not considered: a plan with more state on the device, for example with more recomputation, may be
faster than both.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from elixir_compile.base.errors import NoFeasiblePlan
from elixir_compile.base.units import format_bytes, format_s
from elixir_compile.ir import Bucket, BucketId, Decision, Plan, Tier
from elixir_compile.ir.staging import disk_staging_bytes
from elixir_compile.search.evaluator import Evaluator
from elixir_compile.search.problem import Problem
from elixir_compile.search.writing import predicted
from elixir_compile.step.prices import prices
from elixir_compile.step.timeline import host_bytes

log = logging.getLogger("elixir_compile")


def plan_with_disk(problem: Problem, search: Callable[[Problem], Plan]) -> Plan:
    """Return the plan found by `search`, with the state on disk for which the host has no room, if `problem` allows it.

    Raises NoFeasiblePlan if the host still has too little room.
    """
    in_memory = replace(problem, disk=False)
    found = search(problem if _may_add(problem) else in_memory)
    going = going_to_disk(problem, found)
    if not going:
        return found
    with_disk = _moved(problem, found, going)
    if host_bytes(with_disk) > problem.host_budget_bytes:
        try:
            with_disk = _with_room_for_staging(problem, with_disk, search)
        except NoFeasiblePlan as refused:
            try:
                without = search(in_memory)
            except NoFeasiblePlan as short:
                is_less = short.memory == refused.memory and short.needed_bytes < refused.needed_bytes
                raise (short if is_less else refused) from None
            return _moved(problem, without, going_to_disk(in_memory, without))
    if problem.on_disk.issuperset(going):
        return with_disk
    try:
        without = search(in_memory)
    except NoFeasiblePlan:
        return with_disk
    without = _moved(problem, without, going_to_disk(in_memory, without))
    if with_disk.prediction.step_s <= without.prediction.step_s:
        return with_disk
    log.debug("%s: state on disk makes no shorter step", problem.name)
    # Only the bound of the relaxation holds for plans with state on disk too.
    return _with_bounds_of(with_disk, without)


def _with_bounds_of(relaxed: Plan, found: Plan) -> Plan:
    """Return `found` with the bounds of `relaxed`."""
    return replace(found, bound_s=relaxed.bound_s, binding=relaxed.binding, gib_bound_s=relaxed.gib_bound_s)


def _with_room_for_staging(problem: Problem, relaxed: Plan, search: Callable[[Problem], Plan]) -> Plan:
    """Return the plan found with the host budget reduced by the staging buffers, with the bound of `relaxed`.

    `relaxed` is the plan with state on disk, which does not fit the host together with these buffers.
    """
    staging_bytes = disk_staging_bytes(relaxed.buckets)
    less = replace(
        problem,
        host_budget_bytes=problem.host_budget_bytes - staging_bytes,
        host_base_bytes=problem.host_base_bytes + staging_bytes,
    )
    found = _with_bounds_of(relaxed, search(less))
    return _moved(problem, found, going_to_disk(problem, found))


def going_to_disk(problem: Problem, plan: Plan) -> tuple[BucketId, ...]:
    """Return the buckets of `plan` whose state has to be on disk, in the order of `plan.buckets`.

    They are the buckets in force with state on disk, and the fewest others with which the remaining state fits.
    """
    there, may_add = problem.on_disk, _may_add(problem)
    order = [
        bucket
        for bucket, placement in zip(plan.buckets, plan.placements, strict=True)
        if placement.optim is Tier.HOST and bucket.shard_state_nbytes()
    ]
    chosen = [bucket for bucket in order if bucket.id in there]
    over_bytes = host_bytes(plan) - problem.host_budget_bytes - _state_bytes(chosen)
    if chosen or (may_add and over_bytes > 0):
        over_bytes += disk_staging_bytes(order)
    for bucket in reversed(order):
        if may_add and over_bytes > 0 and bucket.id not in there:
            chosen.append(bucket)
            over_bytes -= bucket.shard_state_nbytes()
    # The last chosen bucket may be so large that the host has room for others.
    for bucket in sorted(chosen, key=lambda bucket: bucket.shard_state_nbytes(), reverse=True):
        if bucket.id not in there and over_bytes + bucket.shard_state_nbytes() <= 0:
            chosen.remove(bucket)
            over_bytes += bucket.shard_state_nbytes()
    ids = {bucket.id for bucket in chosen}
    return tuple(bucket.id for bucket in order if bucket.id in ids)


def _may_add(problem: Problem) -> bool:
    """Return whether more state may go to disk."""
    return problem.disk and problem.hybrid


def _state_bytes(buckets: list[Bucket]) -> int:
    return sum(bucket.shard_state_nbytes() for bucket in buckets)


def _moved(problem: Problem, plan: Plan, going: tuple[BucketId, ...]) -> Plan:
    """Return `plan` with the state of the buckets `going` on disk, and with a new prediction."""
    if not going:
        return plan
    placements = tuple(
        replace(placement, optim=Tier.DISK, streamed=False) if placement.bucket in going else placement
        for placement in plan.placements
    )
    moved = replace(plan, placements=placements)
    decisions = (*plan.decisions, *_decisions(problem, plan, going))
    return replace(moved, prediction=predicted(problem, moved)[0], decisions=decisions)


def _decisions(problem: Problem, plan: Plan, going: tuple[BucketId, ...]) -> list[Decision]:
    """Return a decision for each bucket in `going`; `plan` still has their state on the host."""
    price = prices(problem.graph, plan.buckets, problem.cluster)
    base_bytes = problem.host_base_bytes
    host = format_bytes(host_bytes(plan) + base_bytes)
    full = (
        f"with all state in memory the host would hold {host} of {format_bytes(problem.host_budget_bytes + base_bytes)}"
    )
    on_disk_before = "it is on disk since an earlier plan"
    found: list[Decision] = []
    for bucket in plan.buckets:
        if bucket.id not in going:
            continue
        disk_s, update_s = price.disk_s[bucket.id], price.host_update_s[bucket.id]
        moved = f"{format_bytes(bucket.shard_state_nbytes())} are read and written"
        found.append(
            Decision(
                subject=bucket.id,
                choice="optim disk",
                because=f"{on_disk_before if bucket.id in problem.on_disk else full}; {moved} in {format_s(disk_s)}",
                cost_s=max(0.0, disk_s - update_s),
            )
        )
    return found


_PRICES = np.concatenate([[0.0], np.geomspace(1 / 16, 16, 33)])
"""Multipliers to try, in host bytes per device byte. A bucket frees 1 to about 4 device bytes per byte on the host."""


def host_floor_bytes(evaluator: Evaluator) -> int:
    """Return host bytes below which no levels fit the device at the evaluator's modes.

    A Lagrangian bound: for a segment and a price p per device byte, no levels need fewer host bytes than the sum over
    buckets of the minimum of host bytes + p * device bytes, less p * the free device bytes.
    """
    facts, own_bytes = evaluator.facts, evaluator.memory.own_bytes()
    host = np.full(own_bytes.shape[:2], np.inf)  # a level that a bucket cannot have is never the minimum
    for bucket, levels in enumerate(facts.choices):
        for level in levels:
            host[bucket, level] = evaluator.host_bytes_of(bucket, level)
    start_bytes = sum(own_bytes[bucket, level] for bucket, level in enumerate(facts.start_levels))
    min_bytes = sum(own_bytes[bucket, level] for bucket, level in enumerate(evaluator.min_memory_levels))
    rest_bytes = evaluator.memory.rest_bytes
    segments = {int((rest_bytes + bucket_bytes).argmax()) for bucket_bytes in (start_bytes, min_bytes)}
    floor = 0.0
    for segment in segments:
        free_bytes = facts.problem.budget_bytes - int(rest_bytes[segment])
        # prices x buckets x levels
        priced = host + _PRICES[:, None, None] * own_bytes[None, :, :, segment]
        floor = max(floor, float((priced.min(axis=2).sum(axis=1) - _PRICES * free_bytes).max()))
    return evaluator.away_bytes + int(floor)


_MAX_TRIES = 64
"""Budgets to try: 1 byte doubled 64 times is more than any host has."""

Search = Callable[[Problem], Plan]


def with_min_host_bytes(problem: Problem, error: NoFeasiblePlan, search: Search, timeout_s: float) -> NoFeasiblePlan:
    """Return `error`, which says that the host is too small, with the fewest host bytes for which `search` has a plan.

    `search` finds a plan for exactly this many bytes and none for a byte less, unless `timeout_s` seconds were too few
    to bisect. Returns `error` unchanged if more host bytes do not help.
    """
    deadline_s = time.monotonic() + timeout_s
    refused_bytes = problem.host_budget_bytes
    enough = _enough(problem, error, search)
    if enough is None:
        return error
    enough_bytes, found = enough
    while enough_bytes - refused_bytes > 1 and time.monotonic() < deadline_s:
        tried_bytes = _next(refused_bytes, host_bytes(found), enough_bytes)
        tried = _tried(problem, tried_bytes, search)
        if isinstance(tried, Plan):
            enough_bytes, found = tried_bytes, tried
        else:
            refused_bytes = tried_bytes
    return NoFeasiblePlan(
        "",
        "",
        problem.host_budget_bytes + problem.host_base_bytes,
        enough_bytes + problem.host_base_bytes,
        {},
        "host",
        _host_state_bytes(found) if _would_do_with_disk(problem, search) else 0,
        staying_bytes=error.staying_bytes,
        micro_batches=problem.micro_batches,
        is_static=problem.fractions is not None,
        beyond=error.beyond,
    )


def _enough(problem: Problem, error: NoFeasiblePlan, search: Search) -> tuple[int, Plan] | None:
    """Return a sufficient host budget and its plan, tried upward from the bytes in `error`; None if none was found."""
    tried_bytes = max(problem.host_budget_bytes + 1, error.needed_bytes - problem.host_base_bytes)
    for _ in range(_MAX_TRIES):
        tried = _tried(problem, tried_bytes, search)
        if isinstance(tried, Plan):
            return tried_bytes, tried
        if tried.memory != "host":
            return None
        tried_bytes = max(2 * tried_bytes, tried.needed_bytes - problem.host_base_bytes)
    return None


def _tried(problem: Problem, tried_bytes: int, search: Search) -> Plan | NoFeasiblePlan:
    try:
        return search(replace(problem, host_budget_bytes=tried_bytes))
    except NoFeasiblePlan as error:
        return error.renewed()


def _next(refused_bytes: int, held_bytes: int, enough_bytes: int) -> int:
    """Return the next budget to try, above `refused_bytes` and below `enough_bytes`.

    The plan found for `enough_bytes` holds `held_bytes`. First a byte less than this is tried, then exactly this, then
    the middle.
    """
    if refused_bytes < held_bytes - 1:
        return held_bytes - 1
    return held_bytes if refused_bytes < held_bytes < enough_bytes else (refused_bytes + enough_bytes) // 2


def _would_do_with_disk(problem: Problem, search: Search) -> bool:
    """Return whether the problem has a plan within its host budget if optimizer state may also go to disk.

    False if the problem allows state on disk already, or if it has no hybrid optimizer.
    """
    may_add = problem.hybrid and not problem.disk
    return may_add and isinstance(_tried(replace(problem, disk=True), problem.host_budget_bytes, search), Plan)


def _host_state_bytes(plan: Plan) -> int:
    """Return the bytes of optimizer state that each rank holds on the host under `plan`."""
    placed = zip(plan.buckets, plan.placements, strict=True)
    return sum(bucket.shard_state_nbytes() for bucket, placement in placed if placement.optim is Tier.HOST)
