"""Where in the backward each bucket may be updated, before the backward ends.

```text
  reduce b1   offload b1.grad   run ...                    OFFLOAD: the gradient leaves, nothing reads b1 after
  reduce b2   offload b2.grad   gather b2   run   release  RELEASE: the gradient of what came before still reads b2
```
"""

from collections.abc import Iterable, Mapping, Sequence

from elixir_compile.ir import BucketId, Placement, Plan, RegionId, Tier, Verb, grad_of


def closing_verbs(plan: Plan, rank: int = 0) -> Mapping[BucketId, Verb]:
    """Return the last thing that the program does to each bucket: REDUCE of parameters on the device, OFFLOAD of their
    gradient, or the one RELEASE behind it. Buckets that are read after that are left out."""
    actions = ((action.verb, action.what) for action in plan.schedules[rank].actions)
    return closing_of(actions, {region.id: region.buckets for region in plan.regions}, plan.placements)


def closing_of(
    actions: Iterable[tuple[Verb, str]],
    regions: Mapping[RegionId, Sequence[BucketId]],
    placements: Iterable[Placement],
) -> Mapping[BucketId, Verb]:
    """Return the same of a program of (verb, what) pairs whose `regions` read these buckets."""
    landings = {
        (Verb.REDUCE, placed.bucket)
        if placed.param is Tier.DEVICE
        else (Verb.OFFLOAD, grad_of(placed.bucket)): placed.bucket
        for placed in placements
    }
    closing: dict[BucketId, Verb] = {}
    reduced: set[BucketId] = set()
    reread: set[BucketId] = set()
    banned: set[BucketId] = set()
    for verb, what in actions:
        bucket = BucketId(what)
        if verb is Verb.RUN:
            reread.update(read for read in regions[RegionId(what)] if read in reduced)
        elif verb is Verb.RELEASE and bucket in reduced:
            is_first = closing.pop(bucket, None) is Verb.OFFLOAD
            if is_first:
                closing[bucket] = Verb.RELEASE
                reread.discard(bucket)
            else:
                banned.add(bucket)
        if verb is Verb.REDUCE:
            reduced.add(bucket)
        if (verb, what) in landings:
            closing[landings[verb, what]] = verb
    return {bucket: verb for bucket, verb in closing.items() if bucket not in reread | banned}
