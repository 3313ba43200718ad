"""The fewest host bytes that a placement needs: a bound from below, and a search for the error that says so."""

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
"""Host bytes per device byte. A bucket gives 1 to about 4 device bytes for each of its bytes on the host."""


def host_floor_bytes(evaluator: Evaluator) -> int:
    """Return host bytes below which no placement at the evaluator's modes fits the device."""
    facts, own_bytes = evaluator.facts, evaluator.memory.own_bytes()
    host = np.full(own_bytes.shape[:2], np.inf)  # what is no choice is never the least
    for bucket, levels in enumerate(facts.choices):
        for level in levels:
            host[bucket, level] = evaluator.host_bytes_of(bucket, level)
    start = sum(own_bytes[bucket, level] for bucket, level in enumerate(facts.start_levels))
    least = sum(own_bytes[bucket, level] for bucket, level in enumerate(evaluator.min_memory_levels))
    rest_bytes = evaluator.memory.rest_bytes
    segments = {int((rest_bytes + own).argmax()) for own in (start, least)}
    floor = 0.0
    for segment in segments:
        free_bytes = facts.problem.budget_bytes - int(rest_bytes[segment])
        # prices x buckets x levels
        priced = host + _PRICES[:, None, None] * own_bytes[None, :, :, segment]
        floor = max(floor, float((priced.min(axis=2).sum(axis=1) - _PRICES * free_bytes).max()))
    return evaluator.away_bytes + int(floor)


_MOST_TRIES = 64
"""Enough to double a byte up to the largest host, and to halve what is left."""

Search = Callable[[Problem], Plan]


def with_least_host(problem: Problem, error: NoFeasiblePlan, search: Search, timeout_s: float) -> NoFeasiblePlan:
    """Return `error`, which says that the host is too small, with the fewest host bytes for which `search` has a plan.

    `search` finds a plan with exactly these, and none with one byte less, unless `timeout_s` seconds were not enough
    to find out. Returns `error` as it is if more host bytes do not help.
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
    """Return a host budget that does, and the plan for it, tried from what `error` names on; None if none was found."""
    tried_bytes = max(problem.host_budget_bytes + 1, error.needed_bytes - problem.host_base_bytes)
    for _ in range(_MOST_TRIES):
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
    """Return the budget to try between two: one byte less than the plan found for `enough_bytes` holds, then what it
    holds, then halfway."""
    if refused_bytes < held_bytes - 1:
        return held_bytes - 1
    return held_bytes if refused_bytes < held_bytes < enough_bytes else (refused_bytes + enough_bytes) // 2


def _would_do_with_disk(problem: Problem, search: Search) -> bool:
    """Return whether there is a plan for the host as it is if optimizer state may go to disk, which it may not yet."""
    may_add = problem.hybrid and not problem.disk
    return may_add and isinstance(_tried(replace(problem, disk=True), problem.host_budget_bytes, search), Plan)


def _state_bytes(plan: Plan) -> int:
    """Return the bytes of optimizer state that one rank holds on the host under `plan`."""
    placed = zip(plan.buckets, plan.placements, strict=True)
    return sum(bucket.shard_state_nbytes() for bucket, placement in placed if placement.optim is Tier.HOST)
