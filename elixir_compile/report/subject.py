"""Find the buckets, activations or region of a plan under a name that a user asks about, and their moves."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from elixir_compile.errors import UnknownSubject
from elixir_compile.ir.bucket import Activations, Bucket
from elixir_compile.ir.kinds import StorageId, Verb
from elixir_compile.ir.plan import Plan
from elixir_compile.ir.schedule import Action, Region, RegionRef, Target

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


def moves_of(plan: Plan, targets: Collection[Target]) -> tuple[Move, ...]:
    """Return the actions on `targets`, in order. A wait counts to its copy and is not listed."""
    actions = actions_of(plan)
    moves: list[Move] = []
    last = ""
    for at, action in enumerate(actions):
        if isinstance(action.target, RegionRef):
            last = action.target.region
        elif action.target in targets and action.verb is not Verb.WAIT:
            end = _wait_index(actions, at) if action.verb in _COPIES else at
            num_ahead = sum(between.verb is Verb.RUN for between in actions[at:end])
            region = _next_run(actions[end:]) if action.verb in _BROUGHT else last
            moves.append(Move(verb=action.verb, region=region, num_ahead=num_ahead))
    return tuple(moves)


def _wait_index(actions: Sequence[Action], start: int) -> int:
    wait = Action(verb=Verb.WAIT, target=actions[start].target)
    return next((at for at in range(start, len(actions)) if actions[at] == wait), start)


def _next_run(actions: Sequence[Action]) -> str:
    return next((action.target.region for action in actions if isinstance(action.target, RegionRef)), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The buckets, activations or region under a name in a plan."""

    name: str
    buckets: tuple[Bucket, ...] = ()
    params: frozenset[StorageId] = frozenset()
    """The parameters under the name, if it is the name of a parameter or a module."""
    groups: tuple[Activations, ...] = ()
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
    groups = tuple(group for group in plan.activations if _has_parts(group.id, name))
    if not found and not groups:
        raise UnknownSubject(name, _names(plan))
    buckets = tuple(bucket for bucket in plan.buckets if not found.isdisjoint(bucket.params))
    return Subject(name=name, buckets=buckets, params=found, groups=groups)


def _has_parts(path: str, name: str) -> bool:
    return f".{name}." in f".{path}."


def _names(plan: Plan) -> list[str]:
    """Return all names that `find_subject` knows: ids, paths of parameters and activations, and parts of paths."""
    names: dict[str, None] = dict.fromkeys([bucket.id for bucket in plan.buckets])
    names |= dict.fromkeys([region.id for region in plan.regions])
    params = [param for bucket in plan.buckets for param in bucket.params]
    for path in (*params, *(group.id for group in plan.activations)):
        parts = path.split(".")
        for start in range(len(parts)):
            names |= dict.fromkeys(".".join(parts[start:end]) for end in range(start + 1, len(parts) + 1))
    return list(names)
