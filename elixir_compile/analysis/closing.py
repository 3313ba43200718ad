"""Where in the backward each bucket may be updated, before the backward ends.

```text
  reduce b1   offload b1.grad   run ...                    OFFLOAD: the gradient leaves, nothing reads b1 after
  reduce b2   offload b2.grad   gather b2   run   release  RELEASE: the gradient of what came before still reads b2
```
"""

from collections.abc import Mapping

from elixir_compile.ir import BucketId, Plan, RegionId, Tier, Verb, grad_of


def closing_verbs(plan: Plan, rank: int = 0) -> Mapping[BucketId, Verb]:
    """Return the last thing that the program does to each bucket: REDUCE of parameters on the device, OFFLOAD of their
    gradient, or the one RELEASE behind it. Buckets that are read after that are left out."""
    regions = {region.id: region.buckets for region in plan.regions}
    landings = {
        (Verb.REDUCE, bucket.id) if placement.param is Tier.DEVICE else (Verb.OFFLOAD, grad_of(bucket.id)): bucket.id
        for bucket, placement in zip(plan.buckets, plan.placements, strict=True)
    }
    closing: dict[BucketId, Verb] = {}
    reduced: set[BucketId] = set()
    reread: set[BucketId] = set()
    banned: set[BucketId] = set()
    for action in plan.schedules[rank].actions:
        bucket = BucketId(action.what)
        if action.verb is Verb.RUN:
            reread.update(read for read in regions[RegionId(action.what)] if read in reduced)
        elif action.verb is Verb.RELEASE and bucket in reduced:
            is_first = closing.pop(bucket, None) is Verb.OFFLOAD
            if is_first:
                closing[bucket] = Verb.RELEASE
                reread.discard(bucket)
            else:
                banned.add(bucket)
        if action.verb is Verb.REDUCE:
            reduced.add(bucket)
        if (action.verb, action.what) in landings:
            closing[landings[action.verb, action.what]] = action.verb
    return {bucket: verb for bucket, verb in closing.items() if bucket not in reread | banned}
