"""Carry a plan over to another graph of the same model, by the names of its parameters and layers.

Two captures of one model may have other ops: attention runs in another kernel on another device, or in another
implementation. Regions and schedules name ops, so those of a plan are worth nothing there; its choices are worth much:

```text
  of the plan                                            here
  level of each parameter                                a bucket gets the level of most of its bytes
  kept, recomputed or offloaded, by layer and class      a layer gets the mode that treats the fewest bytes otherwise
  micro-batches, chunks of the loss, time of updates     the same
```

If that does not fit the budgets here, activations of single layers are treated by modes with fewer bytes, and then
buckets move further from the device, both one after another and only until the rest fits.

What comes of it is followed without a search, or it is a candidate of the search, as those of the rules are: then the
plan of the search is no slower. `Problem.start` holds the plan, and `Problem.follows_start` says which of both is
asked.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from elixir_compile.base.units import format_s
from elixir_compile.ir import Bucket, Decision, GroupId, Kind, Plan, Saving, StepGraph, StorageId, Tier, Update
from elixir_compile.search.evaluator import Candidate, DraftPlan, Evaluator
from elixir_compile.search.greedy import moved, place_greedily
from elixir_compile.search.outer import decision
from elixir_compile.search.problem import Problem
from elixir_compile.search.space.buckets import Level, level_of
from elixir_compile.search.space.facts import Facts
from elixir_compile.search.space.layers import Layer, saving_of
from elixir_compile.search.space.memory import lowered_modes
from elixir_compile.search.transfers import best_draft
from elixir_compile.step.as_run import laps_at
from elixir_compile.step.divide import micro_batches_of
from elixir_compile.step.legality import other_graph, require_same_model
from elixir_compile.step.liveness import activation_groups

SUBJECT = "plan"
"""The subject of the decision that says what became of the plan that was given."""


def started(problem: Problem, plan: Plan, *, follows: bool, name: str = "") -> Problem:
    """Return `problem` with a start at `plan`, and with its micro-batches, unless the problem has a number already.
    Decisions call the plan `name`, by default by its own name.

    If the problem `follows` the plan, updates are at its time too, unless the problem has one already. Raises
    PlanMismatch, with names, if the plan is for another model: if it has other parameters or layers, trains others, or
    is for batches of another shape.
    """
    graph = problem.graph
    start = _named_as_here(plan, graph)
    require_same_model(start, graph)
    _require_same_shapes(start, graph)
    number = micro_batches_of(start)
    # An attention that mixes the rows of a batch cannot be divided.
    may_divide = problem.micro_batches == 1 and graph.is_training and graph.batch % number == 0
    if number > 1 and may_divide and laps_at(graph, (), number):
        problem = replace(problem, micro_batches=number)
    if follows and problem.update is None and problem.hybrid and start.update is not Update.ACROSS_STEPS:
        on_host = any(home.optim is not Tier.DEVICE for home in start.placements)
        # Without state on the host the planner updates after the backward, whatever the user asked for.
        if on_host or start.update is Update.IN_BACKWARD:
            problem = replace(problem, update=start.update)
    return replace(problem, start=replace(start, name=name or plan.name), follows_start=follows)


def _named_as_here(plan: Plan, graph: StepGraph) -> Plan:
    """Return `plan` with the names of `graph`, if all of its names have a prefix more or less, as those of a model that
    a wrapper holds; else as it is."""
    here = {storage.id for storage in graph.storages if storage.kind is Kind.PARAM}
    planned = {name for bucket in plan.buckets for name in bucket.params}
    if planned == here:
        return plan
    added, removed = _prefix(planned, here), _prefix(here, planned)
    if added is None and removed is None:
        return plan

    def renamed(name: str) -> str:
        return name.removeprefix(removed) if added is None and removed is not None else f"{added}{name}"

    return replace(
        plan,
        buckets=tuple(
            replace(bucket, params=tuple(StorageId(renamed(name)) for name in bucket.params)) for bucket in plan.buckets
        ),
        activations=tuple(replace(group, id=GroupId(renamed(group.id))) for group in plan.activations),
    )


def _prefix(short: set[StorageId], long: set[StorageId]) -> str | None:
    """Return the prefix, up to a dot, with which the names `short` are the names `long`; None if there is none.

    There is one at most: with it, all names together have the characters of `long`.
    """
    first = max(short, key=len, default=None)
    if first is None or len(short) != len(long):
        return None
    prefixes = {name.removesuffix(first) for name in long if name.endswith(f".{first}")}
    return next((prefix for prefix in prefixes if {f"{prefix}{name}" for name in short} == long), None)


def _require_same_shapes(start: Plan, graph: StepGraph) -> None:
    """Raise PlanMismatch if no group of activations of `start` has as many bytes in `graph`.

    Another attention changes the bytes of some groups, another batch or length those of all. The groups of a plan that
    keeps all are not known, and nothing in it depends on them; with symbolic sizes, the numbers say nothing.
    """
    here = {group.id: group.nbytes for group in activation_groups(graph)}
    known = [group for group in start.activations if group.id in here]
    if known and not start.symbols and all(here[group.id] != group.nbytes for group in known):
        group = max(known, key=lambda group: group.nbytes)
        raise other_graph(
            start,
            graph,
            f"All groups of activations have other bytes, as {group.id} with {group.nbytes} in the plan and "
            f"{here[group.id]} here, so the batch has another shape: only plans for the same rows and lengths can be "
            "carried over",
        )


def start_of(facts: Facts) -> Candidate:
    """Return the levels and the modes of the plan at which the problem of `facts` starts, by the names of its graph."""
    start = facts.problem.start
    assert start is not None, "only a problem with a start has its levels and modes"
    level_by_param = {
        name: level_of(home)
        for bucket, home in zip(start.buckets, start.placements, strict=True)
        for name in bucket.params
    }
    nbytes = {storage.id: storage.nbytes for storage in facts.graph.storages if storage.kind is Kind.PARAM}

    def level(bucket: Bucket, levels: Sequence[Level]) -> Level:
        held: Counter[Level] = Counter()
        for name in bucket.params:
            if name in level_by_param:  # a bucket in force may hold parameters that the graph does not read
                held[level_by_param[name]] += nbytes.get(name, 0)
        wanted = max(held, key=lambda level: (held[level], level), default=levels[0])
        # The nearest level that is as far from the device; none if the optimizer keeps the state with its parameter.
        return next((level for level in levels if level >= wanted), levels[-1])

    savings = {group.id: group.saving for group in start.activations}
    return Candidate(
        levels=tuple(map(level, facts.buckets, facts.choices)),
        modes=tuple(_mode_like(layer, savings) for layer in facts.layers),
    )


def _mode_like(layer: Layer, savings: dict[GroupId, Saving]) -> int:
    """Return the mode of `layer` that treats the fewest bytes otherwise than `savings`: of equal ones, the first, which
    moves the least. Groups that the plan has not, as those of another attention, do not count."""
    known = [group for group in layer.groups if group.id in savings]

    def otherwise_bytes(mode: int) -> int:
        found = ((group, saving_of(group, layer.modes[mode]) or Saving.KEEP) for group in known)
        return sum(group.nbytes for group, saving in found if saving is not savings[group.id])

    return min(range(len(layer.modes)), key=otherwise_bytes) if known else 0


def start_draft(evaluator: Evaluator) -> DraftPlan | None:
    """Return the draft plan of the start of the problem, with as few changes as make it fit; None if none do."""
    facts = evaluator.facts
    levels, modes = start_of(facts)
    at = _fitting(evaluator, levels, modes)
    fits = at.fits(levels, ahead=0)
    draft = best_draft(at, levels) if fits else place_greedily(at, start=levels, spares_host=True)
    if draft is None or not facts.problem.follows_start:
        return draft
    start = facts.problem.start
    assert start is not None, "the levels above are those of the start"
    reasons = moved(facts, draft.candidate.options, f"so is it in {start.name}, or with the changes that make it fit")
    return replace(draft, decisions=reasons, planner=start.planner)


def _fitting(evaluator: Evaluator, levels: Sequence[Level], modes: tuple[int, ...]) -> Evaluator:
    """Return the evaluator at `modes`, or with other modes of as few layers as make `levels` fit the device; if no
    modes do, at those with the fewest bytes found."""
    enough_bytes = budget_bytes = evaluator.facts.problem.budget_bytes
    kept = evaluator.at([0] * len(modes)).facts
    at = evaluator.at(modes)
    # `lowered_modes` adds up the bytes of single layers. The step that has all of them may take others.
    while (over_bytes := at.memory.peak_bytes(levels, ahead=0) - budget_bytes) > 0:
        enough_bytes -= over_bytes if at.facts.modes != modes else 0
        lower = lowered_modes(kept, evaluator.profiles, at.facts.modes, levels, enough_bytes)
        if lower == at.facts.modes:
            break
        at = evaluator.at(lower)
    return at


def start_decision(evaluator: Evaluator, begun: DraftPlan | None, draft: DraftPlan) -> Decision:
    """Return the decision that says how `draft` comes from `begun`, the draft plan at the start of the problem: by
    following it, or by a search. `begun` is None if no changes make the start fit."""
    facts, problem = evaluator.facts, evaluator.facts.problem
    start = problem.start
    assert start is not None, "only a plan with a start has this decision"
    origin = f"it was made for {start.cluster} and graph {start.graph}"
    changes = list(_changes(facts, start_of(facts), draft.candidate if begun is None else begun.candidate))
    if problem.follows_start:
        return decision(SUBJECT, f"follows {start.name}", origin, *changes)
    found = "no changes of single layers and buckets make it fit"
    if begun is not None:
        saved_s = begun.step_s - draft.step_s
        shorter = f"the search found a step that is {format_s(saved_s)} shorter"
        found = "; ".join((*changes, shorter if saved_s > 0 else "the search found no shorter step"))
    return decision(SUBJECT, f"starts from {start.name}", origin, found)


def _changes(facts: Facts, wanted: Candidate, now: Candidate) -> Iterator[str]:
    """Yield how many buckets and layers are as `wanted`, and how many were changed so that all fits."""

    def text(name: str, before: Sequence[int], after: Sequence[int], change: Callable[[int], str]) -> str:
        changed = sum(one != other for one, other in zip(before, after, strict=True))
        own = f"{len(before) - changed} of {len(before)} {name} as in it"
        return f"{own}, {change(changed)}" if changed else own

    yield text("buckets", wanted.levels, now.levels, lambda number: f"{number} moved further so that it fits")
    if facts.layers:
        yield text("layers", wanted.modes, now.modes, lambda number: f"{number} with fewer bytes so that it fits")
