"""What the plan in force says about a parameter."""

import torch

from elixir_compile.graph.ops.registry import slot_of
from elixir_compile.ir import Bucket
from elixir_compile.runtime.bucket import RunningBucket
from elixir_compile.runtime.executor import Executor, executor_of_slot


def bucket_of(param: torch.Tensor) -> "tuple[RunningBucket, Executor] | None":
    """Return the bucket of `param` in the active plan and its executor; None if no plan has the parameter."""
    slot = slot_of(param)
    if slot is None:
        return None
    executor = executor_of_slot(slot)
    bucket = executor.buckets.of(slot)
    return None if bucket is None else (bucket, executor)


def planned_spec(param: torch.Tensor) -> Bucket | None:
    """Return the bucket of `param` as the active plan describes it; None if no plan has the parameter."""
    found = bucket_of(param)
    return None if found is None else found[0].spec
