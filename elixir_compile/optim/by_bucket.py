"""Find the running bucket and the executor of each parameter, by the slot of the parameter."""

from collections.abc import Iterable

import torch
from torch import nn

from elixir_compile.ops.registry import slot_of
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


def group_by_bucket(
    params: Iterable[nn.Parameter],
) -> tuple[dict[RunningBucket, list[nn.Parameter]], list[nn.Parameter], dict[RunningBucket, Executor]]:
    """Return `params` by bucket, the parameters without a bucket, and the executor of each bucket."""
    buckets: dict[RunningBucket, list[nn.Parameter]] = {}
    unplanned: list[nn.Parameter] = []
    executors: dict[RunningBucket, Executor] = {}
    for param in params:
        found = bucket_of(param)
        if found is None:
            unplanned.append(param)
        else:
            buckets.setdefault(found[0], []).append(param)
            executors[found[0]] = found[1]
    return buckets, unplanned, executors
