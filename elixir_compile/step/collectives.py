"""The collectives of a plan, in the order in which its schedule issues them: one order on all ranks, or they wait for
each other forever.

```text
  gather b1        an all-gather of the shards of b1; a bucket that is not sharded is copied by each rank for itself
  reduce b1        a reduce-scatter of the gradients of b1; an all-reduce if the bucket is not sharded
```
"""

from typing import NamedTuple

from elixir_compile.ir import Action, BucketId, BucketRef, Plan, Verb


class Collective(NamedTuple):
    """A gather or a reduce of a bucket by all ranks."""

    verb: Verb
    bucket: BucketId

    def __str__(self) -> str:
        return f"{self.verb} {self.bucket}"


def collective_of(action: Action, sharded: frozenset[BucketId]) -> Collective | None:
    """Return the collective that `action` issues if the buckets `sharded` are sharded; None if it issues none."""
    if not isinstance(action.target, BucketRef):
        return None
    is_one = action.verb is Verb.REDUCE or (action.verb is Verb.GATHER and action.target.bucket in sharded)
    return Collective(action.verb, action.target.bucket) if is_one else None


def sharded_buckets(plan: Plan) -> frozenset[BucketId]:
    """Return the buckets of `plan` that are sharded over ranks."""
    return frozenset(bucket.id for bucket in plan.buckets if bucket.is_sharded)


def collectives_of(plan: Plan) -> tuple[Collective, ...]:
    """Return the collectives of `plan` in the order of its schedule, if several ranks run it."""
    sharded = sharded_buckets(plan)
    found = (collective_of(action, sharded) for action in plan.schedules[0].actions)
    return tuple(collective for collective in found if collective is not None)
