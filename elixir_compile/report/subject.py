"""A name that somebody asks about -> the buckets, the activations or the region of a plan that it names."""

from dataclasses import dataclass

from elixir_compile.errors import UnknownSubject
from elixir_compile.ir.activation import Activations
from elixir_compile.ir.bucket import Bucket
from elixir_compile.ir.kinds import StorageId
from elixir_compile.ir.plan import Plan
from elixir_compile.ir.schedule import Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What one name stands for in one plan."""

    name: str
    buckets: tuple[Bucket, ...] = ()
    params: frozenset[StorageId] = frozenset()
    """The parameters that were asked about, where the name is that of a parameter or a module."""
    groups: tuple[Activations, ...] = ()
    region: Region | None = None


def find_subject(plan: Plan, name: str) -> Subject:
    """Return what `name` stands for: a bucket, a region, or whole parts of the path of parameters and activations.

    `layers.3` finds `model.layers.3.mlp.weight` and the activations `model.layers.3.matmul`, and not
    `model.layers.30.mlp.weight`. Raises `UnknownSubject`.
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
    """All that can be asked about: ids, paths of parameters and of activations, and every run of parts of a path."""
    names: dict[str, None] = dict.fromkeys([bucket.id for bucket in plan.buckets])
    names |= dict.fromkeys([region.id for region in plan.regions])
    params = [param for bucket in plan.buckets for param in bucket.params]
    for path in (*params, *(group.id for group in plan.activations)):
        parts = path.split(".")
        for start in range(len(parts)):
            names |= dict.fromkeys(".".join(parts[start:end]) for end in range(start + 1, len(parts) + 1))
    return list(names)
