"""The minimum host memory of a problem: a lower limit for one choice of modes, and a search for the exact number."""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from elixir_compile.analysis.timeline import host_bytes
from elixir_compile.errors import NoFeasiblePlan
from elixir_compile.ir import Plan, Tier
from elixir_compile.search.evaluator import Evaluator
from elixir_compile.search.problem import Problem

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
        _state_bytes(found) if _would_do_with_disk(problem, search) else 0,
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
        return error


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


def _state_bytes(plan: Plan) -> int:
    """Return the bytes of optimizer state that each rank holds on the host under `plan`."""
    placed = zip(plan.buckets, plan.placements, strict=True)
    return sum(bucket.shard_state_nbytes() for bucket, placement in placed if placement.optim is Tier.HOST)
