"""The bucket of an executor for a bucket of a plan: complete on each rank, in equal shards, or in unequal ones."""

from collections.abc import Sequence

from elixir_compile.graph.ops.portion import rows_of
from elixir_compile.graph.ops.registry import Slot
from elixir_compile.ir import Bucket, Placement
from elixir_compile.runtime.bucket import RunningBucket
from elixir_compile.runtime.distributed.ranks import Ranks
from elixir_compile.runtime.distributed.sharded import ShardedBucket
from elixir_compile.runtime.distributed.uneven import UnevenBucket


def new_bucket(
    spec: Bucket, placement: Placement, slots: Sequence[Slot], *, pin: bool, ranks: Ranks | None
) -> RunningBucket:
    """Return a bucket for `spec`, before its first `move_home`; `ranks` is None if a single rank trains the model."""
    if not spec.is_sharded:
        return RunningBucket(spec, placement, slots, pin=pin)
    assert ranks is not None, "one rank alone has no sharded buckets"
    is_uneven = any(rows_of(slot.param) is not None for slot in slots)
    kind = UnevenBucket if is_uneven else ShardedBucket
    return kind(spec, placement, slots, pin=pin, ranks=ranks)
