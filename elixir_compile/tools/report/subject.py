"""Find the buckets, activations or region of a plan under a name that a user asks about, and their moves."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from elixir_compile.base.errors import UnknownSubject
from elixir_compile.ir.bucket import Activations, Bucket
from elixir_compile.ir.kinds import GroupId, RegionId, StorageId, Verb
from elixir_compile.ir.plan import Plan
from elixir_compile.ir.schedule import Action, GroupRef, Region, RegionRef, Target, label

_COPIES = (Verb.GATHER, Verb.OFFLOAD, Verb.PREFETCH)
_BROUGHT = (Verb.GATHER, Verb.PREFETCH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """An action on a bucket, its gradient or a group of activations, and its place in the step."""

    verb: Verb
    region: str
    """For a gather or a prefetch the next region after its wait, else the last region before; empty if there is
    none."""
    num_ahead: int = 0
    """Number of regions between the start of a copy and its wait."""


def actions_of(plan: Plan) -> tuple[Action, ...]:
    """Return the actions of the first rank; all ranks have the same."""
    return plan.schedules[0].actions if plan.schedules else ()


class PlanMoves:
    """The moves of a plan by their target, collected in one pass over its actions."""

    def __init__(self, plan: Plan) -> None:
        self._of: dict[Target, list[tuple[int, Move]]] = {}
        self._groups: dict[tuple[Verb, str], set[GroupId]] = {}
        actions = actions_of(plan)
        ends, following = _ahead(actions)
        num_run = [0, *itertools.accumulate(action.verb is Verb.RUN for action in actions)]
        last = ""
        for at, action in enumerate(actions):
            verb, target, end = action.verb, action.target, ends[at]
            if isinstance(target, RegionRef):
                last = target.region
            elif verb is not Verb.WAIT:
                region = following[end] if verb in _BROUGHT else last
                move = Move(verb=verb, region=region, num_ahead=num_run[end] - num_run[at])
                self._of.setdefault(target, []).append((at, move))
                if isinstance(target, GroupRef):
                    self._groups.setdefault((verb, region), set()).add(target.group)

    def of(self, *targets: Target) -> tuple[Move, ...]:
        """Return the actions on `targets`, in order. A wait counts to its copy and is not listed."""
        found = [place for target in targets for place in self._of.get(target, ())]
        return tuple(move for _, move in sorted(found, key=lambda place: place[0]))

    def groups_at(self, region: str, verb: Verb) -> Collection[GroupId]:
        """Return the groups of activations with a move of `verb` at `region`."""
        return self._groups.get((verb, region), ())


def _ahead(actions: Sequence[Action]) -> tuple[list[int], list[str]]:
    """Return for each action the index of the wait for its copy, else its own, and the region that runs next."""
    ends, following = list(range(len(actions))), [""] * len(actions)
    waits: dict[Target, int] = {}
    region = ""
    for at in reversed(range(len(actions))):
        action = actions[at]
        if isinstance(action.target, RegionRef):
            region = action.target.region
        elif action.verb is Verb.WAIT:
            waits[action.target] = at
        elif action.verb in _COPIES:
            ends[at] = waits.get(action.target, at)
        following[at] = region
    return ends, following


def waiting_regions(plan: Plan) -> Mapping[str, tuple[str, ...]]:
    """Return, by the label of a copy, the label of the region that runs next after the wait for it, for each time that
    the plan makes the copy, in order. A copy without a wait, or with no region behind it, is left out."""
    actions = actions_of(plan)
    ends, following = _ahead(actions)
    found: dict[str, list[str]] = {}
    for at, action in enumerate(actions):
        if action.verb in _COPIES and ends[at] != at and following[ends[at]]:
            region = RegionRef(region=RegionId(following[ends[at]]))
            found.setdefault(label(action.verb, action.target), []).append(label(Verb.RUN, region))
    return {name: tuple(regions) for name, regions in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The buckets, activations or region under a name in a plan."""

    name: str
    buckets: tuple[Bucket, ...] = ()
    params: frozenset[StorageId] = frozenset()
    """The parameters under the name, if it is the name of a parameter or a module."""
    groups: tuple[Activations, ...] = ()
    lean_groups: tuple[Activations, ...] = ()
    """Groups of lean calls."""
    region: Region | None = None


def find_subject(plan: Plan, name: str) -> Subject:
    """Return the bucket or the region `name`, or the parameters and activations with `name` in their paths.

    `layers.3` finds `model.layers.3.mlp.weight` and the activations `model.layers.3.matmul`, but not
    `model.layers.30.mlp.weight`. Raises UnknownSubject if nothing is found.
    """
    for bucket in plan.buckets:
        if bucket.id == name:
            return Subject(name=name, buckets=(bucket,))
    for region in plan.regions:
        if region.id == name:
            return Subject(name=name, region=region)
    found = frozenset(param for bucket in plan.buckets for param in bucket.params if _has_parts(param, name))
    lean = () if plan.lean is None else plan.lean.activations
    groups, lean_groups = (
        tuple(own for own in activations if _has_parts(own.id, name)) for activations in (plan.activations, lean)
    )
    if not found and not groups and not lean_groups:
        raise UnknownSubject(name, _names(plan))
    buckets = tuple(bucket for bucket in plan.buckets if not found.isdisjoint(bucket.params))
    return Subject(name=name, buckets=buckets, params=found, groups=groups, lean_groups=lean_groups)


def _has_parts(path: str, name: str) -> bool:
    return f".{name}." in f".{path}."


def _names(plan: Plan) -> list[str]:
    """Return all names that `find_subject` knows: ids, paths of parameters and activations, and parts of paths."""
    names: dict[str, None] = dict.fromkeys([bucket.id for bucket in plan.buckets])
    names |= dict.fromkeys([region.id for region in plan.regions])
    params = [param for bucket in plan.buckets for param in bucket.params]
    lean = () if plan.lean is None else plan.lean.activations
    for path in (*params, *(group.id for group in (*plan.activations, *lean))):
        parts = path.split(".")
        for start in range(len(parts)):
            names |= dict.fromkeys(".".join(parts[start:end]) for end in range(start + 1, len(parts) + 1))
    return list(names)
