"""Make a verified plan for a problem with the planner chosen by the user, and put parameters and optimizer state on
disk if the host has no room for them.
"""

import contextlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from elixir_compile.base.errors import InvalidOption, NoFeasiblePlan
from elixir_compile.base.options import Planner
from elixir_compile.base.process import collector_off
from elixir_compile.base.units import format_bytes, format_s
from elixir_compile.ir import Bucket, BucketId, BucketRef, Decision, Kind, Op, Plan, Tier, Verb
from elixir_compile.ir.cost import rings_bytes
from elixir_compile.search.best import counted_draft, place_best, with_gib_bound_of
from elixir_compile.search.evaluator import (
    Candidate,
    Clock,
    DraftPlan,
    Evaluator,
    deadline_in,
    draft_at_use,
    may_go_to_disk,
    too_large,
    uniform_modes,
)
from elixir_compile.search.follow import start_decision, start_draft
from elixir_compile.search.greedy import RULES, drafted, place_exhaustively, place_greedily
from elixir_compile.search.lean_calls import with_lean_calls
from elixir_compile.search.outer import answer, decision, leaner
from elixir_compile.search.problem import Problem
from elixir_compile.search.reasons import predicted, write_out
from elixir_compile.search.space.buckets import moved_to_disk, with_larger_buckets, with_smaller_buckets
from elixir_compile.search.space.facts import gather_facts
from elixir_compile.step.legality import verify
from elixir_compile.step.prices import prices
from elixir_compile.step.timeline import host_bytes, live_storages, plan_timeline

# ----------------------------------------------------------------------------------------------------------------------
# Fit the host memory: choose what goes to disk, or count the fewest host bytes that are enough.
#
# If the host has no room for all frozen parameters and state off the device, and the problem allows them on disk:
#
#     1  search as if they took no host memory        a relaxation: its bound holds for every plan, with disk or without
#     2  put the fewest bytes of them on disk         until the rest, and the staging buffers of the disk, fit the host
#     3  search with all of them in host memory       its plan is taken instead if there is one and it is faster
#
# Frozen parameters go before state: nobody writes them. First go those of which the fewest bytes are read per byte of
# host memory that is free then: a bucket that stays gathered is read once in a step, one that is released twice. Of
# equal ones, the last in the forward goes first. They go only if they are more than the buffers that they need.
#
# The state of the buckets that the next forward reads last goes to disk first: buckets are updated in the order in
# which the next forward reads them, and compute waits for the first ones. The second search runs only if the plan of
# the first needs the disk. Not considered: a plan with more state on the device, for example with more recomputation,
# may be faster than both.
#
# If all that does not fit, trained parameters may follow their state, and all is searched again. A byte of theirs is
# read for each gather, and read and written by the update, so they are the last to go.


log = logging.getLogger("elixir_compile")


def plan_with_disk(problem: Problem, search: Callable[[Problem], Plan]) -> Plan:
    """Return the plan found by `search`, with the parameters and the state on disk for which the host has no room, if
    `problem` allows it.

    Raises NoFeasiblePlan if the host still has too little room.
    """
    found = answer(partial(_with_disk, search=search), problem)
    may_more = problem.may_send_trained and not problem.params_to_disk
    if isinstance(found, NoFeasiblePlan) and found.memory == "host" and may_more:
        found = answer(partial(_with_disk, search=search), replace(problem, params_to_disk=True))
    if isinstance(found, NoFeasiblePlan):
        raise found.renewed()
    return found


def _with_disk(problem: Problem, search: Callable[[Problem], Plan]) -> Plan:
    """Return the plan of `plan_with_disk`, with trained parameters on disk if `problem` allows it already."""
    params = problem.params
    if any(param.in_file for param in params.values()):
        params = {name: replace(param, in_file=False) for name, param in params.items()}
    in_memory = replace(problem, disk=False, params=params)  # without more on disk than there is already

    def moved(found: Plan, asked: Problem = problem) -> Plan:
        """Return `found` with all that on disk that the answer to `asked` puts there."""
        return _moved(problem, found, going_to_disk(asked, found))

    relaxed = search(problem)
    going, there = going_to_disk(problem, relaxed), problem.on_disk
    may_go = may_go_to_disk(problem, relaxed.buckets)
    may_be_there = [bucket for bucket in relaxed.buckets if bucket.id in there or bucket.id in may_go]
    if not going and (not may_be_there or host_bytes(relaxed) <= problem.host_budget_bytes):
        return relaxed
    with_disk = _moved(problem, relaxed, going)
    if host_bytes(with_disk) > problem.host_budget_bytes:
        # The staging buffers of the disk need room too: search beside them.
        params = {own.id for own in may_be_there if own.id in problem.params_on_disk or problem.may_take_params(own)}
        staging_bytes = rings_bytes(may_be_there, params)
        less = replace(
            problem,
            host_budget_bytes=problem.host_budget_bytes - staging_bytes,
            host_base_bytes=problem.host_base_bytes + staging_bytes,
        )
        found = answer(search, less)
        if isinstance(found, NoFeasiblePlan):
            without = answer(search, in_memory)
            if isinstance(without, NoFeasiblePlan):
                raise leaner(found, without).renewed()
            return moved(without, in_memory)
        with_disk = moved(_with_bounds_of(with_disk, found))
    if going and there.issuperset(going):
        return with_disk
    without = answer(search, in_memory)
    if isinstance(without, NoFeasiblePlan):
        return with_disk
    without = moved(without, in_memory)
    if with_disk.prediction.step_s <= without.prediction.step_s:
        return with_disk
    log.debug("%s: the disk makes no shorter step", problem.name)
    # Only the bound of the relaxation holds for plans with the disk too.
    return _with_bounds_of(with_disk, without)


def _with_bounds_of(relaxed: Plan, found: Plan) -> Plan:
    """Return `found` with the bounds of `relaxed`."""
    return replace(found, bound_s=relaxed.bound_s, binding=relaxed.binding, gib_bound_s=relaxed.gib_bound_s)


def going_to_disk(problem: Problem, plan: Plan) -> tuple[BucketId, ...]:
    """Return the buckets of `plan` whose state, or whose frozen parameters, have to be on disk, in the order of
    `plan.buckets`.

    They are the buckets in force that are there, and the fewest others with which the remaining bytes fit.
    """
    there, allowed, num_gathers = problem.on_disk, may_go_to_disk(problem, plan.buckets), _num_gathers(plan)
    placed = zip(plan.buckets, plan.placements, strict=True)
    order = [bucket for bucket, home in placed if home.optim is Tier.HOST and _freed_bytes(bucket)]
    chosen, params_there = [bucket for bucket in order if bucket.id in there], problem.params_on_disk
    kinds = [[bucket for bucket in order if bucket.trainable is is_trained] for is_trained in (False, True)]
    over_bytes = host_bytes(plan) - problem.host_budget_bytes - sum(map(_freed_bytes, chosen))
    over_bytes -= sum(bucket.home_nbytes for bucket in chosen if bucket.trainable and bucket.id in params_there)
    ringed = [bucket for own in kinds if not there.isdisjoint(other.id for other in own) for bucket in own]
    over_bytes += rings_bytes(ringed, params_there)
    for own in kinds:
        # Sorting keeps the order of the others: the last in the forward come first.
        may_go = [bucket for bucket in reversed(own) if bucket.id not in there and bucket.id in allowed]
        may_go.sort(key=lambda bucket: 0 if bucket.trainable else num_gathers[bucket.id])
        if over_bytes > 0 and there.isdisjoint(bucket.id for bucket in own):
            staging_bytes = rings_bytes([*ringed, *own], params_there) - rings_bytes(ringed, params_there)
            if not own or (not own[0].trainable and sum(map(_freed_bytes, may_go)) <= staging_bytes):
                continue
            over_bytes += staging_bytes if may_go else 0
        for bucket in may_go:
            if over_bytes > 0:
                chosen.append(bucket)
                over_bytes -= _freed_bytes(bucket)
    # The last chosen bucket may be so large that the host has room for others: for state first, which is also written.
    for bucket in sorted(chosen, key=lambda bucket: (not bucket.trainable, -_freed_bytes(bucket))):
        if bucket.id not in there and over_bytes + _freed_bytes(bucket) <= 0:
            chosen.remove(bucket)
            over_bytes += _freed_bytes(bucket)
    ids = {bucket.id for bucket in chosen}
    return tuple(bucket.id for bucket in order if bucket.id in ids)


def params_going_to_disk(problem: Problem, plan: Plan) -> frozenset[BucketId]:
    """Return the trained buckets of `plan`, which has all state on disk that goes there, whose parameters have to
    follow: those in force that are there, and the fewest others with which the rest fits, those read least first."""
    placed, num_gathers = list(zip(plan.buckets, plan.placements, strict=True)), _num_gathers(plan)
    homes = (Tier.HOST, Tier.DISK)
    may_be_there = [own for own, home in placed if own.trainable and (home.param, home.optim) == homes]
    there = problem.params_on_disk.intersection(bucket.id for bucket in may_be_there)

    def over_bytes(going: frozenset[BucketId]) -> int:
        return host_bytes(_placed_with(plan, going)) - problem.host_budget_bytes

    may_go = [bucket for bucket in reversed(may_be_there) if bucket.id not in there and problem.may_take_params(bucket)]
    if over_bytes(there) <= 0 or not may_go:
        return there
    may_go.sort(key=lambda bucket: num_gathers[bucket.id])
    going = there.union(bucket.id for bucket in may_go)
    left_bytes = -over_bytes(going)
    for bucket in reversed(may_go):
        if bucket.home_nbytes <= left_bytes:
            left_bytes -= bucket.home_nbytes
            going -= {bucket.id}
    return going


def _placed_with(plan: Plan, params: Collection[BucketId]) -> Plan:
    """Return `plan` with the parameters of the buckets `params` on disk, where their state is."""
    return replace(
        plan,
        placements=tuple(
            replace(placement, param=Tier.DISK) if placement.bucket in params else placement
            for placement in plan.placements
        ),
    )


def _freed_bytes(bucket: Bucket) -> int:
    """Return the host bytes that are free if the state of `bucket`, or its parameters if they are frozen, are on
    disk."""
    return bucket.shard_state_nbytes() if bucket.trainable else bucket.home_nbytes


def _num_gathers(plan: Plan) -> Counter[BucketId]:
    """Return how often a step gathers each bucket, in a call."""
    targets = (action.target for action in plan.schedules[0].actions if action.verb is Verb.GATHER)
    return Counter(target.bucket for target in targets if isinstance(target, BucketRef))


def _moved(problem: Problem, plan: Plan, going: tuple[BucketId, ...]) -> Plan:
    """Return `plan` with what may be on disk of the buckets `going` there, a decision for each, and a new
    prediction."""
    if not going:
        return plan
    price, base_bytes = prices(problem.graph, plan.buckets, problem.cluster), problem.host_base_bytes
    host, budget = (format_bytes(nbytes + base_bytes) for nbytes in (host_bytes(plan), problem.host_budget_bytes))
    num_gathers, found, busy_s = _num_gathers(plan), list[Decision](), 0.0
    placements = tuple(
        moved_to_disk(bucket, placement) if bucket.id in going else placement
        for bucket, placement in zip(plan.buckets, plan.placements, strict=True)
    )
    made = replace(plan, placements=placements)
    params = params_going_to_disk(problem, made)
    made = _placed_with(made, params)
    for bucket in plan.buckets:
        if bucket.id not in going:
            continue
        freed = format_bytes(_freed_bytes(bucket))
        if bucket.trainable:
            what, disk_s, cost_s = "state", price.disk_s[bucket.id], price.disk_s[bucket.id]
            choice, copied = "optim disk", f"{freed} are read and written in {format_s(disk_s)}"
            cost_s -= price.host_update_s[bucket.id]
            busy_s += disk_s
            if bucket.id in params:
                what, choice, times = "state and parameters", "param disk", num_gathers[bucket.id]
                read_s, moved_s = price.reads[bucket.id][0], price.param_disk_s[bucket.id]
                own = format_bytes(bucket.home_nbytes)
                copied += (
                    f", {own} of parameters in {format_s(moved_s)}, and read in {format_s(read_s)} for each gather"
                )
                copied += f", {times} in a step"
                busy_s += moved_s + times * read_s
                cost_s += moved_s + times * (read_s - price.h2d_s[bucket.id])
        else:
            what, disk_s = "state and frozen parameters", price.reads[bucket.id][0]
            times = num_gathers[bucket.id]
            choice, copied = "param disk", f"{freed} are read in {format_s(disk_s)} for each gather, {times} in a step"
            cost_s = times * (disk_s - price.h2d_s[bucket.id])
            busy_s += times * disk_s
        full = f"with all {what} in memory the host would hold {host} of {budget}"
        why = "it is on disk since an earlier plan" if bucket.id in problem.on_disk else full
        found.append(decision(bucket.id, choice, why, copied, cost_s=cost_s))
    num_buckets = f"{len(found)} bucket{'s' if len(found) > 1 else ''}"
    total = decision("disk", num_buckets, f"it is busy for {format_s(busy_s)} of each step")
    return replace(made, prediction=predicted(problem, made)[0], decisions=(*plan.decisions, total, *found))


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

    def tried(tried_bytes: int) -> Plan | NoFeasiblePlan:
        return answer(search, replace(problem, host_budget_bytes=tried_bytes))

    # Upward from the bytes in the error to a sufficient budget.
    refused_bytes, found = problem.host_budget_bytes, error
    enough_bytes = refused_bytes
    for _ in range(_MAX_TRIES):
        least_bytes = 2 * enough_bytes if found is not error else refused_bytes + 1
        enough_bytes = max(least_bytes, found.needed_bytes - problem.host_base_bytes)
        found = tried(enough_bytes)
        if isinstance(found, Plan) or found.memory != "host":
            break
    if not isinstance(found, Plan):
        return error
    while enough_bytes - refused_bytes > 1 and time.monotonic() < deadline_s:
        # First a byte less than the plan holds is tried, then exactly this, then the middle.
        held_bytes = host_bytes(found)
        tried_bytes = held_bytes if refused_bytes < held_bytes < enough_bytes else (refused_bytes + enough_bytes) // 2
        tried_bytes = held_bytes - 1 if refused_bytes < held_bytes - 1 else tried_bytes
        made = tried(tried_bytes)
        if isinstance(made, Plan):
            enough_bytes, found = tried_bytes, made
        else:
            refused_bytes = tried_bytes
    disk_bytes = 0
    with_folder = replace(problem, disk=True)
    placed = zip(found.buckets, found.placements, strict=True)
    may_go = may_go_to_disk(with_folder, found.buckets)
    more = [own for own, home in placed if home.optim is Tier.HOST and own.id in may_go]
    if more and not problem.disk and isinstance(there := answer(search, with_folder), Plan):
        disk_bytes = sum(map(_freed_bytes, more))
        with_params = (own for own in there.buckets if own.trainable and there.placement(own.id).param is Tier.DISK)
        disk_bytes += sum(bucket.home_nbytes for bucket in with_params)
    return NoFeasiblePlan(
        "",
        "",
        problem.host_budget_bytes + problem.host_base_bytes,
        enough_bytes + problem.host_base_bytes,
        {},
        "host",
        disk_bytes,
        staying_bytes=error.staying_bytes,
        micro_batches=problem.micro_batches,
        is_static=problem.fractions is not None,
        beyond=error.beyond,
    )


# ----------------------------------------------------------------------------------------------------------------------
# Make a verified plan for a problem with the planner chosen by the user.
#
#     plan(problem) -> Plan
#
# The choices themselves are made by `best` for the planner `milp`, and by `greedy` for the others.
#
# `largest_feasible` finds the largest batch that any plan can train within the budgets. A larger batch never needs
# fewer bytes, so doubling and bisection find it in 2 log2(batch) trials.


_MANY_BUCKETS, _MANY_CHOICES = 64, 600
"""Above these numbers of buckets, or of levels and modes, the greedy planner is too slow for the first draft plan. On
one core it takes 1 s for 64 buckets, and 60 s for 240; GPT-2 20B on 4 RTX 4090s, with 48 buckets and 1,400 levels and
modes, had no draft plan for 4 s."""


@collector_off()
def plan(problem: Problem, planner: Planner = "milp", timeout_s: float = 10.0) -> Plan:
    """Return the verified plan of `planner` for `problem`.

    The same problem gives the same plan, unless `milp` reaches its limit of `timeout_s` seconds. Raises
    `NoFeasiblePlan` with the smallest budget for which this planner finds a plan.
    """

    def search(variant: Problem) -> Plan:
        clock = Clock()
        larger = with_larger_buckets(variant)
        sizes = [variant] if larger is None else [larger, variant]
        made, refused = _at_first_size(sizes, partial(place, clock=clock))
        # With more memory the larger buckets may fit, and have fewer launches.
        others = [Evaluator(gather_facts(each)) for each in refused]
        return with_gib_bound_of(made, others, deadline_in(1.0)) if others else made

    def place(variant: Problem, clock: Clock) -> Plan:
        evaluator = Evaluator(gather_facts(variant))
        begun = None if variant.start is None else start_draft(evaluator)
        draft = _place(evaluator, planner, timeout_s, clock, begun)
        made = write_out(evaluator, draft)
        may_be_lean = planner == "milp" and not (variant.follows_start and variant.start and not variant.start.lean)
        made = with_lean_calls(evaluator, draft, made, deadline_in(timeout_s)) if may_be_lean else made
        if variant.start is None:
            return made
        return replace(made, decisions=(start_decision(evaluator, begun, draft), *made.decisions))

    def without_solver(variant: Problem) -> Plan:
        """Return the plan of the planner, or that of the first draft plan from which `milp` starts its search."""
        if planner != "milp" or variant.follows_start:
            return place(variant, Clock())
        evaluator = Evaluator(gather_facts(variant))
        _require_minimum(evaluator)
        return write_out(evaluator, _first_draft(evaluator, _quick_draft))

    def search_without_solver(variant: Problem) -> Plan:
        return plan_with_disk(variant, lambda asked: _at_first_size([asked], without_solver)[0])

    try:
        result = plan_with_disk(problem, search)
    except NoFeasiblePlan as error:
        if error.memory != "host":
            raise
        result = answer(search_without_solver, problem)
        if isinstance(result, NoFeasiblePlan):
            raise with_min_host_bytes(problem, error, search_without_solver, timeout_s).renewed() from None
    verify(problem.graph, result)
    return result


def _at_first_size(sizes: Sequence[Problem], place: Callable[[Problem], Plan]) -> tuple[Plan, list[Problem]]:
    """Return the plan of `place` for the first of `sizes` that has one, problems with ever smaller buckets, and those
    that have none; where no other has, the last is tried with the smallest buckets.

    Raises `NoFeasiblePlan` with the smallest budget of all.
    """
    tried, refused, error = [*sizes], list[Problem](), None
    while True:
        asked = tried[len(refused)]
        found = answer(place, asked)
        if not isinstance(found, NoFeasiblePlan):
            return found, refused
        refused.append(asked)
        error = found if error is None else leaner(found, error)
        if len(refused) == len(tried):
            smaller = with_smaller_buckets(asked) if error.memory == "device" else None
            if smaller is None:
                raise error.renewed()
            tried.append(smaller)


def _place(
    evaluator: Evaluator, planner: Planner, timeout_s: float, clock: Clock, begun: DraftPlan | None
) -> DraftPlan:
    """Return the draft plan of `planner`, which is no slower than `begun`, the draft plan at the start of the problem;
    `begun` itself if the problem follows it."""
    if evaluator.facts.problem.follows_start:
        if begun is not None:
            return begun
        _require_minimum(evaluator)
        return _first_draft(evaluator, _quick_draft)
    if planner in RULES:
        if evaluator.facts.problem.fractions is not None:
            raise InvalidOption("planner", planner, '"milp" or "greedy", which keep fractions')
        levels = RULES[planner](evaluator)
        if not evaluator.fits(levels, ahead=0):
            raise _no_plan(evaluator, draft_at_use(evaluator.facts, levels))
        return drafted(evaluator, levels, planner)
    _require_minimum(evaluator)
    first = _first_draft(evaluator, _greedy if planner == "greedy" else _quick_draft)
    kept = Candidate(evaluator.facts.start_levels, evaluator.facts.modes)
    # Where everything fits, buckets move for more than a slightly shorter step: `place_best` weighs that.
    if begun is not None and begun.step_s < first.step_s and first.candidate != kept:
        first = begun
    if planner == "greedy":
        return first
    rules = RULES.values() if evaluator.facts.problem.fractions is None else ()
    others = (Candidate(rule(evaluator), evaluator.facts.modes) for rule in rules)
    others = others if begun is None else itertools.chain([begun.candidate], others)
    return place_best(evaluator, first, others, timeout_s, clock=clock)


def _first_draft(evaluator: Evaluator, place: Callable[[Evaluator], DraftPlan]) -> DraftPlan:
    """Return the draft plan of `place` at the first of the uniform modes at which some levels fit.

    Raises `NoFeasiblePlan` if `place` finds none at any of the uniform modes.
    """
    problem, start = evaluator.facts.problem, evaluator.facts.start_levels
    # The levels of minimum memory take the host bytes of the furthest levels, and more time to find.
    has_room = evaluator.host_bytes(evaluator.facts.furthest_levels) <= problem.host_budget_bytes
    if not has_room and place is _quick_draft and _is_large(evaluator) and not evaluator.fits(start, ahead=0):
        counted = counted_draft(evaluator)
        if counted is not None:
            return counted
    tried: list[Evaluator] = []
    for uniform in uniform_modes(evaluator):
        if uniform.fits(start, ahead=0) or (has_room and uniform.fits(uniform.min_memory_levels, ahead=0)):
            return place(uniform)
        tried.append(uniform)
    # The host has no room for all buckets, but may have room for as many as the device needs moved.
    fit = [(host_floor_bytes(uniform), uniform) for uniform in tried if uniform.floor_bytes <= problem.budget_bytes]
    for host_floor, uniform in fit:
        if host_floor <= problem.host_budget_bytes:
            with contextlib.suppress(NoFeasiblePlan):
                return place(uniform)

    def drafted_host_bytes(draft: DraftPlan) -> int:
        return evaluator.at(draft.modes).host_bytes(draft.levels)

    (_, leanest_host), *others = sorted(fit, key=lambda pair: pair[0])
    best = _fewest_host_bytes(leanest_host)
    for host_floor, uniform in others:
        if host_floor >= drafted_host_bytes(best):
            break
        best = min(best, _fewest_host_bytes(uniform), key=drafted_host_bytes)
    raise _no_plan(evaluator, best)


def _quick_draft(evaluator: Evaluator) -> DraftPlan:
    """Return a draft plan that fits, without a search if all fits in place or if there are many buckets or modes.

    The greedy planner finds a better draft plan, but simulates about as many steps as the square of the buckets.
    """
    facts = evaluator.facts
    if evaluator.fits(facts.start_levels, ahead=0):
        return drafted(evaluator, facts.start_levels, "milp")
    is_large = _is_large(evaluator)
    if is_large and evaluator.fits(evaluator.min_memory_levels, ahead=0):
        return drafted(evaluator, evaluator.min_memory_levels, "milp")
    return _greedy(evaluator, is_fast=is_large)


def _is_large(evaluator: Evaluator) -> bool:
    """Return whether the greedy planner is too slow for a first draft plan."""
    facts = evaluator.facts
    num_choices = sum(map(len, facts.choices)) + sum(len(layer.modes) for layer in facts.layers)
    return len(facts.buckets) > _MANY_BUCKETS or num_choices > _MANY_CHOICES


def _greedy(evaluator: Evaluator, *, is_fast: bool = False) -> DraftPlan:
    # Greedy moves can miss a plan that fits a small host. The second attempt saves host bytes instead of seconds, and
    # simulates no step, so it is also fast for many buckets.
    draft = None if is_fast else place_greedily(evaluator)
    draft = draft or place_greedily(evaluator, spares_host=True) or place_exhaustively(evaluator)
    if draft is None:
        draft = _fewest_host_bytes(evaluator)
        # With modes that need more than the device budget, a draft plan within the host budget does not fit either.
        if not evaluator.fits(draft.levels, ahead=0):
            raise _no_plan(evaluator, draft)
    return draft


def _fewest_host_bytes(evaluator: Evaluator) -> DraftPlan:
    """Return the draft plan with the fewest host bytes found within the device budget, whatever the host budget.

    If none is found, return the draft plan with the smallest peak.
    """
    is_small = len(evaluator.facts.buckets) <= _MANY_BUCKETS
    orders = (True, False) if is_small else (True,)
    found = [place_greedily(evaluator, limits_host=False, spares_host=spares_host) for spares_host in orders]
    drafts = [draft for draft in found if draft is not None]
    smallest = draft_at_use(evaluator.facts, evaluator.min_memory_levels)
    return min(drafts, key=lambda draft: evaluator.host_bytes(draft.levels), default=smallest)


def _require_minimum(evaluator: Evaluator) -> None:
    """Raise NoFeasiblePlan if the device budget is below the smallest peak of each of the uniform modes."""
    smallest = too_large(evaluator)
    if smallest is not None:
        raise _no_plan(smallest, draft_at_use(smallest.facts, smallest.min_memory_levels))


_BEYOND_DDP = (
    "inside DistributedDataParallel parameters and gradients stay on the device, and its buckets are as large again: "
    "elixir_compile.prepare(model, mesh=...) instead of it shares them among the ranks"
)


def _no_plan(evaluator: Evaluator, smallest: DraftPlan) -> NoFeasiblePlan:
    """Return the error that names the bytes of `smallest`: its device bytes if they are over the budget, else its host
    bytes. `smallest` is the draft plan with the fewest bytes."""
    problem = evaluator.facts.problem
    evaluator = evaluator.at(smallest.modes)
    made = write_out(evaluator, smallest)
    peak = plan_timeline(problem.graph, made).peak
    op = next(op for op in evaluator.facts.graph.ops if op.id == peak.op)
    by_kind = {kind.value: nbytes for kind, nbytes in peak.by_kind.items()}
    device_bytes = max(peak.nbytes, evaluator.memory.peak_bytes(smallest.levels, ahead=0))
    homes = (Tier.DEVICE, Tier.HOST) if problem.accumulates else ()
    staying_bytes = {home: made.staying_gradient_bytes(home) for home in homes}
    no_plan = partial(
        NoFeasiblePlan,
        micro_batches=problem.micro_batches,
        is_static=problem.fractions is not None,
        beyond=_BEYOND_DDP if problem.params_stay else "",
    )
    if device_bytes > problem.budget_bytes:
        return no_plan(
            op.id,
            op.source or op.module,
            problem.budget_bytes,
            device_bytes,
            by_kind,
            returned=_returned(evaluator, made, op),
            staying_bytes=staying_bytes.get(Tier.DEVICE, 0),
        )
    budget_bytes = problem.host_budget_bytes + problem.host_base_bytes
    needed_bytes = evaluator.host_bytes(smallest.levels) + problem.host_base_bytes
    # Staying gradients on the device count too: other bytes are on the host in their place.
    return no_plan("", "", budget_bytes, needed_bytes, {}, "host", staying_bytes=sum(staying_bytes.values()))


def _returned(evaluator: Evaluator, made: Plan, op: Op) -> str:
    """Return the name and bytes of an output of the model that is among the three largest storages at `op` under the
    plan `made`, with at least a sixteenth of the peak; empty if none is."""
    graph = evaluator.facts.graph
    live = live_storages(evaluator.facts.problem.graph, made, op.id)
    largest = [storage for storage in live if storage.kind is not Kind.PARAM][:3]
    least_bytes = made.prediction.device_peak_bytes // 16
    returned = (storage for storage in largest if storage.id in graph.outputs and storage.nbytes >= least_bytes)
    found = next(returned, None)
    return "" if found is None else f"{found.id} of {format_bytes(found.nbytes)}"


MAX_BATCH = 1 << 30
"""The largest batch that is tried."""


def is_feasible(problem: Problem) -> bool:
    """Return whether some plan fits both budgets of `problem`.

    The uniform modes decide it if the host can hold all buckets, else the greedy planner, by finding a plan or not.
    """
    evaluator = Evaluator(gather_facts(problem))
    if too_large(evaluator) is not None:
        return False
    if any(uniform.fits(uniform.min_memory_levels, ahead=0) for uniform in uniform_modes(evaluator)):
        return True
    try:
        plan(problem, planner="greedy")
    except NoFeasiblePlan:
        return False
    return True


def largest_feasible(problem_at: Callable[[int], Problem], limit: int = MAX_BATCH) -> int:
    """Return the largest value, at most `limit`, for which `problem_at(value)` has a plan; 0 if 1 has no plan.

    `problem_at` is called once for each value. The bytes of its problems must not decrease with the value.
    """
    low, high = 0, 1
    while high <= limit and is_feasible(problem_at(high)):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if is_feasible(problem_at(middle)):
            low = middle
        else:
            high = middle
    return low
